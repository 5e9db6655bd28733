"""What is allowed and seldom meant is said in a line when a run starts, and only then."""

from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from fl_lightning import FederatedDataModule
from fl_lightning.client.checks import check_optimized
from fl_lightning.data import Digits, PartitionInput, ShardPartition
from fl_lightning.methods import FedAvg
from tests.toys import fit, toy_data
from tests.user_modules import Plain


def lines(caplog, client=None, rounds=1, **settings):
    with caplog.at_level("INFO"):
        loop = fit(FedAvg(module=client) if client else FedAvg(), rounds, toy_data((12, 7)), **settings)
    notices = ("model.local_epochs", "server_optimizer", "begin anew for every client")
    return loop, [text for text in caplog.messages if any(notice in text for notice in notices)]


@pytest.mark.parametrize(("epochs", "told"), [(0, True), ([0, 0], True), ([0, 1], False), (1, False)])
def test_no_local_epochs(caplog, epochs, told):
    _, said = lines(caplog, local_epochs=epochs)
    expected = [f"model.local_epochs={epochs}: no client trains, except in epochs that its method counts by itself"]
    assert [text.partition(";")[0] for text in said] == expected * told


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (SGD, "0.001"),
        (partial(SGD, lr=0.05), "0.05"),
        (partial(SGD, lr=0.05, momentum=0.9), ""),
        (partial(SGD, lr=1.0), ""),
        (Adam, ""),
        (None, ""),
    ],
)
def test_a_server_that_hardly_moves(caplog, optimizer, told):
    _, said = lines(caplog, server_optimizer=optimizer)
    assert [text.partition(":")[0] for text in said] == [f"server_optimizer SGD has lr={told}"] * bool(told)


class Scheduled(Plain):
    """Makes a schedule of `steps`."""

    def configure_optimizers(self):
        assert isinstance(self.trainer, pl.Trainer)
        optimizer = SGD(self.parameters(), lr=0.1)
        steps = self.steps()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda k: 1 / (1 + k / steps)), "interval": "step"}]

    def steps(self):
        return self.trainer.estimated_stepping_batches


class PerEpoch(Scheduled):
    def steps(self):
        return self.trainer.num_training_batches * self.trainer.max_epochs


class ByHand(Scheduled):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Knows(Scheduled):
    """Asks for what is no number of rounds."""

    def steps(self):
        return 5 * self.trainer.world_size


class Cosine(Plain):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


@pytest.mark.parametrize("clock", ["run", "round"])
@pytest.mark.parametrize("module", [Scheduled, PerEpoch, ByHand, Cosine, Knows, Plain])
def test_a_module_is_told_that_its_schedulers_begin_anew(caplog, module, clock):
    _, said = lines(caplog, module(), rounds=2, clock=clock)
    begin_anew = module is ByHand if clock == "run" else module is not Plain
    assert len(said) == begin_anew


def other_params(self):
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_an_optimizer_of_other_parameters_is_refused_before_a_client_trains():
    kind = type("Copied", (Plain,), {"configure_optimizers": other_params})
    with pytest.raises(ValueError, match=r"optimizer of Copied must hold parameters of Copied, got SGD of others only"):
        fit(FedAvg(module=kind()), 1, toy_data((12, 7)))


def test_optimizers_that_hold_some_of_the_modules_parameters_pass(recwarn):
    class Some(Plain):
        def configure_optimizers(self):
            return SGD([*self.net.parameters(), torch.zeros(1, requires_grad=True)][-2:], lr=0.1)

    class Thawed(Plain):
        """Freezes what its optimizer holds, as a callback that thaws it later would."""

        def configure_optimizers(self):
            *_, last = self.parameters()
            last.requires_grad_(False)
            return SGD([last], lr=0.1)

    class NoneToTrain(Plain):
        def configure_optimizers(self):
            self.requires_grad_(False)
            return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    for module in (Some(), Thawed(), NoneToTrain()):
        check_optimized(module, [module.configure_optimizers()], module.parameters())
    assert not recwarn.list


def test_a_module_that_steps_optimizers_of_other_parameters_by_hand_is_told():
    kind = type("Hand", (ByHand,), {"configure_optimizers": other_params})
    with pytest.warns(UserWarning, match="optimizer of Hand must hold parameters of Hand"):
        fit(FedAvg(module=kind()), 1, toy_data((12, 7)))


def test_more_shards_than_samples_are_refused():
    data = FederatedDataModule(Digits(), num_clients=10, partition=ShardPartition(500))
    with pytest.raises(ValueError, match=r"got 500 · 10 shards of 1437 samples: lower shards_per_client"):
        data.setup("fit")
    as_many = PartitionInput(10, np.arange(10) % 2)
    assert [len(part) for part in ShardPartition(2)(as_many, 5, np.random.default_rng(0))] == [2] * 5
