"""fluke's FedAVG, FedRep and Ditto on the floor's work, without its own evaluation.

Clients of FedAVG are not persistent, which is what makes fluke fast here; the others must keep what is theirs, and
begin their optimizers anew. fluke steps Ditto's own models without momentum.
"""

from collections.abc import Sequence
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
    """A server whose clients are the workload's, round by round."""

    cohorts: list[list[int]]
    clients: Sequence[Any]

    def get_eligible_clients(self, share: float) -> list[Any]:
        return [self.clients[client_id] for client_id in self.cohorts.pop(0)]


class AvgServer(Fixed, Server):  # type: ignore[misc]
    """FedAVG's."""


class RepServer(Fixed, FedRepServer):  # type: ignore[misc]
    """FedRep's."""


class Anew:
    """A client that begins its optimizers anew each round, as the papers' do."""

    def fit(self, override_local_epochs: int = 0) -> Any:
        self.optimizer = self.pers_optimizer = None
        return super().fit(override_local_epochs)  # type: ignore[misc]


class RepClient(Anew, FedRepClient):  # type: ignore[misc]
    """FedRep's."""


class OwnClient(Anew, DittoClient):  # type: ignore[misc]
    """Ditto's."""


class Timed:
    """Evaluates the global model after each round in fluke's place, reads the clock, and pauses."""

    work: Workload
    server: Any

    def begin(self) -> None:
        self.clock, self.accuracy, self.net = [now()], 0.0, self.work.first_net()
        if self.work.pause is not None:
            self.work.pause(self.accuracy)

    def _compute_evaluation(self, round: int, eligible: Sequence[Any]) -> None:
        entries = list(self.server.model.state_dict().values())
        if self.work.method == "FedRep":  # the floor evaluates the mean of the heads
            heads = [list(client.model.get_local().state_dict().values()) for client in eligible]
            entries += [torch.stack(of).mean(0) for of in zip(*heads, strict=True)]
        self.net.load_state_dict(dict(zip(self.net.state_dict(), entries, strict=True)))
        self.accuracy = evaluate(self.net, self.work.samples()[1], self.work.eval_batch_size)
        self.clock.append(now())
        if self.work.pause is not None:
            self.work.pause(self.accuracy)

    def finalize(self) -> None:
        """Nothing is fine-tuned or evaluated after the last round."""
        FlukeENV().close_cache()


class TimedAvg(Timed, FedAVG):  # type: ignore[misc]
    """FedAVG."""


class TimedRep(Timed, FedRep):  # type: ignore[misc]
    """FedRep."""


class TimedDitto(Timed, Ditto):  # type: ignore[misc]
    """Ditto."""


def clients_of(work: Workload, kind: Any) -> list[Any]:
    """Make the workload's clients."""
    (x, y), optimizer = work.samples()[0], work.optimizer
    assert isinstance(optimizer, partial)
    choice = OptimizerConfigurator(DDict(name=optimizer.func, **optimizer.keywords))
    made = []
    for client_id in range(work.num_clients):
        own = work.owned(client_id)
        batches = FastDataLoader(
            x[own.start : own.stop], y[own.start : own.stop], num_labels=work.num_classes, batch_size=work.batch_size,
            skip_singleton=False,
        )  # fmt: skip
        made.append(
            kind(client_id, train_set=batches, test_set=None, optimizer_cfg=choice, loss_fn=nn.CrossEntropyLoss())
        )
    return made


def run(work: Workload) -> Result:
    """FedAvg, FedRep or Ditto, by fluke."""
    FlukeENV().set_device("cpu")
    net = work.first_net()
    epochs = work.local_epochs
    clients: list[Any]
    if work.method == "FedRep":
        assert isinstance(net, nn.Sequential)
        whole = EncoderHeadNet(net[:-1], net[-1])
        clients = clients_of(
            work, lambda *a, **k: RepClient(*a, model=deepcopy(whole), local_epochs=epochs, tau=epochs, **k)
        )
        algorithm = TimedRep
        server = RepServer(whole.encoder, None, clients, weighted=True)
    elif work.method == "Ditto":
        clients = clients_of(
            work, lambda *a, **k: OwnClient(*a, model=deepcopy(net), local_epochs=epochs, tau=epochs, lam=LAM, **k)
        )
        algorithm = TimedDitto
        server = AvgServer(net, None, clients, weighted=True)
    else:
        clients = clients_of(work, partial(Client, local_epochs=epochs, persistency=False))
        algorithm = TimedAvg
        server = AvgServer(net, None, clients, weighted=True)
    server.cohorts = work.cohorts(work.rounds)
    federation = algorithm(work.num_clients, None, None, clients=clients, server=server)
    federation.work = work
    federation.begin()
    federation.run(work.rounds, work.cohort_size / work.num_clients)
    return federation.clock, federation.accuracy


VARIANTS = {"fluke": run}
