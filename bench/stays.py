"""Short stays of a large module: a ResNet-18 with few steps a client, beside the same steps in a plain fit."""

import warnings
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from bench.blocks import quiet, turns
from bench.federated import BARE, fit
from bench.tables import Row
from bench.workloads import CLASSES
from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition

COLUMNS = ("steps a client", "cpu_s_per_step", "plain", "ratio")
STEPS = (1, 2, 5)
CLIENTS = 4
BATCH = 32
ROUNDS = 4


def resnet() -> LightningModule:
    """Make a user's module: torchvision's ResNet-18 with random weights, 11.2 million parameters."""

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18(num_classes=CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Classifier()


def seconds(steps: int, module: LightningModule, *, federated: bool, batch: int = BATCH, side: int = 32) -> float:
    """Measure the CPU seconds of a step: the median over rounds, or over epochs of a plain fit, after the first.

    Args:
        steps: Steps of a client in a round.
        module: The module.
        federated: Whether the module is fitted as a federation.
        batch: Samples per batch.
        side: Side of the images in pixels.
    """
    samples_of_client = steps * batch
    num_samples = CLIENTS * samples_of_client
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((num_samples, 3, side, side), generator=generator)
    labels = torch.randint(CLASSES, (num_samples,), generator=generator)
    dataset = TensorDataset(images, labels)
    with quiet(), warnings.catch_warnings(action="ignore"):
        if federated:
            firsts = range(0, num_samples, samples_of_client)
            data = FederatedDataModule.from_datasets(
                dataset,
                num_clients=CLIENTS,
                partition=FixedPartition([list(range(first, first + samples_of_client)) for first in firsts]),
                batch_size=batch,
                shuffle=False,
            )
            readings, _ = fit(FederatedLoop(module), data, ROUNDS, limit_val_batches=0, **BARE)
        else:
            loader = DataLoader(dataset, batch_size=batch)
            readings, _ = fit(module, loader, ROUNDS, limit_val_batches=0, **BARE)
    rounds = [after.cpu - before.cpu for before, after in pairwise(readings[1:])]
    return median(rounds) / (CLIENTS * steps)


def measure(repeats: int, time: float) -> Iterator[Row]:
    """Yield rows under `COLUMNS`: medians over turns.

    Args:
        repeats: Largest number of turns of each number of steps.
        time: Seconds within which turns are begun, for all numbers of steps.
    """
    torch.set_num_threads(1)
    for steps in STEPS:
        own: list[float] = []
        plain: list[float] = []
        for _ in turns(repeats, time / len(STEPS)):
            own.append(seconds(steps, resnet(), federated=True))
            plain.append(seconds(steps, resnet(), federated=False))
        ratio = median(mine / its for mine, its in zip(own, plain, strict=True))
        yield str(steps), median(own), median(plain), ratio
