"""Tensors whose memory is not their value in order: non-contiguous, lazily conjugated or negated.

Such tensors go through a contiguous copy: inputs are copied before the call, outputs after it. torch's own
copy knows every layout, keeps strides of the target, and resolves the lazy bits.

A result that is to be on a GPU is brought there on the stream that was torch's current one when the call was
made, whoever looks for it first and on whatever stream: there the target's memory was made or is used, and
will be reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

Tensors = torch.Tensor | Sequence[torch.Tensor]


@dataclass
class Staged:
    """Plain stand-ins for the tensors of one call."""

    inputs: Tensors | None
    outputs: Tensors | None
    _back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        on_cuda = next((target.device for target, _ in self._back if target.is_cuda), None)
        self._stream = None if on_cuda is None else torch.cuda.current_stream(on_cuda)
        self._written: torch.cuda.Event | None = None

    def on_stream(self) -> AbstractContextManager[object]:
        """With the call's stream as torch's current one, where outputs are on CUDA."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def write_back(self) -> None:
        """Copies the outputs to where the caller wants them; on the current stream, the call's."""
        with torch.inference_mode():  # which alone may write to inference tensors, and writes to others too
            for target, plain in self._back:
                target.copy_(plain)
        if self._stream is not None:
            self._written = self._stream.record_event()
        self.inputs, self.outputs, self._back = None, None, []  # only the order matters from here on

    def order(self, on_host: bool) -> None:
        """Has torch's current stream, or the calling thread, go on after :meth:`write_back` only."""
        if self._written is None or self._stream is None:
            return
        if on_host:
            self._written.synchronize()
        else:
            torch.cuda.current_stream(self._stream.device).wait_event(self._written)


def _plain(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous()


def _is_plain(t: torch.Tensor) -> bool:
    return t.is_contiguous() and not t.is_neg() and not t.is_conj()


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Whether elements may share memory: an expanded tensor, sliding windows."""
    if t.numel() == 0:
        return False
    reach = 0  # the largest offset of the dimensions of smaller strides
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def through_host(call: str, tensor: torch.Tensor, is_send: bool) -> Staged:
    """A stand-in in host memory for a tensor on a GPU, of which messages between two ranks are made.

    The copies are ordered by torch's current stream, and wait for it.

    Raises:
        ValueError: that stream is captured into a CUDA graph; or elements of a tensor to receive into share
            memory.
    """
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{call} cannot be captured into a CUDA graph: messages travel through host memory, and a replay "
            "would send none; make it before the capture, or after its end"
        )
    if is_send:
        return Staged(_plain(tensor).cpu(), None)
    if _overlaps_itself(tensor):
        raise ValueError(
            f"{call}: the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} shares memory "
            "between its elements (expanded?) and cannot hold the message; give a contiguous tensor"
        )
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return Staged(None, plain, [(tensor, plain)])


def staged(call: str, inputs: Tensors | None, outputs: Tensors | None) -> Staged:
    """Stand-ins for a call's tensors; the same object as input and output (in place) stays one stand-in.

    Raises:
        ValueError: elements of an output share memory: it cannot hold the result.
    """
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}

    def stand_in(t: torch.Tensor, output: bool) -> torch.Tensor:
        plain = made.get(id(t))
        if plain is None:
            plain = t if _is_plain(t) else _plain(t)
            made[id(t)] = plain
        if output and plain is not t:
            if _overlaps_itself(t):
                what = "tensor" if outputs is inputs else "output"
                raise ValueError(
                    f"{call}: the {what} of shape {tuple(t.shape)} and strides {t.stride()} shares memory "
                    "between its elements (expanded?) and cannot hold the result; give a contiguous tensor"
                )
            back.append((t, plain))
        return plain

    def each(tensors: Tensors | None, output: bool) -> Tensors | None:
        if tensors is None or isinstance(tensors, torch.Tensor):
            return None if tensors is None else stand_in(tensors, output)
        return [stand_in(t, output) for t in tensors]

    ins = each(inputs, False)
    outs = ins if outputs is inputs else each(outputs, True)
    if outputs is inputs:
        each(outputs, True)
    return Staged(ins, outs, back)
