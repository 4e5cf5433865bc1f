"""Linear layers whose weight is cut over the ranks: by outputs (column) or by inputs (row).

y = x Wᵀ + b with W of (out, in), as in ``torch.nn.Linear``. *Column parallel*: each rank has some rows of W
and computes those outputs. *Row parallel*: each rank has some columns of W, for the inputs that it has, and
the products are summed over the ranks. A column parallel layer followed by a row parallel one needs one
all_reduce forward and one backward.

Initial values are those of ``torch.nn.Linear`` from the same seed, for every degree (parameters.py,
``fill``). With ``device="meta"`` nothing is initialised; ``materialize`` (state_dict.py) does it later.

Source: M. Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.checks import check_equal
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.overlap import gather_linear, linear_reduce_scatter
from pycomm.tensor_parallel.parameters import fill, mark_sharded
from pycomm.tensor_parallel.regions import (
    copy_many,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from pycomm.tensor_parallel.replicas import with_summed_gradients
from pycomm.tensor_parallel.shards import Split, even, fused, heads

__all__ = ["ColumnParallelLinear", "FusedColumnParallelLinear", "RowParallelLinear"]

InitMethod = Callable[[Tensor], Any]


class _Linear(nn.Module):
    """What the two have in common: sizes, the weight's shard, its initial values."""

    _sharded_dim: int
    sequence_parallel: bool
    sequence_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        split: Split,
        comm: Communicator,
        init_method: InitMethod | None,
        bias: int | None,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.split, self.group, self.init_method = split, comm, init_method
        shape = [out_features, in_features]
        shape[self._sharded_dim] = split.lengths[comm.rank]
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.empty(bias, device=device, dtype=dtype))
        self._weight_shard = mark_sharded(self, "weight", self._sharded_dim, split, comm)

    def reset_parameters(self) -> None:
        """The values of ``torch.nn.Linear`` from torch's generator, or ``init_method``'s and no bias."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0

        def weight(whole: Tensor) -> None:
            if self.init_method is not None:
                self.init_method(whole)
            elif whole.numel() > 0:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5))

        fill(self.weight, self._weight_shard, weight)
        if self.bias is not None:
            self._fill_bias(lambda b: b.zero_() if self.init_method else b.uniform_(-bound, bound))

    def _fill_bias(self, init: InitMethod) -> None:
        raise NotImplementedError

    def _check_features(self, input: Tensor, want: int, which: str) -> None:
        if input.dim() < 1 or input.shape[-1] != want:
            with self.group._refusing:
                raise ValueError(
                    f"{type(self).__name__}({self.in_features}, {self.out_features}): the last dimension of "
                    f"the input must be {which}, {want}, on rank {self.group.rank} of {self.group.size}; got "
                    f"a tensor of shape {tuple(input.shape)}"
                )
        if self.sequence_parallel and not -input.dim() <= self.sequence_dim < input.dim() - 1 - (
            input.dim() if self.sequence_dim < 0 else 0
        ):
            with self.group._refusing:
                raise ValueError(
                    f"{type(self).__name__}({self.in_features}, {self.out_features}): sequence_dim "
                    f"{self.sequence_dim} is no dimension before the last of a tensor of shape "
                    f"{tuple(input.shape)}"
                )

    def extra_repr(self) -> str:
        """For print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank {self.group.rank} of {self.group.size} has "
            f"{self.split.lengths[self.group.rank]} of dimension {self._sharded_dim}"
        )


class ColumnParallelLinear(_Linear):
    """y = x Wᵀ + b with the rows of W, and of b, cut over the ranks.

    Args:
        in_features, out_features: of the whole layer; the number of ranks need not divide them, and may be
            larger (some ranks then have no output).
        bias: whether there is one.
        gather_output: True: every rank gets the whole output; False: its own features of it.
        sequence_parallel: the input is this rank's part of the sequence; it is gathered beside the product.
        group: the ranks; see :mod:`pycomm.tensor_parallel.group`.
        split: which outputs each rank has; None: as ``torch.chunk`` cuts. Rows on several ranks get the sum
            of their gradients.
        sequence_dim: the input's dimension of the sequence: 0 in (S, B, H), 1 in (B, S, H).
        init_method: initialises the whole weight; the bias is then zero. None: as ``torch.nn.Linear``.
        device, dtype: of the parameters.

    Shapes:
        input (…, in_features), the same on every rank; with ``sequence_parallel`` each has its part of the
        sequence. Output (…, this rank's features), or (…, out_features) with ``gather_output``.

    Raises:
        ValueError: the input has another number of features, ``split`` does not fit, or ``gather_output``
            with rows on several ranks.

    Example:
        >>> layer = ColumnParallelLinear(4, 6, gather_output=True)
        >>> layer(torch.ones(2, 4)).shape
        torch.Size([2, 6])
    """

    _sharded_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        group: Group = None,
        *,
        split: Split | None = None,
        sequence_dim: int = 0,
        init_method: InitMethod | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        comm = communicator_of(group, who=f"{name}: group")
        split = _fitting(f"{name}({in_features}, {out_features})", split, out_features, comm)
        if gather_output and split.is_replicated:
            raise ValueError(
                f"{name}({in_features}, {out_features}): gather_output with outputs that several of the "
                f"{comm.size} ranks have; gather what you need with gather_from_tensor_model_parallel_region"
            )
        n_outputs = split.lengths[comm.rank]
        super().__init__(
            in_features, out_features, split, comm, init_method, n_outputs if bias else None, device, dtype
        )
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.sequence_dim = sequence_dim
        if bias:
            self._bias_shard = mark_sharded(self, "bias", 0, split, comm)
        self.reset_parameters()

    def _fill_bias(self, init: InitMethod) -> None:
        fill(self.bias, self._bias_shard, init)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        self._check_features(input, self.in_features, "in_features")
        comm = self.group
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.split.is_replicated:
            both = [weight] if bias is None else [weight, bias]
            weight, *rest = with_summed_gradients(self.split, comm, *both)
            bias = rest[0] if rest else None
        if self.sequence_parallel and comm.size > 1:
            out = gather_linear(input, weight, comm, self.sequence_dim)
            if bias is not None:
                out = out + bias.to(out.dtype)
        else:
            check_equal(input, self, comm)
            out = F.linear(copy_many(comm, input)[0], weight, bias)
        if self.gather_output:
            out = gather_from_tensor_model_parallel_region(out, comm, split=self.split)
        return out


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Several column parallel layers with one input, in one product: queries, keys and values, or gate and
    up.

    The whole weight is that of the matrices one below another, as checkpoints have it; each is cut by itself.

    Args:
        in_features: of the whole layer.
        sizes: output features of each matrix, cut as ``torch.chunk`` does; or a
            :class:`~pycomm.tensor_parallel.shards.Split` that says how.
        The others: see :class:`ColumnParallelLinear`.

    Attributes:
        local_sizes: features of each matrix in this rank's output, for ``output.split(layer.local_sizes,
            -1)``.

    Example:
        >>> layer = FusedColumnParallelLinear(4, [6, 2, 2])
        >>> q, k, v = layer(torch.ones(3, 4)).split(layer.local_sizes, -1)
        >>> k.shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int | Split],
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        group: Group = None,
        **more: Any,
    ) -> None:
        comm = communicator_of(group, who=f"{type(self).__name__}: group")
        splits = [size if isinstance(size, Split) else even(size, comm.size) for size in sizes]
        split = fused(splits, comm.size)
        self_sizes = [part.lengths[comm.rank] for part in splits]
        super().__init__(
            in_features, split.size, bias, gather_output, sequence_parallel, comm, split=split, **more
        )
        self.sizes, self.local_sizes = [part.size for part in splits], self_sizes

    @classmethod
    def for_attention(
        cls, in_features: int, n_heads: int, n_kv_heads: int, head_size: int, group: Group = None, **more: Any
    ) -> FusedColumnParallelLinear:
        """Queries, keys and values of grouped attention, cut by whole heads.

        Key-value heads fewer than ranks are held by several (:func:`pycomm.tensor_parallel.shards.heads`).
        The layer that takes the heads' output is ``RowParallelLinear(n_heads * head_size, …,
        split=qkv.head_split)``.

        Args:
            in_features: of the whole layer.
            n_heads, n_kv_heads: of the whole layer; n_kv_heads divides n_heads.
            head_size: features of one head.
            group, more: as for the class.

        Returns:
            A layer with, beside those of the class, the attributes ``n_local_heads``, ``n_local_kv_heads``
            and ``head_split``, the split of the query features.

        Raises:
            ValueError: the numbers of heads do not divide.

        Example:
            >>> qkv = FusedColumnParallelLinear.for_attention(8, n_heads=4, n_kv_heads=2, head_size=2)
            >>> qkv.local_sizes, qkv.n_local_heads
            ([8, 4, 4], 4)
        """
        comm = communicator_of(group, who=f"{cls.__name__}: group")
        if n_kv_heads < 1 or n_heads % n_kv_heads != 0:
            raise ValueError(
                f"{cls.__name__}.for_attention({in_features}, {n_heads}, {n_kv_heads}, {head_size}) over "
                f"{comm.size} ranks: {n_heads} query heads cannot share {n_kv_heads} key-value heads evenly"
            )
        queries, keys = heads(n_heads, n_kv_heads, comm.size)
        q, kv = queries.times(head_size), keys.times(head_size)
        layer = cls(in_features, [q, kv, kv], group=comm, **more)
        layer.head_split = q
        layer.n_local_heads = queries.lengths[comm.rank]
        layer.n_local_kv_heads = keys.lengths[comm.rank]
        return layer

    head_split: Split
    n_local_heads: int
    n_local_kv_heads: int


class RowParallelLinear(_Linear):
    """y = x Wᵀ + b with the columns of W cut over the ranks; the products are summed, b is added once.

    Args:
        in_features, out_features: of the whole layer; any sizes, as for :class:`ColumnParallelLinear`.
        bias: whether there is one; every rank has all of it.
        input_is_parallel: True: the input is this rank's features; False: all, of which it takes its own.
        sequence_parallel: the output is this rank's part of the sequence, reduced and scattered beside the
            product; True needs ``input_is_parallel``.
        group: the ranks; see :mod:`pycomm.tensor_parallel.group`.
        split: which inputs each rank has; None: as ``torch.chunk`` cuts.
        sequence_dim: the dimension of the sequence: 0 in (S, B, H), 1 in (B, S, H).
        init_method: initialises the whole weight; the bias is then zero. None: as ``torch.nn.Linear``.
        device, dtype: of the parameters.

    Shapes:
        input (…, this rank's features), or (…, in_features) without ``input_is_parallel``. Output
        (…, out_features), the same on every rank, or with ``sequence_parallel`` each rank's part.

    Raises:
        ValueError: the input has another number of features, or the arguments contradict each other.

    Example:
        >>> up, down = ColumnParallelLinear(4, 6), RowParallelLinear(6, 4)
        >>> down(torch.relu(up(torch.ones(2, 4)))).shape
        torch.Size([2, 4])
    """

    _sharded_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        group: Group = None,
        *,
        split: Split | None = None,
        sequence_dim: int = 0,
        init_method: InitMethod | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        comm = communicator_of(group, who="RowParallelLinear: group")
        who = f"RowParallelLinear({in_features}, {out_features})"
        split = _fitting(who, split, in_features, comm)
        if split.is_replicated:
            raise ValueError(f"{who}: the split gives inputs to several of the {comm.size} ranks")
        if sequence_parallel and not input_is_parallel:
            raise ValueError(f"{who}: sequence_parallel=True needs input_is_parallel=True")
        n_biases = out_features if bias else None
        super().__init__(in_features, out_features, split, comm, init_method, n_biases, device, dtype)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.sequence_dim = sequence_dim
        self.reset_parameters()

    def _fill_bias(self, init: InitMethod) -> None:
        fill(self.bias, None, init)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        comm = self.group
        bias: Tensor | None = self.bias
        if self.input_is_parallel:
            self._check_features(input, self.split.lengths[comm.rank], "this rank's share of in_features")
        else:
            self._check_features(input, self.in_features, "in_features")
            input = scatter_to_tensor_model_parallel_region(input, comm, split=self.split)
        if self.sequence_parallel and comm.size > 1:
            out = linear_reduce_scatter(input, self.weight, comm, self.sequence_dim)
            # Each rank sees its part of the sequence only: its gradient of the bias is a part of the whole's.
            return out if bias is None else out + copy_many(comm, bias)[0].to(out.dtype)
        out = reduce_from_tensor_model_parallel_region(F.linear(input, self.weight), comm)
        return out if bias is None else out + bias.to(out.dtype)


def _fitting(who: str, split: Split | None, size: int, comm: Communicator) -> Split:
    if size < 0:
        raise ValueError(f"{who}: sizes must be at least 0")
    if split is None:
        return even(size, comm.size)
    if split.size != size or split.degree != comm.size:
        raise ValueError(
            f"{who}: {size} features over {comm.size} ranks; got a split of {split.size} over {split.degree}"
        )
    return split
