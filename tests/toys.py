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
SIZES = (7, 12, 5, 9, 16)
"""Samples of the clients, unequal on purpose. With batches of 5 or 6 the last batches are small."""


class BatchNormNet(Backbone):
    """Has a linear layer, BatchNorm, ReLU, dropout and a linear head."""

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], dropout: float = 0.2, running: bool = True
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(prod(input_shape), 8),
            nn.BatchNorm1d(8, track_running_stats=running),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(8, num_classes)

    def features(self, x):
        return self.body(x.flatten(1))

    def stages(self):
        return Stages(nn.Flatten(), self.body, nn.Identity())


class EdgePartition(Partition):
    """Gives one client of each awkward kind."""

    SIZES = (17, 0, 9, 1, 20)
    """Mixed, empty, of one class, a single sample, mixed. Batches of 8 leave a batch of one sample of 17 and of 9."""

    def __call__(self, samples, num_clients, generator):
        of_one_class = np.flatnonzero(samples.labels == samples.labels[0])[: self.SIZES[2]]
        others = np.setdiff1d(np.arange(samples.size), of_one_class)
        parts = []
        begin = 0
        for client_id, size in enumerate(self.SIZES):
            if client_id == 2:
                parts.append(of_one_class)
            else:
                parts.append(others[begin : begin + size])
                begin += size
        return parts


def samples(n: int, seed: int = 0, dim: int = 4, classes: int = 3, *, dtype=torch.float32):
    """Return points around class means, so that there is something to learn.

    Args:
        n: Number of points.
        seed: Seed of the points. The means are always the same.
        dim: Numbers in a point.
        classes: Number of classes.
        dtype: Type of the points.

    Returns:
        Points (n, dim), and classes (n,) int64.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99)) * 2
    y = torch.randint(classes, (n,), generator=generator)
    x = means[y] + torch.randn(n, dim, generator=generator)
    return x.to(dtype), y


def toy_data(sizes=SIZES, dtype=torch.float32, **settings) -> FederatedDataModule:
    """Return data with one client for each size.

    Args:
        sizes: Numbers of samples.
        dtype: Type of the samples.
        settings: Settings of FederatedDataModule.
    """
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    partition = FixedPartition([list(range(first, end)) for first, end in pairwise(bounds)])
    train = samples(sum(sizes), dtype=dtype)
    test = samples(30, seed=1, dtype=dtype)
    source = TensorSource(train, test, num_classes=3)
    settings = {"num_clients": len(sizes), "partition": partition, "batch_size": 5, **settings}
    return FederatedDataModule(source, **settings)


def sgd(lr: float = 0.1, momentum: float = 0.9, **more):
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, **more)


def trainer(rounds: int, tmp_path=None, kind=pl.Trainer, **settings) -> pl.Trainer:
    """Return a stock Trainer that logs, stores and shows nothing.

    Args:
        rounds: Number of rounds.
        tmp_path: Folder of its files.
        kind: Class of the Trainer, such as that of the twin package.
        settings: Further arguments of the Trainer.
    """
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
    """Put settings of the faults and of the mean into the objects to which they belong.

    Args:
        settings: Settings of a loop, among them those of `FaultPolicy` and the weighting of the aggregator.
    """
    rest = dict(settings)
    policy = {name: rest.pop(name) for name in FAULTS & rest.keys()}
    if policy:
        rest["faults"] = FaultPolicy(**policy)
    if "weighting" in rest:
        rest["aggregator"] = rest.get("aggregator") or Aggregator()
        rest["aggregator"].weighting = rest.pop("weighting")
    return rest


def fit(
    client,
    rounds: int = 3,
    data=None,
    ckpt_path=None,
    *,
    loop=None,
    callbacks=None,
    precision="32-true",
    **settings,
):
    """Fit a loop, and return it.

    Args:
        client: The client of a fresh loop.
        rounds: Number of rounds.
        data: The data. None is `toy_data`.
        ckpt_path: Checkpoint from which the fit goes on.
        loop: A loop to fit instead of a fresh one.
        callbacks: Callbacks of the Trainer.
        precision: Precision of the Trainer.
        settings: Settings of the fresh loop, as `folded` takes them.
    """
    loop = loop or FederatedLoop(client, **{"seed": 3, **folded(settings)})
    run = trainer(rounds, callbacks=callbacks, precision=precision)
    run.fit(loop, datamodule=toy_data() if data is None else data, ckpt_path=ckpt_path)
    return loop


def weights_of(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.state_dict().items()}


def equal(a: dict, b: dict) -> bool:
    """Return True if two states have the same entries with equal values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
