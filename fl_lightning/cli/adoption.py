"""Settings of a federation that are made of those of LightningCLI, and what there is to say about them."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.cli.adopt_files import content_of
from fl_lightning.cli.classes import find_class
from fl_lightning.cli.wrappers import put
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.loop import FederatedLoop

OPTIONS_OF = {"model": "--model.client.module", "data": "--data.source"}
"""Options that give the arguments of a section's class, by the name of the section."""

PARTS = {"model": FederatedLoop, "data": FederatedDataModule}
"""Classes of a federation whose arguments have the names of a section in front."""

TWINS = {"lightning.pytorch.": "pytorch_lightning.", "lightning.fabric.": "lightning_fabric."}
"""First parts of import paths of Lightning's own classes, and those under which the Trainer knows them."""


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
        is_saved: Whether a program has saved the file, with all arguments except the arguments that it links.
    """

    def __init__(self, classes: Mapping[str, str], *, given: Collection[str], folder: Path) -> None:
        self.classes = classes
        self.given = given
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.refusals: list[str] = []
        self.is_saved = False

    def put(self, name: str, value: Any) -> None:
        """Set a setting of the federation."""
        put(self.settings, name, value)

    def check_options(self, name: str, section: Mapping[str, Any]) -> None:
        """Refuse options that are arguments of a section's class, which have another name in a federation.

        Args:
            name: The name of the section.
            section: The class and its arguments.
        """
        ours = inspect.signature(PARTS[name]).parameters
        theirs: Mapping[str, Any] = {}
        # The parser reports a class that is not found.
        with suppress(Exception):
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
        content = self._content_of_section(value)
        if not isinstance(content, dict | None):
            self.refusals.append(
                f"{name} must be a class with its arguments, got {content}; write class_path: and below"
            )
            return None
        kind = self.classes.get(name)
        if kind is None:
            if content is not None and "class_path" not in content:
                self.refusals.append(
                    f"{name} must have the class whose arguments it holds, got none; add --{name} CLASS, the import "
                    f"path of the class that the program gives LightningCLI"
                )
                return None
            return content
        if content is None:
            return {"class_path": kind}
        if "class_path" in content:
            return {**content, "class_path": kind}
        if "init_args" in content:
            return {"class_path": kind, **content}
        return {"class_path": kind, "init_args": content}

    def _content_of_section(self, value: Any) -> Any:
        """Return the content of a section, where a text is the name of a file, or else of a class."""
        if not isinstance(value, str):
            return value
        path = self.folder / value
        return content_of(str(path)) if path.is_file() else {"class_path": value}


def plain_defaults_of(path: str) -> dict[str, Any]:
    """Return the arguments of a class whose default is a plain value, as linked ones are, by name."""
    defaults: dict[str, Any] = {}
    # The parser reports a class that is not found.
    with suppress(Exception):
        kind: Any = find_class(path)
        for name, parameter in inspect.signature(kind).parameters.items():
            if parameter.default is None or type(parameter.default) in (bool, int, float, str):
                defaults[name] = parameter.default
    return defaults


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
