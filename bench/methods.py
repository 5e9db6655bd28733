"""Times of a method's local step, beside FedAvg's and beside its bare arithmetic.

Every fit is the `cnn` workload with fewer clients in the cohort, so that many methods fit into a few minutes. The floor
is made of bare PyTorch measured in the same run: a step with the same arithmetic beside a plain one.
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
"""Rows of FedKA's anchor batch at most: one per class."""
METHODS: dict[str, Callable[..., ClientModule]] = {
    "FedAvg": FedAvg,
    "FedAvg(module=)": FedAvg,
    "FedProx": partial(FedProx, mu=0.1),
    "FedNTD": FedNTD,
    "FedED": FedED,
    "FedKA": partial(FedKA, gamma=1.0),  # every class is non-dominant: ten anchors
    "FedCL": FedCL,
    "SAM": FedAvg,
    "Ditto": partial(Ditto, personal_epochs=EPOCHS),
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

        def configure_optimizers(self) -> Optimizer:
            return work.optimizer(self.parameters())

    return Plain()


def client(name: str, work: Workload) -> ClientModule:
    if name == "FedAvg(module=)":
        return FedAvg(module=plain_module(work))
    optimizer = partial(SAM, base=work.optimizer) if name == "SAM" else work.optimizer
    return METHODS[name](net=NETS[work.name], optimizer=optimizer)


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
    with quiet():
        fit(loop, data, work.rounds, timer, limit_val_batches=0, **BARE)
    return median(timer.taken[1:])


def floors(work: Workload, repeats: int = 15) -> dict[str, float]:
    """Bare steps that do each method's arithmetic, relative to a plain step: medians, measured in turn."""
    net = work.first_net()
    (x, y), _ = work.samples()
    x = x[: work.batch_size]
    y = y[: work.batch_size]
    sgd = work.optimizer(net.parameters())
    start = [p.detach().clone() for p in net.parameters()]
    kept = net(x[:ANCHOR]).detach()

    def pull() -> Tensor:
        terms = [mse_loss(p, s, reduction="sum") for p, s in zip(net.parameters(), start, strict=True)]
        return torch.stack(terms).sum()

    def weighted_pull() -> Tensor:
        squares = (mse_loss(p, s, reduction="none") for p, s in zip(net.parameters(), start, strict=True))
        return torch.stack([torch.dot(q.flatten(), s.flatten()) for q, s in zip(squares, start, strict=True)]).sum()

    def step(term: Callable[[], Tensor] | None = None, passes: int = 1) -> None:
        for _ in range(passes):
            sgd.zero_grad()
            loss = cross_entropy(net(x), y)
            (loss if term is None else loss + 0.1 * term()).backward()
        sgd.step()

    @torch.no_grad()
    def teacher() -> None:
        net(x)

    runs = {
        "step": step,
        "teacher": teacher,
        "FedProx": partial(step, pull),
        "FedCL": partial(step, weighted_pull),
        "FedKA": partial(step, lambda: (net(x[:ANCHOR]) - kept).square().sum()),
        "SAM": partial(step, passes=2),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
    found = {name: median(times[2:]) for name, times in taken.items()}
    asked = found["step"] + found["teacher"] / work.local_epochs  # in one epoch of all
    found |= {"FedNTD": asked, "FedED": asked, "Ditto": found["step"] + found["FedProx"]}
    return {name: found.get(name, found["step"]) / found["step"] for name in METHODS}


def measure(repeats: int, seconds: float) -> list[tuple[str, float, float, float, float]]:
    """Rows (method, seconds per local step, ratio to FedAvg's, floor of that ratio, ratio / floor): medians over turns.

    There are `repeats` turns, or as many as are done within `seconds`.

    What a client does once, such as loading a teacher, is spread over its steps.
    """
    work = replace(WORKLOADS["cnn"], cohort_size=COHORT, rounds=1, local_epochs=EPOCHS)
    steps = work.local_epochs * -(-work.client_samples // work.batch_size)
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    parts: list[dict[str, float]] = []
    for _ in turns(repeats, seconds):
        parts.append(floors(work))
        for name in METHODS:
            taken[name].append(seconds_per_client(name, work))
    rows = []
    for name, found in taken.items():
        ratio = median(own / base for own, base in zip(found, taken["FedAvg"], strict=True))
        floor = median(part[name] for part in parts)
        rows.append((name, median(found) / steps, ratio, floor, ratio / floor))
    return rows
