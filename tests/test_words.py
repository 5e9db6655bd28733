"""The language of the package: first lines of docstrings."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fl_lightning"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
"""All rooms of the package, and the files beside them."""

HEADLESS = ("Say", "Note", "What", "Where", "How", "Why")


def files_of(room):
    return sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / room]


def documented(room):
    for path in files_of(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_begins_with_one_plain_sentence(room):
    lines = dict(documented(room))
    assert lines
    assert {place: line for place, line in lines.items() if ";" in line.replace(r"\;", "").split("$")[0]} == {}
    assert {place: line for place, line in lines.items() if line.split()[0].rstrip(",") in HEADLESS} == {}
