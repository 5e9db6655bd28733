"""Cells that are run in the process of the grid (`--processes 0`), and what they leave in it."""

import re
import sys
from pathlib import Path

import pytest

from fl_lightning.experiments import results, workers
from fl_lightning.experiments import run as running
from fl_lightning.experiments.cell_files import CellFiles
from tests.commands import cell_files, say
from tests.experiments.test_compare import base, tables  # noqa: F401 - a fixture

GRID = "compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --processes"


@pytest.fixture
def _without_report(monkeypatch):
    """It takes seconds, and what it shows does not depend on where cells run."""
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")


@pytest.mark.usefixtures("_without_report")
def test_a_grid_in_this_process_leaves_its_streams_alone(base, capfd):  # noqa: F811
    streams = sys.stdout, sys.stderr
    assert say(f"{GRID} 0 --output here").code == 0
    assert (sys.stdout, sys.stderr) == streams
    said = capfd.readouterr()
    assert "Class-wise accuracy" not in said.out
    assert "Class-wise accuracy" in cell_files("here", "FedNTD-seed0").log.read_text(encoding="utf-8")
    run = cell_files("here", "FedAvg-seed0").run
    assert (run / "partition.csv").is_file()
    assert not list(run.glob("*.png"))  # the report has the pictures


@pytest.mark.slow
def test_its_tables_are_those_of_one_in_other_processes(base):  # noqa: F811
    for processes in (0, 2):
        assert say(f"{GRID} {processes} --output in{processes}").code == 0
    assert tables("in0") == tables("in2")


@pytest.mark.usefixtures("_without_report")
def test_ctrl_c_ends_the_grid_and_it_goes_on(base, monkeypatch):  # noqa: F811
    fitted = running.fit

    def fit(files, tell):
        if files.name.startswith("FedNTD-seed0"):
            raise KeyboardInterrupt
        fitted(files, tell)

    with monkeypatch.context() as patch:
        patch.setattr(running, "fit", fit)
        said = say(f"{GRID} 0 --output here")
    assert said.code == 130
    assert "1 of 2 runs in here are done, and the same command goes on with the others" in said.err
    assert say(f"{GRID} 0 --output here").code == 0


def test_a_cell_that_fails_here_is_an_outcome_and_its_log_has_the_traceback(tmp_path, monkeypatch):
    def fit(files, tell):
        tell(1)
        raise MemoryError("full")

    monkeypatch.setattr(running, "fit", fit)
    told = []
    ended = []
    workers.run_all(
        [CellFiles(tmp_path, "a")], 0, lambda *found: told.append(found), lambda *found: ended.append(found)
    )
    assert [rounds for _, rounds in told] == [1]
    ((_, outcome),) = ended
    assert re.fullmatch(r"MemoryError: full \(.*test_here\.py, line \d+\)", outcome.error)
    assert outcome.memory
    assert "MemoryError: full" in (tmp_path / "logs/a.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["none", pytest.param("svg", marks=pytest.mark.slow)])
def test_a_run_without_pictures_has_its_tables(form, base):  # noqa: F811
    words = "--trainer.max_epochs 1 --trainer.default_root_dir runs --trainer.enable_progress_bar false"
    assert say(f"fit -c base.yaml {words} --plots.format {form}").code == 0
    assert len(list(Path("runs").rglob("partition.csv"))) == 1
    assert len(list(Path("runs").rglob("*.svg"))) == (0 if form == "none" else 4)
