"""Identity of a run: the settings that give its rounds their meaning, compared when a checkpoint is continued."""

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
from fl_lightning.functional.state import to_float32
from fl_lightning.members.faults import FaultPolicy
from fl_lightning.types import TrainableModule

FREE_OF_TRAINER = (
    *("accelerator", "strategy", "devices", "num_nodes", "plugins", "default_root_dir", "model_registry"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run", "barebones"),
    *("logger", "callbacks", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar"),
    *("enable_model_summary", "enable_autolog_hparams", "num_sanity_val_steps", "profiler", "detect_anomaly"),
)
FREE_OF_MODEL = ("threads", "evaluate_clients_every", "chunk", "store", "initial_weights", "process_timeout", "metrics")
FREE = {
    *("config", "ckpt_path", "weights_only", "verbose", "return_predictions", "allow_changes", "data.eval_batch_size"),
    "plots",
    "best",
    *(f"trainer.{name}" for name in FREE_OF_TRAINER),
    *(f"model.{name}" for name in FREE_OF_MODEL),
}
"""Settings that may differ from one part of a run to the next, each with all below it; every other is fixed."""

PATHS = ("root", "folder", "path", "dirpath", "save_dir", "cache_dir", "data_dir")
"""Last names of settings that say where something lies, which are free wherever they stand."""

EVALUATED = ("data.source", "data.labels", "data.num_classes", "data.input_shape", "model.client.net")
"""Settings that an evaluation compares: data and net."""

OF_THE_DATA = ("num_clients", "batch_size", "shuffle")
"""Settings of the data that all parties must have alike."""

MAIN = ("__main__.", "__mp_main__.")
"""Beginnings of the names of what the main script defines."""

LONGEST = 200
"""Characters of a value that are kept; of a longer one the beginning and its digest."""

DEEPEST = 8

COSINE_ROUNDS = "model.lr_decay.rounds"
"""Name of the rounds over which a cosine learning rate falls: those given, else `trainer.max_epochs`."""

Settings = dict[str, Any]
"""Plain values by dotted name; an object is its class at its own name, and its arguments below."""


class Difference(NamedTuple):
    """A setting that is not what it was."""

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
    """Settings of a run, and which of them may change where it is continued.

    Attributes:
        config: the parsed configuration, where there is one; it names what the objects do not tell.
        objects: what the objects of the run tell of themselves.
        allowed: settings that may change, by name, each with all below it.
        changed: those of them that did, where the run was continued.
    """

    def __init__(self) -> None:
        self.config: Settings = {}
        self.objects: Settings = {}
        self.allowed: list[str] = []
        self.changed: list[Difference] = []

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take a parsed configuration."""
        self.config = flat(config)

    def allow(self, names: Iterable[str]) -> None:
        """Let settings change, by name."""
        self.allowed += [name.replace(".init_args", "").removesuffix(".class_path") for name in names]

    def describe(self, settings: Settings, data: FederatedDataModule, fits: bool) -> None:
        """Take the settings of client and parts (`described_federation`), and what the data tell.

        `fits`: the clients' samples are dealt.
        """
        settings = dict(settings)
        train = data.split("train")
        settings |= described("data", data)
        settings |= {
            "data.participation": data.cohort.share,
            "data.sampling_seed": "secret" if data.secret_seed else data.cohort.seed,
            "data.labels": digest_of([torch.tensor(len(train)) if train.known_labels is None else train.known_labels]),
        }
        if fits:
            dealt = data.client_samples().dealt
            settings["data.clients"] = digest_of([dealt.indices, dealt.ends])
        self.objects = settings

    def state_dict(self) -> dict[str, Settings]:
        return {"config": self.config, "objects": self.objects}

    def compare(self, saved: Mapping[str, Settings], evaluates: bool) -> None:
        """Compare with the settings of a checkpoint.

        Args:
            saved: what `state_dict` gave.
            evaluates: compare data and net only.

        Raises:
            ValueError: naming each further difference.
        """
        changed = differences(saved["config"], self.config) or differences(saved["objects"], self.objects)
        if evaluates:
            changed = [setting for setting in changed if any(below(setting.name, name) for name in EVALUATED)]
        refused = [setting for setting in changed if not any(below(setting.name, name) for name in self.allowed)]
        if refused:
            raise ValueError(
                f"a run is continued with the settings it was begun with, but {'; '.join(map(str, refused))}; give it "
                f"those, start a new run, or let it change by --allow_changes {refused[0].name}"
            )
        self.changed = changed


def described_federation(
    client: ClientModule, parts: Mapping[str, Any], precision: str, max_epochs: int | None
) -> Settings:
    """Describe what a federation is made of, but for its data.

    Args:
        client: that is trained.
        parts: the others by their names in the configuration.
        precision: of the Trainer.
        max_epochs: rounds of the run; None or -1: not limited.
    """
    settings = {"trainer.precision": precision, **described("model.client", client)}
    settings |= cosine_rounds(parts, max_epochs)
    if client.module is None:
        settings |= described_optimizer("model.client.optimizer", client.optimizer_factory)
    for name, value in parts.items():
        find = described_optimizer if name == "server_optimizer" else described
        settings |= find(f"model.{name}", value)
    return settings


def described(name: str, value: Any, depth: int = 0) -> Settings:
    """Describe a value by its classes and plain init values, as a configuration file would name them.

    Args:
        name: dotted name of the value.
        value: a plain value, a pytree of them, a factory of an optimizer (described by the param-group values that it
            makes), a function, or an object (by those init arguments that it keeps as attributes).
        depth: of the pytree.
    """
    if isinstance(value, PurePath) or depth > DEEPEST:
        return {}
    if value is None or isinstance(value, bool | int | float | str):
        return {name: value}
    if isinstance(value, Tensor):
        return {name: digest_of([value])}
    if isinstance(value, Mapping):
        return joined(described(f"{name}.{key}", item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
        if not is_plain(items):
            return joined(described(f"{name}.{i}", item, depth + 1) for i, item in enumerate(items))
        return {name: shortened(items[0] if len(items) == 1 else items)}
    if isinstance(value, partial):
        return {name: class_of(value.func), **described_items(name, value.keywords, depth)}
    if inspect.isclass(value) or inspect.isroutine(value):
        return {name: class_of(value)}
    arguments: Mapping[str, Any] = getattr(value, "hparams", {}) if isinstance(value, TrainableModule) else {}
    if not arguments:
        inits = [vars(kind)["__init__"] for kind in type(value).__mro__ if "__init__" in vars(kind)]
        names = {name for init in inits if inspect.isfunction(init) for name in inspect.signature(init).parameters}
        kept: dict[str, Any] = getattr(value, "__dict__", {})
        kept = {**kept, **kept.get("_modules", {})}
        arguments = {n: kept[n] for n in sorted(names & kept.keys())}
    return {name: class_of(type(value)), **described_items(name, arguments, depth)}


def described_items(name: str, values: Mapping[str, Any], depth: int) -> Settings:
    """Describe arguments by their names.

    Those that say where something lies are left out.
    """
    return joined(described(f"{name}.{key}", item, depth + 1) for key, item in values.items() if key not in PATHS)


def described_optimizer(name: str, factory: Any) -> Settings:
    """Describe a factory by the class and the param-group values of the optimizer that it makes."""
    if factory is None:
        return {name: None}
    try:
        made = factory([nn.Parameter(torch.zeros(1))])
        values = {key: value for key, value in made.param_groups[0].items() if key != "params"}
        return {name: class_of(type(made)), **described_items(name, values, 1)}
    except Exception:  # a factory that wants the client's own parameters
        return described(name, factory)


def flat(config: Mapping[str, Any], prefix: str = "") -> Settings:
    """Flatten a parsed configuration.

    `class_path` and `init_args` leave the names.
    """
    model = ({} if prefix else config).get("model")
    trainer = ({} if prefix else config).get("trainer")
    settings = cosine_rounds(model, trainer.get("max_epochs") if isinstance(trainer, Mapping) else None)
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        if key in PATHS or is_free(name):
            continue
        if name == "model.faults" and isinstance(value, str):  # a word for what else stands in the policy
            settings |= flat(asdict(FaultPolicy.of(value)), name)
        elif isinstance(value, Mapping):
            settings |= flat(value, name)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            settings |= flat({str(i): item for i, item in enumerate(value)}, name)
        elif key == "class_path":
            settings[name] = class_of(value)
        elif not isinstance(value, PurePath):
            settings[name] = shortened(value if is_plain(value) else str(value))
    return settings


def cosine_rounds(model: Any, max_epochs: int | None) -> Settings:
    """Name a cosine learning rate and its rounds, where there is one: with them `max_epochs` is not free."""
    lr_decay = model.get("lr_decay") if isinstance(model, Mapping) else None
    if not isinstance(lr_decay, Mapping) or "cosine" not in lr_decay:
        return {}
    rounds = lr_decay.get("rounds", max_epochs)
    return {"model.lr_decay": "cosine"} | ({} if rounds is None else {COSINE_ROUNDS: rounds})


def is_free(name: str) -> bool:
    """Return True for a setting that may change when a run is continued."""
    return name.rpartition(".")[2] in PATHS or any(below(name, free) for free in FREE)


def below(name: str, other: str) -> bool:
    """Return True for a setting that is `other`, or an argument of it."""
    return name == other or name.startswith(f"{other}.")


def differences(was: Settings, now: Settings) -> list[Difference]:
    """Compare what both know.

    Below an object of another class nothing more is named.
    """
    changed: list[Difference] = []
    for name in sorted(was.keys() & now.keys()):
        if not same(was[name], now[name]) and not any(below(name, other.name) for other in changed):
            changed.append(Difference(name, was[name], now[name]))
    return changed


def same(was: Any, now: Any) -> bool:
    """Compare two values.

    A class of the main script is known by its name, since its module has another one there.
    """
    if any(isinstance(value, str) and value.startswith(MAIN) for value in (was, now)):
        return str(was).rpartition(".")[2] == str(now).rpartition(".")[2]
    return bool(was == now)


def joined(parts: Iterable[Settings]) -> Settings:
    """Join settings of different names."""
    return {name: value for part in parts for name, value in part.items()}


def shared_settings(parts: Any, data: FederatedDataModule, precision: str, max_epochs: int | None) -> dict[str, str]:
    """Digest every setting that all parties of a real federation must have alike, by dotted name, and the versions.

    Args:
        parts: of the federation, whose net is not built.
        data: of one party.
        precision: of the Trainer.
        max_epochs: rounds of the run; None or -1: not limited.

    Raises:
        ValueError: a setting that only a simulation can have.
    """
    check_simulated(data)
    settings = {name: value for name, value in parts.described(precision, max_epochs).items() if not is_free(name)}
    config = parts.identity.config
    settings |= {f"config.{name}": value for name, value in config.items() if name.startswith("model.")}
    settings |= {f"data.{name}": getattr(data, name) for name in OF_THE_DATA}
    settings |= {f"version.{name}": version(name).partition("+")[0] for name in ("fl_lightning", "torch")}
    return {name: hash_of_value(value) for name, value in settings.items()}


def hash_of_value(value: Any) -> str:
    """Hash a plain value."""
    ordered = sorted(value.items()) if isinstance(value, dict) else value
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]


def is_plain(value: Any) -> bool:
    """Return True for what loads with `weights_only`: numbers, strings, None, and lists, tuples and dicts of them."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_plain, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, bool | int | float | str)


def shortened(value: Any) -> Any:
    """Replace a long value by its beginning and a digest."""
    text = repr(value)
    if len(text) <= LONGEST:
        return list(map(shortened, value)) if isinstance(value, list | tuple) else value
    return f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Hash the values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        values = to_float32(tensor.detach()).cpu().contiguous().numpy()
        digest.update(values.reshape(-1).data)  # not a copy: data are large
    return f"sha256 {digest.hexdigest()[:12]}"


def class_of(kind: Any) -> str:
    """Name a class or function where it is defined, also given the path by which it is exported."""
    if isinstance(kind, str):
        try:
            kind = resolve_name(kind)
        except (ImportError, AttributeError, ValueError):
            return str(kind)
    return f"{kind.__module__}.{kind.__qualname__}" if hasattr(kind, "__qualname__") else type(kind).__name__


# --- for the loggers

DIGESTS = ("data.labels", "data.clients")
"""Settings of a run's identity that are digests."""

FINAL = "hp_metric"
"""Lightning's name of the metric that TensorBoard shows beside hyper-parameters."""


def summary_key(keys: Collection[str]) -> str | None:
    """Choose the key that sums up an evaluation: an accuracy, else the first one.

    None of none.

    >>> summary_key(["val/loss", "val/acc"]), summary_key(["val_mse", "val_mae"])
    ('val/acc', 'val_mse')
    """
    return next((key for key in keys if key.lower().endswith(("acc", "accuracy"))), next(iter(keys), None))


def log_final(loggers: Iterable[Any], params: Mapping[str, Any], value: float, round_idx: int) -> None:
    """Log the run's last value with the hyper-parameters, to loggers that take both (TensorBoard)."""
    for logger in loggers:
        takes = inspect.signature(logger.log_hyperparams).parameters
        if {"metrics", "step"} <= takes.keys():
            logger.log_hyperparams(dict(params), metrics={FINAL: value}, step=round_idx)
