"""A paper's table beside ours, on runs whose numbers are known, and the csv file that it is made again of."""

import numpy as np
import pytest
from scipy import stats

from fl_lightning.experiments.results import stored_keys
from fl_lightning.functional.summary import welch_difference
from fl_lightning.papers import Curves, EndTable, Measure, PaperTable, Series, Sweep
from fl_lightning.papers.drawing import beginning
from fl_lightning.papers.stored import read_stored, write_stored
from fl_lightning.reports.results import compare
from fl_lightning.reports.saved import Group, read_run
from tests.reports.saved_runs import settings, write_run
from tools import write_results

CURVES = {
    "FedAvg": {0: [0.1, 0.3, 0.5, 0.4], 1: [0.2, 0.3, 0.4, 0.6]},
    "FedNTD": {0: [0.3, 0.6, 0.7, 0.8], 1: [0.2, 0.2, 0.3, 0.5]},
}
PAPER = {"accuracy": {"FedAvg": ["48.0 ± 2.0"], "FedNTD": [64.5], "MOON": ["50.0 ± 1.0"]}}
NAMES = ["name", "paper", "final", "best", "to paper", "to baseline", "runs"]


@pytest.fixture
def series(tmp_path):
    made = []
    for method, curves in CURVES.items():
        runs = [
            read_run(write_run(tmp_path / f"{method}/{seed}", curve, settings(method, seed)))
            for seed, curve in curves.items()
        ]
        made.append(Series(method, "s = 2", Group("", runs)))
    return [*made, Series("FedProx", "s = 2", Group("", []), {"0": "NaN in round 1"})]


def table(series, **own):
    drawing = PaperTable(**{"keys": {"accuracy": "global/acc"}, "paper": PAPER, "baseline": "FedAvg", **own})
    content, caption = drawing.draw(series)
    assert content.header[2:4] == (["ours", "ours − paper"] if counts(drawing) else ["final", "best over rounds"])
    names = [name for name in NAMES if name != "best"] if counts(drawing) else NAMES
    return {row[0].text: dict(zip(names, (cell.text for cell in row), strict=True)) for row in content.rows}, caption


def counts(drawing):
    """Whether all of a table's values are rounds, or after some rounds, so that there is but one of each."""
    return all(isinstance(measure, Measure) and not measure.is_plain for measure in drawing.keys.values())


def test_published_and_reached_values_stand_side_by_side(series):
    rows, _ = table(series)
    assert list(rows) == ["s = 2, FedAvg", "s = 2, FedNTD", "s = 2, FedProx", "s = 2, MOON"]
    avg, ntd, prox, moon = rows.values()
    assert (avg["paper"], avg["final"], avg["best"], avg["runs"]) == (
        "48.0 ± 2.0",
        "50.0 ± 14.1",
        "55.0 ± 7.1",
        "2 × 4",
    )
    assert (ntd["paper"], ntd["final"]) == ("64.5", "65.0 ± 21.2")
    assert (avg["to baseline"], prox["final"], moon["final"]) == ("–", "–", "–")
    assert (prox["runs"], moon["runs"]) == ("seed 0 failed: NaN in round 1", "not run")


def test_differences_to_the_paper_are_welchs_and_among_ours_students(series):
    rows, _ = table(series)
    ours = [100 * CURVES["FedAvg"][seed][-1] for seed in (0, 1)]
    theirs = [46.0, 48.0, 50.0]  # mean 48, sample deviation 2
    welch = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert welch_difference(ours, 48.0, 2.0, 3) == pytest.approx((2.0, interval.low, interval.high))
    mean, low, high = (f"{value:+.1f}".replace("-", "−") for value in (2.0, interval.low, interval.high))
    assert rows["s = 2, FedAvg"]["to paper"] == f"{mean} [{low}, {high}]"
    paired = stats.ttest_1samp([40.0, -10.0], 0).confidence_interval(0.95)
    low, high = (f"{value:+.1f}".replace("-", "−") for value in (paired.low, paired.high))
    assert rows["s = 2, FedNTD"]["to baseline"] == f"+15.0 [{low}, {high}]"


def test_a_published_mean_without_deviation_is_taken_as_exact():
    ours = [1.0, 2.0, 4.0]
    interval = stats.ttest_1samp(ours, 2.0).confidence_interval(0.95)
    assert welch_difference(ours, 2.0, None, 3) == pytest.approx(
        (np.mean(ours) - 2, interval.low - 2, interval.high - 2)
    )
    assert np.isnan(welch_difference([1.0], 2.0, 0.1, 3).low)
    assert welch_difference([1.0, 1.0], 2.0, None, 3) == (-1.0, -1.0, -1.0)


def test_an_interval_to_the_paper_holds_the_true_difference_as_often_as_it_says():
    draws = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        ours = draws.normal(1.0, 2.0, 3)
        theirs = draws.normal(0.7, 1.0, 3)
        _, low, high = welch_difference(list(ours), float(theirs.mean()), float(theirs.std(ddof=1)), 3)
        held += low <= 0.3 <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_accuracy_after_some_rounds_rounds_to_a_target_and_speed_up(series):
    keys = {
        "after 2": {"key": "global/acc", "at": 2},
        "rounds": {"key": "global/acc", "until": "FedAvg"},
        "speed-up": {"key": "global/acc", "until": "FedAvg", "speed_up": True},
        "after 9": {"key": "global/acc", "at": 9},
    }
    rows, _ = table(series, keys={name: Measure(**given) for name, given in keys.items()}, paper={})
    assert rows["after 2, s = 2, FedAvg"]["final"] == "30.0 ± 0.0"
    assert rows["after 9, s = 2, FedAvg"]["final"] == "–"
    # FedAvg ends at 0.4 and 0.6: reached by itself in rounds 3 and 4, by FedNTD in round 2 and never
    assert rows["rounds, s = 2, FedAvg"]["final"] == "3.5 ± 0.7"
    assert rows["rounds, s = 2, FedNTD"]["final"] == "2.0 (1 of 2)"
    assert rows["speed-up, s = 2, FedNTD"]["final"] == "2.0 (1 of 2)"
    assert rows["speed-up, s = 2, FedNTD"]["to paper"] == "–"
    assert rows["rounds, s = 2, FedNTD"]["to baseline"] == "−1.0 (1 of 2)"  # of the seed in which both get there


def test_a_published_never_is_behind_and_the_method_that_sets_the_target_is_not_compared(series):
    keys = {"rounds": Measure("global/acc", until="FedAvg")}
    keys["speed-up"] = Measure("global/acc", until="FedAvg", speed_up=True)
    paper = {"rounds": {"FedAvg": [4], "FedNTD": ["never"]}, "speed-up": {"FedAvg": [1], "FedNTD": ["never"]}}
    rows, caption = table(series, keys=keys, paper=paper, claims={"FedAvg": ["FedNTD"], "FedNTD": ["FedAvg"]})
    for name in keys:
        assert f"FedAvg ahead of FedNTD in {name}: paper 1 of 1 cells" in caption
        assert f"FedNTD ahead of FedAvg in {name}: paper 0 of 1 cells" in caption
    assert rows["rounds, s = 2, FedNTD"]["paper"] == "never"
    # its own rounds are counted another way than the paper counts them
    assert (rows["rounds, s = 2, FedAvg"]["final"], rows["rounds, s = 2, FedAvg"]["to paper"]) == ("3.5 ± 0.7", "–")


def test_rounds_to_a_fixed_target_beside_the_published_share_of_the_baseline_s(series):
    keys = {
        "rounds": Measure("global/acc", targets={"s = 2": 30}),
        "share": Measure("global/acc", targets={"s = 2": 30}, share_of="FedAvg"),
        "far": Measure("global/acc", targets={"s = 2": 60}, share_of="FedAvg"),
    }
    paper = {"share": {"FedNTD": [52.8, None]}}
    claims = {"FedNTD": ["FedAvg"]}
    rows, caption = table(series, keys=keys, paper=paper, cases=["s = 2", "s = 5"], claims=claims)
    # FedAvg has 30 % in round 2 with both seeds, FedNTD in rounds 1 and 3; 60 % FedAvg with seed 1 only, FedNTD with 0
    assert rows["rounds, s = 2, FedAvg"]["final"] == "2.0 ± 0.0"
    assert rows["rounds, s = 2, FedNTD"]["final"] == "2.0 ± 1.4"
    assert rows["share, s = 2, FedAvg"]["final"] == "100.0 ± 0.0"
    assert (rows["share, s = 2, FedNTD"]["paper"], rows["share, s = 2, FedNTD"]["final"]) == ("52.8", "100.0 ± 70.7")
    assert rows["share, s = 2, FedNTD"]["to paper"].startswith("+47.2 [")
    assert rows["far, s = 2, FedNTD"]["final"] == "never"
    assert "Share: rounds until 30 (s = 2), in percent of FedAvg's with the same seed." in caption
    assert "FedNTD ahead of FedAvg in share: paper 0 of 0 cells, ours 0 of 1." in caption


def test_the_first_rounds_of_a_run_are_no_match_for_the_paper_s_last(series):
    keys = {"accuracy": Measure("global/acc"), "after 2": Measure("global/acc", at=2)}
    paper = {"accuracy": {"FedAvg": [48]}, "after 2": {"FedAvg": [20]}}
    for all_rounds, runs, difference in ((4, "2 × 4", "+2.0 [−125.1, +129.1]"), (9, "2 × 4 of 9", "–")):
        rows, _ = table([each._replace(all_rounds=all_rounds) for each in series], keys=keys, paper=paper)
        assert (rows["accuracy, s = 2, FedAvg"]["runs"], rows["accuracy, s = 2, FedAvg"]["to paper"]) == (
            runs,
            difference,
        )
        assert rows["after 2, s = 2, FedAvg"]["to paper"] == "+10.0 [+10.0, +10.0]"


def test_the_first_rounds_of_a_run_settle_no_claim_and_no_never(series):
    """60 % FedAvg has with seed 1 only, and 90 % never, unless rounds are left."""
    keys = {"accuracy": Measure("global/acc"), "rounds": Measure("global/acc", targets={"s = 2": 60})}
    keys["far"] = Measure("global/acc", targets={"s = 2": 90})
    keys["until"] = Measure("global/acc", until="FedAvg")
    paper = {name: {"FedAvg": [48], "FedNTD": [60]} for name in ("accuracy", "rounds")} | {"until": {"FedNTD": [3]}}
    paper["far"] = {"FedAvg": ["never"]}
    for all_rounds, never, counted in ((4, "never", True), (9, "not yet", False)):
        begun = [each._replace(all_rounds=all_rounds) for each in series]
        rows, caption = table(begun, keys=keys, paper=paper, claims={"FedNTD": ["FedAvg"]})
        assert rows["rounds, s = 2, FedAvg"]["final"] == "4.0 (1 of 2)"
        assert (rows["rounds, s = 2, FedAvg"]["to paper"], rows["far, s = 2, FedAvg"]["final"]) == ("–", never)
        assert rows["far, s = 2, FedAvg"]["paper"] == "never"
        assert ("ahead of FedAvg in accuracy" in caption, "ahead of FedAvg in rounds" in caption) == (counted,) * 2
    first = [each._replace(group=Group("", each.group.runs[:1])) for each in series[:2]]
    for all_rounds, difference in ((4, "+0.0"), (9, "–")):  # FedAvg's last value, the target, is not known yet
        ended = [first[0]._replace(all_rounds=all_rounds), first[1]]
        rows, _ = table(ended, keys=keys, paper={"until": {"FedNTD": [2]}})
        assert rows["until, s = 2, FedNTD"]["to paper"] == difference


def test_a_run_at_its_end_never_reaches_a_target_whatever_rounds_another_seed_has_left(series):
    avg = series[0].group.runs  # at most 50 and 60 %, where FedNTD ends at 80 and 50 %
    begun = [series[0]._replace(all_rounds=4, group=Group("", [avg[0], beginning(avg[1], 2)])), series[1]]
    keys = {"until": Measure("global/acc", until="FedNTD"), "far": Measure("global/acc", targets={"s = 2": 90})}
    rows, _ = table(begun, keys=keys, paper={})
    assert rows["until, s = 2, FedAvg"]["final"] == "never"  # by seed 0, the one with most rounds
    assert rows["far, s = 2, FedAvg"]["final"] == "not yet"  # perhaps by seed 1
    ntd = series[1]._replace(all_rounds=9)
    rows, _ = table([series[0], ntd], keys=keys, paper={})
    assert rows["until, s = 2, FedAvg"]["final"].startswith("4.0 (1 of 2)")
    rows, _ = table([series[0]._replace(group=Group("", avg[:1])), ntd], keys=keys, paper={})
    assert rows["until, s = 2, FedAvg"]["final"] == "not yet"  # the target may fall


@pytest.mark.parametrize(
    ("key", "values", "counted"),
    [
        ("global/acc", [40, 60, 50], "paper 2 of 2 cells (1 of the 1 run here), ours 1 of 1"),
        # lower is better; ours has less of it, too
        ("global/loss", [40, 60, 50], "paper 0 of 2 cells (0 of the 1 run here), ours 1 of 1"),
    ],
)
def test_claims_are_counted_where_both_are_known(series, key, values, counted):
    paper = {"x": {"FedAvg": [values[0], None, values[2]], "FedNTD": [values[1], 90, values[1]]}}
    cases = ["s = 2", "s = 3", "s = 5"]
    _, caption = table(series, keys={"x": key}, paper=paper, cases=cases, claims={"FedNTD": ["FedAvg"]})
    assert f"FedNTD ahead of FedAvg: {counted}." in caption


def test_a_claim_of_which_nothing_was_run_is_left_out(series):
    paper = {"x": {"MOON": [30, 40], "FedNTD": [50, 60]}}
    _, caption = table(series, keys={"x": "global/acc"}, paper=paper, claims={"FedNTD": ["FedAvg", "MOON"]})
    assert "ahead of FedAvg: " in caption
    assert "ahead of MOON" not in caption


def test_a_claim_is_counted_over_the_seeds_that_both_have(series):
    (avg, ntd, failed), claims = series, {"FedNTD": ["FedAvg"]}
    weak = [run for run in avg.group.runs if run.seed == "0"]  # 40 %, below both seeds of FedNTD
    strong = [run for run in ntd.group.runs if run.seed == "1"]  # 50 %, and seed 1 of FedAvg has 60 %
    _, caption = table([Series("FedAvg", "s = 2", Group("", weak)), ntd, failed], claims=claims)
    assert "ours 1 of 1." in caption
    _, caption = table([avg, Series("FedNTD", "s = 2", Group("", strong)), failed], claims=claims)
    assert "ours 0 of 1." in caption
    _, caption = table(
        [Series("FedAvg", "s = 2", Group("", weak)), Series("FedNTD", "s = 2", Group("", strong))], claims=claims
    )
    assert "ahead of" not in caption


def test_what_is_stored_gives_the_same_table_without_the_runs(series, tmp_path):
    path = tmp_path / "results.csv"
    write_stored(path, series, ["global/acc"])
    again = read_stored(path)
    assert [(each.method, each.case, dict(each.failed)) for each in again] == [
        (each.method, each.case, dict(each.failed)) for each in series
    ]
    assert table(again) == table(series)
    begun = [each._replace(all_rounds=9) for each in series]
    write_stored(path, begun, ["global/acc"])
    assert table(read_stored(path)) == table(begun)
    write_stored(tmp_path / "again.csv", again, ["global/acc"])
    first, second = ((tmp_path / name).read_text().splitlines() for name in ("results.csv", "again.csv"))
    assert [line.rpartition(",")[2] for line in first] == [line.rpartition(",")[2] for line in second]


def test_a_stored_file_whose_lines_are_wrong_is_refused(series, tmp_path):
    path = tmp_path / "results.csv"
    write_stored(path, series, ["global/acc"])
    text = path.read_text()
    for wrong, sentence in (
        (text.replace("case,", "kase,", 1), "and lacks case"),
        (text + "<<<<<<< HEAD\n", "the columns of its first line in all others; mend it"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=sentence):
            read_stored(path)


def test_first_rounds_are_compared_with_as_many_and_the_longest_runs_count(series):
    (avg, ntd, failed) = (each._replace(all_rounds=9) for each in series)
    short = [read_run(run.folder, rounds=2) for run in avg.group.runs if run.seed == "1"]
    avg = avg._replace(group=Group("", [*(run for run in avg.group.runs if run.seed == "0"), *short]))
    rows, _ = table([avg, ntd, failed], keys={"end": "global/acc", "first": Measure("global/acc", at=2)}, paper={})
    assert rows["end, s = 2, FedAvg"]["final"] == "40.0"
    assert rows["end, s = 2, FedAvg"]["runs"] == "1 × 4 of 9; 1 × 2 of 9"
    assert rows["end, s = 2, FedNTD"]["to baseline"] == "+40.0 (1 of 2)"
    short = [read_run(run.folder, rounds=2) for run in ntd.group.runs]
    of_two, _ = table([avg, ntd._replace(group=Group("", short)), failed], keys={"end": "global/acc"}, paper={})
    assert of_two["s = 2, FedNTD"]["to baseline"].startswith("+10.0 [")  # 60 and 20 % after two rounds, 30 and 30 %
    assert rows["first, s = 2, FedAvg"]["final"] == "30.0 ± 0.0"
    assert rows["first, s = 2, FedNTD"]["to baseline"].startswith("+10.0 [")


def test_keys_beside_the_table_are_stored_where_a_run_has_them_and_are_not_in_it(series, tmp_path):
    beside = ["train/ce", "train/penalty"]
    keys = stored_keys({"": PaperTable({"accuracy": "global/acc"}, PAPER, beside=beside)})
    assert keys == ["global/acc", *beside]
    write_stored(tmp_path / "results.csv", series, keys)
    again = read_stored(tmp_path / "results.csv")
    assert again[0].run.history.names == ["global/acc", "train/ce"]
    assert table(again, beside=beside) == table(series)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"targets": {"s = 2": 30}, "until": "FedAvg"}, "a measure has one of at, until and targets"),
        ({"speed_up": True}, "speed_up needs until"),
        ({"share_of": "FedAvg"}, "share_of needs targets"),
    ],
)
def test_what_a_measure_refuses(own, sentence):
    with pytest.raises(ValueError, match=sentence):
        Measure("global/acc", **own)


def test_a_target_is_of_a_case_of_the_table(series):
    drawing = PaperTable({"x": Measure("global/acc", targets={"s = 3": 30})}, {})
    with pytest.raises(ValueError, match=r"targets must be of cases of the table \(s = 2\), got 's = 3'"):
        drawing.of_cases(["s = 2"])


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            {"paper": {"accuracy": {"FedAvg": ["70 +- 1"]}}},
            "must be a number, 'mean ± deviation', or a word, got '70 +",
        ),
        ({"paper_seeds": 1}, "paper_seeds must be at least 2, for a deviation, got 1"),
        ({"statistics": []}, "statistics must name at least one of final"),
        ({"statistics": ["mean"]}, "statistics must be of final, last five, best, got mean"),
        ({"paper": {"F": {}}}, "paper must hold values of accuracy, got F"),
    ],
)
def test_what_a_table_refuses(own, sentence):
    with pytest.raises(ValueError, match=sentence):
        PaperTable(**{"keys": {"accuracy": "global/acc"}, "paper": PAPER, **own})


def test_a_seed_that_stopped_early_counts_to_its_own_end(tmp_path):
    """In the table, in its csv and in the comparison of `report` alike."""
    runs = []
    for seed, accuracies in enumerate(([0.1, 0.2, 0.3, 0.5], [0.1, 0.3])):
        config = settings("FedAvg", seed)
        run = write_run(tmp_path / str(seed), accuracies, config)
        (run / "status.json").write_text(f'{{"ended": true, "round": {len(accuracies) - 1}}}')
        runs.append(read_run(run))
    assert [run.stopped_early for run in runs] == [False, True]
    assert not beginning(runs[0], 2).stopped_early
    series = [Series("FedAvg", "s = 2", Group("FedAvg", runs), {}, 4)]
    write_stored(tmp_path / "cells.csv", series, ["global/acc"])
    for shown in (series, read_stored(tmp_path / "cells.csv")):
        rows, caption = table(shown, keys={"accuracy": "global/acc"}, paper={"accuracy": {"FedAvg": [45]}})
        (row,) = rows.values()
        assert row["final"] == "40.0 ± 14.1"
        assert row["runs"] == "1 × 4; 1 × 2"
        assert row["to paper"].startswith("−5.0")
        assert "of the runs that have most of them or stopped early" in caption
    compared = compare([Group("FedAvg", runs)], "global/acc", "FedAvg")
    assert compared.results["FedAvg"]["final"].mean == pytest.approx(0.4)


@pytest.mark.parametrize("lengths", [(4, 2), (2, 4, 2), (5, 1, 3)])
def test_a_seed_that_was_cut_is_in_no_end_of_table_sweep_or_curve(tmp_path, lengths):
    """Its further rounds may change its last value, so no line stands at that value, either."""
    runs = []
    for seed, length in enumerate(lengths):
        accuracies = [0.1 + 0.1 * seed + 0.05 * t for t in range(length)]
        run = write_run(tmp_path / str(seed), accuracies, settings("FedAvg", seed))
        (run / "status.json").write_text('{"ended": false, "round": 0}')
        runs.append(read_run(run))
    series = [Series("FedAvg", "s = 2", Group("FedAvg", runs), {}, max(lengths))]
    longest = max(runs, key=lambda run: run.num_rounds)
    values = list(longest.history.curve("global/acc").values())
    rows, _ = table(series, keys={"accuracy": "global/acc"}, paper={})
    assert rows["s = 2, FedAvg"]["final"] == f"{100 * values[-1]:.1f}"
    ends, note = EndTable({"accuracy": "global/acc"}, last=1).draw(series)
    assert ends.rows[0][1].text == f"{100 * values[-1]:.1f}"
    _, of_sweep = Sweep({"accuracy": "global/acc"}, "s", last=1).draw(series)
    figure, caption = Curves({"accuracy": "global/acc"}).draw(series)
    (line,) = figure.axes[0].get_lines()
    assert line.get_ydata() == pytest.approx([100 * value for value in values])
    assert f"{100 * np.mean(values[-5:]):.3g}" in caption
    for sentences in (note, of_sweep, caption):
        assert "of the runs that have most of them or stopped early" in sentences


def test_the_page_of_results_draws_the_rounds_that_all_seeds_have_and_the_longest_ones(tmp_path):
    runs = []
    for seed, length in enumerate((4, 2)):
        runs.append(read_run(write_run(tmp_path / str(seed), [0.1, 0.2, 0.3, 0.5][:length], settings("FedAvg", seed))))
    series = Series("FedAvg", "s = 2", Group("FedAvg", runs), {}, 4)
    assert [run.num_rounds for run in write_results.shared_rounds(series).group.runs] == [2, 2]
    column = write_results.longest(series)
    assert [run.num_rounds for run in column.group.runs] == [4]
    assert column.case == "s = 2, seed 0"
