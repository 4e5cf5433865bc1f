"""A list of layers in contiguous parts, so that the costliest part is as cheap as can be; exact, not a
heuristic.

best(i, k) = min over j < i of max(best(j, k - 1), (cost of layers j … i - 1) / speed of part k - 1): dynamic
programming over how many layers the first k parts hold, O(layers^2 parts). Among the cuts with the least
maximum, the one whose later parts are longest is taken: activations are larger on early ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["partition"]


def partition(costs: Sequence[float], n_parts: int, speeds: Sequence[float] | None = None) -> list[range]:
    """The layers of each part.

    Args:
        costs: of each layer, in any unit, none below 0.
        n_parts: at least 1; no part is empty.
        speeds: of the rank of each part: a part costs its layers' sum divided by this; None: all alike.

    Returns:
        For each part the numbers of its layers.

    Raises:
        ValueError: fewer layers than parts, or a cost or speed that is none.

    Example:
        >>> partition([4, 1, 1, 1, 1], 2)
        [range(0, 1), range(1, 5)]
        >>> partition([1, 1, 1, 1], 2, speeds=[3, 1])
        [range(0, 3), range(3, 4)]
    """
    n = len(costs)
    speeds = [1.0] * n_parts if speeds is None else list(speeds)
    if n_parts < 1 or n < n_parts:
        raise ValueError(f"{n} layers cannot make {n_parts} parts with at least one layer each")
    if len(speeds) != n_parts or not all(0 < s < math.inf for s in speeds):
        raise ValueError(f"expected {n_parts} speeds above 0, one for each part, got {speeds}")
    if not all(0 <= c < math.inf for c in costs):
        raise ValueError(f"the cost of a layer must be a number of at least 0, got {list(costs)}")
    before = [0.0]  # the cost of the layers before each
    for cost in costs:
        before.append(before[-1] + cost)
    best = [0.0] + [math.inf] * n
    cuts: list[list[int]] = []
    for part in range(n_parts):
        now, cut = [math.inf] * (n + 1), [0] * (n + 1)
        for i in range(part + 1, n - (n_parts - part - 1) + 1):
            for j in range(part, i):
                worst = max(best[j], (before[i] - before[j]) / speeds[part])
                if worst < now[i]:
                    now[i], cut[i] = worst, j
        best = now
        cuts.append(cut)
    parts: list[range] = []
    end = n
    for cut in reversed(cuts):
        parts.append(range(cut[end], end))
        end = cut[end]
    return parts[::-1]
