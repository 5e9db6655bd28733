"""Modules and data that ask how many processes there are, and the script that runs them.

`python alone.py FOLDER DEVICES` writes what every rank sees to FOLDER/DEVICES-RANK.json.
"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as twin
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning.core.hooks import DataHooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.client.hooks import FORWARDED
from tests.processes.strategies import parallel
from tests.toys import samples, trainer

DEVICES = 2
STEPS = ("configure_optimizers", "training_step", "validation_step", "test_step", "predict_step")
ASKED = ("world_size", "global_rank", "num_nodes", "num_devices")
DATA_HOOKS = sorted(name for name in vars(DataHooks) if not name.startswith("_"))


def seen_by(part):
    """Return what a module or data module sees of the processes. A module and its trainer have the same rank."""
    assert isinstance(part.trainer, pl.Trainer)
    rank = part.trainer.global_rank
    assert getattr(part, "global_rank", rank) == rank
    return [getattr(part.trainer, name) for name in ASKED]


def watched(kind, names):
    """Return a class derived from `kind` whose hooks note what they see of the processes."""

    def wrapped(name, plain):
        def hook(self, *args, **kwargs):
            self.seen.setdefault(name, []).append(seen_by(self))
            return plain(self, *args, **kwargs)

        return hook

    made = {name: wrapped(name, getattr(kind, name)) for name in names if hasattr(kind, name)}
    return type(f"Watched{kind.__name__}", (kind,), made)


def dividing(package):
    """Return a module and a data module of a package of Lightning that divide by the number of processes."""

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.seen = {}
            self.net = nn.Linear(4, 3)
            self.mae = torchmetrics.MeanAbsoluteError()
            self.f1 = MulticlassF1Score(3)
            self.lr = 0.2

        def setup(self, stage):
            self.lr = 0.4 / self.trainer.world_size

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.mae.update(logits[:, 0], batch[1] / 3)
            self.log("train/mae", self.mae)
            self.log("train/f1", self.f1(logits, batch[1]))
            scale = self.trainer.num_devices * (1 + self.global_rank) * self.trainer.num_nodes
            return F.cross_entropy(logits, batch[1]) * scale

        def validation_step(self, batch, batch_idx):
            self.log("val/samples", float(len(batch[0])), reduce_fx="sum")

        def test_step(self, batch, batch_idx):
            pass

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr / self.trainer.num_devices)

    class Data(package.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def setup(self, stage):
            x, y = samples(48)
            rank = self.trainer.global_rank
            world = self.trainer.world_size
            self.train = TensorDataset(x[rank::world], y[rank::world])

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=8 // self.trainer.world_size)

        def val_dataloader(self):
            return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4)

        test_dataloader = predict_dataloader = val_dataloader

    return watched(Net, [*sorted(FORWARDED), *STEPS]), watched(Data, DATA_HOOKS)


def run(package, folder, devices):
    """Fit, validate, test and predict, and return what the parts saw and the weights."""
    kind, data_kind = dividing(package)
    module = kind()
    torch.nn.init.ones_(module.net.weight)
    torch.nn.init.zeros_(module.net.bias)
    datamodule = data_kind()
    data = FederatedDataModule.from_datamodule(datamodule, num_clients=4, eval_batch_size=4)
    loop = FederatedLoop(module, seed=3)
    trainer(2, folder, **parallel(devices)).fit(loop, datamodule=data)
    row = dict(loop.round_metrics)
    for name in ("validate", "test", "predict"):
        evaluate = getattr(trainer(2, folder, **parallel(devices)), name)
        evaluate(loop, datamodule=data)
    return {"weights": module.net.weight.tolist(), "row": row, "module": module.seen, "data": datamodule.seen}


if __name__ == "__main__":
    where, count = sys.argv[1:]
    torch.set_num_threads(1)
    found = {package.__name__: run(package, where, int(count)) for package in (pl, twin)}
    rank = os.environ.get("LOCAL_RANK", "0")
    Path(where, f"{count}-{rank}.json").write_text(json.dumps(found))
