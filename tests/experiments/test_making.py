"""Experiments that are stopped, shared, shortened, selected and merged: always the same csv."""

import csv
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning.cli.configs import path_of
from fl_lightning.experiments import making
from fl_lightning.experiments import run as running
from fl_lightning.experiments.experiment import Tables
from fl_lightning.experiments.experiment_files import read_experiment
from fl_lightning.experiments.progress import CellProgress
from fl_lightning.papers.stored import RUN
from tests.commands import cell_files, refusal, say

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
# A tiny table.
base: [experiment/digits_fedavg]
config:
  trainer: {max_epochs: 3}
  model: {local_epochs: 1, max_local_steps: 1}
  data: {num_clients: 4, partition: {init_args: {min_samples: 1}}}
seeds: [0, 1]
cases:
  few: {core_hours: 0.01, data.participation: 0.3}
  many: {core_hours: 0.02, data.participation: 0.6}
runs:
  - methods: [FedAvg]
  - {methods: [FedNTD], label: "FedNTD, weak", settings: {model.client.beta: 0.1}, cases: [many]}
draw:
  "":
    class_path: fl_lightning.papers.PaperTable
    init_args:
      keys: {accuracy: global/acc}
      paper: {accuracy: {FedAvg: [20 ± 1, 30], "FedNTD, weak": [null, 40]}}
      baseline: FedAvg
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/table.yaml").write_text(TABLE.lstrip(), encoding="utf-8")
    return tmp_path


@pytest.fixture
def here(folder, cells_here):
    """Runs are made in this process; their names, as they are begun."""
    return cells_here


def stored(output="reproduced"):
    """What was stored of the runs, but for what they took."""
    with (Path(output) / "own/table.csv").open(newline="", encoding="utf-8") as file:
        return [{name: row[name] for name in row if name not in RUN[1:]} for row in csv.DictReader(file)]


def start(folder, *more):
    command = [sys.executable, "-m", "fl_lightning", "reproduce", "own/table.yaml", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_table_is_made_seed_by_seed_and_read_again(here, monkeypatch):
    written = []
    monkeypatch.setattr(
        making.Maker, "write", lambda maker, cells, notes, failed, last=False: written.append((len(here), last))
    )
    assert say("reproduce own/table.yaml").code == 0
    assert here == [
        f"{name}-seed{seed}" for seed in (0, 1) for name in ("FedAvg-few", "FedAvg-many", "FedNTD_weak-many")
    ]
    assert written == [(3, False), (6, False), (6, True)]
    monkeypatch.undo()


def test_its_files_are_a_table_in_three_forms_a_page_and_the_values(here):
    said = say("reproduce own/table.yaml --seeds 0")
    assert said.code == 0, said
    there = {path.name for path in Path("reproduced/own").iterdir()}
    assert there == {"table.md", "table.tex", "table.html", "table.csv"}
    assert [(row["case"], row["method"], row["seed"], row["rounds"]) for row in stored()] == [
        ("few", "FedAvg", "0", "3"),
        ("many", "FedAvg", "0", "3"),
        ("many", "FedNTD, weak", "0", "3"),
    ]
    times = (cell_files("reproduced", "FedAvg-few-seed0").run / "times.csv").read_text().splitlines()
    assert times[0].startswith("began,first_round,rounds,seconds,cpu_seconds,host_load,threads,machine,commit,")
    assert len(times) == 2
    assert "| many, FedNTD, weak | 40.0 |" in Path("reproduced/own/table.md").read_text()


def test_fewer_rounds_are_the_beginning_and_the_rest_continues_them(here):
    assert say("reproduce own/table.yaml --seeds 0 --output whole").code == 0
    assert say("reproduce own/table.yaml --seeds 0 --rounds 1").code == 0
    assert {len(row["curve"].split()) for row in stored()} == {1}
    assert len(list(Path("reproduced/runs").glob("*/0/checkpoints/last.ckpt"))) == 3  # the next command continues them
    short = stored()
    del here[:]
    assert say("reproduce own/table.yaml --seeds 0").code == 0
    assert len(here) == 3
    assert stored() == stored("whole")
    assert say("reproduce own/table.yaml --seeds 0 --rounds 0.3").code == 0  # ⌈0.9⌉: read, not run
    assert len(here) == 3
    assert stored() == short


def test_a_run_that_was_killed_when_it_was_continued_has_the_rounds_on_disk(here):
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg").code == 0
    del here[:]
    for name in ("few", "many"):
        done = cell_files("reproduced", f"FedAvg-{name}-seed0").run / "done.json"
        done.write_text('{"max_epochs": 1, "rounds": 1}', encoding="utf-8")
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --rounds 2").code == 0
    assert {len(row["curve"].split()) for row in stored()} == {2}
    assert not here


def test_columns_that_are_the_beginning_of_each_other_share_a_run(here):
    text = TABLE.replace("data.participation: 0.3", "trainer.max_epochs: 3").replace(
        "data.participation: 0.6", "trainer.max_epochs: 2"
    )
    Path("own/table.yaml").write_text(text.lstrip(), encoding="utf-8")
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg").code == 0
    assert len(here) == 1
    few, many = (row["curve"].split() for row in stored())
    assert (len(few), many) == (3, few[:2])


def test_a_run_has_the_rounds_that_are_asked_whatever_another_process_writes_of_it(here, monkeypatch):
    fitted = running.fit

    def fit(files, tell):
        text = files.config.read_text(encoding="utf-8")
        files.config.write_text(text.replace("max_epochs: 3", "max_epochs: 1"), encoding="utf-8")
        fitted(files, tell)

    monkeypatch.setattr(running, "fit", fit)
    assert say("reproduce own/table.yaml --seeds 0").code == 0
    assert {len(row["curve"].split()) for row in stored()} == {3}


def test_rows_and_columns_are_chosen_by_patterns(here):
    assert say("reproduce own/table.yaml --seeds 3 --methods 'FedNTD*' FedAvg --cases 'm*'").code == 0
    assert here == ["FedAvg-many-seed3", "FedNTD_weak-many-seed3"]
    assert "--cases must match one of few; many, got 'none'" in refusal("reproduce own/table.yaml --cases none", 1)
    assert "--methods must match one of FedAvg; FedNTD, weak" in refusal("reproduce own/table.yaml --methods Ditto", 1)
    empty = refusal("reproduce own/table.yaml --methods 'FedNTD*' --cases few", 1)
    assert "must leave a row with a column, and leave FedAvg; FedNTD, weak none" in empty


def test_a_file_over_an_experiment_puts_no_other_data_into_a_column(here):
    """FedCL's official settings are those of CIFAR-10, and a column is MNIST."""
    Path("own/mnist.yaml").write_text("data: {source: {class_path: fl_lightning.data.MNIST}}\n")
    table = Path("own/table.yaml").read_text()
    Path("own/table.yaml").write_text(table.replace("  few: {", "  few: {config: own/mnist.yaml, "))
    Path("over.yaml").write_text("data: {source: {class_path: fl_lightning.data.CIFAR10}}\n")
    told = refusal("reproduce own/table.yaml --plan --seeds 0 -c over.yaml", 1)
    assert "over.yaml puts fl_lightning.data.CIFAR10 into 'few', whose own file has fl_lightning.data.MNIST" in told
    assert say("reproduce own/table.yaml --plan --seeds 0 --cases many -c over.yaml").code == 0


def test_of_several_experiments_those_are_made_that_have_the_rows(here):
    Path("own/other.yaml").write_text(Path("own/table.yaml").read_text().replace("FedAvg", "FedProx"))
    said = say("reproduce own/table.yaml own/other.yaml --seeds 0 --methods FedAvg --cases few")
    assert (said.code, here) == (0, ["FedAvg-few-seed0"])
    assert "left out for lack of these rows or columns: own/other\n" in said.out
    refused = refusal("reproduce own/table.yaml own/other.yaml --methods Ditto", 1)
    assert "own/other: --methods must match one of FedProx; FedNTD, weak, got 'Ditto'" in refused


def test_published_values_stay_with_their_columns_where_some_are_chosen(here):
    init = "{cases: [few], keys: {accuracy: global/acc}, paper: {accuracy: {FedAvg: [20]}}}"
    other = f"  few: {{class_path: fl_lightning.papers.PaperTable, init_args: {init}}}\n"
    Path("own/table.yaml").write_text(TABLE.lstrip() + other, encoding="utf-8")
    assert say("reproduce own/table.yaml --seeds 0 --cases many").code == 0
    rows = Path("reproduced/own/table.md").read_text().splitlines()
    assert [row.split("|")[1:3] for row in rows if row.startswith("| many")] == [
        [" many, FedAvg ", " 30.0 "],
        [" many, FedNTD, weak ", " 40.0 "],
    ]
    assert not [row for row in rows if row.startswith("| few")]
    assert not Path("reproduced/own/tablefew.md").exists()  # a table of other columns


def test_a_plan_runs_nothing_and_tells_what_is_done(here):
    plan = say("reproduce own/table.yaml --plan").out.splitlines()
    assert plan[0].split() == ["seed", "case", "method", "rounds", "run"]
    assert plan[-1] == "own/table: 6 runs, 18 rounds left, which take about 3 min on two cores"
    beginning = say("reproduce own/table.yaml --rounds 1 --plan").out.splitlines()
    assert beginning[-1] == "own/table: 6 runs, 6 rounds left, which take about 1 min on two cores"
    assert not here
    assert say("reproduce own/table.yaml --methods FedAvg --seeds 0 --rounds 2").code == 0
    plan = say("reproduce own/table.yaml --plan").out.splitlines()
    assert plan[-1].startswith("own/table: 6 runs, 14 rounds left")
    assert sum("2 of 3" in line for line in plan) == 2


def test_a_plan_counts_a_run_once_and_knows_the_folders_that_are_merged(here):
    plan = say("reproduce --plan own/table.yaml --set data.participation=0.5").out.splitlines()
    assert len(plan) == 8
    assert plan[-1].startswith("own/table: 4 runs, 12 rounds left")  # few and many are the same then
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --rounds 2 --output a").code == 0
    plan = say("reproduce own/table.yaml --seeds 0 --cases few --plan --merge a").out.splitlines()
    assert plan[-1].startswith("own/table: 1 runs, 1 rounds left")
    text = TABLE.replace("data.participation: 0.3", "trainer.max_epochs: 2").replace(
        "core_hours: 0.01", "core_hours: 2"
    )
    text = text.replace("data.participation: 0.6", "trainer.max_epochs: 10").replace(
        "core_hours: 0.02", "core_hours: 10"
    )
    Path("own/nested.yaml").write_text(text.lstrip(), encoding="utf-8")
    asked = "reproduce own/nested.yaml --seeds 0 --methods FedAvg --plan"
    for more, total in (
        ("", "1 runs, 10 rounds left, which take about 5 h 0 min on two cores"),  # as long as the longer one
        ("--trainer.max_epochs 20", "1 runs, 20 rounds left, which take about 10 h 0 min on two cores"),
        ("--trainer.max_steps 5", "1 runs, 5 rounds left, which take about 2 h 30 min on two cores"),
        (
            "--model.lr_decay '{cosine: 0.01}' --trainer.max_epochs 1",
            "1 rounds left, which take about 30 min on two cores",
        ),
    ):
        assert say(f"{asked} {more}").out.splitlines()[-1].endswith(total)
    plan = say("reproduce own/table.yaml --seeds 0 --cases few --plan --trainer.max_epochs -1").out.splitlines()
    assert (plan[1].split("  ")[-2].strip(), plan[-1]) == (
        "0, no limit",
        "own/table: 1 runs, 1 of them unfinished, whose number of rounds is open, which take about 1 min on two cores",
    )


def test_rounds_by_an_option_of_fit_are_the_first_ones_too(here):
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --trainer.max_epochs 2").code == 0
    text = Path("reproduced/own/table.md").read_text()
    assert text.count("| 1 × 2 of 3 |") == 2
    schedule = (
        "--model.lr_decay '{cosine: 0.01}' --trainer.max_epochs 2 --output b"  # whose course depends on their number
    )
    assert say(f"reproduce own/table.yaml --seeds 0 --methods FedAvg {schedule}").code == 0
    assert Path("b/own/table.md").read_text().count("| 1 × 2 |") == 2


def test_a_log_key_that_no_run_has_is_named_after_the_first_seed(here):
    text = TABLE.replace("keys: {accuracy: global/acc}", "keys: {accuracy: global/accc}")
    text += "  b: {class_path: fl_lightning.papers.Curves, init_args: {keys: {x: global/accc}}}\n"
    text += "  c: {class_path: fl_lightning.papers.EndTable, init_args: {keys: {x: global/acc}}}\n"
    Path("own/table.yaml").write_text(text.lstrip(), encoding="utf-8")
    said = say("reproduce own/table.yaml --methods FedAvg --cases few --rounds 1")
    assert "No run has" not in said.out  # later rounds may have it
    said = say("reproduce own/table.yaml --methods FedAvg --cases few")
    named = "No run has 'global/accc'; the nearest is 'global/acc'."
    assert said.out.count(named) == 3  # once a seed is trained, and with the table
    assert said.code == 1
    assert "drawing b: curves need values by round, and no run has global/accc" in said.err
    assert named in Path("reproduced/own/table.md").read_text()
    assert Path("reproduced/own/tablec.md").is_file()  # the others are made


@pytest.mark.slow
def test_runs_of_another_folder_are_taken_over(here):
    assert say("reproduce own/table.yaml --seeds 0 --output a").code == 0
    assert say("reproduce own/table.yaml --seeds 1 --output b --rounds 2").code == 0
    assert say("reproduce own/table.yaml --output whole").code == 0
    del here[:]
    said = say("reproduce own/table.yaml --output a --merge b")
    assert said.code == 0, said
    assert "3 of 6 runs are taken over from b" in said.out
    assert here == ["FedAvg-few-seed1", "FedAvg-many-seed1", "FedNTD_weak-many-seed1"]  # of which one round was left
    assert stored("a") == stored("whole")


def test_a_folder_without_runs_is_not_merged_and_a_run_with_more_rounds_is(here):
    assert "and nowhere is none" in refusal("reproduce own/table.yaml --merge nowhere", 1)
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --output a").code == 0
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --rounds 1").code == 0
    (cell_files("a", "FedAvg-few-seed0").run / "done.json").unlink()  # as one that was killed
    said = say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --merge a")
    assert said.code == 0, said
    assert "1 of 1 runs are taken over from a" in said.out
    assert {len(row["curve"].split()) for row in stored()} == {3}


@pytest.mark.parametrize("writable", [True, False])
def test_runs_that_another_process_is_at_are_not_merged(here, writable, monkeypatch):
    access = os.access  # a test may run as root, who may write everywhere
    monkeypatch.setattr(os, "access", lambda path, *mode: (writable or path != Path("a")) and access(path, *mode))
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --output a").code == 0
    there = cell_files("a", "FedAvg-few-seed0")
    for files in (there, replace(there, folder=Path("b"))):
        with files.claimed():
            told = refusal("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few --output b --merge a", 1)
        assert f"--merge needs runs that no process is at, and another one has {files.parent}" in told


def test_tuning_s_runs_are_taken_over_too_and_fewer_rounds_are_said(here):
    tuned = TABLE.replace("cases: [many]}", "cases: [many], tune: {model.client.temperature: [0.5, 1]}}")
    Path("own/table.yaml").write_text(tuned.lstrip(), encoding="utf-8")
    said = say("reproduce own/table.yaml --seeds 0 --methods 'FedNTD*' --rounds 1 --output a")
    assert said.code == 0, said
    assert "the highest of 2, after 1 round; with all of them another may be chosen)." in said.out
    assert len(here) == 3
    assert say("reproduce own/table.yaml --seeds 0 --methods 'FedNTD*' --rounds 1 --output b --merge a").code == 0
    assert len(here) == 3
    assert stored("b") == stored("a")
    for folder in "ab":
        assert "Tuned in validation: many, temperature=" in Path(f"{folder}/own/table.md").read_text()
        assert len(Path(f"{folder}/own/table-tuning.csv").read_text().splitlines()) == 3
    for there in ("--output b", "--output c --merge b"):
        plan = say(f"reproduce own/table.yaml --seeds 0 --methods 'FedNTD*' --rounds 1 --plan {there}").out.splitlines()
        assert [line.split("  ")[-2].strip() for line in plan[1:-1]] == ["1 of 1"] * 3
        assert plan[-1] == "own/table: 3 runs, 0 rounds left"


def test_a_run_that_fails_is_a_cell_with_its_reason(here):
    text = TABLE.lstrip().replace(
        "model.client.beta: 0.1", "model.client.beta: 0.1, model.client.optimizer.lr: 1.0e+30"
    )
    Path("own/table.yaml").write_text(text, encoding="utf-8")
    said = say("reproduce own/table.yaml --seeds 0")
    assert said.code == 1
    assert "1 run failed, and the tables are those of the others. FedNTD_weak-many-seed0-" in said.err
    (row,) = (row for row in stored() if row["error"])
    assert (row["method"], row["final"]) == ("FedNTD, weak", "")
    assert (
        "| many, FedNTD, weak | 40.0 | – | – | – | – | seed 0 failed: " in Path("reproduced/own/table.md").read_text()
    )


def test_a_run_that_another_process_is_at_is_waited_for(here, monkeypatch):
    assert say("reproduce own/table.yaml --seeds 0 --methods 'FedNTD*' --keep_checkpoints last").code == 0
    files = cell_files("reproduced", "FedNTD_weak-many-seed0")
    slept = []
    claim = files.claimed()
    (files.run / "done.json").unlink()
    assert claim.__enter__()

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            claim.__exit__(None, None, None)

    monkeypatch.setattr("fl_lightning.experiments.running.time.sleep", sleep)
    monkeypatch.setattr("fl_lightning.experiments.progress.MINUTE", -1.0)
    said = say("reproduce own/table.yaml --seeds 0 --methods 'FedNTD*'")
    assert said.code == 0, said
    assert said.out.count("0 of 1 runs, 0 of ") == 2  # a line a minute while it waits
    assert "other processes are at 1 runs in reproduced; waiting for their end" in said.out
    assert len(slept) == 2
    assert len(stored()) == 1


def test_where_nothing_can_be_locked_it_is_said(here, monkeypatch):
    assert say("reproduce own/table.yaml --seeds 0 --methods FedAvg --cases few").code == 0
    monkeypatch.setattr("fl_lightning.experiments.cell_files.lock_path", lambda path: None)
    said = pytest.warns(UserWarning, match="cannot be locked, so that a second process would run the same cells")
    with said, cell_files("reproduced", "FedAvg-few-seed0").claimed() as free:
        assert free


def test_without_a_terminal_a_line_a_minute_tells_how_far_it_is(here, monkeypatch):
    monkeypatch.setattr("fl_lightning.experiments.progress.MINUTE", 0.0)
    said = say("reproduce own/table.yaml --seeds 0 --methods FedAvg")
    lines = [line for line in said.out.splitlines() if "rounds of this session" in line]
    assert len(lines) == 8  # each run's begin and its three rounds
    assert lines[1].partition(" ")[2] == "0 of 2 runs, 1 of 6 rounds of this session, about 1 min left"


def test_the_time_that_is_left_counts_the_rounds_of_this_session_only(tmp_path, monkeypatch):
    lengths = {"continued": 10, "waiting": 2}
    cells = [SimpleNamespace(name=name, max_rounds=most, has_open_end=False) for name, most in lengths.items()]
    progress = CellProgress(cells, total=3, folder=tmp_path)
    for done in (4, 6):
        progress.on_round(SimpleNamespace(name="continued"), done)
    monkeypatch.setattr("fl_lightning.experiments.progress.time.monotonic", lambda: progress.began + 600)
    text = progress.line().partition(" ")[2]
    assert text == "1 of 3 runs, 6 of 12 rounds of this session, about 30 min left"


def test_runs_with_an_open_number_of_rounds_are_counted_as_runs(tmp_path, monkeypatch):
    cells = [SimpleNamespace(name=name, max_rounds=1000, has_open_end=True) for name in ("first", "second", "third")]
    progress = CellProgress(cells, total=4, folder=tmp_path)
    progress.on_round(SimpleNamespace(name="first"), 20)
    progress.on_end(SimpleNamespace(name="first"), SimpleNamespace(error=""))
    progress.on_round(SimpleNamespace(name="second"), 7)
    monkeypatch.setattr("fl_lightning.experiments.progress.time.monotonic", lambda: progress.began + 600)
    text = progress.line().partition(" ")[2]
    assert text == "2 of 4 runs, 7 rounds of those under way, about 20 min left"


def test_empty_tables_are_those_with_all_defaults(folder):
    Path("own/table.yaml").write_text(f"{TABLE.lstrip()}tables: {{}}\n", encoding="utf-8")
    experiment = read_experiment(Path("own/table.yaml"))
    assert experiment.draw.keys() == {""}
    assert experiment.tables == Tables()


def test_drawings_of_cases_that_are_not_asked_for_are_left_out():
    experiment = read_experiment(path_of("comparison/stragglers"))
    assert {"share0", "share50", "share90"} < set(experiment.draw)
    experiment.select(["FedProx*"], ["*90 %"])
    assert list(experiment.draw) == ["share90", "table"]


@pytest.mark.slow
def test_killed_and_started_again_by_two_processes_at_once_the_csv_is_the_same(folder):
    """By SIGKILL, at random moments, each time with one or two processes of its own."""
    whole = start(folder, "--output", "whole")
    assert whole.wait(timeout=300) == 0, whole.stdout.read()
    for _ in range(3):
        pair = [start(folder, "--processes", str(random.choice([1, 2]))) for _ in range(2)]
        time.sleep(random.uniform(7, 14))
        for process in pair:
            process.kill()
            process.communicate()
    pair = [start(folder, "--processes", str(n)) for n in (1, 2)]
    for process in pair:
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0, printed
    assert stored() == stored("whole")
    assert all(len(list(path.iterdir())) == 1 for path in Path("reproduced/runs").iterdir())
