"""The floor: FedAvg as one would write it without any framework."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.workloads import Result, Samples, Workload, now


def floor(work: Workload) -> Result:
    train, test = work.samples()
    model, local = work.first_net(), work.first_net()
    clock = [now()]
    accuracy = 0.0
    for cohort in work.cohorts(work.rounds):
        start = [entry.clone() for entry in model.state_dict().values()]
        sums, total = [torch.zeros_like(entry) for entry in start], 0
        for client_id in cohort:
            copy_into(local, start)
            own = work.owned(client_id)
            train_client(local, work, (train[0][own.start : own.stop], train[1][own.start : own.stop]))
            total += len(own)
            for entry, value in zip(sums, local.state_dict().values(), strict=True):
                entry.add_(value, alpha=len(own))
        copy_into(model, [entry / total for entry in sums])
        accuracy = evaluate(model, test, work.eval_batch_size)
        clock.append(now())
    return clock, accuracy


@torch.no_grad()
def copy_into(net: nn.Module, entries: list[Tensor]) -> None:
    for target, value in zip(net.state_dict().values(), entries, strict=True):
        target.copy_(value)


def train_client(net: nn.Module, work: Workload, own: Samples) -> None:
    sgd = torch.optim.SGD(net.parameters(), work.lr, work.momentum, weight_decay=work.weight_decay)
    net.train()
    x, y = own
    for _ in range(work.local_epochs):
        for first in range(0, len(x), work.batch_size):
            batch = slice(first, first + work.batch_size)
            sgd.zero_grad()
            cross_entropy(net(x[batch]), y[batch]).backward()
            sgd.step()


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
