"""fluke's FedAVG, FedRep and Ditto on the floor's work, without its own evaluation.

Clients of FedAVG are not persistent, which makes fluke fast here. Clients of the others must keep what is theirs, and
begin their optimizers anew. fluke steps Ditto's own models without momentum.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.ditto import Ditto, DittoClient
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedrep import FedRep, FedRepClient, FedRepServer
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.server import Server
from torch import nn

from bench.floor import evaluate
from bench.workloads import LAM, Result, Workload, now


class Fixed:
    """Makes the clients of a server those of the workload, round by round."""

    cohorts: list[list[int]]
    clients: Sequence[Any]

    def get_eligible_clients(self, share: float) -> list[Any]:
        return [self.clients[client_id] for client_id in self.cohorts.pop(0)]


class AvgServer(Fixed, Server):  # type: ignore[misc]
    """Is the server of FedAVG and Ditto with the workload's cohorts."""


class RepServer(Fixed, FedRepServer):  # type: ignore[misc]
    """Is the server of FedRep with the workload's cohorts."""


class Anew:
    """Makes a client begin its optimizers anew each round, as in the papers."""

    def fit(self, override_local_epochs: int = 0) -> Any:
        self.optimizer = None
        self.pers_optimizer = None
        return super().fit(override_local_epochs)  # type: ignore[misc]


class RepClient(Anew, FedRepClient):  # type: ignore[misc]
    """Is a client of FedRep."""


class OwnClient(Anew, DittoClient):  # type: ignore[misc]
    """Is a client of Ditto."""


class Timed:
    """Evaluates the global model after each round in fluke's place, reads the clock, and pauses."""

    work: Workload
    server: Any

    def begin(self) -> None:
        """Read the clock for the first time."""
        self.clock = [now()]
        self.accuracy = 0.0
        self.net = self.work.first_net()
        if self.work.pause is not None:
            self.work.pause(self.accuracy)

    def _compute_evaluation(self, round: int, eligible: Sequence[Any]) -> None:
        entries = list(self.server.model.state_dict().values())
        if self.work.method == "FedRep":
            # The floor evaluates the mean of the heads.
            heads = [client.model.get_local().state_dict().values() for client in eligible]
            entries += [torch.stack(values).mean(0) for values in zip(*heads, strict=True)]
        named = zip(self.net.state_dict(), entries, strict=True)
        self.net.load_state_dict(dict(named))
        _, test = self.work.samples()
        self.accuracy = evaluate(self.net, test, self.work.eval_batch_size)
        self.clock.append(now())
        if self.work.pause is not None:
            self.work.pause(self.accuracy)

    def finalize(self) -> None:
        """End without fine-tuning and evaluation after the last round."""
        FlukeENV().close_cache()


class TimedAvg(Timed, FedAVG):  # type: ignore[misc]
    """Is FedAVG with the floor's evaluation."""


class TimedRep(Timed, FedRep):  # type: ignore[misc]
    """Is FedRep with the floor's evaluation."""


class TimedDitto(Timed, Ditto):  # type: ignore[misc]
    """Is Ditto with the floor's evaluation."""


def clients_of(work: Workload, kind: Callable[..., Any]) -> list[Any]:
    """Make the workload's clients.

    Args:
        work: The workload.
        kind: Makes a client.
    """
    (x, y), _ = work.samples()
    optimizer = work.optimizer
    assert isinstance(optimizer, partial)
    choice = OptimizerConfigurator(DDict(name=optimizer.func, **optimizer.keywords))
    clients = []
    for client_id in range(work.num_clients):
        own = work.owned(client_id)
        batches = FastDataLoader(
            x[own.start : own.stop],
            y[own.start : own.stop],
            num_labels=work.num_classes,
            batch_size=work.batch_size,
            skip_singleton=False,
        )
        client = kind(
            client_id,
            train_set=batches,
            test_set=None,
            optimizer_cfg=choice,
            loss_fn=nn.CrossEntropyLoss(),
        )
        clients.append(client)
    return clients


def fedavg(work: Workload) -> tuple[Any, list[Any], Any]:
    """Make the algorithm, the clients and the server of FedAVG."""
    clients = clients_of(work, partial(Client, local_epochs=work.local_epochs, persistency=False))
    return TimedAvg, clients, AvgServer(work.first_net(), None, clients, weighted=True)


def fedrep(work: Workload) -> tuple[Any, list[Any], Any]:
    """Make the algorithm, the clients and the server of FedRep."""
    net = work.first_net()
    assert isinstance(net, nn.Sequential)
    whole = EncoderHeadNet(net[:-1], net[-1])
    epochs = work.local_epochs

    def client(client_id: int, **settings: Any) -> Any:
        return RepClient(client_id, model=deepcopy(whole), local_epochs=epochs, tau=epochs, **settings)

    clients = clients_of(work, client)
    return TimedRep, clients, RepServer(whole.encoder, None, clients, weighted=True)


def ditto(work: Workload) -> tuple[Any, list[Any], Any]:
    """Make the algorithm, the clients and the server of Ditto."""
    net = work.first_net()
    epochs = work.local_epochs

    def client(client_id: int, **settings: Any) -> Any:
        return OwnClient(client_id, model=deepcopy(net), local_epochs=epochs, tau=epochs, lam=LAM, **settings)

    clients = clients_of(work, client)
    return TimedDitto, clients, AvgServer(net, None, clients, weighted=True)


METHODS = {"FedAvg": fedavg, "FedRep": fedrep, "Ditto": ditto}
"""Makes the parts of a method, by its name."""


def run(work: Workload) -> Result:
    """Run FedAvg, FedRep or Ditto, by fluke."""
    FlukeENV().set_device("cpu")
    algorithm, clients, server = METHODS[work.method](work)
    server.cohorts = work.cohorts(work.rounds)
    federation = algorithm(work.num_clients, None, None, clients=clients, server=server)
    federation.work = work
    federation.begin()
    federation.run(work.rounds, work.cohort_size / work.num_clients)
    return federation.clock, federation.accuracy


VARIANTS = {"fluke": run}
