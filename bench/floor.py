"""The floor: FedAvg, FedRep and Ditto, as one would write them without any framework."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bench.workloads import LAM, Result, Samples, Workload, now

HEAD = 2
"""Entries of the last layer, its weight and its bias."""
Entries = list[Tensor]


def floor(work: Workload) -> Result:
    train, test = work.samples()
    model = work.first_net()
    local = work.first_net()
    clock = [now()]
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
            samples = train[0][own.start : own.stop], train[1][own.start : own.stop]
            kept[client_id] = CLIENTS[work.method](local, work, samples, start, kept.get(client_id, first))
            total += len(own)
            for entry, value in zip(sums, local.state_dict().values(), strict=True):
                entry.add_(value, alpha=len(own))
        copy_into(model, [entry / total for entry in sums])
        accuracy = evaluate(model, test, work.eval_batch_size)
        clock.append(now())
    if work.pause is not None:
        work.pause(accuracy)
    return clock, accuracy


def copied(net: nn.Module) -> Entries:
    return [entry.clone() for entry in net.state_dict().values()]


@torch.no_grad()
def copy_into(net: nn.Module, entries: Sequence[Tensor]) -> None:
    for target, value in zip(net.state_dict().values(), entries, strict=True):
        target.copy_(value)


def fedavg(net: nn.Module, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """Train a client: afterwards the net holds what it sends; what it keeps is returned."""
    copy_into(net, start)
    train_parameters(net, work, own, list(net.parameters()))
    return kept


def fedrep(net: nn.Module, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """Its own head first, then the body."""
    copy_into(net, [*start[:-HEAD], *kept[-HEAD:]])
    parameters = list(net.parameters())
    for trained in (parameters[-HEAD:], parameters[:-HEAD]):
        for parameter in parameters:
            parameter.requires_grad_(any(parameter is one for one in trained))
        train_parameters(net, work, own, trained)
    return [entry.clone() for entry in net.state_dict().values()][-HEAD:]


def ditto(net: nn.Module, work: Workload, own: Samples, start: Entries, kept: Entries) -> Entries:
    """The global model, then one of its own that is pulled to the global one as it came."""
    fedavg(net, work, own, start, kept)
    sent = copied(net)
    copy_into(net, kept)
    train_parameters(net, work, own, list(net.parameters()), pulled_to=start)
    kept = copied(net)
    copy_into(net, sent)
    return kept


CLIENTS: dict[str, Callable[[nn.Module, Workload, Samples, Entries, Entries], Entries]] = {
    "FedAvg": fedavg,
    "FedRep": fedrep,
    "Ditto": ditto,
}


def train_parameters(
    net: nn.Module, work: Workload, own: Samples, trained: list[nn.Parameter], pulled_to: Entries | None = None
) -> None:
    net.train()
    optimizer = work.optimizer(trained)
    x, y = own
    for _ in range(work.local_epochs):
        for first in range(0, len(x), work.batch_size):
            batch = slice(first, first + work.batch_size)
            optimizer.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch])
            if pulled_to is not None:
                pairs = zip(trained, pulled_to, strict=True)
                loss = loss + LAM / 2 * torch.stack([mse_loss(p, s, reduction="sum") for p, s in pairs]).sum()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def evaluate(net: nn.Module, test: Samples, batch_size: int) -> float:
    net.eval()
    x, y = test
    hits = 0
    for first in range(0, len(x), batch_size):
        batch = slice(first, first + batch_size)
        hits += int((net(x[batch]).argmax(1) == y[batch]).sum())
    return hits / len(x)


VARIANTS = {"floor": floor}
