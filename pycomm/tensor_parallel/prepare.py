"""Styles that bring a module's inputs or outputs from one layout to another: torch's PrepareModule… ones.

They are forward hooks of the module, which stay until it dies; parameters are left alone. A tensor that is
already in the layout that is wanted costs nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.changes import AddHook, Change
from pycomm.tensor_parallel.layouts import Layout, converted, layout_of
from pycomm.tensor_parallel.styles import ParallelStyle, check_local_output
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]


_converted = untraced(converted)


class _Convert:
    """A forward hook that brings tensors from one layout to another."""

    def __init__(
        self,
        where: str,
        comm: Communicator,
        positional: list[tuple[Layout, Layout] | None],
        by_name: dict[str, tuple[Layout, Layout]],
    ) -> None:
        self.where, self.comm, self.positional, self.by_name = where, comm, positional, by_name

    def __deepcopy__(self, memo: Any) -> _Convert:
        return self

    def _values(self, what: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(values) < len(self.positional):
            raise ValueError(
                f"{self.where}: the plan gives layouts of {len(self.positional)} {what}, got {len(values)}"
            )
        ways = [*self.positional, *[None] * (len(values) - len(self.positional))]
        return tuple(
            value if way is None else _converted(value, *way, self.comm)
            for value, way in zip(values, ways, strict=True)
        )

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, way in self.by_name.items():
            if name not in kwargs:
                raise ValueError(
                    f"{self.where}: the plan gives a layout of the keyword {name!r}, got {list(kwargs)}"
                )
            kwargs = {**kwargs, name: _converted(kwargs[name], *way, self.comm)}
        return self._values("positional inputs", args), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return self._values("outputs", output)
        return self._values("outputs", (output,))[0]


def _ways(name: str, here: Any, there: Any) -> list[tuple[Layout, Layout] | None]:
    """Pairs of layouts, None where a value is left alone."""
    sides = [
        [] if of is None else list(of) if isinstance(of, (tuple, list)) else [of] for of in (here, there)
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{name}: there are {len(sides[0])} layouts and {len(sides[1])} desired ones")
    ways: list[tuple[Layout, Layout] | None] = []
    for a, b in zip(*sides, strict=True):
        if a is None or b is None:
            ways.append(None)
            continue
        way = layout_of(f"{name}: a layout", a), layout_of(f"{name}: a desired layout", b)
        if way[1].kind == "partial" and way[0].kind != "partial":
            raise ValueError(f"{name}: a tensor cannot go from {way[0]} to {way[1]}")
        ways.append(None if way[0] == way[1] else way)
    return ways


class PrepareModuleInput(ParallelStyle):
    """Brings a module's inputs from the layouts in which they come to those that it wants.

    Args:
        input_layouts, desired_input_layouts: a placement, or one for each positional input; None for what is
            left alone.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword inputs, by name.
        use_local_output: True; False, a DTensor, is refused. (torch's default is False.)

    Raises:
        TypeError, ValueError: a wrong argument; in forward, inputs that do not fit the layouts.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        PrepareModuleInput(Shard(1) -> Replicate())
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        check_local_output(name, use_local_output)
        self._positional = _ways(name, input_layouts, desired_input_layouts)
        here, there = input_kwarg_layouts or {}, desired_input_kwarg_layouts or {}
        if set(here) != set(there):
            raise ValueError(f"{name}: layouts of {sorted(here)}, but desired layouts of {sorted(there)}")
        ways = _ways(name, list(here.values()), [there[k] for k in here])
        self._by_name = {k: way for k, way in zip(here, ways, strict=True) if way is not None}

    def __repr__(self) -> str:
        shown = [_shown(way) for way in self._positional]
        shown += [f"{name}: {_shown(way)}" for name, way in self._by_name.items()]
        return f"{type(self).__name__}({', '.join(shown)})"

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        return [AddHook(module, _Convert(where, comm, self._positional, self._by_name).before, True)]


def _shown(way: tuple[Layout, Layout] | None) -> str:
    return "as it comes" if way is None else f"{way[0]} -> {way[1]}"


class PrepareModuleOutput(ParallelStyle):
    """Brings a module's outputs from the layouts that it makes to those that are wanted.

    Args:
        output_layouts, desired_output_layouts: a placement, or one for each output of a tuple; None for what
            is left alone.
        use_local_output: True; False, a DTensor, is refused.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        PrepareModuleOutput(Shard(1) -> Replicate())
    """

    def __init__(
        self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True
    ) -> None:
        check_local_output("PrepareModuleOutput", use_local_output)
        self._positional = _ways("PrepareModuleOutput", output_layouts, desired_output_layouts)

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({', '.join(map(_shown, self._positional))})"

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        return [AddHook(module, _Convert(where, comm, self._positional, {}).after, False)]


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` of one module.

    Args:
        See both; ``use_local_input`` and ``use_local_output`` must be True.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareModuleInputOutput(
        ...     input_layouts=Shard(1), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(1),
        ... )
        PrepareModuleInputOutput(Shard(1) -> Replicate(), Replicate() -> Shard(1))
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_input: bool = True,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ) -> None:
        self._before = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self._after = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def __repr__(self) -> str:
        inside = [repr(s).partition("(")[2][:-1] for s in (self._before, self._after)]
        return f"PrepareModuleInputOutput({', '.join(inside)})"

    def changes(self, module: nn.Module, where: str, comm: Communicator) -> list[Change]:
        """See the base class."""
        return [*self._before.changes(module, where, comm), *self._after.changes(module, where, comm)]
