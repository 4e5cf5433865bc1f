"""A batch in microbatches, and their outputs as a batch again.

Tensors are cut along dimension 0 (or the one that a ``TensorChunkSpec`` names) into pieces as equal as can
be, the larger ones first; with fewer samples than microbatches that is an error. Everything else goes to
each microbatch as it is.

Tensors that are cut belong together: two of them are cut *alike* when microbatch k has the same share of
both, for every k (10 rows and 10, or 6 and 3 in three). Others would pair a microbatch's rows with those of
another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

__all__ = ["are_alike", "check_alike", "cut", "cut_sizes", "merge", "n_samples", "split"]


def _like(value: Any, items: Iterable[Any]) -> Any:
    """A tuple or list of the same class."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _inner(value: tuple[Any, ...] | list[Any], spec: Any, where: str) -> list[Any]:
    """The specs of the items of a tuple or list."""
    if not isinstance(spec, (tuple, list)):
        return [spec] * len(value)
    if len(spec) != len(value):
        raise ValueError(f"{where}: {len(value)} values, and a chunk spec of {len(spec)}: give one for each")
    return list(spec)


def _dim(value: Tensor, spec: Any, where: str) -> int | None:
    """Along which a tensor is cut."""
    dim: int = spec.split_dim if isinstance(spec, TensorChunkSpec) else 0
    if value.dim() == 0:
        return None
    if not -value.dim() <= dim < value.dim():
        raise ValueError(f"{where}: a tensor of shape {tuple(value.shape)} has no dimension {dim} to be cut")
    return dim


def _pieces(value: Any, spec: Any, n: int, where: str) -> list[Any]:
    if isinstance(spec, _Replicate):
        return [value] * n
    if isinstance(value, Tensor):
        dim = _dim(value, spec, where)
        if dim is None:
            return [value] * n
        if value.shape[dim] < n:
            raise ValueError(
                f"{where}: dimension {dim} of a tensor of shape {tuple(value.shape)} cannot be cut into {n} "
                "microbatches; give a larger batch, or make the schedule with fewer microbatches"
            )
        return list(torch.tensor_split(value, n, dim))
    if isinstance(value, (tuple, list)):
        inner = _inner(value, spec, where)
        columns = [
            _pieces(item, s, n, f"{where}[{i}]") for i, (item, s) in enumerate(zip(value, inner, strict=True))
        ]
        return [_like(value, (column[k] for column in columns)) for k in range(n)]
    if isinstance(value, dict):
        rows = {
            key: _pieces(item, spec.get(key) if isinstance(spec, dict) else spec, n, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        return [{key: row[k] for key, row in rows.items()} for k in range(n)]
    return [value] * n


def cut_sizes(value: Any, spec: Any, where: str) -> list[tuple[str, int]]:
    """Of every tensor that :func:`split` cuts: what it is called, and how long it is in that dimension.

    Args:
        value: a nest.
        spec: torch's ``TensorChunkSpec`` or ``_Replicate``, a nest of these, or None: dimension 0.
        where: what the nest is called.

    Example:
        >>> cut_sizes({"x": torch.ones(5, 2), "n": 3}, None, "kwargs")
        [("kwargs['x']", 5)]
    """
    if isinstance(spec, _Replicate):
        return []
    if isinstance(value, Tensor):
        dim = _dim(value, spec, where)
        return [] if dim is None else [(where, value.shape[dim])]
    if isinstance(value, (tuple, list)):
        parts = [
            (f"{where}[{i}]", *both)
            for i, both in enumerate(zip(value, _inner(value, spec, where), strict=True))
        ]
    elif isinstance(value, dict):
        parts = [
            (f"{where}[{key!r}]", item, spec.get(key) if isinstance(spec, dict) else spec)
            for key, item in value.items()
        ]
    else:
        return []
    return [found for name, item, inner in parts for found in cut_sizes(item, inner, name)]


def are_alike(a: int, b: int, n: int) -> bool:
    """Whether tensors of a and b rows are cut alike into n microbatches.

    Example:
        >>> are_alike(10, 10, 4), are_alike(6, 3, 3), are_alike(6, 4, 3)
        (True, True, False)
    """
    sizes = [[total // n + (k < total % n) for total in (a, b)] for k in range(n)]
    return all(x * sizes[0][1] == y * sizes[0][0] for x, y in sizes)


def check_alike(sizes: Iterable[tuple[str, int]], n: int, who: str = "") -> None:
    """Raises unless all tensors of a call are cut alike.

    Args:
        sizes: of :func:`cut_sizes`.
        n: microbatches.
        who: begins the error.

    Raises:
        ValueError: two are not; the text names both.
    """
    first: tuple[str, int] | None = None
    for name, size in sizes:
        if first is None:
            first = name, size
        elif not are_alike(first[1], size, n):
            raise ValueError(
                f"{who}{first[0]} has {first[1]} rows and {name} has {size}: cut into {n} microbatches they "
                "would not belong together. Give tensors of one batch; what is not to be cut is "
                "_Replicate in args_chunk_spec or kwargs_chunk_spec"
            )


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
        ValueError: a tensor is too short to be cut, or lacks the dimension; a spec that does not fit.

    Example:
        >>> [a[0].tolist() for a, _ in split((torch.arange(5),), {}, 2)]
        [[0, 1, 2], [3, 4]]
    """
    by_arg = _pieces(args, args_spec, n, "args")
    by_name = _pieces(kwargs, kwargs_spec, n, "kwargs")
    return list(zip(by_arg, by_name, strict=True))


def cut(value: Any, n: int, where: str) -> list[Any]:
    """One value of each of ``n`` microbatches, along dimension 0; ``where`` names it in errors.

    Raises:
        ValueError: a tensor is too short to be cut.
    """
    return _pieces(value, None, n, where)


def n_samples(value: Any) -> int | None:
    """The size of dimension 0 of the first tensor that has one."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((n for item in items if (n := n_samples(item)) is not None), None)


def merge(outputs: list[Any]) -> Any:
    """The outputs of microbatches as one: tensors along dimension 0, scalars stacked, others in a list.

    So are tensors whose other dimensions differ, as of sequences that each microbatch has cut to its longest,
    and nests of different form.
    """
    first = outputs[0]
    if not all(type(output) is type(first) for output in outputs):
        return outputs
    if isinstance(first, Tensor):
        if any(o.dim() != first.dim() or o.shape[1:] != first.shape[1:] for o in outputs):
            return outputs
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, (tuple, list)):
        if any(len(output) != len(first) for output in outputs):
            return outputs
        return _like(first, (merge(list(items)) for items in zip(*outputs, strict=True)))
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            return outputs
        return {key: merge([output[key] for output in outputs]) for key in first}
    return first if all(o == first for o in outputs) else outputs
