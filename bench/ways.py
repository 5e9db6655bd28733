"""Ways to run a round on a device, in plain PyTorch: a loop, all clients at once, and CUDA graphs of either."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.optim import SGD

from bench.workloads import CLASSES, WORKLOADS, Samples, Workload


def small_net() -> nn.Sequential:
    """Make a net to try the benchmark with."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, CLASSES)]
    return nn.Sequential(*layers)


def small_images() -> tuple[Samples, Samples]:
    """Return noise of 8×8 pixels in three colors: 10 samples for each of 100 clients."""
    x = torch.randn((1000, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    y = torch.arange(1000) % CLASSES
    return (x, y), (x[:10], y[:10])


SIZES = {
    "cnn": replace(WORKLOADS["cnn"], local_epochs=5, rounds=3, unmeasured=1),
    "small": replace(
        WORKLOADS["cnn"],
        net=small_net,
        samples=small_images,
        client_samples=10,
        batch_size=5,
        rounds=3,
        unmeasured=1,
    ),
}
"""Workloads by name. `small` is to try the benchmark with."""

Round = Callable[[], Any]
"""Runs a round."""


@dataclass(frozen=True)
class Case:
    """Describes the rounds that are measured.

    Args:
        work: The clients. Its cohort is that of a round.
        device: Device that trains them.
        precision: Name of a precision of `PRECISIONS`.
    """

    work: Workload
    device: torch.device
    precision: str

    @property
    def steps(self) -> int:
        """Number of steps of a client in a round."""
        return self.work.local_epochs * math.ceil(self.work.client_samples / self.work.batch_size)

    def cast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.precision == "bf16-mixed":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all clients of a round, (K, B, ...) and (K, B), on the device."""
        (x, y), _ = self.work.samples()
        inputs = self._by_client(x).split(self.work.batch_size, dim=1)
        labels = self._by_client(y).split(self.work.batch_size, dim=1)
        for _ in range(self.work.local_epochs):
            yield from zip(inputs, labels, strict=True)

    def _by_client(self, samples: Tensor) -> Tensor:
        """Give each client of the round its samples: (n, ...) -> (K, n_i, ...), on the device."""
        clients = self.work.cohort_size
        size = self.work.client_samples
        return samples[: clients * size].unflatten(0, (clients, size)).to(self.device)


class StackedStep:
    """Trains a round's clients at once, in place, so that a graph may be made of a step.

    Args:
        case: The clients, and what trains them.
    """

    def __init__(self, case: Case) -> None:
        clients = case.work.cohort_size
        self.case = case
        self.net = case.work.first_net().to(case.device)
        self.start = {name: value.detach() for name, value in self.net.named_parameters()}
        self.params = {name: value.expand((clients, *value.shape)).clone() for name, value in self.start.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.gradients = vmap(grad_and_value(self._loss))

    def _loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with self.case.cast():
            logits = functional_call(self.net, params, (x,))
        return F.cross_entropy(logits.float(), y)

    @torch.no_grad()
    def begin(self) -> None:
        """Set all clients back to the first weights."""
        for name, value in self.params.items():
            value.copy_(self.start[name])
            self.momentum[name].zero_()

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Take a step of all clients, on inputs (K, B, ...) and labels (K, B)."""
        work = self.case.work
        gradients, _ = self.gradients(self.params, x, y)
        for name, value in self.params.items():
            velocity = self.momentum[name]
            velocity.mul_(work.momentum).add_(gradients[name])
            velocity.add_(value, alpha=work.weight_decay)
            value.add_(velocity, alpha=-work.lr)


class Graph:
    """Has a step as a CUDA graph, on batches that are copied to where the graph reads them.

    Args:
        step: The step.
        x: Inputs of a batch.
        y: Labels of a batch.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> None:
        self.x = x.clone()
        self.y = y.clone()
        # CUDA wants some steps on another stream before it records one.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.x, self.y)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step(self.x, self.y)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()


def stacked(case: Case, graph: bool = False) -> Round:
    """Make a round of all clients at once.

    Args:
        case: The clients, and what trains them.
        graph: Whether a step is a CUDA graph.
    """
    all_clients = StackedStep(case)
    batches = list(case.batches())
    step: Callable[[Tensor, Tensor], None] = all_clients
    if graph:
        x_first, y_first = batches[0]
        step = Graph(all_clients, x_first, y_first)

    def run() -> None:
        all_clients.begin()
        for x, y in batches:
            step(x, y)

    return run


def graphed(case: Case) -> Round:
    """Make a round of one client after the other, in which each step is a CUDA graph: a stack of one client."""
    alone = replace(case.work, cohort_size=1)
    one_client = StackedStep(replace(case, work=alone))
    batches = list(case.batches())
    x_first, y_first = batches[0]
    graph = Graph(one_client, x_first[:1], y_first[:1])

    def run() -> None:
        for client in range(case.work.cohort_size):
            one_client.begin()
            own = slice(client, client + 1)
            for x, y in batches:
                graph(x[own], y[own])

    return run


def bare(case: Case) -> Round:
    """Make a round of one client after the other, in plain PyTorch."""
    work = case.work
    net = work.first_net().to(case.device)
    batches = list(case.batches())
    start = [value.detach().clone() for value in net.parameters()]

    def run() -> None:
        for client in range(work.cohort_size):
            with torch.no_grad():
                for value, first in zip(net.parameters(), start, strict=True):
                    value.copy_(first)
            sgd = SGD(net.parameters(), lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay)
            for x, y in batches:
                sgd.zero_grad()
                with case.cast():
                    logits = net(x[client])
                F.cross_entropy(logits.float(), y[client]).backward()
                sgd.step()

    return run
