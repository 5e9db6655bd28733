"""Shares of the tests, which CI runs on other versions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems, share_of


@dataclass(frozen=True)
class Case:
    nodeid: str
    path: Path


@dataclass
class Config:
    """The parts of pytest's configuration that are asked for."""

    share: tuple[int, int]
    left_out: list[Case] = field(default_factory=list)

    def getoption(self, name: str) -> tuple[int, int]:
        assert name == "--share"
        return self.share

    @property
    def hook(self) -> Any:
        return self

    def pytest_deselected(self, items: list[Case]) -> None:
        self.left_out = items


TESTS = [Case(f"tests/{name}.py::test_{i}", Path(f"tests/{name}.py")) for i in range(4) for name in ("a", "b", "c")]
TESTS.append(Case("tests/d.py::test_0", Path("tests/d.py")))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_shares_have_all_tests_and_each_once(step):
    found = []
    for first in range(1, step + 1):
        config = Config((first, step))
        items = list(TESTS)
        pytest_collection_modifyitems(config, items)
        assert sorted(map(repr, items + config.left_out)) == sorted(map(repr, TESTS))
        found += items
    assert sorted(map(repr, found)) == sorted(map(repr, TESTS))


def test_a_share_has_tests_of_every_file():
    items = list(TESTS)
    pytest_collection_modifyitems(Config((2, 3)), items)
    assert [item.nodeid for item in items] == [f"tests/{name}.py::test_1" for name in ("a", "b", "c")]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="--share must be K/N"):
        share_of(text)
