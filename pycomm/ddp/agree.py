"""Before training: every rank has the same module, and then the same values.

Ranks compare a digest of what must agree; only when digests differ do they exchange the full lines, so that
every rank can name the first line that differs. No pickle is involved.

*Memory order*: the permutation of dimensions that makes a dense tensor contiguous (channels_last weights).
What travels is the tensor in the memory order of its parameter, so that nothing is rearranged for it; the
order is one of the things that must agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pycomm._setup import DTYPE_CODES
from pycomm.communicator import Communicator

__all__ = [
    "broadcast_tensors",
    "check_agreement",
    "describe",
    "digest",
    "gather_bytes",
    "in_memory_order",
    "memory_order",
    "views_of",
]


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The permutation that makes ``tensor`` contiguous; None when it is, or when there is none.

    Example:
        >>> memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def in_memory_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """A view of ``tensor`` whose logical order is ``order``; contiguous where the tensor lies so."""
    return tensor if order is None else tensor.permute(order)


def views_of(buffer: Tensor, parameters: Sequence[Tensor], *, in_memory_order: bool) -> list[Tensor]:
    """Pieces of ``buffer`` in the parameters' shapes; contiguous, or with their memory order."""
    pieces = []
    at = 0
    for parameter in parameters:
        order = memory_order(parameter) if in_memory_order else None
        piece = buffer[at : at + parameter.numel()]
        if order is None:
            pieces.append(piece.view(parameter.shape))
        else:
            laid_out = piece.view([parameter.shape[d] for d in order])
            pieces.append(laid_out.permute([order.index(d) for d in range(len(order))]))
        at += parameter.numel()
    return pieces


def describe(what: str, name: str, tensor: Tensor) -> str:
    """A line that is equal on two ranks when the tensors are alike in all but their values."""
    order = memory_order(tensor)
    laid_out = "" if order is None else f", memory order {order}"
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{what} '{name}' of {tensor.dtype} {tuple(tensor.shape)}{laid_out}{place}"


def gather_bytes(comm: Communicator, mine: bytes, lengths: Sequence[int]) -> list[bytes]:
    """What every rank gives, in rank order. Collective.

    Args:
        comm: of the ranks.
        mine: this rank's.
        lengths: how many bytes each rank gives, the same list on every rank.
    """
    everyones = torch.empty(sum(lengths), dtype=torch.uint8)
    comm.all_gather(everyones, torch.tensor(list(mine), dtype=torch.uint8), counts=list(lengths))
    return [bytes(part.tolist()) for part in torch.split(everyones, list(lengths))]


def check_agreement(
    comm: Communicator,
    who: str,
    lines: Sequence[str],
    advice: str = "Every rank must build the same module, with its parameters in the same order, and "
    "give the same arguments",
) -> None:
    """Raises the same error on every rank unless all ranks have the same lines. Collective.

    Args:
        comm: of the ranks.
        who: begins the error.
        lines: what must agree.
        advice: ends the error.

    Raises:
        ValueError: names the first line that differs and the ranks that have it.
    """
    text = "\n".join(lines).encode()
    mine = torch.tensor(
        list(hashlib.blake2b(text, digest_size=16).digest()) + _as_bytes(len(text)), dtype=torch.uint8
    )
    everyone = torch.empty(comm.size, mine.numel(), dtype=torch.uint8)
    comm.all_gather(everyone, mine)
    if bool((everyone == everyone[0]).all()):
        return
    lengths = [int.from_bytes(bytes(row[16:].tolist()), "little") for row in everyone]
    theirs = [found.decode().split("\n") for found in gather_bytes(comm, text, lengths)]
    for line in range(max(len(part) for part in theirs)):
        at_line = [part[line] if line < len(part) else "nothing more" for part in theirs]
        differing = [rank for rank, found in enumerate(at_line) if found != at_line[0]]
        if differing:
            others = ", ".join(f"rank {rank} has {at_line[rank]}" for rank in differing[:4])
            raise ValueError(
                f"{who}: ranks differ at line {line} of {max(len(part) for part in theirs)}: "
                f"rank 0 has {at_line[0]}; {others}{' …' if len(differing) > 4 else ''}. {advice}"
            )
    raise AssertionError(f"{who}: digests differ but lines do not")


def _as_bytes(n: int) -> list[int]:
    return list(n.to_bytes(8, "little"))


def digest(tensor: Tensor) -> bytes:
    """16 bytes that are equal when two tensors have the same elements, bit for bit, whatever their layout."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw = as_bytes(plain.resolve_conj().resolve_neg().contiguous()).cpu()
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).digest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor of any dtype, as a flat uint8 tensor that shares it."""
    return tensor.reshape(-1).view(torch.uint8)


def broadcast_tensors(
    comm: Communicator, tensors: Iterable[Tensor], src: int = 0, unseen: Collection[int] = ()
) -> None:
    """Gives every rank the values of rank ``src``: one broadcast for each dtype and device. Collective.

    Tensors of dtypes that the core does not know travel as bytes. Autograd learns of it: a backward that
    needs the old values of a tensor raises; not for those whose ids are in ``unseen``.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    staged: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        if id(tensor) not in unseen:
            increment_version(tensor)
        plain = tensor.detach()
        if plain.dtype not in DTYPE_CODES:
            copy = plain.contiguous()
            if copy.data_ptr() != plain.data_ptr():
                staged.append((plain, copy))
            plain = as_bytes(copy)
        together = alike.setdefault((plain.dtype, plain.device), [])
        together.append(in_memory_order(plain, memory_order(plain)))
    for group in alike.values():
        comm.broadcast(group, src=src)
    for target, copy in staged:
        target.copy_(copy)
