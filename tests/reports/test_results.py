import csv
import io
import math
import re
import statistics

import numpy as np
import pytest
from scipy import stats

from fl_lightning.functional.summary import paired_difference
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.result_tables import as_latex, as_markdown
from fl_lightning.reports.results import compare, known_metrics, statistics_of
from fl_lightning.reports.saved import find_runs, grouped, read_run
from tests.reports.saved_runs import settings, write_run

CURVES = {
    "FedAvg": ([0.1, 0.3, 0.5, 0.4, 0.6, 0.5], [0.2, 0.3, 0.4, 0.5, 0.5, 0.7]),
    "FedNTD": ([0.3, 0.6, 0.7, 0.7, 0.9, 0.8], [0.2, 0.2, 0.4, 0.4, 0.5, 0.6]),
}


@pytest.fixture
def groups(tmp_path):
    for method, curves in CURVES.items():
        for seed, curve in enumerate(curves):
            write_run(tmp_path / f"{method}/{seed}", curve, settings(method, seed))
    return grouped(map(read_run, find_runs([tmp_path])))


def test_final_last_five_and_best_are_three_things(groups):
    found = statistics_of(groups[0].runs[0], "global/acc")
    assert found == pytest.approx({"final": 0.5, "last five": 0.46, "best": 0.6})
    assert statistics_of(groups[0].runs[0], "global/loss")["best"] == pytest.approx(0.4)  # the lowest
    assert statistics_of(groups[0].runs[0], "unknown") == {}


def test_means_deviations_and_paired_differences_are_those_of_the_seeds(groups):
    found = compare(groups, "global/acc", "FedAvg").results
    last = {method: [curve[-1] for curve in curves] for method, curves in CURVES.items()}
    for method, values in last.items():
        assert found[method]["final"].mean == pytest.approx(statistics.mean(values))
        assert found[method]["final"].std == pytest.approx(statistics.stdev(values))
    assert found["FedAvg"]["final"].difference is None
    differences = np.subtract(last["FedNTD"], last["FedAvg"])
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    mean, low, high = found["FedNTD"]["final"].difference
    assert (mean, low, high) == pytest.approx((differences.mean(), interval.low, interval.high))


def test_an_interval_holds_the_true_difference_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(0.3, 1.0, (2000, 4))
    held = [low <= 0.3 <= high for _, low, high in (paired_difference(row, [0.0] * 4) for row in draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


def values(comparison, name):
    """Values by the method and the first of the seeds."""
    found = {}
    for method, columns in comparison.results.items():
        found[method] = {str(seeds[0]): value for seeds, value in columns[name].values.items()}
    return found


def test_rounds_are_counted_from_one_up_to_the_target(groups):
    reached = compare(groups, "global/acc", "FedAvg", columns=["rounds", "speed_up"])
    assert reached.target == pytest.approx((0.46 + 0.48) / 2)  # the baseline's mean of the last five
    assert values(reached, "rounds") == {"FedAvg": {"0": 3, "1": 4}, "FedNTD": {"0": 2, "1": 5}}
    assert values(reached, "speed_up") == {"FedAvg": {"0": 1, "1": 1}, "FedNTD": {"0": 3 / 2, "1": 4 / 5}}
    high = compare(groups, "global/acc", "FedAvg", target=0.75, columns=["rounds", "speed_up"])
    assert values(high, "rounds") == {"FedAvg": {"0": math.inf, "1": math.inf}, "FedNTD": {"0": 5, "1": math.inf}}
    rows = cells(high)
    assert [row["rounds to 75.0"] for row in rows.values()] == ["never", "5.0 (1 of 2)"]
    assert [row["speed-up"] for row in rows.values()] == ["–", "–"]  # FedAvg never reaches it
    assert compare(groups, "global/loss", "FedAvg", columns=["rounds"]).target is None
    assert compare(groups, "global/acc", "FedAvg").target is None  # nobody asked


def cells(comparison):
    table = comparison_table(comparison)
    return {row[0].text: dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows}


def test_values_after_some_rounds_and_what_a_round_costs_are_columns_on_request(groups):
    for group in groups:
        for run in group.runs:
            curve = run.history.curve("global/acc")
            for t in range(6):
                row = {
                    "comm/bytes_down": 1e6,
                    "comm/bytes_up": 3e6,
                    "cost/steps": 40.0 + 10 * t * (group.label != "FedAvg"),
                }
                run.history.record(t, {"global/acc": curve[t], **row})
    rows = cells(compare(groups, "global/acc", "FedAvg", at=[2, 9], columns=["bytes", "steps", "seconds"]))
    assert rows["FedAvg"]["after 2 rounds"] == "30.0 ± 0.0"
    assert "after 9 rounds" not in rows["FedAvg"]  # the runs have six
    assert "seconds a round" not in rows["FedAvg"]  # no monitor measured them
    assert [row["MB a round"] for row in rows.values()] == ["4", "4 (×1.00)"]
    assert [row["local steps a round"] for row in rows.values()] == ["40", "65 (×1.62)"]


def test_the_mean_of_the_last_five_needs_five_rounds(tmp_path):
    runs = [read_run(write_run(tmp_path / str(count), [0.5] * count, settings("FedAvg", 0))) for count in (4, 5)]
    assert ["last five" in statistics_of(run, "global/acc") for run in runs] == [False, True]


def test_the_best_mean_of_a_column_is_bold_and_the_second_best_underlined(groups):
    text = as_markdown(comparison_table(compare(groups, "global/acc", "FedAvg")))
    avg, ntd = (line for line in text.splitlines() if line.startswith("| Fed"))
    assert avg.startswith("| FedAvg | <u>60.0 ± 14.1</u> | – | <u>47.0 ± 1.4</u> | <u>65.0 ± 7.1</u> |")
    assert "| **70.0 ± 14.1** | +10.0 [−244.1, +264.1] | **58.0 ± 22.6** | **75.0 ± 21.2** |" in ntd
    assert "accuracy of the global model on the test split, %" in text.lower()
    assert "global/acc" not in text
    latex = as_latex(comparison_table(compare(groups, "global/loss", "FedAvg")))
    assert r"FedNTD & \textbf{0.30 $\pm$ 0.14}" in latex  # the lower loss


def test_the_best_mean_of_a_column_has_a_star_where_its_difference_to_the_second_is_clear(tmp_path):
    for method, gain in (("FedAvg", 0.0), ("FedNTD", 0.1), ("MOON", 0.3)):
        for seed, noise in enumerate((0.0, 0.01, -0.01)):
            write_run(tmp_path / f"{method}/{seed}", [0.3 + gain + seed / 10 + noise * gain], settings(method, seed))
    groups = grouped(map(read_run, find_runs([tmp_path])))
    one_seed = grouped(read_run(tmp_path / f"{method}/0") for method in ("FedAvg", "FedNTD", "MOON"))
    for compared, is_clear in ((groups, True), (one_seed, False)):
        table = comparison_table(compare(compared, "global/acc", "FedAvg"))
        marks = {row[0].text: (row[1].mark, row[1].star) for row in table.rows}
        assert marks == {"FedAvg": ("", False), "FedNTD": ("underlined", False), "MOON": ("bold", is_clear)}
    assert re.search(
        r"\| MOON \| \*\*7.*\*\*\\\* \|", as_markdown(comparison_table(compare(groups, "global/acc", "FedAvg")))
    )


def test_a_group_without_the_metric_is_a_row_of_dashes(groups, tmp_path):
    run = write_run(tmp_path / "Local/0", [0.1], settings("Local", 0))
    (run / "metrics.csv").write_text("round,local/alma\n0,0.5\n1,0.7\n", encoding="utf-8")
    every = [*groups, *grouped([read_run(run)])]
    assert known_metrics(every) == ["global/acc", "local/alma"]
    *_, row = comparison_table(compare(every, "global/acc", "FedAvg")).rows
    assert [cell.text for cell in row[1:]] == ["–"] * 4
    *_, row = comparison_table(compare(every, "global/acc", "FedAvg", target=0.4, columns=["rounds", "speed_up"])).rows
    assert [cell.text for cell in row[1:]] == ["–"] * 6  # it is not one that never reaches the target


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ([], ["global/acc", "local/alma", "local/tuned/alma"]),
        (["local/mse"], ["local/mse", "local/tuned/mse"]),
        (["local/tuned/mse"], ["local/tuned/mse"]),
        (["local/tuned/mse", "local/mse"], ["local/tuned/mse", "local/mse"]),
        (["unseen/alma", "global/acc"], ["unseen/alma", "unseen/tuned/alma", "global/acc"]),
        (["local/f1", "local/alma"], ["local/f1", "local/alma", "local/tuned/alma"]),
        (["local/nothing"], ["global/acc", "local/alma", "local/tuned/alma"]),
    ],
)
def test_values_after_fine_tuning_stand_beside_those_before_it(tmp_path, asked, shown):
    keys = ["local/alma", "local/f1", "local/mse", "local/tuned/alma", "local/tuned/mse", "unseen/alma"]
    keys += ["unseen/tuned/alma", "global/acc"]
    run = write_run(tmp_path / "FedAvg/0", [0.1], settings("FedAvg", 0))
    (run / "metrics.csv").write_text(f"round,{','.join(keys)}\n0{',0.5' * len(keys)}\n", encoding="utf-8")
    assert known_metrics(grouped([read_run(run)]), asked) == shown


def test_a_single_seed_has_no_deviation_and_no_interval(tmp_path):
    for method, curves in CURVES.items():
        write_run(tmp_path / method, curves[0], settings(method, 0))
    every = grouped(map(read_run, find_runs([tmp_path])))
    avg, ntd = comparison_table(compare(every, "global/acc", "FedAvg")).rows
    assert [avg[1].text, avg[2].text, ntd[1].text, ntd[2].text] == ["50.0", "–", "80.0", "+30.0"]


def test_what_test_gave_is_a_final_value(groups):
    groups[0].runs[0].test["test/acc"] = 0.25
    assert statistics_of(groups[0].runs[0], "test/acc") == {"final": 0.25}


def test_the_csv_has_what_the_tables_round(groups):
    rows = list(csv.DictReader(io.StringIO(as_csv([compare(groups, "global/acc", "FedAvg", columns=["rounds"])]))))
    (ntd,) = (row for row in rows if (row["method"], row["statistic"]) == ("FedNTD", "final"))
    assert float(ntd["mean"]) == pytest.approx(0.7)
    assert (ntd["metric"], ntd["seeds"], ntd["baseline"]) == ("global/acc", "2", "FedAvg")
    assert float(ntd["difference_low"]) < float(ntd["difference"]) < float(ntd["difference_high"])
    assert sum(row["statistic"].startswith("rounds to 0.47") for row in rows) == 2
