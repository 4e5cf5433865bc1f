"""One stage of a pipeline: its module, and what it keeps of each microbatch from forward to backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pycomm.pipeline.backward import HalfDone, backward_input, backward_weight
from pycomm.pipeline.checkpoint import Checkpointing, Frame
from pycomm.pipeline.messages import Spec, leaves, replace_leaves
from pycomm.pipeline.skips import Skips, serving

__all__ = ["PipelineStage"]


@dataclass
class _Kept:
    """Of one microbatch, from its forward to the end of its backward."""

    inputs: list[Tensor]  # those that require a gradient
    outputs: list[Tensor]  # likewise
    has_loss: bool  # it is the only output
    frame: Frame | None = None  # computes the whole forward again
    half: HalfDone | None = None
    batch: list[Tensor] = field(default_factory=list)  # of the user's arguments those that require one
    batch_leaves: list[Tensor] = field(default_factory=list)  # and what the module was given in their place


class PipelineStage:
    """A part of a model on this rank.

    Args:
        submodule: computes the stage; its positional arguments are what the stage before returned (a tuple as
            several arguments), the first stage's are those of ``schedule.step``. It may take and return
            tensors of any shapes, which may change from one microbatch to the next, None, plain values, and
            tuples, lists and dicts of these.
        stage_index: in [0, num_stages).
        num_stages: of the whole pipeline.
        device: where the submodule is; ``torch.device("cpu")``.
        input_args, output_args: examples of a microbatch's inputs and outputs; not needed, since shapes
            travel with the messages. Where given, what comes and goes must have their dtypes and shapes,
            but for dimension 0 (microbatches may be uneven).
        group: the ranks of the pipeline: a Communicator, a torch process group, a DeviceMesh with one
            dimension or one that is called "pp", or None: the pipeline-parallel ranks where there are some
            (``initialize_model_parallel``), else all.
        checkpoint: of which microbatches the activations are computed again in the backward and not kept:
            "always", "except_last" (as their backward follows at once under GPipe), "never"; None: "never",
            or "always" where one of the next two is given.
        checkpoint_modules: which modules of the stage: a regular expression found in their names, or a
            predicate of name and module; None: the whole stage, with the loss.
        checkpoint_policy: as torch.utils.checkpoint.create_selective_checkpoint_contexts takes it: which
            operations' results are kept all the same.
        names: for checkpoints, what the submodule is called in the whole model, such as ``"layers.3"``, or of
            its children each: ``{"0": "layers.3", "1": "norm"}``; None: its parameters have the whole's
            names.

    Raises:
        TypeError: the submodule is no module.
        ValueError: an index that is none, a device without engine, or a checkpoint that is none.

    Example:
        >>> stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
        >>> stage.is_first, stage.is_last
        (True, True)
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        input_args: Any = None,
        output_args: Any = None,
        group: Any = None,
        *,
        checkpoint: str | None = None,
        checkpoint_modules: str | Callable[[str, nn.Module], bool] | None = None,
        checkpoint_policy: Any = None,
        names: str | Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(submodule, nn.Module):
            raise TypeError(
                f"stage {stage_index}: submodule must be a torch.nn.Module, got {type(submodule).__name__}"
            )
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"stage_index must be in [0, num_stages), which is [0, {num_stages}), got {stage_index}"
            )
        if torch.device(device).type != "cpu":
            raise ValueError(f"stage {stage_index}: pycomm has no engine for device {device}; use cpu")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.input_specs, self.output_specs = told(input_args), told(output_args)
        self.n_microbatches: int | None = None  # of its schedule
        self._checkpointing = Checkpointing(
            submodule, checkpoint, checkpoint_modules, checkpoint_policy, f"stage {stage_index}"
        )
        self.names = names
        self.skips: dict[str, tuple[int, int]] = {}  # of a traced model: its schedule's, too
        self.tied: tuple[tuple[tuple[int, str], ...], ...] = ()
        self._kept: dict[int, _Kept] = {}

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the output."""
        return self.stage_index == self.num_stages - 1

    def forward(
        self,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        then: Callable[[Any], Tensor] | None,
        keep: bool,
        skips: Skips,
    ) -> tuple[Any, Any]:
        """Runs the module on one microbatch.

        Args:
            microbatch: its number.
            args: inputs; tensors that require a gradient must be leaves.
            kwargs: more of them, not from another stage.
            then: of the last stage: makes the loss of the output.
            keep: for the backward.
            skips: what the module may pop, and what it stashes.

        Returns:
            The output, and the loss (or None).
        """
        popped = leaves(skips.incoming)
        # Gradients of the user's own tensors are passed on by hand: a backward in halves reaches no further
        # than its stage, and what lies behind a batch is there for all of its microbatches.
        own: Any = (args if self.is_first else (), kwargs)
        batch = _requiring(own) if keep else []
        if batch:
            own = tree_map_only(Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, own)
            args, kwargs = own[0] if self.is_first else args, own[1]
        batch_leaves = _requiring(own) if batch else []

        def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output = self.submod(*args, **kwargs)
            return output, then(output) if then is not None else None

        frame = None
        with torch.set_grad_enabled(keep), serving(skips):
            if keep:
                n = self.n_microbatches
                is_last = n is not None and microbatch % n == n - 1
                (output, loss), frame = self._checkpointing.forward(call, args, kwargs, microbatch, is_last)
            else:
                output, loss = call(*args, **kwargs)
        if keep:
            inputs = [] if self.is_first else leaves(args)
            ends = [*([loss] if loss is not None else leaves(output)), *leaves(skips.outgoing)]
            inputs, ends = ([t for t in some if t.requires_grad] for some in ([*inputs, *popped], ends))
            has_loss = loss is not None and loss.requires_grad
            self._kept[microbatch] = _Kept(
                inputs, ends, has_loss, frame, batch=batch, batch_leaves=batch_leaves
            )
        return output, loss

    def recompute(self, microbatch: int) -> None:
        """Computes a microbatch's forward again, if its backward needs it, before its gradient is there."""
        kept = self._kept[microbatch]
        if kept.frame is not None and kept.outputs:
            kept.frame.recompute()
            kept.frame = None

    def backward(self, microbatch: int, gradients: list[Tensor | None], half: bool) -> list[Tensor | None]:
        """The backward of a microbatch, or its first half.

        Args:
            microbatch: its number.
            gradients: of the outputs that require one, then of what was stashed; None where there is none.
                The last stage's is that of the loss, and not given.
            half: leave the weights' gradients to :meth:`backward_weights`.

        Returns:
            The gradients of the inputs that require one.
        """
        kept = self._kept[microbatch]
        outputs, given = kept.outputs, gradients
        if kept.has_loss:
            given = [None]
        else:
            wanted = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None]
            outputs, given = [o for o, _ in wanted], [g for _, g in wanted]
        found: list[Tensor | None]
        if half:
            weights = [p for p in self.submod.parameters() if p.requires_grad]
            found, kept.half = backward_input(outputs, given, [*kept.inputs, *kept.batch_leaves], weights)
            kept.outputs = []
            _to_batch(kept, found[len(kept.inputs) :])
            return found[: len(kept.inputs)]
        if outputs:
            torch.autograd.backward(outputs, given)
        found = [t.grad for t in kept.inputs]
        _to_batch(kept, [t.grad for t in kept.batch_leaves])
        del self._kept[microbatch]
        return found

    def backward_weights(self, microbatch: int) -> None:
        """The second half."""
        kept = self._kept.pop(microbatch)
        if kept.half is not None:
            backward_weight(kept.half)

    def forget(self) -> None:
        """After a failure."""
        self._kept.clear()


def _requiring(value: Any) -> list[Tensor]:
    """The tensors that require a gradient, of a nest that may hold anything else, too."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]


def _to_batch(kept: _Kept, found: list[Tensor | None]) -> None:
    """The gradients of the user's tensors go on to what these were made of."""
    ready = [(t, g) for t, g in zip(kept.batch, found, strict=True) if g is not None]
    if ready:
        torch.autograd.backward([t for t, _ in ready], [g for _, g in ready], retain_graph=True)


def told(example: Any) -> list[Spec] | None:
    """What ``input_args`` or ``output_args`` say; None: they do not."""
    if example is None:
        return None
    values = list(example) if isinstance(example, (tuple, list)) else [example]
    return [Spec.of(tensor) for tensor in leaves(values)]


def as_leaves(value: Any) -> Any:
    """The nest with tensors that autograd begins with; each requires a gradient as it does in the nest."""
    return replace_leaves(value, lambda t: t.detach().requires_grad_(t.requires_grad))
