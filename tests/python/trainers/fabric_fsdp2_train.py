"""FSDP2 under Lightning Fabric on the backend "pycomm": python fabric_fsdp2_train.py

Each rank keeps its share of every parameter, gathers a layer when it is its turn, and reduce-scatters
its gradients.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import pycomm  # noqa: F401 (it registers the backend)
from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model, options, report


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Fabric calls it with the mesh that it has made."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    args = options(__doc__, ranks=2)
    strategy = ModelParallelStrategy(
        shard, data_parallel_size=args.ranks, tensor_parallel_size=1, process_group_backend=args.backend
    )
    fabric = Fabric(accelerator="cpu", devices=args.ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH // fabric.world_size))

    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for points, classes in loader:
            loss = cross_entropy(model(points), classes)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    whole = []
    for name, p in model.module.named_parameters():
        assert isinstance(p, DTensor)
        whole.append((name, p.full_tensor()))  # every rank takes part
    if fabric.is_global_zero:
        report(args.out, whole, mean.item())


if __name__ == "__main__":
    main()
