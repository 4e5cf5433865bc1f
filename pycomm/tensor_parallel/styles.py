"""Parallel styles: what a plan may say of a module. Names and arguments are those of torch's styles.

A style says what to change in one module (``changes.py``) and touches nothing itself. Layouts are torch's
placements, ``Replicate()``, ``Shard(dim)``, ``Partial()``; tensors between modules are plain local ones, so
``use_local_output=False`` (a DTensor) is refused.

Beyond torch's: sizes need not divide by the number of ranks, and ``split`` says how features are cut, which
fused and grouped projections need. It is a function of the number of ranks that returns a
:class:`pycomm.tensor_parallel.shards.Split`, such as ``lambda n: fused([64, 64, 64], n)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.changes import Change, ChangeClass, SetAttribute, ShardParameter
from pycomm.tensor_parallel.layouts import Layout, layout_of
from pycomm.tensor_parallel.shards import Split, even
from pycomm.tensor_parallel.streams import CommonDropout, Forked
from pycomm.tensor_parallel.swapped import (
    ColwiseEmbedding,
    ColwiseLinear,
    How,
    RowwiseEmbedding,
    RowwiseLinear,
    SequenceShards,
    Swapped,
)

__all__ = [
    "ColwiseParallel",
    "ForkRandom",
    "LocalAttributes",
    "ParallelStyle",
    "ReplicatedDropout",
    "RowwiseParallel",
    "SequenceParallel",
]

SplitFor = Callable[[int], Split]
_REPLICATE, _LAST = Layout("replicate"), Layout("shard", -1)


class ParallelStyle(ABC):
    """What a plan's values are."""

    @abstractmethod
    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """What to change in ``module``, named ``where``; raises TypeError or ValueError if it cannot."""

    def __repr__(self) -> str:
        said = [f"{name.lstrip('_')}={value}" for name, value in vars(self).items() if value is not None]
        return f"{type(self).__name__}({', '.join(said)})"


def _is_conv1d(module: nn.Module) -> bool:
    """Told by its parts: to import transformers takes seconds, and a model that has one has imported it."""
    return any(c.__name__ == "Conv1D" and "transformers" in c.__module__ for c in type(module).__mro__)


def check_local_output(name: str, use_local_output: Any) -> None:
    if use_local_output is not True:
        raise ValueError(
            f"{name}: use_local_output must be True, got {arguments.short(use_local_output)}: pycomm's "
            "styles pass plain tensors, not DTensors"
        )


class _Cut(ParallelStyle):
    """What Colwise and Rowwise have in common: cut a Linear, Conv1D or Embedding."""

    def __init__(
        self, input_layouts: Any, output_layouts: Any, use_local_output: bool, split: SplitFor | None
    ) -> None:
        name = type(self).__name__
        check_local_output(name, use_local_output)
        if split is not None and not callable(split):
            raise TypeError(
                f"{name}: split must be a function of the number of ranks that returns a Split, such as "
                f"lambda n: fused([64, 64, 64], n); got {arguments.short(split)}"
            )
        # The default depends on the kind of the module, so it is filled in later.
        self._input = None if input_layouts is None else layout_of(f"{name}: input_layouts", input_layouts)
        self._output = (
            None if output_layouts is None else layout_of(f"{name}: output_layouts", output_layouts)
        )
        self._split = split

    def _split_of(self, where: str, what: str, size: int, comm: Communicator) -> Split:
        if self._split is None:
            return even(size, comm.size)
        split = self._split(comm.size)
        arguments.instance(f"{where}: what split returns", split, Split, "a Split")
        if split.degree != comm.size or split.size != size:
            raise ValueError(
                f"{where}: the plan's split is of {split.size} features over {split.degree} ranks, but the "
                f"module has {size} {what} and there are {comm.size} ranks"
            )
        return split

    def _kind(self, module: nn.Module, where: str) -> str:
        known = (nn.Linear.forward, nn.Embedding.forward)
        if isinstance(module, Swapped):
            raise ValueError(f"{where}: this module is parallel already; a plan is applied once")
        kind = (
            "conv1d" if _is_conv1d(module) else
            "linear" if isinstance(module, nn.Linear) else
            "embedding" if isinstance(module, nn.Embedding) else ""
        )  # fmt: skip
        if kind != "conv1d" and (not kind or type(module).forward not in known):
            raise TypeError(
                f"{where}: {type(self).__name__} cuts nn.Linear, nn.Embedding, their subclasses with the "
                f"same forward, and Conv1D, got {type(module).__module__}.{type(module).__name__}"
            )
        return kind


def _check_embedding(module: nn.Module, where: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(
                f"{where}: an Embedding with {option}={getattr(module, option)!r} cannot be cut: a rank does "
                "not see whole rows, or all ids"
            )


class ColwiseParallel(_Cut):
    """Cuts the output features of a Linear or Conv1D, or the features of an Embedding.

    Args:
        input_layouts: how the input comes: ``Replicate()`` (default), or ``Shard(dim)``, which is gathered,
            beside the product where ``dim`` is the sequence.
        output_layouts: how the output goes: ``Shard(-1)`` (default), or ``Replicate()``, which gathers it.
        use_local_output: True; False, a DTensor, is refused.
        split: how the features are cut, as a function of the number of ranks; None: as ``torch.chunk`` cuts.
            Features on several ranks get the sum of their gradients.

    Raises:
        TypeError, ValueError: a wrong argument, or, when the plan is applied, a module that it cannot cut.

    Example:
        >>> ColwiseParallel()
        ColwiseParallel()
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        split: SplitFor | None = None,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, split)
        if self._output is not None and self._output.kind == "partial":
            raise ValueError(
                "ColwiseParallel: output_layouts must be Shard(dim) or Replicate(), got Partial()"
            )

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        kind = self._kind(module, where)
        size = _weight(module, where).shape[0 if kind == "linear" else 1]
        split = self._split_of(where, "output features", size, comm)
        output = self._output or _LAST
        if split.is_replicated and output != _LAST:
            raise ValueError(f"{where}: outputs that several ranks have cannot be brought to {output}")
        if kind == "embedding":
            _check_embedding(module, where)
            if split.is_replicated:
                raise ValueError(f"{where}: the features of an Embedding cannot be on several ranks")
        dim = 0 if kind == "linear" else 1
        how = How(where, comm, split, self._input or _REPLICATE, output, kind == "conv1d")
        made: list[Change] = [ShardParameter(module, "weight", dim, split, comm)]
        if module._parameters.get("bias") is not None:
            made.append(ShardParameter(module, "bias", 0, split, comm))
        mixin = ColwiseEmbedding if kind == "embedding" else ColwiseLinear
        return [*made, ChangeClass(module, mixin, how)]


class RowwiseParallel(_Cut):
    """Cuts the input features of a Linear or Conv1D, or the ids of an Embedding.

    Args:
        input_layouts: how the input comes: for a Linear ``Shard(-1)`` (default) or ``Replicate()``, for an
            Embedding ``Replicate()``.
        output_layouts: ``Replicate()`` (default): the sum over the ranks; ``Shard(dim)``: a part of it, such
            as of the sequence.
        use_local_output: True; False, a DTensor, is refused.
        split: as for :class:`ColwiseParallel`, the same as of the layer before; features on several ranks are
            refused.

    Raises:
        TypeError, ValueError: as for :class:`ColwiseParallel`. In forward, IndexError for an id outside of
        an Embedding.

    Example:
        >>> RowwiseParallel()
        RowwiseParallel()
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        split: SplitFor | None = None,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, split)

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        kind = self._kind(module, where)
        dim = 1 if kind == "linear" else 0
        size = _weight(module, where).shape[dim]
        split = self._split_of(where, "ids" if kind == "embedding" else "input features", size, comm)
        if split.is_replicated:
            raise ValueError(
                f"{where}: RowwiseParallel sums over the ranks, so no two may have the same input"
            )
        if kind != "embedding" and self._output is not None and self._output.kind == "partial":
            raise ValueError(f"{where}: output_layouts must be Replicate() or Shard(dim), got Partial()")
        if kind == "embedding":
            _check_embedding(module, where)
            if any(len(pieces) > 1 for pieces in split.pieces):
                raise ValueError(f"{where}: each rank's ids must be neighbours, got {split.pieces}")
        input_default = _REPLICATE if kind == "embedding" else _LAST
        how = How(
            where, comm, split, self._input or input_default, self._output or _REPLICATE, kind == "conv1d"
        )
        mixin = RowwiseEmbedding if kind == "embedding" else RowwiseLinear
        return [ShardParameter(module, "weight", dim, split, comm), ChangeClass(module, mixin, how)]


def _weight(module: nn.Module, where: str) -> nn.Parameter:
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        what = "is parametrized or lazy" if weight is None else f"has a weight of {type(weight).__name__}"
        raise TypeError(
            f"{where}: {type(module).__name__} {what}; expected a plain nn.Parameter (parallelize before "
            "fully_shard, and before weight_norm and the like)"
        )
    return weight


class SequenceParallel(ParallelStyle):
    """A module between sequence-parallel ones, a norm or dropout: it gets, and gives, this rank's positions.

    Its parameters are replicated; their gradients, of which each rank has a part, are summed over the ranks.

    Args:
        sequence_dim: that of the sequence. An nn.Dropout gets the mask of the whole sequence, cut along it;
            nothing else depends on it.
        use_local_output: True; False, a DTensor, is refused. (torch's default is False.)

    Example:
        >>> SequenceParallel()
        SequenceParallel(sequence_dim=1)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        check_local_output("SequenceParallel", use_local_output)
        self.sequence_dim = arguments.integer("SequenceParallel: sequence_dim", sequence_dim, -64, 64)

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        if isinstance(module, Swapped):
            raise ValueError(f"{where}: this module is parallel already; a plan is applied once")
        if isinstance(module, _DropoutNd) and not isinstance(module, nn.Dropout):
            raise TypeError(
                f"{where}: the mask of a {type(module).__name__} would depend on the number of ranks, and "
                "leave torch's generator in other states on them; SequenceParallel takes an nn.Dropout"
            )
        if isinstance(module, (_NormBase, nn.GroupNorm)):
            raise TypeError(
                f"{where}: a {type(module).__name__} takes its statistics over positions, of which a rank "
                "has a part only; SequenceParallel is for norms over features, such as LayerNorm and RMSNorm"
            )
        below = [name for name, child in module.named_modules() if name and child._parameters]
        if below:
            raise TypeError(
                f"{where}: SequenceParallel is for a module with parameters of its own only, such as a norm; "
                f"this {type(module).__name__} has modules with parameters: {', '.join(below[:3])}"
            )
        if isinstance(module, nn.Dropout):
            how = How(where, comm, input=Layout("shard", self.sequence_dim))
            return [ChangeClass(module, CommonDropout, how)]
        return [ChangeClass(module, SequenceShards, How(where, comm))]


class ReplicatedDropout(ParallelStyle):
    """An nn.Dropout of activations that all ranks have: the same mask on all, and for every number of ranks.

    Needed where the module around it is a :class:`ForkRandom`; elsewhere torch's own does, as long as ranks
    are seeded alike.

    Example:
        >>> ReplicatedDropout()
        ReplicatedDropout()
    """

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        if not isinstance(module, nn.Dropout) or isinstance(module, Swapped):
            raise TypeError(f"{where}: ReplicatedDropout is for an nn.Dropout, got {type(module).__name__}")
        return [ChangeClass(module, CommonDropout, How(where, comm))]


class ForkRandom(ParallelStyle):
    """A module whose random numbers differ between ranks: attention, with dropout inside, on a rank's heads.

    In training it draws from the stream of ``model_parallel_manual_seed``, which must have been called; the
    generator outside stays the same on all ranks.

    Args:
        probability: of the dropout inside, from the module; nothing is done where it is 0.

    Example:
        >>> ForkRandom(lambda attention: attention.dropout)
        ForkRandom()
    """

    def __init__(self, probability: Callable[[Any], float]) -> None:
        if not callable(probability):
            raise TypeError(
                "ForkRandom: probability must be a function of the module, such as "
                f"lambda attention: attention.dropout, got {arguments.short(probability)}"
            )
        self._probability = probability

    def __repr__(self) -> str:
        return "ForkRandom()"

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        p = self._probability(module)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"{where}: ForkRandom's probability must give one in [0, 1], got {p!r}")
        return [ChangeClass(module, Forked, How(where, comm, probability=self._probability))]


class LocalAttributes(ParallelStyle):
    """Sets attributes of a module to what they are on a rank, such as a number of heads.

    Args:
        values: for each attribute, which the module must have, a function of (number of ranks, rank).

    Example:
        >>> LocalAttributes(num_heads=lambda n_ranks, rank: 8 // n_ranks)
        LocalAttributes(num_heads)
    """

    def __init__(self, **values: Callable[[int, int], Any]) -> None:
        for name, value in values.items():
            if not callable(value):
                raise TypeError(
                    f"LocalAttributes: {name} must be a function of (number of ranks, rank), "
                    f"got {arguments.short(value)}"
                )
        self._values = values

    def __repr__(self) -> str:
        return f"LocalAttributes({', '.join(self._values)})"

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        for name in self._values:
            if not hasattr(module, name):
                raise ValueError(f"{where}: {type(module).__name__} has no attribute {name!r} to set")
        return [
            SetAttribute(module, name, value(comm.size, comm.rank)) for name, value in self._values.items()
        ]
