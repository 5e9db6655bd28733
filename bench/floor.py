"""The floor: FedAvg, FedRep and Ditto, without any framework."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bench.workloads import LAM, Result, Samples, Workload, now

HEAD = 2
"""Entries of the last layer, its weight and its bias."""

Entries = list[Tensor]
"""Entries of a net, in the order of its state dict."""


def floor(work: Workload) -> Result:
    """Run the rounds of a workload."""
    (x, y), test = work.samples()
    model = work.first_net()
    local = work.first_net()
    readings = [now()]
    accuracy = 0.0
    first = copied(model)
    kept = dict[int, Entries]()
    for cohort in work.cohorts(work.rounds):
        if work.pause is not None:
            work.pause(accuracy)
        start = copied(model)
        sums = [torch.zeros_like(entry) for entry in start]
        total = 0
        for client_id in cohort:
            own = work.owned(client_id)
            samples = (x[own.start : own.stop], y[own.start : own.stop])
            of_client = kept.get(client_id, first)
            kept[client_id] = CLIENTS[work.method](local, work=work, own=samples, start=start, kept=of_client)
            total += len(own)
            for entry, value in zip(sums, local.state_dict().values(), strict=True):
                entry.add_(value, alpha=len(own))
        copy_into(model, [entry / total for entry in sums])
        accuracy = evaluate(model, test, work.eval_batch_size)
        readings.append(now())
    if work.pause is not None:
        work.pause(accuracy)
    return readings, accuracy


def copied(net: nn.Module) -> Entries:
    """Copy the entries of a net."""
    return [entry.clone() for entry in net.state_dict().values()]


@torch.no_grad()
def copy_into(net: nn.Module, entries: Sequence[Tensor]) -> None:
    """Write entries into a net."""
    for target, value in zip(net.state_dict().values(), entries, strict=True):
        target.copy_(value)


class Client(Protocol):
    """Trains a client of a method."""

    def __call__(self, net: nn.Module, *, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
        """Train a client, so that the net holds what the client sends.

        Args:
            net: The net.
            work: The workload.
            own: Samples of the client.
            start: Entries of the global model.
            kept: Entries that the client has kept, at first those of the first global model.

        Returns:
            The entries that the client keeps.
        """


def fedavg(net: nn.Module, *, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """Train a client of FedAvg, which keeps nothing."""
    copy_into(net, start)
    train_parameters(net, work=work, own=own, trained=list(net.parameters()))
    return kept


def fedrep(net: nn.Module, *, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """Train a client of FedRep: its own head first, then the body."""
    copy_into(net, [*start[:-HEAD], *kept[-HEAD:]])
    parameters = list(net.parameters())
    for trained in (parameters[-HEAD:], parameters[:-HEAD]):
        for parameter in parameters:
            parameter.requires_grad_(any(parameter is one for one in trained))
        train_parameters(net, work=work, own=own, trained=trained)
    return copied(net)[-HEAD:]


def ditto(net: nn.Module, *, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """Train a client of Ditto: the global model, then its own model that is pulled to the global one as it came."""
    copy_into(net, start)
    train_parameters(net, work=work, own=own, trained=list(net.parameters()))
    sent = copied(net)
    copy_into(net, kept)
    train_parameters(net, work=work, own=own, trained=list(net.parameters()), pulled_to=start)
    own_model = copied(net)
    copy_into(net, sent)
    return own_model


CLIENTS: dict[str, Client] = {"FedAvg": fedavg, "FedRep": fedrep, "Ditto": ditto}
"""Clients by method."""


def train_parameters(
    net: nn.Module, *, work: Workload, own: Samples, trained: list[nn.Parameter], pulled_to: Entries | None = None
) -> None:
    """Train parameters of a net on the samples of a client.

    Args:
        net: The net.
        work: The workload.
        own: Samples of the client.
        trained: The parameters.
        pulled_to: Entries to which λ/2 of the squared distance pulls the parameters. None: nothing pulls them.
    """
    net.train()
    optimizer = work.optimizer(trained)
    x, y = own
    for _ in range(work.local_epochs):
        for first in range(0, len(x), work.batch_size):
            batch = slice(first, first + work.batch_size)
            optimizer.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch])
            if pulled_to is not None:
                loss = loss + LAM / 2 * squared_distance(trained, pulled_to)
            loss.backward()
            optimizer.step()


def squared_distance(parameters: list[nn.Parameter], entries: Entries) -> Tensor:
    """Compute the squared distance of parameters from entries, a scalar."""
    pairs = zip(parameters, entries, strict=True)
    return torch.stack([mse_loss(parameter, entry, reduction="sum") for parameter, entry in pairs]).sum()


@torch.no_grad()
def evaluate(net: nn.Module, test: Samples, batch_size: int) -> float:
    """Compute the accuracy of a net, in [0, 1].

    Args:
        net: The net.
        test: Test samples.
        batch_size: Samples per batch.
    """
    net.eval()
    x, y = test
    hits = 0
    for first in range(0, len(x), batch_size):
        batch = slice(first, first + batch_size)
        predicted = net(x[batch]).argmax(1)
        hits += int((predicted == y[batch]).sum())
    return hits / len(x)


VARIANTS = {"floor": floor}
