"""What a stage's parameters and buffers are called: without wrappers, and in the whole model.

*Plain* names leave out what wrappers put in: ``module.`` of data parallelism, ``_orig_mod.`` of
torch.compile, ``_checkpoint_wrapped_module.`` of torch's activation checkpointing. *Whole* names are those of
the model before it was cut (:class:`pycomm.pipeline.PipelineStage`: ``names``), and so the same for every
cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pycomm.pipeline.stage import PipelineStage

__all__ = ["plain_names", "plain_parameters", "whole_name"]

_INSIDE = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def _is_wrapper(module: nn.Module, inside: str) -> bool:
    if inside == "module":
        return isinstance(module, nn.parallel.DistributedDataParallel)
    return type(module).__name__ in ("OptimizedModule", "CheckpointWrapper")


def plain_names(module: nn.Module, names: list[str]) -> dict[str, str]:
    """For names of parameters or buffers of a module, those without wrappers.

    Example:
        >>> plain_names(nn.Sequential(nn.Linear(1, 1)), ["0.weight"])
        {'0.weight': '0.weight'}
    """
    found = {}
    for name in names:
        at, kept = module, []
        *path, last = name.split(".")
        for step in path:
            if not (step in _INSIDE and _is_wrapper(at, step)):
                kept.append(step)
            child = at._modules.get(step)
            assert child is not None, name
            at = child
        found[name] = ".".join([*kept, last])
    return found


def plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by their plain names; one that has several names by each."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {plain: named[name] for name, plain in plain_names(module, list(named)).items()}


def whole_name(stage: PipelineStage, plain: str) -> str:
    """What the whole model calls a stage's parameter or buffer.

    Example:
        >>> stage = PipelineStage(nn.Sequential(nn.Linear(1, 1)), 0, 1, names={"0": "layers.3"})
        >>> whole_name(stage, "0.weight")
        'layers.3.weight'
    """
    names = stage.names
    if names is None:
        return plain
    prefixes: Mapping[str, str] = {"": names} if isinstance(names, str) else names
    fitting = [p for p in prefixes if p in ("", plain) or plain.startswith(f"{p}.")]
    if not fitting:
        return plain
    prefix = max(fitting, key=len)
    rest = plain[len(prefix) :].removeprefix(".")
    return ".".join(part for part in (prefixes[prefix], rest) if part)
