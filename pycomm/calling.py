"""One collective call, from Python's arguments to the core: checked, refused or made, staged, kept.

Only what every collective has in common is here; pycomm/collectives.py says what each of them takes, and
csrc/bind/request.cc compares the tensors with it.
"""

from __future__ import annotations

from typing import Any

from pycomm import _C, arguments, error_feedback, ops
from pycomm.error_feedback import ErrorFeedback
from pycomm.staging import Staged, Tensors, staged
from pycomm.work import Keeper, Work

# CallKind of csrc/engine/call.h.
_NAMES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
KINDS = {name: code for code, name in enumerate(_NAMES)}


class Caller(_C.FastCalls):
    """What makes collective calls on a core communicator; the fast ``all_reduce`` is its base's, in C."""

    def __init__(self, core: _C.Communicator) -> None:
        self._c = core
        self._bind_core(core)
        self._works = Keeper()
        self._refusing = arguments.Refusing(core)
        #: This process's number, in [0, size).
        self.rank: int = core.rank
        #: How many ranks there are.
        self.size: int = core.size

    def _call(
        self,
        name: str,
        inputs: Tensors | None,
        outputs: Tensors | None,
        async_op: bool,
        timeout: float | None,
        *,
        op: ops.Op = "sum",
        algorithm: str | None = None,
        deterministic: bool | None = None,
        coding: tuple[str | None, ErrorFeedback | None, Tensors] | None = None,
        **more: Any,
    ) -> Any:
        """Checks the arguments that collectives share, makes the call, and returns ``outputs`` or a Work.

        ``coding``: compression and error feedback, which may be None, and the whole vector.
        """
        residual = None
        try:
            code, scalar = ops.parse(op)
            limit = arguments.common(name, async_op, algorithm, deterministic, timeout)
            if coding is not None and (coding[0] is not None or coding[1] is not None):
                several_hosts = len(set(self._c.hosts)) > 1
                chosen, residual = error_feedback.options(name, *coding, self.size, several_hosts)
                more |= chosen
        except Exception as error:  # as self._refusing does, which costs a right call more
            self._c.refuse(str(error))
            raise
        options = {
            "op": code, "scalar": scalar, "algorithm": algorithm, "deterministic": deterministic,
            "timeout_s": limit, **more,
        }  # fmt: skip
        kind = KINDS[name]
        done = self._c.call(kind, inputs, outputs, options, async_op)
        held: Staged | None = None
        if done is NotImplemented:
            with self._refusing:  # also no memory for the copy
                held = staged(name, inputs, outputs)
            done = self._c.call(kind, held.inputs, held.outputs, options, async_op)
        if not async_op:
            if held is not None:
                held.write_back()
            return outputs
        return self._works.add(Work(done, (inputs, outputs, residual), outputs, held))
