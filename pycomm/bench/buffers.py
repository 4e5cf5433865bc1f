"""The memory that calls are timed on, and how it is dirtied.

A library's calls at one size use K *slots* (pairs of input and output, views of one allocation that is kept
for the whole run): calls too short for the clock are timed K at a time, each on a slot of its own. Before a
timed batch ``dirty`` rewrites all slots, so that every line is modified in this core's cache, as it is after
a backward pass has produced gradients, and never in the state that the call before left it in.
"""

from __future__ import annotations

import dataclasses

import torch

from pycomm.bench import exact
from pycomm.bench.collectives import Shape

__all__ = ["BATCH_BYTES", "Contents", "Memory", "Slots", "n_slots_for"]

BATCH_BYTES = 256 << 10  # what the slots of a batch hold together: well within a core's second-level cache
_MAX_SLOTS = 64
_LARGEST_BATCHED = 64 << 10
_ALIGNMENT = 128


def n_slots_for(n_bytes: int) -> int:
    """How many calls are timed at once: 64 up to 4 KiB, 4 at 64 KiB, one above."""
    return 1 if n_bytes > _LARGEST_BATCHED else max(1, min(_MAX_SLOTS, BATCH_BYTES // n_bytes))


@dataclasses.dataclass
class Memory:
    """One kind of memory of a rank: bytes (uint8) for inputs, for outputs; ``kind`` as in ``Measurement``."""

    kind: str
    inputs: torch.Tensor
    outputs: torch.Tensor

    @staticmethod
    def n_bytes_for(max_bytes: int) -> int:
        """Bytes that each of the two needs when no size is above ``max_bytes``."""
        return 2 * BATCH_BYTES + max_bytes + _MAX_SLOTS * _ALIGNMENT


class Contents:
    """What dirtying writes and what must come out, at one size; shared by the libraries, built on demand."""

    def __init__(
        self,
        shape: Shape,
        op: str,
        dtype: torch.dtype,
        n_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """``n_slots`` as in ``n_slots_for``; ``device``: of the memory."""
        self.shape, self.op, self.dtype, self.n_slots = shape, op, dtype, n_slots
        self.device = device
        self._images: dict[str, torch.Tensor] = {}
        self._expected: torch.Tensor | None = None
        self._has_expected = False

    def stride(self, n_elems: int) -> int:
        """Bytes from one slot to the next."""
        return -(-n_elems * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def image(self, place: str) -> torch.Tensor:
        """The bytes of all input slots as they are before a call."""
        if place not in self._images:
            shape = self.shape
            n_elems = shape.n_in if place == "out" else shape.n_buffer
            one = torch.full((self.stride(n_elems),), exact.POISON, dtype=torch.uint8)
            values = exact.inputs(shape, self.op, self.dtype).view(torch.uint8)
            itemsize = self.dtype.itemsize
            start = shape.block(shape.rank).start * itemsize if shape.n_in < n_elems else 0
            if shape.collective != "broadcast" or shape.rank == shape.root:
                one[start : start + values.numel()] = values
            self._images[place] = one.repeat(self.n_slots).to(self.device)
        return self._images[place]

    def expected(self) -> torch.Tensor | None:
        """See ``exact.expected``."""
        if not self._has_expected:
            expected = exact.expected(self.shape, self.op, self.dtype)
            self._expected = None if expected is None else expected.to(self.device)
            self._has_expected = True
        return self._expected


class Slots:
    """The K pairs (input, output) of one case, in one kind of memory."""

    def __init__(self, memory: Memory, contents: Contents, place: str) -> None:
        """Lays the slots out; nothing is allocated. ``place`` is ``out`` or ``in``."""
        self.contents, self.place = contents, place
        shape, dtype, n_slots = contents.shape, contents.dtype, contents.n_slots
        n_in = shape.n_in if place == "out" else shape.n_buffer
        self._in_stride, self._out_stride = contents.stride(n_in), contents.stride(shape.n_out)
        self._inputs = memory.inputs[: n_slots * self._in_stride]
        self._outputs = memory.outputs[: n_slots * self._out_stride] if place == "out" else None
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k in range(n_slots):
            start = k * self._in_stride
            data = self._inputs[start : start + n_in * dtype.itemsize].view(dtype)
            if self._outputs is not None:
                start = k * self._out_stride
                out = self._outputs[start : start + shape.n_out * dtype.itemsize].view(dtype)
                self.pairs.append((data, out))
            else:
                mine = shape.block(shape.rank)
                self.pairs.append(
                    (
                        data[mine] if shape.n_in < shape.n_buffer else data,
                        data[mine] if shape.n_out < shape.n_buffer else data,
                    )
                )

    def offsets(self, k: int) -> tuple[int, int]:
        """Byte offsets of slot ``k``'s input and output buffers in their memories."""
        return k * self._in_stride, k * self._out_stride

    def dirty(self) -> None:
        """Rewrites every slot: outputs with poison, then inputs with what they hold before a call."""
        if self._outputs is not None:
            self._outputs.fill_(exact.POISON)
        self._inputs.copy_(self.contents.image(self.place))

    def zero(self) -> None:
        """All zeros, which every reduction maps to itself: for the hot loop."""
        self._inputs.zero_()
        if self._outputs is not None:
            self._outputs.zero_()

    def n_wrong(self) -> int:
        """Elements of all outputs that are not what they must be."""
        expected = self.contents.expected()
        if expected is None:
            return 0
        itemsize = expected.element_size()
        want = expected.view(torch.uint8).view(-1, itemsize)
        wrong = 0
        for _, out in self.pairs:
            got = out.view(torch.uint8)
            if not torch.equal(got, expected.view(torch.uint8)):
                wrong += int((got.view(-1, itemsize) != want).any(dim=1).sum())
        return wrong
