"""`fl-lightning compare` by simulated seconds: one budget for methods with different numbers of rounds."""

import csv
from pathlib import Path

import pytest

from fl_lightning.experiments import results
from fl_lightning.experiments.cell_files import are_within
from fl_lightning.reports.saved import DONE, find_runs, read_run
from tests.commands import cell_files, refusal, say
from tests.experiments.test_compare import BASE

BUFFER = """
model:
  pacing: {class_path: fl_lightning.aggregation.FedBuff, init_args: {buffer: 1}}
"""
DEVICES = "--data.devices.step_seconds [0.4,0.9] --data.devices.latency 0.1"
GRID = f"compare -c base.yaml --methods FedAvg buffer=FedAvg+buffer.yaml {DEVICES} --trainer.max_epochs -1"


@pytest.fixture
def here(tmp_path, monkeypatch, cells_here, without_pictures):
    """A working directory with a base of the grid; the names of cells that are run in this process."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    Path("buffer.yaml").write_text(BUFFER, encoding="utf-8")
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")
    return cells_here


def rows(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def means(folder, statistic):
    found = {}
    for line in rows(f"{folder}/results.csv"):
        if line["metric"] == "global/acc" and line["statistic"] == statistic:
            found[line["method"]] = float(line["mean"])
    return found


def tables(folder):
    return [Path(folder, name).read_bytes() for name in ("results.csv", "results.md", "results.tex")]


def test_methods_with_different_rounds_have_one_table_under_one_budget(here):
    asked = "--at-seconds 1.5 3 --columns rounds time time_speed_up --target 0.05"
    said = say(f"{GRID} --model.max_seconds 3 {asked} --seeds 0 --output out")
    assert said.code == 0, said
    assert here == ["FedAvg-seed0", "buffer-seed0"]
    runs = {}
    for name in here:
        runs[name.partition("-")[0]] = read_run(cell_files("out", name).run)
    assert runs["buffer"].num_rounds > runs["FedAvg"].num_rounds > 0
    for name, run in runs.items():
        assert run.budget == 3.0
        ends = run.clock
        assert max(ends.values()) <= 3.0
        curve = run.history.curve("global/acc")
        assert means("out", "after 3 s")[name] == curve[max(curve)]
        past = [value for r, value in curve.items() if ends[r] <= 1.5]
        assert means("out", "after 1.5 s").get(name) == (past[-1] if past else None)
        first = next(r for r, value in curve.items() if value >= 0.05)
        assert means("out", "seconds to 0.05")[name] == ends[first]
    text = Path("out/results.md").read_text(encoding="utf-8")
    assert f"Rounds of the runs within 3 simulated seconds: FedAvg {runs['FedAvg'].num_rounds}; buffer" in text
    here.clear()
    assert say(f"{GRID} --model.max_seconds 3 {asked} --seeds 0 --output out").code == 0
    assert here == []  # they are done: their next rounds would be late


def test_more_seconds_continue_a_run_and_fewer_are_read_of_it(here):
    short = f"{GRID} --seeds 0 --model.max_seconds 1.5 --keep_checkpoints last"
    long = f"{GRID} --seeds 0 --model.max_seconds 4 --keep_checkpoints last"
    assert say(f"{short} --output alone").code == 0
    assert say(f"{short} --output out").code == 0
    assert say(f"{long} --output out").code == 0
    assert len(list(Path("out/runs").glob("*/*"))) == 2  # the same runs
    here.clear()
    assert say(f"{short} --output out").code == 0
    assert here == []
    assert tables("out") == tables("alone")
    here.clear()
    assert say(f"{long} --output whole").code == 0
    assert say(f"{long} --output out").code == 0
    assert tables("out") == tables("whole")
    assert here == ["FedAvg-seed0", "buffer-seed0"]  # of the folder `whole` only


def test_a_method_whose_first_round_is_late_is_named_in_the_table(here):
    assert say(f"{GRID} --seeds 0 --model.max_seconds 3 --output out").code == 0
    first = {name.partition("-")[0]: read_run(cell_files("out", name).run).clock[0] for name in here}
    assert first["buffer"] < first["FedAvg"]
    between = (first["buffer"] + first["FedAvg"]) / 2
    said = say(f"{GRID} --seeds 0 --model.max_seconds {between} --output out")
    assert said.code == 0, said
    text = Path("out/results.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| FedAvg")]
    why = f"no round ends within {between:.12g} simulated seconds"
    assert why in rows[-1]
    assert f"FedAvg: seed 0 failed: {why}" in text  # below the table of all methods
    assert "| buffer |" in text


def test_a_plan_tells_no_number_of_rounds_of_runs_that_end_by_seconds(here):
    text = f"""
    base: ["{Path("base.yaml").resolve()}"]
    runs: [{{methods: [FedAvg]}}]
    seeds: [0, 1]
    tables: {{baseline: FedAvg}}
    """
    Path("timed.yaml").write_text(text, encoding="utf-8")
    seconds = "--trainer.max_epochs -1 --model.max_seconds 3"
    for limits in (seconds, "--trainer.max_epochs 1000 --model.max_seconds 3"):
        command = f"reproduce timed.yaml {DEVICES} {limits} --output out"
        plan = say(f"{command} --plan").out.splitlines()
        assert plan[-1].endswith(": 2 runs, 2 of them unfinished, whose number of rounds is open")
    assert say(f"reproduce timed.yaml {DEVICES} {seconds} --seeds 0 --output out").code == 0
    plan = say(f"reproduce timed.yaml {DEVICES} {seconds} --output out --plan").out.splitlines()
    assert plan[-1].endswith(": 2 runs, 1 of them unfinished, whose number of rounds is open")
    done = say(f"reproduce timed.yaml {DEVICES} {seconds} --seeds 0 --output out --plan").out.splitlines()
    assert done[-1].endswith(": 1 runs, 0 rounds left")


def test_a_run_that_may_have_rounds_left_in_its_budget_is_not_done(here):
    command = f"{GRID} --seeds 0 --model.max_seconds 3 --output out"
    assert say(command).code == 0
    before = tables("out")
    for folder in find_runs(["out/runs"]):
        (folder / DONE).unlink()  # as if it was killed before its end was written
    here.clear()
    assert say(command).code == 0
    assert here == ["FedAvg-seed0", "buffer-seed0"]
    assert tables("out") == before


@pytest.mark.parametrize(
    ("limits", "done", "is_part"),
    [
        ({"max_seconds": 300}, {"max_seconds": 600}, True),
        ({"max_seconds": 600}, {"max_seconds": 300}, False),
        ({"max_seconds": 300}, {"max_epochs": 50}, False),
        ({"max_seconds": 300, "max_epochs": 50}, {"max_epochs": 50}, True),
        ({"max_seconds": 300, "max_epochs": 60}, {"max_epochs": 50}, False),
        ({"max_seconds": 300, "max_time": "0:1"}, {"max_seconds": 300, "max_time": "0:1"}, True),
        ({"max_seconds": 300, "max_time": "0:1"}, {"max_seconds": 300}, False),
        ({"max_seconds": 300}, {"max_seconds": 300, "max_time": "0:1"}, False),
    ],
)
def test_a_run_that_was_ended_by_wider_limits_holds_one_of_tighter_limits(limits, done, is_part):
    assert are_within(limits, done) == is_part


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--at-seconds 0", "at_seconds must be above 0, got 0.0; it is a number of simulated seconds"),
        (
            "--at_seconds 2 9 --model.max_seconds 3",
            "--at_seconds must be within model.max_seconds, at most 3, got 9; give 3",
        ),
    ],
)
def test_seconds_that_no_run_has_are_refused(here, options, sentence):
    assert sentence in refusal(f"{GRID} --seeds 0 {options}", 1)
    assert here == []


@pytest.mark.parametrize("asked", ["--at_seconds 2", "--columns time", "--columns time_speed_up"])
def test_seconds_need_devices(here, asked):
    said = refusal(f"compare -c base.yaml --methods FedAvg --seeds 0 {asked}", 1)
    assert "needs simulated seconds in all runs, and FedAvg has no data.devices; set it for all" in said
    assert here == []
