"""Learning rates for larger global batches, and the norm of all gradients in one pass.

With n replicas a step averages over n times as many samples. Two rules say how the learning rate should
follow: *linear*, lr · n (P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
for SGD), and *sqrt*, lr · √n, which keeps the variance of the step (A. Krizhevsky, "One weird trick for
parallelizing convolutional neural networks", 2014; the usual choice for Adam and its kin). Either is safer
with a warm-up that begins at the rate of one replica (Goyal et al., section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pycomm import _C
from pycomm.placement import cuda_index, current_stream

__all__ = ["LRScaling", "clip_grad_norm_", "scale_lr", "scaling_of"]

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


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the 2-norm, which is added up in float64.

    Local: after a backward of ``DistributedDataParallel`` all ranks have the same gradients, and get the same
    bits here. (A model cut over ranks has ``pycomm.tensor_parallel.clip_grad_norm_``.) On CUDA the squares of
    about 128 gradients, and how many of their elements are not finite, are one launch, and the host waits for
    nothing, unless it is to raise.

    Args:
        parameters: whose gradients are clipped, of floating or complex dtypes, dense, on one device or more;
            those without a gradient are left out.
        max_norm: what the norm is cut down to: gradients are multiplied by max_norm / (norm + 1e-6), at
            most 1.
        error_if_nonfinite: raise where an element is infinite or NaN, and change nothing; else gradients
            become NaN or 0 as torch's do.

    Returns:
        The norm before, float64 without dimensions, on the device of the first gradient; 0 on the CPU
        without any.

    Raises:
        TypeError: a gradient is sparse.
        RuntimeError: elements are not finite, when asked; the message says how many.

    Example:
        >>> import torch, pycomm.optim
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> pycomm.optim.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5., dtype=torch.float64)
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for place, parameter in enumerate(given):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"clip_grad_norm_: the gradient of parameter {place} is {gradient.layout}, expected a dense "
                "one; leave the parameter out, or make its layer with sparse=False"
            )
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    first = next(iter(alike), (torch.device("cpu"), torch.float64))[0]
    total = torch.zeros((), dtype=torch.float64, device=first)
    n_nonfinite = torch.zeros((), dtype=torch.int64, device=first)
    for gradients in alike.values():
        added, n_odd = squares(gradients)
        total += added.to(first)
        n_nonfinite += n_odd.to(first)
    norm = total.sqrt()
    if error_if_nonfinite and int(n_nonfinite) > 0:
        raise RuntimeError(
            f"clip_grad_norm_: {int(n_nonfinite)} elements of the gradients are infinite or NaN, so they "
            "cannot be clipped; find the first with torch.autograd.detect_anomaly, or pass "
            "error_if_nonfinite=False"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, _), gradients in alike.items():
        torch._foreach_mul_(gradients, factor.to(device))
    return norm


def squares(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the squares of gradients of one dtype and device, and how many elements are not finite."""
    dtype = gradients[0].dtype
    device = cuda_index(gradients[0])
    if device < 0:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        norms = [torch.linalg.vector_norm(g, dtype=wide) for g in gradients]
        odd = [g.numel() - torch.isfinite(g).sum() for g in gradients]
        return torch.stack(norms).square().sum(), torch.stack(odd).sum()
    name = str(dtype).removeprefix("torch.")
    plain = [g.resolve_conj().resolve_neg().contiguous() for g in gradients]
    blocks = [(g.data_ptr(), g.numel()) for g in plain]
    n_words = _C.cuda.norm_workspace_bytes(name, blocks) // 8
    workspace = torch.empty(n_words, dtype=torch.int64, device=plain[0].device)
    result = torch.empty(2, dtype=torch.int64, device=plain[0].device)
    stream = current_stream(device)
    _C.cuda.norm(name, blocks, workspace.data_ptr(), result.data_ptr(), device, stream)
    return result[:1].view(torch.float64)[0], result[1]
