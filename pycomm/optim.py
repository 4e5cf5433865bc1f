"""Learning rates for larger global batches.

With n replicas a step averages over n times as many samples. Two rules say how the learning rate should
follow: *linear*, lr · n (P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
for SGD), and *sqrt*, lr · √n, which keeps the variance of the step (A. Krizhevsky, "One weird trick for
parallelizing convolutional neural networks", 2014; the usual choice for Adam and its kin). Either is safer
with a warm-up that begins at the rate of one replica (Goyal et al., section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["LRScaling", "scale_lr", "scaling_of"]

Rule = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class LRScaling:
    """What :func:`scale_lr` did to an optimizer."""

    world_size: int
    rule: Rule
    #: Every group's learning rate was multiplied by this.
    factor: float
    warmup_steps: int


_RULES: tuple[Rule, ...] = ("linear", "sqrt")
# In every parameter group, as numbers, which every kind of checkpoint takes: a rate that is loaded is known
# to be scaled.
_SIZE, _RULE, _WARMUP = "lr_scaling_world_size", "lr_scaling_rule", "lr_scaling_warmup_steps"


def _factor(world_size: int, rule: Rule) -> float:
    return float(world_size) if rule == "linear" else math.sqrt(world_size)


def scale_lr(
    optimizer: Optimizer, *, world_size: int, rule: Rule = "linear", warmup_steps: int = 0
) -> LambdaLR:
    """Scales the learning rate of every parameter group for ``world_size`` replicas, with a warm-up.

    Group g's rate becomes lr_g · k with k = world_size ("linear") or √world_size ("sqrt"). During the first
    ``warmup_steps`` calls of the scheduler's ``step`` it rises in a straight line from lr_g to lr_g · k. What
    the optimizer's rate is at the time of the call counts as lr_g, so call it once, before other schedulers
    are made (they then see the scaled rate: ``SequentialLR``, ``ChainedScheduler``), and when training is
    resumed before the optimizer's ``load_state_dict``, whose rates are scaled ones; that it was scaled, is
    kept in the optimizer's state.

    Args:
        optimizer: any torch optimizer; its groups' ``lr`` and ``initial_lr`` change at once.
        world_size: how many replicas average their gradients, at least 1.
        rule: "linear" or "sqrt".
        warmup_steps: steps of the warm-up, at least 0.

    Returns:
        A scheduler whose ``step`` is to be called once after each ``optimizer.step()``; needed only with a
        warm-up. Its ``state_dict`` holds where the warm-up is.

    Raises:
        ValueError: an argument is out of range, or the optimizer, or the one whose state it has loaded, was
            scaled before.
        TypeError: ``optimizer`` is no torch optimizer.

    Example:
        >>> import torch, pycomm.optim
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> warmup = pycomm.optim.scale_lr(sgd, world_size=8, rule="linear", warmup_steps=100)
        >>> round(sgd.param_groups[0]["lr"], 6), round(warmup.base_lrs[0], 6)
        (0.1, 0.8)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"scale_lr: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    size: Any = world_size
    steps: Any = warmup_steps
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"scale_lr: world_size must be an integer of at least 1, got {world_size!r}")
    if rule not in _RULES:
        raise ValueError(f"scale_lr: rule must be 'linear' or 'sqrt', got {rule!r}")
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"scale_lr: warmup_steps must be an integer of at least 0, got {warmup_steps!r}")
    if (before := scaling_of(optimizer)) is not None:
        raise ValueError(
            f"scale_lr: this optimizer, or the one whose state it has loaded, was scaled before ({before}), "
            "so its rate would be scaled twice; to resume, call scale_lr first and load_state_dict then"
        )
    factor = _factor(world_size, rule)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # a new tensor where the rate is one: graphs may hold the old
        group["initial_lr"] = group["lr"]
        group |= {_SIZE: world_size, _RULE: _RULES.index(rule), _WARMUP: warmup_steps}

    def share(step: int) -> float:
        """Of the scaled rate, after ``step`` steps."""
        if step >= warmup_steps:
            return 1.0
        return (1.0 + (factor - 1.0) * step / warmup_steps) / factor

    return LambdaLR(optimizer, share)


def scaling_of(optimizer: Optimizer) -> LRScaling | None:
    """What :func:`scale_lr` did to this optimizer, or to the one whose state it has loaded; None: nothing.

    Example:
        >>> import torch, pycomm.optim
        >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
        >>> pycomm.optim.scaling_of(adam) is None
        True
    """
    for group in optimizer.param_groups:
        if _SIZE in group:
            size, rule = int(group[_SIZE]), _RULES[int(group[_RULE])]
            return LRScaling(size, rule, _factor(size, rule), int(group[_WARMUP]))
    return None
