"""Traces rounds: `python -m bench.profile [--workload tiny] [--chunk 10] [--output profile.json]`, or `make profile`.

Prints the functions of the package in which a round spends its time, and writes a trace, Python's calls and torch's
operations, that https://ui.perfetto.dev or chrome://tracing opens. Tracing itself slows the small parts down most.
"""

import json
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from bench.blocks import quiet
from bench.federated import BARE, federation, fit
from bench.workloads import WORKLOADS, Workload

WARM_UP = 5
"""Number of rounds before the trace begins."""

TRACED = 3
"""Number of rounds in the trace."""

SHOWN = 25
"""Largest number of functions that are printed."""


class Trace(Callback):
    """Traces rounds after the first ones.

    Args:
        path: The file of the trace.
    """

    def __init__(self, path: Path) -> None:
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=kinds, with_stack=True)
        self.path = path

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == WARM_UP:
            self.profiler.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.path))


class Spent(NamedTuple):
    """Has the time of a function in a trace.

    Args:
        function: Name of the function.
        calls: Number of its calls.
        milliseconds: Milliseconds in it and in the functions that it calls.
    """

    function: str
    calls: int
    milliseconds: float


def trace(work: Workload, chunk: int, path: Path) -> None:
    """Write the trace of rounds of FedAvg.

    Args:
        work: The workload.
        chunk: Number of clients that are trained at once.
        path: The file of the trace.
    """
    work = replace(work, rounds=WARM_UP + TRACED)
    loop, data = federation(work, chunk)
    with quiet():
        fit(loop, data, work.rounds, callbacks=[Trace(path)], **BARE)


def functions(path: Path) -> list[Spent]:
    """List the package's functions in a trace, those that took longest first. A recursion is counted once."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "python_function" and "fl_lightning/" in name:
            found[name.rpartition("fl_lightning/")[2]].append(event["dur"] / 1e3)
    spent = [Spent(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(spent, key=lambda function: -function.milliseconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace rounds as the command line says. None: the arguments of the process."""
    parser = ArgumentParser(prog="python -m bench.profile", description="Where the time of a round goes.")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="tiny")
    parser.add_argument("--chunk", type=int, default=1, help="clients trained at once")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="the trace")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trace(WORKLOADS[asked.workload], asked.chunk, asked.output)
    print(f"{'ms/round':>9} {'calls/round':>11}  function (with those that it calls)")
    for spent in functions(asked.output)[:SHOWN]:
        print(f"{spent.milliseconds / TRACED:9.2f} {spent.calls / TRACED:11.1f}  {spent.function}")
    print(f"{asked.output}: open it in https://ui.perfetto.dev or chrome://tracing")


if __name__ == "__main__":
    main()
