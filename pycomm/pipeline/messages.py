"""What passes between stages: nests of tuples, lists and dicts of tensors and plain values, without pickle.

A value travels as a *header* (JSON: the nest, with each tensor's dtype, shape and whether it requires a
gradient) and its tensors, one message each. :func:`encode` takes a value apart, :func:`decode` puts it
together.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Spec", "decode", "encode", "leaves", "replace_leaves"]

_PLAIN = (type(None), bool, int, float, str)


class Spec(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """Of a tensor."""
        return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad)

    def empty(self) -> Tensor:
        """A tensor to receive into."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a message between stages has a tensor of the unknown dtype {self.dtype!r}")
        return torch.empty(self.shape, dtype=dtype)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    found: list[Tensor] = []
    replace_leaves(value, lambda tensor: found.append(tensor))
    return found


def replace_leaves(value: Any, change: Any) -> Any:
    """The same nest with ``change(tensor)`` for each tensor.

    Raises:
        TypeError: something that cannot travel.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        made = [replace_leaves(item, change) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, list):
        return [replace_leaves(item, change) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: replace_leaves(item, change) for key, item in value.items()}
    raise TypeError(
        f"a value of type {type(value).__name__} cannot pass between stages: expected tensors, None, bool, "
        "int, float, str, and tuples, lists and dicts (with str keys) of these"
    )


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """Header and tensors of a value.

    Raises:
        TypeError: something that cannot travel.

    Example:
        >>> header, tensors = encode({"x": torch.ones(2), "n": 3})
        >>> decode(header, tensors)
        {'x': tensor([1., 1.]), 'n': 3}
    """
    tensors: list[Tensor] = []

    def tree(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item)
            spec = Spec.of(item)
            return {"t": [spec.dtype, spec.shape, spec.requires_grad]}
        if isinstance(item, tuple):
            return {"u": [tree(part) for part in item]}
        if isinstance(item, list):
            return [tree(part) for part in item]
        if isinstance(item, dict):
            return {"d": [[key, tree(part)] for key, part in item.items()]}
        return item

    replace_leaves(value, lambda tensor: tensor)  # raises what cannot travel
    return json.dumps(tree(value), separators=(",", ":")).encode(), tensors


def specs(header: bytes) -> list[Spec]:
    """The tensors that a header announces."""
    found: list[Spec] = []

    def walk(item: Any) -> None:
        if isinstance(item, list):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            if "t" in item:
                dtype, shape, requires_grad = item["t"]
                found.append(Spec(dtype, tuple(shape), requires_grad))
            else:
                for part in item.get("u", ()):
                    walk(part)
                for _, part in item.get("d", ()):
                    walk(part)

    walk(json.loads(header))
    return found


def decode(header: bytes, tensors: list[Tensor]) -> Any:
    """The value again; named tuples come as tuples."""
    rest = iter(tensors)

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(part) for part in item]
        if not isinstance(item, dict):
            return item
        if "t" in item:
            return next(rest)
        if "u" in item:
            return tuple(value(part) for part in item["u"])
        return {key: value(part) for key, part in item["d"]}

    return value(json.loads(header))
