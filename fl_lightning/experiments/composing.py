"""Whole configurations of runs, composed of files and settings as the command line would."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml  # type: ignore[import-untyped]
from pytorch_lightning.cli import LightningArgumentParser

from fl_lightning.cli.configs import HOME
from fl_lightning.cli.methods import printed_names
from fl_lightning.cli.parser_only import fit_parser
from fl_lightning.cli.wrappers import CLIENT, Layers, layers_of, placed_option
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.configured import as_written
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.keys import parse_directions
from fl_lightning.reports.saved import CLASS_PATH
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.text import folded

Setting = tuple[str, str]
"""An option's name and its value, as on the command line."""

SettingPairs = tuple[Setting, ...]
Held = Literal["partition", "cohorts", "training"]
CONFIGS = (Path("configs"), HOME)
"""Folders in which the files of methods are looked up."""


class Composer:
    """Composes configurations as the command line would.

    Args:
        base: configuration files that all runs share, the later one wins.
    """

    def __init__(self, base: Sequence[str]) -> None:
        self.base = list(base)
        self.parser: LightningArgumentParser = fit_parser()
        self._composed: dict[tuple[str, SettingPairs, tuple[str, ...]], dict[str, Any]] = {}

    def compose(self, method: str, settings: Iterable[Setting] = (), configs: Sequence[str] = ()) -> dict[str, Any]:
        """Merge the base, further files, the files of a method and settings, which win.

        An option of the client reaches the client in a wrapper, unless the wrapper has such an option.

        Args:
            method: name or path of its file; `FedED+SAM` has two, an empty name none.
            settings: as on the command line.
            configs: files over the base, below the method's.

        Raises:
            SystemExit: with 2, after a sentence, for what the command line refuses.
            FileNotFoundError: there is no such method.
        """
        key = method, tuple(settings), tuple(configs)
        if key not in self._composed:
            files = [*self.base, *configs, *map(method_config, filter(None, method.split("+")))]
            words = [word for file in files for word in ("-c", file)]
            layers = Layers([], None)
            if any(name.startswith(f"{CLIENT}.") for name, _ in key[1]):
                layers = self.layers_of(method, configs)
            for name, value in key[1]:
                words += [f"--{placed_option(name, layers)}", value]
            config = self.parser.parse_args(["fit", *words]).fit.as_dict()
            kept = {name: as_written(value) for name, value in config.items() if name not in ("config", "ckpt_path")}
            self._composed[key] = kept
        return self._composed[key]

    def layers_of(self, method: str, configs: Sequence[str] = ()) -> Layers:
        """Return the client that files make, and its wrappers.

        Args:
            method: As for `compose`.
            configs: As for `compose`.
        """
        return layers_of(self.compose(method, configs=configs)["model"]["client"])


def method_config(name: str) -> str:
    """Find the configuration of a method: a path, a name such as `FedNTD` or `LG-FedAvg`, or the path of a class.

    A name counts without case, hyphens and underscores.

    Returns:
        The path of its file, or YAML.

    Raises:
        FileNotFoundError: naming the nearest one.

    >>> method_config("my_methods.FedLS")
    '{model: {client: {class_path: my_methods.FedLS}}}'
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise FileNotFoundError(f"a method is a name, a YAML file or the path of a class; {name} does not exist")
        return name
    known = {file.stem: file for folder in reversed(CONFIGS) for file in (folder / "method").glob("*.yaml")}
    if same := [file for stem, file in known.items() if folded(stem) == folded(name)]:
        return str(same[-1])  # the user's own, where there is one
    if CLASS_PATH.fullmatch(name):
        return as_yaml({"model": {"client": {"class_path": name}}})
    printed = printed_names()
    names = sorted((printed.get(stem, stem) for stem in known), key=str.casefold)
    raise FileNotFoundError(
        f"a method is a file in configs/method, or the path of a class, got {name!r}{suggestion(name, names)}; "
        f"there are {', '.join(names) or 'none'}"
    )


def short_name(method: str) -> str:
    """Name a method as tables do: a file without its folder, a class without its module.

    >>> short_name("mine/fedls.yaml"), short_name("my_methods.FedLS"), short_name("FedED+SAM")
    ('fedls', 'FedLS', 'FedED+SAM')
    """
    parts = (Path(p).stem if p.endswith((".yaml", ".yml")) else p.rpartition(".")[2] for p in method.split("+"))
    return "+".join(parts)


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


@cache
def nested_names() -> frozenset[str]:
    """Collect the names of options within a dataclass that a configuration may have none of.

    >>> "data.feature_shift.noise" in nested_names()
    True
    """
    return frozenset(
        f"{part}.{name}.{field.name}"
        for part, of in (("model", FederatedLoop), ("data", FederatedDataModule))
        for name, hint in get_type_hints(of.__init__).items()
        for kind in get_args(hint)
        if is_dataclass(kind)
        for field in fields(kind)
    )


def seeded(config: Mapping[str, Any], seed: int, hold: Sequence[Held]) -> dict[str, Any]:
    """Set the seeds of a configuration: those of what is not held.

    Args:
        config: of the method.
        seed: of the run.
        hold: `partition`: the seed of the partition and the splits stays; `cohorts`: that of the cohorts and of who is
            available; `training`: that of initial weights, batches and all other draws of clients and server.
    """
    data = dict(config["data"])
    model = dict(config["model"])
    training_seed = config["seed_everything"]
    cohorts = data["sampling_seed"] if data["sampling_seed"] is not None else data["seed"]
    data["sampling_seed"] = cohorts if "cohorts" in hold else seed
    data["seed"] = data["seed"] if "partition" in hold else seed
    if "training" not in hold:
        training_seed = seed
        model["seed"] = None
    return {**config, "seed_everything": training_seed, "data": data, "model": model}


# --- settings -------------------------------------------------------------------------------------


DIRECTION = "direction"
"""Option of `fit` that takes several values, which all runs of an experiment get."""

OF_FIT_ALONE = ("seed_everything", DIRECTION)
"""Options of `fit` without a dot in their name that hold for all runs of an experiment."""


def split_overrides(argv: Sequence[str]) -> tuple[list[str], SettingPairs]:
    """Take the options of `fit` out of those of a command: those with a dot in their name, the seed and directions.

    Raises:
        ValueError: one has no value.

    >>> split_overrides(["--output", "out", "--trainer.max_epochs", "2", "--data.partition=IID"])
    (['--output', 'out'], (('trainer.max_epochs', '2'), ('data.partition', 'IID')))
    >>> split_overrides(["--direction", "val/a=min", "val/b=max", "--output", "out"])
    (['--output', 'out'], (('direction', 'val/a=min,val/b=max'),))
    """
    rest = list[str]()
    settings = list[Setting]()
    directions = list[str]()
    words = deque(argv)
    while words:
        word = words.popleft()
        name, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in name or name in OF_FIT_ALONE):
            rest.append(word)
            continue
        if not given:
            value = words.popleft() if words else ""
            if not value or value.startswith("--"):
                raise ValueError(f"an option of fit takes a value, as in --{name} VALUE, and --{name} has none")
        if name != DIRECTION:
            settings.append((name, value))
            continue
        directions.append(value)
        while words and not words[0].startswith("-"):
            directions.append(words.popleft())
    if directions:
        parse_directions(directions)
        settings.append((DIRECTION, ",".join(directions)))
    return rest, tuple(settings)


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
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def setting_combinations(given: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combine the values of all settings, which is one empty combination where there are none."""
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


def as_settings(given: Mapping[str, Any]) -> SettingPairs:
    """Write settings as on the command line, which takes YAML (JSON has no infinity).

    >>> as_settings({"model.client.mu": 0.1, "data.partition": {"class_path": "IID"}, "data.partition.alpha": math.inf})
    (('model.client.mu', '0.1'), ('data.partition', '{class_path: IID}'), ('data.partition.alpha', '.inf'))
    """
    return tuple((name, value if isinstance(value, str) else as_yaml(value)) for name, value in given.items())


def as_yaml(value: Any) -> str:
    """Write a value as YAML, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.strip().removesuffix("\n...")  # the end of a document, after a plain value


def in_list(*values: str) -> str:
    """Join values of an option that appends, single ones or lists, to one list as YAML.

    >>> in_list("A", "[{class_path: B}, C]")
    '[A, {class_path: B}, C]'
    """
    read = [yaml.safe_load(value) for value in values]
    return as_yaml([item for value in read for item in (value if isinstance(value, list) else [value])])


def settings_text(settings: Iterable[Setting], separator: str = ", ") -> str:
    """Write settings by the last parts of their names.

    >>> settings_text([("data.partition.alpha", "0.1")])
    'alpha=0.1'
    """
    return separator.join(f"{name.rpartition('.')[2]}={value}" for name, value in settings)
