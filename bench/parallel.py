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
from typing import TYPE_CHECKING

import torch

from bench.blocks import quartiles, turns
from bench.workloads import WORKLOADS as ALL

if TYPE_CHECKING:  # the process that starts the others needs no Lightning
    from fl_lightning import FederatedDataModule, FederatedLoop

ROUNDS = {"cnn": 5, "resnet": 3, "unlike": 7}
"""Of the workloads for which processes pay; the first round warms up. `unlike`: ten clients with equally
many samples, every second with the net of `cnn`, the others with a net of a third of its operations, by `Local`."""
COLUMNS = ("processes", "s_per_round", "speedup", "low", "high")
Way = tuple[int, int, str]
"""Processes, threads of each, and by what the clients are spread."""
BY_COST = "cost"
"""The package's rule: samples, times the operations of the client's net where the nets differ."""
BY_SAMPLES = "samples"
"""Samples alone, for comparison."""
WAYS: dict[str, list[Way]] = {"unlike": [(1, 1, BY_COST), (2, 1, BY_SAMPLES), (2, 1, BY_COST)]}
"""Ways of a workload; of others two processes and two threads beside one."""
USUAL: list[Way] = [(1, 1, BY_COST), (2, 1, BY_COST), (1, 2, BY_COST)]


def seconds_of_rounds(workload: str, way: Way, *folder: str) -> list[float]:
    """Run it in processes of their own."""
    command = [sys.executable, "-m", "bench.parallel", workload, *map(str, way), str(ROUNDS[workload]), *folder]
    environment = {**os.environ, "OMP_NUM_THREADS": str(way[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [*map(float, done.stdout.splitlines()[-1].split())]


def measure(workload: str, repeats: int, seconds: float) -> list[tuple[str, *tuple[float, ...]]]:
    """Rows under `COLUMNS`: how many times faster than one process a round of the same number and turn is."""
    ways = WAYS.get(workload, USUAL)
    taken: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in turns(repeats, seconds):
        for way in ways:
            taken[way] += seconds_of_rounds(workload, way)
    rows = []
    for way, found in taken.items():
        devices, threads, spread = way
        low, middle, high = quartiles([base / own for base, own in zip(taken[ways[0]], found, strict=True)])
        name = f"{workload}, {devices} x {threads} thread{'s' if threads > 1 else ''}"
        if spread != BY_COST:
            name += f", by {spread}"
        rows.append((name, median(found), middle, low, high))
    return rows


def parts_of_ranks(workload: str) -> list[dict[str, float]]:
    """Milliseconds of a round in each of two processes of one thread, by part."""
    with TemporaryDirectory() as folder:
        seconds_of_rounds(workload, (2, 1, BY_COST), folder)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


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
    return FederatedLoop(Local(net=net, optimizer=work.optimizer, finetune_epochs=0)), clients_data(work)


def main() -> None:
    from bench.blocks import quiet  # noqa: PLC0415 - the parent process needs no Lightning
    from bench.federated import BARE, Pause, fit  # noqa: PLC0415
    from bench.parts import Ticks  # noqa: PLC0415 - which starts this module, too
    from fl_lightning.distributed import ClientParallelStrategy  # noqa: PLC0415
    from fl_lightning.federation.run import FederatedRun  # noqa: PLC0415

    workload = sys.argv[1]
    spread = sys.argv[4]
    folders = sys.argv[6:]
    devices, threads, rounds = (int(sys.argv[place]) for place in (2, 3, 5))
    torch.set_num_threads(threads)
    loop, data = made_for(workload, rounds)
    settings = dict(BARE)
    if devices > 1:
        settings |= {"strategy": ClientParallelStrategy(), "devices": devices}
    if spread == BY_SAMPLES:  # every process of the run enters here
        FederatedRun.client_cost = property(lambda run: run.server.size)  # type: ignore[assignment, method-assign]
    ticks = Ticks(1, rounds)
    with quiet():
        clock, trainer = fit(loop, data, rounds, *(Pause(ticks.pause) for _ in folders), **settings)
    for folder in folders:
        (Path(folder) / f"{trainer.global_rank}.json").write_text(json.dumps(ticks.milliseconds()))
    if trainer.is_global_zero:
        print(*(end[0] - begin[0] for begin, end in pairwise(clock[1:])))


if __name__ == "__main__":
    main()
