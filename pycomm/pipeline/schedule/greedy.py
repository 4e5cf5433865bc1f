"""Orders by looking one action ahead: each rank takes the most urgent that is ready and that memory allows.

All of F, I and W take one tick. Urgent first: an I (the stage before waits for it), of the oldest
microbatch; an F, if the rank keeps fewer activations than its limit, of its deepest stage; a W, which
nobody waits for. The limit is what tells the members of the zero-bubble family apart.
"""

from __future__ import annotations

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order

__all__ = ["greedy"]


def greedy(name: str, placement: tuple[int, ...], n_ranks: int, m: int, limits: list[int]) -> Order:
    """An order for ranks that keep at most ``limits[rank]`` activations (stage, microbatch) each."""
    n_stages = len(placement)
    stages = [[s for s in range(n_stages) if placement[s] == rank] for rank in range(n_ranks)]
    n_done = {kind: [0] * n_stages for kind in "FIW"}  # microbatches go through a stage in order
    actions: list[list[Action]] = [[] for _ in range(n_ranks)]

    def is_ready(kind: str, s: int) -> bool:
        k = n_done[kind][s]
        if k == m:
            return False
        if kind == "F":
            return s == 0 or n_done["F"][s - 1] > k
        if kind == "W":
            return n_done["I"][s] > k
        return n_done["F"][s] > k and (s == n_stages - 1 or n_done["I"][s + 1] > k)

    def choose(rank: int) -> Action | None:
        ready = {kind: [s for s in stages[rank] if is_ready(kind, s)] for kind in "FIW"}
        if ready["I"]:
            s = min(ready["I"], key=lambda s: (n_done["I"][s], -s))
            return Action(s, "I", n_done["I"][s])
        live = sum(n_done["F"][s] - n_done["W"][s] for s in stages[rank])
        if ready["F"] and live < limits[rank]:
            s = max(ready["F"])
            return Action(s, "F", n_done["F"][s])
        if ready["W"]:
            s = min(ready["W"], key=lambda s: (n_done["W"][s], -s))
            return Action(s, "W", n_done["W"][s])
        return None

    while sum(map(len, actions)) < 3 * n_stages * m:
        chosen = [choose(rank) for rank in range(n_ranks)]
        if not any(chosen):
            raise ValueError(f"{name}: with {limits} activations on the ranks no microbatch gets through")
        for rank, action in enumerate(chosen):
            if action is not None:
                actions[rank].append(action)
                n_done[action.kind][action.stage] += 1
    return Order(name, placement, m, tuple(map(tuple, actions)))
