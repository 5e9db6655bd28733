"""The floor: FedAvg, and FedRep, as one would write them without any framework."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.workloads import Result, Samples, Workload, now

HEAD = 2
"""Entries of the last layer, its weight and its bias."""


def floor(work: Workload) -> Result:
    train, test = work.samples()
    model, local = work.first_net(), work.first_net()
    clock = [now()]
    accuracy = 0.0
    kept = [entry.clone() for entry in model.state_dict().values()][-HEAD:]
    heads: dict[int, list[Tensor]] = {}
    for cohort in work.cohorts(work.rounds):
        if work.pause is not None:
            work.pause(accuracy)
        start = [entry.clone() for entry in model.state_dict().values()]
        sums, total = [torch.zeros_like(entry) for entry in start], 0
        for client_id in cohort:
            copy_into(local, [*start[:-HEAD], *heads.get(client_id, kept)] if work.personal_head else start)
            own = work.owned(client_id)
            train_client(local, work, (train[0][own.start : own.stop], train[1][own.start : own.stop]))
            total += len(own)
            for entry, value in zip(sums, local.state_dict().values(), strict=True):
                entry.add_(value, alpha=len(own))
            if work.personal_head:
                heads[client_id] = [entry.clone() for entry in local.state_dict().values()][-HEAD:]
        copy_into(model, [entry / total for entry in sums])
        accuracy = evaluate(model, test, work.eval_batch_size)
        clock.append(now())
    if work.pause is not None:
        work.pause(accuracy)
    return clock, accuracy


@torch.no_grad()
def copy_into(net: nn.Module, entries: list[Tensor]) -> None:
    for target, value in zip(net.state_dict().values(), entries, strict=True):
        target.copy_(value)


def train_client(net: nn.Module, work: Workload, own: Samples) -> None:
    net.train()
    parameters = list(net.parameters())
    for trained in [parameters[-HEAD:], parameters[:-HEAD]] if work.personal_head else [parameters]:
        for parameter in parameters if work.personal_head else ():
            parameter.requires_grad_(any(parameter is one for one in trained))
        train_parameters(net, work, own, trained)


def train_parameters(net: nn.Module, work: Workload, own: Samples, trained: list[nn.Parameter]) -> None:
    optimizer = work.optimizer(trained)
    x, y = own
    for _ in range(work.local_epochs):
        for first in range(0, len(x), work.batch_size):
            batch = slice(first, first + work.batch_size)
            optimizer.zero_grad()
            cross_entropy(net(x[batch]), y[batch]).backward()
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
