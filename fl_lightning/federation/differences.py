"""The differences between two sets of settings."""

import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from fl_lightning.aggregation import Aggregator, ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.client.store import ClientStore
from fl_lightning.data import IIDPartition
from fl_lightning.federation.configured import COSINE_ROUNDS, flat_value, in_one_form
from fl_lightning.federation.described import described_value, places_of
from fl_lightning.federation.effects import INPUTS, belongs_to_any, below, counts_or_shares, distinguishes, is_data
from fl_lightning.federation.horizon import PLANNED
from fl_lightning.federation.values import Settings, class_name, resolved

LIMITS = ("trainer.max_epochs", "trainer.max_steps")
"""Settings that differ only if a module has asked for them."""

ROOTS = {
    "data": "fl_lightning.data.FederatedDataModule",
    "model": "fl_lightning.federation.loop.FederatedLoop",
    "trainer": "pytorch_lightning.Trainer",
}
"""Names of the classes whose arguments the settings of a configuration are."""

MAIN_MODULES = ("__main__.", "__mp_main__.")
"""Prefixes of the names of classes and functions in the main script."""

LISTS_OF_TEXTS = ("model.keep", "model.personal")
"""Settings that take a list of texts, or its one text."""

LISTS_OF_OBJECTS = ("model.transforms", "trainer.callbacks", "trainer.plugins")
"""Settings that take a list of objects, or its one object."""

EMPTY_IS_NONE = (*LISTS_OF_TEXTS, *LISTS_OF_OBJECTS, "data.extra_splits", "data.stays")
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


def are_one_run(was: Settings, now: Settings) -> bool:
    """Return True if no setting differs that makes two runs.

    Two runs nearly always differ in a setting that both have. It is looked for first, because a setting that one side
    lacks is compared with its default, which takes longer.

    Args:
        was: The settings of the first run.
        now: The settings of the second run.
    """
    known = was.keys() | now.keys()
    first = in_lists(in_one_form(was, known))
    second = in_lists(in_one_form(now, known))
    for name in first.keys() & second.keys():
        is_listed = all(distinguishes(part) for part in (*names_above(name), name))
        if is_listed and difference_in(name, first, second) is not None:
            return False
    return not any(distinguishes(difference.name) for difference in differences(was, now))


def difference_in(name: str, was: Settings, now: Settings) -> Difference | None:
    """Return the difference in one setting, or None if it is the same on both sides."""
    if below(name, INPUTS) and None in (was.get(name), now.get(name)):
        return None
    if name in was and name in now:
        if was[name] is None and now[name] is None:
            # What None stands for follows from another setting, which is compared itself.
            return None
        if is_place(name, now) or is_same(as_read(name, was), as_read(name, now)):
            return None
        return Difference(name, was=was[name], now=now[name])
    known, other = (now, was) if name in now else (was, now)
    if is_place(name, known) or has_default(name, known, other=other):
        return None
    if has_parts(name, other) and not has_parts(name, known):
        # A value stands on one side and a group on the other. Each part of the group is a difference.
        return None
    return Difference(name, was=was.get(name, UNSET), now=now.get(name, UNSET))


def has_parts(name: str, settings: Settings) -> bool:
    """Return True if there are settings below a setting."""
    return any(below(key, name) and key != name for key in settings)


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


def has_default(name: str, settings: Settings, *, other: Settings) -> bool:
    """Return True if a setting has the value that it has today if nobody sets it.

    If a group of settings has None on the other side, its parts that have another value than by default tell it. If
    there is no such part, all parts tell it.

    Args:
        name: Dotted name of the setting.
        settings: Settings with the setting, and with the class above it.
        other: Settings that lack it.
    """
    if not is_default(name, settings, other=other):
        return False
    for group in names_above(name):
        if group in other and group not in settings:
            parts = [key for key in settings if below(key, group)]
            return not all(is_default(part, settings, other=other) for part in parts)
    return True


def is_default(name: str, settings: Settings, *, other: Settings) -> bool:
    """Return True if a setting, or the whole argument that it is a part of, has its default.

    Args:
        name: Dotted name of the setting.
        settings: Settings with the setting, and with the class above it.
        other: Settings that lack it. If they have other parts of the same argument, only a field of a dataclass has a
            default.
    """
    lacking = lacking_above(name, other)
    if lacking is None:
        return False
    owner = lacking.rpartition(".")[0]
    while owner and not isinstance(settings.get(owner, ROOTS.get(owner)), str):
        owner = owner.rpartition(".")[0]
    if not owner:
        return settings[name] is None  # an option of the command line
    kind = resolved(settings.get(owner, ROOTS.get(owner)))
    default = default_below(kind, lacking.removeprefix(f"{owner}.").split("."))
    if default is inspect.Parameter.empty:
        return False
    if default is None and settings.get(lacking) in ([], {}):
        return True  # a part of the run that there is none of
    forms = default_forms(lacking, default)
    given = {key: value for key, value in settings.items() if below(key, lacking)}
    if any(has_form(given, form, settings) for form in forms):
        return True
    if default is not None or not isinstance(settings.get(lacking), str):
        return False
    # An object may be the one that the run has without a value.
    if name == lacking:
        return has_form({name: settings[name]}, {name: None}, settings)
    return is_default(name, settings, other={**other, lacking: settings[lacking]})


def names_above(name: str) -> list[str]:
    """Return the dotted names above a setting, the shortest first.

    >>> names_above("data.source.root")
    ['data', 'data.source']
    """
    words = name.split(".")
    return [".".join(words[:length]) for length in range(1, len(words))]


def lacking_above(name: str, other: Settings) -> str | None:
    """Return the dotted name of the largest part that settings lack whole and that a setting belongs to.

    Args:
        name: Dotted name of the setting.
        other: Settings that lack it.

    Returns:
        The dotted name. None: the settings have parts of the setting.
    """
    for above in [*names_above(name), name]:
        if above not in ROOTS and above not in other and not has_parts(above, other):
            return above
    return None


def default_below(kind: Any, path: Sequence[str]) -> Any:
    """Return the default of an argument, or of a field of a dataclass in it. `inspect.Parameter.empty`: it has none.

    Args:
        kind: The class or function that has the argument.
        path: Name of the argument. Further names are fields of dataclasses.
    """
    *groups, last = path
    for argument in groups:
        kind = dataclass_of(kind, argument)
        if kind is None:
            return inspect.Parameter.empty  # the keys are the user's
    return default_of(kind, last)


def has_form(given: Settings, form: Settings, settings: Settings) -> bool:
    """Return True if settings are those of a default.

    Args:
        given: The settings of an argument.
        form: The settings that the argument has by default.
        settings: All settings of the side, on which the meaning of None depends.
    """
    if given.keys() != form.keys():
        return False
    by_default = {**settings, **form}
    return all(is_same(as_read(name, by_default), as_read(name, settings)) for name in given)


def default_forms(name: str, default: Any) -> list[Settings]:
    """Return the settings of a default, as a configuration has them and as the objects of a run have them.

    Args:
        name: Dotted name of the argument.
        default: The default.
    """
    is_group = is_dataclass(default) and not isinstance(default, type)
    written = asdict(default) if is_group else default
    return [flat_value(name, written), described_value(name, default)]


def default_of(kind: Any, argument: str) -> Any:
    """Return the default of an argument of a class or function, `inspect.Parameter.empty` without one.

    Args:
        kind: The class or function. A method passes what it does not name to its base.
        argument: Name of the argument.
    """
    if inspect.isclass(kind) and is_dataclass(kind):
        for part in fields(kind):
            if part.name == argument and part.default_factory is not MISSING:
                return part.default_factory()
    for function in constructors_of(kind):
        parameter = inspect.signature(function).parameters.get(argument)
        if parameter is not None:
            return parameter.default
    return inspect.Parameter.empty


def dataclass_of(kind: Any, argument: str) -> Any:
    """Return the dataclass that an argument of a class or function takes, or None if it takes none."""
    for function in constructors_of(kind):
        if argument not in inspect.signature(function).parameters:
            continue
        hint: Any = None
        with suppress(Exception):  # a hint may name what is not imported
            hint = get_type_hints(function).get(argument)
        for part in get_args(hint) or (hint,):
            if inspect.isclass(part) and is_dataclass(part):
                return part
        return None
    return None


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
