"""The content of an experiment: methods × cases × seeds, and the drawings and tables that are made of their runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from fl_lightning.experiments.composing import Held
from fl_lightning.papers import Drawing, PaperTable
from fl_lightning.reports.results import Column
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.suggestions import suggestion

CONFIG_KEY = "config"
"""Name in a case of further configurations, which is no setting."""

HOURS = "core_hours"
"""Name in a case of the hours of one core that one run takes, which is no setting."""

Cases = dict[str, dict[str, Any]]


@dataclass
class Runs:
    """Holds methods × cases, which are rows of a table.

    Attributes:
        methods: Files in configs/method by name, or paths. A+B takes both.
        cases: Names of cases of the experiment, or cases of its own. None takes all cases of the experiment.
        settings: Settings of all runs.
        label: Name of the one method in drawings and tables. None keeps the method's own.
        seeds: Seeds of each method. None takes the seeds of the experiment.
        tune: Values to choose from by the name of the setting, on held-out training samples.
        tune_metric: Log key by which the methods are tuned. None takes the key of the experiment.
    """

    methods: list[str]
    cases: Cases | list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    seeds: list[int] | None = None
    tune: dict[str, list[Any]] = field(default_factory=dict)
    tune_metric: str | None = None

    def name_of(self, method: str) -> str:
        """Return the name that a method has in drawings and tables."""
        return self.label or method

    @property
    def names(self) -> list[str]:
        """The names of the methods in drawings and tables."""
        return [self.name_of(method) for method in self.methods]


@dataclass
class Tables:
    """Describes the tables of each metric, with differences to a baseline, that `compare` writes with a report.

    Attributes:
        baseline: Method with which the others are compared. None takes the first.
        metrics: Log keys. An empty list takes the known keys.
        target: Value of the columns that count until a target. None takes the baseline's mean of the last five.
        at: Rounds after which a value has a column, too.
        columns: Further columns.
        at_seconds: Simulated seconds after which a value has a column, too.
        reference: Row that keeps the samples of earlier tasks, against which intransigence has a column. None adds no
            column.
    """

    baseline: str | None = None
    metrics: list[str] = field(default_factory=list)
    target: float | None = None
    at: list[int] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    at_seconds: list[float] = field(default_factory=list)
    reference: str | None = None


@dataclass
class Experiment:
    """Holds the content of an experiment's file.

    Attributes:
        base: Configurations of `fit`, by name, that all runs share. A later one wins over an earlier one.
        runs: Rows.
        cases: Columns that all rows share: settings by the name of the case. A value is YAML, as on the command line.
            `config` names further configurations, and `core_hours` is the cost of one run.
        cases_full: Columns of runs as large as the paper's. An empty mapping takes `cases`.
        draw: Drawings and tables by the letter of their panel, or their name.
        draw_full: Drawings and tables of runs as large as the paper's.
        tables: Tables of `compare`. None writes none.
        config: Configuration of `fit` over the base.
        full: Configurations over the others that make the runs as large as the paper's.
        seeds: Seeds, each of which varies partition, cohorts, weights and batches.
        hold: Parts that a seed does not vary.
        start: One run whose last weights all others start from.
        minutes: Minutes that the runs take on two cores. None takes `core_hours` of the cases.
        tune_seeds: Seeds of tuning. An empty list takes the seeds of the rows, or of the command.
        val_fraction: Share of the training samples that tuning holds out if the base has no validation split.
        tune_metric: Log key of tuning, `val/…` of the global model or `local/…` of the clients' models.

    Raises:
        ValueError: A row names an unknown case, has a label for several methods, or has the name of another row.
        TypeError: The name of a case is no text.
    """

    base: list[str]
    runs: list[Runs]
    cases: Cases = field(default_factory=lambda: {"": {}})
    cases_full: Cases = field(default_factory=dict)
    draw: dict[str, Drawing] = field(default_factory=dict)
    draw_full: dict[str, Drawing] = field(default_factory=dict)
    tables: Tables | None = None
    config: dict[str, Any] = field(default_factory=dict)
    full: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    hold: list[Held] = field(default_factory=list)
    start: Runs | None = None
    minutes: float | None = None
    val_fraction: float = 0.1
    tune_metric: str = "val/acc"
    tune_seeds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check_named_cases()
        self._check_names()
        self.draw = with_cases(self.draw, self.columns(self.cases))
        self.draw_full = with_cases(self.draw_full, self.columns(self.cases_full or self.cases))

    def _check_named_cases(self) -> None:
        """Refuse a row that names a case which the experiment does not have."""
        for runs in self._runs_and_start():
            if not isinstance(runs.cases, list):
                continue
            for name in runs.cases:
                if name not in self.cases:
                    raise ValueError(f"a row names cases of the experiment, got {name!r}{suggestion(name, self.cases)}")

    def _check_names(self) -> None:
        """Refuse names of rows that do not tell them apart, and names of cases that are no text."""
        places: set[tuple[str, str]] = set()
        for runs in self.runs:
            if runs.label is not None and len(runs.methods) > 1:
                raise ValueError(f"a label names one method, got {runs.label!r} for {', '.join(runs.methods)}")
            for row in runs.names:
                for case in self.cases_of(runs):
                    if not isinstance(case, str):
                        raise TypeError(f"the name of a case must be text, got {case!r}; put it in quotes")
                    if (row, case) in places:
                        raise ValueError(
                            f"rows need names of their own in each case, and {row!r} stands twice in {case!r}; give "
                            f"one a label"
                        )
                    places.add((row, case))

    def _runs_and_start(self) -> list[Runs]:
        """List the rows, and the run that all others start from, if there is one."""
        return self.runs if self.start is None else [*self.runs, self.start]

    # --- checks of a file ---

    def check(self) -> None:
        """Refuse an experiment that runs or shows nothing, wrong seeds, and tables that name rows it has not.

        Raises:
            ValueError: One of these is wrong. The sentence names it.
        """
        if not any(runs.methods and self.cases_of(runs) and (runs.seeds or self.seeds) for runs in self.runs):
            raise ValueError("there must be runs with methods, cases and seeds, and one of them is empty")
        for seeds in (self.seeds, self.tune_seeds, *(runs.seeds for runs in self.runs)):
            check_seeds(seeds or ())
        self._check_hours()
        if self.start and (len(self.start.methods) != 1 or len(self.start.cases or [""]) != 1):
            raise ValueError("start must be one run, of one method in at most one case")
        if not (self.draw or self.draw_full or self.tables):
            raise ValueError("there must be draw (pictures, tables) or tables (a comparison), and there is neither")
        rows = self.rows()
        unknown = sorted(self._rows_of_tables() - set(rows))
        if unknown:
            near = suggestion(unknown[0], rows)
            raise ValueError(f"a table names rows of the experiment, got {unknown[0]!r}{near}")

    def _check_hours(self) -> None:
        """Refuse hours of one core that are no number."""
        of_rows = [runs.cases for runs in self._runs_and_start() if isinstance(runs.cases, dict)]
        for cases in (self.cases, self.cases_full, *of_rows):
            for name, case in cases.items():
                hours = case.get(HOURS, 0)
                if not isinstance(hours, int | float):
                    raise ValueError(f"{HOURS} must be a number, got {hours!r} in the case {name!r}")

    def _rows_of_tables(self) -> set[str]:
        """Collect the names of rows that the tables use."""
        named: set[str] = set()
        for drawing in (*self.draw.values(), *self.draw_full.values()):
            if isinstance(drawing, PaperTable):
                named |= set(drawing.named_rows())
        if self.tables is not None:
            named |= set(filter(None, (self.tables.baseline, self.tables.reference)))
        return named

    # --- rows and columns ---

    def rows(self) -> list[str]:
        """List the names of all rows, each once."""
        names: dict[str, None] = {}
        for runs in self.runs:
            names |= dict.fromkeys(runs.names)
        return list(names)

    def columns(self, cases: Cases) -> list[str]:
        """List the columns of all rows, in their order, the columns of the experiment first.

        Args:
            cases: Cases of the experiment, `cases` or `cases_full`.
        """
        used: dict[str, None] = {}
        for runs in self.runs:
            used |= dict.fromkeys(cases if runs.cases is None else runs.cases)
        shared = [name for name in cases if name in used]
        return [*shared, *(name for name in used if name not in cases)]

    def cases_of(self, runs: Runs) -> Cases:
        """Return the cases of a row by name."""
        if isinstance(runs.cases, dict):
            return runs.cases
        if runs.cases is None:
            return dict(self.cases)
        return {name: self.cases[name] for name in runs.cases}

    # --- selection ---

    def select(self, methods: Sequence[str], cases: Sequence[str]) -> None:
        """Keep the rows and cases that a pattern names.

        Args:
            methods: Patterns of rows. Without patterns all rows stay.
            cases: Patterns of cases. Without patterns all cases stay.

        Raises:
            ValueError: A pattern names nothing, or no row with a column is left.
        """
        self._check_patterns(methods, cases)
        kept = []
        for runs in self.runs:
            chosen = [method for method in runs.methods if matches_any(runs.name_of(method), methods)]
            columns = {name: case for name, case in self.cases_of(runs).items() if matches_any(name, cases)}
            if chosen and columns:
                kept.append(replace(runs, methods=chosen, cases=columns))
        if not kept:
            raise ValueError(
                f"--methods and --cases must leave a row with a column, and leave {'; '.join(self.rows())} none"
            )
        self.runs = kept
        # Nothing can be measured against a row that was not asked for.
        if self.tables and self.tables.reference not in self.rows():
            self.tables = replace(self.tables, reference=None)
        self._drop_drawings_without_cases()

    def _check_patterns(self, methods: Sequence[str], cases: Sequence[str]) -> None:
        """Refuse a pattern that names no row or no case."""
        names: dict[str, None] = {}
        for runs in self.runs:
            names |= dict.fromkeys(self.cases_of(runs))
        for pattern in methods:
            if not any(matches_any(row, [pattern]) for row in self.rows()):
                raise ValueError(
                    f"--methods must match one of {'; '.join(self.rows())}, got {pattern!r}"
                    f"{suggestion(pattern, self.rows())}"
                )
        for pattern in cases:
            if not any(matches_any(name, [pattern]) for name in names):
                is_of_full = any(matches_any(name, [pattern]) for name in self.cases_full)
                hint = "; with --full there is one" if is_of_full else suggestion(pattern, names)
                raise ValueError(f"--cases must match one of {'; '.join(names)}, got {pattern!r}{hint}")

    def _drop_drawings_without_cases(self) -> None:
        """Leave out drawings of which no case is left."""
        left = set(self.columns(self.cases))
        for letter, drawing in list(self.draw.items()):
            of_drawing = set(getattr(drawing, "cases", ()))
            if of_drawing and not of_drawing & left:
                del self.draw[letter]

    # --- sizes ---

    def enlarge(self) -> None:
        """Make the runs as large as the paper's."""
        self.base = [*self.base, *self.config_text(), *self.full]
        self.config = {}
        self.minutes = None
        self.cases = self.cases_full or self.cases
        self.draw |= self.draw_full

    def config_text(self) -> list[str]:
        """Write the configuration over the base as a further one, none if it is empty."""
        return [json.dumps(self.config)] if self.config else []

    def core_hours(self) -> float | None:
        """Sum the hours of one core that all runs take, None if a case does not tell."""
        total = 0.0
        for runs in self.runs:
            for case in self.cases_of(runs).values():
                if HOURS not in case:
                    return None
                total += case[HOURS] * len(runs.methods) * len(runs.seeds or self.seeds)
        return total


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds below 0, and equal seeds.

    Raises:
        ValueError: A seed is below 0, or stands twice.
    """
    for seed in seeds:
        check_at_least(0, seeds=seed)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must name each of its values once, got {' '.join(map(str, seeds))}")


def with_cases(drawings: Mapping[str, Drawing], cases: Sequence[str]) -> dict[str, Drawing]:
    """Let the papers' tables among drawings know the columns that their published values belong to.

    Args:
        drawings: Drawings by the letter of their panel.
        cases: Names of the columns.
    """
    told = dict(drawings)
    for letter, drawing in drawings.items():
        if isinstance(drawing, PaperTable):
            told[letter] = drawing.of_cases(cases)
    return told


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return True if there is no pattern, or one of them matches."""
    return not patterns or any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
