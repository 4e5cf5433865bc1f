"""PyTorch Lightning's Trainer on the backend "pycomm": python lightning_train.py

The Trainer starts the second rank itself; under torchrun it takes the ranks that are there.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import pycomm  # noqa: F401 (it registers the backend)
from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model, options, report


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        points, classes = batch
        loss = cross_entropy(self.model(points), classes)
        self.log("loss", loss, sync_dist=True)  # the mean over the ranks
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        points, classes = batch
        right = (self.model(points).argmax(dim=1) == classes).double().mean()
        self.log("right", right, sync_dist=True)

    def train_dataloader(self) -> DataLoader[Any]:
        # Without a sampler of ours the Trainer would make one that shuffles.
        data, size = make_data(), self.trainer.world_size
        share = DistributedSampler(data, size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH // size, sampler=share)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_data(), batch_size=BATCH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


def main() -> None:
    args = options(__doc__, ranks=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=args.ranks,
            strategy=DDPStrategy(process_group_backend=args.backend),
            precision="64-true",
            max_epochs=EPOCHS,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            callbacks=[ModelCheckpoint(dirpath=folder, monitor="right", mode="max")],
        )
        model = Classifier()
        trainer.fit(model)
        if trainer.is_global_zero:
            report(args.out, model.model.named_parameters(), trainer.callback_metrics["loss"].item())
        trainer.strategy.barrier()  # the folder of rank 0 goes when all are done


if __name__ == "__main__":
    main()
