"""Configuration files of LightningCLI: their content, merged and with the values that they name."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader

from fl_lightning.cli.yaml_keys import not_yaml
from fl_lightning.utils.settings import as_list

FROM = "from"
"""Option of `fit` whose value is a configuration file of LightningCLI."""

INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
"""A value of a file by its name, as OmegaConf writes it."""

ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^{}]*?)\s*)?\}")
"""A variable of the environment, perhaps with a value that it has if it is not set, as OmegaConf writes it."""


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
    found: dict[str, Any] = {}
    if isinstance(base, dict) and not has_other_class(base, over):
        found = dict(base)
    for key, value in over.items():
        name, _, further = str(key).partition(".")
        if further:
            found[name] = merged(found.get(name), {further: value})
        elif name.endswith("+"):
            extended = name.removesuffix("+")
            found[extended] = as_list(found.get(extended)) + as_list(value)
        else:
            found[name] = merged(found.get(name), value)
    return found


def has_other_class(base: dict[str, Any], over: dict[str, Any]) -> bool:
    """Return True if settings over others name another class, whose arguments are others."""
    return "class_path" in over and over["class_path"] != base.get("class_path")


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
        target = in_file(value, content)
        if target != value:
            notes.append(f"{name}: {value} is {target}")
        return target

    return with_values(content, ""), notes


def in_file(text: str, content: dict[str, Any]) -> Any:
    """Return a text with the values of a file that it names. A text that is one name is the value, of any type.

    Args:
        text: The text.
        content: The content of the file.

    >>> in_file("${a}", {"a": 1}), in_file("${a}/${b}", {"a": 1})
    (1, '1/${b}')
    """
    found: Any = text
    for name in INTERPOLATION.findall(text):
        reference = f"${{{name}}}"
        is_known, value = looked_up(content, name)
        if not is_known:
            continue
        found = value if found == reference else found.replace(reference, str(value))
    return found


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
