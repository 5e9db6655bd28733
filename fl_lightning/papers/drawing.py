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


LONGEST = 80
"""Characters of what a table says of a run that failed."""


class Series(NamedTuple):
    """Runs of one method in one case.

    Attributes:
        method: name of the row.
        case: name of the column.
        group: complete runs, one for each seed.
        failed: why a run failed, by its seed.
        all_rounds: of a whole run, where the runs may have fewer; None: it is not known.
    """

    method: str
    case: str
    group: Group
    failed: Mapping[str, str] = MappingProxyType({})
    all_rounds: int | None = None

    @property
    def name(self) -> str:
        """Method and case, as far as they have names."""
        return ", ".join(filter(None, (self.method, self.case)))

    @property
    def is_whole(self) -> bool:
        """Whether every run has all rounds, or has stopped early."""
        return all(is_at_end(run, self.all_rounds) for run in self.group.runs)

    @property
    def failures(self) -> list[str]:
        """Seeds that failed, each with what happened."""
        return [f"seed {seed} failed: {happened(error)}" for seed, error in self.failed.items()]

    @property
    def run(self) -> SavedRun:
        """Run of the first seed, for drawings that show a single one."""
        return self.group.runs[0]


def happened(error: str) -> str:
    """Cut the rule before `, but` and the remedy behind a semicolon off the sentence of an error, and what is too long.

    >>> happened("every update must be finite, but client 2 returned NaN in round 24; lower the learning rate")
    'client 2 returned NaN in round 24'
    """
    text = error.partition(";")[0].rpartition(", but ")[2] or error
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def rounds_of(run: SavedRun) -> int:
    """Count the rounds of a run that are read."""
    return run.rounds or len(run.history)


def is_at_end(run: SavedRun, all_rounds: int | None) -> bool:
    """Return True for a run that has all rounds or has stopped early, or if their number is not known."""
    return not all_rounds or rounds_of(run) >= all_rounds or run.stopped_early


def counted(runs: Series) -> Series:
    """Return the runs whose last value is an end: those that have most rounds, and those that stopped early.

    Further rounds may change the last value of any other run.
    """
    most = max(map(rounds_of, runs.group.runs), default=0)
    at_end = [run for run in runs.group.runs if rounds_of(run) == most or run.stopped_early]
    return runs._replace(group=replace(runs.group, runs=at_end))


def unequal_text(series: Sequence[Series]) -> str:
    """Tell which runs count at the end if the runs of some series have different numbers of rounds, else nothing."""
    by_rounds = [[run for run in runs.group.runs if run.budget is None] for runs in series]
    if all(len(set(map(rounds_of, runs))) < 2 for runs in by_rounds):
        return ""
    return "Seeds have unequal rounds: a final value is of the runs that have most of them or stopped early."


def beginning(run: SavedRun, rounds: int) -> SavedRun:
    """Take the first rounds of a run."""
    history = History()
    curves = {name: run.history.curve(name) for name in run.history.names}
    for t in run.history.rounds[:rounds]:
        history.record(t, {name: curve[t] for name, curve in curves.items() if t in curve})
    is_whole = run.is_whole and len(history) == len(run.history)
    budget = run.budget if len(history) == len(run.history) else None
    return replace(run, history=history, rounds=rounds, is_whole=is_whole, budget=budget)


def ends(runs: Series, key: str, last: int = LAST_ROUNDS) -> Numbers:
    """Return the mean of the last values of each counted run that has the key, shape (S,). One NaN if no run has it.

    A run that stopped earlier than others counts to its own end.
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
    """A picture or a table, with sentences that say what it shows."""

    content: "Figure | Table"
    caption: str


class Drawing(ABC):
    """A picture or a table of an experiment's runs. A subclass takes in `__init__` what varies between them."""

    shows_missing: ClassVar[bool] = False
    """True where series without runs are shown, too: those that failed or were not run."""

    def log_keys(self) -> list[str]:
        """List the log keys of the values that it shows, none where it reads other files of the runs."""
        return []

    def target_keys(self) -> list[str]:
        """List the log keys of the values of which it counts the rounds until a target."""
        return []

    @abstractmethod
    def draw(self, series: Sequence[Series]) -> Drawn:
        """Draw the runs of an experiment."""


def check_target_key(key: str, direction: Direction | None) -> None:
    """Refuse to count the rounds until a value that is better when lower.

    Raises:
        ValueError: Lower is better.
    """
    if direction == "min":
        raise ValueError(
            f"rounds are counted until a value is as high as the target, and lower is better in {key}; take an "
            f"accuracy, or say --direction {key}=max"
        )


def unique(names: Iterable[str]) -> list[str]:
    """Names in order, each once."""
    return list(dict.fromkeys(names))


def chosen(series: Sequence[Series], methods: Sequence[str] = (), cases: Sequence[str] = ()) -> list[Series]:
    """Select series by method and case, all of them where none is named.

    Raises:
        ValueError: nothing is left.
    """
    asked = [runs for runs in series if (not methods or runs.method in methods) and (not cases or runs.case in cases)]
    if not asked:
        there = "; ".join(runs.name for runs in series)
        raise ValueError(f"a drawing needs runs of {[*methods, *cases]}, and those of the figure are {there}")
    return asked


def last_file(run: SavedRun, pattern: str, monitor: str = "its monitor") -> Path:
    """Find the last file of a monitor in a run's folder, by the pattern of its names, within the run's rounds.

    Raises:
        ValueError: the run has none.
    """
    files = [path for path in sorted(run.folder.glob(pattern)) if run.has_round(round_in(path))]
    if not files:
        raise ValueError(f"this drawing needs {pattern}, and {run.folder} has none; add {monitor}")
    return files[-1]


def round_in(path: Path) -> int:
    """Read the round in the name of a monitor's file, 0 where it has none.

    >>> round_in(Path("landscape-00039-global.npz")), round_in(Path("client_classwise.csv"))
    (39, 0)
    """
    number = re.search(r"-(\d+)", path.name)
    return int(number[1]) if number else 0


def by_name(values: Mapping[str, float], form: str = "{:.1f}") -> str:
    """Write values by name.

    >>> by_name({"FedAvg": 81.25, "FedNTD": 90})
    'FedAvg 81.2, FedNTD 90.0'
    """
    return ", ".join(f"{name} {form.format(value)}".strip() for name, value in values.items())
