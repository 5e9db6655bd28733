"""Under `model.clock: run` the rounds of one client are one plain fit; under `round` each round is a fit by itself."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.engines.clock import COUNTS
from tests.toys import samples, trainer

ROUNDS = 3
EPOCHS = 2
SAMPLES = 19
BATCHES = 5
"""Batches of an epoch. Neither an accumulation nor a frequency below divides it."""

SCHEDULES = {
    "StepLR": lambda optimizer, module: schedules.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer, module: schedules.OneCycleLR(
        optimizer, 0.3, total_steps=int(module.trainer.estimated_stepping_batches)
    ),
    "CosineAnnealingLR": lambda optimizer, module: schedules.CosineAnnealingLR(
        optimizer, module.trainer.max_epochs, eta_min=0.001
    ),
    "LambdaLR": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7)),
    "SequentialLR": lambda optimizer, module: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "by the epoch": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda _: 1 / (1 + module.current_epoch)),
}


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(SAMPLES)), batch_size=4)


class Net(pl.LightningModule):
    """Notes learning rates and what its Trainer tells it, in each hook.

    Args:
        schedule: Name of its schedule, or None.
        settings: Settings of the schedule.
    """

    def __init__(self, schedule=None, **settings):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.schedule = schedule
        self.settings = settings
        self.rates = []
        self.told = []

    def note(self, place):
        trainer = self.trainer
        assert isinstance(trainer, pl.Trainer)
        counts = {name: getattr(trainer, name) for name in NUMBERS}
        loader = (len(trainer.train_dataloader), len(trainer.train_dataloader.dataset))
        self.told.append((place, self.current_epoch, self.global_step, counts, loader))

    def training_step(self, batch, batch_idx):
        self.note("step")
        optimizer = self.optimizers()
        self.rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self):
        self.note("epoch start")

    def on_train_batch_start(self, batch, batch_idx):
        self.note("batch start")

    def on_before_zero_grad(self, optimizer):
        self.note("before zero_grad")

    def on_after_backward(self):
        self.note("after backward")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch end")

    def on_train_epoch_end(self):
        self.note("epoch end")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        if self.schedule is None:
            return optimizer
        scheduler = SCHEDULES[self.schedule](optimizer, self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.settings}}


NUMBERS = (
    "current_epoch",
    "global_step",
    "max_epochs",
    "max_steps",
    "num_training_batches",
    "estimated_stepping_batches",
    "is_last_batch",
    "accumulate_grad_batches",
    "world_size",
    "global_rank",
    "num_nodes",
    "num_devices",
)


def by_place(told):
    """What was told, by the place: Lightning calls `on_before_zero_grad` between `training_step` and backward."""
    places = {}
    for place, *values in told:
        places.setdefault(place, []).append(values)
    return places


def plain(module, epochs=ROUNDS * EPOCHS, **settings):
    trainer(epochs, **settings).fit(module, datamodule=Data())
    return module


def federated(module, rounds=ROUNDS, epochs=EPOCHS, path=None, callbacks=(), **settings):
    data = FederatedDataModule.from_datamodule(Data(), num_clients=1)
    loop = FederatedLoop(module, local_epochs=epochs, **settings)
    trainer(rounds, callbacks=list(callbacks)).fit(loop, datamodule=data, ckpt_path=path)
    return module


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_the_rates_of_all_rounds_are_those_of_one_plain_fit(schedule, interval, frequency, accumulated):
    if schedule == "by the epoch" and frequency == 3:
        pytest.skip("the rate of the first epochs comes from the epoch in which the schedule is made")
    settings = {"interval": interval, "frequency": frequency}
    expected = plain(Net(schedule, **settings), accumulate_grad_batches=accumulated)
    found = federated(Net(schedule, **settings), accumulate_grad_batches=accumulated)
    assert len(found.rates) == ROUNDS * EPOCHS * BATCHES
    assert found.rates == expected.rates


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_counts_in_every_hook_are_those_of_one_plain_fit(accumulated):
    expected = plain(Net(), accumulate_grad_batches=accumulated)
    found = federated(Net(), accumulate_grad_batches=accumulated)
    assert len(by_place(found.told)) == 7
    assert by_place(found.told) == by_place(expected.told)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_round_is_one_plain_fit_under_the_clock_round(accumulated):
    expected = plain(Net("OneCycleLR", interval="step"), EPOCHS, accumulate_grad_batches=accumulated)
    found = federated(Net("OneCycleLR", interval="step"), clock="round", accumulate_grad_batches=accumulated)
    assert by_place(found.told) == by_place(expected.told * ROUNDS)
    assert found.rates == expected.rates * ROUNDS
