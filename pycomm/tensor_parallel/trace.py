"""What every module of a model put out, in execution order, and the gradient that came back to it.

A :class:`Trace` hooks a model for one forward and backward and takes its hooks away again, also after an
exception. :func:`differences` compares a parallel model's trace with that of the one-process model: a rank's
output is compared with its part of the whole one. Which part, the module's split says; after that, any module
with an output of the same sizes is taken to be cut alike; else parts are taken to lie in rank order. An
output whose part is not to be told so is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.shards import Split

__all__ = ["Difference", "Record", "Trace", "agreed", "differences"]

_DIMS = 8  # of a shape in the table that ranks exchange; outputs with more are left out


@dataclass(frozen=True)
class Difference:
    """How far a rank's tensor is from its part of the whole, and the whole's largest element.

    ``rank`` has the largest difference, once :func:`agreed` has asked all ranks.
    """

    name: str
    absolute: float
    scale: float
    rank: int = -1

    @staticmethod
    def of(name: str, local: Tensor | None, part: Tensor | None, whole: Tensor | None) -> Difference:
        """Of this rank; no tensor stands for zeros, a wrong shape or NaN is infinitely far."""
        scale = float(whole.abs().max()) if whole is not None and whole.numel() else 0.0
        if local is None or part is None:
            there = local if part is None else part
            absolute = float(there.abs().max()) if there is not None and there.numel() else 0.0
        elif local.shape != part.shape:
            absolute = torch.inf
        else:
            absolute = float((local - part).abs().max()) if local.numel() else 0.0
        return Difference(name, torch.inf if absolute != absolute else absolute, scale)

    @property
    def relative(self) -> float:
        """As a fraction of the whole's largest element."""
        return self.absolute / self.scale if self.scale else 0.0 if self.absolute == 0.0 else torch.inf

    def __str__(self) -> str:
        return f"by {self.absolute:.3g} ({self.relative:.1e} of its largest element) on rank {self.rank}"


def agreed(comm: Communicator, mine: list[Difference]) -> list[Difference]:
    """Of each, the largest over the ranks; the same list on every rank. Collective."""
    if not mine:
        return []
    table = torch.empty(comm.size, len(mine), dtype=torch.float64)
    comm.all_gather(table, torch.tensor([d.absolute for d in mine], dtype=torch.float64))
    most = table.max(0)
    return [replace(d, absolute=float(most.values[i]), rank=int(most.indices[i])) for i, d in enumerate(mine)]


@dataclass
class Record:
    """One call of one module."""

    name: str
    output: Tensor
    split: Split | None
    gradient: Tensor | None = None


def _first_tensor(output: Any) -> Tensor | None:
    """The first floating tensor of what a module returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (tuple, list, Mapping)):
        return None
    return next((t for t in map(_first_tensor, values) if t is not None), None)


class Trace:
    """``with Trace(model) as trace:`` run it forward and backward; then ``trace.records``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self.records: list[Record] = []

    def __enter__(self) -> Trace:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name or "the model")))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is None:
                return
            call = self._calls[name] = self._calls.get(name, 0) + 1
            how = getattr(module, "_parallel", None)
            record = Record(
                name if call == 1 else f"{name} (call {call})", tensor.detach().clone(), how and how.split
            )
            self.records.append(record)
            if tensor.requires_grad:
                register: Any = tensor.register_hook
                register(lambda g: setattr(record, "gradient", g.detach().clone()))

        return note


def _shapes(records: list[Record]) -> Tensor:
    table = torch.zeros(len(records), _DIMS, dtype=torch.int64)
    for i, record in enumerate(records):
        shape = record.output.shape
        table[i, : len(shape)] = torch.tensor(shape) if len(shape) <= _DIMS else -1
    return table


def differences(
    comm: Communicator, whole: Trace, parallel: Trace
) -> tuple[list[Difference], list[Difference | None]]:
    """Of outputs and of their gradients, in execution order, agreed by all ranks. Collective.

    A gradient is None where it was not compared: of outputs that several ranks have, each has a part.
    """
    by_name = {record.name: record for record in whole.records}
    records = [r for r in parallel.records if r.name in by_name]
    names = torch.tensor([len(records), sum(_hash_of(r.name) for r in records) % 2**62])
    everyones = torch.empty(comm.size, 2, dtype=torch.int64)
    comm.all_gather(everyones, names)
    if not records or not bool((everyones == everyones[0]).all()):
        return [], []  # ranks that ran different modules cannot be compared
    shapes = torch.empty(comm.size, len(records), _DIMS, dtype=torch.int64)
    comm.all_gather(shapes, _shapes(records))
    splits: dict[tuple[int, ...], Split] = {}
    outputs, gradients = [], []
    for i, record in enumerate(records):
        of = by_name[record.name]
        part = _Part(of.output.shape, shapes[:, i].tolist(), record.split, splits, comm.rank)
        if not part.is_known:
            continue
        outputs.append(Difference.of(record.name, record.output, part.take(of.output), of.output))
        replicated = part.split is not None and part.split.is_replicated
        expected = None if of.gradient is None else part.take(of.gradient)
        gradients.append((Difference.of(record.name, record.gradient, expected, of.gradient), replicated))
    far = agreed(comm, [d for d, _ in gradients])
    return agreed(comm, outputs), [
        None if left_out else d for d, (_, left_out) in zip(far, gradients, strict=True)
    ]


def _hash_of(name: str) -> int:
    """The same in every process, unlike ``hash``."""
    return zlib.crc32(name.encode())


class _Part:
    """Which part of a whole output a rank has, told by the ranks' shapes."""

    def __init__(
        self,
        whole: torch.Size,
        shapes: list[list[int]],
        split: Split | None,
        splits: dict[tuple[int, ...], Split],
        rank: int,
    ) -> None:
        self.rank, self.dim = rank, 0
        self.split: Split | None = None
        n = len(whole)
        padded = [*whole, *[0] * (_DIMS - n)]
        differing = {d for shape in shapes for d in range(_DIMS) if shape[d] != padded[d]}
        self.is_known = n <= _DIMS and len(differing) <= 1 and all(d < n for d in differing)
        if not differing or not self.is_known:
            return
        [self.dim] = differing
        lengths = [shape[self.dim] for shape in shapes]
        key = (whole[self.dim], *lengths)
        if split is not None and (split.size, *split.lengths) == key:
            splits[key] = split
        at, pieces = 0, []
        for length in lengths:
            pieces.append(((at, at + length),) if length else ())
            at += length
        if key in splits:
            self.split = splits[key]
        elif at == whole[self.dim]:
            self.split = Split(at, tuple(pieces))
        else:
            self.is_known = False

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        return whole if self.split is None else self.split.take(whole, self.dim, self.rank)
