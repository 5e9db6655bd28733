"""The benchmark runs and compares equals; what it measures is not tested."""

import csv
from dataclasses import replace

import pytest

from bench.__main__ import COLUMNS, main
from bench.methods import METHODS, seconds_per_client
from bench.monitors import MONITORS, seconds
from bench.workloads import WORKLOADS


def test_quick_run_writes_the_table(tmp_path, capsys):
    main(["--quick", "--workload", "tiny"], results=tmp_path)  # fails where an accuracy is not the floor's
    with (tmp_path / "speed.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["variant"] for row in rows] == ["floor", "train", "all", "empty"]
    assert all(float(row["s_per_round"]) > 0 for row in rows)
    assert "tiny" in capsys.readouterr().out


def test_a_partial_run_keeps_the_other_rows(tmp_path):
    main(["--quick", "--workload", "tiny", "--variant", "empty"], results=tmp_path)
    main(["--quick", "--workload", "tiny", "--variant", "train"], results=tmp_path)
    with (tmp_path / "speed.csv").open(newline="", encoding="utf-8") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == ["floor", "empty", "train"]


@pytest.mark.parametrize("name", METHODS)
def test_the_step_of_every_method_is_timed(name):
    work = replace(WORKLOADS["tiny"], cohort_size=2, rounds=1)
    assert seconds_per_client(name, work) > 0


@pytest.mark.parametrize("name", ["ClasswiseReport", "ForgettingMonitor", "LossLandscape"])
def test_the_cost_of_a_monitor_is_timed(name):
    assert name in MONITORS
    own, rest = seconds(name, "tiny")
    assert own > 0
    assert rest > 0
