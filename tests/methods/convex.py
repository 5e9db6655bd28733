"""What the tests of SCAFFOLD, FedDyn and FedCurv share: quadratic clients with a known optimum, states of the store."""

from functools import partial

import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import FixedPartition, TensorSource
from tests.golden.end_to_end import Quadratic
from tests.toys import fit, sgd


def quadratics(num_clients=4, dim=3, seed=0):
    """A (N, d, d) and b (N, d) of ½(w−b)ᵀA(w−b), and the minimum of their sum, float64."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(num_clients, dim, dim, generator=g).double()
    b = torch.randn(num_clients, dim, generator=g).double()
    A = root @ root.mT / dim + 0.5 * torch.eye(dim).double()
    return A, b, torch.linalg.solve(A.sum(0), (A @ b.unsqueeze(2)).sum(0)).squeeze(1)


def solve(client, rounds, schedule=None, lr=0.05, momentum=0.0, **settings):
    """Fit `client(module=…)` to the quadratics by full-batch steps; the loop and its distance to the optimum."""
    A, b, optimum = quadratics()
    data = FederatedDataModule(
        TensorSource((A, b), (A, b)),
        num_clients=len(A),
        partition=FixedPartition([[i] for i in range(len(A))]),
        schedule=schedule and [schedule[r % len(schedule)] for r in range(rounds)],
        batch_size="full",
    )
    settings = {"local_epochs": [1, 4, 2, 6], "weighting": "uniform", **settings}
    module = Quadratic(torch.zeros(A.shape[1]).double(), partial(sgd(lr, momentum)))
    loop = fit(client(module=module), rounds, data, precision="64-true", **settings)
    return loop, float((module.w - optimum).norm())


def mean_in_memory(loop, name):
    """The mean over all N clients of what they keep under `name`; zeros where a client has nothing."""
    total = {entry: torch.zeros_like(value, dtype=torch.float64) for entry, value in loop.client.params().items()}
    for client_id in range(loop.data.num_clients):
        for entry, value in loop.store.record(client_id)[0].get(name, {}).items():
            total[entry] += value.double() / loop.data.num_clients
    return total
