"""Schedules: the catalog is proved, and a broken schedule is refused or still computes the right thing.

The judge of a mutation that the verifier accepts is ``execute`` below, which knows nothing of the verifier:
it runs the steps on numbers, all ranks, round by round, and compares with the sums of the inputs, bit for
bit between ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pycomm import _C, ScheduleError

core = _C.schedule
NAMES = [(a.collective, a.name) for a in core.catalog()]
ROOT = 0


class Broken(Exception):
    """The steps cannot be run: a message that nobody sends or takes, or an unwritten chunk."""


def execute(schedules: list[_C.schedule.Schedule], inputs: np.ndarray) -> list[np.ndarray]:
    """Every rank's outputs, [out chunk]; ``inputs`` is [rank, part], float64."""
    n = len(schedules)
    held = [
        np.concatenate([inputs[s.rank, s.part[: s.n_in]], np.full(s.n_out + s.n_scratch, np.nan)])
        for s in schedules
    ]
    at = [0] * n
    steps = [s.steps for s in schedules]
    while any(at[r] < len(steps[r]) for r in range(n)):
        current = min(steps[r][at[r]][2] for r in range(n) if at[r] < len(steps[r]))
        mine: list[list[_C.schedule._Step]] = []
        wires: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        for r in range(n):
            begin = at[r]
            while at[r] < len(steps[r]) and steps[r][at[r]][2] == current:
                at[r] += 1
            mine.append(steps[r][begin : at[r]])
            for op, peer, _, count, src, _, _ in mine[r]:
                if op == "send":
                    wires[r, peer].append(held[r][src : src + count].copy())
        for r in range(n):
            for op, peer, _, count, src, dst, left in mine[r]:
                own = held[r][src : src + count].copy()
                if op == "send":
                    continue
                if op in ("recv", "recv_reduce"):
                    if not wires[peer, r]:
                        raise Broken
                    incoming = wires[peer, r].popleft()
                    if len(incoming) != count:
                        raise Broken
                if op == "recv":
                    result = incoming
                elif op == "copy":
                    result = own
                else:
                    other = incoming if op == "recv_reduce" else held[r][dst : dst + count]
                    result = own + other if left else other + own
                held[r][dst : dst + count] = result
        if any(wires.values()):
            raise Broken
    return [h[s.n_in : s.n_in + s.n_out] for h, s in zip(held, schedules, strict=True)]


def inputs_for(n: int, n_parts: int) -> np.ndarray:
    """Numbers whose float64 sums depend on the order of adding."""
    rng = np.random.default_rng(n * 1000 + n_parts)
    return rng.standard_normal((n, n_parts)) * 10.0 ** rng.integers(-12, 12, (n, n_parts))


def expected(collective: str, inputs: np.ndarray, s: _C.schedule.Schedule) -> np.ndarray:
    """What rank ``s.rank``'s outputs are mathematically, from the definition of the collective."""
    parts = np.array(s.part[s.n_in : s.n_in + s.n_out], dtype=int)
    if collective in ("all_reduce", "reduce_scatter", "reduce"):
        return np.array([float(np.sum(inputs[:, p].astype(np.longdouble))) for p in parts])
    if collective in ("broadcast", "scatter"):
        return inputs[ROOT, parts]
    return inputs[parts, parts]


def check(collective: str, schedules: list[_C.schedule.Schedule]) -> None:
    """The numbers are right, and the same bits wherever two ranks hold the same part."""
    n, n_parts = len(schedules), schedules[0].n_parts
    inputs = inputs_for(n, n_parts)
    outputs = execute(schedules, inputs)
    seen: dict[int, bytes] = {}
    for s, out in zip(schedules, outputs, strict=True):
        right = expected(collective, inputs, s)
        scale = np.abs(inputs).sum(axis=0)[s.part[s.n_in : s.n_in + s.n_out]]
        assert not np.isnan(out).any()
        assert (np.abs(out - right) <= 1e-15 * n * scale).all()
        for part, value in zip(s.part[s.n_in : s.n_in + s.n_out], out, strict=True):
            assert seen.setdefault(part, value.tobytes()) == value.tobytes()


def build(collective: str, name: str, n: int) -> list[_C.schedule.Schedule]:
    return [core.build(collective, name, r, n, ROOT) for r in range(n)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_the_catalog_computes_what_it_says(collective: str, name: str) -> None:
    for n in (1, 2, 3, 4, 5, 8, 13):
        check(collective, build(collective, name, n))


def _pairs(draw: st.DrawFn, steps: list[_C.schedule._Step]) -> tuple[int, int]:
    return draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, len(steps) - 1))


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, str, list[_C.schedule.Schedule], list[int], str]:
    """An algorithm's schedules with one step dropped, swapped, duplicated or re-targeted on some rank."""
    collective, name = draw(st.sampled_from(NAMES))
    n = draw(st.integers(2, 6))
    schedules = build(collective, name, n)
    rank = draw(st.sampled_from([r for r in range(n) if schedules[r].steps]))
    s = schedules[rank]
    steps = s.steps
    i, j = _pairs(draw, steps)
    how = draw(st.sampled_from(["drop", "swap", "duplicate", "peer", "src", "dst", "round", "side", "op"]))
    op, peer, round_, count, src, dst, left = steps[i]
    chunk = st.integers(0, s.n_in + s.n_out + s.n_scratch)
    if how == "drop":
        del steps[i]
    elif how == "swap":
        steps[i], steps[j] = steps[j], steps[i]
    elif how == "duplicate":
        steps.insert(i, steps[i])
    elif how == "peer":
        steps[i] = (op, draw(st.integers(0, n)), round_, count, src, dst, left)
    elif how == "src":
        steps[i] = (op, peer, round_, count, draw(chunk), dst, left)
    elif how == "dst":
        steps[i] = (op, peer, round_, count, src, draw(chunk), left)
    elif how == "round":
        steps[i] = (op, peer, draw(st.integers(0, 12)), count, src, dst, left)
    elif how == "side":
        steps[i] = (op, peer, round_, count, src, dst, not left)
    else:
        other = draw(st.sampled_from(["send", "recv", "recv_reduce", "reduce", "copy"]))
        steps[i] = (other, peer, round_, count, src, dst, left)
    s.steps = steps
    return collective, name, schedules, [rank, i], how


@pytest.mark.timeout(110)
@given(mutated())
def test_a_mutation_is_refused_or_equivalent(
    case: tuple[str, str, list[_C.schedule.Schedule], list[int], str],
) -> None:
    collective, _, schedules, _, _ = case
    proof = core.verify_schedules(schedules, collective, ROOT)
    if proof.ok:
        check(collective, schedules)  # Broken, or a wrong number: the verifier let a bad schedule through
    else:
        assert proof.violation


def test_most_drops_are_refused_and_name_the_step() -> None:
    """Every dropped step of these algorithms matters, so none may pass; the message says where it breaks."""
    for collective, name in (("all_reduce", "ring"), ("all_reduce", "direct"), ("all_gather", "ring")):
        for rank in range(4):
            for i in range(len(core.build(collective, name, rank, 4).steps)):
                schedules = build(collective, name, 4)
                steps = schedules[rank].steps
                del steps[i]
                schedules[rank].steps = steps
                proof = core.verify_schedules(schedules, collective)
                assert not proof.ok
                assert "rank " in proof.violation


def test_verify_names_the_first_violated_step() -> None:
    schedules = build("all_reduce", "ring", 3)
    steps = schedules[1].steps
    op, peer, round_, count, _, dst, left = steps[1]
    steps[1] = (op, peer, round_, count, 1, dst, left)  # adds another part than the one that arrives
    schedules[1].steps = steps
    proof = core.verify_schedules(schedules, "all_reduce")
    assert (proof.ok, proof.rank, proof.step) == (False, 1, 1)
    assert "moves part 1 into a place for part 0" in proof.violation


def test_a_claim_of_the_canonical_tree_is_checked() -> None:
    ring, direct = build("all_reduce", "ring", 4), build("all_reduce", "direct", 4)
    assert core.verify_schedules(direct, "all_reduce", deterministic=True).ok
    proof = core.verify_schedules(ring, "all_reduce", deterministic=True)
    assert not proof.ok and "the canonical tree is ((0+1)+(2+3))" in proof.violation


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no algorithm 'rign'; expected one of: direct, one_shot, ring"):
        core.build("all_reduce", "rign", 0, 4)
    with pytest.raises(ValueError, match="expected one of: all_reduce, reduce_scatter"):
        core.build("allreduce", "ring", 0, 4)
    with pytest.raises(ScheduleError, match="rank is 4, expected 0 to 3"):
        core.build("all_reduce", "ring", 4, 4)
    with pytest.raises(ScheduleError, match="up to 1024 ranks can be verified"):
        core.verify("all_reduce", "ring", 1025)
    s = core.build("all_reduce", "ring", 0, 2)
    with pytest.raises(ValueError, match="step 0: op is 'jump'"):
        s.steps = [("jump", 0, 0, 1, 0, 0, False)]
    with pytest.raises(ValueError, match="over 20 bits"):
        s.steps = [("send", 1 << 20, 0, 1, 0, 0, False)]


def test_cost_is_the_closed_form_of_the_ring() -> None:
    n, size, alpha, beta, gamma = 8, 1e6, 2e-6, 1e-10, 3e-11
    cost = core.cost("all_reduce", "ring", n, size, alpha=alpha, beta=beta, gamma=gamma)
    assert cost.method == "simulated" and cost.rounds == 14
    by_hand = 2 * (n - 1) * (alpha + size / n * beta) + (n - 1) * size / n * gamma
    assert cost.seconds == pytest.approx(by_hand, rel=1e-12)
    assert cost.max_bytes_sent == pytest.approx(2 * (n - 1) * size / n)
