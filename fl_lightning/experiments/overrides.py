"""Settings of runs as words of the command line: read from its options, combined, and written."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import yaml  # type: ignore[import-untyped]

from fl_lightning.metrics.keys import parse_directions

Setting = tuple[str, str]
"""An option's name and its value, as on the command line."""

SettingPairs = tuple[Setting, ...]

DIRECTION = "direction"
"""Option of `fit` that takes several values, which all runs of an experiment get."""

OF_FIT_ALONE = ("seed_everything", DIRECTION)
"""Options of `fit` without a dot in their name that hold for all runs of an experiment."""


def split_overrides(argv: Sequence[str]) -> tuple[list[str], SettingPairs]:
    """Separate the options of `fit` from the options of a command: names with a dot, the seed and directions.

    Args:
        argv: Words of the command line.

    Returns:
        The words of the command, and the options of `fit`.

    Raises:
        ValueError: An option of `fit` has no value.

    >>> split_overrides(["--output", "out", "--trainer.max_epochs", "2", "--data.partition=IID"])
    (['--output', 'out'], (('trainer.max_epochs', '2'), ('data.partition', 'IID')))
    >>> split_overrides(["--direction", "val/a=min", "val/b=max", "--output", "out"])
    (['--output', 'out'], (('direction', 'val/a=min,val/b=max'),))
    """
    rest: list[str] = []
    settings: list[Setting] = []
    directions: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        name, given, value = word.removeprefix("--").partition("=")
        is_of_fit = "." in name or name in OF_FIT_ALONE
        if not word.startswith("--") or not is_of_fit:
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
    """Read texts such as `name=v1,v2`, in which commas within brackets do not separate.

    Names with commas between them are set together, and each value is a list of one value for each name.

    Args:
        given: The texts.
        option: Name of the option that has them, for the error.

    Raises:
        ValueError: A text lacks the name or the values, a setting stands twice, or a list of values has not one value
            for each name.

    >>> parse_settings(["model.client.mu=0.1,1", "data.schedule=[[0,1]],null"], "--set")
    {'model.client.mu': ['0.1', '1'], 'data.schedule': ['[[0,1]]', 'null']}
    >>> parse_settings(["model.client.alpha,model.client.beta=[1,0.1],[10,0.01]"], "--set")
    {'model.client.alpha,model.client.beta': ['[1,0.1]', '[10,0.01]']}
    """
    settings: dict[str, list[str]] = {}
    names: list[str] = []
    for setting in given:
        name, _, values = setting.partition("=")
        parts = [part.strip().removeprefix("--") for part in name.split(",")]
        if not all(parts) or not values:
            raise ValueError(f"{option} must be NAME=VALUE or NAME=VALUE,VALUE, got {setting!r}")
        names += parts
        key = ",".join(parts)
        settings[key] = split_outside_brackets(values)
        for value in settings[key]:
            values_together(key, value)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{option} sets {twice[0]} twice; give each setting once")
    return settings


def single_names(given: Iterable[str]) -> list[str]:
    """Return the names of settings, also of settings that are set together.

    >>> single_names(["a.mu", "a.alpha,a.beta"])
    ['a.mu', 'a.alpha', 'a.beta']
    """
    names: list[str] = []
    for together in given:
        names += together.split(",")
    return names


def values_together(names: str, value: Any) -> dict[str, Any]:
    """Return the value of each setting of those that are set together.

    Args:
        names: Name of a setting, or several names with commas between them.
        value: The value of the one setting, or a list of one value for each: a text in brackets, or a list.

    Raises:
        ValueError: There is not one value for each name.

    >>> values_together("a.mu", "[1, 2]"), values_together("a.alpha,a.beta", "[1, [0, 2]]")
    ({'a.mu': '[1, 2]'}, {'a.alpha': '1', 'a.beta': '[0, 2]'})
    """
    parts = names.split(",")
    if len(parts) == 1:
        return {names: value}
    values: Sequence[Any] = ()
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        values = split_outside_brackets(value[1:-1])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        values = value
    if len(values) != len(parts):
        example = ",".join(f"V{number}" for number in range(1, len(parts) + 1))
        raise ValueError(
            f"settings that are set together take a list of one value for each, as in {names}=[{example}], got {value}"
        )
    return dict(zip(parts, values, strict=True))


def split_outside_brackets(text: str) -> list[str]:
    """Split a text at the commas that stand in no brackets.

    >>> split_outside_brackets("a,[b,c],{d: 1, e: 2}")
    ['a', '[b,c]', '{d: 1, e: 2}']
    """
    parts = [""]
    depth = 0
    for letter in text:
        if letter in "[{(":
            depth += 1
        if letter in "]})":
            depth -= 1
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def setting_combinations(given: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combine the values of all settings, of which some are set together. Without any there is one empty combination.

    >>> setting_combinations({"mu": ["1", "2"], "alpha,beta": ["[3,4]"]})
    [{'mu': '1', 'alpha': '3', 'beta': '4'}, {'mu': '2', 'alpha': '3', 'beta': '4'}]
    """
    combinations = []
    for values in product(*given.values()):
        combination: dict[str, Any] = {}
        for names, value in zip(given, values, strict=True):
            combination |= values_together(names, value)
        combinations.append(combination)
    return combinations


def as_settings(given: Mapping[str, Any]) -> SettingPairs:
    """Write settings as on the command line, which takes YAML (JSON has no infinity).

    >>> as_settings({"model.client.mu": 0.1, "data.partition": {"class_path": "IID"}, "data.partition.alpha": math.inf})
    (('model.client.mu', '0.1'), ('data.partition', '{class_path: IID}'), ('data.partition.alpha', '.inf'))
    """
    return tuple((name, value if isinstance(value, str) else as_yaml(value)) for name, value in given.items())


def as_yaml(value: Any) -> str:
    """Write a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    # YAML marks the end of a document after a plain value.
    return text.strip().removesuffix("\n...")


def in_list(*values: str) -> str:
    """Join values of an option that appends, single values or lists, to one list as YAML.

    >>> in_list("A", "[{class_path: B}, C]")
    '[A, {class_path: B}, C]'
    """
    items: list[Any] = []
    for value in map(yaml.safe_load, values):
        items += value if isinstance(value, list) else [value]
    return as_yaml(items)


def settings_text(settings: Iterable[Setting], separator: str = ", ") -> str:
    """Write settings by the last parts of their names.

    >>> settings_text([("data.partition.alpha", "0.1")])
    'alpha=0.1'
    """
    return separator.join(f"{name.rpartition('.')[2]}={value}" for name, value in settings)
