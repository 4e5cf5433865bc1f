"""Lightning Fabric on the backend "pycomm": python fabric_train.py

Fabric starts the second rank itself; under torchrun it takes the ranks that are there.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import pycomm  # noqa: F401 (it registers the backend)
from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model, options, report


def main() -> None:
    args = options(__doc__, ranks=2)
    strategy = DDPStrategy(process_group_backend=args.backend)
    fabric = Fabric(accelerator="cpu", devices=args.ranks, strategy=strategy)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH // fabric.world_size))

    mean = torch.zeros(())
    for _ in range(EPOCHS):
        for step, (points, classes) in enumerate(loader):
            # Two micro-batches a step: the first one's gradients stay on their rank.
            for half, is_last in zip(range(2), (False, True), strict=True):
                with fabric.no_backward_sync(model, enabled=not is_last):
                    loss = cross_entropy(model(points[half::2]), classes[half::2]) / 2
                    fabric.backward(loss)
                mean = loss.detach() if half == 0 else mean + loss.detach()
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(mean, reduce_op="mean")
            if step == 0:
                fabric.print(f"loss {mean:.6f}")
    fabric.barrier()
    counts = fabric.all_gather(torch.tensor(len(loader)))  # steps of each rank
    assert counts.sum().item() == fabric.world_size * len(loader)
    if fabric.is_global_zero:
        report(args.out, model.module.named_parameters(), mean.item())


if __name__ == "__main__":
    main()
