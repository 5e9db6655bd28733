"""Chooses the tests of the short suite: the first case of each, and the cases that end a fault of the package.

`tests/long_tests.txt` lists the tests whose first case takes too long for it; `python -m tools.long_tests` renews it.
"""

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "tools" / "mutants.csv"
LONG_TESTS = Path(__file__).parent / "long_tests.txt"


@cache
def killers() -> frozenset[str]:
    """Read the names of the cases that end a fault of `tools/mutants.csv`."""
    with MUTANTS.open(newline="", encoding="utf-8") as file:
        return frozenset(row["killed_by"] for row in csv.DictReader(file))


@cache
def long_ones() -> frozenset[str]:
    """Read the names of the long tests."""
    return frozenset(LONG_TESTS.read_text(encoding="utf-8").splitlines())


def function_of(case: str) -> str:
    """Return the name of a case's test: that without what is in brackets.

    >>> function_of("tests/test_sums.py::test_sums[2-x[3]]"), function_of("tests/test_sums.py::test_none")
    ('tests/test_sums.py::test_sums', 'tests/test_sums.py::test_none')
    """
    return case.partition("[")[0]


def first_cases(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide tests into those of the short suite and the others, both in the order in which they came."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: set[str] = set()
    for item in items:
        test = function_of(item.nodeid)
        is_first = test not in seen
        seen.add(test)
        is_kept = item.nodeid in killers() or (is_first and test not in long_ones())
        (kept if is_kept else left_out).append(item)
    return kept, left_out
