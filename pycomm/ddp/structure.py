"""What a module's parameters are, and whether they are still the same.

A *structure* is a snapshot: the distinct parameters of a module in registration order with their names,
whether each is trained (requires a gradient), its dtype and device. Users freeze, add, replace, cast and
move parameters between two backwards; ``is_current`` sees all of these. It compares identities of what lies
in every submodule's dictionaries (about 0.1 µs for a parameter), because walking ``named_parameters`` would
cost ten times that in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import _C
from pycomm.ddp.agree import describe

__all__ = ["Structure", "is_refused"]

_SPARSE_LAYERS = (nn.Embedding, nn.EmbeddingBag)


class Structure:
    """The parameters of ``module`` now, without those whose names are ``ignored``.

    Args:
        module: looked at, not kept alive.
        ignored: names of parameters that nobody averages.
        delayed: parameters that are reduced together at the end of backward, also where ``module`` has them
            not; their names are those given.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], delayed: Sequence[tuple[str, nn.Parameter]] = ()
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if name not in ignored}
        found = {id(p) for p in named.values()}
        named.update((name, p) for name, p in delayed if id(p) not in found)
        self._everything = [(p, p.requires_grad, p.dtype, p.device) for p in named.values()]
        self._frozen = [item for item in self._everything if not item[1]]
        self._contents: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        for submodule in module.modules():
            for contents in (submodule._parameters, submodule._modules):
                if contents:
                    self._contents.append((contents, tuple(contents.values())))
                else:
                    self._contents.append((contents, ()))
        #: Names of the trained parameters, in registration order.
        self.names = [name for name, p in named.items() if p.requires_grad]
        #: The trained parameters themselves.
        self.parameters = [p for p in named.values() if p.requires_grad]
        #: All of them with their names, frozen ones included.
        self.named = named
        late = {id(p) for _, p in delayed}
        #: Whether each trained parameter is one of ``delayed``.
        self.is_delayed = [id(p) in late for p in self.parameters]
        sparse = {id(m.weight) for m in module.modules() if isinstance(m, _SPARSE_LAYERS) and m.sparse}
        #: Whether each trained parameter belongs to a layer that makes sparse gradients.
        self.is_sparse = [id(p) in sparse for p in self.parameters]

    def is_current(self, all_came: bool = False) -> bool:
        """False when a parameter was added, removed, replaced, frozen, unfrozen, cast or moved since then.

        Args:
            all_came: every trained parameter has just got a gradient of its dtype and device: only the others
                are asked.
        """
        for contents, values in self._contents:
            if len(contents) != len(values) or not all(map(is_, contents.values(), values)):
                return False
        asked = self._frozen if all_came else self._everything
        return all(
            p.requires_grad is trained and p.dtype is dtype and p.device == device
            for p, trained, dtype, device in asked
        )

    def lines(self) -> list[str]:
        """One line for each parameter: equal on two ranks whose structures are alike."""
        return [
            describe("parameter" if p.requires_grad else "frozen parameter", name, p)
            for name, p in self.named.items()
        ]


def is_refused(named: dict[str, nn.Parameter]) -> str | None:
    """Why the parameters cannot be averaged at all, by name; None when they can."""
    first = next(iter(named.values()), torch.empty(0))
    if first.is_cuda and (why := _C.cuda.why_not_built()) is not None:
        return f"the parameters are on {first.device}, and {why}"
    for name, parameter in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return f"parameter '{name}' has no shape yet; run a forward of the module before wrapping it"
        if parameter.device.type not in ("cpu", "cuda") or parameter.layout is not torch.strided:
            return (
                f"parameter '{name}' is {parameter.layout} on {parameter.device}; this version takes strided "
                "tensors on the CPU or on CUDA"
            )
        if parameter.device != first.device:
            return (
                f"parameter '{name}' is on {parameter.device}, others are on {first.device}; a module to be "
                "wrapped has all its parameters on one device"
            )
        if hasattr(parameter, "to_local"):
            return (
                f"parameter '{name}' is a DTensor; wrap the module before it is sharded, or name it in "
                "_ddp_params_and_buffers_to_ignore"
            )
    return None


def named_buffers(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The module's buffers, looked up anew (users reassign them), without those that are ignored."""
    return (item for item in module.named_buffers() if item[0] not in ignored)
