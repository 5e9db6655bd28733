"""One question, one answer: all readers of runs ask the registry for the direction, and show what is not finite."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fl_lightning.callbacks.bar import percent_text
from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.experiment import Experiment, Runs
from fl_lightning.experiments.tuning import choose_candidates
from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import direction_of, scope_of
from fl_lightning.papers import Curves, EndTable, PaperTable, RoundsToTarget, Series, Sweep
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.curve_pictures import axis_label
from fl_lightning.reports.report import write_report
from fl_lightning.reports.results import compare, statistics_of
from fl_lightning.reports.saved import Group, SavedRun, find_runs, grouped, read_run
from fl_lightning.reports.terminal import best_round
from tests.metrics.test_keys import HIGHER, LOWER, UNKNOWN
from tests.reports import pages
from tests.reports.saved_runs import settings, write_run, write_table

KEYS = [*LOWER[:6], *HIGHER[:6], *UNKNOWN[:4], "unprotected/val/huber"]


def write_values(folder, key, values, seed=0, client="FedAvg", max_epochs=None):
    """A run with one value in each round, None in a round without one."""
    config = settings(client, seed)
    config["trainer"]["max_epochs"] = max_epochs or len(values)
    write_run(folder, [0.5] * len(values), config)
    rows = [[r, "" if value is None else value] for r, value in enumerate(values)]
    write_table(folder / "metrics.csv", ["round", key], rows)
    return folder


def refused_if_unknown(key, given):
    """A context in which a question that needs the direction is refused, if nobody tells it."""
    if direction_of(key, given) is not None:
        return nullcontext()
    return pytest.raises(ValueError, match=r"--direction must say whether .* is better when lower or higher")


def answers(tmp_path, key, given) -> dict[str, object]:
    """What each reader takes for the better of two methods, whose values are 0.25 and 0.75; None: it marks none."""
    runs = {}
    for name, value in {"low": 0.25, "high": 0.75}.items():
        folder = write_values(tmp_path / name / "runs" / name / "0", key, [0.5, value], client=name)
        runs[name] = read_run(folder, directions=given)
    groups = [Group(name, [run]) for name, run in runs.items()]
    series = [Series(name, "", group) for name, group in zip(runs, groups, strict=True)]
    plain = key.removeprefix("unprotected/")
    found = {}
    best = statistics_of(runs["low"], plain).get("best")
    found["statistic"] = {None: None, 0.25: "low", 0.5: "high"}[best]
    table = comparison_table(compare(groups, plain, "low"))
    found["marks"] = next((row[0].text for row in table.rows if row[1].mark == "bold"), None)
    words = [word for word, name in (("lowest", "low"), ("highest", "high")) if f"is the {word} value" in table.note]
    found["note"] = {"lowest": "low", "highest": "high"}[words[0]] if words else None
    curve = {0: 0.25, 1: 0.75}
    found["terminal"] = {None: None, 0: "low", 1: "high"}[best_round(curve, direction_of(key, given))]
    drawn = EndTable({"value": plain}, scale=1.0, last=1).draw(series).content
    found["end table"] = next((row[0].text for row in drawn.rows if row[1].mark), None)
    paper = PaperTable({"value": plain}, {"value": {"low": [0.1], "high": [0.2]}}, claims={"low": ["high"]})
    with refused_if_unknown(key, given):
        found["claims"] = None
        found["claims"] = "low" if "ours 1 of 1" in paper.of_cases([""]).draw(series).caption else "high"
    tuned = Runs(["FedAvg"], tune={"name": list(runs)})
    cells = SimpleNamespace(experiment=Experiment(base=[], seeds=[0], runs=[tuned], tune_metric=plain), chosen={})
    config = {"trainer": {"max_epochs": 2}, "direction": [f"{name}={word}" for name, word in given.items()]}
    choices = {}
    for name in runs:
        (tmp_path / "all/runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"all/runs/{name}").symlink_to(tmp_path / name / "runs" / name)
        choices[(("name", name),)] = [Cell("FedAvg", "", 0, name, config)]
    with refused_if_unknown(key, given):
        found["tuning"] = None
        choose_candidates(cells, {("FedAvg", ""): choices}, tmp_path / "all", {})
        ((_, found["tuning"]),) = cells.chosen["FedAvg", ""]
    return found


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("told", [None, "min", "max"])
def test_all_readers_give_the_registrys_answer(tmp_path, key, told):
    given = {} if told is None else {key.removeprefix("unprotected/"): told}
    wanted = {None: None, "min": "low", "max": "high"}[direction_of(key, given)]
    found = answers(tmp_path, key, given)
    assert found == dict.fromkeys(found, wanted)
    assert len(found) == 7


def test_a_direction_in_the_folder_of_a_run_is_known_to_its_readers(tmp_path):
    folder = write_values(tmp_path / "a", "val/foo", [0.1, 0.2])
    assert read_run(folder).direction("val/foo") is None
    (folder / "directions.json").write_text('{"val/foo": "min"}')
    assert read_run(folder).direction("val/foo") == "min"
    assert read_run(folder, directions={"val/foo": "max"}).direction("val/foo") == "max"
    (folder / "directions.json").write_text('{"val/foo": "low"}')
    with pytest.raises(ValueError, match=r"directions\.json must be directions"):
        read_run(folder)


@pytest.mark.parametrize("end", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["val_acc", "val_loss"])
def test_an_end_that_is_not_finite_is_shown_and_is_never_the_best(tmp_path, key, end):
    write_values(tmp_path / "good", key, [0.5] * 6, client="good")
    write_values(tmp_path / "bad", key, [0.9, 0.1, 0.1, 0.9, 0.1, end], client="bad")
    groups = grouped(map(read_run, find_runs([tmp_path])))
    comparison = compare(groups, key, groups[0].label)
    bad = next(label for label in comparison.results if "bad" in label)
    good = next(label for label in comparison.results if "good" in label)
    assert str(comparison.results[bad]["final"].mean) == str(end)
    assert not math.isfinite(comparison.results[bad]["last five"].mean)
    assert comparison.results[bad]["best"].mean == (0.9 if key == "val_acc" else 0.1)
    rows = {row[0].text: row for row in comparison_table(comparison).rows}
    assert rows[bad][1].text.lstrip("−") == str(end).lstrip("-")
    assert rows[bad][1].mark == ""
    assert f",final,1,{end}," in as_csv([comparison])
    page = write_report(groups, tmp_path / "out").read_text("utf-8")
    by_name = {row[0]: row[1] for row in pages.rows(page)}
    assert by_name[bad].lstrip("−") == str(end).lstrip("-")
    assert float(by_name[good]) == (50 if key == "val_acc" else 0.5)


def test_one_seed_that_diverged_keeps_the_mean_from_being_the_best(tmp_path):
    for seed, end in enumerate((0.9, math.nan, 0.9)):
        write_values(tmp_path / f"a{seed}", "val_acc", [0.5, end], seed=seed, client="a")
        write_values(tmp_path / f"b{seed}", "val_acc", [0.5, 0.6], seed=seed, client="b")
    table = comparison_table(compare(grouped(map(read_run, find_runs([tmp_path]))), "val_acc", "a"))
    assert [row[1].text for row in table.rows] == ["90.0 ± 0.0 (2 of 3, else nan)", "60.0 ± 0.0"]
    assert [row[1].mark for row in table.rows] == ["", ""]


def test_a_round_without_a_value_is_no_nan():
    history = History()
    for round_idx, row in enumerate(({"a": 1.0}, {"b": 2.0}, {"a": math.nan}, {"a": math.inf, "unprotected/c": 1.0})):
        history.record(round_idx, row)
    assert str(history.curve("a")) == "{0: 1.0, 2: nan, 3: inf}"
    assert history.curve("c") == history.curve("unprotected/c") == {3: 1.0}
    assert history.keys == ["a", "b", "c"]
    history.drop(2)
    assert history.curve("a") == {0: 1.0}


def test_seeds_of_unequal_length_end_alike_in_table_caption_and_picture(tmp_path):
    curves = ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.5], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9])
    for seed, curve in enumerate(curves):
        write_values(tmp_path / str(seed), "global/acc", curve, seed=seed, max_epochs=30)
    groups = grouped(map(read_run, find_runs([tmp_path])))
    comparison = compare(groups, "global/acc", groups[0].label)
    assert comparison.results[groups[0].label]["final"].mean == pytest.approx(0.6)
    assert "4 of 30, 4 of 30, 7 of 30" in comparison_table(comparison).note
    rounds, values = groups[0].carried_curves("global/acc")
    assert rounds == list(range(7))
    assert values[:, -1].mean() == pytest.approx(0.6)
    ((x, y),) = pages.curves(write_report(groups, tmp_path / "out").read_text("utf-8"))[0].values()
    assert (x[-1], y[-1]) == (6, pytest.approx(60))


def test_the_longest_finished_run_of_a_setting_counts_and_the_others_are_named(tmp_path):
    for number, (rounds, asked) in enumerate(((7, 7), (2, 2), (8, 10))):
        write_values(tmp_path / str(number), "global/acc", [0.5] * rounds, max_epochs=asked)
    (group,) = grouped(map(read_run, find_runs([tmp_path])))
    assert [run.folder.name for run in group.runs] == ["0"]
    assert len(group.notes) == 2
    assert "/1 is left out" in group.notes[0]
    assert "it has 2 rounds, and that one has 7" in group.notes[0]
    assert "it is not finished (8 of 10 rounds)" in group.notes[1]
    page = write_report([group], tmp_path / "out").read_text("utf-8")
    assert page.count("is left out, because") == 2


def test_seeds_are_a_tuple(tmp_path):
    for number, seeds in enumerate(((0, None, 1), (0, 1, 1))):
        config = settings("FedAvg", seeds[0])
        config["model"]["seed"] = seeds[1]
        config["data"]["seed"] = seeds[2]
        write_run(tmp_path / str(number), [0.1 + number], config)
    (group,) = grouped(map(read_run, find_runs([tmp_path])))
    assert len({run.seed for run in group.runs}) == len(group.runs) == 2
    assert compare([group], "global/acc", group.label).results[group.label]["final"].mean == pytest.approx(0.6)


def test_values_of_another_round_are_left_out_and_named(tmp_path):
    folder = write_values(tmp_path / "a", "val/acc", [0.5] * 8)
    (folder / "test.json").write_text('{"test/acc": 0.25, "round": 2}')
    run = read_run(folder)
    assert not run.test
    assert "its values are of round 2, and the last round is 7" in run.notes[0]
    rows = [[name, 4, 0.5, 0.5, 0.5, 2] for name in ("cat", "macro", "weighted")]
    write_table(folder / "classification.csv", ["class", "samples", "precision", "recall", "F1", "round"], rows)
    run = read_run(folder)
    page = write_report([Group("a", [run])], tmp_path / "out").read_text("utf-8")
    assert page.count("is left out: its values are of round 2, and the last round is 7") == len(run.notes) == 2
    assert "Precision, recall and F1" not in page
    assert read_run(folder, rounds=2).notes == ()
    (folder / "classification.csv").unlink()
    (folder / "test.json").write_text('{"unprotected/local/alma": 0.25, "round": 7}')
    assert read_run(folder).test == {"local/alma": 0.25}
    assert read_run(folder, rounds=2).test == {}
    write_table(folder / "clients.csv", ["round", "client", "loss_before"], [[r, 0, 1.0] for r in range(8)])
    assert read_run(folder, rounds=2).clients["round"].tolist() == [0, 1]


def test_all_bytes_are_in_the_table_the_column_and_the_picture(tmp_path):
    history = History()
    for round_idx in range(4):
        row = {"unprotected/comm/bytes_down": 2e6, "unprotected/comm/bytes_up": 1e6, "unprotected/local/alma": 0.5}
        history.record(round_idx, row | ({"unprotected/comm/bytes_sets": 8e6} if not round_idx else {}))
    group = Group("KnFu", [SavedRun(tmp_path, history, {})])
    result = compare([group], "local/alma", "KnFu", columns=["bytes"]).results["KnFu"]["bytes"]
    assert result.mean == pytest.approx(5.0)  # (4 × 3 + 8) MB in 4 rounds
    page = write_report([group], tmp_path / "out").read_text("utf-8")
    assert "sets, MB once" in page
    assert ["KnFu", "2", "1", "8", "20"] in pages.rows(page)
    assert "Mean over the clients of the accuracy of their own models" in page


@pytest.mark.parametrize("key", ["val_acc", "val/acc", "Accuracy/val", "unprotected/val/acc"])
def test_an_accuracy_in_percent_is_shown_as_one_in_a_share_is(tmp_path, key):
    """By every reader that shows percent: a table, a caption, a curve, the tables and sweeps of papers, the bar."""
    plain = key.removeprefix("unprotected/")
    shown = {}
    for name, factor in {"share": 1.0, "percent": 100.0}.items():
        values = [factor * value for value in (0.05, 0.5, 0.853)]
        write_values(tmp_path / name, key, values)
        run = read_run(tmp_path / name)
        group = Group("a", [run])
        series = [Series("a", "", group)]
        table = comparison_table(compare([group], plain, "a"))
        page = write_report([group], tmp_path / f"{name} out").read_text("utf-8")
        shown[name] = (
            table.title,
            [cell.text for cell in table.rows[0]],
            [cell.text for cell in EndTable({"value": plain}, last=1).draw(series).content.rows[0]],
            Curves({"value": plain}).draw(series).caption,
            Sweep({"value": plain}, "x", last=1).draw(series).caption,
            RoundsToTarget({"": 40.0}, key=plain).draw(series).caption,
            [cell.text for cell in PaperTable({"value": plain}, {}).of_cases([""]).draw(series).content.rows[0]],
            pages.curves(page),
            percent_text(plain, values[-1]),
        )
    assert shown["share"] == shown["percent"]
    assert "85.3" in shown["share"][1]


@pytest.mark.parametrize("key", ["val/acc", "val/loss", "val/forgetting"])
def test_no_title_or_axis_says_which_samples_a_module_validated_on(key):
    """A module of the user may log `val/NAME` on its test samples."""
    assert "split" not in axis_label(key, "")
    assert "split" not in scope_of(key)
    assert "split" in axis_label("global/acc", "share")
