"""Options of the test suite, and fixtures of many tests."""

import importlib.metadata
from collections.abc import Iterator
from functools import cache

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of further golden files (*.json) for tests/golden; may be given several times",
    )


LONGEST = ("tests/processes/", "tests/cli/", "tests/test_contributing", "tests/test_contract", "tests/test_notebooks")
"""Files that take longest: they come first, so that two workers of `make test` end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def plugins_of_lightning_are_looked_up_once() -> Iterator[None]:
    """Every Trainer reads the files of all installed packages for callbacks: a fifth of a toy fit's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fabric.utilities.registry.entry_points", cache(importlib.metadata.entry_points))
        yield


@pytest.fixture
def without_pictures() -> Iterator[None]:
    """Pictures are empty."""
    from tests.commands import empty_pictures

    with empty_pictures():
        yield


@pytest.fixture
def cells_here(monkeypatch):
    """Runs a grid's cells one after the other in this process; gives their names, as they are begun."""
    from fl_lightning.cli.compare import running, workers

    begun = []

    def noted(cells):
        for files in cells:
            begun.append(files.name)
            yield files

    monkeypatch.setattr(running, "run_all", lambda cells, _, *told: workers.run_here(noted(cells), *told))
    return begun
