"""Which tests the short suite takes: the first case of each, and the cases that a fault in the package needs.

A test that takes longer than its place in a suite of five minutes allows is marked `long`: the short suite takes only
those of its cases that end a fault of `tools/mutants.csv`.
"""

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "tools" / "mutants.csv"


@cache
def killers() -> frozenset[str]:
    """Read the names of the cases that end a fault of the list."""
    with MUTANTS.open(newline="", encoding="utf-8") as file:
        return frozenset(row["killed_by"] for row in csv.DictReader(file))


def first_cases(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide tests into those of the short suite and the others, both in the order in which they came."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: set[str] = set()
    for item in items:
        test, _, _ = item.nodeid.partition("[")
        is_first = test not in seen
        seen.add(test)
        is_long = item.get_closest_marker("long") is not None
        is_kept = item.nodeid in killers() or (is_first and not is_long)
        (kept if is_kept else left_out).append(item)
    return kept, left_out
