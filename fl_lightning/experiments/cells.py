"""The cells of an experiment, composed of its rows, cases and seeds, and of what a command asks for."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from fl_lightning.cli.wrappers import layers_of, short_options
from fl_lightning.experiments.cell import Cell, most_rounds
from fl_lightning.experiments.cell_files import CellFiles, located
from fl_lightning.experiments.composing import Composer, nested_names, option_names, seeded, short_name
from fl_lightning.experiments.experiment import CONFIG_KEY, HOURS, Experiment, Runs
from fl_lightning.experiments.naming import LIMITS, cell_name, limits_of, start_identity
from fl_lightning.experiments.overrides import Setting, SettingPairs, as_settings, settings_text, single_names
from fl_lightning.federation.configured import COSINE_ROUNDS, flat
from fl_lightning.federation.effects import SEEDS
from fl_lightning.federation.horizon import PLANNED
from fl_lightning.reports.results import MEASURED
from fl_lightning.runs.checkpoints import CHECKPOINTS
from fl_lightning.runs.folder import LAST, checkpoint_of
from fl_lightning.utils.settings import as_list
from fl_lightning.utils.suggestions import suggestion

ROUNDS = "trainer.max_epochs"

COST_MONITOR = "fl_lightning.monitors.CostMonitor"

PLACES = ("trainer.default_root_dir", "trainer.logger", "trainer.fast_dev_run", "trainer.barebones")
"""Settings that decide where and whether a run leaves its folder."""


@dataclass
class Request:
    """Holds what a command asks of an experiment besides its file.

    Attributes:
        configs: Files over the experiment's own, below the files of the methods.
        settings: Settings of all runs, which win.
        seeds: Seeds in place of the experiment's. None keeps the experiment's.
        rounds: Number of rounds of all runs. Below 1 it is a share of their own. None keeps their own.
    """

    configs: Sequence[str] = ()
    settings: SettingPairs = ()
    seeds: Sequence[int] | None = None
    rounds: float | None = None


class Cells:
    """Composes the cells of an experiment.

    Args:
        experiment: The experiment.
        request: What a command asks of the experiment.

    Raises:
        ValueError: The request or a case has a setting that no method knows or that may not be set, or the request
            gives a case other data.
    """

    def __init__(self, experiment: Experiment, request: Request) -> None:
        self.experiment = experiment
        self.request = request
        self.composer = Composer([*experiment.base, *experiment.config_text()])
        self.chosen: dict[tuple[str, str], SettingPairs] = {}
        """Settings that tuning has chosen, by row and case."""
        self.options: set[str] = set()
        """Names of the options that a method has."""
        self.start = experiment.start
        """Row of the run whose last weights all others start from, with its one case, or None."""
        if self.start is not None and not self.start.cases:
            self.start = replace(self.start, cases={"": {}})
        self.check_settings()
        self.check_data()

    def check_settings(self) -> None:
        """Refuse a setting of a case, of all runs or of tuning that no method knows, or that may not be set.

        Raises:
            ValueError: The experiment sets the setting itself, or no method knows it.
        """
        known: set[str] = set()
        asked: set[str] = set()
        for row in self.experiment.runs:
            for name, case in self.experiment.cases_of(row).items():
                asked |= {setting for setting, _ in self.settings_of(case)}
                asked |= {*single_names(row.tune)}
                for method in row.methods:
                    known |= {setting for setting, _ in self.known_settings(row, method, name)}
                    known |= {*single_names(row.tune)} & self.options_of(row, method, case)
        fixed = sorted(asked & {*SEEDS, *PLACES})
        if fixed:
            raise ValueError(f"an experiment sets seeds, folders and loggers itself, got {fixed[0]}; see --seeds")
        unknown = sorted(asked - known)
        if unknown:
            near = suggestion(unknown[0], sorted(self.options))
            raise ValueError(f"settings are options of fit, and no method of the experiment knows {unknown[0]!r}{near}")

    def check_data(self) -> None:
        """Refuse a file of the request that gives a case other data than the case's own files.

        Raises:
            ValueError: The case's own files name other data than the base, and the request replaces these data.
        """
        if not self.request.configs:
            return
        for row in self.experiment.runs:
            for name, case in self.experiment.cases_of(row).items():
                of_base = self._source(row, configs=[])
                of_case = self._source(row, self.configs_of(case, asked=False))
                of_run = self._source(row, self.configs_of(case))
                if of_case not in (of_base, of_run):
                    files = ", ".join(self.request.configs)
                    raise ValueError(
                        f"-c must leave a case its data: {files} puts {of_run} into {name!r}, "
                        f"whose own file has {of_case}; leave that case out by --cases, or the source out of the file"
                    )

    def _source(self, row: Runs, configs: Sequence[str]) -> str:
        """Return the class of the data that the first method of a row has with files over the base."""
        config = self.composer.compose(row.methods[0], as_settings(row.settings), configs)
        return str((config["data"]["source"] or {}).get("class_path"))

    # --- what a case and a row have ---

    def configs_of(self, case: Mapping[str, Any], asked: bool = True) -> list[str]:
        """List the files of a case over the base, and the files of the request.

        Args:
            case: The case.
            asked: Whether the files of the request are listed.
        """
        files = as_list(case.get(CONFIG_KEY))
        return [*files, *self.request.configs] if asked else files

    def settings_of(self, case: Mapping[str, Any]) -> SettingPairs:
        """Join the settings of a case with the settings of the request."""
        own = {name: value for name, value in case.items() if name not in (CONFIG_KEY, HOURS)}
        return (*as_settings(own), *self.request.settings)

    def known_settings(self, row: Runs, method: str, name: str, more: SettingPairs = ()) -> SettingPairs:
        """Choose the settings of a case and of the request that a method knows, or whose parent is chosen.

        Args:
            row: Row of the experiment.
            method: A method of the row.
            name: Name of a case of the row.
            more: Settings of the method besides the settings of its row.
        """
        case = self.experiment.cases_of(row)[name]
        known = self.options_of(row, method, case, more=more)
        taken: list[Setting] = []
        for option, value in self.settings_of(case):
            short = option.removesuffix("+").removesuffix(".class_path").replace(".init_args", "")
            has_parent = any(short.startswith(f"{parent.removesuffix('+')}.") for parent, _ in taken)
            if short in known or has_parent:
                taken.append((option, value))
        return tuple(taken)

    def options_of(self, row: Runs, method: str, case: Mapping[str, Any], more: SettingPairs = ()) -> set[str]:
        """Collect the names of the options that a method of a row has in a case, before the case's settings.

        Args:
            row: Row of the experiment.
            method: A method of the row.
            case: A case of the row.
            more: Settings of the method besides the settings of its row.
        """
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
        seeds: dict[int, None] = {}
        for row in self.experiment.runs:
            seeds |= dict.fromkeys(self.seeds_of(row))
        return list(seeds)

    # --- cells ---

    def all(self) -> list[Cell]:
        """Compose all cells, seed by seed."""
        cells: list[Cell] = []
        for seed in self.seeds():
            for row in self.experiment.runs:
                cells += self.of_row(row, seed)
        return cells

    def of_row(self, row: Runs, seed: int) -> list[Cell]:
        """Compose the cells of a row with a seed, none if the row has other seeds."""
        cells: list[Cell] = []
        if seed not in self.seeds_of(row):
            return cells
        for method in row.methods:
            for name in self.experiment.cases_of(row):
                tuned = self.chosen.get((row.name_of(method), name), ())
                cells.append(self.compose(row, method, name=name, seed=seed, tuned=tuned))
        return cells

    def compose(
        self,
        row: Runs,
        method: str,
        name: str,
        seed: int,
        *,
        tuned: SettingPairs = (),
        more: SettingPairs = (),
    ) -> Cell:
        """Compose a cell.

        Args:
            row: Row of the cell.
            method: A method of the row.
            name: Name of a case. Settings of the case that the method does not know are left out.
            seed: Seed of the run.
            tuned: Settings that were chosen for the method. The name of the cell has them.
            more: Further settings, which the name does not have.
        """
        case = self.experiment.cases_of(row)[name]
        taken = self.known_settings(row, method, name, more=more)
        settings = (*as_settings(row.settings), *more, *taken, *tuned)
        config = self._config(row, method, name=name, settings=settings)
        all_rounds, own_rounds = self._rounds(config, row=row, method=method, name=name)
        # The other runs start from the last weights of the start, whatever number of rounds they have.
        if self.request.rounds is not None and row is not self.start:
            config = with_fewer_rounds(config, self.request.rounds)
        config = seeded(config, seed, self.experiment.hold)
        named_case = name if taken or case.get(CONFIG_KEY) else ""
        parts = (row.label or short_name(method), named_case, settings_text(tuned, "-"))
        return Cell(
            method=row.name_of(method),
            case=name,
            seed=seed,
            name=cell_name("-".join(filter(None, parts)), seed, config),
            config=config,
            tuned=tuned,
            all_rounds=all_rounds,
            own_rounds=own_rounds,
            core_hours=case.get(HOURS, 0.0),
        )

    def _config(self, row: Runs, method: str, name: str, settings: SettingPairs) -> dict[str, Any]:
        """Compose the configuration of a cell, whose rounds the files of the request do not change."""
        case = self.experiment.cases_of(row)[name]
        config = self.composer.compose(method, settings, self.configs_of(case))
        tables = self.experiment.tables
        if tables is not None and MEASURED.intersection(tables.columns):
            config = with_costs(config)
        if self.request.configs and ROUNDS not in dict(self.request.settings):
            max_epochs = self.trainer_of(row, method, name)["max_epochs"]
            config = {**config, "trainer": {**config["trainer"], "max_epochs": max_epochs}}
        return config

    def _rounds(self, config: Mapping[str, Any], *, row: Runs, method: str, name: str) -> tuple[int, int]:
        """Return the rounds of a whole run, and the rounds that the experiment's file asks for, -1 without a limit."""
        all_rounds = most_rounds(limits_of(config["trainer"]))
        asked = dict(self.request.settings)
        if not any(f"trainer.{limit}" in asked for limit in LIMITS):
            return all_rounds, all_rounds
        own_rounds = most_rounds(limits_of(self.trainer_of(row, method, name)))
        # Otherwise a run of more rounds is another run.
        can_continue = not is_planned(config) and self.start is None
        if all_rounds > 0 and can_continue:
            all_rounds = max(all_rounds, own_rounds)
        return all_rounds, own_rounds

    def trainer_of(self, row: Runs, method: str, name: str) -> dict[str, Any]:
        """Compose the Trainer's settings with the experiment's own limits, without the request.

        Args:
            row: Row of the experiment.
            method: A method of the row.
            name: Name of a case of the row.
        """
        case = self.experiment.cases_of(row)[name]
        given = {**row.settings, **case}
        limits = {}
        for limit in LIMITS:
            option = f"trainer.{limit}"
            if option in given:
                limits[option] = given[option]
        config = self.composer.compose(method, as_settings(limits), self.configs_of(case, asked=False))
        return dict(config["trainer"])

    # --- starts ---

    def in_folder(self, folder: Path) -> tuple[list[Cell], list[Cell]]:
        """Compose the starts, and the cells that begin with their weights, by the names that a folder has for them."""
        starts = located(self.starts(), folder)
        return starts, located(started(self.all(), starts, folder), folder)

    def starts(self) -> list[Cell]:
        """Compose the run of each seed whose last weights all others start from, none if they start anew."""
        if self.start is None:
            return []
        (name,) = self.experiment.cases_of(self.start)
        (method,) = self.start.methods
        return [self.compose(self.start, method, name=name, seed=seed) for seed in self.seeds()]


def started(cells: Iterable[Cell], starts: Iterable[Cell], folder: Path) -> list[Cell]:
    """Let each cell begin with the last weights of the start of its seed, if there are starts.

    Args:
        cells: The cells.
        starts: A start for each seed, or none.
        folder: Folder of the runs.
    """
    weights: dict[int, str] = {}
    identities: dict[int, str] = {}
    for start in starts:
        files = CellFiles.of(start, folder)
        # A plan needs the place where the run will be.
        run = files.run or files.parent / "0"
        weights[start.seed] = str(checkpoint_of(run, "last") or run / CHECKPOINTS / LAST)
        identities[start.seed] = start_identity(start.name, start.limits)
    if not weights:
        return list(cells)
    begun = []
    for cell in cells:
        model = {**cell.config["model"], "initial_weights": weights[cell.seed]}
        config = {**cell.config, "model": model}
        identity = identities[cell.seed]
        stem = cell.name.rpartition("-seed")[0]
        name = cell_name(stem, cell.seed, config=config, start=identity)
        begun.append(replace(cell, config=config, name=name, start=identity))
    return begun


def is_planned(config: Mapping[str, Any]) -> bool:
    """Return True if a run depends on the number of its rounds, so that more rounds are another run."""
    return bool({COSINE_ROUNDS, PLANNED} & flat(config).keys())


def with_fewer_rounds(config: Mapping[str, Any], rounds: float) -> dict[str, Any]:
    """Return the configuration of the first rounds of a run.

    Args:
        config: Whole configuration of the run.
        rounds: Number of rounds. Below 1 it is a share of the run's own.

    Raises:
        ValueError: `rounds` is a share, and the run has no limit of rounds.
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
    """Add a monitor of the cost of a round to a configuration, unless it has one."""
    callbacks = as_list(config["trainer"]["callbacks"])
    if not any(callback["class_path"] == COST_MONITOR for callback in callbacks):
        callbacks = [{"class_path": COST_MONITOR, "init_args": {"every": 1}}, *callbacks]
    return {**config, "trainer": {**config["trainer"], "callbacks": callbacks}}
