"""The table of all metrics and settings: the final values and marks of the tables of single metrics."""

import math
from dataclasses import replace

from fl_lightning.reports.comparison_tables import cell_text, comparison_table
from fl_lightning.reports.result_tables import Span, TableCell, as_html, as_latex, as_markdown
from fl_lightning.reports.results import Comparison, Result, paired
from fl_lightning.reports.summary import costs_table, summary_table

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
    summary = summary_table({"": [accuracy, loss]})
    assert summary.header == ["method", "accuracy, %", "loss"]
    assert [row[0].text for row in summary.rows] == list(METHODS)
    for place, single in enumerate((accuracy, loss), start=1):
        own = {row[0].text: row[1] for row in comparison_table(single).rows}
        for row in summary.rows:
            assert row[place] == own[row[0].text]


def test_the_best_is_bold_with_a_star_where_it_is_clear_and_the_second_is_underlined():
    summary = summary_table({"α = 0.1": shown()})
    rows = {row[0].text: row for row in summary.rows}
    assert rows["FedNTD"][1] == TableCell("81.0 ± 1.4", "bold", star=True)
    assert rows["FedAvg"][1] == TableCell("71.0 ± 1.4", "underlined")
    # The lower loss is no clear one.
    assert (rows["FedAvg"][2].mark, rows["FedAvg"][2].star) == ("bold", False)
    assert rows["FedNTD"][2].mark == "underlined"
    assert rows["Local"][2].text == "–"
    assert summary.title == "Final values, mean ± sample standard deviation over 2 seeds; α = 0.1"
    assert "second best" in summary.note


def test_equal_means_are_all_best_and_none_is_second():
    values = {"FedAvg": (0.7, 0.7), "FedNTD": (0.7, 0.7), "Local": (0.1, 0.1)}
    (row, other, last) = summary_table({"": [comparison("global/acc", values)]}).rows
    assert [row[1].mark, other[1].mark, last[1].mark] == ["bold", "bold", ""]
    assert not row[1].star


def test_settings_are_groups_of_columns_and_stand_below_each_other_where_they_are_many():
    accuracy, loss = shown()
    two = summary_table({"α = 0.1": [accuracy, loss], "α = 1": [accuracy]})
    assert two.spans == [Span("α = 0.1", 2), Span("α = 1", 1)]
    assert two.full_header == ["method", "α = 0.1: accuracy, %", "α = 0.1: loss", "α = 1: accuracy, %"]
    many = summary_table({f"α = {number}": [accuracy, loss] for number in range(12)}, methods=[*METHODS, "failed"])
    assert many.header == ["method", "accuracy, %", "loss"]
    assert [row[0].text for row in many.rows[:6]] == ["α = 0", *METHODS, "failed", "α = 1"]
    assert [cell.text for cell in many.rows[4]] == ["failed", "–", "–"]
    for write in (as_markdown, as_latex, as_html):
        assert write(many).count("1.4") == 2 * 12
    assert "| **α = 0** |  |  |" in as_markdown(many)
    assert r"\multicolumn{3}{l}{\emph{$\alpha$ = 0}}" in as_latex(many)
    assert "<th colspan='3' scope='rowgroup'>α = 0</th>" in as_html(many)
    assert "<th colspan='2' scope='colgroup'>α = 0.1</th>" in as_html(two)
    assert r"& \multicolumn{2}{c}{$\alpha$ = 0.1} & \multicolumn{1}{c}{$\alpha$ = 1} \\" in as_latex(two)
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}" in as_latex(two)


def test_two_metrics_of_the_same_name_tell_their_split():
    accuracy, _ = shown()
    table = summary_table({"": [accuracy, replace(accuracy, key="val/acc"), replace(accuracy, key="val/mIoU")]})
    assert table.header == ["method", "accuracy (test split), %", "accuracy (validation), %", "val/mIoU, %"]


def test_all_values_of_a_column_have_the_same_decimals():
    """Deviations have two significant digits or more."""
    values = {"FedAvg": (2.8, 3.1), "FedNTD": (0.98, 0.99), "Local": (1.0, 1.2)}
    table = comparison_table(comparison("val/foo", values, unit="", direction="min"))
    assert [row[1].text for row in table.rows] == ["2.95 ± 0.21", "0.98 ± 0.01", "1.10 ± 0.14"]
    assert [row[2].text[:5] for row in table.rows[1:]] == ["−1.97", "−1.85"]


def test_costs_are_a_table_of_their_own():
    accuracy, loss = shown()
    table = costs_table({"": [accuracy, loss]})
    assert table.header == ["method", "MB a round"]
    assert [row[1].text for row in table.rows] == [cell_text(accuracy, name, "bytes") for name in METHODS]
    assert table.note == "Costs of a round are those of its whole cohort; × is the ratio to FedAvg's."
    assert costs_table({"": [loss]}) is None


def test_the_note_names_unequal_rounds_and_what_is_not_marked():
    accuracy, loss = shown()
    rounds = "Rounds of the runs, which count to their own ends: FedAvg 3, 3; FedNTD 3, 2 of 3; Local 3, 3."
    accuracy = replace(accuracy, rounds=rounds)
    unknown = replace(loss, key="local/own", direction=None)
    summary = summary_table({"": [accuracy, unknown]})
    assert rounds in summary.note
    assert "No value of local/own is marked as the best: --direction must say" in summary.note
    assert "global/acc is marked" not in summary.note
    assert [row[2].mark for row in summary.rows] == ["", "", ""]


def test_a_value_that_is_not_finite_is_shown_and_is_never_the_best():
    values = {"FedAvg": (0.7, 0.72), "FedNTD": (0.9, math.nan), "Local": (math.inf, math.inf)}
    summary = summary_table({"": [comparison("global/acc", values)] * 2})
    rows = {row[0].text: row[1] for row in summary.rows}
    assert rows["FedNTD"].text == "90.0 (1 of 2, else nan)"
    assert rows["Local"].text == "inf"
    assert {label: cell.mark for label, cell in rows.items()} == {label: "" for label in METHODS}
