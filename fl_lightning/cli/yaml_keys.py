"""Keys that stand twice in a mapping of YAML. The readers of YAML keep the last and silently drop the others."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The quickest reader of YAML that is installed."""

MERGE = "<<"
"""A key that may stand several times: it takes in other mappings."""


def check_named(value: str, name: str) -> None:
    """Check the file that a value names, if there is one, from its own file's folder or the working folder.

    Args:
        value: The value.
        name: Name of the file that has the value.

    Raises:
        ValueError: A key stands twice in the file.
    """
    for path in (Path(name).parent / value, Path(value)):
        if path.is_file() and str(path) != name:
            # The reader of the file reports these errors.
            with suppress(UnicodeDecodeError, OSError, RecursionError):
                check_keys(path.read_text(encoding="utf-8"), str(path))
            return


def not_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return the end of a sentence, after the name of a text, that says why the text cannot be read as YAML."""
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "its end"
    return f"must be YAML, and cannot be read at {place} ({error.problem}); close brackets and quotes, indent by spaces"


def check_keys(text: str, name: str, is_yaml: bool = False) -> None:
    r"""Refuse a mapping with a key that stands twice, but leave text that may be no YAML to its reader.

    >>> check_keys("a: {b: 1}\nc: {b: 2}", "-c")
    >>> check_keys("a: 1\na: 2", "run.yaml")
    Traceback (most recent call last):
    ValueError: run.yaml, line 2: 'a' stands in line 1 already, where it would be dropped; keep one of the two

    Args:
        text: The text of a file or an option.
        name: Name of the file or option.
        is_yaml: Whether the text must be YAML.

    Raises:
        ValueError: A key stands twice, the text is empty, or it is no YAML and must be some.
    """
    try:
        root = yaml.compose(text, LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        if is_yaml and isinstance(error, yaml.MarkedYAMLError):
            raise ValueError(f"{name} {not_yaml(error)}") from None
        return
    if root is None:
        raise ValueError(f"{name} holds no settings; write some into it, such as trainer: {{max_epochs: 30}}")
    for node in nodes_of(root):
        if isinstance(node, yaml.ScalarNode) and node.value.endswith((".yaml", ".yml")):
            check_named(node.value, name)
        if isinstance(node, yaml.MappingNode):
            check_mapping(node, name)


def nodes_of(root: yaml.Node) -> Iterator[yaml.Node]:
    """Yield a node, all values below it, and the items of lists, each once.

    An alias stands for a node that was there.
    """
    seen = set[int]()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]


def check_mapping(node: yaml.MappingNode, name: str) -> None:
    """Refuse a mapping with a key that stands twice.

    Args:
        node: The mapping.
        name: Name of its file or option.

    Raises:
        ValueError: A key stands twice.
    """
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == MERGE:
            continue
        entry = (key.tag, key.value)
        line = key.start_mark.line + 1
        if entry in lines:
            raise ValueError(
                f"{name}, line {line}: {key.value!r} stands in line {lines[entry]} already, where it would be "
                f"dropped; keep one of the two"
            )
        lines[entry] = line
