"""The file of an experiment: methods × cases × seeds, and the drawings and tables that are made of their runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from fl_lightning.cli.configs import HOME
from fl_lightning.cli.yaml_keys import check_keys
from fl_lightning.experiments.composing import Held
from fl_lightning.papers import Drawing, PaperTable
from fl_lightning.reports.results import Column
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.suggestions import suggestion

FOLDER = "papers"
"""Folder of the papers' experiments within the configurations: one below it for each paper."""

CONFIG_KEY = "config"
HOURS = "core_hours"
"""Names in a case that are no settings: further configurations, and the hours of one core that one run takes."""

DRAWINGS = ("draw", "draw_full")
Cases = dict[str, dict[str, Any]]


@dataclass
class Runs:
    """Methods × cases: rows of a table.

    Attributes:
        methods: files in configs/method by name, or paths; A+B takes both.
        cases: names of those of the experiment, or cases of its own; None: all of the experiment.
        settings: of all of them.
        label: name of the one method in drawings and tables; None: its own.
        seeds: of each; None: those of the experiment.
        tune: values to choose from by the name of the setting, on held-out training samples.
        tune_metric: log key that their tuning looks at; None: that of the experiment.
    """

    methods: list[str]
    cases: Cases | list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    seeds: list[int] | None = None
    tune: dict[str, list[Any]] = field(default_factory=dict)
    tune_metric: str | None = None


@dataclass
class Tables:
    """Describes the tables of each metric, with differences to a baseline, that `compare` writes with a report.

    Attributes:
        baseline: method that the others are compared with; None: the first.
        metrics: log keys; none: the known ones.
        target: of the rounds to it; None: the baseline's mean of the last five.
        at: rounds after which a value has a column, too.
        columns: further ones.
        at_seconds: simulated seconds after which a value has a column, too.
        reference: row that keeps the samples of earlier tasks, against which intransigence has a column; None: none.
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
    """Content of an experiment's file.

    Attributes:
        base: configurations of `fit`, by name, that all runs share; the later one wins.
        runs: rows.
        cases: columns, which all rows share: settings by the name of the case; a value is YAML, as on the command line.
            `config` in it names further configurations, `core_hours` what one run costs.
        cases_full: columns of runs as large as the paper's; none: `cases`.
        draw: drawings and tables by the letter of their panel, or their name.
        draw_full: likewise, of runs as large as the paper's.
        tables: those of `compare`; None: none.
        config: of `fit`, over the base.
        full: configurations over the others that make the runs as large as the paper's.
        seeds: each varies partition, cohorts, weights and batches.
        hold: what a seed does not vary.
        start: one run whose last weights all others start from.
        minutes: that its runs take on two cores; None: as `core_hours` of its cases say.
        tune_seeds: seeds of tuning; none: those of the rows, or of the command.
        val_fraction: of tuning, where the base has no validation split.
        tune_metric: log key that tuning looks at, `val/…` of the global model or `local/…` of the clients' models.
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
        places = set[tuple[str, str]]()
        named = [runs.cases for runs in (*self.runs, *filter(None, [self.start])) if isinstance(runs.cases, list)]
        for name in (name for cases in named for name in cases):
            if name not in self.cases:
                raise ValueError(f"a row names cases of the experiment, got {name!r}{suggestion(name, self.cases)}")
        for runs in self.runs:
            if runs.label is not None and len(runs.methods) > 1:
                raise ValueError(f"a label names one method, got {runs.label!r} for {', '.join(runs.methods)}")
            for method in runs.methods:
                for name in self.cases_of(runs):
                    if not isinstance(name, str):
                        raise TypeError(f"the name of a case must be text, got {name!r}; put it in quotes")
                    if (runs.label or method, name) in places:
                        raise ValueError(
                            f"rows need names of their own in each case, and {runs.label or method!r} stands twice in "
                            f"{name!r}; give one a label"
                        )
                    places.add((runs.label or method, name))
        self.draw = with_cases(self.draw, self.columns(self.cases))
        self.draw_full = with_cases(self.draw_full, self.columns(self.cases_full or self.cases))

    def check(self) -> None:
        """Refuse an experiment that runs or shows nothing, wrong seeds, and tables that name rows it has not.

        Raises:
            ValueError: naming what is missing.
        """
        if not any(runs.methods and self.cases_of(runs) and (runs.seeds or self.seeds) for runs in self.runs):
            raise ValueError("there must be runs with methods, cases and seeds, and one of them is empty")
        for seeds in (self.seeds, self.tune_seeds, *(runs.seeds for runs in self.runs)):
            check_seeds(seeds or ())
        row_cases = [runs.cases for runs in (*self.runs, *filter(None, [self.start])) if isinstance(runs.cases, dict)]
        for name, case in (item for cases in (self.cases, self.cases_full, *row_cases) for item in cases.items()):
            if not isinstance(hours := case.get(HOURS, 0), int | float):
                raise ValueError(f"{HOURS} must be a number, got {hours!r} in the case {name!r}")
        if self.start and (len(self.start.methods) != 1 or len(self.start.cases or [""]) != 1):
            raise ValueError("start must be one run, of one method in at most one case")
        if not (self.draw or self.draw_full or self.tables):
            raise ValueError("there must be draw (pictures, tables) or tables (a comparison), and there is neither")
        rows = {runs.label or method for runs in self.runs for method in runs.methods}
        drawings = [each for each in (*self.draw.values(), *self.draw_full.values()) if isinstance(each, PaperTable)]
        named = {name for each in drawings for name in each.named_rows()}
        if self.tables and self.tables.baseline:
            named.add(self.tables.baseline)
        if self.tables and self.tables.reference:
            named.add(self.tables.reference)
        for row in sorted(named - rows):
            raise ValueError(f"a table names rows of the experiment, got {row!r}{suggestion(row, rows)}")

    def columns(self, cases: Cases) -> list[str]:
        """List the columns of all rows, those of the experiment first, in their order."""
        used = dict.fromkeys(name for runs in self.runs for name in (cases if runs.cases is None else runs.cases))
        return [*(name for name in cases if name in used), *(name for name in used if name not in cases)]

    def cases_of(self, runs: Runs) -> Cases:
        """Look the cases of a row up, by name."""
        if isinstance(runs.cases, dict):
            return runs.cases
        return {name: self.cases[name] for name in (self.cases if runs.cases is None else runs.cases)}

    def select(self, methods: Sequence[str], cases: Sequence[str]) -> None:
        """Keep the methods and cases that a pattern names, all where there is none.

        Raises:
            ValueError: nothing is left of one of them.
        """
        kept = []
        labels = dict[str, None]()
        names = dict[str, None]()
        for runs in self.runs:
            chosen = [m for m in runs.methods if matches_any(runs.label or m, methods)]
            columns = {name: case for name, case in self.cases_of(runs).items() if matches_any(name, cases)}
            labels |= dict.fromkeys([runs.label] if runs.label else runs.methods)
            names |= dict.fromkeys(self.cases_of(runs))
            if chosen and columns:
                kept.append(replace(runs, methods=chosen, cases=columns))
        for option, patterns, known in (("--methods", methods, labels), ("--cases", cases, names)):
            for pattern in patterns:
                if not any(matches_any(name, [pattern]) for name in known):
                    larger = option == "--cases" and any(matches_any(name, [pattern]) for name in self.cases_full)
                    hint = "; with --full there is one" if larger else suggestion(pattern, known)
                    raise ValueError(f"{option} must match one of {'; '.join(known)}, got {pattern!r}{hint}")
        if not kept:
            raise ValueError(
                f"--methods and --cases must leave a row with a column, and leave {'; '.join(labels)} none"
            )
        self.runs = kept
        if self.tables and self.tables.reference:
            rows = {runs.label or method for runs in kept for method in runs.methods}
            if self.tables.reference not in rows:
                # Nothing can be measured against a row that was not asked for.
                self.tables = replace(self.tables, reference=None)
        left = {name for runs in kept for name in self.cases_of(runs)}
        for letter, drawing in list(self.draw.items()):
            of_cases = set(getattr(drawing, "cases", ()))
            if of_cases and not of_cases & left:
                # What the drawing shows was not asked for.
                del self.draw[letter]

    def enlarge(self) -> None:
        """Make the runs as large as the paper's."""
        self.base = [*self.base, *self.config_text(), *self.full]
        self.config = {}
        self.minutes = None
        self.cases = self.cases_full or self.cases
        self.draw |= self.draw_full

    def config_text(self) -> list[str]:
        """Write the configuration over the base as a further one, none where there is nothing."""
        return [json.dumps(self.config)] if self.config else []

    def core_hours(self) -> float | None:
        """Sum the hours of one core that all runs take, None where a case does not tell."""
        total = 0.0
        for runs in self.runs:
            for case in self.cases_of(runs).values():
                if HOURS not in case:
                    return None
                total += case[HOURS] * len(runs.methods) * len(runs.seeds or self.seeds)
        return total


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds below 0 and those that stand twice.

    Raises:
        ValueError: naming them.
    """
    for seed in seeds:
        check_at_least(0, seeds=seed)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must name each of its values once, got {' '.join(map(str, seeds))}")


def with_cases(drawings: dict[str, Drawing], cases: Sequence[str]) -> dict[str, Drawing]:
    """Let the papers' tables among drawings know the columns that their published values belong to."""
    return {n: d.of_cases(cases) if isinstance(d, PaperTable) else d for n, d in drawings.items()}


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return True where there is no pattern, or one of them matches."""
    return not patterns or any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


# --- files ----------------------------------------------------------------------------------------


def experiment_names() -> list[str]:
    """Return the names of all experiments of the papers, such as `fedntd/2`, in the order of papers and numbers."""
    paths = (HOME / FOLDER).glob("*/*.yaml")
    return sorted((path.relative_to(HOME / FOLDER).with_suffix("").as_posix() for path in paths), key=experiment_order)


def experiment_order(name: str) -> tuple[str, bool, int, str]:
    """Key that sorts experiments by paper and number, tables last.

    >>> sorted(["fedntd/10", "fedntd/table2", "fedntd/2"], key=experiment_order)
    ['fedntd/2', 'fedntd/10', 'fedntd/table2']
    """
    paper, _, number = name.partition("/")
    return paper, not number.isdigit(), int("".join(letter for letter in number if letter.isdigit()) or 0), name


def shipped_path(name: str) -> Path:
    """Path of an experiment that comes with the package."""
    return HOME / FOLDER / f"{name}.yaml"


def paths_of(asked: Sequence[str]) -> list[Path]:
    """Find the files of experiments: one's own, else the package's of that name, or all of a paper.

    Raises:
        ValueError: there is none, with the nearest name.
    """
    paths = list[Path]()
    known = experiment_names()
    for name in asked:
        if name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                raise ValueError(f"the file of an experiment must exist, got {name}")
            paths.append(Path(name).resolve())
        elif experiments := [experiment for experiment in known if name in (experiment, experiment.partition("/")[0])]:
            paths += map(shipped_path, experiments)
        else:
            near = suggestion(name, known)
            raise ValueError(f"an experiment is one that fl-lightning reproduce lists, or a file, got {name!r}{near}")
    return list(dict.fromkeys(paths))


def read_experiment(path: Path) -> Experiment:
    """Read the file of an experiment.

    Raises:
        ValueError: naming the file and what is wrong in it.
    """
    checks = ArgumentParser(exit_on_error=False)
    drawings = ArgumentParser(exit_on_error=False)
    checks.add_class_arguments(Experiment)
    for name in DRAWINGS:
        drawings.add_argument(f"--{name}", type=dict[str, Drawing])
    try:
        text = path.read_text(encoding="utf-8")
        check_keys(text, str(path))
        known = [part.name for part in fields(Experiment)]
        for name in yaml.safe_load(text):
            if name not in known:
                raise ValueError(f"its parts are {', '.join(known)}, got {name!r}{suggestion(str(name), known)}")
        parsed = checks.parse_path(path)
        drawn = drawings.instantiate(Namespace({name: parsed[name] for name in DRAWINGS}))  # type: ignore[no-untyped-call]
        experiment = made_of(path, {name: drawn[name] for name in DRAWINGS})
        experiment.check()
        return experiment
    except (ArgumentError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} must say what an experiment needs and how it is drawn, but {error}") from error


def read_runs(path: Path) -> Experiment:
    """Read an experiment that comes with the package without its drawings: making those takes most of the time."""
    return made_of(path, {name: {} for name in DRAWINGS})


def made_of(path: Path, drawings: dict[str, dict[str, Drawing]]) -> Experiment:
    """Make an experiment of what its file says, without a check, and of drawings."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))  # classes within settings are made by the runs
    runs = [Runs(**row) for row in content["runs"]]
    start = content.get("start")
    tables = content.get("tables")
    parts = {"runs": runs, "start": start and Runs(**start), "tables": tables and Tables(**tables)}
    return Experiment(**{**content, **parts, **drawings})


def as_text(experiment: Experiment) -> str:
    """Write an experiment without drawings as the text of its file."""
    written = {name: value for name, value in asdict(experiment).items() if value not in (None, [], {}, {"": {}})}
    written["runs"] = [{n: v for n, v in row.items() if v not in (None, [], {})} for row in written["runs"]]
    text: str = yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120)
    return text
