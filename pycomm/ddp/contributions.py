"""What a rank gives to a bucket: its gradients as they lie, and stand-ins where it has none.

A *stand-in* takes the place of a gradient that did not come or cannot be reduced: what the parameter's
gradient already holds, else zeros. Each is a problem that the end of backward settles
(pycomm/ddp/resolve.py).
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pycomm import _C
from pycomm.ddp.agree import in_memory_order
from pycomm.ddp.plan import Bucket
from pycomm.ddp.problems import Problem, Whole

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["contributions"]


def contributions(reducer: Reducer, bucket: Bucket, known: Set[int] | None) -> list[Tensor]:
    """What this rank gives; with ``known``, only of these parameters a gradient has come."""
    gradients: list[Tensor] | None = None
    # A module that was moved to another device has buckets on the old one: they get stand-ins.
    if known is None and bucket.parameters[0].device == bucket.device:
        gradients = _C.plain_gradients(bucket.parameters, bucket.dtype, torch.strided)
    if gradients is None:
        gradients = _with_stand_ins(reducer, bucket, [p.grad for p in bucket.parameters], known)
    if sum(map(Tensor.numel, gradients)) != bucket.n_elems:
        gradients = _reshaped(reducer, bucket, gradients)
    if bucket.views is not None and _move_into(reducer, bucket, bucket.views, gradients):
        assert bucket.laid_out is not None
        return bucket.laid_out
    if bucket.orders is not None:
        return [in_memory_order(g, o) for g, o in zip(gradients, bucket.orders, strict=True)]
    return gradients


def _with_stand_ins(
    reducer: Reducer, bucket: Bucket, found: list[Tensor | None], known: Set[int] | None
) -> list[Tensor]:
    """The gradients found, with a stand-in where one cannot be contributed."""
    gradients = []
    for index, gradient in zip(bucket.indices, found, strict=True):
        if (
            gradient is None
            or gradient.dtype is not bucket.dtype
            or gradient.layout is not torch.strided
            or type(gradient) is not Tensor
            or gradient.device != bucket.device
            or (known is not None and index not in known)
        ):
            gradient = _stand_in(reducer, bucket, index, gradient, known is None)
        # The graph, where there is one (create_graph), stays with the parameter's; the value is averaged.
        gradients.append(gradient.detach() if gradient.requires_grad else gradient)
    return gradients


def _move_into(reducer: Reducer, bucket: Bucket, views: list[Tensor], gradients: list[Tensor]) -> bool:
    """Makes gradients aliases of the bucket's memory; False, and none moved, when some must stay."""
    away = []
    for index, parameter, view, gradient in zip(
        bucket.indices, bucket.parameters, views, gradients, strict=True
    ):
        # Addresses, not identities: a cast of the module gives the same tensor other memory.
        if gradient.data_ptr() == view.data_ptr():
            continue
        if index in reducer.stand_ins or parameter.grad is not gradient:
            return False
        away.append((parameter, view, gradient))
    for parameter, view, gradient in away:
        view.copy_(gradient)
        parameter.grad = view.detach()
    return True


def _stand_in(
    reducer: Reducer, bucket: Bucket, index: int, gradient: Tensor | None, has_come: bool
) -> Tensor:
    parameter, shape = reducer.parameters[index], reducer.plan.shapes[index]
    keeps = False
    if gradient is None:
        problem = Problem.GONE if has_come or index in reducer.came else Problem.UNUSED
    elif gradient.layout is torch.sparse_coo and gradient.dtype is bucket.dtype:
        problem = Problem.SPARSE
    elif (
        gradient.dtype is not bucket.dtype
        or type(gradient) is not Tensor
        or gradient.shape != shape
        or gradient.device != bucket.device
    ):
        problem = Problem.RETYPED
    else:
        problem, keeps = Problem.UNUSED, True
    reducer.problems[index] = problem
    if keeps and gradient is not None:
        stand_in = gradient.detach().clone()
    elif (parameter.dtype, parameter.device, parameter.shape) == (bucket.dtype, bucket.device, shape):
        stand_in = torch.zeros_like(parameter, requires_grad=False)
    else:
        stand_in = torch.zeros(shape, dtype=bucket.dtype, device=bucket.device)
    reducer.stand_ins[index] = stand_in
    return stand_in


def _reshaped(reducer: Reducer, bucket: Bucket, gradients: list[Tensor]) -> list[Tensor]:
    """Somebody gave ``parameter.data`` another shape: stand-ins, and the structure has changed."""
    reducer.whole |= Whole.CHANGED
    return [
        g if g.shape == reducer.plan.shapes[i] else _stand_in(reducer, bucket, i, g, True)
        for i, g in zip(bucket.indices, gradients, strict=True)
    ]
