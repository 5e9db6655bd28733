"""What a method's local step costs beside FedAvg's, and what the arithmetic alone would cost.

Every fit is the `cnn` workload with fewer clients in the cohort, so that many methods fit into a few minutes. The floor
is made of pieces of bare PyTorch measured in the same run: a whole step, a forward pass, a step on an anchor's rows,
and a quadratic term over the parameters.
"""

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
from torch.optim import SGD

from bench.federated import BARE, NETS, clients_data, fit
from bench.workloads import CLASSES, WORKLOADS, Workload
from fl_lightning import ClientModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.methods import SAM, FedAvg, FedCL, FedED, FedKA, FedNTD, FedProx
from fl_lightning.types import ClientUpdate

COHORT = 3
ANCHOR = 10
"""Rows of FedKA's anchor batch at most: one per class."""
METHODS: dict[str, Callable[..., ClientModule]] = {
    "FedAvg": FedAvg,
    "FedAvg(module=)": FedAvg,
    "FedProx": partial(FedProx, mu=0.1),
    "FedNTD": FedNTD,
    "FedED": FedED,
    "FedKA": FedKA,
    "FedCL": FedCL,
    "SAM": FedAvg,
}


def plain_module(work: Workload) -> Any:
    """The net as a user's own LightningModule."""

    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.first_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("train/ce", loss)
            return loss

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), work.lr, work.momentum, weight_decay=work.weight_decay)

    return Plain()


def client(name: str, work: Workload) -> ClientModule:
    if name == "FedAvg(module=)":
        return FedAvg(module=plain_module(work))
    sgd = partial(SGD, lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay)
    return METHODS[name](net=NETS[work.name], optimizer=partial(SAM, base=sgd) if name == "SAM" else sgd)


class LocalTime(Callback):
    """Seconds between a client's start and its update, of each client, whatever the server does meanwhile."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def on_client_start(self, trainer: Trainer, loop: FederatedLoop, client_id: int) -> None:
        self.started = time.perf_counter()

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        self.taken.append(time.perf_counter() - self.started)


def seconds_per_client(name: str, work: Workload) -> float:
    """Median over the clients after the first, which warms up."""
    x, y = work.samples()[1]
    data = clients_data(work, proxy=TensorSource((x[:ANCHOR], y[:ANCHOR]), (x, y), num_classes=CLASSES))
    loop = FederatedLoop(client(name, work), local_epochs=work.local_epochs)
    timer = LocalTime()
    fit(loop, data, work.rounds, timer, limit_val_batches=0, **BARE)
    return median(timer.taken[1:])


def pieces(work: Workload) -> dict[str, float]:
    """Seconds of a whole step, a forward pass, a step on an anchor, and a quadratic term over the parameters."""
    net = work.first_net()
    (x, y), _ = work.samples()
    x, y = x[: work.batch_size], y[: work.batch_size]
    sgd = SGD(net.parameters(), work.lr, work.momentum, weight_decay=work.weight_decay)
    start = [p.detach().clone() for p in net.parameters()]

    def train(rows: int, step: bool = True) -> None:
        sgd.zero_grad()
        cross_entropy(net(x[:rows]), y[:rows]).backward()
        if step:
            sgd.step()

    def forward() -> None:
        with torch.no_grad():
            net(x)

    def pull(weighted: bool) -> None:
        sgd.zero_grad()
        total = torch.zeros(())
        for p, s in zip(net.parameters(), start, strict=True):
            if weighted:
                total = total + torch.dot(mse_loss(p, s, reduction="none").flatten(), s.flatten())
            else:
                total = total + mse_loss(p, s, reduction="sum")
        total.backward()

    work_of = {
        "step": partial(train, work.batch_size),
        "forward": forward,
        "anchor": partial(train, ANCHOR, step=False),
        "pull": partial(pull, weighted=False),
        "weighted": partial(pull, weighted=True),
    }
    return {name: timed(run) for name, run in work_of.items()}


def timed(run: Callable[[], None], repeats: int = 12) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def floors(found: dict[str, float], epochs: int) -> dict[str, float]:
    """The arithmetic floor of every method, relative to a plain step; a teacher is asked in one epoch of `epochs`."""
    step, teacher = found["step"], found["forward"] / epochs
    extra = {
        "FedProx": found["pull"],
        "FedNTD": teacher,
        "FedED": teacher,
        "FedKA": found["anchor"],
        "FedCL": found["weighted"],
        "SAM": step,
    }
    return {name: 1 + extra.get(name, 0.0) / step for name in METHODS}


def measure(repeats: int) -> list[tuple[str, float, float, float, float]]:
    """Rows (method, seconds per local step, ratio to FedAvg's, floor of that ratio, ratio / floor): medians over turns.

    What a client does once, such as loading a teacher, is spread over its steps.
    """
    work = replace(WORKLOADS["cnn"], cohort_size=COHORT, rounds=1)
    steps = work.local_epochs * -(-work.client_samples // work.batch_size)
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    parts: list[dict[str, float]] = []
    for _ in range(repeats):
        parts.append(floors(pieces(work), work.local_epochs))
        for name in METHODS:
            taken[name].append(seconds_per_client(name, work))
    rows = []
    for name, found in taken.items():
        ratio = median(own / base for own, base in zip(found, taken["FedAvg"], strict=True))
        floor = median(part[name] for part in parts)
        rows.append((name, median(found) / steps, ratio, floor, ratio / floor))
    return rows
