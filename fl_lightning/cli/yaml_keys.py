"""Keys that stand twice in a mapping of YAML: the readers of YAML keep the last one and drop the others in silence."""

from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "<<"
"""A key that may stand several times: it takes in other mappings."""


def check_named(value: str, name: str) -> None:
    """Check the file that a value names, if it does, from its own file's folder or the working folder."""
    for path in (Path(name).parent / value, Path(value)):
        if path.is_file() and str(path) != name:
            with suppress(UnicodeDecodeError, OSError, RecursionError):  # whose reader says so
                check_keys(path.read_text(encoding="utf-8"), str(path))
            return


def not_yaml(error: yaml.MarkedYAMLError) -> str:
    """Sentence for a text that cannot be read as YAML, after its name."""
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
        text: of a file or an option.
        name: of it.
        is_yaml: whether it can be nothing else.

    Raises:
        ValueError: naming file, line and key; or there is nothing, or no YAML that must be some.
    """
    try:
        left = [yaml.compose(text, LOADER)]
    except (yaml.YAMLError, RecursionError) as error:
        if is_yaml and isinstance(error, yaml.MarkedYAMLError):
            raise ValueError(f"{name} {not_yaml(error)}") from None
        return
    if left == [None]:
        raise ValueError(f"{name} holds no settings; write some into it, such as trainer: {{max_epochs: 30}}")
    seen = set[int]()
    while left:
        node = left.pop()
        if id(node) in seen:  # an alias stands for a node that was there
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode) and node.value.endswith((".yaml", ".yml")):
            check_named(node.value, name)
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            left.append(value)
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
