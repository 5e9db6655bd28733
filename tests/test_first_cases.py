"""The short suite, which `make test` runs."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.first_cases import LONG_TESTS, first_cases, killers
from tools.long_tests import load_or_measure, long_tests

ROOT = Path(__file__).parents[1]
KILLERS = killers()


class Case(NamedTuple):
    nodeid: str


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
    Case("tests/a.py::test_endless[1]"),
    Case("tests/b.py::test_sums[1]"),
    Case("tests/b.py::test_sums[2[3]]"),
    Case("tests/b.py::test_alone"),
]


@pytest.fixture(autouse=True)
def endless(monkeypatch):
    """One test is long, and no case ends a fault."""
    monkeypatch.setattr("tests.first_cases.long_ones", lambda: frozenset({"tests/a.py::test_endless"}))
    monkeypatch.setattr("tests.first_cases.killers", frozenset)


def test_the_first_case_of_each_test_is_kept():
    kept, left_out = first_cases(TESTS)
    assert [TESTS.index(case) for case in kept] == [0, 2, 4, 6]
    assert [TESTS.index(case) for case in left_out] == [1, 3, 5]


def test_the_first_case_that_is_not_slow_is_kept(tmp_path):
    """With the slow one as its first case the test would have none."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n"
    )
    (tmp_path / "test_sums.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('size', [pytest.param(1, marks=pytest.mark.slow), 2, 3])\n"
        "def test_sums(size): pass\n"
    )
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--cases", "first"]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if "::" in line] == ["test_sums.py::test_sums[2]"]


def test_cases_that_end_a_fault_are_kept(monkeypatch):
    ending = frozenset({TESTS[1].nodeid, TESTS[3].nodeid})
    monkeypatch.setattr("tests.first_cases.killers", lambda: ending)
    kept, _ = first_cases(TESTS)
    assert [TESTS.index(case) for case in kept] == [0, 1, 2, 3, 4, 6]


def test_the_longest_tests_are_listed_until_the_others_fit(monkeypatch):
    seconds = {"a[1]": 2.0, "a[2]": 0.1, "b": 1.0, "c": 3.0, "d": 0.5, "e[x]": 9.0}
    monkeypatch.setattr("tools.long_tests.killers", lambda: frozenset({"e[x]", "unknown"}))
    assert long_tests(seconds, budget=12.25) == ["a", "c"]
    assert long_tests(seconds, budget=12.5) == ["c"]
    assert long_tests(seconds, budget=99.0) == []


def test_a_folder_stores_the_seconds_of_a_whole_run_for_the_next_call(tmp_path, monkeypatch):
    runs = []

    def measure(folder):
        runs.append(folder)
        (folder / "1.tsv").write_text("0.5\tb.py::test_b\n2.0\ta.py::test_a[1]\n", encoding="utf-8")
        if len(runs) == 1:
            raise RuntimeError("a test failed")

    monkeypatch.setattr("tools.long_tests.measure", measure)
    folder = tmp_path / "times"
    with pytest.raises(RuntimeError):
        load_or_measure(folder)
    seconds = load_or_measure(folder)
    assert seconds == {"b.py::test_b": 0.5, "a.py::test_a[1]": 2.0}
    assert load_or_measure(folder) == seconds
    assert len(runs) == 2
    load_or_measure(None)
    assert len(runs) == 3


def test_the_long_tests_exist():
    listed = LONG_TESTS.read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    for name in listed:
        path, *_, function = name.split("::")
        assert (ROOT / path).is_file(), name
        is_doctest = not path.startswith("tests/")
        assert is_doctest or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(("cases", "count"), [("first", 4), ("all", 7)])
def test_the_option_says_which_cases_run(cases, count):
    config = Config(cases)
    items = list(TESTS)
    pytest_collection_modifyitems(config, items)
    assert len(items) == count
    assert len(items) + len(config.left_out) == len(TESTS)


@pytest.mark.slow
def test_the_cases_that_end_a_fault_exist():
    """A case with another name is no longer kept, and nobody is told."""
    names = sorted(name for name in KILLERS if "::" in name)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if line.startswith("ERROR: not found")] == []
    assert any(line.startswith("tests/") for line in lines)
