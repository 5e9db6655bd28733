"""A workload in one process of one thread, in two, and in one process of two threads.

`python -m bench.parallel WORKLOAD DEVICES THREADS ROUNDS` prints the seconds of each round after the first.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from bench.blocks import quartiles, turns
from bench.workloads import WORKLOADS as ALL

ROUNDS = {"cnn": 5, "resnet": 3}
"""Of the workloads for which processes pay; the first round warms up."""
COLUMNS = ("processes", "s_per_round", "speedup", "low", "high")


def seconds_of_rounds(workload: str, devices: int, threads: int) -> list[float]:
    """Run it in processes of their own."""
    arguments = (workload, str(devices), str(threads), str(ROUNDS[workload]))
    command = [sys.executable, "-m", "bench.parallel", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [*map(float, done.stdout.splitlines()[-1].split())]


def measure(workload: str, repeats: int, seconds: float) -> list[tuple[str, *tuple[float, ...]]]:
    """Rows under `COLUMNS`: how many times faster than one process a round of the same number and turn is."""
    taken: dict[tuple[int, int], list[float]] = {(1, 1): [], (2, 1): [], (1, 2): []}
    for _ in turns(repeats, seconds):
        for devices, threads in taken:
            taken[devices, threads] += seconds_of_rounds(workload, devices, threads)
    rows = []
    for (devices, threads), found in taken.items():
        low, middle, high = quartiles([base / own for base, own in zip(taken[1, 1], found, strict=True)])
        name = f"{workload}, {devices} x {threads} thread{'s' if threads > 1 else ''}"
        rows.append((name, median(found), middle, low, high))
    return rows


def main() -> None:
    from bench.blocks import quiet  # noqa: PLC0415 - the parent process needs no Lightning
    from bench.federated import BARE, federation, fit  # noqa: PLC0415

    workload, (devices, threads, rounds) = sys.argv[1], map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    loop, data = federation(replace(ALL[workload], rounds=rounds))
    settings = BARE if devices == 1 else {**BARE, "strategy": "client_parallel", "devices": devices}
    with quiet():
        clock, trainer = fit(loop, data, rounds, **settings)
    if trainer.is_global_zero:
        print(*(end[0] - begin[0] for begin, end in pairwise(clock[1:])))


if __name__ == "__main__":
    main()
