"""BatchNorm whose running statistics are those of the whole batch, not of its microbatches.

In training each microbatch is normalised by its own mean and variance: a microbatch cannot wait for the
others' without all ranks waiting for each other at every normalisation. But the *running* statistics,
which evaluation uses, are updated once a step, with the mean and the unbiased variance over all microbatches,
each value counted once whatever the microbatches' sizes: what one process's BatchNorm makes of the same
inputs. Plain BatchNorm under a pipeline updates them once a microbatch, with variances that miss what the
microbatches' means differ by.

Two sets of values, of sizes a and b, join as mean += d b / (a + b), m2 += m2_b + d^2 a b / (a + b), d being
the difference of their means; in float64 (Chan et al., 1979).

Source: torchgpipe's DeferredBatchNorm, which counts forwards; here the schedule says when a step ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pycomm.pipeline.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm", "deferred_norms", "deferring"]


class _Sums:
    """Of all values of a step: how many, their means and sums of squared differences from these."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = self.m2 = torch.zeros((), dtype=torch.float64)

    def add(self, n: int, mean: Tensor, var: Tensor) -> None:
        """Joins a microbatch of n values with this unbiased variance."""
        total = self.n + n
        difference = mean.double() - self.mean
        self.mean = self.mean + difference * (n / total)
        self.m2 = self.m2 + var.double() * (n - 1) + difference**2 * (self.n * n / total)
        self.n = total


class DeferredBatchNorm(_BatchNorm):
    """See the file's text; made by :func:`convert_deferred_batch_norm`. Outside of a step a plain one."""

    _sums: _Sums | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a microbatch; its statistics are noted."""
        sums = self._sums
        if self.running_mean is None or self.running_var is None or not self.training:
            return super().forward(input)
        if sums is None and not is_recomputing():
            return super().forward(input)
        check: Any = self._check_input_dim  # has no types
        check(input)
        n = input.numel() // input.shape[1]
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        # With momentum 1 the "running" statistics are the microbatch's: no second pass over the input.
        output = nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        if sums is not None and n > 0 and not is_recomputing():
            sums.add(n, mean, var)
        return output

    def commit(self) -> None:
        """The step's one update."""
        sums, self._sums = self._sums, None
        if sums is None or sums.n == 0 or self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            factor = self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if factor is None:
                    factor = 1.0 / float(self.num_batches_tracked)
            assert factor is not None
            for running, now in ((self.running_mean, sums.mean), (self.running_var, sums.m2 / (sums.n - 1))):
                running.copy_((1.0 - factor) * running.double() + factor * now)


class _Deferred1d(DeferredBatchNorm, nn.BatchNorm1d):
    pass


class _Deferred2d(DeferredBatchNorm, nn.BatchNorm2d):
    pass


class _Deferred3d(DeferredBatchNorm, nn.BatchNorm3d):
    pass


_CLASSES: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: _Deferred1d,
    nn.BatchNorm2d: _Deferred2d,
    nn.BatchNorm3d: _Deferred3d,
}


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Replaces every BatchNorm in a module by one with the running statistics of whole batches.

    Before stages are made of it. Parameters, buffers, hooks and names stay the same objects, so a
    ``state_dict`` fits before and after. Works with checkpointing, microbatches of any sizes, any schedule;
    in evaluation, with ``momentum=None`` and outside of a pipeline it is as BatchNorm.

    Args:
        module: the model, or a stage's part of it.

    Returns:
        The module; another one if it is itself a BatchNorm.

    Raises:
        TypeError: a batch normalisation of another class that has running statistics.

    Example:
        >>> net = convert_deferred_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> isinstance(net[1], nn.BatchNorm2d) and isinstance(net[1], DeferredBatchNorm)
        True
    """
    made: dict[nn.Module, nn.Module] = {}

    def converted(m: nn.Module, name: str) -> nn.Module:
        if not isinstance(m, _BatchNorm) or isinstance(m, DeferredBatchNorm) or not m.track_running_stats:
            return m
        kind = _CLASSES.get(type(m))
        if kind is None:
            raise TypeError(
                f"convert_deferred_batch_norm: {name or 'the module'!r} is a {type(m).__name__}, only "
                "BatchNorm1d, BatchNorm2d and BatchNorm3d can be deferred; convert parts without it, or make "
                "it one of these (lazy ones by a first forward)"
            )
        if m not in made:
            made[m] = kind.__new__(kind)
            made[m].__dict__ = dict(m.__dict__)
        return made[m]

    for path, outer in list(module.named_modules()):
        for name, child in list(outer._modules.items()):
            if child is not None:
                outer._modules[name] = converted(child, f"{path}.{name}" if path else name)
    return converted(module, "")


def deferred_norms(modules: Iterable[nn.Module]) -> list[DeferredBatchNorm]:
    """Those in some modules."""
    return [m for module in modules for m in module.modules() if isinstance(m, DeferredBatchNorm)]


@contextlib.contextmanager
def deferring(norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """A step: its statistics are committed at the end, or forgotten with an error."""
    for norm in norms:
        norm._sums = _Sums()
    try:
        yield
        for norm in norms:
            norm.commit()
    finally:
        for norm in norms:
            norm._sums = None
