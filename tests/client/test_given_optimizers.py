"""An optimizer and a scheduler that are given for a module, in the place of its `configure_optimizers`."""

import pickle
from copy import deepcopy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch import LightningModule as TwinModule
from pytorch_lightning.cli import ReduceLROnPlateau
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.client import ClientModule
from fl_lightning.methods import FedProx
from tests.toys import equal, trainer, weights_of
from tests.user_data import Curve


def without_optimizer(base):
    """A module that leaves its optimizer to LightningCLI."""

    class Bare(base):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("train/mse", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/mse", nn.functional.mse_loss(self.net(x), y))

    return Bare


class Bare(without_optimizer(pl.LightningModule)):
    """One of `pytorch_lightning`."""


class Twin(without_optimizer(TwinModule)):
    """One of `lightning.pytorch`."""


class Other(Bare):
    """One with an optimizer of its own, which is replaced."""

    def configure_optimizers(self):
        return Adam(self.parameters(), lr=0.5)


sgd = partial(SGD, lr=0.1, momentum=0.9)
adam = partial(Adam, lr=0.05)
step = partial(StepLR, step_size=1, gamma=0.5)
plateau = partial(ReduceLROnPlateau, monitor="val/mse", patience=0, threshold=10.0)


def reference(base, optimizer, scheduler):
    """The module as somebody writes it who knows what LightningCLI returns."""

    class Written(base):
        def configure_optimizers(self):
            made = optimizer(self.parameters())
            if scheduler is None:
                return made
            if scheduler is plateau:
                return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler(made), "monitor": "val/mse"}}
            return [made], [scheduler(made)]

    return Written


def fitted(client, **settings):
    data = FederatedDataModule.from_datamodule(Curve(), num_clients=3)
    loop = FederatedLoop(client, local_epochs=3, seed=1, **settings)
    trainer(2).fit(loop, datamodule=data)
    return weights_of(loop)


@pytest.mark.parametrize("scheduler", [None, step, plateau], ids=["constant", "step", "plateau"])
@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("kind", [Bare, Twin, Other])
def test_they_train_as_a_module_that_returns_them_itself(kind, optimizer, scheduler):
    torch.manual_seed(0)
    first = kind()
    written = reference(kind, optimizer, scheduler)()
    written.load_state_dict(first.state_dict())
    given = fitted(ClientModule(module=first, optimizer=optimizer, lr_scheduler=scheduler))
    assert equal(given, fitted(ClientModule(module=written)))


def test_a_method_around_the_module_takes_them_too():
    torch.manual_seed(0)
    first = Bare()
    written = reference(Bare, sgd, step)()
    written.load_state_dict(first.state_dict())
    given = fitted(FedProx(module=first, mu=0.1, optimizer=sgd, lr_scheduler=step))
    assert equal(given, fitted(FedProx(module=written, mu=0.1)))


def test_copies_of_the_module_train_themselves():
    client = ClientModule(module=Bare(), optimizer=sgd, lr_scheduler=step)
    for copied in (deepcopy(client), pickle.loads(pickle.dumps(client))):
        optimizers, _ = copied.configure_optimizers()
        held = optimizers[0].param_groups[0]["params"]
        assert held[0] is copied.module.net.weight
        assert held[0] is not client.module.net.weight


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"module": Bare, "lr_scheduler": step}, "lr_scheduler needs module= and optimizer=, got no optimizer; give"),
        ({"optimizer": sgd, "lr_scheduler": step}, "got no module; take model.lr_decay for a net"),
        ({"module": Bare, "optimizer": sgd, "net": lambda c, s: nn.Linear(1, 1)}, "either module= or net="),
        ({"module": Bare, "optimizer": SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}, "optimizer must be a function"),
        ({"module": Bare, "optimizer": sgd, "lr_scheduler": 3}, "lr_scheduler must be a function"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, sentence):
    made = {name: value() if value is Bare else value for name, value in arguments.items()}
    with pytest.raises((ValueError, TypeError), match=sentence):
        ClientModule(**made)


def test_another_optimizer_or_scheduler_is_another_run():
    described = {}
    for name, optimizer, scheduler in (("a", sgd, step), ("b", adam, step), ("c", sgd, None)):
        loop = FederatedLoop(ClientModule(module=Bare(), optimizer=optimizer, lr_scheduler=scheduler), seed=1)
        data = FederatedDataModule.from_datamodule(Curve(), num_clients=3)
        trainer(1).fit(loop, datamodule=data)
        described[name] = loop.identity.objects
    assert described["a"] != described["b"]
    assert described["a"] != described["c"]
