"""Tensors between stages in fewer bits: as float16, bfloat16 or 8-bit codes, with a scale for each block.

float32 tensors of at least ``MIN_ELEMS`` elements, activations and their gradients alike; all others travel
as they are. A tensor is cut into blocks of 256 elements; with M the largest magnitude in a block an element
x arrives within

    u |x| + f M    of what was sent, with u = 2^-11 and f = 2^-38 ("fp16"),
                   2^-8 and 2^-132 ("bf16"), 0 and 1/254 + 2^-23 ("int8").

So float16 does not overflow. A block with an infinity, a NaN or a magnitude from 2^127 up arrives as NaN, no
other block is harmed; one whose M is below 2^-100 arrives as zeros. On the wire: n codes of 2 or 1 bytes, and
4 bytes for each block.

**Error feedback** ("int8" only, when asked for): what encoding lost of a tensor is added to the one that
travels next on the same link in the same place, of the same shape: the next microbatch's. The sum of what
arrives over any number of microbatches is then within one encoding's error of the sum of what was sent; a
single one may be off by twice as much. That keeps sums over microbatches, such as the gradients of weights,
from a bias, and does not make any one activation more exact.

Source: the codes are those of csrc/kernels/blocks.h; F. Seide et al. 2014, "1-Bit Stochastic Gradient
Descent", for the feedback.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pycomm import _C
from pycomm.pipeline.messages import Spec

__all__ = ["MIN_ELEMS", "WIRES", "Wire", "empty", "unpack"]

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
MIN_ELEMS = 1024
_BLOCK = _C.kernels.BLOCK_ELEMS


def _parts(n: int, wire: str) -> tuple[int, int]:
    """(where the codes begin, bytes of all): the maxima come first."""
    codes = -(-n // _BLOCK) * 4
    return codes, codes + n * WIRES[wire].itemsize


def empty(spec: Spec) -> Tensor:
    """A tensor to receive into.

    Raises:
        ValueError: a dtype or wire that there is not.
    """
    if not spec.wire:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    if spec.wire not in WIRES:
        raise ValueError(f"a message between stages has a tensor on the unknown wire {spec.wire!r}")
    return torch.empty(_parts(math.prod(spec.shape), spec.wire)[1], dtype=torch.uint8)


def unpack(spec: Spec, received: Tensor) -> Tensor:
    """The tensor of what :func:`empty` made room for."""
    if not spec.wire:
        return received
    value = torch.empty(spec.shape, dtype=spec.torch_dtype)
    n, at = value.numel(), received.data_ptr()
    codes, _ = _parts(n, spec.wire)
    _C.kernels.dequantize(_name(spec.wire), value.data_ptr(), at + codes, n, at)
    return value


def _name(wire: str) -> str:
    return str(WIRES[wire]).removeprefix("torch.")


class Wire:
    """How this rank sends tensors.

    Args:
        wire: "fp16", "bf16", "int8", or None: as they are.
        error_feedback: keep what encoding lost for the next one.

    Raises:
        ValueError: another wire, or error feedback without "int8".
    """

    def __init__(self, wire: str | None = None, error_feedback: bool = False) -> None:
        if wire is not None and wire not in WIRES:
            raise ValueError(f"wire must be {', '.join(WIRES)} or None, got {wire!r}")
        if error_feedback and wire != "int8":
            raise ValueError(f"wire_error_feedback is for wire='int8', got wire={wire!r}")
        self.wire = wire
        self.error_feedback = error_feedback
        self.n_bytes = 0  # of the tensors sent since the beginning
        self._lost: dict[object, Tensor] = {}

    def of(self, tensor: Tensor) -> str:
        """How a tensor travels; empty: as it is."""
        if self.wire is None or tensor.dtype != torch.float32 or tensor.numel() < MIN_ELEMS:
            return ""
        return self.wire

    def pack(self, tensor: Tensor, spec: Spec, place: object) -> Tensor:
        """What travels: dense, and not changed while it does.

        Args:
            tensor: to send.
            spec: of it.
            place: what its loss is kept under.
        """
        tensor = tensor.detach()
        if not spec.wire:
            self.n_bytes += tensor.nbytes
            return tensor
        n = tensor.numel()
        source = tensor.resolve_neg().contiguous()
        if self.error_feedback:
            before = self._lost.get(place)
            if before is not None and before.shape == source.shape:
                source = before.add_(source)
            else:
                source = source.clone(memory_format=torch.contiguous_format)
            self._lost[place] = source
        made = empty(spec)
        at, (codes, _) = made.data_ptr(), _parts(n, spec.wire)
        _C.kernels.block_maxima(source.data_ptr(), n, at)
        # With feedback it leaves in `source` what the codes do not say.
        _C.kernels.quantize(_name(spec.wire), at + codes, source.data_ptr(), n, at, self.error_feedback)
        self.n_bytes += made.nbytes
        return made
