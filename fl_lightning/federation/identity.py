"""The settings that identify a run, compared when the run continues from a checkpoint."""

import hashlib
import inspect
import math
from argparse import Namespace
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import PurePath
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.client.store import ClientStore
from fl_lightning.data import FederatedDataModule, IIDPartition, Source
from fl_lightning.data.checks import check_simulated
from fl_lightning.engines.settings import cosine_of
from fl_lightning.federation.code import tell_changed_code
from fl_lightning.federation.effects import belongs_to_any, below, counts_or_shares, is_data, is_fixed
from fl_lightning.federation.fingerprint import digest_of_inputs
from fl_lightning.federation.horizon import PLANNED, Horizon, round_limit
from fl_lightning.functional.state import to_float32
from fl_lightning.members.faults import FaultPolicy
from fl_lightning.metrics.keys import is_accuracy
from fl_lightning.types import TrainableModule
from fl_lightning.utils.files import content_digest
from fl_lightning.utils.plain import plain_scalar, plain_value

LIMITS = ("trainer.max_epochs", "trainer.max_steps")
"""Settings that differ only if a module has asked for them."""

COMPARED_IN_EVALUATION = ("data.source", "data.labels", "data.num_classes", "data.input_shape", "model.client.net")
"""Settings that an evaluation compares: data and net."""

OF_THE_DATA = ("num_clients", "batch_size", "shuffle")
"""Settings of the data module that must be the same for all parties of a real federation."""

INITIAL_WEIGHTS = "model.initial_weights"
"""Name of the file with the weights that a run begins with."""

OF_THE_SERVER = (INITIAL_WEIGHTS,)
"""Settings of the loop that only the server of a real federation has."""

ROOTS = {
    "data": "fl_lightning.data.FederatedDataModule",
    "model": "fl_lightning.federation.loop.FederatedLoop",
    "trainer": "pytorch_lightning.Trainer",
}
"""Names of the classes whose arguments the settings of a configuration are."""

MAIN_MODULES = ("__main__.", "__mp_main__.")
"""Prefixes of the names of classes and functions in the main script."""

INPUTS = "data.inputs"
"""Name of the digest of the training samples. Those of other splits are below it, by the name of the split.

None means that samples have no digest. It is not compared, as in a checkpoint that has none.
"""

MAX_CHARACTERS = 200
"""Maximal number of characters of a value that is kept whole. A longer value is its beginning and a digest."""

MAX_DEPTH = 8
"""Maximal depth of a value in a pytree. Deeper values are not described."""

SAME_SEEDS = {"data.sampling_seed": "data.seed", "model.seed": "seed_everything"}
"""Settings that without a value have the value of another setting."""

LISTS_OF_TEXTS = ("model.keep", "model.personal")
"""Settings that take a list of texts, or its one text."""

LISTS_OF_OBJECTS = ("model.transforms", "trainer.callbacks", "trainer.plugins")
"""Settings that take a list of objects, or its one object."""

EMPTY_IS_NONE = (*LISTS_OF_TEXTS, *LISTS_OF_OBJECTS, "data.extra_splits")
"""Settings in which an empty list or dict is the same as None."""

SERVER_MODULE = "model.server_module"
PARTITION = "data.partition"

SPELLINGS: Mapping[str, Mapping[Any, Any]] = {
    "model.aggregator": {None: f"{Aggregator.__module__}.{Aggregator.__qualname__}"},
    "model.store": {None: f"{ClientStore.__module__}.{ClientStore.__qualname__}"},
    "trainer.deterministic": {None: False},
    "trainer.limit_predict_batches": {None: 1.0},
    "trainer.limit_test_batches": {None: 1.0},
    "trainer.limit_train_batches": {None: 1.0},
    "trainer.limit_val_batches": {None: 1.0},
    "trainer.precision": {
        None: "32-true",
        16: "16-mixed",
        "16": "16-mixed",
        32: "32-true",
        "32": "32-true",
        64: "64-true",
        "64": "64-true",
        "bf16": "bf16-mixed",
    },
    "trainer.val_check_interval": {None: 1.0},
}
"""Values of settings that are read as another one."""

COSINE_ROUNDS = "model.lr_decay.rounds"
"""Name of the rounds over which a cosine learning rate falls: those of `lr_decay`, else `trainer.max_epochs`."""

Settings = dict[str, Any]
"""Plain values by dotted name. An object is the name of its class, with its arguments below."""


UNSET = "unset"
"""Stands in a difference for the value of a setting that one side does not have."""


class Difference(NamedTuple):
    """Holds a setting that has changed.

    Args:
        name: Dotted name of the setting.
        was: The value of the checkpoint or of the first run. `UNSET` if it has no such setting.
        now: The value of the present or of the second run. `UNSET` if it has no such setting.
    """

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        sentence = f"{self.name} was {self.was}, is {self.now}"
        if self.name == PLANNED or belongs_to_any(self.name, LIMITS):
            return (
                f"{sentence} (the run has used them, as a privacy budget does; a run that will be longer than its "
                f"first part names all rounds from the start by model.planned_rounds)"
            )
        if self.name != COSINE_ROUNDS:
            return sentence
        return (
            f"{sentence} (a cosine falls over trainer.max_epochs unless model.lr_decay says rounds; "
            f"{{cosine: FINAL_LR, rounds: {self.was}}} goes on after round {self.was}, at FINAL_LR)"
        )


class RunIdentity:
    """Holds the settings of a run, and the settings that may change when the run continues.

    Attributes:
        config: The settings of the parsed configuration. Empty without a configuration. The objects do not hold all
            of them.
        objects: The settings that the objects of the run hold.
        code: Digests of the source of the user's classes and functions, by name.
        files: Fingerprints of the files that sources read, by the name of the source, and of the initial weights.
        weights: Path of the initial weights. None means that they are drawn.
        horizon: The planned rounds. They are a setting of the run if something depends on them.
        allowed: Names of the settings that may change, each with all settings below it.
        changed: The allowed settings that have changed since the checkpoint.
    """

    def __init__(self, horizon: Horizon | None = None) -> None:
        self.config: Settings = {}
        self.objects: Settings = {}
        self.code: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.weights: str | None = None
        self._weights_when_begun: str | None = None
        """Fingerprint of the initial weights of a run that continues."""
        self.horizon = horizon or Horizon()
        self.allowed: list[str] = []
        self.changed: list[Difference] = []

    def begin_run(self) -> None:
        """Forget the run before."""
        self.changed = []
        self._weights_when_begun = None

    def configure(self, config: Mapping[str, Any]) -> None:
        """Set the parsed configuration of the run."""
        self.config = flat(config)

    def allow(self, names: Iterable[str]) -> None:
        """Let the settings of these names change."""
        for name in names:
            setting = name.replace(".init_args", "").removesuffix(".class_path")
            self.allowed.append(PLANNED if setting == f"model.{PLANNED}" else setting)

    def describe(self, settings: Settings, data: FederatedDataModule, fits: bool) -> None:
        """Set the settings of the objects of the run.

        Args:
            settings: The settings of client and parts, from `described_federation`.
            data: The data module of the run.
            fits: Whether the run is a fit, for which the samples of the clients are dealt.
        """
        settings = dict(settings)
        train = data.split("train")
        labels = torch.tensor(len(train)) if train.known_labels is None else train.known_labels
        settings |= described_value("data", data)
        settings["data.participation"] = data.cohort.share
        settings.pop("data.cohort_size", None)  # the share tells it
        settings["data.sampling_seed"] = "secret" if data.secret_seed else data.cohort.seed
        settings["data.labels"] = digest_of([labels])
        names = data.source.class_names
        settings["data.class_names"] = None if names is None else shortened([str(name) for name in names])
        if fits:
            dealt = data.client_samples().dealt
            settings["data.clients"] = digest_of([dealt.indices, dealt.ends])
            settings |= digests_of_inputs(data)
            further = {f"data.extra_splits.{name}": source for name, source in data.extra_splits.items()}
            self.files = fingerprints({"data.source": data.source, **further}) | self._file_of_weights()
        if self.weights is not None:
            settings[INITIAL_WEIGHTS] = self.weights
        self.objects = settings

    def _file_of_weights(self) -> dict[str, str]:
        """Return the fingerprint of the initial weights by their name: those with which the run was begun."""
        fingerprint = self._weights_when_begun
        if fingerprint is None and self.weights is not None:
            fingerprint = content_digest(self.weights)
        return {} if fingerprint is None else {INITIAL_WEIGHTS: fingerprint}

    def state_dict(self) -> dict[str, Settings]:
        return {
            "config": self.config,
            "objects": self.objects,
            "code": dict(self.code),
            "files": dict(self.files),
            "horizon": self.horizon.state(),
        }

    def compare(self, saved: Mapping[str, Settings], evaluates: bool) -> None:
        """Compare the run with the settings of a checkpoint, and tell which code has changed.

        Args:
            saved: The settings, from `state_dict`.
            evaluates: Whether only data and net are compared.

        Raises:
            ValueError: A setting has changed that may not change.
        """
        changed = self._changed(saved)
        plans = {} if evaluates else self.horizon.changed(saved.get("horizon", {}))
        for name, (was, now) in plans.items():
            if name not in [difference.name for difference in changed]:
                changed.append(Difference(name, was=was, now=now))
        if evaluates:
            changed = [difference for difference in changed if belongs_to_any(difference.name, COMPARED_IN_EVALUATION)]
        refused = [difference for difference in changed if not belongs_to_any(difference.name, self.allowed)]
        if refused:
            raise ValueError(
                f"a run is continued with the settings it was begun with, but {'; '.join(map(str, refused))}; give it "
                f"those, start a new run, or let it change by --allow_changes {refused[0].name}"
            )
        self.changed = changed
        tell_changed_code(saved.get("code", {}), self.code)
        files = saved.get("files", {})
        tell_changed_files(files, self.files)
        self._weights_when_begun = files.get(INITIAL_WEIGHTS)

    def _changed(self, saved: Mapping[str, Settings]) -> list[Difference]:
        """Return the differences in what a continued run must have, each once."""
        is_complete = "code" in saved  # Checkpoints of 0.2.0 do not hold all settings.
        changed: list[Difference] = []
        for was, now in ((saved["config"], self.config), (saved["objects"], self.objects)):
            if not was or not now:
                continue
            known = [difference.name for difference in changed]
            for difference in differences(was, now, only_shared=not is_complete):
                if is_fixed(difference.name) and not belongs_to_any(difference.name, known):
                    changed.append(difference)
        return changed


# --- what objects hold ---


def described_federation(
    client: ClientModule, parts: Mapping[str, Any], precision: str, planned: int | None
) -> Settings:
    """Return the settings of a federation, without those of its data.

    Args:
        client: The client module.
        parts: The other parts and settings, by their names in the configuration.
        precision: The precision of the Trainer.
        planned: The planned rounds of the run. None means no limit.
    """
    settings: Settings = {"trainer.precision": precision}
    settings |= described_value("model.client", client)
    settings |= cosine_rounds(parts, planned)
    if client.module is None:
        settings |= described_optimizer("model.client.optimizer", client.optimizer_factory)
    for name, value in parts.items():
        describe = described_optimizer if name == "server_optimizer" else described_value
        settings |= describe(f"model.{name}", value)
    return settings


def described_value(name: str, value: Any, depth: int = 0) -> Settings:
    """Return the classes and plain arguments of a value, with the names that a configuration file gives them.

    Args:
        name: Dotted name of the value.
        value: A plain value, a tensor, a path, a pytree of such values, a factory, a function or another object.
        depth: Depth of the value in its pytree, from 0.
    """
    single = described_single(value)
    if single is not None:
        return {name: single[0]}
    if isinstance(value, Namespace | SimpleNamespace):
        return described_value(name, vars(value), depth)
    if depth > MAX_DEPTH:
        return {name: shortened(value)} if is_plain(value) else {}
    if isinstance(value, Mapping):
        items = [described_value(f"{name}.{key}", item, depth + 1) for key, item in value.items()]
        return joined(items) if items else {name: {}}
    if isinstance(value, set | frozenset):
        return described_items(name, sorted(value, key=str), depth)
    if isinstance(value, list | tuple):
        return described_items(name, list(value), depth)
    if isinstance(value, partial):
        positional = {str(index): item for index, item in enumerate(value.args)}
        return {name: class_name(value.func), **described_arguments(name, {**positional, **value.keywords}, depth)}
    arguments = arguments_of(value)
    if not arguments and tells_itself(value):
        return {name: f"{class_name(type(value))} {shortened(repr(value))}"}
    places = places_of(type(value))
    compared = {key: item for key, item in arguments.items() if key not in places}
    return {name: class_name(type(value)), **described_arguments(name, compared, depth)}


def described_single(value: Any) -> tuple[Any] | None:
    """Return the one value that stands for a number, a text, a path, a tensor, a class or a function, or None."""
    value = plain_scalar(value)
    if isinstance(value, Enum):
        return (value.name,)
    if isinstance(value, PurePath):
        return (str(value),)
    if value is None or isinstance(value, bool | int | float | str):
        return (shortened(value),)
    if isinstance(value, Tensor):
        return (digest_of([value]),)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return (digest_of([torch.as_tensor(plain_value(value))]),)
    if isinstance(value, partial):
        return None
    if inspect.isclass(value) or inspect.isroutine(value):
        return (class_name(value),)
    return None


def tells_itself(value: Any) -> bool:
    """Return True for an object without known arguments whose text tells what it is, such as a dtype or a date."""
    if isinstance(value, nn.Module) and not isinstance(value, nn.Sequential):
        return False
    text = repr(value)
    return " at 0x" not in text and " object at " not in text


def described_items(name: str, items: list[Any], depth: int) -> Settings:
    """Return the settings of a list: one of plain values, else those of each object."""
    if is_plain(items):
        return {name: shortened(items)}
    return joined(described_value(f"{name}.{index}", item, depth + 1) for index, item in enumerate(items))


def described_arguments(name: str, arguments: Mapping[str, Any], depth: int) -> Settings:
    """Return the settings of the arguments of an object."""
    return joined(described_value(f"{name}.{key}", item, depth + 1) for key, item in arguments.items())


def digests_of_inputs(data: FederatedDataModule) -> Settings:
    """Return the digests of the samples that are loaded when a fit begins, by the names of settings.

    Sets that are taken from the training samples have none of their own.

    Args:
        data: The data module, whose clients' samples are dealt.
    """
    digests: Settings = {INPUTS: digest_of_inputs(data.split("train"), data.seed)}
    for name, split in data.loaded_splits.items():
        if name not in ("train", "shared") and not data.holdout_sizes.get(name):
            digests[f"{INPUTS}.{name}"] = digest_of_inputs(split, data.seed)
    return digests


def fingerprints(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of sources and of the sources within them, by name, as far as sources give any.

    Args:
        values: The arguments of a part by dotted name.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(value, Source):
            continue
        arguments = arguments_of(value)
        fingerprint = type(value).fingerprint(arguments) if value.places else None
        if fingerprint is not None:
            found[name] = fingerprint
        found |= fingerprints({f"{name}.{key}": item for key, item in arguments.items()})
    return found


def fingerprint_in(name: str, settings: Settings) -> str | None:
    """Return the fingerprint of the files that a source of some settings reads today, or None if nothing tells.

    Args:
        name: Dotted name of the source, or of the initial weights.
        settings: Settings with the source and its arguments. An argument without a value has its default.
    """
    if name == INITIAL_WEIGHTS:
        path = settings.get(name)
        return None if path is None else content_digest(path)
    kind = resolved(settings.get(name))
    if not places_of(kind):
        return None
    fingerprint: str | None = kind.fingerprint(defaults_of(kind) | below_of(settings, name))
    return fingerprint


def changed_files(was: Mapping[str, str], settings: Settings) -> list[str]:
    """Return the names of the sources whose files have changed. Files that are gone have not changed.

    Args:
        was: Fingerprints of files when the run was begun, by the name of the source.
        settings: Settings with the sources and their arguments.
    """
    now = {name: fingerprint_in(name, settings) for name in was}
    return [name for name in was if now[name] not in (None, was[name])]


def tell_changed_files(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Name in one line the sources whose files have changed since the run was begun, and in another the weights."""
    changed = [name for name in was if now.get(name, was[name]) != was[name]]
    if INITIAL_WEIGHTS in changed:
        changed.remove(INITIAL_WEIGHTS)
        rank_zero_info(
            f"{INITIAL_WEIGHTS}: the file has changed since the run was begun, which goes on from the weights of "
            f"before; start a new run without --ckpt_path to begin with these"
        )
    if changed:
        rank_zero_info(
            f"{', '.join(changed)}: the files have changed since the run was begun, by their names or sizes; start a "
            f"new run without --ckpt_path if they hold other samples"
        )


def places_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class that only say where samples lie, as sources do."""
    if inspect.isclass(kind) and issubclass(kind, Source):
        return kind.places
    return ()


def arguments_of(value: Any) -> Mapping[str, Any]:
    """Return the init arguments of an object: its `hparams`, or the arguments that it keeps as attributes."""
    hparams: Mapping[str, Any] = {}
    if isinstance(value, TrainableModule):
        hparams = getattr(value, "hparams", {})
    names: set[str] = set()
    for kind in type(value).__mro__:
        init = vars(kind).get("__init__")
        if inspect.isfunction(init):
            names.update(inspect.signature(init).parameters)
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    attributes = {**attributes, **attributes.get("_modules", {})}
    found = {name: attributes[name] for name in sorted(names & attributes.keys())}
    return {**found, **hparams}


def described_optimizer(name: str, factory: Any) -> Settings:
    """Return the class and the param-group values of the optimizer that a factory makes.

    Args:
        name: Dotted name of the factory.
        factory: A factory of an optimizer, or None.
    """
    if factory is None:
        return {name: None}
    try:
        optimizer = factory([nn.Parameter(torch.zeros(1))])
        values = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return {name: class_name(type(optimizer)), **described_arguments(name, values, depth=1)}
    except Exception:
        # A factory of the user's may need the parameters of the client.
        return described_value(name, factory)


# --- what a configuration holds ---


def flat(config: Mapping[str, Any]) -> Settings:
    """Return all settings of a parsed configuration, by dotted names without `class_path` and `init_args`.

    A setting that stands for another one has the value of that one: `data.sampling_seed` without a value has that of
    `data.seed`, and `model.seed` has that of `seed_everything`.

    Args:
        config: The configuration.
    """
    settings = cosine_rounds(config.get("model"), planned_rounds(config))
    settings |= flat_part(config, "")
    rule = resolved(settings.get("model.aggregator"))
    if inspect.isclass(rule) and issubclass(rule, Aggregator) and rule.plans(below_of(settings, "model.aggregator")):
        settings[PLANNED] = planned_rounds(config)
        settings.pop(f"model.{PLANNED}", None)  # which the other one tells
    return in_one_form(settings)


def in_one_form(settings: Settings, names: Collection[str] = ()) -> Settings:
    """Return settings in which a setting that stands for another one has its value.

    Args:
        settings: The settings.
        names: Names that the settings get if they lack them.
    """
    settings = dict(settings)
    for name, other in SAME_SEEDS.items():
        is_asked = name in settings or name in names
        if is_asked and settings.get(name) is None and is_number(settings.get(other)):
            settings[name] = settings[other]
    size = settings.get("data.cohort_size")
    clients = settings.get("data.num_clients")
    if is_number(size) and is_number(clients) and clients:
        settings |= {"data.cohort_size": None, "data.participation": size / clients}
    return settings


def below_of(settings: Settings, name: str) -> Settings:
    """Return the settings below a setting, by what their names add to its name."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def planned_rounds(config: Mapping[str, Any]) -> int | None:
    """Return the rounds that a configuration plans, or None without a limit."""
    trainer = config.get("trainer")
    model = config.get("model")
    given = model.get(PLANNED) if isinstance(model, Mapping) else None
    if given is not None or not isinstance(trainer, Mapping):
        return given
    return round_limit(trainer.get("max_epochs"), trainer.get("max_steps"))


def is_number(value: Any) -> bool:
    """Return True for a number that is not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flat_part(config: Mapping[str, Any], prefix: str) -> Settings:
    """Return all settings of a part of a configuration.

    Args:
        config: The part.
        prefix: Dotted name of the part. Empty for the whole configuration.
    """
    settings: Settings = {}
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        if key == "class_path" and isinstance(value, str):
            settings[name] = class_name(value)
        elif key != "init_args" or value:
            settings |= flat_value(name, value)
    return settings


def flat_value(name: str, value: Any) -> Settings:
    """Return the settings of a value of a configuration.

    Args:
        name: Dotted name of the value.
        value: The value.
    """
    if name == "model.faults" and isinstance(value, str):
        # The word stands for a policy.
        return flat_part(asdict(FaultPolicy.of(value)), name)
    if isinstance(value, Mapping):
        return flat_part(value, name) if value else {name: {}}
    written = as_written(value)
    if isinstance(written, list) and any(isinstance(item, Mapping) for item in written):
        return flat_part({str(index): item for index, item in enumerate(value)}, name)
    return {name: shortened(written)}


def as_written(value: Any) -> Any:
    """Write the values of a parsed configuration as a file has them, within a pytree.

    A class or a function is its import path, and a member of an Enum its name. Other objects, such as a path or a span
    of time, are their texts.

    >>> as_written({"act": math.sqrt, "folder": PurePath("a/b"), "names": {"b", "a"}, "widths": (8, 8)})
    {'act': 'math.sqrt', 'folder': 'a/b', 'names': ['a', 'b'], 'widths': [8, 8]}
    """
    if isinstance(value, Mapping):
        return {key: as_written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(item) for item in value]
    if isinstance(value, set | frozenset):
        return [as_written(item) for item in sorted(value, key=str)]
    if isinstance(value, Enum):
        return value.name
    if inspect.isclass(value) or inspect.isroutine(value):
        return class_name(value)
    return plain_scalar(value) if is_plain(value) else str(value)


def cosine_rounds(model: Any, planned: int | None) -> Settings:
    """Return the settings of a cosine learning rate, or an empty dict for another one.

    They fix the planned rounds, which are free otherwise.

    Args:
        model: The settings of the loop.
        planned: The planned rounds of the run. None means no limit.
    """
    cosine = cosine_of(model.get("lr_decay")) if isinstance(model, Mapping) else None
    if cosine is None:
        return {}
    settings: Settings = {"model.lr_decay": "cosine"}
    rounds = cosine.get("rounds", planned)
    if rounds is not None:
        settings[COSINE_ROUNDS] = rounds
    return settings


# --- comparing settings ---


def differences(was: Settings, now: Settings, *, only_shared: bool = False) -> list[Difference]:
    """Return the differences between two sets of settings.

    A setting that one side lacks is the same if the other side has its default today. Arguments that only say where
    samples lie are the same: the digests of the samples tell whether the samples are. If an object is of another class,
    the settings below it are not listed.

    Args:
        was: The settings of the checkpoint or of the first run.
        now: The settings of the present or of the second run.
        only_shared: Whether settings are left out that one side lacks, because a side is known to be incomplete.
    """
    known = was.keys() | now.keys()
    was = in_lists(in_one_form(was, known))
    now = in_lists(in_one_form(now, known))
    names = was.keys() & now.keys() if only_shared else was.keys() | now.keys()
    changed: list[Difference] = []
    for name in sorted(names):
        difference = difference_in(name, was, now)
        if only_shared and difference is not None and is_one_item(difference.was, difference.now):
            continue
        if difference is not None and not belongs_to_any(name, [other.name for other in changed]):
            changed.append(difference)
    return changed


def difference_in(name: str, was: Settings, now: Settings) -> Difference | None:
    """Return the difference in one setting, or None if it is the same on both sides."""
    if below(name, INPUTS) and None in (was.get(name), now.get(name)):
        return None
    if name in was and name in now:
        if is_place(name, now) or is_same(as_read(name, was), as_read(name, now)):
            return None
        return Difference(name, was=was[name], now=now[name])
    known = now if name in now else was
    if is_place(name, known) or has_default(name, known):
        return None
    return Difference(name, was=was.get(name, UNSET), now=now.get(name, UNSET))


def as_read(name: str, settings: Settings) -> Any:
    """Return the value of a setting as the run reads it. A share of 1 has a name, because it is no count of 1.

    Args:
        name: Dotted name of the setting.
        settings: Settings with the setting, and with those on which the meaning of None depends.
    """
    value = settings[name]
    if name in EMPTY_IS_NONE and value in ([], {}):
        return None
    if value is None and name == SERVER_MODULE:
        return server_class_in(settings)
    if value is None and name == PARTITION and settings.get("data.by") is None:
        return class_name(IIDPartition)
    spellings = SPELLINGS.get(name, {})
    if isinstance(value, Hashable):
        value = spellings.get(value, value)
    if counts_or_shares(name) and isinstance(value, float):
        return f"a share of {value}"
    return value


def server_class_in(settings: Settings) -> str | None:
    """Return the name of the class of the server module that a run has if none is given, or None if nothing tells.

    Args:
        settings: Settings with the client. A function that puts something around a client leaves it its server module.
    """
    name = "model.client"
    kind = resolved(settings.get(name))
    while inspect.isroutine(kind):
        within = [f"{name}.{argument}" for argument in ("client", "module")]
        name = next((inner for inner in within if isinstance(settings.get(inner), str)), "")
        kind = resolved(settings.get(name))
    if inspect.isclass(kind) and issubclass(kind, ClientModule):
        return class_name(kind.server_class)
    return class_name(ServerModule) if inspect.isclass(kind) else None


def in_lists(settings: Settings) -> Settings:
    """Return settings in which one item that stands for a list of it is that list."""
    listed: Settings = {}
    for name, value in settings.items():
        if name in LISTS_OF_TEXTS and isinstance(value, str):
            listed[name] = [value]
            continue
        owner = next((other for other in LISTS_OF_OBJECTS if below(name, other)), None)
        if owner is not None and isinstance(settings.get(owner), str):
            listed[f"{owner}.0{name.removeprefix(owner)}"] = value
        else:
            listed[name] = value
    return listed


def is_one_item(was: Any, now: Any) -> bool:
    """Return True for a list of one item in the present run that 0.2.0 has written as the item."""
    return isinstance(now, list) and len(now) == 1 and is_same(was, now[0])


def places_that_differ(was: Settings, now: Settings) -> list[str]:
    """Return the names of the arguments that say where samples lie, and that are not equal on both sides."""
    places = [name for name in was.keys() | now.keys() if is_place(name, now if name in now else was)]
    return [name for name in places if not is_same(was.get(name), now.get(name))]


def is_place(name: str, settings: Settings) -> bool:
    """Return True for an argument of a source that only says where samples lie."""
    owner, _, argument = name.rpartition(".")
    if not is_data(name) or not isinstance(settings.get(owner), str):
        return False
    return argument in places_of(resolved(settings[owner]))


def has_default(name: str, settings: Settings) -> bool:
    """Return True if a setting has the value that it has today if nobody sets it.

    Args:
        name: Dotted name of the setting.
        settings: Settings with the setting, and with the class above it.
    """
    owner = name.rpartition(".")[0]
    while owner and not isinstance(settings.get(owner, ROOTS.get(owner)), str):
        owner = owner.rpartition(".")[0]
    if not owner:
        return settings[name] is None  # an option of the command line
    kind = resolved(settings.get(owner, ROOTS.get(owner)))
    default = default_of(kind, name.removeprefix(f"{owner}.").split("."))
    if default is inspect.Parameter.empty:
        return False
    if default is None and settings[name] in ([], {}):
        return True  # a part of the run that there is none of
    by_default = as_read(name, {**settings, name: plain_default(default)})
    return is_same(by_default, as_read(name, settings))


def default_of(kind: Any, path: Sequence[str]) -> Any:
    """Return the default of an argument of a class or function, `inspect.Parameter.empty` without one.

    Args:
        kind: The class or function. A method passes what it does not name to its base.
        path: Name of the argument. Further names are fields of dataclasses.
    """
    argument, *fields_below = path
    for function in constructors_of(kind):
        parameter = inspect.signature(function).parameters.get(argument)
        if parameter is None:
            continue
        if not fields_below:
            return parameter.default
        hint: Any = None
        with suppress(Exception):  # a hint may name what is not imported
            hint = get_type_hints(function).get(argument)
        for part in get_args(hint) or (hint,):
            if inspect.isclass(part) and is_dataclass(part):
                return default_of(part, fields_below)
        return inspect.Parameter.empty
    return inspect.Parameter.empty


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the defaults of the arguments of a class or function, by name."""
    defaults: dict[str, Any] = {}
    for function in reversed(constructors_of(kind)):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                defaults[name] = parameter.default
    return defaults


def constructors_of(kind: Any) -> list[Any]:
    """Return the functions whose arguments make an object: `__init__` of the classes, or the function itself."""
    if not inspect.isclass(kind):
        return [kind] if inspect.isroutine(kind) else []
    return [vars(base)["__init__"] for base in kind.__mro__ if inspect.isfunction(vars(base).get("__init__"))]


def plain_default(default: Any) -> Any:
    """Return a default in the form that settings have."""
    if is_plain(default):
        return shortened(default)
    described = described_value("default", default)
    return described["default"] if len(described) == 1 else inspect.Parameter.empty


def resolved(name: Any) -> Any:
    """Return the class or function of a name, or None if it cannot be imported."""
    if not isinstance(name, str):
        return None
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def is_same(was: Any, now: Any) -> bool:
    """Return True if two values are equal. A whole number equals the float, and a truth value equals no number.

    A class of the main script is compared by its last name, because the name of the main module differs.
    """
    if isinstance(was, list | tuple) and isinstance(now, list | tuple):
        return len(was) == len(now) and all(map(is_same, was, now))
    if isinstance(was, bool) != isinstance(now, bool):
        return False
    is_of_main = any(isinstance(value, str) and value.startswith(MAIN_MODULES) for value in (was, now))
    if is_of_main:
        return str(was).rpartition(".")[2] == str(now).rpartition(".")[2]
    if isinstance(was, float) and isinstance(now, float) and math.isnan(was) and math.isnan(now):
        return True
    return bool(was == now)


def joined(parts: Iterable[Settings]) -> Settings:
    """Return one dict of the settings of several dicts."""
    settings: Settings = {}
    for part in parts:
        settings.update(part)
    return settings


def shared_settings(parts: Any, data: FederatedDataModule, precision: str, planned: int | None) -> dict[str, str]:
    """Return the digests of the settings and versions that must be the same for all parties of a real federation.

    Args:
        parts: The parts of the federation, whose net is not built.
        data: The data module of one party.
        precision: The precision of the Trainer.
        planned: The planned rounds of the run. None means no limit.

    Returns:
        The digests, by dotted name.

    Raises:
        ValueError: A setting is for simulations only.
    """
    check_simulated(data)
    settings = {name: value for name, value in parts.described(precision, planned).items() if is_fixed(name)}
    for name, value in parts.identity.config.items():
        if name.startswith("model.") and is_fixed(name) and name not in OF_THE_SERVER:
            settings[f"config.{name}"] = value
    for name in OF_THE_DATA:
        settings[f"data.{name}"] = getattr(data, name)
    for package in ("fl_lightning", "torch"):
        settings[f"version.{package}"] = version(package).partition("+")[0]
    return {name: hash_of_value(value) for name, value in settings.items()}


# --- plain values ---


def hash_of_value(value: Any) -> str:
    """Return the first 16 characters of the SHA-256 of a plain value."""
    ordered = sorted(value.items()) if isinstance(value, dict) else value
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]


def is_plain(value: Any) -> bool:
    """Return True if `plain_value` makes numbers, strings, None, and lists and dicts of these of a value."""
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return type(plain_scalar(value)) in (type(None), bool, int, float, str)


def shortened(value: Any) -> Any:
    """Return the plain form of a value, or its beginning and a digest if it is long."""
    value = plain_value(value)
    text = repr(value)
    if len(text) > MAX_CHARACTERS:
        return f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return value


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        values = to_float32(tensor.detach()).cpu().contiguous().numpy()
        # The memory itself is hashed, because a copy of large data takes too much memory.
        digest.update(values.reshape(-1).data)
    return f"sha256 {digest.hexdigest()[:12]}"


def class_name(kind: Any) -> str:
    """Return the name of a class or function, in the module that defines it.

    Args:
        kind: A class, a function, or the dotted name under which one is exported.
    """
    if isinstance(kind, str):
        try:
            kind = resolve_name(kind)
        except (ImportError, AttributeError, ValueError):
            return str(kind)
    if not hasattr(kind, "__qualname__"):
        return type(kind).__name__
    return f"{kind.__module__}.{kind.__qualname__}"


# --- for the loggers ---

DIGESTS = ("data.labels", "data.clients", "data.class_names", INPUTS)
"""Settings of the run's identity that are digests, known from checkpoints only."""


def is_digest(name: str) -> bool:
    """Return True for a setting that is a digest, which no configuration tells."""
    return belongs_to_any(name, DIGESTS)


FINAL = "hp_metric"
"""Lightning's name of the metric that TensorBoard shows beside the hyper-parameters."""


def summary_key(keys: Collection[str]) -> str | None:
    """Return the key of an evaluation that summarizes it: an accuracy, else the first key.

    None if there is no key.

    >>> summary_key(["val/loss", "val/acc"]), summary_key(["val_mse", "val_mae"])
    ('val/acc', 'val_mse')
    """
    for key in keys:
        if is_accuracy(key):
            return key
    return next(iter(keys), None)


def log_final(loggers: Iterable[Any], params: Mapping[str, Any], value: float, round_idx: int) -> None:
    """Log the last value of a run with the hyper-parameters, to loggers that take both, such as TensorBoard.

    Args:
        loggers: The loggers of the Trainer.
        params: The hyper-parameters, by name.
        value: The last value.
        round_idx: Index of the last round.
    """
    for logger in loggers:
        arguments = inspect.signature(logger.log_hyperparams).parameters
        if "metrics" in arguments and "step" in arguments:
            logger.log_hyperparams(dict(params), metrics={FINAL: value}, step=round_idx)
