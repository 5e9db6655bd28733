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
TRACED = 3
"""Rounds before the trace begins, and rounds in it."""
SHOWN = 25


class Trace(Callback):
    """Traces rounds after the first ones.

    Args:
        path: of the trace.
    """

    def __init__(self, path: Path) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self.profiler = profile(activities=kinds, with_stack=True)
        self.path = path

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == WARM_UP:
            self.profiler.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.path))


class Spent(NamedTuple):
    """What a function took of the trace: calls, and milliseconds with those of the functions that it calls."""

    function: str
    calls: int
    milliseconds: float


def trace(work: Workload, chunk: int, path: Path) -> None:
    """Write the trace of rounds of FedAvg."""
    work = replace(work, rounds=WARM_UP + TRACED)
    loop, data = federation(work, chunk)
    with quiet():
        fit(loop, data, work.rounds, Trace(path), **BARE)


def functions(path: Path) -> list[Spent]:
    """List the package's functions in a trace, those that took longest first; a recursion is counted once."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "python_function" and "fl_lightning/" in name:
            found[name.rpartition("fl_lightning/")[2]].append(event["dur"] / 1e3)
    spent = [Spent(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(spent, key=lambda one: -one.milliseconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.profile", description="Where the time of a round goes.")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="tiny")
    parser.add_argument("--chunk", type=int, default=1, help="clients trained at once")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="the trace")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trace(WORKLOADS[asked.workload], asked.chunk, asked.output)
    print(f"{'ms/round':>9} {'calls/round':>11}  function (with those that it calls)")
    for one in functions(asked.output)[:SHOWN]:
        print(f"{one.milliseconds / TRACED:9.2f} {one.calls / TRACED:11.1f}  {one.function}")
    print(f"{asked.output}: open it in https://ui.perfetto.dev or chrome://tracing")


if __name__ == "__main__":
    main()
