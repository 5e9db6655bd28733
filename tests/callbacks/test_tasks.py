"""The tables of tasks that a run leaves, and the pictures of data that change."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.callbacks import ClasswiseReport, RunPlots
from fl_lightning.callbacks.report import print_tasks
from fl_lightning.data import ClassIncremental
from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import TASK_MEASURES
from fl_lightning.reports.curve_pictures import Shown, drawn_keys
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.reports.task_figures import TaskMatrix, measure_texts, task_texts
from fl_lightning.reports.tasks import tasks_of
from fl_lightning.reports.terminal import side_by_side
from fl_lightning.runs.tasks import read_tasks
from tests.callbacks.toy import data, loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDS = 7
TASKS = [[0], [1], [2]]
NAMES = ["0", "1", "2"]
KINDS = {"same": {}, "delayed": {"delay": 2, "order": "shuffled"}}


def changing(**settings):
    return data(scenario=ClassIncremental(TASKS, rounds_per_task=2, **settings))


def run(folder, *, rounds=ROUNDS, ckpt_path=None, form="none", **settings):
    fitted = trainer([RunPlots(format=form)], folder, rounds=rounds)
    changed = changing(**settings)
    fitted.fit(loop(evaluate_clients_every=1), datamodule=changed, ckpt_path=ckpt_path)
    return changed


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_same(text, value):
    return float(text) == value if text else math.isnan(value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_that_of_the_rows_and_of_a_run_that_was_never_stopped(tmp_path, kind):
    changed = run(tmp_path / "whole", **KINDS[kind])
    logged = rows(tmp_path / "whole/metrics.csv")
    saved = read_tasks(tmp_path / "whole/tasks.csv")
    assert saved.names == NAMES
    before, *lines = saved.of("global")
    assert (before.row, before.round_idx) == (-1, -1)
    stages = [[changed.scenario.stage(client, r) for client in range(4)] for r in range(ROUNDS)]
    ends = [r for r in range(ROUNDS - 1) if stages[r] != stages[r + 1]]
    assert [line.round_idx for line in lines] == [*ends, ROUNDS - 1]
    for line in lines:
        row = logged[line.round_idx]
        assert all(is_same(row[f"global/acc_task/{n}"], v) for n, v in zip(NAMES, line.accuracies, strict=True))
        for name in TASK_MEASURES:
            assert row[f"global/{name}"] == (str(line.measures[name]) if name in line.measures else "")
    own = saved.of("clients")
    assert [line.row for line in own] == sorted({stage for of_round in stages for stage in of_round})
    last = {name: logged[-1][f"local/{name}"] for name in own[-1].measures}
    assert last
    assert {name: str(value) for name, value in own[-1].measures.items()} == last
    run(tmp_path / "half", rounds=3, **KINDS[kind])
    run(tmp_path / "half", ckpt_path=tmp_path / "half/last.ckpt", **KINDS[kind])
    assert (tmp_path / "half/tasks.csv").read_bytes() == (tmp_path / "whole/tasks.csv").read_bytes()


def test_first_and_last_rows_are_those_of_who_trains_on_a_task(tmp_path):
    run(tmp_path, delay=2)
    found = rows(tmp_path / "tasks.csv")
    trained = {}
    for line in found:
        if line["model"] == "global" and line["row"].isdecimal():
            trained[int(line["row"])] = line["trained"].split()
    for word, choose in (("first", min), ("last", max)):
        (line,) = [line for line in found if line["row"] == word]
        for task, name in enumerate(NAMES):
            own = [row for row, tasks in trained.items() if str(task) in tasks]
            assert line[f"acc_task/{name}"] == str(choose(own))


def test_a_run_draws_its_tasks_and_a_page_draws_them_once(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("fl_lightning.callbacks.plots.save", lambda figure, path: drawn.append(path.stem))
    run(tmp_path, rounds=3, form="png")
    pictures = ["stages", "tasks", "task_curves"]
    assert [name for name in drawn if name in pictures] == pictures
    groups = [Group("FedAvg", [read_run(tmp_path)])]
    assert [picture.name for picture in tasks_of(groups)] == ["tasks-0", "task-curves-0"]
    curves = drawn_keys(Shown(groups))
    assert {"global/acc_tasks", "local/forgetting_tasks"} <= {*curves}
    assert not [key for key in curves if "acc_task/" in key]


def test_the_last_values_on_the_tasks_and_their_measures_are_printed_in_lines_that_fit(tmp_path, capsys):
    fitted = trainer([RunPlots(format="none"), ClasswiseReport()], tmp_path, rounds=5)
    # The clients are in different stages after the last round.
    fitted.fit(loop(evaluate_clients_every=1), datamodule=changing(delay=3))
    assert [line.num_clients for line in read_tasks(tmp_path / "tasks.csv").of("clients")][-1] < 4
    *_, title, tasks, measures, of_clients, own_tasks, own_measures = filter(None, capsys.readouterr().out.splitlines())
    assert title == "Accuracy on the tasks after 5 rounds (global model)"
    assert of_clients == "Accuracy on the tasks after 5 rounds (mean of the clients' own models)"
    row = rows(tmp_path / "metrics.csv")[-1]
    for scope, values, below in (("global", tasks, measures), ("local", own_tasks, own_measures)):
        expected = [f"{name} {100 * float(row[f'{scope}/acc_task/{name}']):.1f} %" for name in NAMES]
        assert values.split("   ") == expected
        names = {
            "ACC": "acc_tasks",
            "F": "forgetting_tasks",
            "BWT": "backward_transfer",
            "FWT": "forward_transfer",
            "LA": "learning_accuracy",
        }
        known = {short: row.get(f"{scope}/{name}") for short, name in names.items()}
        assert below.split("   ") == [f"{short} {100 * float(value):.1f} %" for short, value in known.items() if value]


def printed(names, row, capsys):
    """The lines that are printed where the last row of a run is this one."""
    history = History()
    history.record(4, row)
    print_tasks(SimpleNamespace(tasks=SimpleNamespace(names=names), recorder=SimpleNamespace(history=history)))
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_values_on_up_to_ten_tasks_are_printed_and_of_more_tasks_the_measures_only(capsys):
    names = [str(task) for task in range(11)]
    row = {f"global/acc_task/{name}": 0.5 for name in names} | {"global/acc_tasks": 0.5}
    title, *tasks, measures = printed(names[:10], row, capsys)
    assert title == "Accuracy on the tasks after 5 rounds (global model)"
    assert "   ".join(tasks).split("   ") == [f"{name} 50.0 %" for name in names[:10]]
    assert measures == "ACC 50.0 %"
    assert printed(names, row, capsys) == [title, measures]
    of_value = printed(["a"], {"val/value_task/a": 2.5, "val/value_tasks": 2.5}, capsys)
    assert of_value == ["Value on the tasks after 5 rounds (global model)", "a 2.5", "mean 2.5"]


def test_a_test_after_the_fit_does_not_print_the_tasks_again(tmp_path, capsys):
    fitted = trainer([RunPlots(format="none"), ClasswiseReport()], tmp_path, rounds=1)
    federation = loop()
    changed = changing()
    fitted.fit(federation, datamodule=changed)
    assert "on the tasks after 1 round" in capsys.readouterr().out
    fitted.test(federation, datamodule=changed)
    assert "on the tasks" not in capsys.readouterr().out


def test_many_tasks_and_long_names_and_other_values_are_printed_in_a_few_lines():
    names = [f"permutation {task}" for task in range(10)]
    matrix = TaskMatrix(names, np.full((1, 10), 0.25), np.zeros((1, 10), dtype=bool), [4])
    lines = side_by_side(task_texts(matrix), width=80)
    assert len(lines) <= 4
    assert max(len(line) for line in lines) <= 80
    value = TaskMatrix(["a"], np.array([[2.5]]), np.array([[True]]), [4], None, {"value_tasks": 2.5}, are_shares=False)
    assert (task_texts(value), measure_texts(value)) == (["a 2.5"], ["mean 2.5"])


def test_without_a_scenario_there_are_no_tasks_and_who_comes_and_goes_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("fl_lightning.callbacks.plots.save", lambda figure, path: drawn.append(path.stem))
    trainer([RunPlots()], tmp_path, rounds=1).fit(loop(), datamodule=data())
    assert "partition" in drawn
    assert not {"stages", "tasks", "task_curves"} & {*drawn}
    assert not (tmp_path / "tasks.csv").exists()
    trainer([RunPlots()], tmp_path, rounds=1).fit(loop(), datamodule=data(stays={0: [1, None]}))
    assert [name for name in drawn if name in ("stages", "tasks", "task_curves")] == ["stages"]
