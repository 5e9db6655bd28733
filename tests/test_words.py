"""The words of the package: docstrings begin with one plain sentence, locals are named for what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fl_lightning

PACKAGE = Path(fl_lightning.__file__).parent
ROOMS = [
    *("functional", "utils", "data", "nets", "metrics", "methods", "attacks", "distributed", "types.py"),
    *("aggregation/gathering.py", "aggregation/robust.py", "aggregation/server_parts.py", "aggregation/transforms.py"),
]
HEADLESS = {"Say", "Says", "Note", "Notes", "What", "Where", "How", "True"}
NAMELESS = {"found", "own", "one", "said", "told"}


def trees(room: str) -> Iterator[tuple[str, ast.Module]]:
    place = PACKAGE / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_begins_with_one_plain_sentence(room: str) -> None:
    wrong = []
    for path, tree in trees(room):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if ";" in line or line.partition(" ")[0] in HEADLESS:
                    wrong.append(f"{path}:{getattr(node, 'lineno', 1)}: {line}")
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_a_local_is_named_for_what_it_holds(room: str) -> None:
    wrong = []
    for path, tree in trees(room):
        for node in ast.walk(tree):  # targets of assignments, loops and comprehensions store their name
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.arg if isinstance(node, ast.arg) else node.id if stored else ""  # type: ignore[attr-defined]
            if name in NAMELESS:
                wrong.append(f"{path}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    assert not wrong
