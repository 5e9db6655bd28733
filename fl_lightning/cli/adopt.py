"""`fl-lightning fit --from FILE`: the configuration of a program with LightningCLI as that of a federation."""

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI

from fl_lightning.cli.classes import find_class
from fl_lightning.cli.configs import locate
from fl_lightning.cli.errors import RefusedTogetherError
from fl_lightning.cli.wrappers import put
from fl_lightning.cli.yaml_keys import not_yaml
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.checks import HALF_PRECISIONS, REFUSED
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.utils.packages import LIGHTNING
from fl_lightning.utils.settings import as_list
from fl_lightning.utils.suggestions import suggestion

FROM = "from"
"""Option of `fit` whose value is a configuration file of LightningCLI."""

SECTIONS = ("model", "data", "optimizer", "lr_scheduler")
"""Sections of LightningCLI that are a class. The option of the same name gives the class to a section without one."""

INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
"""A value of a file by its name, as OmegaConf writes it."""

ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^{}]*?)\s*)?\}")
"""A variable of the environment, perhaps with a value that it has if it is not set, as OmegaConf writes it."""

OPTIONS_OF = {"model": "--model.client.module", "data": "--data.source"}
"""Options that give the arguments of a section's class, by the name of the section."""

PARTS = {"model": FederatedLoop, "data": FederatedDataModule}
"""Classes of a federation whose arguments have the names of a section in front."""

CONFIGS = ("-c", "--config")
LIMITS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.fast_dev_run")
"""Settings that limit the rounds of a fit."""

SHARDING = ("fsdp", "deepspeed", "model_parallel", "modelparallel")
"""Beginnings of the names of strategies that spread one model over devices."""

STARTS = ("spawn", "fork", "notebook")
"""Ways to start processes that the names of strategies end with."""

TWINS = {"lightning.pytorch.": "pytorch_lightning.", "lightning.fabric.": "lightning_fabric."}
"""First parts of import paths of Lightning's own classes, and those under which the Trainer knows them."""

UNTIL_ROUND = {
    "every_n_train_steps": "counts batches, of which a round has one",
    "train_time_interval": "is no number of rounds",
}
"""Arguments of ModelCheckpoint that never write in a federation, with the reason."""


# --- the command line ---


class Adopted(NamedTuple):
    """Holds a command line in which the files of LightningCLI have been read.

    Args:
        words: The words, with `-c` and the first of the files in the place of what was read.
        files: The files.
        text: The settings of a federation that they became, as YAML.
        notes: What was moved or dropped, a line for each setting.
    """

    words: list[str]
    files: list[str]
    text: str
    notes: list[str]


ADOPTED: ContextVar[Adopted | None] = ContextVar("ADOPTED", default=None)
"""What the command line that is being parsed has adopted."""


@contextmanager
def being_parsed(adopted: Adopted | None) -> Iterator[None]:
    """Let `adopted_file` find the text of a command line in the block, where the command's parser parses, too."""
    token = ADOPTED.set(adopted or ADOPTED.get())
    try:
        yield
    finally:
        ADOPTED.reset(token)


def adopted_file(name: str) -> Adopted | None:
    """Return what a value of `-c` stands for if it was put there by `adopt`, else None."""
    adopted = ADOPTED.get()
    return adopted if adopted is not None and adopted.files[0] == name else None


def adopt(words: Sequence[str]) -> Adopted | None:
    """Read the files of LightningCLI that a command line names by `--from`, None if it names none.

    Args:
        words: The words of the command line, the command first.

    Raises:
        ValueError: The command is not `fit`, an option lacks its value, or a file is no YAML with sections.
        RefusedTogetherError: Some settings have no meaning in a federation.
    """
    taken, remaining = taken_options(words)
    if not taken[FROM]:
        return None
    if words[0] != "fit":
        raise ValueError(
            f"--{FROM} is an option of fit, got {words[0]}; give -c and the config.yaml in the run's folder, which has "
            f"all settings of the federation"
        )
    content: dict[str, Any] = {}
    for name in taken[FROM]:
        content = merged(content, content_of(name))
    classes = {name: values[-1] for name, values in taken.items() if name != FROM and values}
    content, notes = interpolated(content)
    adoption = Adoption(classes, given=named_settings(remaining), folder=Path(taken[FROM][-1]).parent)
    adoption.notes += notes
    adoption.read(content)
    if adoption.refusals:
        files = " and ".join(taken[FROM])
        raise RefusedTogetherError(
            f"{files} cannot be federated as written; an option of the command line replaces a setting of the file",
            adoption.refusals,
        )
    return Adopted(
        words=[remaining[0], "-c", taken[FROM][0], *remaining[1:]],
        files=taken[FROM],
        text=yaml.dump(adoption.settings, Dumper=QuotingDumper, sort_keys=False),
        notes=adoption.notes,
    )


def taken_options(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split a command line into the values of `--from` and of the options of sections, and the other words.

    Without `--from`, the options of sections are other words.

    >>> taken_options("fit --from a.yaml --model=their.Module --data.num_clients 10".split())[1]
    ['fit', '--data.num_clients', '10']
    """
    taken: dict[str, list[str]] = {name: [] for name in (FROM, *SECTIONS)}
    if not any(word.partition("=")[0] == f"--{FROM}" for word in words):
        return taken, list(words)
    remaining = []
    following = iter(words)
    for word in following:
        option, has_value, value = word.partition("=")
        name = option.removeprefix("--")
        if not option.startswith("--") or name not in taken:
            remaining.append(word)
            continue
        if not has_value:
            value = next(following, "")
        if not value or value.startswith("-"):
            kind = "FILE" if name == FROM else "CLASS"
            raise ValueError(f"{option} needs a value, got {value or 'none'}; write {option} {kind}")
        taken[name].append(value)
    return taken, remaining


def named_settings(words: Sequence[str]) -> set[str]:
    """Return the settings that the options of a command line, or the files of its `-c`, give, such as `data.source`."""
    names = set[str]()
    for before, word in zip(["", *words], words, strict=False):
        option, has_value, value = word.partition("=")
        if option.startswith("--"):
            names.add(option.removeprefix("--"))
        if before in CONFIGS or (has_value and option in CONFIGS):
            names |= settings_in(word if before in CONFIGS else value)
    return names


def settings_in(config: str) -> set[str]:
    """Return the settings that a value of `-c` gives, by their first two names, nothing if it cannot be read."""
    names = set[str]()
    with suppress(ValueError, OSError, yaml.YAMLError):  # Its own reader reports these.
        texts = [config] if ":" in config else [path.read_text(encoding="utf-8") for path in locate(config)]
        for text in texts:
            content = get_loader("yaml")(text)
            for section, values in content.items() if isinstance(content, dict) else ():
                names.add(".".join(str(section).split(".")[:2]))
                if isinstance(values, dict):
                    names.update(f"{section}.{key}" for key in values)
    return names


# --- files ---


class QuotingDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every text, so that none is read as a number."""


QuotingDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def content_of(name: str) -> dict[str, Any]:
    """Return the content of a configuration file.

    Raises:
        ValueError: There is no such file, it is no YAML, or it has no sections.
    """
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--{FROM} must be a configuration file of LightningCLI, got {name}; there is no such file")
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{name} {not_yaml(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"--{FROM} must be a configuration file of LightningCLI, got {name} without sections; write some, such as "
            f"trainer: {{max_epochs: 30}}"
        )
    return content


def merged(base: Any, over: Any) -> Any:
    """Return settings with those of a later file over them, as LightningCLI merges its files.

    >>> merged({"trainer": {"max_epochs": 1, "callbacks": ["A"]}}, {"trainer.max_epochs": 2, "trainer.callbacks+": "B"})
    {'trainer': {'max_epochs': 2, 'callbacks': ['A', 'B']}}
    """
    if not isinstance(over, dict):
        return over
    has_other_class = isinstance(base, dict) and over.get("class_path", base.get("class_path")) != base.get(
        "class_path"
    )
    found: dict[str, Any] = dict(base) if isinstance(base, dict) and not has_other_class else {}
    for key, value in over.items():
        name, _, further = str(key).partition(".")
        if further:
            found[name] = merged(found.get(name), {further: value})
        elif name.endswith("+"):
            found[name[:-1]] = as_list(found.get(name[:-1])) + as_list(value)
        else:
            found[name] = merged(found.get(name), value)
    return found


def interpolated(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put values of a file into the places that name them by `${a.b}`, as programs with OmegaConf's parser do.

    Args:
        content: The content of the file.

    Returns:
        The content, and a line for each of these places. What names no value of the file or the environment stays.

    >>> interpolated({"model": {"lr": "${optimizer.lr}"}, "optimizer": {"lr": 0.1}})[1]
    ['model.lr: ${optimizer.lr} is 0.1']
    """
    notes: list[str] = []

    def with_values(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: with_values(item, f"{name}.{key}".strip(".")) for key, item in value.items()}
        if isinstance(value, list):
            return [with_values(item, f"{name}.{place}") for place, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        found = ENVIRONMENT.sub(in_environment, value)
        if found != value:
            # The value may be a secret.
            notes.append(f"{name}: {value} is taken from the environment")
            return found
        for reference in INTERPOLATION.findall(value):
            there, target = looked_up(content, reference)
            if there:
                found = target if found == f"${{{reference}}}" else found.replace(f"${{{reference}}}", str(target))
        if found != value:
            notes.append(f"{name}: {value} is {found}")
        return found

    return with_values(content, ""), notes


def in_environment(reference: re.Match[str]) -> str:
    """Return the value of a variable of the environment, else its default, else the reference itself.

    Args:
        reference: What `ENVIRONMENT` has found.
    """
    name, default = reference.groups()
    found = os.environ.get(name, default)
    return reference.group() if found is None else found


def looked_up(content: Any, name: str) -> tuple[bool, Any]:
    """Return whether nested settings have a value that is no other reference, and the value.

    >>> looked_up({"a": {"b": 1}}, "a.b"), looked_up({"a": "${a}"}, "a")
    ((True, 1), (False, None))
    """
    for part in name.split("."):
        if not isinstance(content, dict) or part not in content:
            return False, None
        content = content[part]
    if "${" in str(content):
        return False, None
    return True, content


def references(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each setting that names a value by `${...}`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from references(item, f"{name}.{key}".strip("."))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from references(item, f"{name}.{place}")
    elif isinstance(value, str) and "${" in value:
        yield name, value


# --- what becomes of settings ---


class Adoption:
    """Makes settings of a federation of those of LightningCLI, and collects what it has to say.

    Args:
        classes: The classes of sections, by the name of the section, as the command line gives them.
        given: The settings that the command line or further files give.
        folder: The folder of the file.

    Attributes:
        settings: The settings of the federation, nested.
        notes: What was moved or dropped, a line for each setting.
        refusals: A sentence for each setting that has no meaning in a federation.
    """

    def __init__(self, classes: Mapping[str, str], *, given: Collection[str], folder: Path) -> None:
        self.classes = classes
        self.given = given
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.refusals: list[str] = []
        self.is_saved = False
        """Whether a program has saved the file, with all arguments except those that it links."""

    def put(self, name: str, value: Any) -> None:
        """Set a setting of the federation."""
        put(self.settings, name, value)

    def read(self, content: Mapping[str, Any]) -> None:
        """Read all sections of a file."""
        for name, text in references(content):
            self.refusals.append(
                f"{name} must name a value of the file or a variable that is set (${{oc.env:NAME}}), got {text}; write "
                f"the value into a copy of it"
            )
        sections = self._of_fit(content)
        self.is_saved = is_saved(sections.get("trainer"))
        for name, reader in READERS.items():
            reader(self, sections.pop(name, None))
        for name, value in sections.items():
            if value is not None and name in OTHER_ARGUMENTS:
                self.notes.append(f"{name}: dropped; it is an argument of another command")
            elif value is not None:
                self.refusals.append(
                    f"{name} must be a section of LightningCLI, got an argument that the program adds itself; remove "
                    f"it from a copy of the file, and write a callback under trainer.callbacks"
                )

    def _of_fit(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the command `fit`, whose section a file for several commands has."""
        commands = LightningCLI.subcommands().keys()
        sections = {name: value for name, value in content.items() if name not in commands and name != "subcommand"}
        for name in content:
            if name in commands and name != "fit":
                self.notes.append(f"{name}: dropped; it is the section of another command")
        return {**sections, **(content.get("fit") or {})}

    def check_options(self, name: str, section: Mapping[str, Any]) -> None:
        """Refuse options that are arguments of a section's class, which have another name in a federation.

        Args:
            name: The name of the section.
            section: The class and its arguments.
        """
        ours = inspect.signature(PARTS[name]).parameters
        theirs: Mapping[str, Any] = {}
        with suppress(Exception):  # The parser reports a class that is not found.
            kind: Any = find_class(section["class_path"])
            theirs = inspect.signature(kind).parameters
        for option in sorted(self.given):
            owner, _, argument = option.partition(".")
            first = argument.partition(".")[0]
            if owner == name and first in theirs and first not in ours:
                self.refusals.append(
                    f"--{option} must have the name that it has in a federation, got an argument of "
                    f"{section['class_path']}; write {OPTIONS_OF[name]}.{argument}"
                )

    def tell_linked(self, name: str, section: Mapping[str, Any]) -> None:
        """Record the arguments of a section's class that a saved file lacks, because the program may link them.

        Args:
            name: The name of the section.
            section: The class and its arguments.
        """
        if not self.is_saved:
            return
        given = section.get("init_args") or {}
        for argument, default in plain_defaults_of(section["class_path"]).items():
            option = f"{OPTIONS_OF[name]}.{argument}"
            if argument not in given and option.removeprefix("--") not in self.given:
                self.notes.append(
                    f"{name}.{argument}: not in the file, as an argument that the program links (link_arguments); "
                    f"{default} is taken unless you add {option} VALUE"
                )

    def section(self, name: str, value: Any) -> dict[str, Any] | None:
        """Return a section as a class with its arguments, None if there is none.

        Args:
            name: The name of the section.
            value: Its content: a class and its arguments, arguments only, the name of a class or of a file.
        """
        kind = self.classes.get(name)
        if isinstance(value, str):
            path = self.folder / value
            value = content_of(str(path)) if path.is_file() else {"class_path": value}
        if value is None:
            return None if kind is None else {"class_path": kind}
        if not isinstance(value, dict):
            self.refusals.append(f"{name} must be a class with its arguments, got {value}; write class_path: and below")
            return None
        if "class_path" in value:
            return value if kind is None else {**value, "class_path": kind}
        if kind is None:
            self.refusals.append(
                f"{name} must have the class whose arguments it holds, got none; add --{name} CLASS, the import path "
                f"of the class that the program gives LightningCLI"
            )
            return None
        return {"class_path": kind, **value} if "init_args" in value else {"class_path": kind, "init_args": value}


def is_saved(trainer: Any) -> bool:
    """Return True for the section of a Trainer as LightningCLI saves it, with most of its settings."""
    settings = inspect.signature(Trainer.__init__).parameters.keys()
    return isinstance(trainer, dict) and len(settings & trainer.keys()) > len(settings) // 2


def plain_defaults_of(path: str) -> dict[str, Any]:
    """Return the arguments of a class whose default is a plain value, as linked ones are, by name."""
    defaults: dict[str, Any] = {}
    with suppress(Exception):  # The parser reports a class that is not found.
        kind: Any = find_class(path)
        for name, parameter in inspect.signature(kind).parameters.items():
            if parameter.default is None or type(parameter.default) in (bool, int, float, str):
                defaults[name] = parameter.default
    return defaults


def read_model(adoption: Adoption, value: Any) -> None:
    """Make the module of a section the module of FedAvg, whose class options and files may change."""
    module = adoption.section("model", value)
    if module is not None:
        adoption.put("model.client.class_path", "fl_lightning.methods.FedAvg")
        adoption.put("model.client.init_args.module", module)
        adoption.notes.append("model: moved to model.client, as the module that FedAvg trains")
        adoption.check_options("model", module)
        adoption.tell_linked("model", module)
    elif value is None and "model.client" not in adoption.given:
        adoption.refusals.append(
            "model must be the LightningModule that clients train, got none; add --model CLASS, the import path of the "
            "class that the program gives LightningCLI"
        )


def read_data(adoption: Adoption, value: Any) -> None:
    """Make the data module of a section the source of the clients' samples."""
    source = adoption.section("data", value)
    if source is not None:
        adoption.put("data.source", source)
        adoption.notes.append("data: moved to data.source, whose training samples are divided among the clients")
        adoption.check_options("data", source)
        adoption.tell_linked("data", source)
    elif value is None and "data.source" not in adoption.given:
        adoption.refusals.append(
            "data must be the data that are divided, got none (loaders of a LightningModule are not called); add "
            "--data CLASS, the import path of a LightningDataModule"
        )


def read_optimizer(adoption: Adoption, value: Any) -> None:
    """Give the client the optimizer of a section."""
    optimizer = adoption.section("optimizer", value)
    if optimizer is not None:
        adoption.put("model.client.init_args.optimizer", with_known_paths(adoption, "optimizer", optimizer))
        adoption.notes.append("optimizer: moved to model.client.optimizer, in place of configure_optimizers")


def read_scheduler(adoption: Adoption, value: Any) -> None:
    """Give the client the scheduler of a section, if it has an optimizer of a section."""
    scheduler = adoption.section("lr_scheduler", value)
    if scheduler is None:
        return
    client = adoption.settings.get("model", {}).get("client", {}).get("init_args", {})
    if "optimizer" not in client and "model.client.optimizer" not in adoption.given:
        adoption.notes.append("lr_scheduler: dropped; LightningCLI uses it with a section optimizer only")
        return
    adoption.put("model.client.init_args.lr_scheduler", with_known_paths(adoption, "lr_scheduler", scheduler))
    adoption.notes.append("lr_scheduler: moved to model.client.lr_scheduler")


def read_seed(adoption: Adoption, value: Any) -> None:
    """Keep the seed."""
    if value is not None:
        adoption.put("seed_everything", value)


def read_checkpoint(adoption: Adoption, value: Any) -> None:
    """Start from the weights of a checkpoint, whose fit a federation cannot continue."""
    if value is None:
        return
    if {"ckpt_path", "model.initial_weights"} & set(adoption.given):
        adoption.notes.append("ckpt_path: dropped; the command line names other weights")
    elif Path(str(value)).is_file():
        adoption.put("model.initial_weights", value)
        adoption.notes.append("ckpt_path: moved to model.initial_weights; its epoch and optimizers are not continued")
    else:
        adoption.refusals.append(
            f"ckpt_path must be a file, from whose weights the federation starts, got {value}; add "
            f"--model.initial_weights FILE"
        )


def read_trainer(adoption: Adoption, value: Any) -> None:
    """Find an answer for each setting of the Trainer."""
    if isinstance(value, str):
        value = content_of(str(adoption.folder / value))
    if not isinstance(value, dict | None):
        adoption.refusals.append(
            f"trainer must be settings by name, got {value}; write such as max_epochs: 30 below it"
        )
        return
    defaults = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items()}
    settings = {name: each for name, each in (value or {}).items() if f"trainer.{name}" not in adoption.given}
    # How many batches a step takes comes before the limit of steps.
    for name in sorted(settings, key=lambda name: name != "accumulate_grad_batches"):
        setting = settings[name]
        if name not in defaults:
            adoption.refusals.append(
                f"trainer.{name} must be a setting of the Trainer, which has none of that name"
                f"{suggestion(name, list(defaults))}; remove it from a copy of the file"
            )
        elif setting is not None and setting != defaults[name]:
            TRAINER.get(name, keep)(adoption, name, setting)
    spread_clients(adoption, settings)
    limits = {f"trainer.{name}" for name in adoption.settings.get("trainer", {})} | set(adoption.given)
    if limits.isdisjoint(LIMITS) and not any(each.startswith("trainer.max_steps") for each in adoption.refusals):
        adoption.refusals.append(
            "trainer.max_epochs must be the number of rounds, got none; add --trainer.max_epochs 30"
        )


# --- settings of the Trainer ---

Answer = Callable[[Adoption, str, Any], None]
"""Finds out what becomes of a setting of the Trainer, given its name and its value, which is not the default."""


def keep(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a setting that has the same meaning in a federation, with paths under which the Trainer knows classes."""
    adoption.put(f"trainer.{name}", with_known_paths(adoption, f"trainer.{name}", value))


def keep_for_rounds(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a setting that counts epochs, which are rounds."""
    adoption.put(f"trainer.{name}", value)
    adoption.notes.append(f"trainer.{name}: kept; {value} is a number of communication rounds")


def drop(adoption: Adoption, name: str, value: Any, why: str) -> None:
    """Drop a setting without which the run measures and does the same, or more."""
    adoption.notes.append(f"trainer.{name}: {value} dropped; {why}")


def refuse(adoption: Adoption, name: str, value: Any, why: str, instead: str) -> None:
    """Refuse a setting that would be another one in a federation."""
    adoption.refusals.append(f"trainer.{name} {why}, got {value}; add {instead}")


def move(adoption: Adoption, name: str, value: Any, to: str) -> None:
    """Move a setting of the Trainer's optimizer to the clients'."""
    adoption.put(to, value)
    adoption.notes.append(f"trainer.{name}: moved to {to}, {value}")


def clip(adoption: Adoption, name: str, value: Any) -> None:
    """Move the largest norm of gradients, of which Lightning takes 0 for none."""
    if value:
        move(adoption, name, value, to="model.clip_norm")


def limit_steps(adoption: Adoption, name: str, value: Any) -> None:
    """Move a number of batches to the clients' steps, and a share of them to the clients' work."""
    if not is_number(value):
        keep(adoption, name, value)
    elif isinstance(value, float):
        if value < 1:
            move(adoption, name, value, to="data.local_work")
    elif value < 1:
        refuse(adoption, name, value, why="must leave batches to train on", instead=f"--trainer.{name} null")
    else:
        accumulated = adoption.settings.get("model", {}).get("accumulate_grad_batches", 1)
        steps = ceil(value / accumulated) if is_number(accumulated) else value
        move(adoption, name, steps, to="model.max_local_steps")


def limit_rounds(adoption: Adoption, name: str, value: Any) -> None:
    """Drop a number of optimizer steps if the command line gives the rounds, else refuse it."""
    if set(LIMITS) & set(adoption.given):
        drop(adoption, name, value, why="it counts optimizer steps")
    else:
        why = "counts optimizer steps, and the length of a federation is a number of rounds"
        refuse(adoption, name, value, why=why, instead="--trainer.max_epochs ROUNDS")


def evaluate(adoption: Adoption, name: str, value: Any) -> None:
    """Drop an interval within an epoch: the global model exists once a round."""
    if value != 1.0 or not isinstance(value, float):
        drop(adoption, name, value, why="the global model is evaluated once a round, after it")


def clip_by_norm(adoption: Adoption, name: str, value: Any) -> None:
    """Refuse to clip by value."""
    if value != "norm":
        why = "must be norm, by which clients clip their gradients"
        refuse(adoption, name, value, why=why, instead=f"--trainer.{name} norm")


def use_precision(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a precision in which weights are float32 or better."""
    if value in HALF_PRECISIONS:
        why = "must keep the weights in single precision, which small updates need"
        refuse(adoption, name, value, why=why, instead=f"--trainer.{name} bf16-mixed")
    else:
        keep(adoption, name, value)


def spread(adoption: Adoption, name: str, value: Any) -> None:
    """Spread clients over processes in the place of batches."""
    path = str(value.get("class_path") if isinstance(value, dict) else value)
    kind = path.rpartition(".")[2].lower()
    arguments = value.get("init_args") or {} if isinstance(value, dict) else {}
    if kind.startswith(SHARDING):
        why = "must leave the model whole on a device, where a client is trained"
        refuse(adoption, name, path, why=why, instead=f"--trainer.{name} client_parallel")
    elif kind.startswith("ddp"):
        started = f"{kind}_{arguments.get('start_method', '')}"
        ending = "".join(f"_{start}" for start in STARTS if start in started)
        adoption.put(f"trainer.{name}", f"client_parallel{ending}")
        adoption.notes.append(f"trainer.{name}: {path} is client_parallel{ending}; processes train different clients")
    else:
        keep(adoption, name, value)


def spread_clients(adoption: Adoption, settings: Mapping[str, Any]) -> None:
    """Spread clients over the devices of a file that leaves the strategy to Lightning, which would take DDP.

    Args:
        adoption: The adoption.
        settings: The settings of the Trainer in the file.
    """
    is_open = settings.get("strategy") in (None, "auto") and "trainer.strategy" not in adoption.given
    if is_open and (is_several(settings.get("devices")) or is_several(settings.get("num_nodes"))):
        adoption.put("trainer.strategy", "client_parallel")
        adoption.notes.append("trainer.strategy: auto is client_parallel; processes train different clients")


def is_several(devices: Any) -> bool:
    """Return True for a number above 1, for such a number as text, and for a list of several.

    >>> is_several([0, 1]), is_several("2"), is_several("auto"), is_several(None)
    (True, True, False, False)
    """
    count = str(len(devices) if isinstance(devices, list) else devices)
    return count.isdecimal() and int(count) > 1


def is_number(value: Any) -> bool:
    """Return True for a number. The parser reports another value where a number is needed."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def use_callbacks(adoption: Adoption, name: str, value: Any) -> None:
    """Keep callbacks that have a meaning in a federation."""
    kept = []
    for callback in as_list(value):
        path = str(callback.get("class_path") if isinstance(callback, dict) else callback)
        kinds = lightning_names(path)
        refused = sorted(kinds & REFUSED.keys())
        for kind in refused:
            adoption.refusals.append(f"trainer.callbacks must be without {path}: it {REFUSED[kind]}")
        if refused:
            continue
        has_steps = "ModelCheckpoint" in kinds and isinstance(callback, dict)
        settings = without_steps(adoption, callback) if has_steps else callback
        kept.append(with_known_paths(adoption, f"trainer.{name}", settings))
    adoption.put(f"trainer.{name}", kept)


def without_steps(adoption: Adoption, callback: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a ModelCheckpoint without intervals that no round reaches."""
    arguments = dict(callback.get("init_args") or {})
    for name, why in UNTIL_ROUND.items():
        if arguments.get(name):
            adoption.notes.append(f"trainer.callbacks.{name}: {arguments[name]} dropped; it {why}")
        arguments.pop(name, None)
    return {**callback, "init_args": arguments}


def lightning_names(path: str) -> set[str]:
    """Return the names of Lightning's own classes that a class derives from, given its import path or short name.

    >>> sorted(lightning_names("lightning.pytorch.callbacks.EarlyStopping")), lightning_names("EarlyStopping")
    (['Callback', 'EarlyStopping'], {'EarlyStopping'})
    """
    kind = None
    if "." in path:
        with suppress(Exception):  # The parser reports a module that cannot be imported.
            kind = find_class(path)
    if kind is None:
        return {path.rpartition(".")[2]}
    return {base.__name__ for base in kind.__mro__ if base.__module__.startswith(LIGHTNING)}


def with_known_paths(adoption: Adoption, name: str, value: Any) -> Any:
    """Return a value with the paths of `pytorch_lightning` for classes of `lightning.pytorch`.

    Args:
        adoption: The adoption, which notes the classes.
        name: The name of the setting.
        value: The value, in which classes may be nested.
    """
    if isinstance(value, list):
        return [with_known_paths(adoption, name, item) for item in value]
    if isinstance(value, dict):
        return {key: with_known_paths(adoption, name, item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    for start, ours in TWINS.items():
        if value.startswith(start):
            path = f"{ours}{value.removeprefix(start)}"
            adoption.notes.append(f"{name}: {value} is taken from {ours.rstrip('.')}")
            return path
    return value


EVERY_ROUND = "every round is logged"
DRAWN = "the batches of each client are drawn for it"
OWN_STATISTICS = "a client is trained in one process, with its own statistics"

TRAINER: dict[str, Answer] = {
    "accelerator": keep,
    "strategy": spread,
    "devices": keep,
    "num_nodes": keep,
    "precision": use_precision,
    "logger": keep,
    "callbacks": use_callbacks,
    "fast_dev_run": keep,
    "max_epochs": keep_for_rounds,
    "min_epochs": keep_for_rounds,
    "max_steps": limit_rounds,
    "min_steps": partial(drop, why="it counts optimizer steps; trainer.min_epochs counts rounds"),
    "max_time": keep,
    "limit_train_batches": limit_steps,
    "limit_val_batches": keep,
    "limit_test_batches": keep,
    "limit_predict_batches": keep,
    "overfit_batches": partial(
        refuse, why="has no meaning for samples that are divided", instead="--trainer.overfit_batches 0"
    ),
    "val_check_interval": evaluate,
    "check_val_every_n_epoch": keep_for_rounds,
    "num_sanity_val_steps": keep,
    "log_every_n_steps": partial(drop, why=EVERY_ROUND),
    "enable_checkpointing": keep,
    "enable_progress_bar": keep,
    "enable_model_summary": keep,
    "accumulate_grad_batches": partial(move, to="model.accumulate_grad_batches"),
    "gradient_clip_val": clip,
    "gradient_clip_algorithm": clip_by_norm,
    "deterministic": keep,
    "benchmark": keep,
    "inference_mode": keep,
    "use_distributed_sampler": partial(drop, why=DRAWN),
    "profiler": keep,
    "detect_anomaly": keep,
    "barebones": keep,
    "plugins": keep,
    "sync_batchnorm": partial(drop, why=OWN_STATISTICS),
    "reload_dataloaders_every_n_epochs": partial(
        refuse,
        why="must be 0, since the samples are divided once",
        instead="--trainer.reload_dataloaders_every_n_epochs 0",
    ),
    "default_root_dir": keep,
    "enable_autolog_hparams": keep,
    "model_registry": keep,
}
"""What becomes of each setting of the Trainer that is not at its default."""

READERS: dict[str, Callable[[Adoption, Any], None]] = {
    "seed_everything": read_seed,
    "model": read_model,
    "data": read_data,
    "optimizer": read_optimizer,
    "lr_scheduler": read_scheduler,
    "trainer": read_trainer,
    "ckpt_path": read_checkpoint,
}
"""Readers of the sections of LightningCLI, in an order in which each finds what it asks for."""

OTHER_ARGUMENTS = ("config", "verbose", "return_predictions", "weights_only")
"""Arguments of LightningCLI's commands that say nothing of a new fit."""
