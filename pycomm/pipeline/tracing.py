"""A model's forward as a graph, traced only as deep as the cuts lie.

A module that no cut lies inside stays whole: its node calls the module itself, so its code may branch on
values, and its dropout, normalisation, hooks and train/eval mode work as ever. Only the modules around a cut
are *opened*: their forward runs once with symbols (torch.fx) in place of tensors. Sizes are symbols too,
therefore the graph holds for microbatches of any shape. What an opened forward takes from ``self.training``
is found by tracing it in both modes, and read when the stage runs.

Words: a *mark* is a node that says "the next stage begins here"; arguments that hold no tensor are *fixed*:
they must be the same in every step, which the first stage checks.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from pycomm.pipeline.messages import leaves

__all__ = ["SplitPoint", "Tracer", "modules_that_split", "pipe_split", "trace", "undisturbed"]


class SplitPoint(Enum):
    """Where a submodule named in ``split_spec`` is cut off: before its call, or after it."""

    BEGINNING = 1
    END = 2


_tracer: Tracer | None = None
_found: Callable[[], None] | None = None  # what pipe_split tells while it is looked for


def pipe_split() -> None:
    """In a forward: the next stage begins here. Does nothing outside of :func:`pycomm.pipeline.pipeline`.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         x = self.a(x)
        ...         pipe_split()
        ...         return self.b(x)
        >>> from pycomm.pipeline import pipeline
        >>> pipeline(Net(), (torch.ones(1, 2),)).num_stages
        2
    """
    if _tracer is not None:
        _tracer.create_proxy("call_function", pipe_split, (), {})
    elif _found is not None:
        _found()


def same_as_traced(value: Any, traced: Any, name: str) -> None:
    """A fixed argument's check.

    Raises:
        ValueError: it differs from what it was when the model was traced.
    """
    if value is not traced and (isinstance(value, Tensor) or value != traced):
        raise ValueError(
            f"argument {name!r} was {traced!r} when the model was traced, and its stages hold for that value "
            f"only; got {value!r}: call pipeline() again with it among mb_args or mb_kwargs"
        )


class _Symbol(fx.Proxy):
    """As fx's, but ``x += y`` stays in place: other names of x see it."""


def _in_place(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Symbol, f"__{_name}__", _in_place(_name))


def _context() -> tuple[Any, ...]:
    """What an operation is computed under, and a graph does not note."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Tracer(fx.Tracer):
    """Opens the root and the modules given; see the file's text.

    Args:
        bound: the root's arguments, by its signature's names.
        signature: of the root's forward.
        opened: modules whose forward is run with symbols.
        marks: modules before or after whose call the next stage begins.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        bound: inspect.BoundArguments,
        signature: inspect.Signature,
        opened: Iterable[nn.Module],
        marks: Mapping[nn.Module, SplitPoint],
    ) -> None:
        super().__init__()
        self._bound, self._signature = bound, signature
        self._opened, self._marks = set(opened), dict(marks)
        self.n_calls: dict[nn.Module, int] = {}
        self.constants: dict[str, Tensor] = {}
        self._context = _context()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The symbol of a node."""
        if _context() != self._context:
            raise RuntimeError(
                f"{node.name} ({node.target}) is under no_grad, enable_grad or autocast, which the graph "
                "would lose"
            )
        return _Symbol(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether it stays whole."""
        return m not in self._opened

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As fx's, with marks."""
        self.n_calls[m] = self.n_calls.get(m, 0) + 1
        where = self._marks.get(m)
        if where is SplitPoint.BEGINNING:
            pipe_split()
        output = super().call_module(m, forward, args, kwargs)
        if where is SplitPoint.END:
            pipe_split()
        return output

    def create_arg(self, a: Any) -> Any:
        """As fx's; a tensor that the forward makes of plain values becomes a constant, named by its place."""
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Symbols for what holds tensors, values and their checks for the rest."""
        for name, parameter in self._signature.parameters.items():
            value = self._bound.arguments.get(name, parameter.default)
            if parameter.kind is parameter.VAR_POSITIONAL:
                symbol: Any = self.create_proxy("placeholder", f"*{name}", (), {})
                self._bound.arguments[name] = tuple(symbol[i] for i in range(len(value or ())))
            elif parameter.kind is parameter.VAR_KEYWORD:
                symbol = self.create_proxy("placeholder", f"**{name}", (), {})
                self._bound.arguments[name] = {key: symbol[key] for key in value or {}}
            else:
                has_default = parameter.default is not parameter.empty
                default = (parameter.default,) if has_default else ()
                symbol = self.create_proxy("placeholder", name, default, {})
                self._bound.arguments[name] = value
                if _holds_tensor(value):
                    self._bound.arguments[name] = symbol
                else:
                    self.create_proxy("call_function", same_as_traced, (symbol, value, name), {})
        return lambda root: root_fn(root, *self._bound.args, **self._bound.kwargs), [self.root]


def _holds_tensor(value: Any) -> bool:
    try:
        return bool(leaves(value))
    except TypeError:
        return False


_MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros")


@contextlib.contextmanager
def _tracing(tracer: Tracer) -> Iterator[None]:
    """pipe_split marks, and functions that take sizes take symbols of sizes."""
    global _tracer
    made = {name: getattr(torch, name) for name in _MAKERS}

    def symbolic(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            fx.node.map_aggregate((args, kwargs), found.append)
            if any(isinstance(a, fx.Proxy) for a in found):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call

    _tracer = tracer
    try:
        for name, function in made.items():
            setattr(torch, name, symbolic(function))
        yield
    finally:
        _tracer = None
        for name, function in made.items():
            setattr(torch, name, function)


@contextlib.contextmanager
def _no_state(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The forwards of opened modules must not set attributes: the graph would not."""
    before = [(m, dict(m.__dict__)) for m in modules]
    changed = ""
    try:
        yield
    finally:
        for m, attributes in before:
            for name in {*attributes, *m.__dict__}:
                if name not in attributes or m.__dict__.get(name) is not attributes[name]:
                    changed = f"{type(m).__name__}.{name}"
            m.__dict__.clear()
            m.__dict__.update(attributes)
    if changed:
        raise RuntimeError(f"the forward sets {changed}, which the graph would not")


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Buffers, gradients, modes and torch's random numbers are afterwards as they were."""
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    gradients = [(p, p.grad) for p in module.parameters()]
    modes = [(m, m.training) for m in module.modules()]
    for p, _ in gradients:
        p.grad = None
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.device.type != "meta":
                    buffer.copy_(before)
        for p, gradient in gradients:
            p.grad = gradient
        for m, mode in modes:
            m.training = mode


def modules_that_split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The modules whose forward calls :func:`pipe_split`, and those around them; found by running it once."""
    global _found
    stack: list[nn.Module] = []
    found: dict[nn.Module, None] = {}

    def enter(m: nn.Module, _: Any) -> None:
        stack.append(m)

    def leave(m: nn.Module, _: Any, __: Any) -> None:
        stack.pop()

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    _found = lambda: found.update(dict.fromkeys(stack))  # noqa: E731
    try:
        with undisturbed(module), torch.no_grad():
            module(*args, **kwargs)
    finally:
        _found = None
        for handle in handles:
            handle.remove()
    return list(found)


def _trace_once(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opened: Iterable[nn.Module],
    marks: Mapping[nn.Module, SplitPoint],
) -> tuple[fx.Graph, Tracer]:
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"pipeline(): mb_args and mb_kwargs do not fit {type(module).__name__}.forward{signature}: "
            f"{error}"
        ) from None
    all_opened = [module, *opened]
    tracer = Tracer(bound, signature, all_opened, marks)
    try:
        with _tracing(tracer), _no_state(all_opened):
            return tracer.trace(module), tracer
    except Exception as error:
        raise RuntimeError(
            f"pipeline(): cannot trace {type(module).__name__}: {_place(error)}"
            f"{type(error).__name__}: {error}\n"
            "Only the modules that a cut lies inside are traced: move this code into a module of its own, or "
            "cut elsewhere; or give the model as a list of pycomm.pipeline.LayerSpec, which needs no tracing"
        ) from error


def _place(error: BaseException) -> str:
    """The innermost line of the user's."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if not f.filename.startswith("<eval_with_key>")]
    if not frames:
        return ""
    return f"in {frames[-1].filename}:{frames[-1].lineno}, {frames[-1].name}: {frames[-1].line!r}: "


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opened: Iterable[nn.Module],
    marks: Mapping[nn.Module, SplitPoint],
) -> tuple[fx.Graph, Tracer]:
    """The graph of a module's forward.

    Args:
        module: to be traced; nothing of it changes.
        args, kwargs: of a microbatch; of these only which hold tensors, and the others' values, matter.
        opened: modules in it whose forward is traced as well.
        marks: modules before or after whose call the next stage begins.

    Raises:
        TypeError: the arguments do not fit.
        RuntimeError: a forward does what symbols cannot; the text says where, and what to do.
    """
    opened = list(opened)
    with undisturbed(module):
        module.train()
        graph, tracer = _trace_once(module, args, kwargs, opened, marks)
        module.eval()
        other, _ = _trace_once(module, args, kwargs, opened, marks)
    nodes, others = list(graph.nodes), list(other.nodes)
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        raise _differing(module)
    twin = dict(zip(nodes, others, strict=True))
    for node in nodes:
        merged = _Modes(graph, module, node, twin)
        node.args, node.kwargs = (
            merged.of(node.args, twin[node].args),
            merged.of(node.kwargs, twin[node].kwargs),
        )
    return graph, tracer


def _differing(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"pipeline(): {type(module).__name__} does other things in training than in evaluation, beyond "
        "passing self.training to functions; move what differs into a module of its own, which stays whole"
    )


class _Modes:
    """Arguments of a node that are True in training and False in evaluation become ``self.training``."""

    def __init__(
        self, graph: fx.Graph, module: nn.Module, node: fx.Node, twin: dict[fx.Node, fx.Node]
    ) -> None:
        self._graph, self._module, self._node, self._twin = graph, module, node, twin

    def of(self, now: Any, then: Any) -> Any:
        """What stands for both."""
        if isinstance(now, fx.Node):
            if self._twin[now] is not then:
                raise _differing(self._module)
            return now
        if now is True and then is False:
            with self._graph.inserting_before(self._node):
                return self._graph.create_node("get_attr", "training")
        if type(now) is not type(then):
            raise _differing(self._module)
        if isinstance(now, slice):
            return slice(*(self.of(getattr(now, k), getattr(then, k)) for k in ("start", "stop", "step")))
        if isinstance(now, (tuple, list)) and len(now) == len(then):
            made = [self.of(a, b) for a, b in zip(now, then, strict=True)]
            return type(now)(*made) if hasattr(now, "_fields") else type(now)(made)
        if isinstance(now, dict) and list(now) == list(then):
            return {key: self.of(value, then[key]) for key, value in now.items()}
        if now is not then and now != then and not (now != now and then != then):  # a nan is a nan
            raise _differing(self._module)
        return now
