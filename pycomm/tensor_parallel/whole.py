"""A tensor that is whole to ``torch.distributed.checkpoint`` and holds this rank's shard of it.

It has the whole's shape and no values of its own; checkpoints ask it which *chunks*, boxes of the whole, this
rank has, and read or write those in the shard's memory. A piece on several ranks is written by the lowest and
read by each. A shard that FSDP2 has cut further gives the chunks that lie in this rank's part of it.

Source: torch's protocol ``torch.distributed._checkpointable._Checkpointable``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycomm.tensor_parallel.parameters import ParameterShard
from pycomm.tensor_parallel.shards import Piece

if TYPE_CHECKING:  # torch.distributed.checkpoint is slow to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["WholeTensor", "is_dtensor", "undistributed"]


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is distributed by torch (FSDP2), without importing what that needs."""
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def undistributed(value: Any) -> Any:
    """A tensor that FSDP2 has cut as its whole; others as they are. Collective over FSDP2's ranks."""
    return value.full_tensor() if is_dtensor(value) else value


class WholeTensor(Tensor):
    """See the module. ``local`` is the shard; only copies and moves are defined as operations.

    Example:
        >>> import pycomm
        >>> from pycomm.tensor_parallel.shards import even
        >>> comm = pycomm.init()
        >>> WholeTensor(torch.zeros(6, 2), ParameterShard(0, even(6, comm.size), comm)).shape
        torch.Size([6, 2])
    """

    local: Tensor
    shard: ParameterShard

    @staticmethod
    def __new__(cls, local: Tensor, shard: ParameterShard) -> WholeTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        whole: WholeTensor = make(
            cls, shard.whole_shape(local.shape), dtype=local.dtype, device=local.device, requires_grad=False
        )
        whole.local, whole.shard = local.detach(), shard
        return whole

    def __init__(self, local: Tensor, shard: ParameterShard) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "_to_copy", "empty_like", "alias"):
            given = args[0]
            return WholeTensor(func(given.local, *args[1:], **(kwargs or {})), given.shard)
        if name == "new_empty" and tuple(args[1]) == tuple(args[0].shape):  # async_save's copy
            return WholeTensor(func(args[0].local, args[0].local.shape, **(kwargs or {})), args[0].shard)
        if name == "copy_" and all(isinstance(a, WholeTensor) for a in args[:2]):
            args[0].local.copy_(args[1].local)
            return args[0]
        raise NotImplementedError(
            f"WholeTensor: {name} is not defined; it stands for a whole tensor in a checkpoint, of which "
            "this rank has a shard: use full_state_dict for the values"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        comm = self.shard.comm
        return f"WholeTensor(shape={tuple(self.shape)}, rank {comm.rank} of {comm.size} has {self.local})"

    def _boxes(self, owned_only: bool) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        """The chunks of the whole that this rank has, each with its view of the memory."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        values: Any = self.local
        start = [0] * values.dim()
        if is_dtensor(values):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(
                values.shape, values.device_mesh, values.placements
            )
            start, values = list(offset), values.to_local()
        dim, rank = self.shard.dim, self.shard.comm.rank
        split = self.shard.split
        pieces: list[tuple[Piece, int]] = split.owned(rank) if owned_only else split.placed(rank)
        boxes = []
        for (first, stop), at in pieces:
            low = max(at, start[dim])
            high = min(at + stop - first, start[dim] + values.shape[dim])
            if low >= high:
                continue
            view = values.narrow(dim, low - start[dim], high - low)
            if view.numel() == 0:
                continue
            offsets = [first + low - at if d == dim else n for d, n in enumerate(start)]
            boxes.append((ChunkStorageMetadata(torch.Size(offsets), view.shape), view))
        return boxes

    # ---- torch's protocol ----

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(view), size=self.size()
                ),
            )
            for chunk, view in self._boxes(owned_only=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._boxes(owned_only=False)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk, view in self._boxes(owned_only=False):
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"{index.fqn}: rank {self.shard.comm.rank} has no chunk at {index.offset}")
