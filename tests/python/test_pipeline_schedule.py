"""Pipeline schedules as data: proved for every size, as idle and as large as promised, as their pictures
show.

``runs`` below is the judge of orders: it knows nothing of verify, and runs an order on numbers, stages being
affine functions whose gradients are known in closed form.
"""

import random
import re
from pathlib import Path

import pytest

from pycomm.pipeline.schedule import gpipe, interleaved, one_f_one_b, zero_bubble
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.order import Order, loop_placement, parse, v_placement
from pycomm.pipeline.schedule.picture import draw, text
from pycomm.pipeline.schedule.simulate import Costs, simulate
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import live_activations, verify

pytestmark = pytest.mark.timeout(120)
GOLDEN = Path(__file__).parents[1] / "golden" / "pipeline"
#: A backward takes as long as a forward.
EVEN = Costs(1.0, 0.5, 0.5)


def sizes(name: str):
    only = CATALOG[name].stages_per_rank
    return [(p, v, m) for p in range(1, 9) for v in ((only,) if only else range(1, 5)) for m in range(1, 17)]


def runs(order: Order, early: int = 0, ranks: list[list[Action]] | None = None) -> bool:
    """Runs all ranks' actions with their transfers; are all outputs and gradients right?

    Without ``ranks`` the transfers are made here, with receives that are that ``early``.

    Stage s computes y = (s + 2) x + 1. The input of microbatch k is k + 1, the gradient of the output 1; so
    the gradient of stage s's input is the product of the factors from s on, that of its factor x times the
    product behind it.
    """
    n = order.n_stages
    mail: dict[tuple[str, int, int], int] = {}
    ranks = with_transfers(order, early) if ranks is None else ranks
    at = [0] * len(ranks)
    xs: list[dict[tuple[int, int], int]] = [{} for _ in ranks]  # a rank has what it made, and what came
    gs: list[dict[tuple[int, int], int]] = [{} for _ in ranks]
    for k in range(order.n_microbatches):
        xs[order.placement[0]][0, k] = k + 1
        gs[order.placement[-1]][n, k] = 1
    factors: dict[tuple[int, int], int] = {}
    halves: set[tuple[int, int]] = set()
    posted: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            x, g = xs[rank], gs[rank]
            while at[rank] < len(actions):
                stage, kind, k = actions[at[rank]]
                if kind.startswith("RECV"):
                    posted.add(("F", stage - 1, k) if kind == "RECV_F" else ("B", stage + 1, k))
                elif kind == "SEND_F":
                    mail["F", stage, k] = x.pop((stage + 1, k))
                elif kind == "SEND_B":
                    mail["B", stage, k] = g.pop((stage, k))
                else:
                    for box, key, here in (("F", stage - 1, x), ("B", stage + 1, g)):
                        if (
                            (box, key, k) in posted
                            and (box, key, k) in mail
                            and (kind == "F") == (box == "F")
                        ):
                            here[stage if box == "F" else stage + 1, k] = mail.pop((box, key, k))
                    needed = [((stage, k), x)] if kind == "F" else [((stage, k), x), ((stage + 1, k), g)]
                    if not all(key in there for key, there in needed) or (
                        kind == "W" and (stage, k) not in halves
                    ):
                        break  # it waits
                    if kind == "F":
                        x[stage + 1, k] = (stage + 2) * x[stage, k] + 1
                    if kind == "I":
                        halves.add((stage, k))
                    if kind in "BI":
                        g[stage, k] = (stage + 2) * g[stage + 1, k]
                    if kind in "BW":
                        factors[stage, k] = x[stage, k] * g[stage + 1, k]
                at[rank] += 1
                moved = True
    for k in range(order.n_microbatches):
        want = k + 1
        for stage in range(n):
            behind = 1
            for later in range(stage + 1, n):
                behind *= later + 2
            if factors.get((stage, k)) != want * behind:
                return False
            want = (stage + 2) * want + 1
    return not mail and all(at[r] == len(actions) for r, actions in enumerate(ranks))


@pytest.mark.parametrize("name", CATALOG)
def test_every_size_is_right_and_keeps_what_it_promises(name):
    for p, v, m in sizes(name):
        order = build(name, p, m, v)
        peak = CATALOG[name].peak
        verify(order, max(peak(p, v, m, r) for r in range(p)))
        for rank in range(p):
            assert max(live_activations(order, rank)) <= peak(p, v, m, rank), (p, v, m, rank)
        if m >= 2 * p:  # the promise is not merely a bound
            assert max(live_activations(order, 0)) == peak(p, v, m, 0), (p, v, m)


@pytest.mark.parametrize("name", CATALOG)
def test_every_order_computes_the_right_gradients(name):
    for p, v, m in sizes(name):
        if p in (1, 2, 3, 5) and m in (1, 2, 5, 8):
            order = build(name, p, m, v)
            assert runs(order, early=0) and runs(order, early=2), (p, v, m)


def test_eager_hides_a_slow_link_that_1f1b_waits_for():
    costs = Costs(1.0, 0.5, 0.5, latency=0.9)
    eager, plain = (simulate(build(name, 4, 16), costs).makespan for name in ("Eager1F1B", "1F1B"))
    assert eager < plain - 5


MODULES = (gpipe, one_f_one_b, interleaved, zero_bubble)
PICTURES = [
    (name, int(p), int(m), int(v or 1), module)
    for module in MODULES
    for name, p, m, v in re.findall(r"    (\w+), p = (\d+), m = (\d+)(?:, v = (\d+))?  ", module.__doc__)
]


@pytest.mark.parametrize(("name", "p", "m", "v", "module"), PICTURES)
def test_the_picture_is_what_runs(name, p, m, v, module):
    lines = module.__doc__.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(rf"    {name}, p", line))
    column = re.match(r"    \S.*?\s{2,}", lines[first]).end()
    drawn = [line[column:] for line in lines[first : first + p]]
    costs = None if "ZeroBubble" in name else EVEN
    assert "\n".join(drawn) == text(simulate(build(name, p, m, v), costs))


def test_all_schedules_that_draw_themselves_are_looked_at():
    assert {name for name, *_ in PICTURES} == {
        "GPipe", "LoopedBFS", "1F1B", "Eager1F1B", "Interleaved1F1B", "ZeroBubbleH1", "ZeroBubbleH2",
    }  # fmt: skip


@pytest.mark.parametrize("name", CATALOG)
def test_golden(name):
    made = text(simulate(build(name, 4, 8), None)) + "\n"
    assert made == (GOLDEN / f"{name}.txt").read_text()


def test_pipedream_2bw_is_1f1b_over_several_batches():
    order = one_f_one_b.pipedream_2bw(3, 4, n_batches=5)
    verify(order, 3)
    assert simulate(order, EVEN).idle(0) == 4  # once, not once a batch: (p - 1) (F + B)
    made = text(simulate(one_f_one_b.pipedream_2bw(4, 8, n_batches=2), None)) + "\n"
    assert made == (GOLDEN / "PipeDream2BW.txt").read_text()


def test_evaluation_runs_all_forwards():
    for placement in (loop_placement(3), loop_placement(3, 2), v_placement(3)):
        order = gpipe.forward_only(placement, 3, 7)
        verify(order)
        assert sum(map(len, order.actions)) == 7 * len(placement)


def mutated(order: Order, rng: random.Random) -> Order:
    rows = [list(actions) for actions in order.actions]
    row = rows[rng.choice([r for r in range(len(rows)) if len(rows[r]) > 1])]
    i, j = rng.sample(range(len(row)), 2)
    how = rng.choice(["swap", "drop", "double", "move", "change"])
    if how == "swap":
        row[i], row[j] = row[j], row[i]
    elif how == "drop":
        del row[i]
    elif how == "double":
        row.insert(j, row[i])
    elif how == "move":
        rng.choice(rows).append(row.pop(i))
    else:
        row[i] = row[i]._replace(kind=rng.choice("FBIW"), microbatch=rng.randrange(order.n_microbatches))
    return Order(order.name, order.placement, order.n_microbatches, tuple(map(tuple, rows)))


@pytest.mark.parametrize("name", CATALOG)
def test_a_mutation_is_refused_or_still_right(name):
    rng = random.Random(name)
    refused = 0
    for _ in range(200):
        order = mutated(build(name, rng.randint(2, 4), rng.randint(2, 6)), rng)
        try:
            verify(order)
        except ValueError:
            refused += 1
            continue
        assert runs(order, early=1), order.to_csv()
    assert refused > 80


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at 0B0 \(its action 0\) waits for 0F0 of rank 0"):
        verify(Order.from_actions([parse("0B0 0F0"), parse("1F0 1B0")]))
    with pytest.raises(
        ValueError, match=r"stage 1, microbatch 0: expected one F and one B.* 1 F, 0 B, 1 I, 0 W"
    ):
        verify(Order.from_actions([parse("0F0 0B0"), parse("1F0 1I0")]))
    with pytest.raises(ValueError, match="rank 0 keeps 3 activations, at most 2"):
        verify(build("GPipe", 2, 3), max_live=2)
    with pytest.raises(ValueError, match="stage 0 is on rank 0 and rank 1"):
        Order.from_actions([parse("0F0"), parse("0B0")])
    with pytest.raises(ValueError, match="rank 0 has 0SEND_F0"):
        Order.from_actions([parse("0F0 0SEND_F0")])
    with pytest.raises(ValueError, match="'0X0' is no action"):
        Action.parse("0X0")
    with pytest.raises(ValueError, match="there is no pipeline schedule '2F2B'; there are GPipe"):
        build("2F2B", 2, 2)
    with pytest.raises(ValueError, match="number of microbatches must be at least 1, got 0"):
        build("1F1B", 2, 0)
    with pytest.raises(ValueError, match="1F1B has 1 stage on a rank, not 2"):
        build("1F1B", 2, 2, 2)


def test_csv_comes_back():
    for name in CATALOG:
        order = build(name, 3, 6)
        assert Order.from_csv(order.to_csv(), order.name) == order
    assert Order.from_csv("0F0,,0B0\n,1F0,1B0\n").actions == (parse("0F0 0B0"), parse("1F0 1B0"))


def test_the_drawing_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    timeline = simulate(build("1F1B", 3, 5))
    for ending in ("png", "svg"):
        draw({"simulated": timeline, "measured": timeline}, tmp_path / f"a.{ending}")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "simulated: 17" in (tmp_path / "a.svg").read_text() or "<svg" in (tmp_path / "a.svg").read_text()


def test_no_message_is_sent_back_to_a_stage_without_gradient():
    ranks = with_transfers(build("1F1B", 3, 2), no_gradient={1})
    kinds = [{a.kind for a in actions} for actions in ranks]
    assert "RECV_B" not in kinds[0] and "SEND_B" not in kinds[1] and "RECV_B" in kinds[1]
