"""Data parallelism: every rank trains the same module on its share of the batch, gradients are averaged.

In reading order: this file (the module wrapper), ddp_agree (same start on all ranks), ddp_reducer (one
backward), ddp_wire (one bucket), csrc/bucket (which gradients form a bucket).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from pycomm.communicator import Communicator
from pycomm.ddp_agree import broadcast_tensors, check_agreement, describe
from pycomm.ddp_reducer import Overlap, Reducer
from pycomm.ddp_wire import WIRE_DTYPES, Compression
from pycomm.initialize import init

__all__ = ["DistributedDataParallel"]

FIRST_BUCKET_BYTES = 1 << 20
OVERLAP_VARIABLE = "PYCOMM_DDP_OVERLAP"
_WHO = "DistributedDataParallel"


class DistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the ranks while backward computes them.

    After each backward every rank's ``p.grad`` holds the average over the ranks, with the same bits, as if
    one process had computed the mean of the ranks' losses. Names and behaviour are those of
    ``torch.nn.parallel.DistributedDataParallel``; arguments of it that are missing here are not supported.

    At the start all ranks must have the same parameters and buffers (names, order, shapes, dtypes, memory
    layout); rank 0's values are given to all. With one rank nothing is done and no hook is set.

    Buckets are reduced in the same order on every rank, gradients where they lie (``p.grad`` stays the tensor
    that autograd made, of any layout). Gradients of any floating or complex dtype are taken; sparse ones are
    refused.

    Args:
        module: on the CPU; at least one parameter requires a gradient. A parameter may be shared. Names in
            ``module._ddp_params_and_buffers_to_ignore`` are left alone, as torch does.
        communicator: its ranks are the replicas; None: ``pycomm.init()``. Not closed by this class.
        bucket_cap_mb: MiB of gradients in one reduction (the first has at most 1 MiB, so that it starts
            early; a larger parameter is a bucket of its own).
        find_unused_parameters: a parameter without a gradient counts as zeros where another rank has one, and
            keeps its ``grad`` (None, or what was there) where no rank has. False: it is an error on every
            rank in that same backward. Nothing is searched in the graph, so it costs nothing where all have
            one.
        broadcast_buffers: gives rank 0's buffers to all ranks at each forward that follows a synchronised
            one.
        compression: "fp16" or "bf16": float32 gradients travel with 16 bits (other dtypes as they are). The
            error is at most 2^-10 ("fp16") or 2^-7 ("bf16") of the mean magnitude over the ranks, plus for
            "fp16" 2^-33 of the bucket's largest; finite gradients do not overflow in "fp16", infinities and
            NaN arrive on all ranks (pycomm/ddp_wire.py has the exact bound).
        overlap: "async": buckets are reduced by a thread while backward goes on; "inline": in backward's
            thread as soon as they are complete; "end": when backward is over. None: PYCOMM_DDP_OVERLAP, else
            "async" where each local rank has a second core, else "end". The result is the same.

    Attributes:
        module: the wrapped module; ``state_dict`` keys begin with ``module.``, as torch's.
        require_backward_grad_sync: False within ``no_sync``.

    Raises:
        ValueError: an argument is out of range, no parameter requires a gradient, or the ranks' modules or
            arguments differ (the first difference is named on every rank).
        TypeError: ``module`` or ``communicator`` is something else.
        RuntimeError: from ``backward``, on every rank: parameters without a gradient, or with one that cannot
            be reduced, by name and rank; or another rank's backward ended in an exception.

    Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    VLDB 2020.

    Example:
        >>> import pycomm, torch
        >>> comm = pycomm.init()
        >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        communicator: Communicator | None = None,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        compression: Compression | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"{_WHO}: module must be a torch.nn.Module, got {type(module).__name__}")
        if communicator is not None and not isinstance(communicator, Communicator):
            raise TypeError(
                f"{_WHO}: communicator must be a Communicator or None, got {type(communicator).__name__}"
            )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self.communicator = init() if communicator is None else communicator
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = {name: p for name, p in module.named_parameters() if name not in self._ignored}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = [(name, p) for name, p in named.items() if not p.requires_grad]
        self._must_sync_buffers = True
        self._reducer: Reducer | None = None
        chosen = overlap or os.environ.get(OVERLAP_VARIABLE) or _default_overlap(self.communicator.size)
        fault = _first_fault(named, bucket_cap_mb, compression, chosen)
        settings = (
            f"arguments bucket_cap_mb={bucket_cap_mb}, find_unused_parameters={find_unused_parameters}, "
            f"broadcast_buffers={broadcast_buffers}, compression={compression}"
        )
        if self.communicator.size > 1:
            lines = [f"the error that {fault}"] if fault else [settings]
            if not fault:
                lines += [
                    describe("parameter" if p.requires_grad else "frozen parameter", n, p)
                    for n, p in named.items()
                ]
                lines += [describe("buffer", name, buffer) for name, buffer in self._named_buffers()]
            check_agreement(self.communicator, _WHO, lines)
        if fault:
            raise ValueError(f"{_WHO}: {fault}")
        if self.communicator.size == 1:
            return
        broadcast_tensors(
            self.communicator, [*named.values(), *(buffer for _, buffer in self._named_buffers())]
        )
        cap = int(bucket_cap_mb * (1 << 20))
        self._reducer = Reducer(
            self.communicator,
            list(trained),
            list(trained.values()),
            first_cap=min(FIRST_BUCKET_BYTES, cap),
            cap=cap,
            find_unused=find_unused_parameters,
            compression=compression,
            overlap=cast(Overlap, chosen),
        )

    @property
    def exposed_s(self) -> float:
        """Seconds that backward has spent in communication so far: launching, reducing and waiting."""
        return self._reducer.exposed_s if self._reducer is not None else 0.0

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters' names in each bucket, in the order of reduction; empty with one rank."""
        return self._reducer.buckets if self._reducer is not None else []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module. Backward will average its gradients unless this runs within :meth:`no_sync`.

        Raises:
            RuntimeError: this rank's last backward ended in an exception, and the others wait in theirs.
            ValueError: a parameter that was frozen when it was wrapped requires a gradient now.
        """
        if self._reducer is not None:
            self._before_forward(self._reducer)
        return self.module(*inputs, **kwargs)

    def _before_forward(self, reducer: Reducer) -> None:
        will_reduce = self.require_backward_grad_sync and torch.is_grad_enabled()
        if torch.is_grad_enabled():
            for name, parameter in self._frozen:
                if parameter.requires_grad:
                    raise ValueError(
                        f"{_WHO}: parameter '{name}' was frozen when the module was wrapped and requires a "
                        "gradient now, which would not be averaged; wrap the module again"
                    )
            reducer.close_broken_backward()
            reducer.armed = self.require_backward_grad_sync
        if self.broadcast_buffers and self._must_sync_buffers:
            buffers = [buffer for _, buffer in self._named_buffers()]
            broadcast_tensors(self.communicator, buffers)
        self._must_sync_buffers = will_reduce

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (item for item in self.module.named_buffers() if item[0] not in self._ignored)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates gradients locally; the next one outside averages their sum.

        As with torch, the forward must be inside as well: it decides about its backward.

        Example:
            >>> with model.no_sync():
            ...     model(torch.ones(4, 8)).sum().backward()
            >>> model(torch.ones(4, 8)).sum().backward()  # averages the sum of both
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedDataParallel cannot be copied or pickled: its hooks and communicator belong to this "
            "process. Copy .module and wrap it again, or save its state_dict()"
        )


def _first_fault(
    named: dict[str, nn.Parameter], bucket_cap_mb: float, compression: str | None, overlap: str
) -> str | None:
    """What is wrong with this rank's arguments, or None."""
    if compression is not None and compression not in WIRE_DTYPES:
        return f"compression must be one of {', '.join(map(repr, WIRE_DTYPES))} or None, got {compression!r}"
    if not 0 < bucket_cap_mb < math.inf:
        return f"bucket_cap_mb must be above 0 and finite, got {bucket_cap_mb!r}"
    if overlap not in get_args(Overlap):
        known = ", ".join(map(repr, get_args(Overlap)))
        return f"overlap (or {OVERLAP_VARIABLE}) must be one of {known}, got {overlap!r}"
    if not any(parameter.requires_grad for parameter in named.values()):
        return "no parameter of the module requires a gradient, so there is nothing to average"
    for name, parameter in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return f"parameter '{name}' has no shape yet; run a forward of the module before wrapping it"
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            return (
                f"parameter '{name}' is {parameter.layout} on {parameter.device}; this version takes strided "
                "tensors on the CPU"
            )
    return None


def _default_overlap(n_local_ranks: int) -> Overlap:
    """A thread that reduces beside backward pays only where it has a core to itself."""
    return "async" if _usable_cores() >= 2 * n_local_ranks else "end"


def _usable_cores() -> float:
    """The cores that this process may use: its affinity, or the control group's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores
