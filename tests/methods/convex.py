"""Quadratic clients with a known optimum and states of the store, for the tests of SCAFFOLD, FedDyn and FedCurv."""

import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import FixedPartition, TensorSource
from tests.golden.end_to_end import Quadratic
from tests.toys import fit, sgd


def quadratics(num_clients=4, dim=3, seed=0):
    """Return A (N, d, d) and b (N, d) of ½(w−b)ᵀA(w−b), and the minimum of their sum (d,), float64."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(num_clients, dim, dim, generator=g).double()
    b = torch.randn(num_clients, dim, generator=g).double()
    A = root @ root.mT / dim + 0.5 * torch.eye(dim).double()
    optimum = torch.linalg.solve(A.sum(0), (A @ b.unsqueeze(2)).sum(0))
    return A, b, optimum.squeeze(1)


def solve(client, rounds, schedule=None, *, lr=0.05, momentum=0.0, **settings):
    """Fit a client to the quadratics by full-batch steps.

    Args:
        client: Makes the client of `module`.
        rounds: Number of rounds.
        schedule: Cohorts that take turns. None means all clients in every round.
        lr: Learning rate of the clients.
        momentum: Momentum of the clients.
        settings: Further settings of the loop.

    Returns:
        The loop, and the distance of its weights to the optimum.
    """
    A, b, optimum = quadratics()
    cohorts = None
    if schedule:
        cohorts = [schedule[round_idx % len(schedule)] for round_idx in range(rounds)]
    data = FederatedDataModule(
        TensorSource((A, b), (A, b)),
        num_clients=len(A),
        partition=FixedPartition([[i] for i in range(len(A))]),
        schedule=cohorts,
        batch_size="full",
    )
    settings = {"local_epochs": [1, 4, 2, 6], "weighting": "uniform", **settings}
    module = Quadratic(torch.zeros(A.shape[1]).double(), sgd(lr, momentum))
    loop = fit(client(module=module), rounds, data, precision="64-true", **settings)
    return loop, float((module.w - optimum).norm())


def mean_in_memory(loop, name):
    """Return the mean over all N clients of a state in their memory. A client without it counts as zeros."""
    total = {entry: torch.zeros_like(value, dtype=torch.float64) for entry, value in loop.client.params().items()}
    for client_id in range(loop.data.num_clients):
        memory, *_ = loop.store.record(client_id)
        for entry, value in memory.get(name, {}).items():
            total[entry] += value.double() / loop.data.num_clients
    return total
