"""The table of all metrics: the final values and marks of the tables of single metrics, beside each other."""

import math
from dataclasses import replace

from fl_lightning.reports.comparison_tables import cell_text, comparison_table
from fl_lightning.reports.overview import overview_table
from fl_lightning.reports.results import Comparison, Result, paired

METHODS = ("FedAvg", "FedNTD", "Local")


def comparison(key, values, unit="share", direction="max", costs=None, case="α = 0.1"):
    """Compare three methods by the final values of two seeds."""
    results = {}
    for label, of_label in values.items():
        by_seed = {("0",): of_label[0], ("1",): of_label[1]}
        base = {("0",): values["FedAvg"][0], ("1",): values["FedAvg"][1]}
        results[label] = {"final": Result(by_seed, paired(by_seed, base))}
        if costs is not None:
            results[label]["bytes"] = Result({("0",): costs[label], ("1",): costs[label]})
    return Comparison(key, case, results, "FedAvg", None, direction, unit)


def shown():
    """Compare by two metrics, the second of which one method lacks."""
    costs = {"FedAvg": 2.0, "FedNTD": 2.0, "Local": 0.5}
    accuracy = comparison(
        "global/acc",
        {"FedAvg": (0.70, 0.72), "FedNTD": (0.80, 0.82), "Local": (0.3, 0.4)},
        costs=costs,
    )
    loss = comparison("global/loss", {"FedAvg": (1.5, 1.7), "FedNTD": (1.4, 1.9)}, unit="", direction="min")
    without = {**loss.results, "Local": {}}
    return accuracy, replace(loss, results=without)


def test_each_column_is_that_of_the_table_of_its_metric():
    accuracy, loss = shown()
    overview = overview_table([accuracy, loss])
    assert overview.header == ["method", "global/acc, %", "global/loss", "MB a round"]
    assert [row[0].text for row in overview.rows] == list(METHODS)
    for place, single in enumerate((accuracy, loss), start=1):
        own = {row[0].text: row[1] for row in comparison_table(single).rows}
        for row in overview.rows:
            assert row[place] == own[row[0].text]
    assert [row[3].text for row in overview.rows] == [cell_text(accuracy, name, "bytes") for name in METHODS]


def test_marks_dashes_and_the_case():
    overview = overview_table(shown())
    rows = {row[0].text: row for row in overview.rows}
    assert rows["FedNTD"][1].mark == "bold"
    # The lower loss is no clear one.
    assert rows["FedAvg"][2].mark == "underlined"
    assert rows["Local"][2].text == "–"
    assert overview.title == "Final values of all metrics; α = 0.1"
    assert "2 seeds" in overview.note
    assert "next best" in overview.note


def test_the_note_names_unequal_rounds_and_what_is_not_marked():
    accuracy, loss = shown()
    rounds = "Rounds of the runs, which count to their own ends: FedAvg 3, 3; FedNTD 3, 2 of 3; Local 3, 3."
    accuracy = replace(accuracy, rounds=rounds)
    unknown = replace(loss, key="local/own", direction=None)
    overview = overview_table([accuracy, unknown])
    assert rounds in overview.note
    assert "No value of local/own is marked as the best: --direction must say" in overview.note
    assert "global/acc is marked" not in overview.note
    assert [row[2].mark for row in overview.rows] == ["", "", ""]


def test_a_value_that_is_not_finite_is_shown_and_is_never_the_best():
    values = {"FedAvg": (0.7, 0.72), "FedNTD": (0.9, math.nan), "Local": (math.inf, math.inf)}
    overview = overview_table([comparison("global/acc", values)] * 2)
    rows = {row[0].text: row[1] for row in overview.rows}
    assert rows["FedNTD"].text == "90.0 (1 of 2, else nan)"
    assert rows["Local"].text == "inf"
    assert {label: cell.mark for label, cell in rows.items()} == {label: "" for label in METHODS}
