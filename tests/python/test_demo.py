"""The demo: its parts against what is known of them, its check against wrong runs, and all of it once."""

import dataclasses
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from pycomm.demo import check
from pycomm.demo.data import load_text, rows_of_step
from pycomm.demo.model import GPT, ModelConfig
from pycomm.demo.report import curves_as_text
from pycomm.demo.train import RankResult, TrainConfig, train
from ranks import run_ranks

SMALL = TrainConfig(
    n_steps=20,
    n_rows=8,
    learning_rate=5e-3,
    n_warmup=5,
    model=ModelConfig(n_layers=1, n_heads=2, n_channels=32, n_positions=32),
)
ROOT = Path(__file__).resolve().parents[2]


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(SMALL.model)
    seen = {}
    model.head.register_forward_hook(lambda module, inputs, logits: seen.update(logits=logits))
    text = torch.randint(256, (1, 33))
    model(text)
    before = seen["logits"]
    text[0, 20] = (text[0, 20] + 1) % 256
    model(text)
    assert torch.equal(before[0, :20], seen["logits"][0, :20])
    assert not torch.allclose(before[0, 20], seen["logits"][0, 20])


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    loss = GPT(ModelConfig())(torch.randint(256, (8, 129))).item()
    assert loss == pytest.approx(math.log(256), abs=0.15)


def test_the_text_is_the_standard_library():
    text = load_text(1 << 20)
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")).read_bytes()
    assert text.dtype == torch.uint8
    assert len(text) == 1 << 20
    assert bytes(text[: len(first)].tolist()) == first


def test_ranks_share_the_rows_of_a_step():
    text = load_text(1 << 16)
    whole = rows_of_step(text, 3, 1, 12, 40)
    assert whole.shape == (12, 40)
    assert torch.equal(whole, torch.cat([rows_of_step(text, 3, 1, 12, 40, rank, 3) for rank in range(3)]))
    assert torch.equal(whole, rows_of_step(text, 3, 1, 12, 40))
    assert not torch.equal(whole, rows_of_step(text, 4, 1, 12, 40))
    assert bytes(whole[5].tolist()) in bytes(text.tolist())
    with pytest.raises(ValueError, match="12 rows cannot be shared equally by 5 ranks"):
        rows_of_step(text, 3, 1, 12, 40, 0, 5)


def test_curves_in_characters():
    assert curves_as_text({"o": [2.0, 1.0], "x": [2.0, 2.0]}, width=2, height=2) == (
        " 2.00 ┤*x\n 1.00 ┤ o\n      └──"
    )


# ---- the check, on runs that are as they should be and on runs that are not


def trained_by_ranks(rank: int, size: int, sabotage: str) -> RankResult:
    import pycomm

    class Unaveraged(nn.Module):  # a DDP that forgets the gradients, and even the weights
        exposed_s = 0.0

        def __init__(self, module: nn.Module, communicator: object) -> None:
            super().__init__()
            self.module = module
            if sabotage == "different weights":
                return
            if sabotage != "no averaging":
                raise ValueError(sabotage)
            for parameter in module.parameters():
                communicator.broadcast(parameter.detach())

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.module(rows)

    class Summing(pycomm.DistributedDataParallel):  # the sum over the ranks in place of the average
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return size * super().forward(rows)

    if sabotage == "sum":
        pycomm.DistributedDataParallel = Summing
    elif sabotage == "bucket left out":
        pycomm.DistributedDataParallel = lambda module, communicator: leave_out(
            module, communicator, pycomm.ddp
        )
    elif sabotage:
        pycomm.DistributedDataParallel = Unaveraged
    return train("pycomm", SMALL, lambda step, loss: None)


def leave_out(module: nn.Module, communicator: object, ddp: object) -> nn.Module:
    """A DDP that does not know the parameters of the first block's mlp."""
    module._ddp_params_and_buffers_to_ignore = [n for n, _ in module.named_parameters() if ".up." in n]
    return ddp.DistributedDataParallel(module, communicator=communicator)


def one_process() -> check.Summary:
    return check.summarise([train("one", SMALL, lambda step, loss: None)])


def test_two_ranks_train_like_one_process():
    ranks = check.summarise(run_ranks(2, trained_by_ranks, ""))
    assert check.faults(ranks, one_process()) == []
    assert ranks.n_ranks == 2
    assert 0 < ranks.exposed_share < 1


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        ("no averaging", "the ranks do not end with the same bits in every weight"),
        ("different weights", "losses differ by"),
        ("sum", "gradient norms differ by"),
        ("bucket left out", "the ranks do not end with the same bits in every weight"),
    ],
)
def test_a_wrong_training_is_found(sabotage, words):
    ranks = check.summarise(run_ranks(2, trained_by_ranks, sabotage))
    assert words in " ".join(check.faults(ranks, one_process()))


def made_up(way: str, losses: list[float]) -> check.Summary:
    n = len(losses)
    return check.summarise([RankResult(way, 0, 1, 1, losses, [1.0] * n, [0.1] * n, [0.0] * n, "bits")])


def test_what_is_within_tolerance_and_what_is_not():
    falling = [5.0 - 0.3 * step for step in range(10)]
    reference = made_up("one", falling)
    assert check.faults(made_up("pycomm", falling), reference) == []
    assert check.faults(made_up("pycomm", [x + 0.9e-4 for x in falling]), reference) == []
    (fault,) = check.faults(made_up("pycomm", [*falling[:5], falling[5] + 1.1e-4, *falling[6:]]), reference)
    assert fault == "pycomm: losses differ by 1.10e-04 nats per byte, more than 1e-04"
    assert "losses differ by nan" in check.faults(made_up("pycomm", [math.nan, *falling[1:]]), reference)[0]
    (fault,) = check.faults(made_up("pycomm", [5.0] * 10), made_up("one", [5.0] * 10))
    assert fault == "pycomm: the loss fell by 0.00 nats per byte only, less than 1.0"
    apart = dataclasses.replace(reference, way="pycomm", is_replicated=False)
    assert check.faults(apart, reference) == [
        "pycomm: the ranks do not end with the same bits in every weight"
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_demo(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pycomm.demo",
        "--steps",
        "8",
        "--no-bench",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: two ranks with pycomm train like one process" in done.stdout
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "gloo, 2 ranks" in (tmp_path / "out" / "report.txt").read_text()


@pytest.mark.timeout(100)
def test_a_failing_rank_fails_the_demo(tmp_path):
    command = [sys.executable, "-m", "pycomm.demo", "--steps", "1", "--no-bench", "--out", str(tmp_path)]
    environment = {**os.environ, "PYCOMM_ALGORITHM": "all_reduce=nonsense"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    assert "training 'pycomm' ended with status 1" in done.stdout
    assert "nonsense" in done.stdout
