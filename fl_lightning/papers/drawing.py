"""The runs that a figure is drawn of, and the base class of the drawings."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import Direction
from fl_lightning.reports.figures import Numbers
from fl_lightning.reports.result_tables import Table
from fl_lightning.reports.results import LAST_ROUNDS, mean_of_last, unit_in
from fl_lightning.reports.saved import Group, SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Dimension = Literal["method", "case", "key"]
"""A property in which the lines of a figure differ: method, case, or logged value."""

LONGEST = 80
"""Largest number of characters that a table has about a run that failed."""


class Series(NamedTuple):
    """Holds the runs of one method in one case.

    Attributes:
        method: Name of the row.
        case: Name of the column.
        group: Complete runs, one for each seed.
        failed: Sentences about the runs that failed, by seed.
        all_rounds: Number of rounds of a whole run, if the runs may have fewer. None if it is not known.
    """

    method: str
    case: str
    group: Group
    failed: Mapping[str, str] = MappingProxyType({})
    all_rounds: int | None = None

    @property
    def name(self) -> str:
        """The names of method and case, without an empty one."""
        return ", ".join(filter(None, (self.method, self.case)))

    @property
    def is_whole(self) -> bool:
        """Whether every run has all rounds, or has stopped early."""
        return all(is_at_end(run, self.all_rounds) for run in self.group.runs)

    @property
    def failures(self) -> list[str]:
        """A text for each seed that failed, with the reason."""
        return [f"seed {seed} failed: {happened(error)}" for seed, error in self.failed.items()]

    @property
    def run(self) -> SavedRun:
        """The run of the first seed, for drawings that show a single run."""
        return self.group.runs[0]


def happened(error: str) -> str:
    """Return what happened in the sentence of an error, without the rule before `, but` and the remedy, and shortened.

    >>> happened("every update must be finite, but client 2 returned NaN in round 24; lower the learning rate")
    'client 2 returned NaN in round 24'
    """
    without_remedy = error.partition(";")[0]
    text = without_remedy.rpartition(", but ")[2] or error
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def rounds_of(run: SavedRun) -> int:
    """Count the rounds of a run that are read."""
    return run.rounds or len(run.history)


def is_at_end(run: SavedRun, all_rounds: int | None) -> bool:
    """Return True if a run has all rounds or has stopped early, or if their number is not known.

    Args:
        run: The run.
        all_rounds: Number of rounds of a whole run. None if it is not known.
    """
    return not all_rounds or rounds_of(run) >= all_rounds or run.stopped_early


def counted(runs: Series) -> Series:
    """Return the runs whose last value is an end: the runs with most rounds, and the runs that stopped early.

    Further rounds may change the last value of any other run.
    """
    most = max(map(rounds_of, runs.group.runs), default=0)
    at_end = [run for run in runs.group.runs if rounds_of(run) == most or run.stopped_early]
    return runs._replace(group=replace(runs.group, runs=at_end))


def unequal_text(series: Sequence[Series]) -> str:
    """Return a sentence on the runs that count at the end if the runs of some series have unequal rounds, else ""."""
    for runs in series:
        lengths = {rounds_of(run) for run in runs.group.runs if run.budget is None}
        if len(lengths) > 1:
            return "Seeds have unequal rounds: a final value is of the runs that have most of them or stopped early."
    return ""


def beginning(run: SavedRun, rounds: int) -> SavedRun:
    """Return the first rounds of a run.

    Args:
        run: The run.
        rounds: Number of rounds.
    """
    history = History()
    curves = {name: run.history.curve(name) for name in run.history.names}
    for t in run.history.rounds[:rounds]:
        history.record(t, {name: curve[t] for name, curve in curves.items() if t in curve})
    has_all = len(history) == len(run.history)
    return replace(
        run,
        history=history,
        rounds=rounds,
        is_whole=run.is_whole and has_all,
        budget=run.budget if has_all else None,
    )


def ends(runs: Series, key: str, last: int = LAST_ROUNDS) -> Numbers:
    """Return the mean of the last values of each counted run that has the key, shape (S,). One NaN if no run has it.

    A run that stopped earlier than others counts to its own end.

    Args:
        runs: The runs.
        key: Log key of the values.
        last: Number of rounds at the end that are averaged.
    """
    curves = [list(run.history.curve(key).values()) for run in counted(runs).group.runs]
    return np.array([mean_of_last(values, last) for values in curves if values] or [np.nan])


def factor_of(runs: Series, key: str, scale: float = 100.0) -> float:
    """Return the factor of values in print: `scale`, except for values that were logged in percent already.

    Args:
        runs: The runs.
        key: Log key of the values.
        scale: The factor that a drawing has. 100 gives percent.
    """
    is_percent = scale == 100.0 and unit_in(runs.group.runs, key) == "percent"
    return 1.0 if is_percent else scale


class Drawn(NamedTuple):
    """Holds a picture or a table, with sentences that tell what it shows."""

    content: "Figure | Table"
    caption: str


class Drawing(ABC):
    """Makes a picture or a table of an experiment's runs. A subclass takes in `__init__` what varies between them."""

    shows_missing: ClassVar[bool] = False
    """Whether series without runs are shown, too: the runs failed, or were not run."""

    def log_keys(self) -> list[str]:
        """List the log keys of the values that the drawing shows, none if it reads other files of the runs."""
        return []

    def target_keys(self) -> list[str]:
        """List the log keys of the values for which the drawing counts the rounds until a target."""
        return []

    @abstractmethod
    def draw(self, series: Sequence[Series]) -> Drawn:
        """Draw the runs of an experiment.

        Args:
            series: Runs of all methods and cases, at least one.

        Raises:
            ValueError: The runs lack something that the drawing needs.
        """


def check_target_key(key: str, direction: Direction | None) -> None:
    """Refuse to count the rounds until a value that is better when lower.

    Args:
        key: Log key of the value.
        direction: Direction of the key. None if it is not known.

    Raises:
        ValueError: Lower is better.
    """
    if direction == "min":
        raise ValueError(
            f"rounds are counted until a value is as high as the target, and lower is better in {key}; take an "
            f"accuracy, or say --direction {key}=max"
        )


def unique(names: Iterable[str]) -> list[str]:
    """Return names in order, each once."""
    return list(dict.fromkeys(names))


def labels_of(series: Sequence[Series]) -> list[str]:
    """Name each series by that in which the series differ: its method, its case, or both.

    >>> runs = Group("", [])
    >>> labels_of([Series("FedAvg", "IID", runs), Series("FedAvg", "α = 0.1", runs)])
    ['IID', 'α = 0.1']
    >>> labels_of([Series("FedAvg", "IID", runs), Series("FedNTD", "IID", runs)])
    ['FedAvg', 'FedNTD']

    A series without a name of its own keeps the name that all share.

    >>> labels_of([Series("FedAvg", "", runs), Series("FedAvg", "α = 0.1", runs)])
    ['FedAvg', 'FedAvg, α = 0.1']
    """
    methods = unique(runs.method for runs in series)
    cases = unique(runs.case for runs in series)
    if len(methods) == 1 and len(cases) > 1 and all(cases):
        return [runs.case for runs in series]
    if len(cases) == 1 and len(methods) > 1 and all(methods):
        return [runs.method for runs in series]
    return [runs.name for runs in series]


def chosen(series: Sequence[Series], cases: Sequence[str]) -> list[Series]:
    """Select series by case.

    Args:
        series: Runs of all methods and cases.
        cases: Names of cases. Without names all series are chosen.

    Raises:
        ValueError: No series is left.
    """
    asked = [runs for runs in series if not cases or runs.case in cases]
    if not asked:
        there = "; ".join(runs.name for runs in series)
        raise ValueError(f"a drawing needs runs of {[*cases]}, and those of the figure are {there}")
    return asked


def last_file(run: SavedRun, pattern: str, monitor: str = "its monitor") -> Path:
    """Find the last file of a monitor in a run's folder, within the run's rounds.

    Args:
        run: The run.
        pattern: Pattern of the names of the monitor's files.
        monitor: Name of the monitor, for the error.

    Raises:
        ValueError: The run has no such file.
    """
    files = [path for path in sorted(run.folder.glob(pattern)) if run.has_round(round_in(path))]
    if not files:
        raise ValueError(f"this drawing needs {pattern}, and {run.folder} has none; add {monitor}")
    return files[-1]


def round_in(path: Path) -> int:
    """Return the round in the name of a monitor's file, 0 if the name has none.

    >>> round_in(Path("landscape-00039-global.npz")), round_in(Path("client_classwise.csv"))
    (39, 0)
    """
    number = re.search(r"-(\d+)", path.name)
    return int(number[1]) if number else 0


def by_name(values: Mapping[str, float], form: str = "{:.1f}") -> str:
    """Write values by name.

    Args:
        values: Values by name.
        form: Format of a value.

    >>> by_name({"FedAvg": 81.25, "FedNTD": 90})
    'FedAvg 81.2, FedNTD 90.0'
    """
    return ", ".join(f"{name} {form.format(value)}".strip() for name, value in values.items())
