"""The loss of a batch, made of its microbatches' as they come.

With c_k the count of microbatch k (its samples, or what ``count`` says of its target, such as tokens that are
not ignored) the loss is the sum of c_k / C times the loss of microbatch k, C being the sum of all counts,
over ``count_group`` too. So gradients are the batch's whatever the microbatches' sizes, and accumulate over
steps without being scaled again.

With a ``count_group`` of n replicas, whose gradients DDP averages, a replica's loss is n times its part: the
mean of the replicas' losses is that of the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.pipeline import microbatches
from pycomm.pipeline.messages import leaves

__all__ = ["Losses", "shared"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Losses:
    """How a schedule's last stage makes them.

    Args:
        name: of the schedule, for errors.
        loss_fn: of the last stage's output and target, of one microbatch.
        n_microbatches: in which a batch is cut.
        scales: whether ``loss_fn`` is a mean; else it is a sum, and losses are added.
        count: of a microbatch's target, what its loss is a mean over; None: its samples.
        count_comm: of the replicas whose batches are one batch; None: no others.

    Raises:
        ValueError: ``loss_fn`` is one of torch's with a ``reduction`` that does not fit ``scales``.
    """

    def __init__(
        self,
        name: str,
        loss_fn: Callable[..., Tensor] | None,
        n_microbatches: int,
        scales: bool,
        count: Callable[[Any], float] | None,
        count_comm: Communicator | None,
    ) -> None:
        _check_reduction(name, loss_fn, scales)
        self._name, self.loss_fn, self._n = name, loss_fn, n_microbatches
        self._scales, self._count, self._count_comm = scales, count, count_comm
        self.plain: list[Tensor] = []  #: of the last batch's microbatches as loss_fn made them

    def of(
        self, target: Any, loss_kwargs: Mapping[str, Any] | None, who: str
    ) -> Callable[[Any, int], Tensor]:
        """What makes the weighed loss of an output and a microbatch's number. Collective over ``count_comm``.

        Args:
            target: of the whole batch.
            loss_kwargs: further arguments of ``loss_fn``.
            who: the rank and class, for errors.

        Raises:
            ValueError: no ``loss_fn`` or target, one that cannot be cut, or counts that are none.
        """
        if self.loss_fn is None:
            raise ValueError(
                f"{self._name}: {who} has the last stage and needs a loss_fn to train: give it one, or call "
                "eval for outputs alone"
            )
        if target is None:
            raise ValueError(
                f"{self._name}: {who} has the last stage and got no target: give target= the whole batch's, "
                "on that rank"
            )
        loss_fn, further = self.loss_fn, dict(loss_kwargs or {})
        targets = microbatches.cut(target, self._n, "target")
        weights = self._weights(targets)
        plain: list[Any] = [None] * self._n
        self.plain = plain

        def loss(output: Any, k: int) -> Tensor:
            if weights[k] == 0:  # the mean of nothing is no number
                made = _nothing(output)
                plain[k] = made.detach()
                return made
            made = loss_fn(output, targets[k], **further)
            self._check(made, output, k)
            plain[k] = made.detach()
            return made * weights[k]

        return loss

    def _check(self, made: Any, output: Any, k: int) -> None:
        where = f"{self._name}: loss_fn, microbatch {k}"
        if not isinstance(made, Tensor) or made.dtype not in _DTYPES:
            what = made.dtype if isinstance(made, Tensor) else type(made).__name__
            raise TypeError(f"{where}: expected a floating-point tensor, got {what}")
        if made.numel() != 1:
            raise ValueError(
                f"{where}: expected one number, got shape {tuple(made.shape)}; take the mean over what it "
                "counts, or the sum with scale_grads=False"
            )
        if (
            torch.is_grad_enabled()
            and not made.requires_grad
            and any(t.requires_grad for t in leaves(output))
        ):
            raise RuntimeError(
                f"{where}: the loss needs no gradient although the output does: loss_fn detaches it, or "
                "computes it without autograd"
            )

    def _weights(self, targets: list[Any]) -> list[float]:
        if not self._scales:
            return [1.0] * len(targets)
        counts = [
            float(self._count(t)) if self._count is not None else float(microbatches.n_samples(t) or 1)
            for t in targets
        ]
        if not all(0 <= c < math.inf for c in counts):
            raise ValueError(f"{self._name}: counts must be numbers of at least 0, got {counts}")
        total, n = sum(counts), 1
        if self._count_comm is not None:
            all_counts = torch.tensor([total], dtype=torch.float64)
            self._count_comm.all_reduce(all_counts)
            total, n = float(all_counts), self._count_comm.size
        if total == 0:
            raise ValueError(f"{self._name}: the targets of the whole batch count nothing")
        return [c * n / total for c in counts]


def _check_reduction(name: str, loss_fn: Callable[..., Tensor] | None, is_mean: bool) -> None:
    """A sum where a mean is needed would come out too small without a word."""
    reduction: Any
    if isinstance(loss_fn, nn.modules.loss._Loss):
        reduction, which = loss_fn.reduction, type(loss_fn).__name__
    elif isinstance(loss_fn, functools.partial):
        reduction, which = loss_fn.keywords.get("reduction"), getattr(loss_fn.func, "__name__", "partial")
    else:
        return
    if reduction == "sum" and is_mean:
        raise ValueError(
            f"{name}: loss_fn is {which} with reduction='sum', but microbatches' losses are averaged: give "
            "it reduction='mean' for the batch's mean, or the schedule scale_grads=False for the batch's sum"
        )
    if reduction == "none":
        raise ValueError(
            f"{name}: loss_fn is {which} with reduction='none', but a loss is one number: give it "
            "reduction='mean'"
        )


def _nothing(output: Any) -> Tensor:
    """0 that depends on the output, whatever its values."""
    parts = [leaf.flatten()[:0].sum() for leaf in leaves(output) if leaf.dtype in _DTYPES]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def shared(loss: Tensor | None, comm: Communicator, root: int) -> Tensor | None:
    """The loss of one rank, on every rank: the same number of the same dtype. Collective.

    Args:
        loss: of rank ``root``, without dimensions; None: it has none. Other ranks' are not looked at.
        comm: of the ranks.
        root: whose it is.
    """
    told = torch.zeros(2, dtype=torch.float64)  # which all of _DTYPES fit in
    if comm.rank == root:
        told[0] = 0.0 if loss is None else loss
        told[1] = -1 if loss is None else _DTYPES.index(loss.dtype)
    comm.broadcast(told, root)
    if comm.rank == root:
        return loss
    return None if told[1] < 0 else told[0].to(_DTYPES[int(told[1])])
