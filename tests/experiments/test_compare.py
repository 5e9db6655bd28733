"""`fl-lightning compare`: grids of real runs, stopped and continued, and what is refused."""

import csv
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import yaml
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger

from fl_lightning.cli.methods import printed_names, records
from fl_lightning.experiments import compare, results, run
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.compare import command_parser, experiment_of
from fl_lightning.experiments.composing import Composer, method_config, option_names, seeded
from fl_lightning.experiments.experiment import Experiment, Runs
from fl_lightning.experiments.overrides import split_overrides
from fl_lightning.experiments.results import with_failed
from fl_lightning.experiments.run import RoundCounter
from fl_lightning.experiments.starting import check_starts
from fl_lightning.metrics.history import History
from fl_lightning.papers import Series
from fl_lightning.papers.stored import RUN
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.saved import Group, SavedRun, data_differences, find_runs, grouped, read_run
from fl_lightning.runs.folder import drop_checkpoints, identity_of
from tests.commands import cell_files, empty_pictures, refusal, say
from tests.conftest import run_cells_here

ROOT = Path(__file__).resolve().parents[2]
BASE = """
seed_everything: 7
trainer: {max_epochs: 3, accelerator: cpu}
model:
  local_epochs: 1
  max_local_steps: 1
  threads: 1
  client:
    class_path: fl_lightning.methods.FedAvg
    init_args:
      net: {class_path: fl_lightning.nets.Perceptron, init_args: {hidden: [8]}}
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
data:
  num_clients: 4
  participation: 0.5
  partition: {class_path: fl_lightning.data.DirichletPartition, init_args: {alpha: 0.5, min_samples: 1}}
"""
GRID = "--methods FedAvg FedNTD --seeds 0 1"


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A working directory with a base of the grid in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def drawn(base, cells_here):
    """The same, where cells are run one after the other in this process; their names, as they are begun."""
    return cells_here


@pytest.fixture
def here(drawn, monkeypatch, without_pictures):
    """The same, without a report, which takes seconds."""
    leave_out_report(monkeypatch)
    return drawn


def leave_out_report(monkeypatch):
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")


class Finished(NamedTuple):
    """A grid that was run once for all tests that read it: its folder, and its cells as they were begun."""

    folder: Path
    begun: tuple[str, ...]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched, empty_pictures():
        patched.chdir(folder)
        leave_out_report(patched)
        begun = run_cells_here(patched)
        said = say(f"compare -c base.yaml {GRID} --output grid")
        assert said.code == 0, said
    return Finished(folder / "grid", tuple(begun))


@pytest.fixture
def grid(base, finished):
    """A copy of the finished grid, as `out` in the working directory."""
    shutil.copytree(finished.folder, base / "out")
    return finished


def rows(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tables(folder):
    """What was written of the runs, but for what they took."""
    texts = {name: (Path(folder) / name).read_bytes() for name in ("results.csv", "results.md", "results.tex")}
    cells = [{name: row[name] for name in row if name not in RUN[1:]} for row in rows(Path(folder) / "cells.csv")]
    return texts | {"cells.csv": cells}


# --- whole grids ------------------------------------------------------------------------------------


def start(folder, *more):
    command = [sys.executable, "-m", "fl_lightning", "compare", "-c", "base.yaml", *GRID.split(), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rounds_on_disk(folder):
    """The rounds that have a row, of all cells together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) - 1 for path in folder.rglob("metrics.csv"))


def workers_of(process):
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def command_of(pid):
    return " ".join(psutil.Process(pid).cmdline())


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def gone(pids):
    """True when none of these processes is alive, within 20 s."""
    until = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def after_rounds(process, folder, least):
    """Wait until so many rounds are on disk, and a moment; the processes of the grid, none where it has ended."""
    while rounds_on_disk(folder) < least and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    return workers_of(process) if process.poll() is None else []


def ended(process):
    said = process.communicate(timeout=500)[0]
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_a_grid_that_is_killed_again_and_again_ends_with_the_same_table(base, finished):
    """By SIGKILL, at random moments: of its processes nobody is left, and the last start finishes it."""
    moments = sorted(random.sample(range(12), 3))
    for least in moments:
        killed = start(base, "--output", "grid", "--processes", str(random.choice([1, 2])))
        pids = after_rounds(killed, base / "grid", least)
        killed.kill()
        killed.communicate()
        assert gone(pids), "a worker must end with the process that started it"
    ended(start(base, "--output", "grid"))
    assert tables(base / "grid") == tables(finished.folder), moments
    assert rounds_on_disk(base / "grid") == 12


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_grid_whose_cell_is_killed_ends_with_the_same_table(base, finished, processes):
    """Alone, the cell has failed and is continued by the same command; beside others, it is run again by the grid."""
    disturbed = start(base, "--output", "grid", "--processes", str(processes))
    least = random.randrange(11)
    pids = [pid for pid in after_rounds(disturbed, base / "grid", least) if "spawn_main" in command_of(pid)]
    if pids:  # else the grid was faster
        psutil.Process(random.choice(pids)).kill()
    said = disturbed.communicate(timeout=500)[0]
    if processes == 1 and pids and least < 9:  # else the last cell may have ended before the kill
        assert "its process ended with signal 9" in said
        assert disturbed.returncode == 1
    ended(start(base, "--output", "grid"))
    assert tables(base / "grid") == tables(finished.folder), least
    assert rounds_on_disk(base / "grid") == 12


@pytest.mark.slow  # make smoke runs it
def test_a_cell_is_run_by_a_process_of_its_own(base, monkeypatch):
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")
    settings = "--methods FedAvg --seeds 0 --set trainer.max_epochs=1"
    said = say(f"compare -c base.yaml {settings} --output out")
    assert said.code == 0, said
    assert "[1/1] FedAvg-max_epochs=1-seed0-" in said.out
    assert len(rows("out/cells.csv")) > 0
    assert not multiprocessing.active_children()
    (log,) = Path("out").rglob("*.log")
    assert "max_epochs=1` reached" in log.read_text(encoding="utf-8")


def test_a_grid_is_run_once_and_its_tables_are_those_of_its_runs(grid, here):
    assert grid.begun == ("FedAvg-seed0", "FedNTD-seed0", "FedAvg-seed1", "FedNTD-seed1")
    runs = {name: read_run(cell_files("out", name).run) for name in grid.begun}
    for row in rows("out/cells.csv"):
        curve = list(runs[f"{row['method']}-seed{row['seed']}"].history.curve(row["metric"]).values())
        assert float(row["final"]) == curve[-1]
        assert np.allclose([*map(float, row["curve"].split())], curve)

    def data(name):
        found = runs[name]
        return found.partition.table.tolist(), [found.data[key] for key in ("data.clients", "data.sampling_seed")]

    assert data("FedAvg-seed0") == data("FedNTD-seed0") != data("FedAvg-seed1") == data("FedNTD-seed1")
    before = tables("out")
    said = say(f"compare -c base.yaml {GRID} --output out")
    assert (said.code, here) == (0, [])
    assert "4 of 4 runs in out are done already" in said.out
    assert tables("out") == before
    assert say("compare -c base.yaml --methods FedAvg --seeds 0 --output out --set model.max_local_steps=2").code == 0
    assert len(here) == 1, "another setting is another cell"


def test_its_file_is_an_experiment_that_reproduce_makes_again(base, here):
    grid = "compare -c base.yaml --methods FedAvg FedProx --seeds 0 --set data.participation=0.3,0.6 --output out"
    assert say(f"{grid} --metrics global/acc --hold cohorts").code == 0
    before = tables("out")
    del here[:]
    said = say("reproduce out/experiment.yaml --output out")
    assert said.code == 0, said
    assert not here
    assert tables("out") == before


OWN = """
import torch.nn.functional as F

from fl_lightning.client import ClientModule


class FedLS(ClientModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=0.1)
"""


def test_options_of_fit_classes_and_names_for_the_tables(base, here):
    (base / "fedls.py").write_text(OWN, encoding="utf-8")
    (base / "strong.yaml").write_text(
        "model: {client: {class_path: fl_lightning.methods.FedProx, init_args: {mu: 1}}}", encoding="utf-8"
    )
    methods = "--methods Plain=FedAvg ours=fedls.FedLS strong.yaml --baseline Plain"
    asked = "--trainer.max_epochs 2 --data.partition.alpha=10 --model.client.mu 0.5 --columns bytes steps --at 1"
    said = say(f"compare -c base.yaml {methods} --seeds 0 --output out {asked}")
    assert said.code == 0, said
    names = ["Plain", "ours", "strong"]
    assert here == [f"{name}-seed0" for name in names]
    for name, mu in zip(names, (None, None, 0.5), strict=True):
        run = read_run(cell_files("out", f"{name}-seed0").run)
        assert (len(run.history), run.settings["data.partition.alpha"]) == (2, 10)
        assert run.settings.get("model.client.mu") == mu  # of those that know it
    assert (
        {row["method"] for row in rows("out/results.csv")}
        == {row["method"] for row in rows("out/cells.csv")}
        == {*names}
    )
    for file, further in {
        "results.md": ["after 1 round"],
        "results.tex": [],
        "results-by-metric.tex": ["after 1 round"],
    }.items():
        text = Path("out", file).read_text(encoding="utf-8")
        assert all(word in text for word in (*names, *further, "MB a round", "local steps a round"))
        assert "global/acc" not in text
    assert [group.label for group in grouped(map(read_run, find_runs(["out"])))] == names  # as `report` has them
    again = say("reproduce out/experiment.yaml --output out")
    assert (again.code, len(here)) == (0, 3), again


README = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Methods\n")[2].partition("\n## ")[0]
PRINTED = [name.strip() for names in re.findall(r"^- .*?: (.*)$", README, re.MULTILINE) for name in names.split(",")]
NAMES = dict.fromkeys([*PRINTED, "Centralized", "Selective-FD", *(record["method"] for record in records())])


@pytest.mark.parametrize("name", NAMES)
def test_methods_have_the_names_that_are_printed(name):
    assert len(PRINTED) > 30
    path = Path(method_config(name))
    assert path.parent.name == "method"
    assert path == Path(method_config(name.lower()))
    assert printed_names()[path.stem] == name.replace("Selective-FD", "SelectiveFD")


def test_a_method_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(FileNotFoundError, match=r"got 'GeometricMedia'; the nearest is 'GeometricMedian'; .* NormClip"):
        method_config("GeometricMedia")


def cells_of(*options):
    words = ["-c", "base.yaml", "--methods", "FedAvg", "--seeds", "0", "--output", "out", *options]
    given, overrides = split_overrides(words)
    return Cells(experiment_of(command_parser().parse_args(given), overrides), Request()).all()


def test_callbacks_of_the_user_stand_beside_what_measures_the_cost(base):
    stop = "{class_path: EarlyStopping, init_args: {monitor: val/acc}}"
    appended = ["--trainer.callbacks+=Timer", "--trainer.callbacks+", stop, "--trainer.callbacks.patience", "7"]
    (cell,) = cells_of(*appended, "--columns", "steps")
    names = [callback["class_path"].rpartition(".")[2] for callback in cell.config["trainer"]["callbacks"]]
    assert names == ["CostMonitor", "Timer", "EarlyStopping"]
    assert cell.config["trainer"]["callbacks"][2]["init_args"]["patience"] == 7
    (cell,) = cells_of("--trainer.callbacks+=CostMonitor", "--columns", "steps", "seconds")
    assert len(cell.config["trainer"]["callbacks"]) == 1  # which is there already
    cells = cells_of("--set", "trainer.callbacks+=Timer,ForgettingMonitor", "--columns", "memory")
    assert [len(cell.config["trainer"]["callbacks"]) for cell in cells] == [2, 2]


def test_options_within_settings_that_are_none_are_options(base):
    cells = cells_of("--set", "data.feature_shift.noise=0,0.1", "--model.faults.patience", "2")
    assert [cell.config["data"]["feature_shift"]["noise"] for cell in cells] == [0, 0.1]
    assert cells[0].config["model"]["faults"]["patience"] == 2
    with pytest.raises(ValueError, match=r"knows 'data.feature_shift.nois'; the nearest is 'data.feature_shift.noise'"):
        cells_of("--data.feature_shift.nois", "1")


REFUSED = [
    (
        "--trainer.max_epoch 2",
        1,
        "no method of the experiment knows 'trainer.max_epoch'; the nearest is 'trainer.max_epochs'",
    ),
    ("--trainer.max_epochs", 1, "an option of fit takes a value, as in --trainer.max_epochs VALUE"),
    (
        "--seed_everything 3",
        1,
        "an experiment sets seeds, folders and loggers itself, got seed_everything; see --seeds",
    ),
    ("--data.num_clients 5 --set data.num_clients=6", 1, "--set data.num_clients and --data.num_clients set the same"),
    ("--model.client.beta 1 --tune model.client.beta=1,2", 1, "--tune takes settings of the training that nothing"),
    ("--methods =FedAvg", 1, "--methods takes METHOD or NAME=METHOD, got '=FedAvg'"),
    ("--methods FedAvg,FedNTD", 1, "takes names with spaces between them, got FedAvg,FedNTD; write FedAvg FedNTD"),
    ("--seeds -1", 1, "seeds must be at least 0, got -1"),
    ("--at 0", 1, "at must be at least 1, got 0; it is a number of rounds"),
    ("--at 2 4", 1, "--at must name rounds that the runs have, at most 3, got 4"),
    (
        "--target 0.5",
        1,
        "--target belongs to --columns rounds speed_up time time_speed_up, got 0.5 without them; add one",
    ),
    ("--output base.yaml", 1, "--output must be a folder, got base.yaml: base.yaml is a file; name another"),
    ("--methods nowhere.FedLS", 2, "nowhere"),
    ("--methods FedAvg --output", 2, "--output needs a value, got none; write --output VALUE"),
    ("--methods --output out", 2, "--methods needs a value, got none; write --methods VALUE"),
    ("--methods FedAvg --output out --at", 2, "--at needs a value, got none"),
    (
        "--methods FedAvg --output out --seeds 0,1",
        2,
        "seeds must be int, got 0,1; write a whole number, such as 3, sev",
    ),
    ("--methods FedAvg --output out --at x", 2, "at must be int, got x; write a whole number, such as 3"),
    ("--methods FedAvg --output out --rounds 2", 2, "unknown option 'rounds'; the nearest is 'trainer.max_epochs'"),
    ("--methods FedAvg FedNDT", 1, "got 'FedNDT'; the nearest is 'FedNTD'"),
    ("--methods FedAvg FedAvg", 1, "--methods must have names of their own, got FedAvg twice; write NAME=FedAvg"),
    ("--methods FedAvg --seeds 1 1", 1, "seeds must name each of its values once, got 1 1"),
    ("--methods FedAvg --baseline FedNTD", 1, "--baseline must be one of --methods (FedAvg), got FedNTD"),
    ("--methods FedAvg --set model.client.beta=1", 1, "no method of the experiment knows 'model.client.beta'"),
    ("--methods FedAvg --set model.client.beta", 1, "--set must be NAME=VALUE or NAME=VALUE,VALUE"),
    ("--methods FedAvg --set seed_everything=1,2", 1, "sets seeds, folders and loggers itself, got seed_everything"),
    ("--methods FedAvg --tune model.client.mu=1", 1, "no method of the experiment knows 'model.client.mu'"),
    ("--methods FedAvg --tune data.num_clients=2,4", 1, "--tune takes settings of the training"),
    ("--methods FedNTD --tune model.client.beta=1 --tune_metric global/acc", 1, "must begin with val/"),
    (
        "--methods FedNTD --tune model.client.beta=1 --tune_metric local/alma",
        1,
        "tune_metric local/alma needs model.evaluate_clients_every",
    ),
    (
        "--methods FedNTD --tune model.client.beta=1 --tune_metric local/tuned/alma --model.evaluate_clients_every 1",
        1,
        "tune_metric local/tuned/alma needs model.fine_tuning",
    ),
    ("--methods FedAvg --processes -1", 1, "processes must be at least 0, got -1; 0 makes the runs in"),
    ("--methods FedAvg own.yaml", 1, "data.proxy_size is 0 for FedAvg and 0.1 for own; give all the same"),
]
"""Options that are refused, the exit status, and a part of the sentence."""


def with_defaults(options):
    """Add the methods and the folder that some options leave out."""
    defaults = {"--methods": "FedNTD", "--output": "out"}
    missing = [f"{name} {value}" for name, value in defaults.items() if name not in options]
    return " ".join(["compare -c base.yaml", *missing, options])


@pytest.mark.parametrize(("options", "code", "sentence"), REFUSED)
def test_a_wrong_option_is_one_sentence_before_anything_is_run(base, here, options, code, sentence):
    (base / "own.yaml").write_text("data: {proxy_size: 0.1}", encoding="utf-8")
    assert sentence in refusal(with_defaults(options), code)
    assert not here


def test_a_metric_that_no_run_has_is_named_after_the_tables_of_the_others(grid, here):
    wrong = "compare -c base.yaml --methods FedAvg --seeds 0 --output out --metrics global/accc global/loss"
    assert "no run has 'global/accc'; the nearest is 'global/acc'" in say(wrong).err
    text = Path("out/results.md").read_text(encoding="utf-8")
    assert text.startswith("**Final values**")
    assert "**Loss of the global model on the test split**" in text
    assert "accc" not in text


class Stopped(BaseException):
    """In place of the death of the process."""


@pytest.mark.parametrize(
    ("cell", "rounds"),
    [("FedAvg-seed0", 1), *(pytest.param("FedNTD-seed0", n, marks=pytest.mark.slow) for n in (0, 3))],
)
def test_a_cell_that_was_stopped_is_continued_and_the_table_is_the_same(
    base, here, finished, monkeypatch, cell, rounds
):
    grid = "compare -c base.yaml --methods FedAvg FedNTD --seeds 0"
    shutil.copytree(finished.folder, base / "whole")
    assert say(f"{grid} --output whole").code == 0
    assert here == []
    tell = RoundCounter.on_train_start if rounds == 0 else RoundCounter.on_train_epoch_end

    def stop(self, trainer, module):
        tell(self, trainer, module)
        if cell in trainer.default_root_dir and trainer.current_epoch + 1 >= rounds:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(RoundCounter, tell.__name__, stop)
        with pytest.raises(Stopped):
            say(f"{grid} --output out")
    del here[:]
    assert say(f"{grid} --output out").code == 0
    assert here[0] == cell
    assert tables("out") == tables("whole")
    assert [path.name for path in cell_files("out", cell).parent.iterdir()] == ["0"]


@pytest.mark.slow
def test_a_cell_is_an_ordinary_run(grid, here):
    own = "--trainer.enable_progress_bar false --trainer.default_root_dir own"
    files = cell_files("out", "FedNTD-seed1")
    assert say(f"fit -c {files.config} {own}").code == 0
    cell, fitted = (Path(folder) / files.name / "0/metrics.csv" for folder in ("out/runs", "own"))
    assert cell.read_bytes() == fitted.read_bytes()


def test_the_report_has_the_tables_and_the_figures(grid, drawn, without_pictures):
    assert say("compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --output out").code == 0
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "<h1>FedAvg and FedNTD on " in page
    assert "fl-lightning compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --output out" in page
    assert "Accuracy of the global model on the test split" in page
    assert page.count("data:image/svg+xml") >= 6


def test_more_rounds_continue_fewer_are_read_and_other_settings_are_another_run(base, here):
    grid = "compare -c base.yaml --methods FedAvg --seeds 0 --output out --keep_checkpoints last"
    assert say(grid).code == 0
    three = tables("out")
    (base / "base.yaml").write_text(BASE.replace("max_epochs: 3", "max_epochs: 5"), encoding="utf-8")
    assert say(grid).code == 0
    run = cell_files("out", "FedAvg-seed0").run
    assert (run.name, len(rows(run / "metrics.csv"))) == ("0", 5)
    assert tables("out") != three
    shown_otherwise = BASE.replace("accelerator: cpu", "accelerator: cpu, enable_progress_bar: false")
    (base / "base.yaml").write_text(shown_otherwise, encoding="utf-8")
    assert say(grid).code == 0
    assert len(here) == 2
    assert tables("out") == three
    others = {"lr: 0.05": "lr: 0.5", "  threads: 1": "  threads: 2"}
    for number, (was, now) in enumerate(others.items(), start=1):
        (base / "base.yaml").write_text(BASE.replace(was, now), encoding="utf-8")
        assert say(grid).code == 0
        assert len(here) == 2 + number
    assert len(list(Path("out/runs").iterdir())) == 3


ENDLESS = BASE.replace("max_epochs: 3", "max_epochs: %s, max_steps: %s, max_time: %s")


@pytest.mark.parametrize(
    ("limits", "rounds"),
    [
        (("null", 2, "null"), 2),
        pytest.param((-1, 2, "null"), 2, marks=pytest.mark.slow),
        pytest.param((3, 2, "null"), 2, marks=pytest.mark.slow),
        pytest.param((2, -1, "'00:01:00:00'"), 2, marks=pytest.mark.slow),
        (("null", -1, "'00:00:00:01'"), None),
    ],
    ids=str,
)
def test_a_grid_may_end_by_steps_or_time(base, here, limits, rounds):
    grid = "compare -c base.yaml --methods FedAvg --seeds 0 --output out"
    (base / "base.yaml").write_text(ENDLESS % limits, encoding="utf-8")
    assert say(grid).code == 0
    run = cell_files("out", "FedAvg-seed0").run
    kept = len(rows(run / "metrics.csv"))
    assert kept == rounds or (rounds is None and kept > 0)
    assert json.loads((run / "done.json").read_text(encoding="utf-8"))["rounds"] == kept
    before = tables("out")
    said = say(grid)
    assert (said.code, len(here)) == (0, 1), said
    assert "1 of 1 runs in out are done already" in said.out
    assert tables("out") == before


def test_a_grid_that_ends_by_steps_is_continued(base, here):
    grid = "compare -c base.yaml --methods FedAvg --seeds 0 --output out --keep_checkpoints last"
    (base / "base.yaml").write_text(ENDLESS % ("null", 2, "null"), encoding="utf-8")
    assert say(grid).code == 0
    files = cell_files("out", "FedAvg-seed0")
    (files.run / "done.json").write_text(
        '{"max_epochs": null, "rounds": 2}', encoding="utf-8"
    )  # as it was once written
    for limits, rounds in (
        (("null", 2, "null"), 2),
        (("null", 4, "null"), 4),
        ((5, -1, "null"), 5),
        ((5, 9, "null"), 5),
    ):
        (base / "base.yaml").write_text(ENDLESS % limits, encoding="utf-8")
        assert say(grid).code == 0
        assert (files.run.name, len(rows(files.run / "metrics.csv")), files.done["rounds"]) == ("0", rounds, rounds)
    assert say(f"{grid.replace('--output out', '--output whole')}").code == 0
    assert tables("out") == tables("whole")


def test_a_cosine_over_max_epochs_is_no_beginning_of_a_longer_one(base, here):
    grid = "compare -c base.yaml --methods FedAvg --seeds 0 --output out"
    own = BASE.replace("local_epochs: 1", "local_epochs: 1\n  lr_decay: {cosine: 0.001%s}")
    (base / "base.yaml").write_text(own % "", encoding="utf-8")
    assert say(grid).code == 0
    longer = own.replace("max_epochs: 3", "max_epochs: 5")
    (base / "base.yaml").write_text(longer % "", encoding="utf-8")
    assert say(grid.replace("--output out", "--output longer")).code == 0
    assert say(grid).code == 0
    assert tables("out") == tables("longer")
    (base / "base.yaml").write_text(longer % ", rounds: 3", encoding="utf-8")
    del here[:]
    assert say(grid).code == 0
    assert max(len(rows(path)) for path in Path("out").rglob("metrics.csv")) == 5
    assert say(grid.replace("--output out", "--output whole")).code == 0
    assert len(rows("out/cells.csv")) > 0
    assert tables("out") == tables("whole")


@pytest.fixture
def begun(here, monkeypatch):
    """The names of the runs that are begun before any is trained."""
    names = []
    begin = run.start
    monkeypatch.setattr(compare, "check_starts", check_starts)
    monkeypatch.setattr(run, "start", lambda files: (names.append(files.name), begin(files)))
    return names


def test_all_settings_that_cannot_be_run_are_named_before_any_is_trained(base, here, begun):
    methods = "--methods FedAvg FedCL strong=FedProx --seeds 0 1"
    settings = "--set data.participation=0.5,1 --set model.client.mu=0.1,-1 --output out"
    error = refusal(f"compare -c base.yaml {methods} {settings}", 1)
    assert "6 of 12 settings cannot be run, so that nothing was trained" in error
    assert error.count("FedCL: FedCL needs the split 'proxy'") == 1  # in all cases for the same reason
    assert "strong, participation=0.5, mu=-1 and strong, participation=1, mu=-1: mu must be at least 0" in error
    assert len(begun) == len(set(begun)) == 8  # a setting that a method does not know is no further one
    assert not here
    assert not Path("out").exists()


class Online(CSVLogger):
    """A logger that would leave something wherever it is made."""

    def __init__(self):
        super().__init__("logged")
        Path("online").touch()


class Note(Callback):
    """Logs by a call that few loggers have, and writes which of its hooks are called."""

    def on_fit_start(self, trainer, pl_module):
        trainer.logger.experiment.log({"a": 1})

    def on_exception(self, trainer, pl_module, exception):
        Path("failed").touch()

    def teardown(self, trainer, pl_module, stage):
        Path("ended").touch()


def test_a_start_is_no_failure_to_callbacks_and_makes_no_logger_of_the_user(base, begun):
    (base / "noted.yaml").write_text(f"trainer: {{callbacks: [{__name__}.Note], logger: {__name__}.Online}}", "utf-8")
    wrong = "--methods FedAvg FedProx --model.client.mu -1"  # so that nothing is trained
    refusal(f"compare -c base.yaml -c noted.yaml {wrong} --seeds 0 --output out", 1)
    assert len(begun) == 2
    assert [path for path in ("online", "failed", "ended") if Path(path).exists()] == ["ended"]


def test_settings_that_have_begun_are_not_started_again(base, here, begun):
    grid = "compare -c base.yaml --methods FedAvg {} --seeds 0 --output out --trainer.max_epochs 1"
    assert say(grid.format("")).code == 0
    assert say(grid.format("FedProx")).out.startswith("beginning 1 setting before any is trained\n")
    assert [name.partition("-")[0] for name in begun] == ["FedAvg", "FedProx"]
    assert here == ["FedAvg-seed0", "FedProx-seed0"]
    assert "3 of 5 settings" in refusal("compare -c base.yaml --methods FedAvg FedNTD FedProx --seeds 0 --output tuned "
        "--tune model.client.beta=1,-1 model.client.mu=-1,-2", 1)  # fmt: skip
    assert not Path("tuned").exists()


def test_one_failing_cell_does_not_stop_the_others_and_is_tried_again(base, here):
    (base / "bad.yaml").write_text("model: {client: {init_args: {optimizer: {init_args: {lr: 1e38}}}}}", "utf-8")
    grid = "compare -c base.yaml --methods Krum=bad.yaml FedAvg --seeds 0 --output out --baseline FedAvg"
    said = say(grid)
    assert said.code == 1
    assert said.err.startswith("fl-lightning: error: 1 run failed, and the tables are those of the others. Krum-seed0-")
    assert {row["method"] for row in rows("out/results.csv")} == {"FedAvg"}
    written = Path("out/results.md").read_text(encoding="utf-8")
    assert "Krum-seed0-" in written
    row = r"^\| Krum \| seed 0 failed: client \d returned NaN or infinite values in round \d \|"
    assert re.search(row, written, re.MULTILINE)
    say(grid)
    assert here == ["Krum-seed0", "FedAvg-seed0", "Krum-seed0"]


def test_a_case_in_which_all_failed_has_a_table_of_the_reasons(base, here):
    say("compare -c base.yaml --methods FedAvg --seeds 0 --output out --set model.client.optimizer.lr=0.1,1e38")
    written = Path("out/results.md").read_text(encoding="utf-8")
    assert "**lr=1e38**\n\n| method | final |\n| --- | ---: |\n| FedAvg | seed 0 failed: client" in written
    assert [row["case"] for row in rows("out/results.csv")] == ["lr=0.1"] * len(rows("out/results.csv"))


def test_a_method_of_which_one_seed_failed_says_so_below_its_values(tmp_path):
    errors = {"1": "weights must be finite, but client 2 returned NaN; lower the learning rate"}
    series = Series("FedKA", "", Group("", [SavedRun(tmp_path, History(), {})]), errors)
    table = with_failed(
        Table("", ["method", "final"], [[TableCell("FedKA"), TableCell("40.0")]], "One seed."), [series]
    )
    assert (len(table.rows), table.note) == (1, "One seed. FedKA: seed 1 failed: client 2 returned NaN.")


@pytest.mark.slow
def test_a_process_that_dies_fails_its_cell_only(base):
    (base / "dying.py").write_text(
        "import os\nfrom pytorch_lightning import Callback\n"
        "class Dying(Callback):\n    def on_train_epoch_end(self, trainer, pl_module):\n        os._exit(3)\n"
    )
    (base / "dying.yaml").write_text("trainer: {callbacks: [{class_path: dying.Dying}]}", encoding="utf-8")
    said = say("compare -c base.yaml --methods dying.yaml FedAvg --seeds 0 --output out --baseline FedAvg")
    assert said.code == 1
    assert "its process ended with code 3" in said.err
    assert {row["method"] for row in rows("out/results.csv")} == {"FedAvg"}


# --- settings, tuning, validation -------------------------------------------------------------------


@pytest.mark.slow
def test_a_setting_makes_a_table_and_methods_that_do_not_know_it_are_run_once(base, here):
    said = say("compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --set model.client.beta=0.3,1 --output out")
    assert said.code == 0, said
    assert here == ["FedAvg-seed0", "FedNTD-beta=0.3-seed0", "FedNTD-beta=1-seed0"]
    found = [(row["case"], row["method"]) for row in rows("out/results.csv") if row["statistic"] == "best"]
    assert found == [(case, method) for case in ("beta=0.3", "beta=1") for method in ("FedAvg", "FedNTD")]


@pytest.mark.slow
def test_tuning_chooses_on_the_validation_split_and_never_looks_at_the_test_split(base, here):
    said = say(
        "compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --tune model.client.beta=0.1,100 --output out"
        " --val_fraction 0.2"
    )
    assert said.code == 0, said
    scores = {row["settings"]: float(row["val/acc"]) for row in rows("out/tuning.csv")}
    best = max(scores, key=scores.get)
    assert f"Tuned in validation: {best} for FedNTD" in said.out
    assert here == ["FedNTD-beta=0.1-seed0", "FedNTD-beta=100-seed0", "FedAvg-seed0", f"FedNTD-{best}-seed0"]
    for name in here[:2]:
        run = read_run(cell_files("out/tuning", name).run)
        assert not run.test
        assert not [key for key in run.history.names if key.startswith(("global/", "test/"))]
    final = read_run(cell_files("out", here[-1]).run)
    assert final.history.curve("global/acc")
    assert final.settings["data.val_fraction"] == 0.0
    assert best in Path("out/results.md").read_text(encoding="utf-8")


def test_tuning_chooses_on_the_validation_data_of_a_data_module(base, here):
    """Without --val_fraction 0 the command is refused, and names the option."""
    own = yaml.safe_load(BASE)
    own["data"] = {"source": {"class_path": "tests.user_data.Pairs"}, "num_clients": 3}
    own["trainer"]["max_epochs"] = 1
    (base / "base.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    command = "compare -c base.yaml --methods FedProx --seeds 0 --tune model.client.mu=0.1,1 --processes 0 --output"
    sentence = refusal(f"{command} refused", 1)
    assert "data.val_fraction must be 0 where the source has validation samples of its own" in sentence
    assert "by --val_fraction 0" in sentence
    said = say(f"{command} out --val_fraction 0")
    assert said.code == 0, said
    for name in ("FedProx-mu=0.1-seed0", "FedProx-mu=1-seed0"):
        run = read_run(cell_files("out/tuning", name).run)
        assert run.history.curve("val/acc")
        assert run.settings["data.val_fraction"] == 0.0
        assert not run.test


@pytest.mark.slow
def test_with_a_validation_split_the_last_and_the_best_model_are_tested(base, here):
    (base / "base.yaml").write_text(BASE + "  val_fraction: 0.2\n", encoding="utf-8")
    assert say("compare -c base.yaml --methods FedAvg --seeds 0 --output out").code == 0
    run = cell_files("out", "FedAvg-seed0").run
    assert set(json.loads((run / "test.json").read_text())) >= {"test/acc", "test/acc_best"}
    metrics = {row["metric"] for row in rows("out/results.csv")}
    assert metrics >= {"val/acc", "test/acc", "test/acc_best"}
    assert "global/acc" not in metrics


FAILS_IN_TESTS = """
from torch.nn import functional as F

from fl_lightning.nets import Perceptron
from pytorch_lightning import LightningModule
import torch


class FailsInTests(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Perceptron(num_classes=10, input_shape=(1, 8, 8), hidden=(4,))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val/ce", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        raise ValueError("the label is unknown")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_a_run_whose_test_fails_has_failed(base, here, monkeypatch):
    Path("fails_in_tests.py").write_text(FAILS_IN_TESTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    own = yaml.safe_load(BASE)
    own["model"]["client"] = {"class_path": "fails_in_tests.FailsInTests"}
    own["data"]["val_fraction"] = 0.2
    (base / "base.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    sentence = refusal("compare -c base.yaml --methods FedAvg --seeds 0 --output out --processes 0", 1)
    assert "the label is unknown" in sentence
    assert cell_files("out", "FedAvg-seed0").done is None


# --- composition, without runs ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def composer(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return Composer([str(path)])


def test_a_method_is_its_file_and_not_the_defaults_of_its_class(composer):
    config = composer.compose("SCAFFOLD")
    assert config["model"]["aggregator"]["init_args"]["weighting"] == "uniform"  # of configs/method/scaffold.yaml
    assert config["model"]["client"]["init_args"]["net"]["init_args"] == {"hidden": [8]}
    both = composer.compose("FedED+FedEXP")["model"]
    assert both["client"]["class_path"].endswith("FedED")
    assert both["aggregator"]["class_path"].endswith("FedEXPAggregator")
    assert composer.compose("LG-FedAvg")["model"]["personal"]


@pytest.mark.parametrize(
    ("hold", "seeds"),
    [
        ((), (3, None, 3, 3)),
        (("partition",), (3, None, 0, 3)),
        (("cohorts",), (3, None, 3, 0)),
        (("partition", "cohorts"), (3, None, 0, 0)),
        (("training",), (7, None, 3, 3)),
    ],
)
def test_a_seed_varies_what_is_not_held(composer, hold, seeds):
    config = seeded(composer.compose("FedAvg"), 3, hold)
    found = config["seed_everything"], config["model"]["seed"], config["data"]["seed"], config["data"]["sampling_seed"]
    assert found == seeds


def test_a_cell_is_read_by_the_command_line_as_it_was_composed(composer, tmp_path):
    experiment = Experiment(composer.base, [Runs(["FedNTD"])], {"": {"data.partition.alpha": 0.9}}, seeds=[4])
    (cell,) = Cells(experiment, Request()).all()
    path = tmp_path / "cell.yaml"
    path.write_text(yaml.safe_dump(dict(cell.config), sort_keys=False), encoding="utf-8")
    again = Composer([str(path)]).compose("")
    assert again == dict(cell.config)
    assert again["data"]["partition"]["init_args"]["alpha"] == 0.9
    assert "data.partition.alpha" in option_names(again)


@pytest.mark.parametrize(
    ("method", "sentence", "setting"),
    [
        ("KnFu", "needs the split 'transfer'", "data.transfer_size"),
        *(
            pytest.param(method, f"needs the split '{split}'", f"data.{split}_size", marks=pytest.mark.slow)
            for method, split in (
                ("FedMD", "transfer"),
                ("SelectiveFD", "transfer"),
                ("FedDF", "proxy"),
                ("FedCL", "proxy"),
            )
        ),
    ],
)
def test_the_data_are_the_base_s_and_a_set_that_is_missing_is_named(base, here, method, sentence, setting):
    grid = f"compare -c base.yaml --methods {method} --seeds 0 --output"
    said = refusal(f"{grid} out", 1)
    assert sentence in said
    assert f"set {setting} (" in said
    few = " --set model.server_module.distill_steps=2" if method == "FedDF" else ""
    (base / "base.yaml").write_text(f"{BASE}  {setting.removeprefix('data.')}: 30\n", encoding="utf-8")
    assert say(f"{grid} given{few}").code == 0
    run = cell_files("given", here[-1]).run
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["data"][setting[5:]] == 30


def test_centralized_and_local_stand_beside_a_federation(base, here):
    """Samples at one place are no other data; the steps are those of the cohort's share of the samples."""
    more = "--seeds 0 --columns steps --data.batch_size 1 --model.max_local_steps null --trainer.max_epochs 1"
    said = say(f"compare -c base.yaml --methods FedAvg Centralized Local {more} --output out")
    assert said.code == 0, said
    runs = {name: read_run(cell_files("out", name).run) for name in here}
    steps = {name: run.history.curve("cost/steps") for name, run in runs.items()}
    assert steps["Centralized-seed0"] == steps["FedAvg-seed0"]
    assert runs["Centralized-seed0"].partition.table.sum() == runs["FedAvg-seed0"].partition.table.sum()
    assert not data_differences(grouped(runs.values()))


@pytest.mark.slow
def test_different_data_are_one_table_where_that_is_asked_for(base, here):
    (base / "own.yaml").write_text("data: {proxy_size: 0.05}", encoding="utf-8")
    grid = "compare -c base.yaml --methods FedAvg own.yaml --seeds 0"
    for more in ("--output out --allow_different_data true", "--output same --set data.proxy_size=0.1"):
        assert say(f"{grid} {more}").code == 0
        assert {row["method"] for row in rows(f"{more.split()[1]}/results.csv")} == {"FedAvg", "own"}
    assert len(here) == 3, "with the same data both are one run"


def test_a_wrong_setting_is_one_sentence(base):
    assert "model.clint" in refusal("compare -c base.yaml --methods FedAvg --output out --set model.clint.mu=1", 1)
    (base / "base.yaml").write_text(BASE + "  num_clint: 4\n", encoding="utf-8")
    assert "num_clint" in refusal("compare -c base.yaml --methods FedAvg --output out", 2)
    assert "needs methods, which has no default; write --methods VALUE" in refusal(
        "compare -c base.yaml --output out", 2
    )


# --- checkpoints of complete runs ---

ONE_METHOD = "compare -c base.yaml --methods FedAvg --seeds 0 --output out"


def checkpoint_names(run):
    return sorted(path.name.partition("-on-test")[0].removesuffix(".ckpt") for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ("", []),
        ("--keep_checkpoints last", ["last"]),
        ("--keep_checkpoints all", ["best", "client", "client-best", "last"]),
    ],
)
def test_a_complete_run_keeps_what_is_asked_for_and_its_identity(base, here, option, kept):
    assert say(f"{ONE_METHOD} {option}").code == 0
    run = cell_files("out", "FedAvg-seed0").run
    assert checkpoint_names(run) == kept
    assert identity_of(run)["config"]
    assert read_run(run).data  # what tells that two runs have the same samples
    assert say(f"{ONE_METHOD} {option}").code == 0
    assert len(here) == 1  # it is known as done


def test_more_rounds_continue_the_last_checkpoint_and_begin_again_without_one(base, here):
    curves = {}
    for keep, run_name in (("last", "0"), ("none", "1")):
        grid = ONE_METHOD.replace("--output out", f"--output {keep}")
        assert say(f"{grid} --keep_checkpoints {keep}").code == 0
        said = say(f"{grid} --keep_checkpoints {keep} --trainer.max_epochs 5")
        assert said.code == 0
        assert ("begins again, because its checkpoints were not kept" in said.out) == (keep == "none")
        run = cell_files(keep, "FedAvg-seed0").run
        assert run.name == run_name
        curves[keep] = [row["global/acc"] for row in rows(run / "metrics.csv")]
    assert len(curves["last"]) == 5
    assert curves["last"] == curves["none"]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_round_of_a_continued_run_may_lie_before_it_was_continued(base, here, mode):
    best = f"--data.val_fraction 0.3 --best.monitor val/loss --best.mode {mode} --keep_checkpoints last"
    whole = f"{ONE_METHOD.replace('--output out', '--output whole')} {best} --trainer.max_epochs 4"
    assert say(f"{ONE_METHOD} {best} --trainer.max_epochs 2").code == 0
    assert say(f"{ONE_METHOD} {best} --trainer.max_epochs 4").code == 0
    assert say(whole).code == 0
    runs = [cell_files(folder, "FedAvg-seed0").run for folder in ("out", "whole")]
    tests = [json.loads((run / "test.json").read_text()) for run in runs]
    assert tests[0] == tests[1]
    assert "test/acc_best" in tests[1]
    assert checkpoint_names(runs[0]) == ["best", "last"]


def test_a_run_that_was_stopped_keeps_all(base, here, monkeypatch):
    tell = RoundCounter.on_train_epoch_end

    def stop(self, trainer, module):
        tell(self, trainer, module)
        if trainer.current_epoch == 1:
            raise RuntimeError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(RoundCounter, "on_train_epoch_end", stop)
        assert say(f"{ONE_METHOD} --keep_checkpoints none").code == 1
    assert "last" in checkpoint_names(cell_files("out", "FedAvg-seed0").run)
    assert say(f"{ONE_METHOD} --keep_checkpoints none").code == 0
    assert checkpoint_names(cell_files("out", "FedAvg-seed0").run) == []
    assert Path("out/results.md").is_file()


def test_checkpoints_of_the_user_stay(base, here):
    assert say(f"{ONE_METHOD} --keep_checkpoints all").code == 0
    run = cell_files("out", "FedAvg-seed0").run
    for name in ("best-of-mine", "client-3", "last-v1"):
        (run / f"checkpoints/{name}.ckpt").write_bytes(b"")
    (run / "checkpoints/last.ckpt").rename(run / "checkpoints/last.kept")
    drop_checkpoints(run, "last")
    assert checkpoint_names(run) == ["best-of-mine", "client-3", "last-v1", "last.kept"]
    drop_checkpoints(run, "none")  # no checkpoint tells which run it is
    assert not (run / "identity.json").exists()


def test_a_run_with_a_checkpoint_callback_of_the_user_keeps_all(base, here):
    callback = "--trainer.callbacks+ ModelCheckpoint --trainer.callbacks.save_last true"
    assert say(f"{ONE_METHOD} {callback}").code == 0
    assert "last" in checkpoint_names(cell_files("out", "FedAvg-seed0").run)


def test_a_complete_run_that_is_continued_keeps_its_last_checkpoint(base, here):
    assert say(f"{ONE_METHOD} --keep_checkpoints last").code == 0
    assert say(f"{ONE_METHOD} --trainer.max_epochs 5").code == 0
    run = cell_files("out", "FedAvg-seed0").run
    assert (run.name, checkpoint_names(run)) == ("0", ["last"])
