"""The page of results is what the stored results say, and they grow by finished runs."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.results import stored_keys
from fl_lightning.papers.stored import COLUMNS, read_stored
from fl_lightning.utils.files import write_table
from tools import write_results
from tools.add_results import add, csv_rows, main
from tools.write_results import PAGE, tables, text

STORED = sorted((Path(__file__).resolve().parents[1] / "results").glob("*/*.csv"))


def test_the_page_is_written_of_the_stored_results():
    assert PAGE.read_text(encoding="utf-8") == text(), "run python -m tools.write_results"


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_stored_results_are_those_of_an_experiment_with_a_table(path):
    name = f"{path.parent.name}/{path.stem}"
    known = {experiment: (file, drawn) for experiment, file, drawn in tables()}
    experiment, drawn = known[name]
    rows = {(c, row.label or m) for row in experiment.runs for m in row.methods for c in experiment.cases_of(row)}
    for series in read_stored(path):
        assert (series.case, series.method) in rows
        for run in series.group.runs:
            assert set(run.history.names) <= set(stored_keys(drawn))


def test_a_cell_that_failed_is_in_the_table_and_neither_run_nor_left(tmp_path, monkeypatch):
    case = "50 samples, α = 0.1"
    path = tmp_path / "results/knfu/table1.csv"
    path.parent.mkdir(parents=True)
    values = ["KnFu", 0, "local/alma", 0.9, 0.9, 0.9, 3, 100, 10, 36, "abc", "a machine", "", "0.8 0.85 0.9"]
    failed = ["KnFu", 1, *[""] * 10, "NaN in round 1", ""]
    write_table(path, [COLUMNS, [case, *values], [case, *failed]])
    monkeypatch.setattr(write_results, "ROOT", tmp_path)
    experiment, drawn = next((file, drawn) for name, file, drawn in tables() if name == "knfu/table1")
    page = "\n".join(write_results.section("knfu/table1", experiment, drawn))
    assert "1 × 3 of 100; seed 1 failed: NaN in round 1" in page
    assert "2 runs, of which 1 failed; commit abc; a machine." in page
    assert f"- {case}: KnFu (seed 0 after the rounds above, seed 2); FedMD;" in page


def test_finished_runs_are_added_and_what_is_stored_stays(tmp_path, monkeypatch):
    """By their configuration: a run has the name of an older version here."""
    case = "50 samples, α = 0.1"
    path = tmp_path / "results/knfu/table1.csv"
    experiment, drawn = next((deepcopy(file), drawn) for name, file, drawn in tables() if name == "knfu/table1")
    experiment.select(["KnFu", "FedMD"], [case])
    cells = [cell for cell in Cells(experiment, Request()).all() if cell.seed < 2]
    for cell in cells:
        rounds = 100 if cell.seed or cell.method == "KnFu" else 99
        name = f"{cell.method}-old-seed{cell.seed}-00000000"
        run = tmp_path / "runs" / name / "0"
        run.mkdir(parents=True)
        write_table(run / "metrics.csv", [["round", "local/alma"], *([t, t / 100] for t in range(rounds))])
        if rounds == 100:
            (run / "done.json").write_text('{"max_epochs": 100, "rounds": 100}')
        for file in (tmp_path / "cells" / f"{name}.yaml", run / "config.yaml"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(yaml.safe_dump(dict(cell.config)))
    stored = [case, "KnFu", 0, "local/alma", 0.5, 0.5, 0.5, 100, 100, 1, 1, "stored", "", "", "0.5"]
    write_table(path, [COLUMNS, stored])
    added = add(experiment, drawn, tmp_path, path)
    assert added == [(case, "KnFu", "1"), (case, "FedMD", "1")]
    assert [(row["method"], row["seed"], row["final"], row["commit"]) for row in csv_rows(path)] == [
        ("KnFu", "0", "0.5", "stored"),
        ("KnFu", "1", "0.99", ""),
        ("FedMD", "1", "0.99", ""),
    ]
    before = path.read_text()
    assert not add(experiment, drawn, tmp_path, path)
    assert path.read_text() == before


def test_what_ended_a_run_stays_beside_its_values(tmp_path):
    """A run that ended by itself, and one that used up its simulated seconds, have fewer rounds than asked for."""
    case = "50 samples, α = 0.1"
    path = tmp_path / "results/knfu/table1.csv"
    experiment, drawn = next((deepcopy(file), drawn) for name, file, drawn in tables() if name == "knfu/table1")
    experiment.select(["KnFu"], [case])
    cell = next(cell for cell in Cells(experiment, Request()).all() if cell.seed == 1)
    run = tmp_path / "runs" / cell.name / "0"
    run.mkdir(parents=True)
    write_table(run / "metrics.csv", [["round", "local/alma"], [0, 0.5], [1, 0.6]])
    limits = {name: value for name, value in cell.limits.items() if value is not None}
    (run / "done.json").write_text(json.dumps({**limits, "rounds": 2}))
    for file in (tmp_path / "cells" / f"{cell.name}.yaml", run / "config.yaml"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(dict(cell.config)))
    columns = [*COLUMNS, "stopped_early", "max_seconds"]
    spent = [case, "KnFu", 0, "local/alma", 0.5, 0.5, 0.5, 1, 100, 1, 1, "stored", "", "", "0.5", "", "600.0"]
    write_table(path, [columns, spent])
    assert add(experiment, drawn, tmp_path, path) == [(case, "KnFu", "1")]
    rows = csv_rows(path)
    assert [(row["seed"], row["stopped_early"], row["max_seconds"]) for row in rows] == [
        ("0", "", "600.0"),
        ("1", "yes", ""),
    ]
    first, second = read_stored(path)[0].group.runs
    assert first.budget == 600.0
    assert second.stopped_early


def test_a_prefix_counts_where_it_is_asked_for_until_there_is_more(tmp_path):
    case = "50 samples, α = 0.1"
    path = tmp_path / "results/knfu/table1.csv"
    experiment, drawn = next((deepcopy(file), drawn) for name, file, drawn in tables() if name == "knfu/table1")
    experiment.select(["KnFu"], [case])
    cell = Cells(experiment, Request()).all()[0]
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell.name}.yaml").write_text(yaml.safe_dump(dict(cell.config)))
    for rounds, asked, found in ((5, None, ""), (5, 5, "5"), (8, 5, "5"), (8, 8, "8"), (8, 4, "8"), (100, None, "100")):
        run = tmp_path / "runs" / cell.name / "0"
        run.mkdir(parents=True, exist_ok=True)
        write_table(run / "metrics.csv", [["round", "local/alma"], *([t, t / 100] for t in range(rounds))])
        (run / "done.json").write_text(f'{{"max_epochs": {rounds}, "rounds": {rounds}}}')
        (run / "config.yaml").write_text(yaml.safe_dump(dict(cell.config)))
        add(experiment, drawn, tmp_path, path, rounds=asked)
        assert [row["rounds"] for row in csv_rows(path)] == ([found] if found else [])


def test_a_failure_stands_beside_the_rounds_before_it_until_the_run_is_whole(tmp_path):
    case = "50 samples, α = 0.1"
    path = tmp_path / "stored/knfu/table1.csv"
    experiment, drawn = next((deepcopy(file), drawn) for name, file, drawn in tables() if name == "knfu/table1")
    experiment.select(["KnFu"], [case])
    cell = Cells(experiment, Request()).all()[0]
    made = tmp_path / "made"
    write_table(made / "knfu/table1.csv", [COLUMNS, [case, "KnFu", 0, *[""] * 10, "NaN in round 6", ""]])
    (made / "cells").mkdir()
    (made / "cells" / f"{cell.name}.yaml").write_text(yaml.safe_dump(dict(cell.config)))
    run = made / "runs" / cell.name / "0"
    for rounds, errors in ((5, ["", "NaN in round 6"]), (6, ["", "NaN in round 6"]), (100, [""])):
        run.mkdir(parents=True, exist_ok=True)
        write_table(run / "metrics.csv", [["round", "local/alma"], *([t, t / 100] for t in range(rounds))])
        (run / "done.json").write_text(f'{{"max_epochs": {rounds}, "rounds": {rounds}}}')
        (run / "config.yaml").write_text(yaml.safe_dump(dict(cell.config)))
        assert add(experiment, drawn, made, path, rounds=rounds) == [(case, "KnFu", "0")]
        assert add(experiment, drawn, made, path, rounds=rounds) == []
        assert sorted(row["error"] for row in csv_rows(path)) == errors
        (series,) = read_stored(path)
        assert [len(run.history) for run in series.group.runs] == [rounds]
        assert dict(series.failed) == ({"0": "NaN in round 6"} if rounds < 100 else {})
        (made / "knfu/table1.csv").unlink(missing_ok=True)  # of a later call that had no failure


def test_a_stored_run_that_lacks_a_log_key_is_stored_again(tmp_path):
    case = "50 samples, α = 0.1"
    path = tmp_path / "results/knfu/table1.csv"
    experiment, drawn = next((deepcopy(file), drawn) for name, file, drawn in tables() if name == "knfu/table1")
    experiment.select(["KnFu"], [case])
    cell = Cells(experiment, Request()).all()[0]
    run = tmp_path / "runs" / cell.name / "0"
    run.mkdir(parents=True)
    write_table(run / "metrics.csv", [["round", "local/alma", "train/ce"], *([t, t / 9, 1.0] for t in range(5))])
    (run / "done.json").write_text('{"max_epochs": 5, "rounds": 5}')
    (tmp_path / "cells").mkdir()
    for file in (tmp_path / "cells" / f"{cell.name}.yaml", run / "config.yaml"):
        file.write_text(yaml.safe_dump(dict(cell.config)))
    more = {name: replace(table, beside=["train/ce"]) for name, table in drawn.items()}
    for tables_, added in ((drawn, True), (drawn, False), (more, True), (more, False), (drawn, False)):
        assert bool(add(experiment, tables_, tmp_path, path, rounds=5)) is added
    assert [row["metric"] for row in csv_rows(path)] == ["local/alma", "train/ce"]


def test_a_folder_or_table_that_does_not_exist_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere"), "knfu/table1"])
    assert "nowhere is no folder that reproduce wrote" in capsys.readouterr().err
    (tmp_path / "cells").mkdir()
    with pytest.raises(SystemExit):
        main([str(tmp_path), "knfu/table9"])
    assert "knfu/table2, got knfu/table9" in capsys.readouterr().err
