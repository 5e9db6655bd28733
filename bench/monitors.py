"""Times of the monitors and of the class-wise report, beside the round in which they measure.

The time in their hooks is taken, and not the difference of two runs. It is CPU time on one thread, so that other work
on the machine does not show in the ratio.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from bench.federated import BARE, federation, fit
from bench.workloads import WORKLOADS
from fl_lightning.callbacks import ClasswiseReport
from fl_lightning.metrics import ClassifierScores
from fl_lightning.monitors import (
    ClientTable,
    DriftMonitor,
    FeatureProbe,
    ForgettingMonitor,
    LossLandscape,
    NeuronActivations,
    PersonalisedAccuracy,
)
from tools.quiet import silent

COHORT = 3
ROUNDS = 3
"""Number of rounds of a fit."""

UNMEASURED = 1
"""Number of the first rounds, which only warm up."""

HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_client_start",
    "on_client_epoch_end",
    "on_client_end",
    "on_exchange_end",
    "on_validation_end",
    "on_train_epoch_end",
)
MONITORS: dict[str, Callable[..., Callback]] = {
    "ClasswiseReport": ClasswiseReport,
    "ForgettingMonitor": ForgettingMonitor,
    "PersonalisedAccuracy": PersonalisedAccuracy,
    "DriftMonitor": DriftMonitor,
    "ClientTable": ClientTable,
    "NeuronActivations": NeuronActivations,
    "FeatureProbe": partial(FeatureProbe, every=1, samples=100),
    "LossLandscape": partial(LossLandscape, every=1, samples=100, grid=5, iterations=5),
}


class Stopwatch(Callback):
    """Adds up the CPU seconds of functions, and those of all, from the end of the rounds that only warm up."""

    def __init__(self) -> None:
        self.inside = 0.0
        self.whole = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == UNMEASURED:
            self.inside = 0.0
            self.whole = -time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.whole += time.process_time()

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and whose time is added up."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += time.process_time() - begin

        return timed


def seconds(name: str, workload: str) -> tuple[float, float]:
    """Measure the CPU seconds a round that a monitor takes, and those of the round without it.

    Args:
        name: Name of the monitor.
        workload: Name of the workload.
    """
    work = replace(WORKLOADS[workload], cohort_size=COHORT, rounds=ROUNDS)
    loop, data = federation(work)
    watch = Stopwatch()
    # The report prints a table.
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        settings = {} if name == "PersonalisedAccuracy" else {"dirpath": folder}
        monitor = MONITORS[name](**settings)
        for hook in HOOKS:
            if hasattr(monitor, hook):
                setattr(monitor, hook, watch.over(getattr(monitor, hook)))
        counting = timed_counting(watch) if name == "ClasswiseReport" else nullcontext()
        with counting:
            fit(loop, data, work.rounds, callbacks=[watch, monitor], **BARE)
    measured = ROUNDS - UNMEASURED
    return watch.inside / measured, (watch.whole - watch.inside) / measured


@contextmanager
def timed_counting(watch: Stopwatch) -> Iterator[None]:
    """Time the counting by class in the evaluation, too. Plain accuracy needs a part of it."""
    counted = ClassifierScores.update
    ClassifierScores.update = watch.over(counted)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ClassifierScores.update = counted  # type: ignore[method-assign]


def measure(repeats: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield rows of monitor and workload, its CPU seconds a round, the round's, and their ratio: medians over turns.

    Args:
        repeats: Number of turns.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with silent():
            for workload in ("tiny", "cnn"):
                for name in MONITORS:
                    taken = [seconds(name, workload) for _ in range(repeats)]
                    own = median(inside for inside, _ in taken)
                    rest = median(outside for _, outside in taken)
                    share = median(inside / outside for inside, outside in taken)
                    yield f"{name} {workload}", own, rest, share
    finally:
        torch.set_num_threads(threads)
