"""The short suite, which `make test` runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.first_cases import first_cases, killers


@dataclass(frozen=True)
class Case:
    nodeid: str
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@dataclass
class Config:
    """The parts of pytest's configuration that are asked for."""

    cases: str
    left_out: list[Case] = field(default_factory=list)

    def getoption(self, name: str) -> str:
        assert name == "--cases"
        return self.cases

    @property
    def hook(self) -> Any:
        return self

    def pytest_deselected(self, items: list[Case]) -> None:
        self.left_out = items


TESTS = [
    Case("tests/a.py::test_sums[1]"),
    Case("tests/a.py::test_sums[2]"),
    Case("tests/a.py::TestSums::test_sums[a]"),
    Case("tests/a.py::test_endless", marks=("long",)),
    Case("tests/b.py::test_sums[1]"),
    Case("tests/b.py::test_sums[2[3]]"),
    Case("tests/b.py::test_alone"),
]


def test_the_first_case_of_each_test_is_kept():
    kept, left_out = first_cases(TESTS)
    assert [TESTS.index(case) for case in kept] == [0, 2, 4, 6]
    assert [TESTS.index(case) for case in left_out] == [1, 3, 5]


def test_cases_that_end_a_fault_are_kept(monkeypatch):
    ending = frozenset({TESTS[1].nodeid, TESTS[3].nodeid})
    monkeypatch.setattr("tests.first_cases.killers", lambda: ending)
    kept, _ = first_cases(TESTS)
    assert [TESTS.index(case) for case in kept] == [0, 1, 2, 3, 4, 6]


def test_the_list_of_faults_is_read():
    named = [name for name in killers() if "::" in name]
    assert len(named) > 100
    assert all(Path(name.partition("::")[0]).suffix == ".py" for name in named)


@pytest.mark.parametrize(("cases", "count"), [("first", 4), ("all", 7)])
def test_the_option_says_which_cases_run(cases, count):
    config = Config(cases)
    items = list(TESTS)
    pytest_collection_modifyitems(config, items)
    assert len(items) == count
    assert len(items) + len(config.left_out) == len(TESTS)
