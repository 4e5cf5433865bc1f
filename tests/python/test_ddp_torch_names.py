"""The wrapper is torch's to users and libraries: constructor, class, attributes, copies, pickles, groups."""

import copy
import inspect
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import pycomm
from ddp_cases import start_gloo
from ranks import run_ranks

OURS = {"communicator", "compression", "error_feedback", "overlap", "check_consistency_every"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def make(seed=1):
    torch.manual_seed(seed)
    return Net()


def data(rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def loss_of(model, rank):
    return model(data(rank)).square().mean()


def wanted(size):
    net = make().double()
    by_rank = []
    for rank in range(size):  # one after the other: BatchNorm sees each rank's batch alone
        net.zero_grad()
        net(data(rank).double()).square().mean().backward()
        by_rank.append({n: p.grad.clone() for n, p in net.named_parameters() if p.requires_grad})
    return {name: sum(found[name] for found in by_rank) / size for name in by_rank[0]}


def assert_wanted(module, size):
    for name, gradient in wanted(size).items():
        found = dict(module.named_parameters())[name].grad
        torch.testing.assert_close(found.double(), gradient, rtol=1e-4, atol=1e-6)


def test_the_constructor_is_torchs():
    theirs = list(inspect.signature(Torchs.__init__).parameters.values())
    ours = inspect.signature(pycomm.DistributedDataParallel.__init__).parameters
    positional = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    # An older torch lacks the last ones; what it has, is where ours is.
    names = [p.name for p in theirs]
    assert [p.name for p in positional if p.name in names] == names
    assert [p.name for p in positional[: len(names)]] == names
    for p in theirs:
        if p.name in ("broadcast_buffers", "bucket_cap_mb"):
            continue  # None where an older torch has True and 25: the same meaning
        assert ours[p.name].default == p.default, p.name
    assert {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY} == OURS


def test_it_is_an_instance_of_torchs_class():
    ddp = pycomm.DistributedDataParallel(make())
    assert isinstance(ddp, Torchs)
    assert isinstance(ddp, nn.Module)
    assert list(ddp.state_dict()) == ["module." + key for key in make().state_dict()]
    net = make(7)
    ddp.load_state_dict({"module." + key: value for key, value in net.state_dict().items()})
    assert torch.equal(ddp.module.linear.weight, net.linear.weight)
    assert ddp.train() is ddp
    assert ddp.eval().module.training is False
    assert ddp.device == torch.device("cpu")
    assert ddp.device_ids is None
    assert ddp.find_unused_parameters is False
    assert ddp.broadcast_buffers is True
    assert ddp.will_sync_module_buffers() is True
    assert ddp._get_ddp_logging_data()["world_size"] == 1
    assert Torchs._get_active_ddp_module() is None
    assert set(ddp.reducer.__class__.__dict__) >= {
        "prepare_for_backward",
        "_rebuild_buckets",
        "_delay_all_reduce",
        "_set_optimizer_in_backward",
    }
    Torchs._set_params_and_buffers_to_ignore_for_model(net, ["linear.bias"])
    assert pycomm.DistributedDataParallel(net).parameters_to_ignore == {"linear.bias"}


def test_what_cannot_be_says_what_to_do():
    with pytest.raises(ValueError, match="need to be set at the same time"):
        pycomm.DistributedDataParallel(
            make(), delay_all_reduce_named_params=[("a", nn.Parameter(torch.ones(1)))]
        )
    with pytest.raises(RuntimeError, match="either communicator or process_group"):
        pycomm.DistributedDataParallel(make(), communicator=pycomm.init(), process_group=object())
    frozen = make().requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter of the module requires a gradient"):
        pycomm.DistributedDataParallel(frozen)


# ---- groups of torch's


def use_groups(rank, size):
    # Nothing in the environment says who this is: only torch's group does.
    start_gloo(rank, size)
    del os.environ["PYCOMM_RUN_DIR"], os.environ["RANK"], os.environ["WORLD_SIZE"]
    ddp = pycomm.DistributedDataParallel(make(seed=rank + 1))
    assert (ddp.communicator.rank, ddp.communicator.size) == (rank, size)
    assert ddp.process_group is dist.group.WORLD
    loss_of(ddp, rank).backward()
    assert_wanted(ddp.module, size)
    assert ddp._get_ddp_logging_data()["backend_name"] == "gloo"
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    by_mesh = pycomm.DistributedDataParallel(make(), device_mesh=mesh)
    assert by_mesh.communicator.size == size
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        small = pycomm.DistributedDataParallel(make(), process_group=pair)
        assert small.communicator.size == 2
        with pytest.raises(
            RuntimeError, match="only supported when using DDP with the default process group"
        ):
            pickle.dumps(small)
        loss_of(small, 0 if rank == 0 else 1).backward()
        assert_wanted(small.module, 2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [3, 4])
def test_process_groups_of_torchs(size):
    run_ranks(size, use_groups)


# ---- copies


def hook_halves(state, bucket):
    future = torch.futures.Future()
    future.set_result(state.all_reduce(bucket.buffer(), op="avg") * 0.5)
    return future


def copy_and_pickle(rank, size):
    ddp = pycomm.DistributedDataParallel(make(), bucket_cap_mb=1e-4)
    copied = copy.deepcopy(ddp)
    loss_of(copied, rank).backward()
    assert_wanted(copied.module, size)
    assert all(p.grad is None for p in ddp.parameters())
    loss_of(ddp, rank).backward()
    assert_wanted(ddp.module, size)
    restored = pickle.loads(pickle.dumps(ddp))
    with pytest.raises(AttributeError, match="has no communicator before its first forward"):
        restored.stats()
    restored.zero_grad()
    loss_of(restored, rank).backward()  # meets the others here
    assert_wanted(restored.module, size)

    hooked = pycomm.DistributedDataParallel(make())
    hooked.register_comm_hook(hooked.communicator, hook_halves)
    again = copy.deepcopy(hooked)
    loss_of(again, rank).backward()
    for name, gradient in wanted(size).items():
        found = dict(again.module.named_parameters())[name].grad
        torch.testing.assert_close(found.double(), gradient / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_copies_and_pickles_work(size):
    run_ranks(size, copy_and_pickle)


# ---- what other libraries do


def as_libraries_do(rank, size):
    comm = pycomm.init()
    # pipelining: all within no_sync, and the last backward is prepared
    ddp = pycomm.DistributedDataParallel(make(), communicator=comm)
    with ddp.no_sync():
        loss = loss_of(ddp, rank)
    ddp.reducer.prepare_for_backward([loss])
    loss.backward()
    assert_wanted(ddp.module, size)
    # Lightning: the module is called directly, the reducer is told
    ddp.zero_grad()
    loss = loss_of(ddp.module, rank)
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    assert_wanted(ddp.module, size)
    # Accelerate: the flag
    ddp.zero_grad()
    ddp.require_backward_grad_sync = False
    loss_of(ddp, rank).backward()
    ddp.require_backward_grad_sync = True
    local = ddp.module.linear.weight.grad.clone()
    ddp.zero_grad()
    loss_of(ddp.module, rank).backward()
    assert not torch.equal(local, ddp.module.linear.weight.grad)
    ddp._check_reducer_finalized()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        ddp._set_static_graph()
    fresh = pycomm.DistributedDataParallel(make(), communicator=comm)
    fresh._set_static_graph()
    assert fresh.static_graph
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    loss_of(ddp, rank).backward()
    assert torch.equal(local, ddp.module.linear.weight.grad) or rank > 0
    comm.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_other_libraries_call(size):
    run_ranks(size, as_libraries_do)


def step_in_backward(rank, size):
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = make()
    reference = copy.deepcopy(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.5})
    ddp = pycomm.DistributedDataParallel(net)
    loss_of(ddp, rank).backward()
    assert all(p.grad is None for p in trained)
    for name, gradient in wanted(size).items():
        before = dict(reference.named_parameters())[name].double()
        after = dict(net.named_parameters())[name].double()
        torch.testing.assert_close(after, before - 0.5 * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_optimizers_that_step_in_backward(size):
    run_ranks(size, step_in_backward)


def compile_it(rank, size):
    found = {}
    for how in ("inside", "outside", "both"):
        net = make()
        if how in ("inside", "both"):
            net = torch.compile(net, backend="aot_eager")
        ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
        model = torch.compile(ddp, backend="aot_eager") if how in ("outside", "both") else ddp
        for _ in range(2):
            ddp.zero_grad()
            loss_of(model, rank).backward()
        module = getattr(ddp.module, "_orig_mod", ddp.module)
        assert_wanted(module, size)
        found[how] = True
    return found


@pytest.mark.slow
def test_torch_compile():
    run_ranks(2, compile_it, timeout=110)


def amp_and_clipping(rank, size):
    """GradScaler: an infinity on one rank is one on all; clip_grad_norm_ sees the averages."""
    ddp = pycomm.DistributedDataParallel(make(), communicator=pycomm.init())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(data(rank)).float().square().mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append((scaler.get_scale() < before, bool(torch.isfinite(norm))))
    return skipped, [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_amp_with_grad_scaler(size):
    results = run_ranks(size, amp_and_clipping)
    for skipped, parameters in results:
        assert [s for s, _ in skipped] == [False, True, False]
        for mine, theirs in zip(parameters, results[0][1], strict=True):
            assert torch.equal(mine, theirs)
