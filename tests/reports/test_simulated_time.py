"""Values by simulated seconds: in tables, to a target, as curves, and of runs that are read within a budget."""

import csv
import io
import math

import numpy as np
import pytest
import yaml

from fl_lightning.papers import Curves, Series
from fl_lightning.papers.drawing import beginning, counted
from fl_lightning.papers.stored import read_stored, write_stored
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.report import write_report
from fl_lightning.reports.result_tables import as_latex
from fl_lightning.reports.results import compare, statistics_of, value_after_seconds
from fl_lightning.reports.saved import Group, find_runs, grouped, read_run
from tests.reports.saved_runs import settings, write_table

SYNCHRONOUS = {0: [(10.0, 0.2), (20.0, 0.5), (30.0, 0.6)], 1: [(12.0, 0.1), (24.0, 0.4), (36.0, 0.7)]}
BUFFERED = {
    0: [(2.0, 0.1), (5.0, 0.3), (9.0, 0.4), (9.0, 0.55), (21.0, 0.5), (29.0, 0.8)],
    1: [(3.0, 0.2), (4.0, 0.2), (8.0, 0.3), (15.0, 0.5), (22.0, 0.6), (33.0, 0.6)],
}
"""Seconds and accuracy after each round, by seed."""


def timed_run(folder, method, seed, rounds, *, max_epochs=-1, max_seconds=None, staleness=None):
    folder.mkdir(parents=True)
    header = ["round", "global/acc", "time/seconds", "time/lost"]
    rows = [[r, acc, end, 1] for r, (end, acc) in enumerate(rounds)]
    if staleness is not None:
        header += ["time/staleness", "time/staleness_max"]
        rows = [[*row, staleness, 2 * staleness] for row in rows]
    write_table(folder / "metrics.csv", header, rows)
    config = settings(method, seed)
    config["trainer"]["max_epochs"] = max_epochs
    config["model"]["max_seconds"] = max_seconds
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


@pytest.fixture
def groups(tmp_path):
    for seed, rounds in SYNCHRONOUS.items():
        timed_run(tmp_path / f"FedAvg/{seed}", "FedAvg", seed, rounds)
    for seed, rounds in BUFFERED.items():
        timed_run(tmp_path / f"FedNTD/{seed}", "FedNTD", seed, rounds, staleness=1.5)
    return grouped(map(read_run, find_runs([tmp_path])))


def cells(comparison):
    table = comparison_table(comparison)
    return {row[0].text: dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows}


def values(comparison, name):
    found = {}
    for method, columns in comparison.results.items():
        found[method] = {str(seeds[0]): value for seeds, value in columns[name].values.items()}
    return found


# --- after some seconds ---


@pytest.mark.parametrize("seconds", [1.0, 2.0, 8.9, 9.0, 11.0, 12.0, 20.5, 29.0, 30.0, 33.0, 36.0, 50.0])
def test_the_value_after_some_seconds_is_the_last_one_of_a_round_that_had_ended(groups, seconds):
    for group, rounds_of in zip(groups, (SYNCHRONOUS, BUFFERED), strict=True):
        for run in group.runs:
            rounds = rounds_of[int(run.seed)]
            past = [acc for end, acc in rounds if end <= seconds]
            expected = past[-1] if past and seconds <= rounds[-1][0] else None
            assert value_after_seconds(run, "global/acc", seconds) == expected


def test_values_after_some_seconds_are_columns_in_every_form_of_the_table(groups):
    comparison = compare(groups, "global/acc", "FedAvg", at=[2], at_seconds=[28, 9.5, 31])
    assert values(comparison, "after 28 s") == {"FedAvg": {"0": 0.5, "1": 0.4}, "FedNTD": {"0": 0.5, "1": 0.6}}
    rows = cells(comparison)
    assert [name for name in rows["FedNTD"] if name.startswith("after")] == [
        "after 2 rounds",
        "after 9.5 s",
        "after 28 s",
        "after 31 s",
    ]
    assert [row["after 9.5 s"] for row in rows.values()] == ["–", "42.5 ± 17.7"]  # the first had no round by then
    assert [row["after 31 s"] for row in rows.values()] == ["40.0", "60.0"]  # the runs of seed 0 had ended
    assert [row["after 28 s"] for row in rows.values()] == ["45.0 ± 7.1", "55.0 ± 7.1"]
    note = comparison_table(comparison).note
    assert "After 9.5 s, 28 s, 31 s: the last value that a run had" in note
    assert "after 28 s" in as_latex(comparison_table(comparison))
    lines = list(csv.DictReader(io.StringIO(as_csv([comparison]))))
    found = {line["method"]: line["mean"] for line in lines if line["statistic"] == "after 28 s"}
    assert found == {"FedAvg": pytest.approx("0.45"), "FedNTD": "0.55"}


def test_a_run_without_simulated_devices_has_no_values_by_seconds(tmp_path):
    folder = timed_run(tmp_path / "FedAvg/0", "FedAvg", 0, SYNCHRONOUS[0])
    (folder / "metrics.csv").write_text("round,global/acc\n0,0.5\n1,0.7\n", encoding="utf-8")
    run = read_run(folder)
    assert run.seconds is None
    comparison = compare([Group("FedAvg", [run])], "global/acc", "FedAvg", at_seconds=[10], columns=["rounds", "time"])
    assert not {"after 10 s", "time"} & set(comparison.results["FedAvg"])
    assert "rounds" in comparison.results["FedAvg"]


# --- to a target ---


def test_seconds_to_a_target_and_their_speed_up_are_those_of_the_first_round_that_reaches_it(groups):
    columns = ["rounds", "speed_up", "time", "time_speed_up"]
    reached = compare(groups, "global/acc", "FedAvg", target=0.5, columns=columns)
    assert values(reached, "rounds") == {"FedAvg": {"0": 2, "1": 3}, "FedNTD": {"0": 4, "1": 4}}
    assert values(reached, "time") == {"FedAvg": {"0": 20, "1": 36}, "FedNTD": {"0": 9, "1": 15}}
    assert values(reached, "speed_up") == {"FedAvg": {"0": 1, "1": 1}, "FedNTD": {"0": 2 / 4, "1": 3 / 4}}
    assert values(reached, "time_speed_up") == {"FedAvg": {"0": 1, "1": 1}, "FedNTD": {"0": 20 / 9, "1": 36 / 15}}
    rows = cells(reached)
    assert rows["FedNTD"]["seconds to 50.0"] == "12 ± 4.243"
    assert rows["FedNTD"]["speed-up in time"] == "2.3 ± 0.1"
    note = comparison_table(reached).note
    assert "Speed-up in time: FedAvg's simulated seconds to the target with the same seed, divided by the" in note


def test_a_target_that_is_not_reached_takes_endless_seconds(groups):
    high = compare(groups, "global/acc", "FedNTD", target=0.75, columns=["time", "time_speed_up"])
    assert values(high, "time")["FedAvg"] == {"0": math.inf, "1": math.inf}
    assert cells(high)["FedAvg"]["seconds to 75.0"] == "never"
    assert cells(high)["FedNTD"]["seconds to 75.0"] == "29 (1 of 2)"
    assert "rounds to 75.0" not in cells(high)["FedNTD"]


# --- within a budget ---


def test_a_run_that_used_up_its_seconds_has_its_last_value_until_then(tmp_path):
    ended = timed_run(tmp_path / "a", "FedAvg", 0, SYNCHRONOUS[0], max_seconds=38)
    by_rounds = timed_run(tmp_path / "b", "FedAvg", 0, SYNCHRONOUS[0], max_seconds=38, max_epochs=3)
    assert read_run(ended).seconds == 38
    assert value_after_seconds(read_run(ended), "global/acc", 38) == 0.6
    assert value_after_seconds(read_run(ended), "global/acc", 38.5) is None
    assert read_run(by_rounds).seconds == 30  # the fourth round was not asked for, and might have ended in time
    assert value_after_seconds(read_run(by_rounds), "global/acc", 38) is None


def test_a_run_that_goes_on_has_not_used_up_its_seconds(tmp_path):
    folder = timed_run(tmp_path / "a", "FedAvg", 0, SYNCHRONOUS[0], max_seconds=38, max_epochs=100)
    (folder / "status.json").write_text('{"ended": false, "round": 2}', encoding="utf-8")
    assert read_run(folder).seconds == 30
    (folder / "status.json").write_text('{"ended": true, "round": 2}', encoding="utf-8")
    assert read_run(folder).seconds == 38


def test_the_first_seconds_of_a_longer_run_are_those_of_a_run_with_fewer(tmp_path):
    long = timed_run(tmp_path / "long", "FedNTD", 0, BUFFERED[0], max_seconds=29)
    short = timed_run(tmp_path / "short", "FedNTD", 0, BUFFERED[0][:4], max_seconds=20)
    first = read_run(long, seconds=20)
    own = read_run(short)
    assert first.history.rounds == own.history.rounds == [0, 1, 2, 3]
    assert statistics_of(first, "global/acc") == statistics_of(own, "global/acc")
    assert first.seconds == own.seconds == 20
    assert first.rounds == 4
    assert not first.is_whole
    assert read_run(long, rounds=2, seconds=20).seconds == 5  # the rounds end it first
    assert read_run(long, seconds=29).is_whole


def test_the_note_names_the_budget_that_unequal_rounds_share(tmp_path):
    for seed in (0, 1):
        timed_run(tmp_path / f"FedAvg/{seed}", "FedAvg", seed, SYNCHRONOUS[seed], max_seconds=40)
        timed_run(tmp_path / f"FedNTD/{seed}", "FedNTD", seed, BUFFERED[seed], max_seconds=40)
    groups = grouped(map(read_run, find_runs([tmp_path])))
    note = comparison_table(compare(groups, "global/acc", "FedAvg")).note
    assert "Rounds of the runs within 40 simulated seconds: FedAvg 3, 3; FedNTD 6, 6." in note
    late = grouped(read_run(folder, seconds=25) for folder in find_runs([tmp_path]))
    note = comparison_table(compare(late, "global/acc", "FedAvg")).note
    assert "Rounds of the runs within 25 simulated seconds: FedAvg 2, 2; FedNTD 5, 5." in note


def test_seeds_of_one_budget_count_at_their_own_ends(tmp_path):
    runs = []
    for seed, count in ((0, 6), (1, 5)):
        folder = timed_run(tmp_path / f"{seed}", "FedNTD", seed, BUFFERED[seed][:count], max_seconds=30)
        runs.append(read_run(folder))
    series = Series("FedNTD", "", Group("", runs), {}, None)
    assert len(counted(series).group.runs) == 2
    assert [run.stopped_early for run in runs] == [True, True]
    assert beginning(runs[0], 2).seconds == 5


def test_the_stored_values_make_the_tables_by_time_again(tmp_path, groups):
    series = [Series(group.label, "", group, {}, None) for group in groups]
    write_stored(tmp_path / "cells.csv", series, ["global/acc"])
    again = [Group(each.method, each.group.runs) for each in read_stored(tmp_path / "cells.csv")]
    asked = {"target": 0.5, "at_seconds": [20, 28], "columns": ["time", "time_speed_up"]}
    assert cells(compare(again, "global/acc", "FedAvg", **asked)) == cells(
        compare(groups, "global/acc", "FedAvg", **asked)
    )
    budget = read_run(timed_run(tmp_path / "b", "FedAvg", 0, SYNCHRONOUS[0], max_seconds=38))
    write_stored(tmp_path / "b.csv", [Series("FedAvg", "", Group("", [budget]), {}, None)], ["global/acc"])
    (stored,) = read_stored(tmp_path / "b.csv")
    assert stored.group.runs[0].seconds == 38


# --- curves ---


def test_curves_over_seconds_stand_at_each_value_until_the_next(groups):
    for group, rounds_of in zip(groups, (SYNCHRONOUS, BUFFERED), strict=True):
        moments, table = group.timed_curves("global/acc")
        assert moments[0] == max(rounds[0][0] for rounds in rounds_of.values())
        assert moments[-1] == max(rounds[-1][0] for rounds in rounds_of.values())
        for row, run in zip(table, group.runs, strict=True):
            rounds = rounds_of[int(run.seed)]
            assert row.tolist() == [[acc for end, acc in rounds if end <= moment][-1] for moment in moments]


def test_long_curves_over_seconds_have_a_bounded_number_of_places(tmp_path):
    draws = np.random.default_rng(0)
    for seed in (0, 1):
        ends = draws.exponential(size=900).cumsum()
        rounds = list(zip(ends.tolist(), draws.random(900).tolist(), strict=True))
        timed_run(tmp_path / f"{seed}", "FedNTD", seed, rounds)
    (group,) = grouped(map(read_run, find_runs([tmp_path])))
    moments, table = group.timed_curves("global/acc")
    assert len(moments) == 500
    for row, run in zip(table, group.runs, strict=True):
        curve = run.timed_curve("global/acc")
        middle = [value for end, value in curve.items() if end <= moments[250]][-1]
        assert row[250] == middle
        assert row[-1] == list(curve.values())[-1]


def test_the_page_has_curves_and_a_table_of_simulated_time(tmp_path, groups):
    page = write_report(groups, tmp_path / "out", ["svg"], at_seconds=[28]).read_text(encoding="utf-8")
    assert "<h2>Over simulated time</h2>" in page
    assert "after 28 s" in page.replace("\u00a0", " ")
    assert "Over simulated seconds, mean and one standard deviation over the seeds" in page
    figures = {path.name for path in (tmp_path / "out/figures").iterdir()}
    assert {"time-global-acc.svg", "time-time-staleness.svg", "curve-global-acc.svg"} <= figures
    assert "curve-time-seconds.svg" not in figures
    row = page.partition("<th scope='row'>FedNTD</th>")[2]
    table = page[page.index("<h3>Simulated time</h3>") :]
    row = table.partition("<th scope='row'>FedNTD</th>")[2].partition("</tr>")[0]
    assert row == "<td>6</td><td>31</td><td>5.167</td><td>1</td><td>1.5</td><td>3</td>"


def test_runs_without_simulated_devices_have_no_section_of_time(tmp_path):
    folder = timed_run(tmp_path / "FedAvg/0", "FedAvg", 0, SYNCHRONOUS[0])
    (folder / "metrics.csv").write_text("round,global/acc\n0,0.5\n1,0.7\n", encoding="utf-8")
    page = write_report([Group("FedAvg", [read_run(folder)])], tmp_path / "out").read_text(encoding="utf-8")
    assert "simulated time" not in page.lower()


def test_a_figure_of_an_experiment_may_have_curves_over_seconds(groups):
    series = [Series(group.label, "", group, {}, None) for group in groups]
    figure, caption = Curves({"": "global/acc"}, over_seconds=True).draw(series)
    (panel,) = figure.axes
    assert panel.get_xlabel() == "simulated seconds"
    for line, group in zip(panel.lines, groups, strict=True):
        moments, table = group.timed_curves("global/acc")
        assert line.get_xdata().tolist() == moments
        assert line.get_ydata().tolist() == pytest.approx((100 * table).mean(0).tolist())
        assert line.get_drawstyle() == "steps-post"
    assert "FedNTD" in caption
    with pytest.raises(ValueError, match="leave out one of them"):
        Curves({"": "global/acc"}, over_seconds=True, clients=True)
