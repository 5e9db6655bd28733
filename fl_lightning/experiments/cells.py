"""The cells of an experiment: one run each, its identity, and its files."""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from fl_lightning.cli.wrappers import layers_of, short_options
from fl_lightning.experiments.composing import (
    Composer,
    Setting,
    SettingPairs,
    as_settings,
    nested_names,
    option_names,
    seeded,
    settings_text,
    short_name,
)
from fl_lightning.experiments.experiment import CONFIG_KEY, HOURS, Experiment, Runs
from fl_lightning.experiments.naming import (
    LIMITS,
    StoredCells,
    cell_name,
    limits_in,
    limits_of,
    settings_of,
    start_identity,
)
from fl_lightning.federation.code import changed_code
from fl_lightning.federation.configured import COSINE_ROUNDS, flat
from fl_lightning.federation.effects import SEEDS
from fl_lightning.federation.files import INITIAL_WEIGHTS, changed_files
from fl_lightning.federation.horizon import PLANNED, round_limit
from fl_lightning.federation.values import Settings
from fl_lightning.metrics.keys import Direction, Directions, parse_directions
from fl_lightning.reports.results import MEASURED
from fl_lightning.reports.saved import DONE, MAX_SECONDS, SavedRun, ends_by, read_run
from fl_lightning.runs.checkpoints import CHECKPOINTS
from fl_lightning.runs.folder import LAST, checkpoint_of, identity_in, runs
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils.files import lock_path, write_file
from fl_lightning.utils.settings import as_list
from fl_lightning.utils.suggestions import suggestion

ROUNDS = "trainer.max_epochs"

ROUND_LIMITS = ("max_epochs", "max_steps")
"""Limits that count rounds."""

MAX_TIME = "max_time"
"""Limit that counts the time of the machine, so that no two runs have the same rounds."""

COST_MONITOR = "fl_lightning.monitors.CostMonitor"

PLACES = ("trainer.default_root_dir", "trainer.logger", "trainer.fast_dev_run", "trainer.barebones")
"""Settings that decide where and whether a run leaves its folder."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Attributes:
        method: name of its row.
        case: name of its column.
        seed: of the run.
        name: of its files; a run with the same identity has the same.
        config: whole configuration.
        tuned: settings that were chosen on the validation split.
        all_rounds: that it has once its first ones are continued, -1 without a limit.
        own_rounds: that its file asks for, -1 without a limit.
        core_hours: that these take, 0 where the file does not tell.
        start: identity and limits of the cell whose last weights it begins with; empty: it begins anew.
    """

    method: str
    case: str
    seed: int
    name: str
    config: Mapping[str, Any]
    tuned: SettingPairs = ()
    all_rounds: int = -1
    own_rounds: int = -1
    core_hours: float = 0.0
    start: str = ""

    @property
    def settings(self) -> Settings:
        """The settings in which another cell must be equal to be the same run."""
        return settings_of(self.config, self.start)

    @property
    def limits(self) -> dict[str, Any]:
        """The settings that end it, by the names in `ALL_LIMITS`."""
        return limits_in(self.config)

    @property
    def directions(self) -> dict[str, Direction]:
        """Whether values are better when lower or higher, by log key, as its configuration gives them."""
        return parse_directions(self.config.get("direction") or [])

    @property
    def max_rounds(self) -> int:
        """Rounds that it has at most, -1 without a limit."""
        return most_rounds(self.limits)

    @property
    def max_seconds(self) -> float | None:
        """Simulated seconds that it has at most, None without a limit."""
        return self.limits.get(MAX_SECONDS)

    @property
    def has_open_end(self) -> bool:
        """Whether nobody knows its number of rounds before its end, as under a budget of seconds."""
        return self.max_rounds <= 0 or self.max_seconds is not None

    @property
    def length(self) -> tuple[float, float]:
        """Rounds and simulated seconds that it has at most, infinite without a limit. The longer of two is greater."""
        rounds = self.max_rounds if self.max_rounds >= 0 else inf
        seconds = inf if self.max_seconds is None else self.max_seconds
        return rounds, seconds


def most_rounds(limits: Mapping[str, Any]) -> int:
    """Compute the rounds that limits allow at most, -1 without one.

    >>> most_rounds({"max_epochs": 9, "max_steps": 5}), most_rounds({"max_time": "00:00:10:00"})
    (5, -1)
    """
    return min((int(value) for name, value in limits.items() if name in ROUND_LIMITS), default=-1)


def located(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Give each cell the name that its run has in a folder already, or that an equal cell before it has."""
    stored = StoredCells(folder)
    return [replace(cell, name=stored.name_of(cell.name, cell.settings)) for cell in cells]


def is_planned(config: Mapping[str, Any]) -> bool:
    """Return True if a run depends on the number of its rounds, so that more rounds are another run."""
    return bool({COSINE_ROUNDS, PLANNED} & flat(config).keys())


def with_fewer_rounds(config: Mapping[str, Any], rounds: float) -> dict[str, Any]:
    """Give a configuration fewer rounds, the first ones of the run that it was.

    Args:
        config: whole configuration.
        rounds: their number; below 1 as a share of those that it has.

    Raises:
        ValueError: a share of rounds that have no limit.
    """
    short = deepcopy(dict(config))
    most = most_rounds(limits_of(config["trainer"]))
    settings = flat(config)
    if rounds < 1 and most < 1:
        raise ValueError(f"--rounds {rounds} is a share of trainer.max_epochs or max_steps, and there is neither")
    if COSINE_ROUNDS in settings:
        short["model"]["lr_decay"]["rounds"] = settings[COSINE_ROUNDS]
    if PLANNED in settings:
        short["model"][PLANNED] = settings[PLANNED]
    short["trainer"]["max_epochs"] = ceil(rounds * most - 1e-9) if rounds < 1 else int(rounds)
    return short


def with_costs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add a monitor of what a round costs to a configuration that has none."""
    callbacks = as_list(config["trainer"]["callbacks"])
    known = any(callback["class_path"] == COST_MONITOR for callback in callbacks)
    measured = callbacks if known else [{"class_path": COST_MONITOR, "init_args": {"every": 1}}, *callbacks]
    return {**config, "trainer": {**config["trainer"], "callbacks": measured}}


# --- composition ----------------------------------------------------------------------------------


@dataclass
class Request:
    """Holds what is asked of an experiment besides its file.

    Attributes:
        configs: files over the experiment's own, below those of the methods.
        settings: of all runs, which win.
        seeds: in place of the experiment's; None: those.
        rounds: of all runs; a share of theirs below 1; None: theirs.
    """

    configs: Sequence[str] = ()
    settings: SettingPairs = ()
    seeds: Sequence[int] | None = None
    rounds: float | None = None


class Cells:
    """Composes the cells of an experiment.

    Args:
        experiment: that they are of.
        request: what is asked of it.
    """

    def __init__(self, experiment: Experiment, request: Request) -> None:
        self.experiment = experiment
        self.request = request
        self.composer = Composer([*experiment.base, *experiment.config_text()])
        self.chosen: dict[tuple[str, str], SettingPairs] = {}
        self.options = set[str]()
        """Names of the options that a method has."""
        start = experiment.start
        self.start = start and replace(start, cases=start.cases or {"": {}})
        self.check_settings()
        self.check_data()

    def check_data(self) -> None:
        """Refuse a file that puts other data into a case than those that its own files name.

        Raises:
            ValueError: naming the file, the case and both.
        """
        for row in self.experiment.runs if self.request.configs else ():
            for name, case in self.experiment.cases_of(row).items():
                files = list[str](), self.configs_of(case, asked=False), self.configs_of(case)
                shared, named, put = (self._source(row, configs) for configs in files)
                if named not in (shared, put):
                    raise ValueError(
                        f"-c must leave a case its data: {', '.join(self.request.configs)} puts {put} into {name!r}, "
                        f"whose own file has {named}; leave that case out by --cases, or the source out of the file"
                    )

    def _source(self, row: Runs, configs: Sequence[str]) -> str:
        """Give the class of the data that the first method of a row has with files over the base."""
        config = self.composer.compose(row.methods[0], as_settings(row.settings), configs)
        return str((config["data"]["source"] or {}).get("class_path"))

    def check_settings(self) -> None:
        """Refuse a setting of a case, of all runs or of tuning that no method knows, or that is not to be set.

        Raises:
            ValueError: naming it.
        """
        known = set[str]()
        asked = set[str]()
        for row in self.experiment.runs:
            for name, case in self.experiment.cases_of(row).items():
                asked |= {setting for setting, _ in self.settings_of(case)} | set(row.tune)
                for method in row.methods:
                    known |= {setting for setting, _ in self.known_settings(row, method, name)}
                    known |= set(row.tune) & self.options_of(row, method, case)
        if fixed := sorted(asked & {*SEEDS, *PLACES}):
            raise ValueError(f"an experiment sets seeds, folders and loggers itself, got {fixed[0]}; see --seeds")
        if unknown := sorted(asked - known):
            near = suggestion(unknown[0], sorted(self.options))
            raise ValueError(f"settings are options of fit, and no method of the experiment knows {unknown[0]!r}{near}")

    def configs_of(self, case: Mapping[str, Any], asked: bool = True) -> list[str]:
        """List the files over the base that a case has, and those that were asked for."""
        files = case.get(CONFIG_KEY, [])
        return [*([files] if isinstance(files, str) else files), *(self.request.configs if asked else ())]

    def settings_of(self, case: Mapping[str, Any]) -> SettingPairs:
        """Join the settings of a case with those that were asked for."""
        return (*as_settings({n: v for n, v in case.items() if n not in (CONFIG_KEY, HOURS)}), *self.request.settings)

    def known_settings(self, row: Runs, method: str, name: str, more: SettingPairs = ()) -> SettingPairs:
        """Choose those settings of a case, and of all runs, that a method knows, or of which it is given the parent."""
        case = self.experiment.cases_of(row)[name]
        known = self.options_of(row, method, case, more)
        taken = list[Setting]()
        for option, value in self.settings_of(case):
            short = option.removesuffix("+").removesuffix(".class_path").replace(".init_args", "")
            if short in known or any(short.startswith(f"{parent.removesuffix('+')}.") for parent, _ in taken):
                taken.append((option, value))
        return tuple(taken)

    def options_of(self, row: Runs, method: str, case: Mapping[str, Any], more: SettingPairs = ()) -> set[str]:
        """Collect the names of the options that a method of a row has in a case, before the case's settings."""
        settings = (*as_settings(row.settings), *more)
        config = self.composer.compose(method, settings, self.configs_of(case))
        names = {*nested_names(), *option_names(config)}
        names |= short_options(names, layers_of(config["model"]["client"]))
        self.options |= names
        return names

    def seeds_of(self, row: Runs) -> list[int]:
        """List the seeds of a row."""
        return list(self.request.seeds or row.seeds or self.experiment.seeds)

    def seeds(self) -> list[int]:
        """List the seeds of all rows, each once."""
        return list(dict.fromkeys(seed for row in self.experiment.runs for seed in self.seeds_of(row)))

    def all(self) -> list[Cell]:
        """Compose all cells, seed by seed."""
        return [cell for seed in self.seeds() for row in self.experiment.runs for cell in self.of_row(row, seed)]

    def of_row(self, row: Runs, seed: int) -> list[Cell]:
        """Compose the cells of a row with a seed, none where it has others."""
        return [
            self.compose(row, method, name, seed, self.chosen.get((row.label or method, name), ()))
            for method in (row.methods if seed in self.seeds_of(row) else ())
            for name in self.experiment.cases_of(row)
        ]

    def compose(
        self, row: Runs, method: str, name: str, seed: int, tuned: SettingPairs = (), more: SettingPairs = ()
    ) -> Cell:
        """Compose a cell.

        Args:
            row: its row.
            method: of the row.
            name: of the case; settings of it that the method does not know are left out.
            seed: of the run.
            tuned: settings that were chosen for the method, and stand in the name.
            more: settings that do not.
        """
        case = self.experiment.cases_of(row)[name]
        taken = self.known_settings(row, method, name, more)
        settings = (*as_settings(row.settings), *more, *taken, *tuned)
        config = self.composer.compose(method, settings, self.configs_of(case))
        if self.experiment.tables and MEASURED.intersection(self.experiment.tables.columns):
            config = with_costs(config)
        if self.request.configs and ROUNDS not in dict(self.request.settings):
            max_epochs = self.trainer_of(row, method, name)["max_epochs"]
            config = {**config, "trainer": {**config["trainer"], "max_epochs": max_epochs}}
        all_rounds = own_rounds = most_rounds(limits_of(config["trainer"]))
        if any(f"trainer.{limit}" in dict(self.request.settings) for limit in LIMITS):
            own_rounds = most_rounds(limits_of(self.trainer_of(row, method, name)))
            if all_rounds > 0 and not is_planned(config) and self.start is None:  # else another run
                all_rounds = max(all_rounds, own_rounds)
        if self.request.rounds is not None and row is not self.start:  # whose last weights the others start from
            config = with_fewer_rounds(config, self.request.rounds)
        whole = seeded(config, seed, self.experiment.hold)
        label = row.label or short_name(method)
        stem = "-".join(filter(None, [label, name if taken or case.get(CONFIG_KEY) else "", settings_text(tuned, "-")]))
        rounds = all_rounds, own_rounds, case.get(HOURS, 0.0)
        return Cell(row.label or method, name, seed, cell_name(stem, seed, whole), whole, tuned, *rounds)

    def trainer_of(self, row: Runs, method: str, name: str) -> dict[str, Any]:
        """Compose the Trainer's settings with the experiment's own limits, whatever options were asked for."""
        case = self.experiment.cases_of(row)[name]
        given = {**row.settings, **case}
        limits = {option: given[option] for option in (f"trainer.{limit}" for limit in LIMITS) if option in given}
        config = self.composer.compose(method, as_settings(limits), self.configs_of(case, asked=False))
        return dict(config["trainer"])

    def in_folder(self, folder: Path) -> tuple[list[Cell], list[Cell]]:
        """Compose the starts, and the cells that begin with their weights, by the names that a folder has for them."""
        starts = located(self.starts(), folder)
        return starts, located(started(self.all(), starts, folder), folder)

    def starts(self) -> list[Cell]:
        """Compose the run of each seed whose last weights all others start from, none where they start anew."""
        if self.start is None:
            return []
        (name,) = self.experiment.cases_of(self.start)
        return [self.compose(self.start, self.start.methods[0], name, seed) for seed in self.seeds()]


def started(cells: Iterable[Cell], starts: Iterable[Cell], folder: Path) -> list[Cell]:
    """Let each cell begin with the last weights of the start of its seed, if there are starts."""
    files = dict[int, CellFiles]()
    identity = dict[int, str]()
    for start in starts:
        files[start.seed] = CellFiles.of(start, folder)
        identity[start.seed] = start_identity(start.name, start.limits)
    if not files:
        return list(cells)
    begun = []
    for cell in cells:
        run = files[cell.seed].run or files[cell.seed].parent / "0"  # where it will be, for a plan
        weights = str(checkpoint_of(run, "last") or run / CHECKPOINTS / LAST)
        config = {**cell.config, "model": {**cell.config["model"], "initial_weights": weights}}
        stem = cell.name.rpartition("-seed")[0]
        start_of_seed = identity[cell.seed]
        name = cell_name(stem, cell.seed, config, start_of_seed)
        begun.append(replace(cell, config=config, name=name, start=start_of_seed))
    return begun


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellFiles:
    """Names the files of a cell, and can be pickled.

    Attributes:
        folder: of the experiment's runs.
        name: of the cell.
        test: whether its model may be evaluated on the test split.
        limits: that end its run, by the names in `ALL_LIMITS`; others may ask for the same run with other ones.
        starts: whether its run ends where its first round would begin.
    """

    folder: Path
    name: str
    test: bool = True
    limits: tuple[tuple[str, Any], ...] = ()
    starts: bool = False

    @classmethod
    def of(cls, cell: Cell, folder: Path, test: bool = True) -> "CellFiles":
        """Name the files of a cell that asks for its own rounds."""
        return cls(folder, cell.name, test, tuple(cell.limits.items()))

    @property
    def config(self) -> Path:
        return self.folder / "cells" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def parent(self) -> Path:
        """Folder of its run folders, of which the last one counts."""
        return self.folder / "runs" / self.name

    @property
    def run(self) -> Path | None:
        """Its run folder, None where it has not begun."""
        return next(reversed(runs(self.parent).values()), None)

    @property
    def begun_run(self) -> Path:
        """The run folder of a cell that has begun.

        Raises:
            FileNotFoundError: it has none any more.
        """
        if (run := self.run) is None:
            raise FileNotFoundError(f"{self.parent} has no run; run the cell {self.name} again")
        return run

    @property
    def done(self) -> dict[str, Any] | None:
        """Limits of a complete run, by the names in `ALL_LIMITS`, its `rounds` and `name`, or None."""
        marker = self.run and self.run / DONE
        if marker is None or not marker.is_file():
            return None
        return dict(json.loads(marker.read_text(encoding="utf-8")))

    @property
    def identity(self) -> dict[str, Any]:
        """The identity in the last checkpoint of its run, empty without one."""
        checkpoint = None if self.run is None else checkpoint_of(self.run, "last")
        return (None if checkpoint is None else identity_in(checkpoint)) or {}

    @property
    def planned_rounds(self) -> int | None:
        """Rounds for which its run is planned, if something of the run has asked for them. Else None."""
        return round_limit(*self.identity.get("horizon", {}).values())

    @property
    def changed(self) -> dict[str, str]:
        """Classes and sources of the user that have changed since its run was begun, and in what.

        The names of classes and functions are with "the source has", those of sources of samples with "the files have",
        and that of the initial weights with "the file has".
        """
        identity = self.identity
        code = changed_code(identity.get("code", {}))
        files = changed_files(identity.get("files", {}), identity.get("config", {}))
        subjects = {name: "the file has" if name == INITIAL_WEIGHTS else "the files have" for name in files}
        return dict.fromkeys(code, "the source has") | subjects

    @property
    def rounds(self) -> int:
        """Complete rounds of its run, which may have been continued since it was done and stopped."""
        on_disk = max(self.rows, default=-1) + 1
        return max(on_disk, int((self.done or {"rounds": 0})["rounds"]))

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        """The values on disk by round, each by log key. Empty where it has not begun."""
        return {} if self.run is None else RoundCSVLogger(self.run).rows_on_disk()

    def is_complete(self) -> bool:
        """Return True where its run has what its limits ask for, or more rounds."""
        limits = dict(self.limits)
        done = self.done
        if done is not None and limits_of(done) == limits:
            return True
        if self.has_used_budget():
            return True
        most = most_rounds(limits)
        # a run that was stopped right there may lack its test
        return most > 0 and ((done is not None and most <= int(done["rounds"])) or most < self.rounds)

    def has_used_budget(self) -> bool:
        """Return True where its run has all rounds that end within the simulated seconds that its limits ask for.

        Then a later round ends after them, or the run was done with limits that are nowhere tighter: its next round
        would have ended later, or it ended by itself.
        """
        limits = dict(self.limits)
        if MAX_SECONDS not in limits:
            return False
        if not all(ends_by(row, limits[MAX_SECONDS]) for row in self.rows.values()):
            return True
        return self.done is not None and are_within(limits, limits_of(self.done))

    def has_rounds(self) -> bool:
        """Return False where no round ends within the simulated seconds that its limits ask for."""
        seconds = dict(self.limits).get(MAX_SECONDS)
        return seconds is None or any(ends_by(row, seconds) for row in self.rows.values())

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Claim the cell for this process within the block, which gets False where another process has it."""
        if not self.log.is_file():  # which may lie where nothing can be written
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.touch()
        try:
            descriptor = lock_path(self.log)
        except BlockingIOError:
            yield False
            return
        if descriptor is None:
            warnings.warn(
                f"files in {self.log.parent} cannot be locked, so that a second process would run the same cells; "
                f"start one only, or take a folder on a disk that knows flock",
                stacklevel=2,
            )
        try:
            yield True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def read(self, max_rounds: int = -1, directions: Directions | None = None) -> SavedRun:
        """Read its run up to a number of rounds, or with -1 all of it, and up to the simulated seconds of its limits.

        Args:
            max_rounds: Number of rounds.
            directions: Directions of keys that win over those in its folder. None means none.
        """
        rounds = None if max_rounds < 0 else max_rounds
        return read_run(self.begun_run, rounds, directions, seconds=dict(self.limits).get(MAX_SECONDS))


def are_within(limits: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if a run that ended with other limits is the whole run with these limits, or longer.

    >>> are_within({"max_seconds": 300}, {"max_seconds": 600}), are_within({"max_seconds": 300}, {"max_epochs": 50})
    (True, False)
    """
    for name, other in others.items():
        if name not in limits:
            return False
        if name == MAX_TIME and limits[name] != other:
            return False
        if name != MAX_TIME and limits[name] > other:
            return False
    return MAX_TIME in others or MAX_TIME not in limits


def files_in(cell: Cell, folders: Iterable[Path]) -> list[CellFiles]:
    """Name the files of a cell in each of some folders, by the name that it has there."""
    return [CellFiles.of(other, folder) for folder in folders for other in located([cell], folder)]


def prepare(cell: Cell, folder: Path) -> bool:
    """Write a cell's configuration, and return whether the cell is left to be run."""
    files = CellFiles.of(cell, folder)
    write_file(files.config, yaml.safe_dump(dict(cell.config), sort_keys=False))
    return not files.is_complete()
