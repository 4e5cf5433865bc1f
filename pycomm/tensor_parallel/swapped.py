"""What a parallelized module is: its own class with one of these before it, and a record of how.

``parallelize_module`` changes a module in place: parameters become this rank's shards, and its class becomes
a subclass made of the mixin here and its own class, so that ``forward`` communicates. Why not another module,
or hooks: the module keeps its identity, attributes, hooks and names in the state dict, ``isinstance`` stays
true, whoever else holds the module (a tied head) holds the parallel one, nothing is left behind when a
forward raises, and ``torch.compile`` and ``deepcopy`` see an ordinary class. FSDP2 does the same. Attributes
such as ``in_features`` stay those of the whole layer.

Between modules a tensor is *replicated* (every rank has the same values, and the same gradient) or *sharded*
along a dimension (each has its part of both); the mixins keep to that on both sides. ``torch.compile`` runs
cut layers as they are, one graph break each, and compiles what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.checks import check_equal
from pycomm.tensor_parallel.embedding import check_ids, shard_of_rows
from pycomm.tensor_parallel.layouts import Layout, converted
from pycomm.tensor_parallel.overlap import gather_linear, linear_reduce_scatter
from pycomm.tensor_parallel.parameters import _ATTRIBUTE, fill
from pycomm.tensor_parallel.regions import copy_many
from pycomm.tensor_parallel.replicas import with_summed_gradients
from pycomm.tensor_parallel.shards import Split
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["ColwiseEmbedding", "ColwiseLinear", "How", "RowwiseEmbedding", "RowwiseLinear", "SequenceShards"]


@dataclass(frozen=True)
class How:
    """How a module is parallel. ``where`` is its name, for errors; ``split`` cuts its sharded features."""

    where: str
    comm: Communicator
    split: Split | None = None
    input: Layout | None = None
    output: Layout | None = None
    is_transposed: bool = False
    """The weight is (in, out), as transformers' Conv1D has it."""
    probability: Callable[[Any], float] | None = None
    """Of the dropout inside; see streams.py."""

    def __deepcopy__(self, memo: Any) -> How:
        return self


class Swapped:
    """The base of the mixins: beside it in the class stands the module's own."""

    _parallel: How


_copy_many = untraced(copy_many)
_classes: dict[tuple[Any, Any], type[nn.Module]] = {}


def swapped_class(mixin: type[Swapped], own: type[nn.Module]) -> type[nn.Module]:
    """``own`` with ``mixin`` before it; the same class each time."""
    if (mixin, own) not in _classes:
        name = f"{mixin.__name__}[{own.__name__}]"
        _classes[mixin, own] = type(name, (mixin, own), {"__module__": own.__module__})
    return _classes[mixin, own]


def _initialise(module: Any, inits: dict[str, Callable[[Tensor], Any]]) -> None:
    """Fills a module's own parameters, of shards the whole."""
    notes = module.__dict__[_ATTRIBUTE].by_name
    for name, init in inits.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            fill(parameter, notes.get(name), init)


class _Linear(Swapped):
    weight: Tensor
    bias: Tensor | None

    def _matrix(self) -> Tensor:
        """The local weight as (out, in)."""
        return self.weight.t() if self._parallel.is_transposed else self.weight

    def reset_parameters(self) -> None:
        """Initial values of the whole layer, from torch's generator; each rank keeps its shard.

        The own class's would take the shard for the layer: another distribution, and the same values on all
        ranks. (Conv1D has them in its constructor.)
        """
        _, in_features = self._whole_shape()
        bound = 1 / math.sqrt(in_features) if in_features else 0.0

        def weight(whole: Tensor) -> None:
            if self._parallel.is_transposed:
                nn.init.normal_(whole, std=0.02)
            elif whole.numel():
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5))

        def bias(whole: Tensor) -> None:
            nn.init.zeros_(whole) if self._parallel.is_transposed else nn.init.uniform_(whole, -bound, bound)

        _initialise(self, {"weight": weight, "bias": bias})

    def _whole_shape(self) -> tuple[int, int]:
        """(out, in) of the whole layer."""
        shape = list(self._matrix().shape)
        split = self._parallel.split
        assert split is not None
        shape[0 if isinstance(self, ColwiseLinear) else 1] = split.size
        return shape[0], shape[1]

    def _check(self, input: Tensor, want: int) -> None:
        if input.dim() < 1 or input.shape[-1] != want:
            comm = self._parallel.comm
            with comm._refusing:
                raise ValueError(
                    f"{self._parallel.where}: rank {comm.rank} of {comm.size} expects {want} features in the "
                    f"last dimension, got a tensor of shape {tuple(input.shape)}; do the styles of this "
                    "module and of the one before it split alike?"
                )


class ColwiseLinear(_Linear):
    """Some output features of a Linear or Conv1D."""

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        how = self._parallel
        assert how.split is not None and how.input is not None and how.output is not None
        weight, bias = self._matrix(), self.bias
        if how.input.kind != "shard" or how.input.dim not in (-1, input.dim() - 1):
            self._check(input, weight.shape[1])
        if how.split.is_replicated:
            both = [weight] if bias is None else [weight, bias]
            weight, *rest = with_summed_gradients(how.split, how.comm, *both)
            bias = rest[0] if rest else None
        if how.comm.size == 1:
            return F.linear(input, weight, bias)
        if how.input.kind == "shard" and how.input.dim not in (-1, input.dim() - 1):
            out = gather_linear(input, weight, how.comm, how.input.dim)
            out = out if bias is None else out + bias.to(out.dtype)
        else:
            input = converted(input, how.input, Layout("used"), how.comm)
            check_equal(input, f"{how.where}: the input", how.comm)
            out = F.linear(input, weight, bias)
        return converted(out, Layout("shard", -1), how.output, how.comm, how.split)


class RowwiseLinear(_Linear):
    """Some input features of a Linear or Conv1D; products are summed over ranks, the bias is added once."""

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        how = self._parallel
        assert how.split is not None and how.input is not None and how.output is not None
        weight, bias, comm = self._matrix(), self.bias, how.comm
        if how.input.kind == "shard" and how.input.dim in (-1, input.dim() - 1):
            self._check(input, weight.shape[1])
        else:
            input = converted(input, how.input, Layout("replicate"), comm)
            self._check(input, how.split.size)
            input = converted(input, Layout("replicate"), Layout("shard", -1), comm, how.split)
        if comm.size == 1:
            return F.linear(input, weight, bias)
        if how.output.kind == "shard" and how.output.dim not in (-1, input.dim() - 1):
            out = linear_reduce_scatter(input, weight, comm, how.output.dim)
            if bias is not None:
                bias = copy_many(comm, bias)[0]  # each rank adds it to its part only
            return out if bias is None else out + bias.to(out.dtype)
        out = converted(F.linear(input, weight), Layout("partial"), Layout("replicate"), comm)
        out = out if bias is None else out + bias.to(out.dtype)
        return converted(out, Layout("replicate"), how.output, comm)


class _Embedding(Swapped):
    weight: Tensor
    num_embeddings: int
    padding_idx: int | None

    def reset_parameters(self) -> None:
        """Initial values of the whole embedding, from torch's generator; each rank keeps its shard."""

        def weight(whole: Tensor) -> None:
            nn.init.normal_(whole)
            if self.padding_idx is not None:
                whole[self.padding_idx].zero_()

        _initialise(self, {"weight": weight})


class ColwiseEmbedding(_Embedding):
    """Some features of an Embedding."""

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        how = self._parallel
        assert how.split is not None and how.input is not None and how.output is not None
        input = converted(input, how.input, Layout("replicate"), how.comm)
        check_ids(how.where, input, self.num_embeddings, how.comm)
        out = F.embedding(input, self.weight, self.padding_idx)
        return converted(out, Layout("shard", -1), how.output, how.comm, how.split)


class RowwiseEmbedding(_Embedding):
    """Some ids of an Embedding; what the other ranks have comes by a sum with zeros."""

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        how = self._parallel
        assert how.split is not None and how.input is not None and how.output is not None
        input = converted(input, how.input, Layout("replicate"), how.comm)
        check_ids(how.where, input, self.num_embeddings, how.comm)
        check_equal(input, f"{how.where}: the input", how.comm)
        if how.comm.size == 1:
            return F.embedding(input, self.weight, self.padding_idx)
        [(start, stop)] = how.split.pieces[how.comm.rank] or ((0, 0),)
        out = shard_of_rows(input, self.weight, start, stop, self.padding_idx)
        return converted(out, Layout("partial"), how.output, how.comm)


class SequenceShards(Swapped):
    """A module on this rank's part of the sequence; its parameters' gradients are summed over the ranks."""

    _parameters: dict[str, nn.Parameter | None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in self._parameters.items() if p is not None}
        if not own or self._parallel.comm.size == 1 or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        copies: Any = _copy_many(self._parallel.comm, *own.values())
        self._parameters.update(zip(own, copies, strict=True))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.update(own)
