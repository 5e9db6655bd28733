"""The settings that identify a run, compared when the run continues from a checkpoint."""

import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import PurePath
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.checks import check_simulated
from fl_lightning.engines.settings import cosine_of
from fl_lightning.functional.state import to_float32
from fl_lightning.members.faults import FaultPolicy
from fl_lightning.metrics.keys import is_accuracy
from fl_lightning.types import TrainableModule
from fl_lightning.utils.plain import plain_scalar, plain_value

FREE = frozenset(
    {
        "allow_changes",
        "best",
        "ckpt_path",
        "config",
        "data.eval_batch_size",
        "direction",
        "model.chunk",
        "model.evaluate_clients_every",
        "model.initial_weights",
        "model.metrics",
        "model.process_timeout",
        "model.store",
        "model.threads",
        "plots",
        "return_predictions",
        "trainer.accelerator",
        "trainer.barebones",
        "trainer.callbacks",
        "trainer.default_root_dir",
        "trainer.detect_anomaly",
        "trainer.devices",
        "trainer.enable_autolog_hparams",
        "trainer.enable_checkpointing",
        "trainer.enable_model_summary",
        "trainer.enable_progress_bar",
        "trainer.fast_dev_run",
        "trainer.log_every_n_steps",
        "trainer.logger",
        "trainer.max_epochs",
        "trainer.max_steps",
        "trainer.max_time",
        "trainer.min_epochs",
        "trainer.min_steps",
        "trainer.model_registry",
        "trainer.num_nodes",
        "trainer.num_sanity_val_steps",
        "trainer.plugins",
        "trainer.profiler",
        "trainer.strategy",
        "verbose",
        "weights_only",
    }
)
"""Settings that may change when a run continues, each with all settings below it. Every other setting is fixed."""

PATHS = ("root", "folder", "path", "dirpath", "save_dir", "cache_dir", "data_dir")
"""Last names of settings that hold the path of a file or folder. They are free everywhere."""

COMPARED_IN_EVALUATION = ("data.source", "data.labels", "data.num_classes", "data.input_shape", "model.client.net")
"""Settings that an evaluation compares: data and net."""

OF_THE_DATA = ("num_clients", "batch_size", "shuffle")
"""Settings of the data module that must be the same for all parties of a real federation."""

MAIN_MODULES = ("__main__.", "__mp_main__.")
"""Prefixes of the names of classes and functions in the main script."""

MAX_CHARACTERS = 200
"""Maximal number of characters of a value that is kept whole. A longer value is its beginning and a digest."""

MAX_DEPTH = 8
"""Maximal depth of a value in a pytree. Deeper values are not described."""

COSINE_ROUNDS = "model.lr_decay.rounds"
"""Name of the rounds over which a cosine learning rate falls: those of `lr_decay`, else `trainer.max_epochs`."""

Settings = dict[str, Any]
"""Plain values by dotted name. An object is the name of its class, with its arguments below."""


class Difference(NamedTuple):
    """Holds a setting that has changed.

    Args:
        name: Dotted name of the setting.
        was: The value of the checkpoint or of the first run.
        now: The value of the present or of the second run.
    """

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        sentence = f"{self.name} was {self.was}, is {self.now}"
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
        allowed: Names of the settings that may change, each with all settings below it.
        changed: The allowed settings that have changed since the checkpoint.
    """

    def __init__(self) -> None:
        self.config: Settings = {}
        self.objects: Settings = {}
        self.allowed: list[str] = []
        self.changed: list[Difference] = []

    def configure(self, config: Mapping[str, Any]) -> None:
        """Set the parsed configuration of the run."""
        self.config = flat(config)

    def allow(self, names: Iterable[str]) -> None:
        """Let the settings of these names change."""
        for name in names:
            self.allowed.append(name.replace(".init_args", "").removesuffix(".class_path"))

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
        self.objects = settings

    def state_dict(self) -> dict[str, Settings]:
        return {"config": self.config, "objects": self.objects}

    def compare(self, saved: Mapping[str, Settings], evaluates: bool) -> None:
        """Compare the run with the settings of a checkpoint.

        Args:
            saved: The settings, from `state_dict`.
            evaluates: Whether only data and net are compared.

        Raises:
            ValueError: A setting has changed that may not change.
        """
        changed = differences(saved["config"], self.config) or differences(saved["objects"], self.objects)
        if evaluates:
            changed = [difference for difference in changed if belongs_to_any(difference.name, COMPARED_IN_EVALUATION)]
        refused = [difference for difference in changed if not belongs_to_any(difference.name, self.allowed)]
        if refused:
            raise ValueError(
                f"a run is continued with the settings it was begun with, but {'; '.join(map(str, refused))}; give it "
                f"those, start a new run, or let it change by --allow_changes {refused[0].name}"
            )
        self.changed = changed


# --- what objects hold ---


def described_federation(
    client: ClientModule, parts: Mapping[str, Any], precision: str, max_epochs: int | None
) -> Settings:
    """Return the settings of a federation, without those of its data.

    Args:
        client: The client module.
        parts: The other parts and settings, by their names in the configuration.
        precision: The precision of the Trainer.
        max_epochs: The maximal number of rounds of the run. None or -1 means no limit.
    """
    settings: Settings = {"trainer.precision": precision}
    settings |= described_value("model.client", client)
    settings |= cosine_rounds(parts, max_epochs)
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
    if isinstance(value, PurePath) or depth > MAX_DEPTH:
        return {}
    if value is None or isinstance(value, bool | int | float | str):
        return {name: value}
    if isinstance(value, Tensor):
        return {name: digest_of([value])}
    if isinstance(value, Mapping):
        return joined(described_value(f"{name}.{key}", item, depth + 1) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return described_items(name, sorted(value, key=str), depth)
    if isinstance(value, list | tuple):
        return described_items(name, list(value), depth)
    if isinstance(value, partial):
        return {name: class_name(value.func), **described_arguments(name, value.keywords, depth)}
    if inspect.isclass(value) or inspect.isroutine(value):
        return {name: class_name(value)}
    return {name: class_name(type(value)), **described_arguments(name, arguments_of(value), depth)}


def described_items(name: str, items: list[Any], depth: int) -> Settings:
    """Return the settings of a list. A list of plain values is one setting, and a single value stands for itself."""
    if not is_plain(items):
        return joined(described_value(f"{name}.{index}", item, depth + 1) for index, item in enumerate(items))
    return {name: shortened(items[0] if len(items) == 1 else items)}


def described_arguments(name: str, arguments: Mapping[str, Any], depth: int) -> Settings:
    """Return the settings of the arguments of an object, without arguments that hold a path."""
    return joined(
        described_value(f"{name}.{key}", item, depth + 1) for key, item in arguments.items() if key not in PATHS
    )


def arguments_of(value: Any) -> Mapping[str, Any]:
    """Return the init arguments of an object: its `hparams`, or the arguments that it keeps as attributes."""
    if isinstance(value, TrainableModule):
        hparams: Mapping[str, Any] = getattr(value, "hparams", {})
        if hparams:
            return hparams
    names: set[str] = set()
    for kind in type(value).__mro__:
        init = vars(kind).get("__init__")
        if inspect.isfunction(init):
            names.update(inspect.signature(init).parameters)
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    attributes = {**attributes, **attributes.get("_modules", {})}
    return {name: attributes[name] for name in sorted(names & attributes.keys())}


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


def flat(config: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return the fixed settings of a parsed configuration, by dotted names without `class_path` and `init_args`.

    Args:
        config: The configuration, or a part of it.
        prefix: Dotted name of the part. Empty for the whole configuration.
    """
    settings: Settings = {}
    if not prefix:
        trainer = config.get("trainer")
        max_epochs = trainer.get("max_epochs") if isinstance(trainer, Mapping) else None
        settings = cosine_rounds(config.get("model"), max_epochs)
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        if key in PATHS or is_free(name):
            continue
        if key == "class_path" and isinstance(value, str):
            settings[name] = class_name(value)
        else:
            settings |= flat_value(name, value)
    return settings


def flat_value(name: str, value: Any) -> Settings:
    """Return the fixed settings of a value of a configuration.

    Args:
        name: Dotted name of the value.
        value: The value.
    """
    if name == "model.faults" and isinstance(value, str):
        # The word stands for a policy.
        return flat(asdict(FaultPolicy.of(value)), name)
    if isinstance(value, Mapping):
        return flat(value, name)
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return flat({str(index): item for index, item in enumerate(value)}, name)
    if isinstance(value, PurePath):
        return {}
    return {name: shortened(value if is_plain(value) else str(value))}


def cosine_rounds(model: Any, max_epochs: int | None) -> Settings:
    """Return the settings of a cosine learning rate, or an empty dict for another one.

    They fix `max_epochs`, which is free otherwise.

    Args:
        model: The settings of the loop.
        max_epochs: The maximal number of rounds of the run. None or -1 means no limit.
    """
    cosine = cosine_of(model.get("lr_decay")) if isinstance(model, Mapping) else None
    if cosine is None:
        return {}
    settings: Settings = {"model.lr_decay": "cosine"}
    rounds = cosine.get("rounds", max_epochs)
    if rounds is not None:
        settings[COSINE_ROUNDS] = rounds
    return settings


# --- comparing settings ---


def is_free(name: str) -> bool:
    """Return True if a setting may change when a run continues."""
    last_name = name.rpartition(".")[2]
    return last_name in PATHS or belongs_to_any(name, FREE)


def below(name: str, other: str) -> bool:
    """Return True if a setting is `other` or an argument of `other`."""
    return name == other or name.startswith(f"{other}.")


def belongs_to_any(name: str, others: Iterable[str]) -> bool:
    """Return True if a setting is one of `others` or an argument of one of them."""
    return any(below(name, other) for other in others)


def differences(was: Settings, now: Settings) -> list[Difference]:
    """Return the differences between the settings that both sides have.

    If an object is of another class, the settings below it are not listed.

    Args:
        was: The settings of the checkpoint or of the first run.
        now: The settings of the present or of the second run.
    """
    changed: list[Difference] = []
    for name in sorted(was.keys() & now.keys()):
        if not is_same(was[name], now[name]) and not belongs_to_any(name, [other.name for other in changed]):
            changed.append(Difference(name, was=was[name], now=now[name]))
    return changed


def is_same(was: Any, now: Any) -> bool:
    """Return True if two values are equal.

    A class of the main script is compared by its last name, because the name of the main module differs.
    """
    is_of_main = any(isinstance(value, str) and value.startswith(MAIN_MODULES) for value in (was, now))
    if is_of_main:
        return str(was).rpartition(".")[2] == str(now).rpartition(".")[2]
    return bool(was == now)


def joined(parts: Iterable[Settings]) -> Settings:
    """Return one dict of the settings of several dicts."""
    settings: Settings = {}
    for part in parts:
        settings.update(part)
    return settings


def shared_settings(parts: Any, data: FederatedDataModule, precision: str, max_epochs: int | None) -> dict[str, str]:
    """Return the digests of the settings and versions that must be the same for all parties of a real federation.

    Args:
        parts: The parts of the federation, whose net is not built.
        data: The data module of one party.
        precision: The precision of the Trainer.
        max_epochs: The maximal number of rounds of the run. None or -1 means no limit.

    Returns:
        The digests, by dotted name.

    Raises:
        ValueError: A setting is for simulations only.
    """
    check_simulated(data)
    settings = {name: value for name, value in parts.described(precision, max_epochs).items() if not is_free(name)}
    for name, value in parts.identity.config.items():
        if name.startswith("model."):
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

DIGESTS = ("data.labels", "data.clients", "data.class_names")
"""Settings of the run's identity that are digests, known from checkpoints only."""

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
