"""Times of a method's local step, beside FedAvg's and beside its bare arithmetic.

Every fit is the `cnn` workload with fewer clients in the cohort, so that many methods fit into a few minutes. The floor
is bare PyTorch that is measured in the same run: a step with the same arithmetic beside a plain one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

from bench.blocks import quiet, turns
from bench.federated import BARE, NETS, clients_data, fit
from bench.workloads import CLASSES, WORKLOADS, Workload
from fl_lightning import ClientModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.methods import SAM, Ditto, FedAvg, FedCL, FedED, FedKA, FedNTD, FedProx
from fl_lightning.types import ClientUpdate

COHORT = 3
EPOCHS = 5
ANCHOR = 10
"""Largest number of rows of FedKA's anchor batch: one per class."""

METHODS: dict[str, Callable[..., ClientModule]] = {
    "FedAvg": FedAvg,
    "FedAvg(module=)": FedAvg,
    "FedProx": partial(FedProx, mu=0.1),
    "FedNTD": FedNTD,
    "FedED": FedED,
    # Every class is non-dominant, so that there are ten anchors.
    "FedKA": partial(FedKA, gamma=1.0),
    "FedCL": FedCL,
    "SAM": FedAvg,
    "Ditto": partial(Ditto, personal_epochs=EPOCHS),
}


def plain_module(work: Workload) -> Any:
    """Make a user's own LightningModule of the net of a workload."""

    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.first_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("train/ce", loss)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return work.optimizer(self.parameters())

    return Plain()


def client(name: str, work: Workload) -> ClientModule:
    """Make the client of a method on the net of a workload."""
    if name == "FedAvg(module=)":
        return FedAvg(module=plain_module(work))
    optimizer = partial(SAM, base=work.optimizer) if name == "SAM" else work.optimizer
    return METHODS[name](net=NETS[work.name], optimizer=optimizer)


class LocalTime(Callback):
    """Times each client from its start to its update."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def on_client_start(self, trainer: Trainer, loop: FederatedLoop, client_id: int) -> None:
        self.started = time.perf_counter()

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        self.taken.append(time.perf_counter() - self.started)


def seconds_per_client(name: str, work: Workload) -> float:
    """Return the median seconds of the clients after the first, which warms up.

    Args:
        name: Name of the method.
        work: The workload.
    """
    _, (x, y) = work.samples()
    proxy = TensorSource((x[:ANCHOR], y[:ANCHOR]), (x, y), num_classes=CLASSES)
    data = clients_data(work, proxy=proxy)
    loop = FederatedLoop(client(name, work), local_epochs=work.local_epochs)
    timer = LocalTime()
    with quiet():
        fit(loop, data, work.rounds, callbacks=[timer], limit_val_batches=0, **BARE)
    return median(timer.taken[1:])


class BareSteps:
    """Takes steps with the arithmetic of methods, in bare PyTorch.

    Args:
        work: The workload.
    """

    def __init__(self, work: Workload) -> None:
        (x, y), _ = work.samples()
        self.net = work.first_net()
        self.x = x[: work.batch_size]
        self.y = y[: work.batch_size]
        self.optimizer = work.optimizer(self.net.parameters())
        self.start = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.kept = self.net(self.x[:ANCHOR]).detach()

    def runs(self) -> dict[str, Callable[[], None]]:
        """Return the steps by name: a plain step, a teacher's forward pass, and steps of methods."""
        return {
            "step": self.step,
            "teacher": self.teach,
            "FedProx": partial(self.step, self.pull),
            "FedCL": partial(self.step, self.weighted_pull),
            "FedKA": partial(self.step, self.anchor),
            "SAM": partial(self.step, passes=2),
        }

    def step(self, term: Callable[[], Tensor] | None = None, passes: int = 1) -> None:
        """Take a step.

        Args:
            term: Computes a term of the loss. None: there is no term besides the cross entropy.
            passes: Number of forward and backward passes.
        """
        for _ in range(passes):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.net(self.x), self.y)
            if term is not None:
                loss = loss + 0.1 * term()
            loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def teach(self) -> None:
        """Make the forward pass of a teacher."""
        self.net(self.x)

    def pull(self) -> Tensor:
        """Compute the squared distance from the first weights."""
        pairs = zip(self.net.parameters(), self.start, strict=True)
        terms = [mse_loss(parameter, first, reduction="sum") for parameter, first in pairs]
        return torch.stack(terms).sum()

    def weighted_pull(self) -> Tensor:
        """Compute the squared distance from the first weights with a weight for each parameter."""
        terms: list[Tensor] = []
        for parameter, first in zip(self.net.parameters(), self.start, strict=True):
            squares = mse_loss(parameter, first, reduction="none")
            terms.append(torch.dot(squares.flatten(), first.flatten()))
        return torch.stack(terms).sum()

    def anchor(self) -> Tensor:
        """Compute the squared distance from the first outputs on the anchors."""
        return (self.net(self.x[:ANCHOR]) - self.kept).square().sum()


def floors(work: Workload, repeats: int = 15) -> dict[str, float]:
    """Measure bare steps that do each method's arithmetic, relative to a plain step: medians, measured in turn.

    Args:
        work: The workload.
        repeats: Number of turns. The first two warm up.

    Returns:
        The floor of the ratio to FedAvg's step by method.
    """
    runs = BareSteps(work).runs()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
    seconds = {name: median(times[2:]) for name, times in taken.items()}
    plain = seconds["step"]
    # A teacher is asked in one epoch of all.
    taught = plain + seconds["teacher"] / work.local_epochs
    seconds["FedNTD"] = taught
    seconds["FedED"] = taught
    seconds["Ditto"] = plain + seconds["FedProx"]
    return {name: seconds.get(name, plain) / plain for name in METHODS}


def measure(repeats: int, seconds: float) -> list[tuple[str, float, float, float, float]]:
    """Measure the methods: medians over turns.

    Work that a client does once, such as loading a teacher, is spread over its steps.

    Args:
        repeats: Largest number of turns.
        seconds: Seconds within which turns are begun.

    Returns:
        Rows of method, seconds per local step, ratio to FedAvg's, floor of that ratio, and ratio over floor.
    """
    work = replace(WORKLOADS["cnn"], cohort_size=COHORT, rounds=1, local_epochs=EPOCHS)
    steps = work.local_epochs * math.ceil(work.client_samples / work.batch_size)
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    floors_of_turns: list[dict[str, float]] = []
    for _ in turns(repeats, seconds):
        floors_of_turns.append(floors(work))
        for name in METHODS:
            taken[name].append(seconds_per_client(name, work))
    rows = []
    for name, times in taken.items():
        ratio = median(own / base for own, base in zip(times, taken["FedAvg"], strict=True))
        floor = median(of_turn[name] for of_turn in floors_of_turns)
        rows.append((name, median(times) / steps, ratio, floor, ratio / floor))
    return rows
