"""Rounds of ten clients out of many: what a round, a start and a checkpoint cost by the number of clients.

`python -m bench.scale CLIENTS METHOD ROUNDS` prints seconds of CPU per round out of 100 clients, and out of so many
seconds to the first round, seconds of CPU per round, megabytes beyond the data, and megabytes of the last checkpoint.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from bench.tables import Row
from bench.workloads import CLASSES, WORKLOADS

CLIENTS = (100, 1_000, 10_000, 100_000)
METHODS = ("FedAvg", "SCAFFOLD")
"""A method without and one with a state of the net's size for each client."""

ROUNDS = 60
UNMEASURED = 10
COLUMNS = ("method and clients", "start_s", "cpu_s_per_round", "ratio_to_100", "mb_beyond_data", "checkpoint_mb")
MB = 2**20


class Scale(NamedTuple):
    """Has the costs of a federation.

    Args:
        start: Seconds to the first round.
        cpu: CPU seconds per round.
        mb: Megabytes beyond the data.
        checkpoint_mb: Megabytes of the last checkpoint.
    """

    start: float
    cpu: float
    mb: float
    checkpoint_mb: float


def measure(clients: tuple[int, ...] = CLIENTS, rounds: int = ROUNDS, repeats: int = 1) -> Iterator[Row]:
    """Yield rows under `COLUMNS`: medians over runs. The ratio is to the smallest federation, run just before.

    Args:
        clients: Numbers of clients.
        rounds: Number of rounds of a run.
        repeats: Number of runs.
    """
    for method in METHODS:
        for num_clients in clients:
            runs = [measured(num_clients, method, rounds) for _ in range(repeats)]
            yield (
                f"{method}, {num_clients}",
                median(own.start for _, own in runs),
                median(own.cpu for _, own in runs),
                median(own.cpu / smallest for smallest, own in runs),
                median(own.mb for _, own in runs),
                median(own.checkpoint_mb for _, own in runs),
            )


def measured(num_clients: int, method: str, rounds: int) -> tuple[float, Scale]:
    """Measure a federation in a process of its own.

    Args:
        num_clients: Number of clients.
        method: Name of the method.
        rounds: Number of rounds.

    Returns:
        CPU seconds per round of the smallest federation, and the costs of this one.
    """
    command = [sys.executable, "-m", "bench.scale", str(num_clients), method, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    smallest, start, cpu, mb, checkpoint_mb = [float(text) for text in done.stdout.split()[-5:]]
    return smallest, Scale(start=start, cpu=cpu, mb=mb, checkpoint_mb=checkpoint_mb)


def run(num_clients: int, method: str, rounds: int) -> Scale:
    """Fit a federation of the size of `tiny`'s clients and net, with a checkpoint every round.

    Args:
        num_clients: Number of clients.
        method: Name of the method.
        rounds: Number of rounds.
    """
    from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: PLC0415 - the parent process needs no Lightning

    from bench.blocks import quiet  # noqa: PLC0415
    from bench.costs import release_and_read, resident  # noqa: PLC0415
    from bench.federated import NETS, fit  # noqa: PLC0415
    from bench.workloads import now  # noqa: PLC0415
    from fl_lightning import FederatedDataModule, FederatedLoop, methods  # noqa: PLC0415
    from fl_lightning.data import IIDPartition, TensorSource  # noqa: PLC0415

    work = replace(WORKLOADS["tiny"], num_clients=num_clients)
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand((num_clients * work.client_samples, 64), generator=generator).half().float()
    labels = torch.randint(CLASSES, (len(samples),), generator=generator)
    begin = now()
    before = release_and_read()
    data = FederatedDataModule(
        TensorSource((samples, labels), (samples[:100], labels[:100]), num_classes=CLASSES),
        num_clients=num_clients,
        partition=IIDPartition(),
        participation=work.cohort_size / num_clients,
        batch_size=work.batch_size,
    )
    client = getattr(methods, method)(net=NETS["tiny"], optimizer=partial(torch.optim.SGD, lr=work.lr))
    with TemporaryDirectory() as folder, quiet():
        saves = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
        readings, _ = fit(
            FederatedLoop(client),
            data,
            rounds,
            callbacks=[saves],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=True,
            default_root_dir=folder,
        )
        checkpoint_bytes = Path(folder, "last.ckpt").stat().st_size
    seconds = [after.cpu - first.cpu for first, after in pairwise(readings[UNMEASURED:])]
    return Scale(
        start=readings[0].wall - begin.wall,
        cpu=median(seconds),
        mb=(resident() - before) / MB,
        checkpoint_mb=checkpoint_bytes / MB,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked_clients = int(sys.argv[1])
    asked_method = sys.argv[2]
    asked_rounds = int(sys.argv[3])
    base = run(CLIENTS[0], asked_method, asked_rounds)
    print(base.cpu, *run(asked_clients, asked_method, asked_rounds))
