"""Wrappers of clients in configurations: the wrapper of one file stays around the client of the next file."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, Namespace
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.attacks import Attack
from fl_lightning.cli.classes import find_object, same_name
from fl_lightning.cli.yaml_keys import LOADER
from fl_lightning.client import ClientModule
from fl_lightning.methods import FedAvg
from fl_lightning.types import TrainableModule
from fl_lightning.utils.packages import lightning_base

CLIENT = "model.client"
"""Option whose value is the client, perhaps within wrappers."""

AGGREGATOR = "model.aggregator"
MODULE = "module"
"""Argument of `ClientModule` that takes a LightningModule."""

INNER = ("client", MODULE)
"""Usual names of the argument by which a wrapper takes its client, the first one first."""

Kind = Any
"""A class, or a function that makes a client."""


# --- classes and functions ------------------------------------------------------------------------


def kind_of(node: Any) -> Kind | None:
    """Return the class or the function that settings name, None if they name none that can be found.

    Args:
        node: Settings with a `class_path`, or the import path or short name of a class.
    """
    path = node.get("class_path") if isinstance(node, Mapping | Namespace) else node
    if not isinstance(path, str):
        return None
    if "." not in path:
        paths = same_name(path, LightningModule)
        return find_object(paths[0]) if paths else None
    try:
        found = find_object(path)
    except Exception:
        # The parser reports a module that cannot be imported.
        return None
    return found if callable(found) else None


def is_lightning_module(kind: Kind | None) -> bool:
    """Return True for a class that derives from LightningModule, of `pytorch_lightning` or `lightning.pytorch`."""
    return isinstance(kind, type) and lightning_base(kind).__name__ == LightningModule.__name__


def is_client(kind: Kind | None) -> bool:
    """Return True if a class derives from `ClientModule`."""
    return isinstance(kind, type) and issubclass(kind, ClientModule)


def is_plain(kind: Kind | None) -> bool:
    """Return True for the class of a LightningModule that is no client of a method."""
    return is_lightning_module(kind) and not is_client(kind)


def is_private(kind: Kind | None) -> bool:
    """Return True if the messages of a class of clients, or what a rule releases, hide samples or clients."""
    return getattr(kind, "is_private", False) is True


def is_attack(kind: Kind | None) -> bool:
    """Return True for a class of clients of which some are malicious."""
    return isinstance(kind, type) and issubclass(kind, Attack)


def takes_module(hint: Any) -> bool:
    """Return True if an argument with this type takes a LightningModule."""
    if get_origin(hint) in (Union, UnionType):
        return any(takes_module(part) for part in get_args(hint))
    return hint is TrainableModule or is_lightning_module(hint)


def initializers(kind: Kind) -> list[Any]:
    """Return what has the arguments of a class or function, without what all clients and modules have."""
    if not isinstance(kind, type):
        return [kind]
    found = []
    for base in kind.__mro__:
        if base is ClientModule or base.__name__ == LightningModule.__name__:
            break
        if "__init__" in vars(base):
            found.append(vars(base)["__init__"])
    return found


def module_arguments(kind: Kind) -> dict[str, bool]:
    """Return the arguments of a class or function that take a LightningModule, and whether each must be given."""
    found: dict[str, bool] = {}
    for function in initializers(kind):
        hints = hints_of(function)
        for name, parameter in inspect.signature(function).parameters.items():
            is_untyped_client = name in INNER and name not in hints
            if takes_module(hints.get(name)) or is_untyped_client:
                found.setdefault(name, parameter.default is inspect.Parameter.empty)
    if not isinstance(kind, type):
        for name in handed_on(kind):
            if name in INNER:
                found.setdefault(name, True)
    return found


def hints_of(function: Any) -> dict[str, Any]:
    """Return the type hints of a function, as text where they cannot be read."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return dict(getattr(function, "__annotations__", {}))


def handed_on(function: Any) -> list[str]:
    """Return the names of the arguments that a function takes by its `**kwargs` and hands on, empty without these."""
    parameters = inspect.signature(function).parameters
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    try:
        names = ArgumentParser().add_function_arguments(function, fail_untyped=False)
    except ValueError:
        # The parser reports a function that it cannot read.
        return []
    return [name for name in names if name not in parameters]


def argument_names(kind: Kind) -> set[str]:
    """Return the names of the arguments of a class or function, without those that all clients have."""
    names: set[str] = set()
    for function in initializers(kind):
        names.update(inspect.signature(function).parameters)
    if not isinstance(kind, type):
        names.update(handed_on(kind))
    return names


def inner_argument(node: Any) -> str | None:
    """Return the argument by which settings of a wrapper take their client, None if they are of no wrapper.

    A function that takes a LightningModule is a wrapper, and so is a class of clients with an argument `client`.
    Another class may keep a module for a purpose of its own, such as a teacher. Whatever has the settings of a client
    among its arguments is a wrapper.
    """
    kind = kind_of(node)
    if kind is None:
        return None
    names = module_arguments(kind)
    if not isinstance(kind, type) or (is_client(kind) and INNER[0] in names):
        usual = [name for name in (*INNER, *names) if name in names]
        if usual:
            return usual[0]
    for name, value in arguments_of(node).items():
        # Text may mean anything, unless the type of the argument says that it names a class.
        if (name in names or has_class(value)) and makes_client(value):
            return name
    return None


def has_class(value: Any) -> bool:
    """Return True for settings with a `class_path`."""
    return isinstance(value, Mapping | Namespace) and "class_path" in value


def makes_client(node: Any) -> bool:
    """Return True if settings make a client of a method, perhaps within wrappers."""
    kind = kind_of(node)
    if kind is None:
        return False
    is_maker = not isinstance(kind, type) and takes_module(hints_of(kind).get("return"))
    return is_maker or is_client(kind) or inner_argument(node) is not None


def has_client(value: Any) -> bool:
    """Return True if a value of an argument has the settings of a client somewhere in it."""
    if has_class(value):
        return makes_client(value)
    if isinstance(value, Mapping):
        return any(has_client(item) for item in value.values())
    return isinstance(value, list | tuple) and any(has_client(item) for item in value)


def path_of(node: Any) -> str:
    """Return the `class_path` of settings, which may be no more than it."""
    return str(node if isinstance(node, str) else node["class_path"])


def arguments_of(node: Any) -> dict[str, Any]:
    """Return a copy of the `init_args` of settings, empty if they have none."""
    found = node.get("init_args") if isinstance(node, Mapping | Namespace) else None
    if isinstance(found, Namespace):
        return dict(vars(found))
    return dict(found) if isinstance(found, Mapping) else {}


def partial_arguments(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in settings without a `class_path`, which may leave out `init_args`, too.

    >>> partial_arguments({"init_args": {"mu": 1}}), partial_arguments({"mu": 1})
    ({'mu': 1}, {'mu': 1})
    """
    if "init_args" in named:
        return arguments_of(named)
    return dict(named)


# --- layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapper:
    """Holds the settings of a wrapper, without the client in it.

    Attributes:
        path: Its `class_path`.
        argument: The argument that takes the client.
        settings: Its other arguments.
    """

    path: str
    argument: str
    settings: dict[str, Any]

    @property
    def kind(self) -> Kind:
        """The class or function."""
        return kind_of(self.path)

    @property
    def name(self) -> str:
        """The name of the class or function."""
        return self.path.rpartition(".")[2]

    def around(self, inner: Namespace | None) -> Namespace:
        """Return the settings of the wrapper with a client in it, None: without any."""
        arguments = Namespace(**self.settings)  # type: ignore[no-untyped-call]
        if inner is not None:
            arguments[self.argument] = inner
        return Namespace(class_path=self.path, init_args=arguments)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Layers:
    """Holds the settings of a client, taken apart.

    Attributes:
        wrappers: The wrappers, the outermost first.
        client: The settings of the client in them, or None.
    """

    wrappers: Sequence[Wrapper]
    client: Any

    @property
    def kinds(self) -> list[Kind]:
        """The classes and functions of the wrappers."""
        return [wrapper.kind for wrapper in self.wrappers]

    def joined(self) -> Namespace | None:
        """Return the settings with the wrappers around the client."""
        node: Namespace | None = self.client
        for wrapper in reversed(self.wrappers):
            node = wrapper.around(node)
        return node


def layers_of(node: Any) -> Layers:
    """Take the settings of a client apart.

    Args:
        node: The settings as a parser keeps them, or as a file gives them.
    """
    wrappers = []
    argument = inner_argument(node)
    while argument is not None:
        settings = arguments_of(node)
        inner = settings.pop(argument, None)
        wrappers.append(Wrapper(path=path_of(node), argument=argument, settings=settings))
        node = inner
        argument = inner_argument(node)
    return Layers(wrappers, node)


def placed_option(option: str, layers: Layers) -> str:
    """Return the name of an option of the client, of which the wrapper around the client has none.

    Args:
        option: The name, such as `model.client.optimizer.lr`. An option of anything else stays.
        layers: The client and its wrappers.
    """
    start = f"{CLIENT}."
    name = option.removeprefix(start).removeprefix("init_args.")
    first = name.partition(".")[0].removesuffix("+")
    if not option.startswith(start) or first == "class_path":
        return option
    path = [CLIENT]
    for wrapper in layers.wrappers:
        if first in argument_names(wrapper.kind):
            break
        path.append(wrapper.argument)
    if len(path) == 1:
        return option
    return ".".join([*path, name])


def short_options(names: Collection[str], layers: Layers) -> set[str]:
    """Return the names that options of a client in wrappers have without the wrappers, as `placed_option` reads them.

    Args:
        names: Names of all options.
        layers: The client and its wrappers.
    """
    found: set[str] = set()
    inner = CLIENT
    for wrapper in layers.wrappers:
        inner = f"{inner}.{wrapper.argument}"
        for name in names:
            if name.startswith(f"{inner}."):
                short = f"{CLIENT}{name.removeprefix(inner)}"
                if placed_option(short, layers) == name:
                    found.add(short)
    return found


def places(few: Sequence[Kind], many: Sequence[Kind]) -> list[int] | None:
    """Return the places of some kinds among others that have them in the same order, None if they do not.

    >>> places(["a", "c"], ["a", "b", "c"]), places(["c", "a"], ["a", "b", "c"])
    ([0, 2], None)
    """
    found = []
    first = 0
    for kind in few:
        if kind not in many[first:]:
            return None
        place = many.index(kind, first)
        found.append(place)
        first = place + 1
    return found


# --- one file over others -------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Holds the settings of a configuration that no later file and no option may drop.

    Attributes:
        layers: The client and its wrappers.
        aggregator: The class of the rule.
    """

    layers: Layers
    aggregator: Kind


@dataclass(frozen=True)
class MergedFile:
    """Holds what must stay, before and after a file was merged.

    Attributes:
        prefix: The name of the command whose settings the file has, with a dot, or an empty text.
        before: What the configuration had before, with the options that stand before the file.
        after: What it has with the file.
    """

    prefix: str
    before: Kept
    after: Kept


ONE_OF_TWO = "leave one of the two out"

FILES: ContextVar[list[MergedFile]] = ContextVar("FILES")
"""The files of the command line that is being parsed, in order."""


@contextmanager
def files_recorded() -> Iterator[list[MergedFile]]:
    """Collect in a list the files that are merged in the block."""
    recorded: list[MergedFile] = []
    token = FILES.set(recorded)
    try:
        yield recorded
    finally:
        FILES.reset(token)


def kept_in(config: Namespace, prefix: str = "") -> Kept:
    """Return what must stay of a configuration, whose options may have the name of a command before them."""
    client = config.get(f"{prefix}{CLIENT}")
    if isinstance(client, Namespace):
        # The parser changes the settings in place.
        client = client.clone()
    return Kept(layers=layers_of(client), aggregator=kind_of(config.get(f"{prefix}{AGGREGATOR}")))


class Merge:
    """Merges one file into a configuration, whose wrappers stay around the client.

    The wrappers that the file does not name are taken off before, and put around the file's client after that.

    Args:
        config: The configuration, into which the caller merges the file between the two steps.
        source: The path of the file, or YAML.
        is_file: Whether the source is a path.

    Raises:
        ValueError: The file would take away a module, or it is not clear which wrapper goes around which.
    """

    def __init__(self, config: Namespace, source: str, *, is_file: bool) -> None:
        prefix, named = client_in(source, is_file=is_file)
        self.config = config
        self.source = source
        self.prefix = prefix
        self.before = kept_in(config, prefix)
        self.removed: list[Wrapper | None] = []
        is_partial = isinstance(named, dict) and "class_path" not in named
        if is_partial or kind_of(named) is not None:
            arranged, self.removed = arrange(self.before.layers, named, source)
            self._set_client(arranged)

    def finish(self) -> None:
        """Put the wrappers around the client of the file.

        Raises:
            ValueError: Something was lost, or it is not clear which wrapper goes around which.
        """
        if any(self.removed):
            client = self.config.get(f"{self.prefix}{CLIENT}")
            self._set_client(put_back(self.removed, client, self.source))
        after = kept_in(self.config, self.prefix)
        check_kept(self.before, after, self.source)
        FILES.get([]).append(MergedFile(prefix=self.prefix, before=self.before, after=after))

    def _set_client(self, client: Any) -> None:
        option = f"{self.prefix}{CLIENT}"
        self.config.pop(option, None)
        if client is not None:
            self.config[option] = client


def check_options(files: Sequence[MergedFile], config: Namespace) -> None:
    """Refuse options of a command line, between its files or after them, that drop what the files have set.

    Args:
        files: The files of the command line, in order.
        config: The configuration of the command line.

    Raises:
        ValueError: Something was lost.
    """
    command = config.get("subcommand")
    prefix = f"{command}." if command else ""
    # A file may have the settings of other commands, too.
    read = [file for file in files if file.prefix in ("", prefix)]
    following = [file.before for file in read[1:]]
    for file, later in zip(read, [*following, kept_in(config, prefix)], strict=False):
        check_kept(file.after, later, "the options", options=True)


def client_in(source: str, *, is_file: bool) -> tuple[str, Any]:
    """Return what a file sets of the client, None if it sets nothing of the client.

    Args:
        source: The path of the file, or YAML.
        is_file: Whether the source is a path.

    Returns:
        The name of the command whose settings the file has, with a dot, or an empty text; and the settings of the
        client.

    >>> client_in("model: {client: {class_path: FedAvg}}", is_file=False)
    ('', {'class_path': 'FedAvg'})
    >>> client_in("fit: {model: {client: FedAvg}}", is_file=False)
    ('fit.', 'FedAvg')
    """
    try:
        text = Path(source).read_text(encoding="utf-8") if is_file else source
        content = yaml.load(text, LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        # The parser reports what it cannot read.
        return "", None
    if not isinstance(content, dict):
        return "", None
    for name, part in content.items():
        if "model" not in content and isinstance(part, dict) and "model" in part:
            return f"{name}.", value_of(CLIENT, part)
    return "", value_of(CLIENT, content)


def value_of(option: str, content: Any) -> Any:
    """Return the value of an option in the content of a file, None if the file has none.

    >>> value_of("model.client", {"model": {"client": "FedAvg"}}), value_of("model.client", {"model.client": "FedAvg"})
    ('FedAvg', 'FedAvg')
    >>> value_of("model.client", {"model.client.class_path": "FedAvg"})
    {'class_path': 'FedAvg'}
    """
    if not isinstance(content, dict):
        return None
    if option in content:
        return content[option]
    start = f"{option}."
    below: dict[str, Any] = {}
    for key, value in content.items():
        if str(key).startswith(start):
            put(below, key.removeprefix(start), value)
    first, _, further = option.partition(".")
    if below or not further:
        return below or None
    return value_of(further, content.get(first))


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into nested settings, at the place of a name with dots.

    >>> settings = {}
    >>> put(settings, "init_args.mu", 1)
    >>> put(settings, "class_path", "FedProx")
    >>> settings
    {'init_args': {'mu': 1}, 'class_path': 'FedProx'}
    """
    first, _, further = name.partition(".")
    if not further:
        settings[first] = value
        return
    nested = settings.setdefault(first, {})
    if isinstance(nested, dict):
        put(nested, further, value)


def arrange(layers: Layers, named: Any, source: str) -> tuple[Any, list[Wrapper | None]]:
    """Arrange the settings of a client so that a parser merges those of a file into the layer that they are of.

    Args:
        layers: The client of the configuration.
        named: What the file sets of the client.
        source: The path of the file, or YAML.

    Returns:
        The settings for the parser, and the wrappers that must be put back, with None for a wrapper that stays.

    Raises:
        ValueError: It is not clear which wrapper goes around which, or the file would take a module away.
    """
    asked = layers_of(named)
    if kind_of(named) is None:
        # The file names no class: its settings are of the first layer that has one of them.
        names = set(partial_arguments(named))
        depth = len(layers.wrappers)
        for place, kind in enumerate(layers.kinds):
            if names & argument_names(kind):
                depth = place
                break
        inner = Layers(wrappers=layers.wrappers[depth:], client=layers.client)
        return inner.joined(), [*layers.wrappers[:depth], *[None] * len(inner.wrappers)]
    client, method = arrange_client(layers.client, asked.client, source)
    staying = places(asked.kinds, layers.kinds)
    if staying is not None:
        kept = Layers(wrappers=[layers.wrappers[place] for place in staying], client=client)
        removed = [None if place in staying else wrapper for place, wrapper in enumerate(layers.wrappers)]
        return kept.joined(), [*removed, *method]
    found = places(layers.kinds, asked.kinds)
    if found is None:
        raise ValueError(unclear_sentence(layers.wrappers, asked.wrappers, source))
    wrappers = [Wrapper(path=wrapper.path, argument=wrapper.argument, settings={}) for wrapper in asked.wrappers]
    for place, wrapper in zip(found, layers.wrappers, strict=True):
        wrappers[place] = wrapper
    return Layers(wrappers=wrappers, client=client).joined(), [*[None] * len(wrappers), *method]


def arrange_client(client: Any, asked: Any, source: str) -> tuple[Any, list[Wrapper | None]]:
    """Arrange the settings within all wrappers: a method goes around a LightningModule, whichever file comes first.

    Args:
        client: The settings of the configuration.
        asked: The settings of the file.
        source: The path of the file, or YAML.

    Returns:
        The settings for the parser, and the method that must be put around the file's module, if any.

    Raises:
        ValueError: The file would take the place of a class that keeps a module.
    """
    was = kind_of(client)
    now = kind_of(asked)
    if was is None or now is None or was is now:
        return client, []
    if is_plain(was) and is_client(now):
        return Wrapper(path=path_of(asked), argument=MODULE, settings={}).around(client), []
    if is_client(was) and was is not FedAvg and is_plain(now):
        settings = arguments_of(client)
        module = settings.pop(MODULE, None)
        return module, [Wrapper(path=path_of(client), argument=MODULE, settings=settings)]
    if keeps_module(client):
        raise ValueError(
            f"{CLIENT} has {name_of(client)}, which keeps a module and would be lost, got {name_of(asked)} from "
            f"{source}; write both into one file, or leave one of the two out"
        )
    return client, []


def keeps_module(node: Any) -> bool:
    """Return True if settings have clients or another LightningModule in them, or a class of clients needs a module."""
    kind = kind_of(node)
    given = arguments_of(node)
    if any(has_client(value) for value in given.values()):
        return True
    arguments = module_arguments(kind)
    if is_client(kind):
        return any(arguments.values())
    return is_plain(kind) and any(given.get(name) is not None for name in arguments)


def put_back(removed: Sequence[Wrapper | None], client: Any, source: str) -> Namespace | None:
    """Put wrappers around a client again.

    Args:
        removed: All wrappers of the client, the outermost first, with None for a wrapper that the client still has.
        client: The settings of the client.
        source: The path of the file that has set the client, or YAML.

    Raises:
        ValueError: The client has wrappers of its own, and it is not clear which goes around which.
    """
    layers = layers_of(client)
    if len(layers.wrappers) != removed.count(None):
        raise ValueError(unclear_sentence([wrapper for wrapper in removed if wrapper], layers.wrappers, source))
    staying = iter(layers.wrappers)
    wrappers = [wrapper or next(staying) for wrapper in removed]
    return Layers(wrappers=wrappers, client=layers.client).joined()


def check_kept(before: Kept, after: Kept, source: str, options: bool = False) -> None:
    """Refuse a configuration that has lost a wrapper, the module of a client, a private client or a private rule.

    Args:
        before: What the configuration had.
        after: What it has.
        source: What has changed it.
        options: Whether options of the command line have changed it, and not a file.

    Raises:
        ValueError: Something was lost.
    """
    wrappers = before.layers.wrappers
    client = before.layers.client
    now = after.layers.client
    got = after.layers.joined()
    if places(before.layers.kinds, after.layers.kinds) is None:
        lost = [wrapper for wrapper in wrappers if wrapper.kind not in after.layers.kinds] or wrappers
        inner = ".".join([CLIENT, *(wrapper.argument for wrapper in wrappers)])
        remedy = "name the wrapper in that file, too"
        if options:
            remedy = f"write --{inner} NAME for the client in it, or leave the wrapper out of the file"
        raise ValueError(lost_sentence(CLIENT, names_of(lost), got=name_of(got), source=source, remedy=remedy))
    for must_stay in (is_private, is_attack):
        if must_stay(kind_of(client)) and not must_stay(kind_of(now)):
            raise ValueError(lost_sentence(CLIENT, name_of(client), got=name_of(got), source=source, remedy=ONE_OF_TWO))
    if is_plain(kind_of(client)) and is_client(kind_of(now)) and arguments_of(now).get(MODULE) is None:
        inner = ".".join([CLIENT, *(wrapper.argument for wrapper in after.layers.wrappers), MODULE])
        remedy = f"add --{inner} {path_of(client)}"
        raise ValueError(lost_sentence(CLIENT, name_of(client), got=name_of(now), source=source, remedy=remedy))
    if is_private(before.aggregator) and not is_private(after.aggregator):
        ours = before.aggregator.__name__
        theirs = getattr(after.aggregator, "__name__", "none")
        if not options:
            raise ValueError(lost_sentence(AGGREGATOR, ours, got=theirs, source=source, remedy=ONE_OF_TWO))
        # An option that names the rule itself asks for another one, such as the run without privacy of a comparison.
        rank_zero_warn(
            f"{AGGREGATOR} is {theirs} by an option, in place of {ours}: the run makes no guarantee of privacy"
        )


def lost_sentence(option: str, lost: str, *, got: str, source: str, remedy: str) -> str:
    """Sentence about settings that would be lost without a word."""
    return f"{option} must keep {lost} of the files before, got {got} in its place from {source}; {remedy}"


def unclear_sentence(wrappers: Sequence[Wrapper], others: Sequence[Wrapper], source: str) -> str:
    """Sentence about two files that name wrappers, and do not say which wrapper goes around which."""
    return (
        f"{CLIENT} has {names_of(wrappers)} around the client, and the files do not say which wrapper goes around "
        f"which, got {names_of(others)} from {source}; write all wrappers into one file, one as the client of the other"
    )


def names_of(wrappers: Sequence[Wrapper]) -> str:
    """Join the names of wrappers."""
    return " and ".join(wrapper.name for wrapper in wrappers)


def name_of(node: Any) -> str:
    """Return the name of the class or function of settings, `none` for no settings."""
    if node is None:
        return "none"
    return path_of(node).rpartition(".")[2]
