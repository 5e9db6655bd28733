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

import torch

from bench.workloads import CLASSES, WORKLOADS

CLIENTS = (100, 1_000, 10_000, 100_000)
METHODS = ("FedAvg", "SCAFFOLD")
"""One without and one with a state of the net's size for each client."""
ROUNDS = 60
UNMEASURED = 10
COLUMNS = ("method and clients", "start_s", "cpu_s_per_round", "ratio_to_100", "mb_beyond_data", "checkpoint_mb")
MB = 2**20


def measure(
    clients: tuple[int, ...] = CLIENTS, rounds: int = ROUNDS, repeats: int = 1
) -> Iterator[tuple[str, *tuple[float, ...]]]:
    """Rows under `COLUMNS`: medians of `repeats` runs; the ratio is to the smallest federation, run just before."""
    for method in METHODS:
        for num_clients in clients:
            found = []
            for _ in range(repeats):
                base, start, seconds, *sizes = measured(num_clients, method, rounds)
                found.append((start, seconds, seconds / base, *sizes))
            yield f"{method}, {num_clients}", *map(median, zip(*found, strict=True))


def measured(num_clients: int, method: str, rounds: int) -> list[float]:
    """Seconds a round of the smallest federation, and figures of `run`, in a process of its own."""
    command = [sys.executable, "-m", "bench.scale", str(num_clients), method, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [*map(float, done.stdout.split()[-5:])]


def run(num_clients: int, method: str, rounds: int) -> tuple[float, ...]:
    """Fit a federation of the size of `tiny`'s clients and net, with a checkpoint every round."""
    from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: PLC0415 - the parent process needs no Lightning

    from bench.blocks import quiet  # noqa: PLC0415
    from bench.costs import resident  # noqa: PLC0415
    from bench.federated import BARE, NETS, fit  # noqa: PLC0415
    from bench.workloads import now  # noqa: PLC0415
    from fl_lightning import FederatedDataModule, FederatedLoop, methods  # noqa: PLC0415
    from fl_lightning.data import IIDPartition, TensorSource  # noqa: PLC0415

    work = replace(WORKLOADS["tiny"], num_clients=num_clients)
    g = torch.Generator().manual_seed(0)
    samples = torch.rand(num_clients * work.client_samples, 64, generator=g).half().float()
    labels = torch.randint(CLASSES, (len(samples),), generator=g)
    sgd = partial(torch.optim.SGD, lr=work.lr)
    begin = now()[0]
    before = resident(reset=True)
    source = TensorSource((samples, labels), (samples[:100], labels[:100]), num_classes=CLASSES)
    share = work.cohort_size / num_clients
    data = FederatedDataModule(source, num_clients, IIDPartition(), participation=share, batch_size=work.batch_size)
    loop = FederatedLoop(getattr(methods, method)(net=NETS["tiny"], optimizer=sgd))
    with TemporaryDirectory() as folder, quiet():
        saves = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
        read, _ = fit(loop, data, rounds, saves, **{**BARE, "enable_checkpointing": True, "default_root_dir": folder})
        size = Path(folder, "last.ckpt").stat().st_size / MB
    seconds = median(after[1] - first[1] for first, after in pairwise(read[UNMEASURED:]))
    return read[0][0] - begin, seconds, (resident() - before) / MB, size


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = int(sys.argv[1])
    fitted = sys.argv[2]
    number = int(sys.argv[3])
    print(run(CLIENTS[0], fitted, number)[1], *run(asked, fitted, number))
