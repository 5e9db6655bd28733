"""A client's schedulers are stepped when plain Lightning steps them."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from tests.toys import samples, trainer

EPOCHS = 3
BATCHES = 5
"""Batches of an epoch. Neither an accumulation nor a frequency below divides it."""


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(4 * BATCHES - 1)), batch_size=4)


class Net(pl.LightningModule):
    """Notes the learning rate of each batch.

    Args:
        scheduled: Settings of its scheduler.
        skips: Index of a batch without a loss. None: every batch has one.
    """

    def __init__(self, scheduled, skips=None):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.scheduled = scheduled
        self.skips = skips
        self.met = []

    def training_step(self, batch, batch_idx):
        self.met.append(self.optimizers().param_groups[0]["lr"])
        if batch_idx == self.skips:
            return None
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.scheduled}}


def plain(accumulated, **settings):
    module = Net(**settings)
    trainer(EPOCHS, accumulate_grad_batches=accumulated).fit(module, datamodule=Data())
    return module


def federated(accumulated, **settings):
    module = Net(**settings)
    data = FederatedDataModule.from_datamodule(Data(), num_clients=1)
    loop = FederatedLoop(module, local_epochs=EPOCHS, accumulate_grad_batches=accumulated)
    trainer(1).fit(loop, datamodule=data)
    return module


@pytest.mark.parametrize("skips", [None, 0])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_rates_are_those_of_plain_lightning(interval, frequency, accumulated, skips):
    settings = {"scheduled": {"interval": interval, "frequency": frequency}, "skips": skips}
    expected = plain(accumulated, **settings)
    found = federated(accumulated, **settings)
    assert found.met == expected.met


def test_a_skipped_batch_counts():
    """Five batches of which the second one is skipped: the scheduler is stepped after the second and the fourth."""
    module = federated(1, scheduled={"interval": "step", "frequency": 2}, skips=1)
    assert module.met[:BATCHES] == pytest.approx([0.1, 0.1, 0.07, 0.07, 0.049])
