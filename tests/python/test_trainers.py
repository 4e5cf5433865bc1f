"""Trainers from outside on the backend "pycomm": each example of tests/python/trainers, as a user starts it.

Each trains with two ranks on pycomm and on gloo. The loss and all parameters must be those of a loop of
torch's own in one process, up to the rounding of float64, and pycomm's those of gloo bit for bit (of two
ranks, a sum has one order only).

Run by ``make test-trainers``, which installs the trainers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent / "trainers"))
from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model

pytestmark = [pytest.mark.slow, pytest.mark.trainers, pytest.mark.timeout(400)]
TRAINERS = Path(__file__).parent / "trainers"
ROOT = TRAINERS.parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

EXAMPLES = {
    "accelerate_train.py": TORCHRUN,
    "fabric_train.py": [sys.executable],
    "fabric_fsdp2_train.py": [sys.executable],
    "lightning_train.py": [sys.executable],
    "ray_train.py": [sys.executable],
}


@pytest.fixture(scope="module")
def expected():
    """The loss of the last step, and the parameters, of one process without any trainer."""
    model, data = make_model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for points, classes in torch.utils.data.DataLoader(data, batch_size=BATCH):
            loss = cross_entropy(model(points), classes)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return loss.item(), {name: p.detach() for name, p in model.named_parameters()}


def train(example: str, backend: str, folder: Path) -> dict:
    out = folder / f"{backend}.pt"
    command = [*EXAMPLES[example], str(TRAINERS / example), "--backend", backend, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYCOMM_TUNE": "off"}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    result = torch.load(out)
    assert (result["backend"], result["ranks"]) == (backend, 2)
    return result


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_ranks_train_as_one_process_does(example, expected, tmp_path):
    loss, parameters = expected
    ours, gloos = train(example, "pycomm", tmp_path), train(example, "gloo", tmp_path)
    for result in (ours, gloos):
        assert result["loss"] == pytest.approx(loss, rel=1e-10)
        assert result["parameters"].keys() == parameters.keys()
        for name, p in parameters.items():
            torch.testing.assert_close(result["parameters"][name], p, rtol=1e-9, atol=1e-11)
    assert ours["loss"] == gloos["loss"]
    assert all(torch.equal(ours["parameters"][name], gloos["parameters"][name]) for name in parameters)
