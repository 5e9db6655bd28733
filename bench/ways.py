"""Ways to run a round on a device, in plain PyTorch: a loop, all clients at once, and CUDA graphs of either."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.optim import SGD

from bench.workloads import CLASSES, WORKLOADS, Workload


def small_net() -> nn.Sequential:
    """A net to try the benchmark with."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, CLASSES))


def small_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Noise of 8×8 in three colours: 10 samples for each of 100 clients."""
    x = torch.randn(1000, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(1000) % CLASSES
    return (x, y), (x[:10], y[:10])


SIZES = {
    "cnn": replace(WORKLOADS["cnn"], local_epochs=5, rounds=3, unmeasured=1),
    "small": replace(
        WORKLOADS["cnn"], net=small_net, samples=small_images, client_samples=10, batch_size=5, rounds=3, unmeasured=1
    ),
}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        work: the clients; its cohort are those of a round.
        device: that trains them.
        precision: of `PRECISIONS`.
    """

    work: Workload
    device: torch.device
    precision: str

    @property
    def steps(self) -> int:
        """Steps of a client in a round."""
        return self.work.local_epochs * -(-self.work.client_samples // self.work.batch_size)

    def cast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass."""
        mixed = self.precision == "bf16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all clients of a round, (K, B, ...) and (K, B), on the device."""
        clients = self.work.cohort_size
        size = self.work.client_samples
        (x, y), _ = self.work.samples()
        x, y = (of[: clients * size].unflatten(0, (clients, size)).to(self.device) for of in (x, y))
        for _ in range(self.work.local_epochs):
            yield from zip(x.split(self.work.batch_size, 1), y.split(self.work.batch_size, 1), strict=True)


class StackedStep:
    """Trains a round's clients at once; all that it changes stays where it is, so that a graph may be made of it."""

    def __init__(self, case: Case) -> None:
        net = case.work.first_net().to(case.device)
        work = case.work
        self.case = case
        self.net = net
        self.start = {name: value.detach() for name, value in net.named_parameters()}
        self.params = {n: value.expand(work.cohort_size, *value.shape).clone() for n, value in self.start.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.gradients = vmap(grad_and_value(self._loss))

    def _loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with self.case.cast():
            logits = functional_call(self.net, params, (x,))
        return F.cross_entropy(logits.float(), y)

    @torch.no_grad()
    def begin(self) -> None:
        for name, value in self.params.items():
            value.copy_(self.start[name])
            self.momentum[name].zero_()

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> None:
        gradients, _ = self.gradients(self.params, x, y)
        for name, value in self.params.items():
            velocity = self.momentum[name].mul_(self.case.work.momentum).add_(gradients[name])
            value.add_(velocity.add_(value, alpha=self.case.work.weight_decay), alpha=-self.case.work.lr)


class Graph:
    """A step as a CUDA graph, on batches that are copied to where it reads them."""

    def __init__(self, step: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> None:
        self.x = x.clone()
        self.y = y.clone()
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


Round = Callable[[], Any]


def stacked(case: Case, graph: bool = False) -> Round:
    """A round of all clients at once."""
    own = StackedStep(case)
    batches = list(case.batches())
    step: Callable[[Tensor, Tensor], None] = Graph(own, *batches[0]) if graph else own

    def run() -> None:
        own.begin()
        for x, y in batches:
            step(x, y)

    return run


def graphed(case: Case) -> Round:
    """A round of one client after the other, each step a graph: a stack of one."""
    one = StackedStep(replace(case, work=replace(case.work, cohort_size=1)))
    batches = list(case.batches())
    graph = Graph(one, *(of[:1] for of in batches[0]))

    def run() -> None:
        for client in range(case.work.cohort_size):
            one.begin()
            for x, y in batches:
                graph(x[client : client + 1], y[client : client + 1])

    return run


def bare(case: Case) -> Round:
    """A round of one client after the other, as one would write it."""
    work = case.work
    net = case.work.first_net().to(case.device)
    batches = list(case.batches())
    start = [value.detach().clone() for value in net.parameters()]

    def run() -> None:
        for client in range(work.cohort_size):
            with torch.no_grad():
                for value, first in zip(net.parameters(), start, strict=True):
                    value.copy_(first)
            sgd = SGD(net.parameters(), work.lr, work.momentum, weight_decay=work.weight_decay)
            for x, y in batches:
                sgd.zero_grad()
                with case.cast():
                    logits = net(x[client])
                F.cross_entropy(logits.float(), y[client]).backward()
                sgd.step()

    return run
