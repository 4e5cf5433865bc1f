"""What other pipelines got wrong, each a test of its own.

A *tracer* stage checks what it is given: samples carry their number, and stages add to it where they are.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from pycomm.pipeline import LayerSpec, PipelineStage, get_schedule_class, plan
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.picture import text
from pycomm.pipeline.schedule.simulate import simulate
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def stages_of(name: str, rank: int, size: int, m: int, make):
    """(this rank's stages by number, its schedule's class, how many stages there are)."""
    v = CATALOG[name].stages_per_rank or 2
    held = build(name, size, m, v).stages_of(rank)
    parts = {s: make(s, size * v) for s in held}
    return parts, get_schedule_class(name), size * v


# ---- 1: a stage run on uninitialised memory to learn its output's shape ----------------------------------


class Seen(nn.Module):
    """BatchNorm and an embedding: one is changed by what it sees, the other refuses ids out of range."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.n_calls, self.ids = 0, set()

    def forward(self, ids, x=None):
        self.n_calls += 1
        self.ids |= set(ids.tolist())
        y = self.norm(self.embed(ids) + (0 if x is None else x))
        return (ids, y) if self.is_first else y


def looking(rank, size):
    torch.manual_seed(rank)
    part = Seen(rank == 0)
    before = copy.deepcopy(part.state_dict())
    schedule = get_schedule_class("1F1B")(PipelineStage(part, rank, size), 3, loss_fn=nn.functional.mse_loss)
    assert part.n_calls == 0
    ids = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    for _ in range(2):
        schedule.step(ids, target=torch.zeros(7, 3))
    assert part.n_calls == 6 and part.ids == {0, 1, 2, 3, 4}
    assert int(part.norm.num_batches_tracked) == 6
    if rank == 0:  # its statistics are those of the batch's own microbatches, in order
        alone = Seen(True)
        alone.load_state_dict(before)
        for _ in range(2):
            for chunk in ids.tensor_split(3):
                alone(chunk)
        assert torch.equal(part.norm.running_mean, alone.norm.running_mean)
        assert torch.equal(part.norm.running_var, alone.norm.running_var)


def test_no_stage_runs_on_anything_but_the_batch():
    run_ranks(2, looking)


# ---- 2, 3: gradients that are scaled again ---------------------------------------------------------------


def accumulating(rank, size, names):
    for name in names:
        torch.manual_seed(3)
        n_stages = size * (CATALOG[name].stages_per_rank or 2)
        whole = nn.ModuleList([nn.Linear(3, 3) for _ in range(n_stages)]).double()
        parts, make, _ = stages_of(name, rank, size, 4, lambda s, n, whole=whole: copy.deepcopy(whole[s]))
        schedule = make(
            [PipelineStage(part, s, n_stages) for s, part in parts.items()], 4, loss_fn=nn.functional.mse_loss
        )
        for step in range(3):
            x = torch.randn(6 + step, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            schedule.step(x, target=x)
            nn.functional.mse_loss(nn.Sequential(*whole)(x), x).backward()
            for s, part in parts.items():  # after each step, not at the end only
                torch.testing.assert_close(part.weight.grad, whole[s].weight.grad, atol=1e-13, rtol=0)
                torch.testing.assert_close(part.bias.grad, whole[s].bias.grad, atol=1e-13, rtol=0)


def test_accumulated_gradients_are_not_scaled_again():
    run_ranks(2, accumulating, list(CATALOG))


class Times(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def sharing(rank, size, name, is_told):
    """Stages 0 and 2 p - 1 are one rank's, and have one weight, as an object."""
    torch.manual_seed(4)
    weights = [nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(2 * size - 1)]
    whole = nn.Sequential(*(Times(weights[s % (2 * size - 1)]) for s in range(2 * size)))
    mine = copy.deepcopy(whole)  # keeps what is shared
    parts, make, n = stages_of(name, rank, size, 4, lambda s, n: mine[s])
    assert (rank == 0) == ({0, n - 1} <= set(parts))
    schedule = make(
        [PipelineStage(part, s, n) for s, part in parts.items()],
        4,
        loss_fn=nn.functional.mse_loss,
        tied=[[(0, "weight"), (n - 1, "weight")]] if is_told else (),
    )
    for step in range(2):
        x = torch.randn(5 + step, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        schedule.step(x, target=x)
        nn.functional.mse_loss(whole(x), x).backward()
        for s, part in parts.items():
            torch.testing.assert_close(part.weight.grad, whole[s].weight.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_a_weight_of_two_stages_on_one_rank_counts_once(name, is_told):
    run_ranks(2, sharing, name, is_told)


# ---- 4, 5, 6: what runs is what is drawn; nothing is taken for something else ----------------------------


class Tracer(nn.Module):
    """Column 0 is the sample's number, column 1 the stages so far in digits, column 2 the step."""

    def __init__(self, index: int, n_stages: int) -> None:
        super().__init__()
        self.index, self.n_stages = index, n_stages
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.given: list[list[int]] = []
        self.returned: list[torch.Tensor] = []

    def forward(self, x):
        came = 0
        for stage in range(self.index):
            came = 10 * came + stage + 1
        assert x[:, 1].tolist() == [came] * len(x), (self.index, x[:, 1])
        self.given.append(x[:, 0].long().tolist())
        y = torch.stack([x[:, 0] * self.factor, 10 * x[:, 1] + self.index + 1, x[:, 2]], 1)
        if y.requires_grad:
            y.register_hook(self.returned.append)
        return y


def tracing(rank, size, names):
    """Returns the actions that ran, under each schedule."""
    ran = {}
    for name in names:
        for m in (1, 3, 2 * size):
            parts, make, n = stages_of(name, rank, size, m, Tracer)
            pairs: list[tuple[list[int], list[int]]] = []

            def loss_fn(output, target, pairs=pairs):
                pairs.append((output[:, 0].long().tolist(), target[:, 0].long().tolist()))
                return (output[:, 0] * target[:, 0]).mean()

            schedule = make([PipelineStage(part, s, n) for s, part in parts.items()], m, loss_fn=loss_fn)
            assert schedule.order == build(name, size, m, n // size)
            for step in range(2):
                n_samples = 2 * m + 1 + step
                numbers = torch.arange(1, n_samples + 1, dtype=torch.float64) + 100 * step
                x = torch.stack([numbers, 0 * numbers, 0 * numbers + step], 1)
                for part in parts.values():
                    part.given, part.returned = [], []
                pairs.clear()
                output = schedule.step(x, target=x)
                chunks = [chunk.long().tolist() for chunk in numbers.tensor_split(m)]
                forwards = {
                    s: [a.microbatch for a in schedule.order.actions[rank] if a[:2] == (s, "F")]
                    for s in parts
                }
                backwards = {
                    s: [a.microbatch for a in schedule.order.actions[rank] if a[0] == s and a[1] in "BI"]
                    for s in parts
                }
                for s, part in parts.items():
                    assert part.given == [chunks[k] for k in forwards[s]], (name, m, s)
                    # d loss / d (sample's number) after a stage: its target over the batch's size
                    found = [(g[:, 0] * n_samples).round().long().tolist() for g in part.returned]
                    assert found == [chunks[k] for k in backwards[s]], (name, m, s)
                if n - 1 in parts:
                    assert pairs == [(chunks[k], chunks[k]) for k in forwards[n - 1]], (name, m)
                    assert output[:, 0].tolist() == numbers.tolist()
            ran[name, m] = schedule._runtime.spans
    return ran


@pytest.mark.parametrize("size", [2, 3])
def test_what_runs_is_what_is_drawn_and_every_message_is_the_right_one(size):
    """Two ranks: each one's next and previous peer are the same, with several stages on it.

    Labels: the loss sees each microbatch's output with that microbatch's target, under every schedule.
    """
    results = run_ranks(size, tracing, list(CATALOG))
    for name, m in results[0]:
        order = build(name, size, m, CATALOG[name].stages_per_rank or 2)
        rows = tuple(tuple(result[name, m]) for result in results)
        assert tuple(tuple(span.action for span in row) for row in rows) == order.actions
        for row, line in zip(rows, text(simulate(order)).splitlines(), strict=True):
            drawn = [word for word in line.split() if word not in ".-"]
            names = [str(span.action) for span in row]
            assert drawn in (names, [name.lstrip("0123456789") for name in names]), (name, m)
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(row))


# ---- 7: stages that are silently dropped -----------------------------------------------------------------


def dropping(rank, size):
    layers = [LayerSpec(nn.Linear, 2, 2) for _ in range(7)]
    cut = plan(layers, size, "uniform")
    part = cut.stage(layers, rank).double()
    torch.manual_seed(6)
    whole = nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)]).double()
    held = [whole[i] for i in cut.parts[rank]]
    for mine, theirs in zip(part.parameters(), [p for h in held for p in h.parameters()], strict=True):
        mine.data.copy_(theirs)
    schedule = get_schedule_class("GPipe")(PipelineStage(part, rank, size), 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 2, dtype=torch.float64)
    output = schedule.step(x, target=x)
    if rank == size - 1:
        torch.testing.assert_close(output, whole(x).detach(), atol=1e-12, rtol=0)
    make = get_schedule_class("Interleaved1F1B")
    with pytest.raises(ValueError, match="7 stages cannot be spread evenly over 3 ranks"):
        make([PipelineStage(nn.Linear(2, 2), s, 7) for s in range(rank, 7, size)], 2)
    with pytest.raises(
        ValueError, match=rf"rank {rank} of 3 holds stages \[{rank}, {rank + 3}\], got \[{rank}\]"
    ):
        make(PipelineStage(nn.Linear(2, 2), rank, 6), 2)
    with pytest.raises(ValueError, match=rf"holds stages \[{rank}, {rank + 3}\], got \[{rank}\]"):
        make([PipelineStage(nn.Linear(2, 2), rank, 6)] * 2, 2)


def test_no_layer_and_no_stage_is_dropped():
    for n_layers in range(1, 14):
        for n_stages in range(1, n_layers + 1):
            parts = plan([nn.Linear(2, 2) for _ in range(n_layers)], n_stages, "uniform").parts
            assert len(parts) == n_stages and all(parts)
            assert [i for part in parts for i in part] == list(range(n_layers))
    with pytest.raises(ValueError, match="2 layers cannot make 3 parts with at least one layer each"):
        plan([nn.Linear(2, 2)] * 2, 3, "uniform")
    run_ranks(3, dropping)
