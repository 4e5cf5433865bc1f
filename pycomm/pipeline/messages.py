"""What passes between stages: nests of tuples, lists and dicts of tensors and plain values, without pickle.

A value travels as a *header* (JSON: the nest, with each tensor's dtype, shape, whether it requires a
gradient and, where it is compressed, how) and its tensors. :func:`encode` takes a value apart,
:func:`decode` puts it together.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Spec", "decode", "encode", "leaves", "replace_leaves"]

_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
_PLAIN = (type(None), bool, int, float, str)


class Spec(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    wire: str = ""  # how it travels (wire.py); empty: as it is

    @staticmethod
    def of(tensor: Tensor, wire: str = "") -> Spec:
        """Of a tensor.

        Raises:
            TypeError: it is sparse, nested or the like.
        """
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"a {str(tensor.layout).removeprefix('torch.')} tensor cannot pass between stages: give "
                "a dense one, or its parts"
            )
        return Spec(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad, wire)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype.

        Raises:
            ValueError: torch has none of that name.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a message between stages has a tensor of the unknown dtype {self.dtype!r}")
        return dtype

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


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
    what = f"type {type(value).__name__}"
    if isinstance(value, dict):
        what += f" with the key {next(key for key in value if not isinstance(key, str))!r}"
    raise TypeError(
        f"a value of {what} cannot pass between stages: expected tensors, None, bool, "
        "int, float, str, and tuples, lists and dicts (with str keys) of these"
    )


def _as_they_are(tensor: Tensor) -> str:
    return ""


@functools.lru_cache(maxsize=1024)
def _bare(spec: Spec) -> bytes:
    """The header of a tensor alone."""
    wire = [spec.wire] if spec.wire else []
    return json.dumps(
        {"t": [spec.dtype, spec.shape, spec.requires_grad, *wire]}, separators=(",", ":")
    ).encode()


def encode(
    value: Any, wire_of: Callable[[Tensor], str] = _as_they_are
) -> tuple[bytes, list[Tensor], list[Spec]]:
    """Header and tensors of a value, and what these are.

    Args:
        value: a nest.
        wire_of: says how a tensor travels.

    Raises:
        TypeError: something that cannot travel.

    Example:
        >>> header, tensors, specs = encode({"x": torch.ones(2), "n": 3})
        >>> decode(header, tensors)
        {'x': tensor([1., 1.]), 'n': 3}
    """
    if isinstance(value, Tensor):
        spec = Spec.of(value, wire_of(value))
        return _bare(spec), [value], [spec]
    if type(value) is list and len(value) == 1 and isinstance(value[0], Tensor):  # most gradients
        spec = Spec.of(value[0], wire_of(value[0]))
        return b"[" + _bare(spec) + b"]", value, [spec]
    tensors: list[Tensor] = []
    found: list[Spec] = []
    replace_leaves(value, lambda tensor: tensor)  # raises what cannot travel
    tree = _tree(value, wire_of, tensors, found)
    return json.dumps(tree, separators=(",", ":")).encode(), tensors, found


# What calls itself and sees tensors stands outside of other functions: inside of one, each call would leave a
# cycle of references, and its tensors stayed until Python's garbage collector comes.


def _tree(item: Any, wire_of: Callable[[Tensor], str], tensors: list[Tensor], found: list[Spec]) -> Any:
    if isinstance(item, Tensor):
        spec = Spec.of(item, wire_of(item))
        tensors.append(item)
        found.append(spec)
        return {"t": [spec.dtype, spec.shape, spec.requires_grad, *([spec.wire] if spec.wire else [])]}
    if isinstance(item, tuple):
        return {"u": [_tree(part, wire_of, tensors, found) for part in item]}
    if isinstance(item, list):
        return [_tree(part, wire_of, tensors, found) for part in item]
    if isinstance(item, dict):
        return {"d": [[key, _tree(part, wire_of, tensors, found)] for key, part in item.items()]}
    return item


@functools.lru_cache(maxsize=256)
def _parsed(header: bytes) -> tuple[Any, tuple[Spec, ...]]:
    """The nest, which nobody changes, and its tensors."""
    found: list[Spec] = []

    def walk(item: Any) -> None:
        if isinstance(item, list):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            if "t" in item:
                dtype, shape, requires_grad, *wire = item["t"]
                found.append(Spec(dtype, tuple(shape), requires_grad, *wire))
            else:
                for part in item.get("u", ()):
                    walk(part)
                for _, part in item.get("d", ()):
                    walk(part)

    tree = json.loads(header)
    walk(tree)
    return tree, tuple(found)


def specs(header: bytes) -> list[Spec]:
    """The tensors that a header announces."""
    return list(_parsed(header)[1])


def decode(header: bytes, tensors: list[Tensor]) -> Any:
    """The value again; named tuples come as tuples."""
    return _value(_parsed(header)[0], iter(tensors))


def _value(item: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(item, list):
        return [_value(part, rest) for part in item]
    if not isinstance(item, dict):
        return item
    if "t" in item:
        return next(rest)
    if "u" in item:
        return tuple(_value(part, rest) for part in item["u"])
    return {key: _value(part, rest) for key, part in item["d"]}
