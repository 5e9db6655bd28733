"""Options of the test suite, and fixtures of many tests."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.first_cases import first_cases


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of further golden files (*.json) for tests/golden; may be given several times",
    )
    parser.addoption(
        "--cases",
        choices=["first", "all"],
        default="all",
        help="first: the short suite, which tests/first_cases.py chooses",
    )


LONGEST = ("tests/processes/", "tests/cli/", "tests/test_contributing", "tests/test_contract", "tests/test_notebooks")
"""Files that take longest: they come first, so that two workers of `make test` end together."""


# The first case of a test is the first one that `-m` leaves.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if config.getoption("--cases") == "first":
        kept, left_out = first_cases(items)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def plugins_of_lightning_are_looked_up_once() -> Iterator[None]:
    """Read the files of all installed packages once. Every Trainer does so, which is a fifth of a toy fit's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fabric.utilities.registry.entry_points", cache(importlib.metadata.entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def parsers_are_made_once() -> Iterator[None]:
    """Make the options of a command once, since that is half of a dry run's time.

    tests/cli/test_parser.py compares them with new ones.
    """
    from fl_lightning.cli.main import FederatedCLI

    made: dict[tuple[str, ...], tuple[object, list[str]]] = {}
    make = FederatedCLI._prepare_subcommand_parser
    options = FederatedCLI.add_arguments_to_parser

    def kept(cli, trainer, command, **settings):
        if type(cli).add_arguments_to_parser is not options:
            return make(cli, trainer, command, **settings)
        # Some options are those of one command only.
        key = (command, *cli._argv[:1])
        if key not in made:
            new_parser = make(cli, trainer, command, **settings)
            made[key] = (new_parser, cli._subcommand_method_arguments[command])
        parser, cli._subcommand_method_arguments[command] = made[key]
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "_prepare_subcommand_parser", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_files_are_composed_once() -> Iterator[None]:
    """Compose equal files once, since that is most of a grid's time before its runs.

    In a folder with a test's own code they are composed anew.
    """
    from fl_lightning.experiments.composing import Composer, method_config

    made: dict[tuple[object, ...], dict[str, Any]] = {}
    compose = Composer.compose

    def text_of(name: str) -> str:
        """Read a file. What is no file is YAML itself."""
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            return Path(name).read_text(encoding="utf-8")
        return name

    def kept(composer: Composer, method: str, settings: Any = (), configs: Sequence[str] = ()) -> dict[str, Any]:
        if any(Path().glob("*.py")) or Path("configs").exists():
            return compose(composer, method, settings, configs=configs)
        parts = [method_config(name) for name in method.split("+") if name]
        here = [str(path) for path in sorted(Path().glob("*.yaml"))]
        texts = [text_of(name) for name in [*composer.base, *configs, *parts, *here]]
        key = (*texts, *settings)
        if key not in made:
            made[key] = compose(composer, method, settings, configs=configs)
        return deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composer, "compose", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def shipped_experiments_are_read_once() -> Iterator[None]:
    """Read all shipped experiments once, which takes seconds, for several tests."""
    from fl_lightning.experiments import experiment_files

    made = {}
    read = experiment_files.read_experiment

    def kept(path: Path) -> experiment_files.Experiment:
        if not path.is_relative_to(experiment_files.HOME):
            return read(path)
        key = (path, path.read_text(encoding="utf-8"))
        if key not in made:
            made[key] = read(path)
        return deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_files, "read_experiment", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Do not force files to the disk, since the tests' runs write thousands of them.

    tests/utils/test_files.py sees that each is forced to the disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.utils.files.os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def without_pictures() -> Iterator[None]:
    """Draw no pictures."""
    from tests.commands import empty_pictures

    with empty_pictures():
        yield


@pytest.fixture
def cells_here(monkeypatch):
    """Run cells one after the other in this process, and return their names without identity, as they begin."""
    return run_cells_here(monkeypatch)


def run_cells_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let commands run cells one after the other in this process, and return the list of the cells that they begin.

    The names have no identity. The commands do not try all settings first, which would take as long as the runs. Tests
    of that do it.
    """
    from fl_lightning.experiments import compare, reproduce, running, workers

    for command in (compare, reproduce):
        monkeypatch.setattr(command, "check_starts", lambda *_: None)

    begun: list[str] = []

    def noted(cells):
        for files in cells:
            begun.append(files.name.rpartition("-")[0])
            yield files

    def run_all(cells, _, **told):
        return workers.run_here(noted(cells), **told)

    monkeypatch.setattr(running, "run_all", run_all)
    return begun
