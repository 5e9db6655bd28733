"""The clock of a module's schedulers: CPU time of late rounds of a run beside that of its early ones."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from bench.blocks import quiet, turns
from bench.federated import BARE, clients_data, fit
from bench.tables import Row
from bench.workloads import CLASSES, WORKLOADS
from fl_lightning import FederatedLoop

COLUMNS = ("schedule", "early_s", "late_s", "late_over_early", "over_none")
ROUNDS = 200
MEASURED = 20
"""Number of rounds that are measured after the first round, and at the end."""

Scheduler = Callable[[Optimizer, int], LRScheduler]
"""Makes a scheduler of an optimizer and the number of steps of the run."""


def one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Make a schedule over all steps of the run."""
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Make a schedule that falls in proportion to the number of steps or epochs."""
    return LambdaLR(optimizer, lambda count: 1 - count / (steps + 1))


SCHEDULES: dict[str, tuple[Scheduler | None, str]] = {
    "none": (None, "step"),
    "OneCycleLR by step": (one_cycle, "step"),
    "LambdaLR by step": (linear, "step"),
    "LambdaLR by epoch": (linear, "epoch"),
}
"""Schedulers by name, with the interval at which they step: `step` or `epoch`."""


class Scheduled(LightningModule):
    """Stands for a user's module: a net of 64 units with momentum and a scheduler."""

    def __init__(self, scheduler: Scheduler | None, interval: str) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.interval = interval
        layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.scheduler is None:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = self.scheduler(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def seconds(scheduler: Scheduler | None, interval: str, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the median CPU seconds of the early rounds and of the late ones of a run over the clients of `adam`.

    Args:
        scheduler: Makes the scheduler. None: there is none.
        interval: Interval at which the scheduler steps: `step` or `epoch`.
        rounds: Number of rounds.
    """
    torch.manual_seed(0)
    work = replace(WORKLOADS["adam"], rounds=rounds)
    loop = FederatedLoop(Scheduled(scheduler, interval), local_epochs=work.local_epochs)
    with quiet(), warnings.catch_warnings(action="ignore"):
        readings, _ = fit(loop, clients_data(work), rounds, limit_val_batches=0, **BARE)
    times = [after.cpu - before.cpu for before, after in pairwise(readings)]
    measured = min(MEASURED, len(times) // 2)
    return median(times[1 : 1 + measured]), median(times[-measured:])


def measure(repeats: int, time: float) -> Iterator[Row]:
    """Yield a row for each schedule under `COLUMNS`: medians over turns.

    Args:
        repeats: Largest number of turns.
        time: Seconds within which turns are begun.
    """
    torch.set_num_threads(1)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEDULES}
    for _ in turns(repeats, time):
        for name, (scheduler, interval) in SCHEDULES.items():
            taken[name].append(seconds(scheduler, interval))
    late_of_none = [late for _, late in taken["none"]]
    for name, pairs in taken.items():
        growth = median(late / early for early, late in pairs)
        late_rounds = [late for _, late in pairs]
        over_none = median(own / plain for own, plain in zip(late_rounds, late_of_none, strict=True))
        yield name, median(early for early, _ in pairs), median(late_rounds), growth, over_none
