"""Whole configurations of runs, composed of files and settings as the command line would."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pytorch_lightning.cli import LightningArgumentParser

from fl_lightning.cli.configs import HOME
from fl_lightning.cli.methods import printed_names
from fl_lightning.cli.parser_only import fit_parser
from fl_lightning.cli.wrappers import CLIENT, Layers, layers_of, placed_option
from fl_lightning.data import FederatedDataModule
from fl_lightning.experiments.overrides import Setting, SettingPairs, as_yaml
from fl_lightning.federation.configured import as_written
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.reports.saved import CLASS_PATH
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.text import folded

Held = Literal["partition", "cohorts", "training"]
"""What a seed of an experiment does not vary, see `seeded`."""

CONFIGS = (Path("configs"), HOME)
"""Folders in which the files of methods are looked up. The user's own folder wins."""


class Composer:
    """Composes configurations as the command line would.

    Args:
        base: Configuration files that all runs share. A later file wins over an earlier one.
    """

    def __init__(self, base: Sequence[str]) -> None:
        self.base = list(base)
        self.parser: LightningArgumentParser = fit_parser()
        self._composed: dict[tuple[str, SettingPairs, tuple[str, ...]], dict[str, Any]] = {}

    def compose(self, method: str, settings: Iterable[Setting] = (), configs: Sequence[str] = ()) -> dict[str, Any]:
        """Merge the base, further files, the files of a method and settings, which win.

        An option of the client reaches the client in a wrapper, unless the wrapper has such an option.

        Args:
            method: Name of the method, or path of its file. `FedED+SAM` has two files, an empty name has none.
            settings: Settings as on the command line.
            configs: Files over the base, below the files of the method.

        Raises:
            SystemExit: The command line refuses the settings, and has printed why. The code is 2.
            FileNotFoundError: No method has this name.
        """
        pairs = tuple(settings)
        key = (method, pairs, tuple(configs))
        if key not in self._composed:
            self._composed[key] = self._merge(method, pairs, configs)
        return self._composed[key]

    def _merge(self, method: str, settings: SettingPairs, configs: Sequence[str]) -> dict[str, Any]:
        """Merge files and settings by the parser of the command line, see `compose`."""
        words = ["fit"]
        of_method = [method_config(part) for part in method.split("+") if part]
        for file in [*self.base, *configs, *of_method]:
            words += ["-c", file]
        layers = Layers([], None)
        if any(name.startswith(f"{CLIENT}.") for name, _ in settings):
            layers = self.layers_of(method, configs)
        for name, value in settings:
            words += [f"--{placed_option(name, layers)}", value]
        config = self.parser.parse_args(words).fit.as_dict()
        return {name: as_written(value) for name, value in config.items() if name not in ("config", "ckpt_path")}

    def layers_of(self, method: str, configs: Sequence[str] = ()) -> Layers:
        """Return the client that files make, and its wrappers.

        Args:
            method: Name of the method, as for `compose`.
            configs: Files over the base, as for `compose`.
        """
        return layers_of(self.compose(method, configs=configs)["model"]["client"])


def method_config(name: str) -> str:
    """Find the configuration of a method.

    Args:
        name: A path, a name such as `FedNTD` or `LG-FedAvg`, or the path of a class. A name counts without case,
            hyphens and underscores.

    Returns:
        The path of its file, or YAML.

    Raises:
        FileNotFoundError: No method has this name. The sentence names the nearest method.

    >>> method_config("my_methods.FedLS")
    '{model: {client: {class_path: my_methods.FedLS}}}'
    """
    if is_file_name(name):
        if not Path(name).is_file():
            raise FileNotFoundError(f"a method is a name, a YAML file or the path of a class; {name} does not exist")
        return name
    known: dict[str, Path] = {}
    for folder in reversed(CONFIGS):
        known |= {file.stem: file for file in (folder / "method").glob("*.yaml")}
    same = [file for stem, file in known.items() if folded(stem) == folded(name)]
    if same:
        # The last file is the user's own, if there is one.
        return str(same[-1])
    if CLASS_PATH.fullmatch(name):
        return as_yaml({"model": {"client": {"class_path": name}}})
    printed = printed_names()
    names = sorted((printed.get(stem, stem) for stem in known), key=str.casefold)
    raise FileNotFoundError(
        f"a method is a file in configs/method, or the path of a class, got {name!r}{suggestion(name, names)}; "
        f"there are {', '.join(names) or 'none'}"
    )


def is_file_name(name: str) -> bool:
    """Return True if a name is the path of a YAML file."""
    return name.endswith((".yaml", ".yml"))


def short_name(method: str) -> str:
    """Name a method as tables do: a file without its folder, a class without its module.

    >>> short_name("mine/fedls.yaml"), short_name("my_methods.FedLS"), short_name("FedED+SAM")
    ('fedls', 'FedLS', 'FedED+SAM')
    """
    parts = []
    for part in method.split("+"):
        parts.append(Path(part).stem if is_file_name(part) else part.rpartition(".")[2])
    return "+".join(parts)


def option_names(config: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Collect the names of all options in a configuration, as the command line has them.

    Args:
        config: A configuration, or a part of it.
        prefix: Name of the option that has the part. Empty for a whole configuration.

    >>> sorted(option_names({"model": {"client": {"class_path": "FedAvg", "init_args": {"net": None}}}}))
    ['model', 'model.client', 'model.client.net']
    """
    names: set[str] = set()
    for key, value in config.items():
        name = f"{prefix}.{key}".lstrip(".")
        if key in ("class_path", "init_args"):
            name = prefix
        names.add(name)
        if isinstance(value, Mapping):
            names |= option_names(value, name)
    return names


@cache
def nested_names() -> frozenset[str]:
    """Collect the names of options within dataclasses, which a configuration may set to null.

    >>> "data.feature_shift.noise" in nested_names()
    True
    """
    names: set[str] = set()
    for part, owner in (("model", FederatedLoop), ("data", FederatedDataModule)):
        for name, hint in get_type_hints(owner.__init__).items():
            for kind in filter(is_dataclass, get_args(hint)):
                names |= {f"{part}.{name}.{field.name}" for field in fields(kind)}
    return frozenset(names)


def seeded(config: Mapping[str, Any], seed: int, hold: Sequence[Held]) -> dict[str, Any]:
    """Set the seeds of a configuration, except the seeds of what is held.

    Args:
        config: Whole configuration of a method.
        seed: Seed of the run.
        hold: Parts whose seed stays. `partition` is the partition and the splits. `cohorts` is the cohorts and who is
            available. `training` is the initial weights, the batches and all other draws of clients and server.
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
