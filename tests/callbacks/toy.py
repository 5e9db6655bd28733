"""A federation small enough for a round of a few milliseconds."""

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import DirichletPartition, TensorSource
from fl_lightning.methods import FedAvg
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.toys import folded

NAMES = ("cat, tame", "dog/wolf", "owl")
CLASSES = ["cat, tame", "dog-wolf", "owl"]


class Regression(pl.LightningModule):
    """A user's own module: no classes, no accuracy."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("mse", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def data(classes: bool = True, **settings: Any) -> FederatedDataModule:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(150, 4, generator=draw)
    y = x @ torch.randn(4, 3, generator=draw)
    y = y.argmax(1) if classes else y[:, :1]
    source = TensorSource((x[:100], y[:100]), (x[100:], y[100:]))
    source.class_names = NAMES if classes else None
    partition = DirichletPartition(alpha=0.5, min_samples=2) if classes else None
    return FederatedDataModule(source, num_clients=4, partition=partition, **settings)


def loop(**settings: Any) -> FederatedLoop:
    return FederatedLoop(client=FedAvg(optimizer=partial(SGD, lr=0.1)), seed=0, **folded(settings))


def trainer(callbacks: list[pl.Callback], folder: Path | None = None, rounds: int = 3, **settings: Any) -> pl.Trainer:
    """A quiet Trainer that logs to `folder` and keeps its last checkpoint there."""
    bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    if folder is not None:
        callbacks = [*callbacks, ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_epochs=1)]
        settings.setdefault("logger", RoundCSVLogger(folder))
    settings = {"logger": False, "max_epochs": rounds, "enable_checkpointing": folder is not None} | settings
    return pl.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=bar,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )


class At(pl.Callback):
    """Does something at the end of a round."""

    def __init__(self, round_idx, do):
        self.round_idx = round_idx
        self.do = do

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.round_idx:
            self.do(trainer)
