"""`--reference`: intransigence against a row that keeps the samples of earlier tasks."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fl_lightning.experiments import results
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.experiment import Experiment, Runs, Tables
from fl_lightning.experiments.reference import check_reference
from fl_lightning.experiments.results import check_measured
from fl_lightning.reports.results import Comparison, Result
from fl_lightning.reports.saved import data_differences, find_runs, grouped, read_run
from fl_lightning.reports.tasks import intransigence_of
from tests.commands import refusal, say
from tests.experiments.test_compare import BASE

SCENARIO = """
data:
  scenario:
    class_path: fl_lightning.data.ClassIncremental
    init_args: {tasks: [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], rounds_per_task: 1}
"""
CUMULATIVE = """
data:
  scenario: {class_path: fl_lightning.data.ClassIncremental, init_args: {cumulative: true}}
"""
DRIFT = """
data:
  scenario: {class_path: fl_lightning.data.LabelDrift, init_args: {alpha: 0.5, rounds: 2}}
"""
FILE = """
base: [base.yaml, tasks.yaml]
config: {trainer: {max_epochs: 2}}
runs:
  - {methods: [FedAvg]}
  - {methods: [FedAvg], label: cumulative, settings: {data.scenario.cumulative: true}}
seeds: [0]
tables: {reference: cumulative}
"""


@pytest.fixture
def here(tmp_path, monkeypatch, cells_here, without_pictures):
    """A working directory with a base, tasks and a cumulative scenario; the names of cells that are run here."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    Path("tasks.yaml").write_text(SCENARIO, encoding="utf-8")
    Path("cumulative.yaml").write_text(CUMULATIVE, encoding="utf-8")
    Path("drift.yaml").write_text(DRIFT, encoding="utf-8")
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")
    return cells_here


@pytest.mark.slow
def test_a_cumulative_row_is_compared_by_either_command(here):
    Path("incremental.yaml").write_text(FILE, encoding="utf-8")
    assert say("reproduce incremental.yaml --output out").code == 0
    assert here == ["FedAvg-seed0", "cumulative-seed0"]
    groups = {group.label: group for group in grouped(map(read_run, find_runs(["out/runs"])))}
    assert not data_differences([*groups.values()])
    with Path("out/results.csv").open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["statistic"] == "intransigence"]
    value = intransigence_of(groups["FedAvg"].runs[0], groups["cumulative"].runs[0], model="global")
    assert [(line["method"], line["metric"], float(line["mean"])) for line in lines] == [
        ("FedAvg", "global/acc_tasks", value)
    ]
    methods = "--methods FedAvg cumulative=FedAvg+cumulative.yaml --reference cumulative"
    said = say(f"compare -c base.yaml -c tasks.yaml {methods} --seeds 0 --trainer.max_epochs 2 --output out")
    assert said.code == 0, said
    assert len(here) == 2  # the same runs
    assert "| method | final | final − FedAvg's | intransigence |" in Path("out/results.md").read_text(encoding="utf-8")


def made(base, settings, label="all"):
    """The cells of an experiment with a reference."""
    rows = [Runs(["FedAvg"]), Runs(["FedAvg"], label=label, settings=settings)]
    return Cells(Experiment(base, rows, tables=Tables(reference="all")), Request())


@pytest.mark.parametrize(
    ("base", "settings", "sentence"),
    [
        (["base.yaml"], {"model.local_epochs": 2}, "must name a row with tasks, got all, which has no data.scenario"),
        (
            ["base.yaml", "tasks.yaml"],
            {"model.local_epochs": 2},
            "that keeps the samples of earlier tasks, got all without it; set data.scenario.cumulative: true for that",
        ),
        (
            ["base.yaml", "drift.yaml"],
            {"model.local_epochs": 2},
            "got all with LabelDrift, which has no setting cumulative; set data.scenario to ClassIncremental for all",
        ),
        (
            ["base.yaml", "tasks.yaml"],
            {"data.scenario.cumulative": True, "data.scenario.tasks": [[0, 1, 2], [5, 6, 7]]},
            "but data.scenario.tasks is .* for all and .* for FedAvg; give both the same",
        ),
    ],
)
def test_a_row_that_is_no_reference_is_refused(here, base, settings, sentence):
    with pytest.raises(ValueError, match=f"^--reference .*{sentence}"):
        check_reference(made(base, settings), "--reference")


def test_a_reference_must_be_among_the_rows(here):
    check_reference(made(["base.yaml", "tasks.yaml"], {"data.scenario.cumulative": True}), "--reference")
    with pytest.raises(ValueError, match=r"tables\.reference must name a row that is run, got all; run it, too"):
        check_reference(made(["base.yaml", "tasks.yaml"], {}, label="other"), "tables.reference")
    said = refusal("compare -c base.yaml --methods FedAvg --reference none", 1)
    assert "--reference must be one of --methods (FedAvg), got none" in said
    check_reference(Cells(Experiment(["base.yaml"], [Runs(["FedAvg"])]), Request()), "--reference")


def test_a_reference_that_is_not_among_the_chosen_rows_is_left_out():
    rows = [Runs(["FedAvg"]), Runs(["FedAvg"], label="all")]
    for chosen, reference in (["FedAvg"], None), (["all"], "all"), ([], "all"):
        experiment = Experiment(["base.yaml"], rows, tables=Tables(reference="all"))
        experiment.select(chosen, [])
        assert experiment.tables == Tables(reference=reference)


def test_a_reference_without_tables_of_tasks_is_refused_after_the_runs():
    shown = Comparison("global/acc", "", {"FedAvg": {}, "all": {}}, "FedAvg", None)
    with pytest.raises(ValueError, match="no run has intransigence against all"):
        check_measured([shown], "all")
    measured = replace(shown, results={"FedAvg": {"intransigence": Result({("0",): 0.1})}, "all": {}})
    check_measured([shown, measured], "all")
    alone = replace(shown, results={"all": {}})
    check_measured([alone], "all")  # by --methods of its row alone
