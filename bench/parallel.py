"""A workload in one process of one thread, in two, and in one process of two threads.

`python -m bench.parallel WORKLOAD DEVICES THREADS ROUNDS` prints the seconds per round of the rounds after the first.
"""

import os
import subprocess
import sys
from dataclasses import replace
from statistics import median

import torch

from bench.blocks import turns
from bench.workloads import WORKLOADS as ALL

WORKLOADS = ("cnn", "resnet")
"""Those that take processes: most of the others are done before processes pay."""


def seconds_per_round(workload: str, devices: int, threads: int, rounds: int) -> float:
    """Run it in processes of their own."""
    command = [sys.executable, "-m", "bench.parallel", workload, str(devices), str(threads), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(workload: str, repeats: int, seconds: float, rounds: int = 2) -> list[tuple[str, float, float]]:
    """Rows (workload and processes, seconds per round, how many times faster than one), medians of turns."""
    taken: dict[tuple[int, int], list[float]] = {(1, 1): [], (2, 1): [], (1, 2): []}
    for _ in turns(repeats, seconds):
        for (devices, threads), found in taken.items():
            found.append(seconds_per_round(workload, devices, threads, rounds))
    return [
        (
            f"{workload}, {devices} x {threads} thread{'s' if threads > 1 else ''}",
            median(found),
            median(base / own for base, own in zip(taken[1, 1], found, strict=True)),
        )
        for (devices, threads), found in taken.items()
    ]


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
        print((clock[-1][0] - clock[1][0]) / (rounds - 1))


if __name__ == "__main__":
    main()
