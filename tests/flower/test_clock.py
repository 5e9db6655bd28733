"""The clock of a client at its node is that of the simulation."""

import random
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning import FederatedLoop
from tests.flower.grid import federate
from tests.toys import equal, fit, toy_data, weights_of


class Net(pl.LightningModule):
    """A net that asks its Trainer for what modules of many projects ask it for."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def setup(self, stage):
        assert isinstance(self.trainer, pl.Trainer)
        assert self.trainer.max_epochs == 3

    def on_train_epoch_start(self):
        self.log("at/epoch", float(self.current_epoch))

    def training_step(self, batch, batch_idx):
        if self.logger is not None and self.trainer.is_global_zero:
            raise AssertionError("there is no logger")
        self.log("at/step", float(self.global_step))
        self.log("at/steps", float(self.trainer.estimated_stepping_batches))
        self.log("at/last", float(self.trainer.is_last_batch))
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (1 + torch.rand(()))

    def validation_step(self, batch, batch_idx):
        assert not self.trainer.sanity_checking
        drawn = torch.rand(()) + random.random() + np.random.rand()
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]) + self.current_epoch + drawn)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        cycle = schedules.OneCycleLR(optimizer, 0.3, total_steps=int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def make_loop(clock):
    return FederatedLoop(Net(), local_epochs=2, seed=3, clock=clock, evaluate_clients_every=1)


@pytest.mark.parametrize("clock", ["run", "round"])
def test_a_schedule_over_the_whole_run_is_the_same_at_nodes(clock, tmp_path):
    make = partial(make_loop, clock)
    plain = fit(None, 3, toy_data((7, 12, 5)), loop=make())
    server, *_ = federate(make, lambda: toy_data((7, 12, 5)), tmp_path, rounds=3)
    assert plain.round_metrics["at/epoch"] == (2 * 2 + 0.5 if clock == "run" else 0.5)
    assert equal(weights_of(plain), weights_of(server))
    assert plain.round_metrics == server.round_metrics


FLAGS = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking", "fast_dev_run")
CALLBACKS = ("checkpoint_callbacks", "early_stopping_callbacks")


class AsksItsStage(Net):
    """Its loss depends on what its Trainer says that it does."""

    def setup(self, stage):
        assert self.trainer.state.fn == "fit"
        assert self.trainer.checkpoint_callback is self.trainer.early_stopping_callback is None

    def stage_number(self):
        trainer = self.trainer
        flags = sum(bool(getattr(trainer, name)) << place for place, name in enumerate(FLAGS))
        stages = ["train", "validate", "test", "predict"]
        counts = sum(len(getattr(trainer, name)) for name in CALLBACKS)
        return flags + 100 * stages.index(trainer.state.stage.value) + 1000 * (trainer.state.fn == "fit") + counts

    def training_step(self, batch, batch_idx):
        self.log("stage", float(self.stage_number()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_stage", float(self.stage_number()))


def test_a_module_learns_its_stage_at_a_node_as_in_the_simulation(tmp_path):
    def make():
        return FederatedLoop(AsksItsStage(), seed=3, evaluate_clients_every=1)

    plain = fit(None, 2, toy_data((7, 12, 5)), loop=make())
    server, *_ = federate(make, lambda: toy_data((7, 12, 5)), tmp_path, rounds=2)
    assert plain.round_metrics == server.round_metrics
    assert {"stage", "val_stage", "local/val_stage"} <= server.round_metrics.keys()


def asking():
    class Asks(Net):
        def setup(self, stage):
            pass

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1]) / self.trainer.max_epochs

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return FederatedLoop(Asks(), seed=3)


def test_the_server_learns_that_a_module_has_asked_at_its_node(tmp_path):
    server, *_ = federate(asking, lambda: toy_data((7, 12, 5)), tmp_path, rounds=2)
    assert server.parts.horizon.state() == {"planned_rounds": 2}
