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
from bench.workloads import CLASSES
from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition

COLUMNS = ("steps a client", "cpu_s_per_step", "plain", "ratio")
STEPS = (1, 2, 5)
CLIENTS = 4
BATCH = 32
ROUNDS = 4


def resnet() -> LightningModule:
    """A user's module: torchvision's ResNet-18 with random weights, 11.2 million parameters."""

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


def seconds(steps: int, federated: bool, module: LightningModule, batch: int = BATCH, side: int = 32) -> float:
    """CPU seconds of a step: of a round of the federation, or an epoch of the plain fit, median after the first."""
    n = CLIENTS * steps * batch
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(n, 3, side, side, generator=g), torch.randint(CLASSES, (n,), generator=g))
    settings = {**BARE, "limit_val_batches": 0}
    with quiet(), warnings.catch_warnings(action="ignore"):
        if federated:
            parts = [list(range(first, first + steps * batch)) for first in range(0, n, steps * batch)]
            own = FederatedDataModule.from_datasets(
                data, num_clients=CLIENTS, partition=FixedPartition(parts), batch_size=batch, shuffle=False
            )
            read, _ = fit(FederatedLoop(module), own, ROUNDS, **settings)
        else:
            read, _ = fit(module, DataLoader(data, batch_size=batch), ROUNDS, **settings)
    return median(after[1] - before[1] for before, after in pairwise(read[1:])) / (CLIENTS * steps)


def measure(repeats: int, time: float) -> Iterator[tuple[str, *tuple[float, ...]]]:
    """Rows under `COLUMNS`: medians over turns, in so many seconds in all."""
    torch.set_num_threads(1)
    for steps in STEPS:
        pairs = [
            (seconds(steps, True, resnet()), seconds(steps, False, resnet())) for _ in turns(repeats, time / len(STEPS))
        ]
        own, plain = (median(column) for column in zip(*pairs, strict=True))
        yield str(steps), own, plain, median(a / b for a, b in pairs)
