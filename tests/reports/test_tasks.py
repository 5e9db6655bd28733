"""Tables of tasks on disk, intransigence in tables of results, and pictures of data that change."""

import csv
import io
import math

import numpy as np
import pytest
import torch
import yaml

from fl_lightning.data import ClassIncremental, DomainIncremental, LabelDrift
from fl_lightning.data.scenario import ScenarioInput
from fl_lightning.federation.effects import is_data, is_fixed
from fl_lightning.metrics.keys import describe
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.results import compare, known_metrics
from fl_lightning.reports.saved import data_differences, find_runs, grouped, read_run
from fl_lightning.reports.summary import summary_table
from fl_lightning.reports.task_figures import (
    TaskMatrix,
    TrainedSpan,
    bars_of,
    panel_title,
    plot_stages,
    plot_task_curves,
    plot_tasks,
)
from fl_lightning.reports.tasks import have_met_alike, matrices_of, words_for_seeds
from fl_lightning.runs.stages import MOST_STAGES, counted_rounds, presence_of
from fl_lightning.runs.tasks import SavedTasks, TaskLine, mean_line, read_tasks, write_tasks
from tests.reports.saved_runs import settings, write_table
from tests.toys import toy_data

NAMES = ["0-1", "2, 3"]


def lines(table, model="global", trained=((0,), (1,))):
    """The rows of a table whose first one is before training."""
    found = [TaskLine(model, -1, -1, [0.1, math.nan], [], {})]
    for row, accuracies in enumerate(table):
        found.append(TaskLine(model, row, 2 * row + 1, accuracies, list(trained[row]), {"acc_tasks": accuracies[0]}))
    return found


def task_run(folder, method, seed, table, cumulative=False):
    folder.mkdir(parents=True)
    write_table(
        folder / "metrics.csv",
        ["round", "global/acc", "global/acc_tasks", "global/acc_task/0-1"],
        [[r, 0.5, 0.25 + 0.25 * r, 0.5] for r in range(4)],
    )
    config = settings(method, seed)
    config["data"]["scenario"] = {
        "class_path": "fl_lightning.data.ClassIncremental",
        "init_args": {"tasks": [[0, 1], [2, 3]], "rounds_per_task": 2, "cumulative": cumulative},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    trained = ((0,), (0, 1)) if cumulative else ((0,), (1,))
    write_tasks(folder / "tasks.csv", SavedTasks(NAMES, lines(table, trained=trained)))
    return folder


TABLES = {
    ("FedAvg", 0): [[0.8, 0.0], [0.2, 0.6]],
    ("FedAvg", 1): [[0.9, 0.0], [0.2, 0.7]],
    ("FedNTD", 0): [[0.6, 0.0], [0.4, 0.5]],
    ("FedNTD", 1): [[0.7, 0.0], [0.4, 0.4]],
    ("FedProx", 0): [[0.9, 0.1], [0.8, 0.8]],
}
"""The row FedProx stands for the cumulative one, and has one seed only."""


@pytest.fixture
def groups(tmp_path):
    for (method, seed), table in TABLES.items():
        task_run(tmp_path / f"{method}/{seed}", method, seed, table, cumulative=method == "FedProx")
    return grouped(map(read_run, find_runs([tmp_path])))


def test_tables_are_read_as_they_were_written(tmp_path):
    table = lines(TABLES["FedAvg", 0])
    own = [TaskLine("clients", 0, 3, [0.5, math.nan], [0, 1], {"forgetting_tasks": -0.5}, 7)]
    write_tasks(tmp_path / "tasks.csv", SavedTasks(NAMES, table + own))
    again = read_tasks(tmp_path / "tasks.csv")
    assert again.names == NAMES
    assert repr(again.lines) == repr(table + own)
    assert read_tasks(tmp_path / "none.csv") is None
    text = (tmp_path / "tasks.csv").read_text(encoding="utf-8")
    assert "nan" not in text
    for wrong in (text.replace("clients,0", "servers,0"), text.replace("0 1", "0 2"), text.replace("model", "module")):
        (tmp_path / "tasks.csv").write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match="must be a table of tasks, and cannot be read as one"):
            read_tasks(tmp_path / "tasks.csv")


def test_a_line_of_clients_is_the_mean_over_those_that_have_samples():
    one = TaskLine("clients", 1, 4, [0.5, math.nan, math.nan], [0], {"acc_tasks": 0.5})
    other = TaskLine("clients", 1, 2, [1.0, 0.25, math.nan], [1], {"acc_tasks": 1.0, "forgetting_tasks": 0.125})
    mean = mean_line([one, other])
    assert str(mean.accuracies) == "[0.75, 0.25, nan]"
    assert mean.measures == {"acc_tasks": 0.75, "forgetting_tasks": 0.125}
    assert (mean.row, mean.round_idx, mean.trained, mean.num_clients) == (1, 4, [0, 1], 2)


def test_intransigence_is_paired_by_seed_and_lower_is_better(groups):
    assert known_metrics(groups, ["global/acc"], with_tasks=True) == ["global/acc", "global/acc_tasks"]
    shown = compare(groups, "global/acc_tasks", "FedAvg", reference="FedProx")
    found = {label: columns.get("intransigence") for label, columns in shown.results.items()}
    assert found["FedProx"] is None
    assert list(found["FedAvg"].values.values()) == [pytest.approx((0.1 + 0.2) / 2)]
    assert list(found["FedNTD"].values.values()) == [pytest.approx((0.3 + 0.3) / 2)]
    assert found["FedNTD"].difference.mean == pytest.approx(0.15)
    table = comparison_table(shown)
    column = table.header.index("intransigence")
    cells = {row[0].text: row[column] for row in table.rows}
    assert {name: cell.text for name, cell in cells.items()} == {"FedAvg": "15.0", "FedNTD": "30.0", "FedProx": "–"}
    assert {name: cell.mark for name, cell in cells.items()} == {
        "FedAvg": "bold",
        "FedNTD": "underlined",
        "FedProx": "",
    }
    assert "accuracy of FedProx with the same seed, minus that of the method" in table.note
    assert "best over rounds" not in table.header  # with one task the mean over those that were met is highest
    lines_of_file = list(csv.DictReader(io.StringIO(as_csv([shown]))))
    assert [row["method"] for row in lines_of_file if row["statistic"] == "intransigence"] == ["FedAvg", "FedNTD"]
    others = compare(groups, "global/acc", "FedAvg", reference="FedProx")
    assert "intransigence" not in others.results["FedAvg"]
    overview = summary_table({"": [others, shown]})
    assert overview.header[-1] == "intransigence, %"
    assert [row[-1].text for row in overview.rows] == ["15.0", "30.0", "–"]


def with_clients(folder, learned, trained=((0,), (0, 1))):
    """Give a run the values of its clients' own tables, the last of which is their learning accuracy."""
    header, *cells = csv.reader((folder / "metrics.csv").read_text(encoding="utf-8").splitlines())
    values = [["", ""], [0.1, 0.125 if learned else ""], ["", ""], [0.5, learned]]
    rows = [line + more for line, more in zip(cells, values, strict=True)]
    write_table(folder / "metrics.csv", [*header, "local/acc_tasks", "local/learning_accuracy"], rows)
    saved = read_tasks(folder / "tasks.csv")
    # The last stage has one of the two clients. Its learning accuracy is not that of all clients.
    measures = {"acc_tasks": 0.0, "learning_accuracy": 0.0}
    of_clients = [TaskLine("clients", s, 3, [0.5, 0.5], list(trained[s]), measures, 2 - s) for s in range(2)]
    write_tasks(folder / "tasks.csv", SavedTasks(NAMES, saved.lines + of_clients))


def test_intransigence_of_clients_needs_that_they_met_the_same_tasks(tmp_path, groups):
    with_clients(tmp_path / "FedProx/0", learned=0.875)
    with_clients(tmp_path / "FedAvg/0", learned=0.625)
    with_clients(tmp_path / "FedNTD/0", learned=0.75, trained=((0,), (1,)))

    def shown():
        found = grouped(map(read_run, find_runs([tmp_path])))
        assert known_metrics(found, ["global/acc"], with_tasks=True)[1:] == ["global/acc_tasks", "local/acc_tasks"]
        return [compare(found, f"{of}/acc_tasks", "FedAvg", reference="FedProx") for of in ("global", "local")]

    _, clients = shown()
    found = {label: columns.get("intransigence") for label, columns in clients.results.items()}
    assert list(found["FedAvg"].values.values()) == [0.875 - 0.625]
    assert found["FedNTD"] is found["FedProx"] is None
    assert "Intransigence of the clients' own models: the mean over the clients and" in comparison_table(clients).note
    table = summary_table({"": shown()})
    assert table.header[-2:] == ["intransigence (global/acc_tasks), %", "intransigence (local/acc_tasks), %"]
    assert [[cell.text for cell in row[-2:]] for row in table.rows] == [["15.0", "25.0"], ["30.0", "–"], ["–", "–"]]
    assert table.note.count("Intransigence") == 2


def test_clients_met_alike_if_as_many_were_in_each_stage_on_the_same_tasks():
    rows = [TaskLine("clients", stage, stage, [0.5, 0.5], [stage], {}, 2) for stage in range(2)]
    assert have_met_alike(rows, [row._replace(round_idx=9, accuracies=[0.1, 0.2]) for row in rows])
    first, last = rows
    for other in (last._replace(row=2), last._replace(num_clients=1), last._replace(trained=[0, 1])):
        assert not have_met_alike(rows, [first, other])
    assert not have_met_alike(rows, [first])


def test_runs_without_the_learning_accuracy_are_read(tmp_path, groups):
    for method in ("FedProx", "FedAvg"):
        with_clients(tmp_path / method / "0", learned="")
    for file in tmp_path.rglob("tasks.csv"):
        header, *rows = csv.reader(file.read_text(encoding="utf-8").splitlines())
        assert header[-1] == "learning_accuracy"
        write_table(file, header[:-1], [row[:-1] for row in rows])
    found = grouped(map(read_run, find_runs([tmp_path])))
    assert "intransigence" not in compare(found, "local/acc_tasks", "FedAvg", reference="FedProx").results["FedAvg"]
    shown = compare(found, "global/acc_tasks", "FedAvg", reference="FedProx")
    assert list(shown.results["FedAvg"]["intransigence"].values.values()) == [pytest.approx(0.15)]
    matrix, _ = matrices_of([read_tasks(tmp_path / "FedAvg/0/tasks.csv")]).values()
    assert matrix.measures.keys() == {"acc_tasks"}


def test_the_measures_of_clients_are_shown_if_all_of_them_are_in_the_last_stage():
    def saved(last):
        rows = [TaskLine("clients", s, s, [0.5, 0.5], [s], {"acc_tasks": 0.5}, n) for s, n in enumerate((2, last))]
        return SavedTasks(NAMES, rows)

    for lasts, shown in (([1], {}), ([2], {"acc_tasks": 0.5}), ([2, 1], {}), ([2, 2], {"acc_tasks": 0.5})):
        (matrix,) = matrices_of([saved(last) for last in lasts]).values()
        assert matrix.measures == shown


def test_a_page_says_if_seeds_have_rows_of_their_own():
    same = [SavedTasks(NAMES, lines(table)) for table in (TABLES["FedAvg", 0], TABLES["FedAvg", 1])]
    assert words_for_seeds(same[:1]) == ""
    assert words_for_seeds(same) == ", mean over 2 seeds"
    late = SavedTasks(NAMES, [line._replace(round_idx=line.round_idx + 1) for line in lines(TABLES["FedAvg", 0])])
    assert "of the first seed" in words_for_seeds([*same, late])


def test_a_cumulative_run_has_the_data_of_the_others(groups):
    assert not data_differences(groups)
    # The digest of the samples of each round is that of the run, not of the data that are compared.
    assert is_fixed("data.scenario.samples")
    assert not is_data("data.scenario.samples")
    assert is_data("data.scenario.tasks")


def test_a_run_whose_later_rounds_are_left_out_has_no_table(groups):
    first, *others = groups
    (run,) = [run for run in first.runs if run.seed == "0"]
    short = [read_run(run.folder, rounds=2)]
    shown = compare([type(first)(first.label, short), *others], "global/acc_tasks", "FedNTD", reference="FedProx")
    assert "intransigence" not in shown.results[first.label]
    assert "intransigence" in shown.results["FedNTD"]


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        ("global/acc_tasks", "max"),
        ("global/forgetting_tasks", "min"),
        ("val/backward_transfer", "max"),
        ("local/forward_transfer", "max"),
        ("local/learning_accuracy", "max"),
    ],
)
def test_the_measures_have_directions_and_words(key, direction):
    described = describe(key)
    assert described.direction == direction
    assert not described.has_best
    assert ": " in described.scope


def test_a_module_without_accuracies_has_a_table_of_its_value(tmp_path):
    measures = {"value_tasks": 2.5, "value_backward_transfer": -0.25, "value_learned": 2.25}
    line = TaskLine("global", 0, 1, [2.5, 30.0], [0], measures)
    write_tasks(tmp_path / "tasks.csv", SavedTasks(NAMES, [line], has_accuracies=False))
    again = read_tasks(tmp_path / "tasks.csv")
    assert again == SavedTasks(NAMES, [line], has_accuracies=False)
    assert "value_task/0-1" in (tmp_path / "tasks.csv").read_text(encoding="utf-8")
    (matrix,) = matrices_of([again]).values()
    axes = plot_tasks({"global model": matrix}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["2.5", "30"]
    assert axes.get_title() == "global model\nmean 2.5, BWT −0.25, learned 2.25"
    assert not describe("val/value_tasks").has_best


def test_accuracies_that_a_module_logs_in_percent_are_drawn_as_others():
    line = TaskLine("global", 0, 1, [80.0, 0.0], [0], {"acc_tasks": 80.0})
    (matrix,) = matrices_of([SavedTasks(NAMES, [line])]).values()
    assert matrix.table.tolist() == [[0.8, 0.0]]
    assert panel_title("net", matrix) == "net\nACC 80.0 %"


# --- pictures ---


def test_the_table_has_its_numbers_and_a_frame_where_a_task_is_trained_on():
    table = np.array([[0.9, 0.125], [0.25, np.nan]])
    trained = np.array([[True, False], [False, True]])
    matrix = TaskMatrix(NAMES, table, trained, [1, 3], np.array([0.5, 0.0]), {"backward_transfer": -0.65})
    axes = plot_tasks({"global model": matrix}).axes[0]
    found = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert found == {(0, 0): "50", (1, 0): "90", (2, 0): "25", (0, 1): "0", (1, 1): "12"}
    frames = {tuple(np.round(patch.get_xy())) for patch in axes.patches}
    assert frames == {(1.0, 0.0), (2.0, 1.0)}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["before", "1", "3"]
    assert axes.get_title() == "global model\nBWT −65.0 %"


def test_curves_are_those_of_the_tasks_and_bars_those_of_the_training():
    curves = {name: np.array([[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]) + i / 4 for i, name in enumerate(NAMES)}
    spans = [TrainedSpan(0, 1, [0]), TrainedSpan(2, 2, [0, 1])]
    figure = plot_task_curves([0, 1, 2], curves, mean=np.full((2, 3), 0.5), spans=spans)
    axes, above = figure.axes
    lines_of = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert np.allclose(lines_of["2, 3"], [45, 55, 65])
    assert np.allclose(lines_of["mean of met tasks"], 50)
    bars = [collection.get_paths()[0].get_extents() for collection in above.collections]
    assert [(bar.x0, bar.x1, round(bar.y0 + 0.4)) for bar in bars] == [(-0.5, 1.5, 0), (1.5, 2.5, 0), (1.5, 2.5, 1)]


def test_bars_have_the_shares_of_the_classes():
    counts = np.array([[[5, 0, 5], [2, 3, 0]], [[0, 0, 0], [0, 4, 4]]], dtype=float)
    shown = bars_of(counts, bar=40, gap=3)
    assert shown.shape == (86, 2)
    for client, of_client in enumerate(counts):
        pixels = shown[43 * client : 43 * (client + 1)]
        assert (pixels[:3] == -1).all()
        for place, of_round in enumerate(of_client):
            found = [(pixels[:, place] == class_idx).sum() for class_idx in range(3)]
            assert found == (40 * of_round / of_client.sum(1).max()).tolist()
            filled = pixels[pixels[:, place] >= 0, place]
            assert (np.diff(filled) <= 0).all()  # from below


def test_rounds_are_left_out_if_there_are_too_many_stages():
    drift = LabelDrift(alpha=1.0, rounds=1000)
    assert counted_rounds(drift, 100, num_clients=10) == list(range(100))
    some = counted_rounds(drift, 1000, num_clients=50)
    assert 50 * len(some) <= MOST_STAGES
    assert (some[0], some[-1]) == (0, 999)
    slow = ClassIncremental([[0], [1]], 30)
    slow.begin(ScenarioInput([torch.arange(0)] * 50, train=Labelled(), num_classes=lambda: 3, seed=0))
    assert counted_rounds(slow, 200, num_clients=50) == list(range(200))


class Labelled:
    """A split without samples."""

    labels = torch.arange(0)

    def __len__(self):
        return 0


SCENARIOS = {
    "tasks": lambda: ClassIncremental([[0], [1, 2]], 2, delay=1, order="shuffled"),
    "domains": lambda: DomainIncremental(2, noises=[0.0, 0.5], order="shuffled"),
    "drift": lambda: LabelDrift(alpha=1.0, rounds=4),
}


@pytest.mark.parametrize("kind", SCENARIOS)
def test_samples_are_counted_as_the_clients_see_them(kind):
    changing = toy_data((14, 9, 12, 11), scenario=SCENARIOS[kind]())
    changing.setup("fit")
    found = presence_of(changing, 6, ["a", "b", "c"])
    assert found.rounds == list(range(6))
    for client in found.clients:
        for round_idx in found.rounds:
            view = changing.view(client, round_idx)
            of_round = found.counts[client, round_idx]
            if kind == "domains":
                assert found.names == ["σ=0", "σ=0.5"]
                assert of_round[changing.scenario.task(client, view.stage)] == view.size() == of_round.sum()
            else:
                assert of_round.tolist() == view.label_counts.tolist()
    figure = plot_stages(
        found.counts, found.names, rounds=found.rounds, client_names=["ann", "bob", "eve", "dan"], kind=found.kind
    )
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["ann", "bob", "eve", "dan"]
    assert not figure.legends
    assert presence_of(toy_data(), 6, None) is None


@pytest.mark.parametrize("kind", [None, "tasks"])
def test_a_client_that_is_away_has_no_samples_and_is_hatched(kind):
    stays = {0: [2, None], 1: [1, 3]}
    scenario = None if kind is None else SCENARIOS[kind]()
    coming = toy_data((14, 9, 12, 11), scenario=scenario, stays=stays)
    coming.setup("fit")
    found = presence_of(coming, 6, ["a", "b", "c"])
    for client in found.clients:
        for round_idx in found.rounds:
            is_there = client in coming.present_clients(round_idx)
            expected = coming.view(client, round_idx).label_counts.tolist() if is_there else [0, 0, 0]
            assert found.counts[client, round_idx].tolist() == expected
            assert found.there[client, round_idx] == is_there
    figure = plot_stages(
        found.counts, found.names, rounds=found.rounds, client_names=list("abcd"), there=found.there, kind=found.kind
    )
    hatched = [path.get_extents() for of_client in figure.axes[0].collections for path in of_client.get_paths()]
    assert [(box.x0, box.x1, box.y1 - 0.5) for box in hatched] == [(-0.5, 1.5, 0), (-0.5, 0.5, 1), (3.5, 5.5, 1)]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text() == "away (data.stays)"
