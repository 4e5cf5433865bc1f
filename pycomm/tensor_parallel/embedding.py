"""The embedding whose vocabulary is cut over the ranks, and the logits that go with it.

Source: M. Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.checks import check_equal
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.overlap import gather_linear
from pycomm.tensor_parallel.parameters import fill, mark_sharded
from pycomm.tensor_parallel.regions import (
    copy_many,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from pycomm.tensor_parallel.shards import chunks, even
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["VocabParallelEmbedding", "parallel_lm_logits"]


@untraced
def check_ids(who: object, ids: Tensor, n: int, comm: Communicator, ignored: int | None = None) -> None:
    """Raises an IndexError that names the first id outside of [0, n) and where it is; on every rank.

    On a shard a wrong id would look like one that another rank has, and give zeros.
    """
    bad = (ids < 0) | (ids >= n)
    if ignored is not None:
        bad &= ids != ignored
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        with comm._refusing:
            raise IndexError(
                f"{who}: id {int(ids[at])} at position {at} is outside of [0, {n}), the vocabulary over "
                f"{comm.size} ranks"
            )


def shard_of_rows(ids: Tensor, rows: Tensor, start: int, stop: int, padding_idx: int | None) -> Tensor:
    """The embeddings of ids in [start, stop), whose rows this rank has; zeros for the others."""
    if start == stop:
        return rows.new_zeros(*ids.shape, 0) @ rows  # zeros, with a way for the gradient
    is_elsewhere = (ids < start) | (ids >= stop)
    local = (ids - start).masked_fill(is_elsewhere, 0)
    padding = None if padding_idx is None or not start <= padding_idx < stop else padding_idx - start
    return F.embedding(local, rows, padding).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)


class VocabParallelEmbedding(nn.Module):
    """``torch.nn.Embedding`` with the rows of its weight cut over the ranks.

    Args:
        num_embeddings: of the whole vocabulary; the number of ranks need not divide it. Nothing is padded.
        embedding_dim: features of an embedding.
        padding_idx: an id of [-num_embeddings, num_embeddings) whose row starts as zeros and gets no
            gradient.
        sequence_parallel: the output is this rank's part of the sequence.
        group: the ranks; see :mod:`pycomm.tensor_parallel.group`.
        sequence_dim: the ids' dimension of the sequence: 0 in (S, B), 1 in (B, S).
        init_method: initialises the whole weight; None: as ``torch.nn.Embedding``, from the same seed the
            same values for every degree.
        device, dtype: of the weight.

    Shapes:
        input: integers (…), the same on every rank. Output (…, embedding_dim), the same on every rank, or
            with
        ``sequence_parallel`` each rank's part.

    Raises:
        IndexError: an id is outside of [0, num_embeddings); on every rank, naming it.
        ValueError: ``padding_idx`` is out of range.

    Example:
        >>> VocabParallelEmbedding(5, 3)(torch.tensor([[0, 4]])).shape
        torch.Size([1, 2, 3])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        group: Group = None,
        *,
        sequence_dim: int = 0,
        init_method: Callable[[Tensor], Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group: Communicator = communicator_of(group, who="VocabParallelEmbedding: group")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: padding_idx {padding_idx} is outside of the {num_embeddings} ids"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.init_method = init_method
        self.start, self.stop = chunks(num_embeddings, self.group.size)[self.group.rank]
        shape = self.stop - self.start, embedding_dim
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        split = even(num_embeddings, self.group.size)
        self._weight_shard = mark_sharded(self, "weight", 0, split, self.group)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``init_method``'s values, else those of ``torch.nn.Embedding`` from torch's generator."""

        def weight(whole: Tensor) -> None:
            (self.init_method or nn.init.normal_)(whole)
            if self.padding_idx is not None:
                whole[self.padding_idx].zero_()

        fill(self.weight, self._weight_shard, weight)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        comm = self.group
        if self.sequence_parallel and not -input.dim() <= self.sequence_dim < input.dim():
            with comm._refusing:
                raise ValueError(
                    f"{self}: sequence_dim {self.sequence_dim} is no dimension of ids of shape "
                    f"{tuple(input.shape)}"
                )
        check_ids(self, input, self.num_embeddings, comm)
        check_equal(input, self, comm)
        if comm.size == 1:
            return F.embedding(input, self.weight, self.padding_idx)
        out = shard_of_rows(input, self.weight, self.start, self.stop, self.padding_idx)
        if self.sequence_parallel:  # a dimension of the ids, which the output has one more than
            dim = self.sequence_dim % input.dim()
            return reduce_scatter_to_sequence_parallel_region(out, comm, dim=dim)
        return reduce_from_tensor_model_parallel_region(out, comm)

    def extra_repr(self) -> str:
        """For print."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, rank {self.group.rank} of "
            f"{self.group.size} has [{self.start}, {self.stop})"
        )


def parallel_lm_logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    group: Group = None,
    *,
    sequence_dim: int = 0,
) -> Tensor:
    """This rank's part of the logits, from a weight tied to the embedding's.

    Args:
        input: (…, D), the same on every rank; with ``sequence_parallel`` each rank's part of the sequence.
        weight: (V_local, D), this rank's rows, such as ``embedding.weight``.
        bias: (V_local), or None.
        sequence_parallel, group, sequence_dim: as for :class:`~pycomm.tensor_parallel.ColumnParallelLinear`.

    Returns:
        (…, V_local), for :func:`~pycomm.tensor_parallel.vocab_parallel_cross_entropy`.

    Example:
        >>> embedding = VocabParallelEmbedding(5, 3)
        >>> parallel_lm_logits(torch.ones(2, 3), embedding.weight).shape
        torch.Size([2, 5])
    """
    comm = communicator_of(group, who="parallel_lm_logits: group")
    if sequence_parallel and comm.size > 1:
        out = gather_linear(input, weight, comm, sequence_dim)
        return out if bias is None else out + bias.to(out.dtype)
    return F.linear(copy_many(comm, input)[0], weight, bias)
