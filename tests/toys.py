"""Small data, nets, modules and runs that many tests use."""

from dataclasses import fields
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import Aggregator, FaultPolicy, FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition, Partition, TensorSource
from fl_lightning.nets import Backbone
from fl_lightning.nets.backbone import Stages

FAULTS = {field.name for field in fields(FaultPolicy)}
SIZES = (7, 12, 5, 9, 16)  # unequal on purpose; with batches of 5 or 6 last batches are small


class BatchNormNet(Backbone):
    """Linear, BatchNorm, ReLU, dropout, linear."""

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], dropout: float = 0.2, running: bool = True
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8, track_running_stats=running)
        self.body = nn.Sequential(nn.Linear(prod(input_shape), 8), norm, nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(8, num_classes)

    def features(self, x):
        return self.body(x.flatten(1))

    def stages(self):
        return Stages(nn.Flatten(), self.body, nn.Identity())


class EdgePartition(Partition):
    """A client of each awkward kind; with batches of 8 two of them end in a batch of one sample."""

    SIZES = (17, 0, 9, 1, 20)
    """Mixed (its last batch is one sample), empty, of one class (the same), one sample, mixed."""

    def __call__(self, samples, num_clients, generator):
        of_one_class = np.flatnonzero(samples.labels == samples.labels[0])[: self.SIZES[2]]
        others = iter(np.setdiff1d(np.arange(samples.size), of_one_class))
        return [
            of_one_class if client_id == 2 else np.array([next(others) for _ in range(size)], dtype=np.int64)
            for client_id, size in enumerate(self.SIZES)
        ]


def samples(n: int, seed: int = 0, dim: int = 4, classes: int = 3, dtype=torch.float32):
    """Points around class means, so that there is something to learn."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99)) * 2
    y = torch.randint(classes, (n,), generator=g)
    return (means[y] + torch.randn(n, dim, generator=g)).to(dtype), y


def toy_data(sizes=SIZES, dtype=torch.float32, **settings) -> FederatedDataModule:
    """One client for each size; `settings` of FederatedDataModule."""
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    partition = FixedPartition([list(range(a, b)) for a, b in pairwise(bounds)])
    source = TensorSource(samples(bounds[-1], dtype=dtype), samples(30, seed=1, dtype=dtype), num_classes=3)
    settings = {"num_clients": len(sizes), "partition": partition, "batch_size": 5, **settings}
    return FederatedDataModule(source, **settings)


def sgd(lr: float = 0.1, momentum: float = 0.9, **more):
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, **more)


def trainer(rounds: int, tmp_path=None, kind=pl.Trainer, **settings) -> pl.Trainer:
    """A quiet stock Trainer; `kind`: of the twin package."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": rounds,
        "default_root_dir": tmp_path,
    }
    return kind(**{**quiet, **settings})


def folded(settings: dict) -> dict:
    """Settings of a loop, with those of its faults and of the mean by their own names."""
    rest = dict(settings)
    policy = {name: rest.pop(name) for name in FAULTS & rest.keys()}
    if policy:
        rest["faults"] = FaultPolicy(**policy)
    if "weighting" in rest:
        rest["aggregator"] = rest.get("aggregator") or Aggregator()
        rest["aggregator"].weighting = rest.pop("weighting")
    return rest


def fit(client, rounds: int = 3, data=None, ckpt_path=None, loop=None, callbacks=None, precision="32-true", **settings):
    """Fit a fresh loop around `client`; returns the loop."""
    loop = loop or FederatedLoop(client, **{"seed": 3, **folded(settings)})
    run = trainer(rounds, callbacks=callbacks, precision=precision)
    run.fit(loop, datamodule=toy_data() if data is None else data, ckpt_path=ckpt_path)
    return loop


def weights_of(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.state_dict().items()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
