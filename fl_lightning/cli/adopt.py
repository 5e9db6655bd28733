"""`fl-lightning fit --from FILE`: the configuration of a program with LightningCLI as that of a federation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader

from fl_lightning.cli.adopt_files import FROM, content_of, interpolated, merged
from fl_lightning.cli.adopt_sections import SECTIONS, read_sections
from fl_lightning.cli.adoption import Adoption
from fl_lightning.cli.configs import locate
from fl_lightning.cli.errors import RefusedTogetherError

CONFIGS = ("-c", "--config")
"""Options whose value is a configuration file of this package, or settings."""


class QuotingDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every text, so that none is read as a number."""


QuotingDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


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
    files = taken.pop(FROM)
    if not files:
        return None
    if words[0] != "fit":
        raise ValueError(
            f"--{FROM} is an option of fit, got {words[0]}; give -c and the config.yaml in the run's folder, which has "
            f"all settings of the federation"
        )
    content: dict[str, Any] = {}
    for name in files:
        content = merged(content, content_of(name))
    content, notes = interpolated(content)
    classes = {section: values[-1] for section, values in taken.items() if values}
    adoption = Adoption(classes, given=named_settings(remaining), folder=Path(files[-1]).parent)
    adoption.notes += notes
    read_sections(adoption, content)
    if adoption.refusals:
        raise RefusedTogetherError(
            f"{' and '.join(files)} cannot be federated as written; an option of the command line replaces a setting "
            f"of the file",
            adoption.refusals,
        )
    return Adopted(
        words=[remaining[0], "-c", files[0], *remaining[1:]],
        files=files,
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
    before = ""
    for word in words:
        option, has_value, value = word.partition("=")
        if option.startswith("--"):
            names.add(option.removeprefix("--"))
        if before in CONFIGS:
            names |= settings_in(word)
        elif has_value and option in CONFIGS:
            names |= settings_in(value)
        before = word
    return names


def settings_in(config: str) -> set[str]:
    """Return the settings that a value of `-c` gives, by their first two names, nothing if it cannot be read."""
    names = set[str]()
    # The reader of the value reports these errors.
    with suppress(ValueError, OSError, yaml.YAMLError):
        texts = [config] if ":" in config else [path.read_text(encoding="utf-8") for path in locate(config)]
        for text in texts:
            content = get_loader("yaml")(text)
            if isinstance(content, dict):
                names |= names_in(content)
    return names


def names_in(content: Mapping[Any, Any]) -> set[str]:
    """Return the first two names of the settings of a configuration.

    >>> sorted(names_in({"trainer": {"devices": 1}, "data.source.path": "a"}))
    ['data.source', 'trainer', 'trainer.devices']
    """
    names = set[str]()
    for section, values in content.items():
        names.add(".".join(str(section).split(".")[:2]))
        if isinstance(values, dict):
            names.update(f"{section}.{key}" for key in values)
    return names
