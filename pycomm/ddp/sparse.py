"""Sparse gradients (an Embedding with sparse=True): indices and values are gathered, and stay sparse.

The ranks' numbers of entries differ, so each gradient costs an exchange of the counts and two gatherings,
after the buckets. A gradient that is dense on some rank (a weight tied to a Linear) becomes dense on all.
Half precision is summed in float32, in rank order, the same on every rank. A communication hook is given
the gradients instead, one by one (pycomm/ddp/hooks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.averaging import average as average_dense
from pycomm.ddp.hooks import LooseHook

__all__ = ["reduce_loose", "sparse_average"]

_NONE, _SPARSE, _DENSE = 0, 1, 2
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def reduce_loose(
    comm: Communicator,
    parameters: Sequence[nn.Parameter],
    is_new: Sequence[bool],
    weight: float | None,
    hook: LooseHook | None = None,
) -> list[bool]:
    """Averages gradients that may be sparse, dense or absent on each rank. Collective.

    Args:
        comm: whose ranks average.
        parameters: in the same order on all ranks; their ``grad`` is replaced (dense ones are overwritten).
        is_new: whether this rank's gradient has changed since the last reduction.
        weight: this rank's share, None: 1/size.
        hook: reduces each of them that is new somewhere.

    Returns:
        For each parameter whether any rank's gradient was new; the others keep what they had.
    """
    size = comm.size
    mine = torch.zeros(len(parameters), 4, dtype=torch.int64)
    held: list[Tensor | None] = []
    for row, (parameter, new) in enumerate(zip(parameters, is_new, strict=True)):
        gradient = _counted(parameter.grad, weight)
        if gradient is None:
            held.append(None)
            continue
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.detach().coalesce()
            mine[row, :3] = torch.tensor([_SPARSE, gradient._nnz(), gradient.sparse_dim()])
        else:
            mine[row, 0] = _DENSE
        mine[row, 3] = new
        held.append(gradient)
    table = torch.empty(size, *mine.shape, dtype=torch.int64)
    comm.all_gather(table, mine)
    used = table[:, :, 3].any(dim=0).tolist()
    for row, parameter in enumerate(parameters):
        if not used[row]:
            continue
        kinds, dims = table[:, row, 0].tolist(), table[:, row, 2]
        sparse_dims = set(dims[table[:, row, 0] == _SPARSE].tolist())
        if _DENSE in kinds or len(sparse_dims) > 1:
            _reduce_dense(comm, parameter, held[row], weight, row, hook)
        elif hook is not None:
            mine_or_empty = held[row]
            if mine_or_empty is None:
                mine_or_empty = _empty(parameter, sparse_dims.pop())
            parameter.grad = hook.reduce(row, parameter, mine_or_empty, weight)
        else:
            counts = table[:, row, 1].tolist()
            parameter.grad = _gather(comm, parameter, held[row], counts, sparse_dims.pop(), weight)
    return used


def _reduce_dense(
    comm: Communicator,
    parameter: nn.Parameter,
    gradient: Tensor | None,
    weight: float | None,
    row: int,
    hook: LooseHook | None,
) -> None:
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if hook is not None:
        average = hook.reduce(row, parameter, gradient.detach(), weight)
        gradient.copy_(average.to_dense() if average.layout is not torch.strided else average)
    else:
        average_dense(comm, [gradient.detach()], weight)
    parameter.grad = gradient


def sparse_average(
    comm: Communicator,
    parameter: nn.Parameter,
    gradient: Tensor | None,
    weight: float | None,
    hook: LooseHook | None = None,
) -> Tensor:
    """The average of sparse gradients, None counting as zeros; sparse, coalesced. Collective.

    With ``hook``, what it makes of them (as its first bucket).
    """
    mine = torch.zeros(2, dtype=torch.int64)
    gradient = _counted(gradient, weight)
    if gradient is not None:
        gradient = gradient.detach().coalesce()
        mine = torch.tensor([gradient._nnz(), gradient.sparse_dim()])
    table = torch.empty(comm.size, 2, dtype=torch.int64)
    comm.all_gather(table, mine)
    sparse_dim = int(table[:, 1].max())
    if hook is not None:
        return hook.reduce(
            0, parameter, _empty(parameter, sparse_dim) if gradient is None else gradient, weight
        )
    return _gather(comm, parameter, gradient, table[:, 0].tolist(), sparse_dim, weight)


def _counted(gradient: Tensor | None, weight: float | None) -> Tensor | None:
    """The gradient, or zeros where it counts nothing: what a rank has of no input may be NaN."""
    return torch.zeros_like(gradient) if gradient is not None and weight == 0 else gradient


def _empty(parameter: nn.Parameter, sparse_dim: int) -> Tensor:
    """Sparse zeros, coalesced."""
    shape = parameter.shape
    return torch.sparse_coo_tensor(
        torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device),
        torch.empty(0, *shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device),
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _gather(
    comm: Communicator,
    parameter: nn.Parameter,
    gradient: Tensor | None,
    counts: list[int],
    sparse_dim: int,
    weight: float | None,
) -> Tensor:
    """All ranks' entries, each scaled by its rank's share, summed where they meet."""
    shape, dtype = parameter.shape, parameter.dtype
    if gradient is None:
        gradient = _empty(parameter, sparse_dim)
    share = 1.0 / comm.size if weight is None else weight
    values = gradient.values().to(_WIDE.get(dtype, dtype)) * share
    indices = gradient.indices().t().contiguous()
    n = sum(counts)
    all_indices = indices.new_empty(n, sparse_dim)
    all_values = values.new_empty(n, *values.shape[1:])
    comm.all_gather(all_indices, indices, counts=[c * sparse_dim for c in counts])
    width = int(values[:1].numel()) if values.shape[0] else int(torch.Size(values.shape[1:]).numel())
    comm.all_gather(all_values, values.contiguous(), counts=[c * width for c in counts])
    summed = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False).coalesce()
    return torch.sparse_coo_tensor(
        summed.indices(), summed.values().to(dtype), shape, is_coalesced=True, check_invariants=False
    )
