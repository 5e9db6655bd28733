"""The grid of `fl-lightning compare`: methods × settings × seeds, each cell with its whole configuration."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import Any, Literal

from pytorch_lightning.cli import ArgsType, LightningArgumentParser

from fl_lightning.cli.configs import HOME
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.cli.suggestions import nearest

Setting = tuple[str, str]
"""An option's name and its value, as on the command line."""

Case = tuple[Setting, ...]
"""Settings of the grid that make one table."""

Held = Literal["partition", "cohorts", "training"]
LIMITS = ("max_epochs", "max_steps", "max_time")
"""Settings of the Trainer that end a run; a step is a round."""

CONFIGS = (Path("configs"), HOME)
"""Folders in which the files of methods are looked up."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        method: as it was named.
        settings: those of the grid that it takes.
        seed: of the grid.
        name: of its files; no other cell has it.
        config: whole configuration.
    """

    method: str
    settings: Case
    seed: int
    name: str
    config: Mapping[str, Any]

    @property
    def limits(self) -> dict[str, Any]:
        """The settings that end it, by the names in `LIMITS`."""
        return limits_of(self.config["trainer"])

    @property
    def max_rounds(self) -> int:
        """Rounds that it has at most, -1 without a limit."""
        return min((int(value) for name, value in self.limits.items() if name != "max_time"), default=-1)


def limits_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the limits that are limits.

    >>> limits_of({"max_epochs": None, "max_steps": -1, "max_time": "00:00:10:00", "devices": 1})
    {'max_time': '00:00:10:00'}
    """
    return {name: given[name] for name in LIMITS if given.get(name) not in (None, -1)}


# --- configurations -------------------------------------------------------------------------------


class BuiltError(Exception):
    """Carries the parser out of a command line that has not read its arguments."""


class ParserOnly(FederatedCLI):
    """Stops when its parser is built, with `BuiltError`."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        raise BuiltError(parser)


class Composer:
    """Composes configurations as the command line would.

    Args:
        base: configuration files that every method shares, the later one wins.
    """

    def __init__(self, base: Sequence[str]) -> None:
        self.base = list(base)
        self._composed: dict[tuple[str, Case], dict[str, Any]] = {}
        try:
            ParserOnly(["fit"])
        except BuiltError as built:
            self.parser: LightningArgumentParser = built.args[0]

    def compose(self, method: str, settings: Iterable[Setting] = ()) -> dict[str, Any]:
        """Merge the base, the files of a method (`FedED+SAM` has two, an empty name none) and settings, which win.

        Raises:
            SystemExit: with 2, after a sentence, for what the command line refuses.
            FileNotFoundError: there is no such method.
        """
        key = method, tuple(settings)
        if key not in self._composed:
            files = [*self.base, *map(str, map(method_file, filter(None, method.split("+"))))]
            words = [word for file in files for word in ("-c", file)]
            words += [word for name, value in key[1] for word in (f"--{name}", value)]
            config = self.parser.parse_args(["fit", *words]).fit.as_dict()
            kept = {name: plain(value) for name, value in config.items() if name not in ("config", "ckpt_path")}
            self._composed[key] = kept
        return self._composed[key]


def method_file(name: str) -> Path:
    """Find the file of a method: a path, or a name such as `FedNTD` or `LG-FedAvg`.

    Raises:
        FileNotFoundError: naming the nearest one.
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise FileNotFoundError(f"--methods takes names and YAML files, and {name} does not exist")
        return Path(name)
    known = {file.stem: file for folder in reversed(CONFIGS) for file in (folder / "method").glob("*.yaml")}
    stem = name.lower().replace("-", "_")
    if stem not in known:
        raise FileNotFoundError(
            f"--methods must name files in configs/method, got {name!r}{nearest(stem, list(known))}; there are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return known[stem]


def plain(value: Any) -> Any:
    """Write paths as text within a pytree."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def option_names(config: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Collect the names of all options in a configuration, as the command line has them.

    >>> sorted(option_names({"model": {"client": {"class_path": "FedAvg", "init_args": {"net": None}}}}))
    ['model', 'model.client', 'model.client.net']
    """
    names = set()
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        names |= {name} | (option_names(value, name) if isinstance(value, Mapping) else set())
    return names


# --- settings -------------------------------------------------------------------------------------


def parse_settings(given: Sequence[str], option: str) -> dict[str, list[str]]:
    """Read `name=v1,v2`, where commas within brackets do not separate.

    Raises:
        ValueError: naming what was given.

    >>> parse_settings(["model.client.mu=0.1,1", "data.schedule=[[0,1]],null"], "--set")
    {'model.client.mu': ['0.1', '1'], 'data.schedule': ['[[0,1]]', 'null']}
    """
    settings = {}
    for setting in given:
        name, _, values = setting.partition("=")
        if not name or not values:
            raise ValueError(f"{option} must be NAME=VALUE or NAME=VALUE,VALUE, got {setting!r}")
        settings[name.removeprefix("--")] = split_outside_brackets(values)
    return settings


def split_outside_brackets(text: str) -> list[str]:
    """Split at the commas that stand in no brackets.

    >>> split_outside_brackets("a,[b,c],{d: 1, e: 2}")
    ['a', '[b,c]', '{d: 1, e: 2}']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def combinations(given: Mapping[str, Sequence[str]]) -> list[Case]:
    """Combine the values of all settings, which is one empty combination where there are none."""
    return [tuple(zip(given, values, strict=True)) for values in product(*given.values())]


def described(settings: Iterable[Setting], separator: str = ", ") -> str:
    """Write settings by the last parts of their names.

    >>> described([("data.partition.alpha", "0.1")])
    'alpha=0.1'
    """
    return separator.join(f"{name.rpartition('.')[2]}={value}" for name, value in settings)


# --- cells ----------------------------------------------------------------------------------------


def cells_of(
    composer: Composer,
    method: str,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    hold: Sequence[Held] = (),
    more: Sequence[Setting] = (),
) -> list[Cell]:
    """Compose the cells of a method, one for each seed.

    Args:
        composer: of the grid.
        method: name.
        settings: of the grid; those that the method does not know are left out.
        seeds: of the grid.
        hold: what a seed must not vary.
        more: settings that do not name the cell.
    """
    known = option_names(composer.compose(method, more))
    taken = tuple((name, value) for name, value in settings if name in known)
    config = composer.compose(method, [*more, *taken])
    stem = slug("-".join(filter(None, [Path(method).stem if "/" in method else method, described(taken, "-")])))
    return [Cell(method, taken, seed, f"{stem}-seed{seed}", seeded(config, seed, hold)) for seed in seeds]


def slug(text: str) -> str:
    """Write text so that it can name a file.

    >>> slug("FedED+SAM-schedule=[[0, 1]]")
    'FedED+SAM-schedule=_0_1_'
    """
    return re.sub(r"[^\w.+=-]+", "_", text)


def seeded(config: Mapping[str, Any], seed: int, hold: Sequence[Held]) -> dict[str, Any]:
    """Set the seeds of a configuration: those of what is not held.

    Args:
        config: of the method.
        seed: of the grid.
        hold: `partition`: the seed of the partition and the splits stays; `cohorts`: that of the cohorts and of who is
            available; `training`: that of initial weights, batches and all other draws of clients and server.
    """
    data, model, training_seed = dict(config["data"]), dict(config["model"]), config["seed_everything"]
    cohorts = data["sampling_seed"] if data["sampling_seed"] is not None else data["seed"]
    data["sampling_seed"] = cohorts if "cohorts" in hold else seed
    data["seed"] = data["seed"] if "partition" in hold else seed
    if "training" not in hold:
        training_seed, model["seed"] = seed, None
    return {**config, "seed_everything": training_seed, "data": data, "model": model}


def check_names(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Put the cells under their names, equal ones once.

    Raises:
        ValueError: two cells that differ have one name.
    """
    by_name: dict[str, Cell] = {}
    for cell in cells:
        other = by_name.setdefault(cell.name, cell)
        if other.config != cell.config:
            raise ValueError(
                f"every cell needs a name of its own, but {cell.name} is that of {other.method} with "
                f"{described(other.settings) or 'its own settings'} and of {cell.method} with "
                f"{described(cell.settings) or 'its own settings'}; rename a file or choose other settings"
            )
    return by_name
