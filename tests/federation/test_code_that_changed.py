"""Code of the user's that a run uses has a digest, wherever the run's classes name or keep it."""

import importlib
import inspect
import linecache
import sys

import pytest
import pytorch_lightning as pl

from fl_lightning import FederatedLoop
from fl_lightning.federation.code import changed_code, source_of
from fl_lightning.methods import FedAvg
from tests import test_checkpoint_hooks, toys, user_data
from tests.toys import toy_data, trainer

LOSSES = """
def smooth(loss):
    return loss  # a function of another module

class Focal:
    def __call__(self, loss):
        return loss  # a class of another module
"""

SOURCE = """
import torch, users_losses
import pytorch_lightning as pl
from dataclasses import dataclass
from functools import cache, wraps
from torch import nn
from torch.nn.functional import cross_entropy
from fl_lightning.methods import FedAvg

class Optimizer(torch.optim.SGD):
    decay = 1  # an optimizer

class Schedule(torch.optim.lr_scheduler.ExponentialLR):
    shape = 1  # a scheduler

class Given:
    scale = 1  # the class of an object that is given

class Made:
    scale = 1  # the class of an object that is made

@dataclass
class Settings:
    scale: float = 1  # a dataclass

class Outer:
    class Inner:
        scale = 1  # a class within a class

def twice(function):
    @wraps(function)
    def wrapped(*args):
        return function(*args)  # a decorator
    return wrapped

def prepared(x):
    return deeper(x)  # a function

def deeper(x):
    return x * factor(3)  # a function of a function

@cache
def factor(number):
    return number / 3  # a function that keeps its values

class Scaled:
    def __call__(self, x):
        return x  # the class of a global object

SCALED = Scaled()

class Module(pl.LightningModule):
    def __init__(self, given=None):
        super().__init__()
        self.given = given
        self.made = [Made(), Settings(), Outer.Inner()]
        self.net = nn.Linear(4, 3)
        self.focal = users_losses.Focal()

    @twice
    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(self.scaled(prepared(batch[0]))), batch[1])  # the module
        return self.focal(users_losses.smooth(loss))

    @staticmethod
    def scaled(x):
        return SCALED(x)

    def configure_optimizers(self):
        optimizer = Optimizer(self.parameters(), lr=0.1)
        return [optimizer], [Schedule(optimizer, 0.9)]

def optimizer_of(params):
    return Optimizer(params, lr=0.1)  # a function that makes an optimizer

def server_optimizer_of(params):
    return Optimizer(params, lr=0.5)  # a function that makes the server's optimizer

def unused(x):
    return x  # what nobody uses
"""


def digests(folder, monkeypatch, *, changed=None):
    """Return the digests of the code of two runs, after the line that ends in a comment has changed."""
    for name, source in (("users_losses", LOSSES), ("users_module", SOURCE)):
        lines = [f"{line} too" if changed and line.endswith(f"  # {changed}") else line for line in source.split("\n")]
        (folder / f"{name}.py").write_text("\n".join(lines))
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(folder)
    linecache.clearcache()
    users = importlib.import_module("users_module")
    by_module = FederatedLoop(users.Module(users.Given()), seed=1)
    by_net = FederatedLoop(FedAvg(optimizer=users.optimizer_of), server_optimizer=users.server_optimizer_of, seed=1)
    code = {}
    for loop in (by_module, by_net):
        trainer(1).fit(loop, datamodule=toy_data((8, 8)))
        code |= loop.identity.code
    return code


CHANGES = [line.rpartition("  # ")[2] for line in f"{LOSSES}{SOURCE}".split("\n") if "  # " in line]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed", CHANGES)
def test_code_that_a_run_uses_is_named_if_it_changed(changed, tmp_path, monkeypatch):
    before = digests(tmp_path, monkeypatch)
    (tmp_path / "again").mkdir()
    after = digests(tmp_path / "again", monkeypatch, changed=changed)
    is_used = changed != "what nobody uses"
    assert before.keys() == after.keys()
    assert bool(changed_code(before, after)) is is_used
    # A comparison asks the loaded modules, and makes no run.
    assert bool(changed_code(before)) is is_used


def test_the_source_of_a_class_is_that_of_inspect():
    kinds = [toys.BatchNormNet, toys.EdgePartition, user_data.Pairs, user_data.DictSamples]
    kinds += [make(pl)[0] for make in test_checkpoint_hooks.KINDS]
    kinds += [test_checkpoint_hooks.Setting, test_checkpoint_hooks.Steps]
    for kind in kinds:
        assert source_of(kind) == inspect.getsource(kind)
