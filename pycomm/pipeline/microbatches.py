"""A batch in microbatches, and their outputs as a batch again.

Tensors are cut along dimension 0 (or the one that a ``TensorChunkSpec`` names) into pieces as equal as can
be, the larger ones first; with fewer samples than microbatches that is an error. Everything else goes to
each microbatch as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

__all__ = ["merge", "n_samples", "split"]


def _pieces(value: Any, spec: Any, n: int, where: str) -> list[Any]:
    if isinstance(value, Tensor) and not isinstance(spec, _Replicate):
        dim = spec.split_dim if isinstance(spec, TensorChunkSpec) else 0
        if value.dim() == 0:
            return [value] * n
        if value.shape[dim] < n:
            raise ValueError(
                f"{where}: dimension {dim} of a tensor of shape {tuple(value.shape)} cannot be cut into {n} "
                "microbatches; give a larger batch, or make the schedule with fewer microbatches"
            )
        return list(torch.tensor_split(value, n, dim))
    if isinstance(value, (tuple, list)) and not isinstance(spec, _Replicate):
        inner = spec if isinstance(spec, (tuple, list)) else [spec] * len(value)
        columns = [
            _pieces(item, s, n, f"{where}[{i}]") for i, (item, s) in enumerate(zip(value, inner, strict=True))
        ]
        return [type(value)(column[k] for column in columns) for k in range(n)]
    if isinstance(value, dict) and not isinstance(spec, _Replicate):
        rows = {
            key: _pieces(item, spec.get(key) if isinstance(spec, dict) else spec, n, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        return [{key: row[k] for key, row in rows.items()} for k in range(n)]
    return [value] * n


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n: int,
    args_spec: tuple[Any, ...] | None = None,
    kwargs_spec: dict[str, Any] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of each microbatch.

    Args:
        args, kwargs: of a whole batch; nests of tensors and other values.
        n: microbatches.
        args_spec, kwargs_spec: torch's ``TensorChunkSpec`` or ``_Replicate`` for each; None: dimension 0.

    Raises:
        ValueError: a tensor is too short to be cut.

    Example:
        >>> [a[0].tolist() for a, _ in split((torch.arange(5),), {}, 2)]
        [[0, 1, 2], [3, 4]]
    """
    by_arg = _pieces(args, args_spec, n, "args")
    by_name = _pieces(kwargs, kwargs_spec, n, "kwargs")
    return list(zip(by_arg, by_name, strict=True))


def n_samples(value: Any) -> int | None:
    """The size of dimension 0 of the first tensor that has one."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((n for item in items if (n := n_samples(item)) is not None), None)


def merge(outputs: list[Any]) -> Any:
    """The outputs of microbatches as one: tensors along dimension 0, scalars stacked, others in a list."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, (tuple, list)):
        return type(first)(merge(list(items)) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        return {key: merge([output[key] for output in outputs]) for key in first}
    return first if all(type(o) is type(first) and o == first for o in outputs) else outputs
