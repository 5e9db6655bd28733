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

    Args:
        given: The texts.
        option: Name of the option that has them, for the error.

    Raises:
        ValueError: A text lacks the name or the values.

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
    """Combine the values of all settings. Without settings there is one empty combination."""
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


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
