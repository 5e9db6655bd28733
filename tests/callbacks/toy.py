"""Makes a federation that is small enough for a round of a few milliseconds."""

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
    """Is a user's own module without classes and accuracy."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("mse", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    test_step = validation_step

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def data(classes: bool = True, **settings: Any) -> FederatedDataModule:
    """Return four clients with 100 samples of three classes, or of real numbers."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(150, 4, generator=draw)
    scores = x @ torch.randn(4, 3, generator=draw)
    if classes:
        y = scores.argmax(1)
        class_names = NAMES
        partition = DirichletPartition(alpha=0.5, min_samples=2)
    else:
        y = scores[:, :1]
        class_names = None
        partition = None
    source = TensorSource(train=(x[:100], y[:100]), test=(x[100:], y[100:]))
    source.class_names = class_names
    return FederatedDataModule(source, num_clients=4, partition=partition, **settings)


def loop(**settings: Any) -> FederatedLoop:
    return FederatedLoop(client=FedAvg(optimizer=partial(SGD, lr=0.1)), seed=0, **folded(settings))


def trainer(callbacks: list[pl.Callback], folder: Path | None = None, rounds: int = 3, **settings: Any) -> pl.Trainer:
    """Return a Trainer that logs to `folder` and keeps its last checkpoint there. None means neither."""
    has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    if folder is not None:
        callbacks = [*callbacks, ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_epochs=1)]
        settings.setdefault("logger", RoundCSVLogger(folder))
    settings = {"logger": False, "max_epochs": rounds, "enable_checkpointing": folder is not None} | settings
    return pl.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=has_bar,
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
