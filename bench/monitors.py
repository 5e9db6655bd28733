"""Times of the monitors and of the class-wise report, beside the round in which they measure.

The time in their hooks is taken, not the difference of two runs, so that the machine's pace does not show.
"""

import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from pytorch_lightning import Callback

from bench.federated import BARE, federation, fit
from bench.workloads import WORKLOADS
from fl_lightning.callbacks import (
    ClasswiseReport,
    ClientTable,
    DriftMonitor,
    FeatureProbe,
    ForgettingMonitor,
    LossLandscape,
    NeuronActivations,
    PersonalisedAccuracy,
)
from fl_lightning.metrics import ClassifierScores

COHORT = 3
ROUNDS = 2
HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_client_start", "on_client_epoch_end", "on_client_end"),
    *("on_exchange_end", "on_validation_end", "on_train_epoch_end"),
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


class Stopwatch:
    """Adds up the seconds that functions take, by function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def seconds(name: str, workload: str) -> tuple[float, float]:
    """Seconds a round that a monitor takes, and those of the round without it."""
    work = replace(WORKLOADS[workload], cohort_size=COHORT, rounds=ROUNDS)
    loop, data = federation(work)
    watch, counted = Stopwatch(), ClassifierScores.update
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # the report prints a table
        monitor = MONITORS[name](**({} if name == "PersonalisedAccuracy" else {"dirpath": folder}))
        for hook in HOOKS:
            if hasattr(monitor, hook):
                setattr(monitor, hook, watch.over(getattr(monitor, hook)))
        if name == "ClasswiseReport":  # with the counting in the evaluation, which plain accuracy needs in part
            ClassifierScores.update = watch.over(counted)  # type: ignore[method-assign]
        try:
            read, _ = fit(loop, data, work.rounds, monitor, **BARE)
        finally:
            ClassifierScores.update = counted  # type: ignore[method-assign]
    whole = (read[-1][0] - read[0][0]) / ROUNDS
    return watch.seconds / ROUNDS, whole - watch.seconds / ROUNDS


def measure(repeats: int) -> list[tuple[str, float, float, float]]:
    """Rows (monitor and workload, its seconds a round, the round's, their ratio): medians over turns."""
    rows = []
    for workload in ("cnn", "tiny"):
        for name in MONITORS:
            taken = [seconds(name, workload) for _ in range(repeats)]
            own, rest = (median(column) for column in zip(*taken, strict=True))
            rows.append((f"{name} {workload}", own, rest, median(a / b for a, b in taken)))
    return rows
