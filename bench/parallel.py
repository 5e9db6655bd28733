"""A workload in one process of one thread, in two, and in one process of two threads.

`python -m bench.parallel WORKLOAD DEVICES THREADS SPREAD ROUNDS [FOLDER]` prints the seconds of each round after the
first, and writes where each process spends them into the folder.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch

from bench.blocks import quartiles, turns
from bench.tables import Row
from bench.workloads import WORKLOADS as ALL

if TYPE_CHECKING:
    # The process that starts the others needs no Lightning.
    from fl_lightning import FederatedDataModule, FederatedLoop

ROUNDS = {"cnn": 5, "resnet": 3, "unlike": 7}
"""Rounds of the workloads for which processes pay, of which the first warms up.

`unlike` has ten clients with equally many samples, trained by `Local`: every second client has the net of `cnn`, the
others have a net of a third of its operations.
"""

COLUMNS = ("processes", "s_per_round", "speedup", "low", "high")

BY_COST = "cost"
"""Spreads clients by the package's rule: samples, times the operations of the client's net if the nets differ."""

BY_SAMPLES = "samples"
"""Spreads clients by samples alone, for comparison."""


class Way(NamedTuple):
    """Tells in what processes a workload runs.

    Args:
        processes: Number of processes.
        threads: Threads of each process.
        spread: What the clients are spread by: `BY_COST` or `BY_SAMPLES`.
    """

    processes: int
    threads: int
    spread: str


ONE_PROCESS = Way(processes=1, threads=1, spread=BY_COST)
TWO_PROCESSES = Way(processes=2, threads=1, spread=BY_COST)
TWO_BY_SAMPLES = Way(processes=2, threads=1, spread=BY_SAMPLES)
TWO_THREADS = Way(processes=1, threads=2, spread=BY_COST)

WAYS: dict[str, list[Way]] = {"unlike": [ONE_PROCESS, TWO_BY_SAMPLES, TWO_PROCESSES]}
"""Ways by workload. The others are compared with the first one."""

USUAL: list[Way] = [ONE_PROCESS, TWO_PROCESSES, TWO_THREADS]
"""Ways of other workloads."""


def seconds_of_rounds(workload: str, way: Way, folder: str | None = None) -> list[float]:
    """Run a workload in processes of their own.

    Args:
        workload: Name of the workload.
        way: The processes.
        folder: Folder into which each process writes where it spends the time. None writes nothing.

    Returns:
        Seconds of each round after the first.
    """
    command = [sys.executable, "-m", "bench.parallel", workload]
    command += [str(way.processes), str(way.threads), way.spread, str(ROUNDS[workload])]
    if folder is not None:
        command.append(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": str(way.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    last_line = done.stdout.splitlines()[-1]
    return [float(text) for text in last_line.split()]


def measure(workload: str, repeats: int, seconds: float) -> list[Row]:
    """Measure the ways of a workload.

    Args:
        workload: Name of the workload.
        repeats: Largest number of turns.
        seconds: Seconds within which turns are begun.

    Returns:
        Rows under `COLUMNS`. A speedup is over the round of the same number and turn in one process.
    """
    ways = WAYS.get(workload, USUAL)
    taken: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in turns(repeats, seconds):
        for way in ways:
            taken[way] += seconds_of_rounds(workload, way)
    in_one_process = taken[ways[0]]
    rows: list[Row] = []
    for way, own in taken.items():
        speedups = [base / mine for base, mine in zip(in_one_process, own, strict=True)]
        low, middle, high = quartiles(speedups)
        rows.append((name_of(workload, way), median(own), middle, low, high))
    return rows


def name_of(workload: str, way: Way) -> str:
    """Name a workload and its processes in the table."""
    plural = "s" if way.threads > 1 else ""
    name = f"{workload}, {way.processes} x {way.threads} thread{plural}"
    return name if way.spread == BY_COST else f"{name}, by {way.spread}"


def parts_of_ranks(workload: str) -> list[dict[str, float]]:
    """Return the milliseconds of a round in each of two processes of one thread, by part."""
    with TemporaryDirectory() as folder:
        seconds_of_rounds(workload, TWO_PROCESSES, folder)
        return [json.loads(file_of_rank(folder, rank).read_text()) for rank in range(2)]


def file_of_rank(folder: str, rank: int) -> Path:
    """Return the file into which a process writes where it spends the time."""
    return Path(folder, f"{rank}.json")


def made_for(workload: str, rounds: int) -> "tuple[FederatedLoop, FederatedDataModule]":
    """Make the loop and the data of a workload."""
    from bench.federated import clients_data, federation  # noqa: PLC0415
    from fl_lightning import FederatedLoop  # noqa: PLC0415
    from fl_lightning.methods import Local  # noqa: PLC0415
    from fl_lightning.nets import FedNTDCNN, HeterogeneousNets, KnFuM1  # noqa: PLC0415

    if workload in ALL:
        return federation(replace(ALL[workload], rounds=rounds))
    work = replace(ALL["cnn"], num_clients=10, rounds=rounds)
    net = partial(HeterogeneousNets, nets=[FedNTDCNN, KnFuM1])
    client = Local(net=net, optimizer=work.optimizer, finetune_epochs=0)
    return FederatedLoop(client), clients_data(work)


def main() -> None:
    """Run a workload as the arguments of the process say."""
    from bench.blocks import quiet  # noqa: PLC0415 - the parent process needs no Lightning
    from bench.federated import BARE, Pause, fit  # noqa: PLC0415
    from bench.parts import Ticks  # noqa: PLC0415 - which starts this module, too
    from fl_lightning.distributed import ClientParallelStrategy  # noqa: PLC0415
    from fl_lightning.federation.run import FederatedRun  # noqa: PLC0415

    workload = sys.argv[1]
    devices = int(sys.argv[2])
    threads = int(sys.argv[3])
    spread = sys.argv[4]
    rounds = int(sys.argv[5])
    folder = sys.argv[6] if len(sys.argv) > 6 else None
    torch.set_num_threads(threads)
    loop, data = made_for(workload, rounds)
    settings = dict(BARE)
    if devices > 1:
        settings |= {"strategy": ClientParallelStrategy(), "devices": devices}
    if spread == BY_SAMPLES:
        # Every process of the run sets the rule here.
        FederatedRun.client_cost = property(lambda run: run.server.size)  # type: ignore[assignment, method-assign]
    ticks = Ticks(1, rounds)
    callbacks = [] if folder is None else [Pause(ticks.pause)]
    with quiet():
        readings, trainer = fit(loop, data, rounds, callbacks=callbacks, **settings)
    if folder is not None:
        file_of_rank(folder, trainer.global_rank).write_text(json.dumps(ticks.milliseconds()))
    if trainer.is_global_zero:
        print(*[end.wall - begin.wall for begin, end in pairwise(readings[1:])])


if __name__ == "__main__":
    main()
