"""What a module reads of its Trainer in an evaluation is of that evaluation, as in plain Lightning."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule as TwinModule
from lightning.pytorch import Trainer as TwinTrainer
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.methods import FedAvg, Local
from fl_lightning.monitors import GroupMetrics

pytestmark = pytest.mark.filterwarnings("ignore")
CLIENTS = 3
BATCH_SIZE = 4
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 1,
}


class Measured(TensorDataset):
    """Its values have a unit, which a module may ask for."""

    unit = "mm"


def samples(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return Measured(x, x.sum(1) + torch.randn(size, generator=generator))


class Samples(LightningDataModule):
    """The loaders of the three splits have different lengths."""

    def train_dataloader(self):
        return DataLoader(samples(23, 0), batch_size=BATCH_SIZE)

    def val_dataloader(self):
        return DataLoader(samples(11, 1), batch_size=BATCH_SIZE)

    def test_dataloader(self):
        return DataLoader(samples(37, 2), batch_size=BATCH_SIZE)


def modules_of(base, kind):
    """Make modules that divide or compare by what their Trainer says. They are evaluated by one step only.

    Args:
        base: Lightning's class of either package.
        kind: `validation` or `test`.
    """
    split = "val" if kind == "validation" else "test"

    class Base(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)
            self.mae = torchmetrics.MeanAbsoluteError()
            self.best = torchmetrics.MinMetric()
            self.total = 0.0

        def training_step(self, batch, batch_idx):
            return self.error(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def error(self, batch):
            x, y = batch
            return mse_loss(self.layer(x).squeeze(1), y)

        def start(self):
            self.total = 0.0

        def step(self, batch, batch_idx):
            self.total += float(self.error(batch)) * len(batch[1])

        def end(self):
            pass

    class ByNumberOfBatches(Base):
        def step(self, batch, batch_idx):
            numbers = getattr(self.trainer, f"num_{split}_batches")
            self.log("is_last", float(batch_idx == numbers[0] - 1), reduce_fx="sum")
            super().step(batch, batch_idx)

        def end(self):
            self.log("mean", self.total / sum(getattr(self.trainer, f"num_{split}_batches")))

    class ByLoader(Base):
        def end(self):
            loader = getattr(self.trainer, f"{split}_dataloaders")
            self.log("mean", self.total / len(loader.dataset))
            self.log("batches", float(len(loader)))
            self.log("read_again", float(sum(len(y) for _, y in loader)))
            self.log("batch_size", float(loader.batch_size or BATCH_SIZE))

    class ByLoggedValues(Base):
        def step(self, batch, batch_idx):
            x, y = batch
            self.log("error", self.error(batch), prog_bar=True)
            self.log("largest", y.max(), reduce_fx="max")
            self.mae(self.layer(x).squeeze(1), y)
            self.log("mae", self.mae)

        def end(self):
            for name in ("callback_metrics", "logged_metrics"):
                values = getattr(self.trainer, name)
                for key in ("error", "largest", "mae"):
                    self.log(f"{name}/{key}", values[key])
            self.best(self.trainer.callback_metrics["mae"])
            self.log("best", self.best)

        def last(self):
            self.total = float(self.trainer.callback_metrics["best"])

    for module in (ByNumberOfBatches, ByLoader, ByLoggedValues):
        setattr(module, f"on_{kind}_epoch_start", module.start)
        setattr(module, f"{kind}_step", module.step)
        setattr(module, f"on_{kind}_epoch_end", module.end)
    setattr(ByLoggedValues, f"on_{kind}_end", ByLoggedValues.last)
    return {module.__name__: module for module in (ByNumberOfBatches, ByLoader, ByLoggedValues)}


NAMES = list(modules_of(LightningModule, "test"))
PACKAGES = {"pytorch_lightning": (LightningModule, Trainer), "lightning": (TwinModule, TwinTrainer)}


def plain(module, trainer, kind, loader):
    """Return what a plain Trainer reports of a module."""
    alone = trainer(**QUIET)
    evaluate = alone.validate if kind == "validation" else alone.test
    (values,) = evaluate(module, loader, verbose=False)
    return values


def loader_of_clients(data, split, clients):
    """Return a loader of the samples of some clients, one client after the other."""
    xs = []
    ys = []
    places = []
    for client_id in clients:
        for x, y in data.view(client_id, 0).batches(split, batch_size=BATCH_SIZE):
            first = sum(map(len, ys))
            xs.append(x)
            ys.append(y)
            places.append(list(range(first, first + len(y))))
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_sampler=places)


def federated(module, callbacks=(), rounds=2, **settings):
    data = FederatedDataModule.from_datamodule(Samples(), num_clients=CLIENTS, eval_batch_size=BATCH_SIZE)
    loop = FederatedLoop(module, seed=1, **settings)
    trainer = Trainer(max_epochs=rounds, callbacks=list(callbacks), **QUIET)
    trainer.fit(loop, datamodule=data)
    return trainer, loop


@pytest.mark.parametrize("kind", ["validation", "test"])
@pytest.mark.parametrize("around", [FedAvg, Local], ids=["FedAvg", "Local"])
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", NAMES)
def test_at_a_client(name, package, around, kind):
    base, trainer = PACKAGES[package]
    module = modules_of(base, kind)[name]()
    _, loop = federated(around(module=module), evaluate_clients_every=1)
    for client_id in range(CLIENTS):
        loader = loader_of_clients(loop.data, "test", [client_id])
        expected = plain(loop.client_model(client_id), trainer, kind, loader)
        found = {key.removeprefix("local/"): value for key, value in loop.recorder.client_values[client_id].items()}
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", NAMES)
def test_of_the_global_model_in_a_fit(name, package):
    base, trainer = PACKAGES[package]
    _, loop = federated(modules_of(base, "validation")[name]())
    expected = plain(loop.client_model(), trainer, "validation", Samples().val_dataloader())
    found = {key: value for key, value in loop.round_metrics.items() if key in expected}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("deployed", [None, 1, "all"])
@pytest.mark.parametrize("kind", ["validation", "test"])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_pass_of_the_trainer(name, kind, deployed):
    module = modules_of(LightningModule, kind)[name]()
    trainer, loop = federated(FedAvg(module=module))
    loop.deploy(deployed)
    evaluate = trainer.validate if kind == "validation" else trainer.test
    (found,) = evaluate(loop, datamodule=loop.data, verbose=False)
    loader = Samples().val_dataloader() if kind == "validation" else Samples().test_dataloader()
    if deployed == 1:
        loader = loader_of_clients(loop.data, "test", [1])
    expected = plain(loop.client_model(), Trainer, kind, loader)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_on_the_training_samples(name):
    _, loop = federated(modules_of(LightningModule, "validation")[name](), evaluate_training_every=1)
    loader = loader_of_clients(loop.data, "train", range(CLIENTS))
    expected = plain(loop.client_model(), Trainer, "validation", loader)
    found = {key: loop.round_metrics[f"global/train/{key}"] for key in expected}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_in_a_group(name, tmp_path):
    groups = GroupMetrics(groups={"two": [0, 2]})
    _, loop = federated(modules_of(LightningModule, "validation")[name](), callbacks=[groups])
    loader = loader_of_clients(loop.data, "test", [0, 2])
    expected = plain(loop.client_model(), Trainer, "validation", loader)
    found = {key: loop.round_metrics[f"global/{key}/two"] for key in expected}
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_dataset_of_the_users_loader_is_seen():
    class Asks(modules_of(LightningModule, "validation")["ByLoader"]):
        def end(self):
            assert self.trainer.val_dataloaders.dataset.unit == "mm"
            self.log("asked", 1.0)

        on_validation_epoch_end = end

    _, loop = federated(Asks())
    assert loop.round_metrics["asked"] == 1.0
