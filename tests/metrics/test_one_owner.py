"""No module but the registry decides by the name of a key, or takes the best of logged values: a guard for new ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fl_lightning
from fl_lightning.metrics.keys import HIGHER, LOWER

PACKAGE = Path(fl_lightning.__file__).parent
OWNER = PACKAGE / "metrics/keys.py"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != OWNER]

READERS = ("reports", "papers", "experiments", "cli", "runs", "callbacks")
"""Rooms whose modules read logged values."""

VALUES = ("curve", "curves", "carried_curves", "statistics_of", "history", "test")
PICKS = ("max", "min", "argmax", "argmin", "nanargmax", "nanargmin")
REGISTRY = ("best_of", "direction_of", "needed_direction", "direction_in", "describe")

ALLOWED_NAMES = {
    "flower/nodes.py:read_answer": "a part of a message, which is no key of a value",
    "runs/best.py:mode_of_earlier_version": "repeats what 0.2.0 decided, whose checkpoints are still read",
}
"""Functions that look for a word of a key, each with the reason."""

ALLOWED_PICKS = {
    "papers/sweeps.py:draw": "the number of seeds",
    "papers/sweeps.py:end_of": "the longest curve, not the best value",
    "papers/clients.py:draw": "bounds of an axis or the first round",
    "papers/stored.py:curve_text": "the last round",
    "reports/saved.py:carried_curves": "the last round",
    "reports/report.py:last": "the last round",
    "reports/curve_pictures.py:bands_text": "the number of runs",
    "reports/report.py:clock_values": "the largest staleness, which is no best value",
    "reports/costs.py:costs_of_group": "the memory that a process has had at most, which is no best value",
    "reports/report.py:privacy_of": "a budget that only grows: ε of all rounds so far",
    "reports/results.py:cost_of": "the number of rounds",
    "callbacks/plots.py:values_by_round": "the last round",
}
"""Functions that take a largest or smallest value and read logged values, each with what the value is."""


def functions_of(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def called(function: ast.FunctionDef) -> set[str]:
    """Names of what a function calls, in any way."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            names.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
    return names


def words_looked_for(function: ast.FunctionDef) -> list[str]:
    """Constants that a function compares the beginning, the end or the parts of a text with."""
    texts = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("endswith", "startswith", "count", "find"):
            texts += node.args
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            texts.append(node.left)
    found = []
    for text in texts:
        parts = text.elts if isinstance(text, ast.Tuple) else [text]
        found += [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return found


def has_direction(text: str) -> bool:
    return any(word in LOWER | HIGHER | {"loss"} for word in re.split(r"[^a-z0-9]+", text.lower()))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_decides_by_a_word_of_a_key(path):
    found = []
    for name, function in functions_of(path):
        words = [word for word in words_looked_for(function) if has_direction(word)]
        if words and name not in ALLOWED_NAMES:
            found.append((name, words))
    assert found == []


@pytest.mark.parametrize("room", READERS)
def test_no_reader_picks_a_best_value_without_the_registry(room):
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name, function in functions_of(path):
            names = called(function)
            if names.isdisjoint(VALUES) or names.isdisjoint(PICKS) or not names.isdisjoint(REGISTRY):
                continue
            if name not in ALLOWED_PICKS:
                found.append(name)
    assert found == []


def test_the_exceptions_are_still_there():
    names = set()
    for path in MODULES:
        names |= {name for name, _ in functions_of(path)}
    assert {*ALLOWED_NAMES, *ALLOWED_PICKS} <= names
