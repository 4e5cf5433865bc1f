"""Ray Train on the backend "pycomm": python ray_train.py

Nothing but the name in ``TorchConfig``: torch finds an installed pycomm when it is imported in Ray's workers.
(Before torch 2.5, or when pycomm is only on the path, each worker has to import it before Ray makes the
process group: ``ray.init(runtime_env={"worker_process_setup_hook": a_function_that_imports_pycomm})``.)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model, options, report


def train(config: dict[str, Any]) -> None:
    """On each worker, in a process group that Ray has made."""
    ranks = ray.train.get_context().get_world_size()
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = ray.train.torch.prepare_data_loader(DataLoader(make_data(), batch_size=BATCH // ranks))
    for epoch in range(EPOCHS):
        for points, classes in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(points), classes)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        mean = loss.detach()
        if ranks > 1:
            torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.SUM)
            mean /= ranks
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "loss": mean.item()}, checkpoint=checkpoint)
    if rank == 0:
        plain = model.module if ranks > 1 else model  # without DistributedDataParallel
        report(config["out"], plain.named_parameters(), mean.item())


def main() -> None:
    args = options(__doc__, ranks=2)
    ray.init(num_cpus=args.ranks, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"out": args.out},
            scaling_config=ray.train.ScalingConfig(num_workers=args.ranks, resources_per_worker={"CPU": 1}),
            torch_config=ray.train.torch.TorchConfig(backend=args.backend),
            run_config=ray.train.RunConfig(storage_path=folder, name="small_model"),
        )
        result = trainer.fit()
        assert result.checkpoint is not None
        print(result.metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()
