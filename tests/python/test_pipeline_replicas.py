"""Stages with data-parallel replicas: reduced once a step, equal to one process, in float64."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.pipeline import PipelineSchedule, PipelineStage, get_schedule_class
from pycomm.pipeline.replicas import wrappers_of
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.order import Order, parse
from pycomm.pipeline.schedule.picture import text
from pycomm.pipeline.schedule.reductions import reduced, with_reductions
from pycomm.pipeline.schedule.simulate import Costs, simulate
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import verify
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(300)
F64 = torch.float64


# ---- as data ---------------------------------------------------------------------------------------------


def test_every_schedule_reduces_each_stage_once_behind_its_last_backward():
    for name in CATALOG:
        for p, m in ((1, 1), (2, 3), (3, 8), (4, 4)):
            plain = build(name, p, m)
            order = with_reductions(plain)
            verify(order)
            for actions in order.actions:
                kinds = [a.kind for a in actions]
                for i, action in enumerate(actions):
                    if action.kind == "REDUCE_GRAD":
                        later = [a for a in actions[i + 1 :] if a.stage == action.stage]
                        assert later == [] and kinds[i - 1] in ("B", "W", "REDUCE_GRAD")
            assert reduced(order) == list(range(plain.n_stages))
            assert with_reductions(order) == order
            assert Order.from_csv(order.to_csv(), order.name) == order
            # Sends and receives stay as they were, and in their order.
            for with_, without in zip(with_transfers(order), with_transfers(plain), strict=True):
                assert [a for a in with_ if a.kind != "REDUCE_GRAD"] == without
    assert [str(a) for a in with_reductions(build("1F1B", 2, 1), [1]).actions[1]] == [
        "1F0",
        "1B0",
        "1REDUCE_GRAD",
    ]
    assert Action.parse("12REDUCE_GRAD") == Action.reduce(12)
    together = with_reductions(build("ZBVZeroBubble", 2, 2), [0, 3], [[0, 3]])
    assert [str(a) for a in together.actions[0][-2:]] == ["3REDUCE_GRAD", "0REDUCE_GRAD"]


def test_a_reduction_too_early_or_twice_is_refused():
    with pytest.raises(ValueError, match=r"rank 0 at 0REDUCE_GRAD \(its action 3\) waits for 0B1 of rank 0"):
        verify(Order.from_actions([parse("0F0 0F1 0B0 0REDUCE_GRAD 0B1")]))
    with pytest.raises(ValueError, match="stage 0: expected one REDUCE_GRAD, or none; there are 2"):
        verify(Order.from_actions([parse("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD")]))
    with pytest.raises(ValueError, match="is no action"):
        Action.parse("3REDUCE_GRAD5")


def test_a_reduction_runs_beside_what_follows():
    order = with_reductions(build("Interleaved1F1B", 2, 2, 2))
    alone = simulate(build("Interleaved1F1B", 2, 2, 2)).makespan
    [first, last] = simulate(order, Costs(reduce=1.5)).reductions[0]
    # Stage 2's is over before stage 0's begins behind the last backward.
    assert (str(first.action), first.end - first.start) == ("2REDUCE_GRAD", 1.5)
    assert last.start == alone and simulate(order, Costs(reduce=1.5)).makespan == alone + 1.5
    # One after the other: a long first one holds the second one up.
    [first, last] = simulate(order, Costs(reduce=[1.0, 1.0, 100.0, 1.0])).reductions[0]
    assert last.start == first.end
    assert text(simulate(with_reductions(build("1F1B", 2, 2)), Costs(1, 0.5, 0.5, reduce=2))) == (
        "F0 F1 .  B0 .  B1 .  .\n                  R  -\n.  F0 B0 F1 B1 .  .  .\n               R  -"
    )


# ---- for real --------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Uses ``rare`` only where the first input of a microbatch is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        y = torch.tanh(self.often(x)) + self.frozen(x)
        return y + self.rare(x) if x[0, 0] > 0 else y


def stages_of(n: int) -> nn.ModuleList:
    torch.manual_seed(2)
    return nn.ModuleList([Sometimes() for _ in range(n)]).double()


def batch(step: int, n: int) -> torch.Tensor:
    return torch.randn(n, 4, dtype=F64, generator=torch.Generator().manual_seed(step))


def one_process(whole: nn.ModuleList, x: torch.Tensor, n_replicas: int, m: int) -> torch.Tensor:
    """Microbatch by microbatch, since what a stage does depends on the microbatch."""
    outputs = []
    for chunk in (c for part in x.chunk(n_replicas) for c in part.tensor_split(m)):
        for stage in whole:
            chunk = stage(chunk)
        outputs.append(chunk)
    return nn.functional.mse_loss(torch.cat(outputs), x)


def same_gradients(parts, whole, where) -> None:
    for s, part in parts.items():
        for (name, p), q in zip(part.named_parameters(), whole[s].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (where, s, name)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=0, msg=f"{where} {s} {name}")


def meshed(rank: int, size: int) -> tuple[pycomm.Communicator, pycomm.Communicator]:
    """(of the pipeline, of the replicas): ranks 0, 1 are the pipelines' first."""
    comm = pycomm.init()
    return comm.split(rank % 2), comm.split(rank // 2)


def replicated(rank, size, names):
    pipe, replicas = meshed(rank, size)
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        order = build(name, 2, 3, v)
        whole = stages_of(2 * v)
        parts = {s: copy.deepcopy(whole[s]) for s in order.stages_of(pipe.rank)}
        wrapped = {
            s: pycomm.DistributedDataParallel(part, communicator=replicas, find_unused_parameters=True)
            for s, part in parts.items()
        }
        schedule = get_schedule_class(name)(
            [PipelineStage(w, s, 2 * v, group=pipe) for s, w in wrapped.items()],
            3,
            loss_fn=nn.functional.mse_loss,
            loss_on_all_ranks=True,
        )
        for step in range(3):
            x = batch(step, 12)
            mine = x.chunk(replicas.size)[replicas.rank]
            if step == 1:  # accumulated without being averaged
                for w in wrapped.values():
                    w.require_backward_grad_sync = False
            schedule.step(mine, target=mine)
            for w in wrapped.values():
                w.require_backward_grad_sync = True
            one_process(whole, x, replicas.size, 3).backward()
            if step != 1:
                same_gradients(parts, whole, (name, step))
        assert reduced(schedule.order) == list(range(2 * v))
        with torch.no_grad():
            found = schedule.eval(batch(9, 3))
            assert found is None or found.shape == (3, 4)


def test_every_schedule_with_replicas_has_one_process_gradients():
    run_ranks(4, replicated, list(CATALOG), timeout=200)


def wrapping(rank, size):
    """torch's own wrapper, a hook, buffers, what is wrapped late: one cut each."""
    with world(rank, size):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pipe, replicas = mesh["pp"], mesh.get_group("dp")
        at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

        def schedule_of(name, wrap):
            order = build(name, 2, 3)
            whole = stages_of(order.n_stages)
            parts = {s: copy.deepcopy(whole[s]) for s in order.stages_of(at)}
            stages = [PipelineStage(wrap(p), s, order.n_stages, group=pipe) for s, p in parts.items()]
            made = get_schedule_class(name)(stages, 3, loss_fn=nn.functional.mse_loss)
            return made, parts, whole

        def torchs_own(module):
            return nn.parallel.DistributedDataParallel(
                module, process_group=replicas, find_unused_parameters=True
            )

        def hooked(module):
            ddp = pycomm.DistributedDataParallel(
                module, process_group=replicas, find_unused_parameters=True, bucket_cap_mb=1e-4
            )
            ddp.register_comm_hook(calls, counting)
            return nn.Sequential(ddp)  # within the stage's module

        calls: list[int] = []

        def counting(state, bucket):
            state.append(bucket.index())
            mean = bucket.buffer() / dist.get_world_size(replicas)
            return (
                dist.all_reduce(mean, group=replicas, async_op=True).get_future().then(lambda f: f.value()[0])
            )

        for name, wrap in (("1F1B", torchs_own), ("ZBVZeroBubble", torchs_own), ("ZBVZeroBubble", hooked)):
            schedule, parts, whole = schedule_of(name, wrap)
            for step in range(2):
                x = batch(step, 12)
                mine = x.chunk(2)[replica]
                calls.clear()
                schedule.step(mine, target=mine)
                one_process(whole, x, 2, 3).backward()
                same_gradients(parts, whole, (name, wrap, step))
            if wrap is hooked:  # each bucket once, not once for each microbatch
                assert len(calls) == sum(
                    len(w.buckets) for stage in schedule.stages for w in wrappers_of(stage.submod)
                )

        def with_hook(module):
            wrapped = torchs_own(module)
            wrapped.register_comm_hook(None, counting)
            return wrapped

        with pytest.raises(ValueError, match="torch's DistributedDataParallel with a communication hook"):
            schedule_of("1F1B", with_hook)
        with pytest.raises(ValueError, match=r"reduces the gradients of stage \d, whose module is in no"):
            own = with_reductions(build("1F1B", 2, 3))
            PipelineSchedule(PipelineStage(nn.Linear(1, 1), at, 2, group=pipe), 3, order=own)
        # Wrapped when the schedule has begun.
        late = nn.Sequential(nn.Linear(4, 4))
        schedule = get_schedule_class("1F1B")(
            PipelineStage(late, at, 2, group=pipe), 3, loss_fn=nn.functional.mse_loss
        )
        x = batch(0, 3).float()
        schedule.step(x, target=x)
        late[0] = pycomm.DistributedDataParallel(late[0], process_group=replicas)
        with pytest.raises(RuntimeError, match="wrap modules before the schedule's first step"):
            schedule.step(x, target=x)


def test_torchs_wrapper_hooks_and_what_is_refused():
    run_ranks(4, wrapping, timeout=200)


class Counting(nn.Module):
    """A buffer that every forward changes; rank 0's is given to all before a step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().sum().float()
        return self.layer(x)


def sharing(rank, size):
    """Both ends of a V on rank 0 share a weight; every stage has a buffer."""
    pipe, replicas = meshed(rank, size)
    torch.manual_seed(1)
    whole = nn.ModuleList(Counting() for _ in range(4)).double()
    whole[3].layer.weight = whole[0].layer.weight
    mine = copy.deepcopy(whole)
    order = build("ZBVZeroBubble", 2, 2)
    wrapped = {
        s: pycomm.DistributedDataParallel(mine[s], communicator=replicas) for s in order.stages_of(pipe.rank)
    }
    schedule = get_schedule_class("ZBVZeroBubble")(
        [PipelineStage(w, s, 4, group=pipe) for s, w in wrapped.items()], 2, loss_fn=nn.functional.mse_loss
    )
    if pipe.rank == 0:  # neither is complete before both are
        assert [str(a) for a in schedule.order.actions[0][-2:]] == ["3REDUCE_GRAD", "0REDUCE_GRAD"]
    seen = 0.0
    for step in range(2):
        x = batch(step, 8)
        part = x.chunk(2)[replicas.rank]
        schedule.step(part, target=part)
        y = x
        for stage in whole:
            y = stage(y)
        nn.functional.mse_loss(y, x).backward()
        same_gradients({s: mine[s] for s in wrapped}, whole, step)
        if pipe.rank == 0:  # of the first replica at the step's begin, then each its own
            first = x.chunk(2)[0]
            torch.testing.assert_close(float(mine[0].seen), seen + float(part.sum()), rtol=1e-5, atol=1e-5)
            seen += float(first.sum())


def test_a_parameter_shared_by_two_stages_and_buffers():
    run_ranks(4, sharing, timeout=200)


class Breaking(nn.Module):
    """Raises in its fifth forward, when told."""

    def __init__(self, breaks):
        super().__init__()
        self.layer, self.breaks, self.n = nn.Linear(2, 2), breaks, 0

    def forward(self, x):
        self.n += 1
        if self.breaks and self.n == 5:
            raise KeyError("broken")
        return self.layer(x)


def breaking(rank, size):
    pipe, replicas = meshed(rank, size)
    module = pycomm.DistributedDataParallel(Breaking(rank == 2), communicator=replicas)
    schedule = get_schedule_class("1F1B")(
        PipelineStage(module, pipe.rank, 2, group=pipe), 3, loss_fn=nn.functional.mse_loss
    )
    x = torch.ones(4, 2)
    schedule.step(x, target=x)
    began = time.monotonic()
    with pytest.raises((KeyError, RuntimeError)) as caught:  # CommError is a RuntimeError
        schedule.step(x, target=x)
    if rank % 2 == 0:  # the pipeline that broke; its other replica waits in a reduction until told
        with pytest.raises(RuntimeError):
            schedule.step(x, target=x)
    assert time.monotonic() - began < 20
    return type(caught.value).__name__


def test_a_step_that_breaks_on_one_replica_ends_on_all():
    assert run_ranks(4, breaking)[2] == "KeyError"


def mixed(rank, size, name, v):
    """Wrapped over all ranks, as a wrapper does without a group, though their stages are others."""
    comm = pycomm.init()
    pipe = comm.split(rank // 2)
    order = build(name, 2, 4, v)
    stages = [
        PipelineStage(
            pycomm.DistributedDataParallel(nn.Linear(2, 2), communicator=comm), i, 2 * v, group=pipe
        )
        for i in order.stages_of(pipe.rank)
    ]
    schedule = get_schedule_class(name)(stages, 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 2)
    assert schedule.eval(x) is None or pipe.rank == order.placement[-1]
    with pytest.raises((ValueError, pycomm.CommError), match="would average it with other stages: its ranks"):
        schedule.step(x, target=x)


@pytest.mark.parametrize(("name", "v"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_a_wrapper_over_other_stages_is_refused(name, v):
    run_ranks(4, mixed, name, v, timeout=120)
