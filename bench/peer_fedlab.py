"""FedLab's standalone pipeline on the floor's work: its serial trainer and synchronous handler, and torch's loaders.

Its `setup_optim` knows neither momentum nor weight decay nor Adam, nor a new optimizer for each client. These are set
where it trains. FedLab sends parameters only, so that it cannot run a net with BatchNorm. It has no method with a head
of the client's own.
"""

import logging
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.aggregator import Aggregators
from fedlab.utils.serialization import SerializationTool
from torch.utils.data import DataLoader, TensorDataset

from bench.floor import evaluate
from bench.workloads import Result, Workload, now


class Data:
    """Gives each client's own samples as a loader.

    Args:
        work: The workload.
    """

    def __init__(self, work: Workload) -> None:
        train, _ = work.samples()
        self.work = work
        self.x, self.y = train

    def get_dataloader(self, client_id: int, batch_size: int) -> DataLoader[Any]:
        own = self.work.owned(client_id)
        samples = TensorDataset(self.x[own.start : own.stop], self.y[own.start : own.stop])
        return DataLoader(samples, batch_size)


class Trainer(SGDSerialClientTrainer):  # type: ignore[misc]
    """Is the stock trainer, and sends the number of samples, too."""

    work: Workload

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader[Any]) -> list[Any]:
        self.optimizer = self.work.optimizer(self._model.parameters())
        sent = super().train(model_parameters, train_loader)
        return [*sent, len(train_loader.dataset)]  # type: ignore[arg-type]


class Server(SyncServerHandler):  # type: ignore[misc]
    """Is the stock handler with the workload's cohorts, and weighs clients by their samples."""

    cohorts: list[list[int]]

    def sample_clients(self) -> list[int]:
        return self.cohorts[self.round]

    def global_update(self, buffer: list[list[Any]]) -> None:
        parameters, samples = zip(*buffer, strict=True)
        mean = Aggregators.fedavg_aggregate(list(parameters), torch.tensor(samples))
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):  # type: ignore[misc]
    """Evaluates after each round, reads the clock, and pauses where the workload says so."""

    work: Workload

    def begin(self) -> None:
        """Read the clock for the first time."""
        self.clock = [now()]
        self.accuracy = 0.0
        if self.work.pause is not None:
            self.work.pause(self.accuracy)

    def evaluate(self) -> None:
        _, test = self.work.samples()
        self.accuracy = evaluate(self.handler.model, test, self.work.eval_batch_size)
        self.clock.append(now())
        if self.work.pause is not None:
            self.work.pause(self.accuracy)


def run(work: Workload) -> Result:
    """Run FedAvg by FedLab."""
    # FedLab logs two lines for each client.
    logging.getLogger().setLevel(logging.WARNING)
    trainer = Trainer(work.first_net(), work.num_clients)
    trainer.setup_dataset(Data(work))
    trainer.setup_optim(work.local_epochs, work.batch_size, work.lr)
    server = Server(work.first_net(), work.rounds, work.cohort_size / work.num_clients)
    pipeline = Pipeline(server, trainer)
    trainer.work = work
    server.cohorts = work.cohorts(work.rounds)
    pipeline.work = work
    pipeline.begin()
    pipeline.main()
    return pipeline.clock, pipeline.accuracy


VARIANTS = {"FedLab": run}
