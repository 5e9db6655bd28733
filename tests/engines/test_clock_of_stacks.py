"""Clients that are trained at once have the clocks that they have one by one, or are not trained at once."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules

from fl_lightning import FederatedLoop
from fl_lightning.engines.clock import COUNTS
from tests.toys import equal, fit, toy_data, weights_of

SIZES = (16, 12, 12, 9)
"""With batches of 5 the clients have 4, 3, 3 and 2 steps in an epoch."""


class Net(pl.LightningModule):
    """A net with a schedule.

    Args:
        make: Makes the schedule of an optimizer and the module. None makes none.
        interval: The interval of the schedule.
        ask: A function of the module that its step calls, and by which the loss is divided. None: there is none.
    """

    def __init__(self, make=None, interval="step", ask=None, rate=None):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.make = make
        self.interval = interval
        self.ask = ask
        self.rate = rate

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if self.ask is None else loss / self.ask(self)

    def configure_optimizers(self):
        lr = 0.1 if self.rate is None else self.rate(self)
        optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.5)
        if self.make is None:
            return optimizer
        scheduler = {"scheduler": self.make(optimizer, self), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def both(make, caplog, rounds=3, **settings):
    """The weights of a federation one by one and in stacks, and why it was not stacked."""
    weights = []
    for chunk in (1, 4):
        with caplog.at_level("INFO"):
            loop = FederatedLoop(make(), chunk=chunk, **{"local_epochs": 2, **settings})
            fit(None, rounds, toy_data(SIZES), loop=loop, precision="64-true")
        weights.append(weights_of(loop))
    return (*weights, [text for text in caplog.messages if "trained one after the other" in text])


SCHEDULES = {
    "LinearLR": lambda optimizer, module: schedules.LinearLR(
        optimizer, 1.0, 0.0, total_iters=int(module.trainer.estimated_stepping_batches)
    ),
    "CosineAnnealingLR": lambda optimizer, module: schedules.CosineAnnealingLR(optimizer, module.trainer.max_epochs),
    "LambdaLR": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 11)),
    "by the epoch": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda _: 1 / (1 + module.current_epoch)),
    "by the step": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda _: 1 / (1 + module.global_step)),
}


@pytest.mark.parametrize("clock", ["run", "round"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_a_stack_are_those_of_its_clients(schedule, interval, clock, caplog):
    alone, together, reasons = both(lambda: Net(SCHEDULES[schedule], interval), caplog, clock=clock)
    assert reasons == []
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_a_step_that_reads_the_epoch_is_stacked(caplog):
    alone, together, reasons = both(lambda: Net(ask=lambda module: 1.0 + module.current_epoch), caplog)
    assert reasons == []
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    plain, *_ = both(Net, caplog)
    assert not equal(plain, alone)


NUMBERS = {
    "optimizers": lambda value: 1.0 + len(value),
    "lr_scheduler_configs": lambda value: 1.0 + len(value),
    "train_dataloader": lambda value: float(len(value)),
}


@pytest.mark.parametrize("name", sorted({*COUNTS} - {"current_epoch"}))
def test_a_step_that_reads_anything_else_is_not_stacked(name, caplog):
    def ask(module):
        value = getattr(module.trainer, name)
        return NUMBERS.get(name, lambda number: 2.0 + number)(value)

    alone, together, reasons = both(lambda: Net(ask=ask), caplog)
    assert [f"reads trainer.{name}, which differs between clients" in reason for reason in reasons] == [True]
    assert equal(together, alone)


def test_epochs_of_clients_with_different_numbers_of_epochs_are_not_stacked(caplog):
    alone, together, reasons = both(
        lambda: Net(ask=lambda module: 1.0 + module.current_epoch), caplog, local_epochs=[1, 2, 2, 3]
    )
    # In the first round all of them are in epoch 0, and then in epoch 1.
    assert ["reads trainer.current_epoch" in reason for reason in reasons] == [True]
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_a_rate_that_depends_on_the_clients_steps_is_not_shared(caplog):
    alone, together, reasons = both(
        lambda: Net(rate=lambda module: 1 / (10 + module.trainer.num_training_batches)), caplog
    )
    assert any("different values of lr" in reason for reason in reasons)
    assert equal(together, alone)


def test_a_rate_that_depends_on_the_epoch_is_stacked(caplog):
    alone, together, reasons = both(lambda: Net(rate=lambda module: 0.1 / (1 + module.current_epoch)), caplog)
    assert reasons == []
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
