"""Every schedule x every model, run by 2, 3 and 4 ranks: losses, outputs, every gradient as in one process.

A run is an update of two accumulated steps, of batches of different size and shape, with an evaluation of
another size in between, and an update of one step more: once with fewer microbatches than stages, once with
enough for every schedule's steady phase (2 p, of unequal sizes).
"""

import copy
import functools

import pytest
import torch
from pipeline_models import MODELS, in_one_process

from pycomm.pipeline import PipelineStage, get_schedule_class
from pycomm.pipeline.schedule.catalog import CATALOG, build
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
ATOL = 1e-11


def n_samples(size: int, step: int) -> int:
    """At least 2 p, and not a multiple of it in most steps."""
    return 2 * size + (1, 3, 0)[step]


UPDATES = ((0, 1), (2,))  #: the steps of each update


@functools.cache
def reference(kind: str, n_stages: int, size: int):
    """(loss, output) of each step; every stage's gradients after each update; the evaluation's output."""
    model = MODELS[kind]
    stages = model.stages(n_stages)
    steps, gradients = [], []
    evaluation = None
    for update in UPDATES:
        for step in update:
            args, target = model.batch(n_samples(size, step), step)
            output = in_one_process(stages, args)
            loss = model.loss_fn(output, target)
            loss.backward()
            steps.append((loss.detach(), detached(output)))
            if step == 0:
                with torch.no_grad():
                    evaluation = in_one_process(stages, model.batch(2 * size + 5, 7)[0])
        gradients.append([[gradient(p) for p in stage.parameters()] for stage in stages])
        with torch.no_grad():
            for p in stages.parameters():
                p -= 0.1 * p.grad
        stages.zero_grad()
    return steps, gradients, evaluation


def gradient(p):
    return None if p.grad is None else p.grad.clone()


def detached(value):
    return {k: v.detach() for k, v in value.items()} if isinstance(value, dict) else value.detach()


def same(found, want, what) -> None:
    torch.testing.assert_close(found, want, atol=ATOL, rtol=0, msg=lambda text: f"{what}: {text}")


def one_case(rank: int, size: int, kind: str, name: str, v: int, m: int) -> None:
    model, n_stages = MODELS[kind], size * v
    what = f"{kind}, {name}, p = {size}, v = {v}, m = {m}"
    steps, gradients, evaluation = reference(kind, n_stages, size)
    stages = copy.deepcopy(model.stages(n_stages))
    held = build(name, size, m, v).stages_of(rank)
    parts = [copy.deepcopy(stages[s]) for s in held]  # one by one: a tied weight becomes several objects
    schedule = get_schedule_class(name)(
        [PipelineStage(part, s, n_stages) for part, s in zip(parts, held, strict=True)],
        m,
        loss_fn=model.loss_fn,
        count=model.count,
        skips=model.skips(n_stages),
        tied=model.tied(n_stages),
        loss_on_all_ranks=True,
    )
    for update, its_steps in enumerate(UPDATES):
        for step in its_steps:
            args, target = model.batch(n_samples(size, step), step)
            output = schedule.step(*args, target=target)
            same(schedule.loss, steps[step][0], what)
            if n_stages - 1 in held:
                same(output, steps[step][1], what)
            else:
                assert output is None
            if step == 0:
                found = schedule.eval(*model.batch(2 * size + 5, 7)[0])
                same(found, evaluation if n_stages - 1 in held else None, what)
        for s, part in zip(held, parts, strict=True):
            for (key, p), want in zip(part.named_parameters(), gradients[update][s], strict=True):
                assert (p.grad is None) == (want is None), (what, s, key)
                if want is not None:
                    same(p.grad, want, f"{what}: gradient of {key} of stage {s} after update {update}")
            with torch.no_grad():
                for p in part.parameters():
                    p -= 0.1 * p.grad
            part.zero_grad()


def cases(size: int):
    for kind in MODELS:
        for name, entry in CATALOG.items():
            v = entry.stages_per_rank or 2
            for m in (1 if size * v == 2 else 2, 2 * size):
                yield kind, name, v, m
    yield "gpt", "Interleaved1F1B", 3, 4
    yield "gpt", "InterleavedZeroBubble", 1, 3


def all_cases(rank: int, size: int) -> int:
    n = 0
    for kind, name, v, m in cases(size):
        one_case(rank, size, kind, name, v, m)
        n += 1
    return n


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_schedule_and_model_as_in_one_process(size):
    n = run_ranks(size, all_cases, timeout=250)
    assert n == [len(list(cases(size)))] * size and n[0] == 2 * 3 * len(CATALOG) + 2
