"""Are replicas replicas? A digest of every tensor, compared over the ranks; the first that differs is named.

One exchange of 8 bytes where all is well. Where it is not, each rank sends 8 bytes for every tensor, so
that all find the same first difference, and the rank in the minority (of two equal parts, the one without
rank 0).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.agree import as_bytes

__all__ = ["compare", "tensors_of"]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the elements, bit for bit, and of dtype and shape: about 1 ns a byte; misses one in 2^32."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw: Any = as_bytes(plain.resolve_conj().resolve_neg().contiguous()).cpu().numpy()
    return zlib.crc32(raw, zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def tensors_of(
    named: Iterable[tuple[str, Tensor]], module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with their names, then what the optimizers keep for each parameter.

    Running statistics of normalisation layers in training mode are left out: until the next forward each rank
    has those of its own batches.
    """
    own = {
        id(buffer)
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.training
        for buffer in layer.buffers()
    }
    name_of: dict[int, str] = {}
    for name, tensor in named:
        name_of[id(tensor)] = name
        if id(tensor) not in own:
            yield name, tensor
    for number, optimizer in enumerate(optimizers):
        which = f"optimizer {number}"
        for group_number, group in enumerate(optimizer.param_groups):
            settings = sorted((key, value) for key, value in group.items() if isinstance(value, (int, float)))
            numbers = torch.tensor([float(value) for _, value in settings], dtype=torch.float64)
            yield f"{which}: settings of group {group_number}", numbers
            for place, parameter in enumerate(group["params"]):
                owner = name_of.get(id(parameter), f"parameter {place} of group {group_number}")
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield f"{which}: {key} of '{owner}'", value
                    elif isinstance(value, (int, float)):
                        yield f"{which}: {key} of '{owner}'", torch.tensor(float(value), dtype=torch.float64)


def compare(comm: Communicator, who: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises the same error on every rank unless all tensors are equal on all ranks. Collective.

    Raises:
        RuntimeError: names the first tensor that differs, and the ranks that have another one than most.
    """
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(checksum(tensor))
    text = "\n".join(f"{name} {number}" for name, number in zip(names, sums, strict=True)).encode()
    mine = torch.tensor([zlib.crc32(text)], dtype=torch.int64)
    everyone = torch.empty(comm.size, 1, dtype=torch.int64)
    comm.all_gather(everyone, mine)
    if bool((everyone == everyone[0]).all()):
        return
    mine = torch.tensor([zlib.crc32(name.encode()) for name in names] + sums, dtype=torch.int64)
    counts = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(counts, torch.tensor([mine.numel()]))
    flat = torch.empty(int(counts.sum()), dtype=torch.int64)
    comm.all_gather(flat, mine, counts=counts.tolist())
    halves = [row.chunk(2) for row in torch.split(flat, counts.tolist())]
    by_rank = [list(zip(n.tolist(), s.tolist(), strict=True)) for n, s in halves]
    for place in range(max(map(len, by_rank))):
        at_place = [row[place] if place < len(row) else None for row in by_rank]
        if len(set(at_place)) > 1:
            usual = Counter(at_place).most_common(1)[0]
            right = at_place[0] if at_place.count(at_place[0]) == usual[1] else usual[0]
            odd = [rank for rank, found in enumerate(at_place) if found != right]
            raise RuntimeError(_message(comm, who, names, place, at_place, odd))
    raise AssertionError(f"{who}: digests differ, but no tensor does")


def _message(
    comm: Communicator,
    who: str,
    names: list[str],
    place: int,
    at_place: list[tuple[int, int] | None],
    odd: list[int],
) -> str:
    """The same words on all ranks: a rank that has the tensor most have gives the name."""
    teller = next(rank for rank in range(comm.size) if rank not in odd)
    text = names[place].encode() if comm.rank == teller and place < len(names) else b""
    length = torch.tensor([len(text)])
    comm.broadcast(length, src=teller)
    letters = torch.zeros(int(length), dtype=torch.uint8)
    if comm.rank == teller:
        letters = torch.tensor(list(text), dtype=torch.uint8)
    comm.broadcast(letters, src=teller)
    name = bytes(letters.tolist()).decode() or "a tensor that only some ranks have"
    kept = at_place[teller]
    has_same_name = all(found is not None and kept is not None and found[0] == kept[0] for found in at_place)
    how = "has other values" if has_same_name else "is another tensor"
    ranks = ", ".join(map(str, odd[:8])) + (" …" if len(odd) > 8 else "")
    return (
        f"{who}: replicas differ, first in {name}: it {how} on rank{'s' if len(odd) > 1 else ''} {ranks} of "
        f"{comm.size}. Every rank must make the same steps from the same start: look for what ran there only "
        "(a step that was skipped, a state that was loaded on some ranks, gradients changed after backward)"
    )
