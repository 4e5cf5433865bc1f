"""Each schedule's idle time is its formula, for every size; transfers and orders that are wrong are refused.

Idle time is compared with the formulas of the papers, written down here once more; the catalog's must agree.
"""

import random

import pytest
from test_pipeline_schedule import runs, sizes

from pycomm.pipeline.schedule.action import TRANSFERS, Action
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.order import Order, parse
from pycomm.pipeline.schedule.simulate import Costs, simulate
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import live_activations, verify
from pycomm.pipeline.schedule.verify_transfers import verify_transfers

pytestmark = pytest.mark.timeout(120)
FLUSHED = ("GPipe", "1F1B", "Eager1F1B", "LoopedBFS", "Interleaved1F1B")
EVEN, ODD = (1.0, 1.0, 1.0), (1.0, 1.25, 0.75)
#: (F, I, W) of all of a rank's stages: a rank with v stages takes a v-th for each.
COSTS = (EVEN, ODD, (2.0, 1.0, 1.0), (1.0, 0.5, 1.5), (1.0, 2.0, 0.5))


def timeline(name, p, v, m, costs):
    return simulate(build(name, p, m, v), Costs(*(c / v for c in costs)))


def some_sizes(name):
    return [(p, v, m) for p, v, m in sizes(name) if p in (1, 2, 3, 5, 8) and m in (1, 2, 3, 5, 8, 10, 16)]


def idle(name, p, v, m, costs) -> float:
    """Of a rank; every rank computes as long, so all are idle as long."""
    found = timeline(name, p, v, m, costs)
    work = m * sum(costs)
    for rank in range(p):
        assert found.busy(rank) == pytest.approx(work)
    return found.makespan - work


@pytest.mark.parametrize("name", FLUSHED)
def test_flushed_schedules(name):
    """(p - 1)(F + B)/v where m >= p; a bubble of (p - 1)/(m + p - 1) with one stage on a rank."""
    cases = [(size, ODD) for size in sizes(name)]
    cases += [(size, costs) for costs in COSTS for size in some_sizes(name)]
    for (p, v, m), (f, i, w) in cases:
        found = idle(name, p, v, m, (f, i, w))
        short = max(0, p - m)  # with fewer microbatches than ranks, a rank waits for its next stage, too
        want = (p - 1) * (f + i + w) / v + short * (v - 1) * (f + i + w) / v
        assert found == pytest.approx(want), (p, v, m)
        assert CATALOG[name].idle(p, v, m, f, i, w) == pytest.approx(want)
        if v == 1:
            assert timeline(name, p, v, m, (f, i, w)).bubble == pytest.approx((p - 1) / (m + p - 1))


def test_zero_bubble_h1_and_interleaved():
    """(p - 1)(F + I - W) where W <= I, divided by v; that is 1F1B's, less p - 1 times 2 W."""
    for name in ("ZeroBubbleH1", "InterleavedZeroBubble"):
        cases = [(size, ODD) for size in sizes(name)]
        cases += [(size, costs) for costs in COSTS for size in some_sizes(name)]
        for (p, v, m), (f, i, w) in cases:
            found = idle(name, p, v, m, (f, i, w))
            want = (p - 1) * (f + i - min(i, w)) / v
            if m >= p:
                assert found == pytest.approx(want), (name, p, v, m, f, i, w)
                assert CATALOG[name].idle(p, v, m, f, i, w) == pytest.approx(want)
            elif v == 1 and w <= i:
                assert found == pytest.approx(want + (p - m) * w), (name, p, v, m, f, i, w)
            else:
                assert found <= CATALOG["Interleaved1F1B"].idle(p, v, m, f, i, w) + 1e-9


def test_zero_bubble_h2():
    """Between its first and last action rank r waits (p - r - 1)(F + I - 2 W), with nothing below 0."""
    for p, _, m in sizes("ZeroBubbleH2"):
        for f, i, w in COSTS:
            found = timeline("ZeroBubbleH2", p, 1, m, (f, i, w))
            if m >= 2 * p:
                for rank in range(p):
                    want = (p - rank - 1) * max(0.0, f + i - 2 * w)
                    assert found.gaps(rank) == pytest.approx(want), (p, m, rank, f, i, w)
                want = (p - 1) * max(f, f + i - 2 * w)
                assert found.idle(0) == pytest.approx(want)
                assert CATALOG["ZeroBubbleH2"].idle(p, 1, m, f, i, w) == pytest.approx(want)
            else:
                assert found.idle(0) <= idle("1F1B", p, 1, m, (f, i, w)) + 1e-9


def test_the_schedules_in_a_v():
    """(p - 1)(F + I - W)/2 where F = I = W and m >= 2 p: half of H1's. ZBV takes up to F more."""
    for name, more in (("ZBVZeroBubble", 1.0), ("DualPipeV", 0.0)):
        for p, v, m in sizes(name):
            found, want = idle(name, p, v, m, EVEN), CATALOG[name].idle(p, v, m, *EVEN)
            assert want == (p - 1) / 2
            if m >= 2 * p:
                assert want - 1e-9 <= found <= want + more + 1e-9, (name, p, m)
            else:
                assert found <= idle("LoopedBFS", p, 2, m, EVEN) + 1e-9, (name, p, m)


def test_the_idle_time_is_divided_by_the_stages_on_a_rank():
    for p in range(2, 9):
        alone = idle("1F1B", p, 1, 16, ODD)
        for v in range(1, 5):
            assert idle("Interleaved1F1B", p, v, 16, ODD) == pytest.approx(alone / v)


# ---- what is wrong is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOG)
def test_transfers_are_right(name):
    for p, v, m in some_sizes(name):
        order = build(name, p, m, v)
        for early in (0, 1):
            verify_transfers(order, with_transfers(order, early))
        no_gradient = {s for s in range(order.n_stages) if s <= order.n_stages // 2}
        verify_transfers(order, with_transfers(order, 2, no_gradient), no_gradient)


def broken(lists, rng):
    """Lists of every rank with one fault in a transfer, or a swap of any two actions."""
    rows = [list(row) for row in lists]
    spots = [(r, i) for r, row in enumerate(rows) for i, a in enumerate(row) if a.kind in TRANSFERS]
    r, i = rng.choice(spots)
    action = rows[r][i]
    how = rng.choice(["drop", "double", "swap", "move", "cross", "change"])
    if how == "drop":
        del rows[r][i]
    elif how == "double":
        rows[r].insert(rng.randrange(len(rows[r]) + 1), action)
    elif how == "swap":
        j = rng.randrange(len(rows[r]))
        rows[r][i], rows[r][j] = rows[r][j], rows[r][i]
    elif how == "move":  # to another rank
        del rows[r][i]
        rows[(r + 1) % len(rows)].insert(0, action)
    elif how == "cross":  # two transfers of a rank say that they are each other
        _, j = rng.choice([spot for spot in spots if spot[0] == r])
        other = rows[r][j]
        rows[r][i] = other._replace(microbatch=action.microbatch)
        rows[r][j] = action._replace(microbatch=other.microbatch)
    else:
        rows[r][i] = Action(
            rng.randrange(2 * len(rows)), rng.choice(TRANSFERS), rng.randrange(action.microbatch + 2)
        )
    return how, rows


@pytest.mark.parametrize("name", CATALOG)
def test_a_wrong_transfer_is_refused(name):
    rng = random.Random(name)
    refused = dict.fromkeys(["drop", "double", "swap", "move", "cross", "change"], 0)
    for _ in range(300):
        order = build(name, rng.randint(2, 4), rng.randint(1, 6))
        how, lists = broken(with_transfers(order, rng.randint(0, 2)), rng)
        try:
            verify_transfers(order, lists)
        except ValueError:
            refused[how] += 1
            continue
        assert how in ("swap", "cross", "change"), how  # which may change nothing that matters
        assert runs(order, ranks=lists), lists
    assert min(refused.values()) > 5, refused


def test_the_fault_of_each_kind_is_named():
    order = build("1F1B", 2, 2)
    good = [list(row) for row in with_transfers(order, early=0)]

    def text_of(rank, row):
        with pytest.raises(ValueError) as caught:
            verify_transfers(order, [parse(row) if r == rank else good[r] for r in range(2)])
        return str(caught.value)

    zero = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert parse(zero) == tuple(good[0])
    assert text_of(0, zero.replace("0SEND_F1 ", "")) == "1F1B: rank 0: 0SEND_F1 is missing, which 0F1 needs"
    assert "0SEND_F0 (its action 2) is there twice" in text_of(0, zero.replace("0F1", "0SEND_F0 0F1"))
    crossed = zero.replace("SEND_F0", "SEND_F").replace("SEND_F1", "SEND_F0").replace("SEND_F ", "SEND_F1 ")
    assert "0SEND_F1 (its action 1) must be behind 0F1 (its action 2)" in text_of(0, crossed)
    assert "0RECV_B1 (its action 7) must be before 0B1 (its action 6)" in text_of(
        0, zero.replace("0RECV_B1 0B1", "0B1 0RECV_B1")
    )
    assert "1SEND_F0 (its action 0): nothing is to be" in text_of(0, "1SEND_F0 " + zero)
    assert "its computation 1 is 0B0, in the order it is 0F1" in text_of(0, zero.replace("0F1", "0B0"))
    assert "3 computations, in the order there are 4" in text_of(0, zero.replace(" 0B1", ""))
    late = [parse(zero), parse("1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B0 1SEND_B1")]
    verify_transfers(order, late)  # allowed: nothing that rank 1 does needs what rank 0 does with it
    late[0] = parse("0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1")
    with pytest.raises(
        ValueError, match=r"deadlock: rank 0 at 0B0 \(its action 4\) waits for 1SEND_B0 of rank 1; r"
    ):
        verify_transfers(order, late)
    with pytest.raises(ValueError, match="2 ranks, and actions of 1"):
        verify_transfers(order, good[:1])


def without(order: Order, rank: int, action: str) -> Order:
    rows = [[a for a in row if (r, str(a)) != (rank, action)] for r, row in enumerate(order.actions)]
    return Order(order.name, order.placement, order.n_microbatches, tuple(map(tuple, rows)))


def test_each_fault_of_an_order_is_refused():
    for name in CATALOG:
        order = build(name, 3, 4)
        for rank in range(3):
            for action in order.actions[rank]:  # any one dropped, any one twice
                with pytest.raises(ValueError, match=f"stage {action.stage}, microbatch {action.microbatch}"):
                    verify(without(order, rank, str(action)))
                rows = [*order.actions[:rank], (*order.actions[rank], action), *order.actions[rank + 1 :]]
                with pytest.raises(ValueError, match=f"stage {action.stage}, microbatch {action.microbatch}"):
                    verify(Order(name, order.placement, 4, tuple(rows)))
            first, *rest = order.actions[rank]  # a forward after all that waits for it
            rows = [*order.actions[:rank], (*rest, first), *order.actions[rank + 1 :]]
            with pytest.raises(ValueError, match="deadlock: "):
                verify(Order(name, order.placement, 4, tuple(rows)))
        peak = max(max(live_activations(order, rank)) for rank in range(3))
        verify(order, peak)
        with pytest.raises(ValueError, match=f"keeps {peak} activations, at most {peak - 1}"):
            verify(order, peak - 1)
