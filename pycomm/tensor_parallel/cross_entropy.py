"""The cross entropy of logits whose vocabulary is cut over the ranks: no rank ever has them all.

With logits x of (…, V), target t, label smoothing ε and l = log Σ_v exp x_v:

    loss = (1 − ε) (l − x_t) + ε (l − Σ_v x_v / V)          over the whole vocabulary V
    d loss / d x_v = exp(x_v − l) − (1 − ε) [v = t] − ε / V

A rank contributes four numbers for each token, in one all_gather: its largest logit m_r, Σ exp(x_v − m_r),
x_t where it has it, and Σ x_v; all ranks combine them in rank order, so they get the same bits. Computed in
float32 for float16 and bfloat16. The softmax is not kept: backward makes it from x and l, in the memory of
the gradient, and forward works block by block, so beside the logits and their gradient there is memory for
one block.

Source: M. Shoeybi et al., "Megatron-LM", 2019; C. Szegedy et al., "Rethinking the Inception Architecture",
2016 (label smoothing, as in ``torch.nn.functional.cross_entropy``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.embedding import check_ids
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.regions import (
    _apply,
    lengths_of,
    reduce_from_tensor_model_parallel_region,
)
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["vocab_parallel_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]
_BLOCK_ELEMS = 1 << 18  # 1 MiB of float32: stays in cache


@untraced
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    group: Group = None,
) -> Tensor:
    """``F.cross_entropy`` of logits of which each rank has a part of the vocabulary.

    Args:
        logits: (…, V_local), this rank's part of the vocabulary, after those of all lower ranks; parts may
            differ in size and be empty. Floating point.
        target: (…), ids of the whole vocabulary, the same on every rank.
        ignore_index: a target that counts neither in the loss nor in the mean.
        label_smoothing: in [0, 1], over the whole vocabulary.
        reduction: "mean" over the tokens that are not ignored (NaN when there are none), "sum" or "none".
            Where ranks of a data-parallel group ignore different numbers of tokens, the mean of their means
            is not the mean: use ``DistributedDataParallel.weighted``, or "sum".
        group: the ranks; see :mod:`pycomm.tensor_parallel.group`.

    Returns:
        The loss, the same bits on every rank: float32 for half precision, else the logits' dtype; (…) for
        "none", else without dimensions.

    Raises:
        IndexError: a target is outside of the vocabulary; on every rank, naming it.
        TypeError: targets are not integers (probabilities are not supported).
        ValueError: shapes, smoothing or reduction are wrong.

    Example:
        >>> vocab_parallel_cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 3]))
        tensor(1.3863)
    """
    comm = communicator_of(group, who="vocab_parallel_cross_entropy: group")
    with comm._refusing:
        _check(logits, target, label_smoothing, reduction)
    parts = lengths_of(logits.shape[-1], comm)
    start, size = sum(parts[: comm.rank]), sum(parts)
    check_ids("vocab_parallel_cross_entropy: target", target, size, comm, ignored=ignore_index)
    flat, ids = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1).long()
    is_kept = ids != ignore_index
    loss: Tensor = _apply(_CrossEntropy, flat, ids, is_kept, (start, size), label_smoothing, comm)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / is_kept.sum()


def _check(logits: Tensor, target: Tensor, smoothing: float, reduction: str) -> None:
    who = "vocab_parallel_cross_entropy"
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"{who}: target must have integer ids, got {target.dtype}; class probabilities are not supported"
        )
    if not logits.is_floating_point():
        raise TypeError(f"{who}: logits must be floating point, got {logits.dtype}")
    if logits.dim() < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{who}: logits (…, V_local) and target (…) do not fit: {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{who}: label_smoothing must be in [0, 1], got {smoothing!r}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{who}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _blocks(n_rows: int, n_columns: int) -> list[slice]:
    step = max(1, _BLOCK_ELEMS // max(1, n_columns))
    return [slice(a, min(a + step, n_rows)) for a in range(0, n_rows, step)]


def _local_facts(x: Tensor, ids: Tensor, start: int, with_sum: bool) -> Tensor:
    """(4, N): largest logit, Σ exp(x − largest), the target's logit, Σ x; of this rank's part."""
    n, v = x.shape
    facts = x.new_zeros((4, n), dtype=_wide(x.dtype))
    facts[0].fill_(-torch.inf)
    if v == 0:
        return facts
    for rows in _blocks(n, v):
        block = x[rows].to(facts.dtype)
        largest = block.amax(dim=1)
        facts[0, rows] = largest
        if with_sum:
            facts[3, rows] = block.sum(dim=1)
        # A part that is -inf throughout has a sum of 0, not NaN.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        facts[1, rows] = (block - shift.unsqueeze(1)).exp_().sum(dim=1)
    is_here = (ids >= start) & (ids < start + v)
    found = x.gather(1, (ids - start).masked_fill(~is_here, 0).unsqueeze(1)).squeeze(1)
    facts[2] = found.to(facts.dtype).masked_fill(~is_here, 0.0)
    return facts


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        is_kept: Tensor,
        place: tuple[int, int],
        smoothing: float,
        comm: Communicator,
    ) -> Tensor:
        start, size = place
        mine = _local_facts(x, ids, start, smoothing > 0.0)
        table = mine.new_empty(comm.size, *mine.shape)
        comm.all_gather(table, mine)
        largest = table[:, 0].amax(dim=0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        total, logit_of_target, total_logits = torch.zeros_like(mine[:3])
        for each in table:
            total += each[1] * (each[0] - shift).exp()
            logit_of_target += each[2]
            total_logits += each[3]
        log_total = shift + total.log()
        loss = log_total - logit_of_target
        if smoothing > 0.0:
            loss = (1.0 - smoothing) * loss + smoothing * (log_total - total_logits / size)
        ctx.save_for_backward(x, ids, is_kept, log_total)
        ctx.how = place, smoothing, comm
        masked: Tensor = loss.masked_fill_(~is_kept, 0.0)
        return masked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, ids, is_kept, log_total = ctx.saved_tensors
        (start, size), smoothing, comm = ctx.how
        if torch.is_grad_enabled():  # create_graph
            again = _in_plain_steps(x, ids, is_kept, (start, size), smoothing, comm)
            (d_x,) = torch.autograd.grad(again, x, gradient, create_graph=True)
            return d_x, None, None, None, None, None
        is_here = is_kept & (ids >= start) & (ids < start + x.shape[1])
        d_x = torch.empty_like(x)
        for rows in _blocks(*x.shape):
            block = (x[rows].to(log_total.dtype) - log_total[rows].unsqueeze(1)).exp_()
            if smoothing > 0.0:
                block -= smoothing / size
            at = is_here[rows].nonzero().flatten()
            block[at, ids[rows][at] - start] -= 1.0 - smoothing
            block *= gradient[rows].unsqueeze(1)
            # Of an ignored token the softmax may be NaN (all logits -inf), and 0 · NaN is not 0.
            d_x[rows] = block.masked_fill_(~is_kept[rows].unsqueeze(1), 0.0)
        return d_x, None, None, None, None, None


def _in_plain_steps(
    x: Tensor, ids: Tensor, is_kept: Tensor, place: tuple[int, int], smoothing: float, comm: Communicator
) -> Tensor:
    """The same loss in operations that autograd knows, to differentiate it more than once."""
    start, size = place
    wide = x.to(_wide(x.dtype))
    v = x.shape[1]
    largest = wide.detach().amax(dim=1) if v else wide.new_full((len(x),), -torch.inf)
    comm.all_reduce(largest, op="max")
    is_here = (ids >= start) & (ids < start + v)
    at = torch.zeros_like(wide, dtype=torch.bool)
    rows = is_here.nonzero().flatten()
    at[rows, ids[rows] - start] = True
    sums = torch.stack(
        [(wide - largest.unsqueeze(1)).exp().sum(1), wide.masked_fill(~at, 0.0).sum(1), wide.sum(1)]
    )
    total, logit_of_target, total_logits = reduce_from_tensor_model_parallel_region(sums, comm)
    log_total = largest + total.log()
    loss = log_total - logit_of_target
    if smoothing > 0.0:
        loss = (1.0 - smoothing) * loss + smoothing * (log_total - total_logits / size)
    masked: Tensor = loss.masked_fill(~is_kept, 0.0)
    return masked
