"""Federations whose data change: resume, the table of tasks, places that ask for a round, and refusals."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import FedAsync, FedBuff, Rounds
from fl_lightning.data import (
    ClassIncremental,
    Devices,
    DomainIncremental,
    LabelDrift,
    ListedSamples,
    Scenario,
    Task,
    Window,
)
from fl_lightning.federation import scenario_checks
from fl_lightning.functional import continual
from fl_lightning.members.tasks import TaskTable
from fl_lightning.methods import SCAFFOLD, DPFedAvg, FedAvg, FedEWC, FedLwF, FedNovaAggregator, Replay
from fl_lightning.monitors import ClientTable
from fl_lightning.nets import Perceptron
from fl_lightning.runs.tasks import saved_tasks
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

SIZES = (14, 9, 12, 11)
TASKS = [[0], [1], [2]]


def by_tasks(**settings):
    return ClassIncremental(TASKS, rounds_per_task=2, **settings)


SCENARIOS = {
    "classes": by_tasks,
    "delayed": lambda: by_tasks(delay=2, order="shuffled"),
    "noise": lambda: DomainIncremental(2, noises=[0.0, 0.5]),
    "drift": lambda: LabelDrift(alpha=1.0, rounds=4, samples=0.6),
    "window": lambda: Window(per_round=0.2, keep=3, first=0.2),
}


def data_of(scenario, **settings):
    return toy_data(SIZES, scenario=scenario, **{"cohort_size": 3, **settings})


class Rows(pl.Callback):
    """The rows of a run."""

    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))


def same_rows(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == other[key] or (math.isnan(value) and math.isnan(other[key])), key


def methods_and_scenarios():
    """Replay under all scenarios, and the others under one each."""
    for kind in (FedAvg, FedEWC, Replay):
        for scenario in SCENARIOS:
            is_fast = kind is Replay or (kind, scenario) in ((FedAvg, "window"), (FedEWC, "delayed"))
            yield pytest.param(kind, scenario, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "scenario"), list(methods_and_scenarios()))
def test_a_continued_run_has_the_bits_and_the_table_of_a_whole_one(kind, scenario, tmp_path):
    def run(rounds, ckpt_path=None):
        watch = Rows()
        loop = FederatedLoop(kind(net=BatchNormNet, optimizer=sgd()), local_epochs=2, evaluate_clients_every=2)
        fitted = trainer(rounds, callbacks=[watch])
        fitted.fit(loop, datamodule=data_of(SCENARIOS[scenario]()), ckpt_path=ckpt_path)
        return fitted, loop, watch.rows

    _, whole, rows = run(6)
    for cut in (2, 3):
        half, _, first = run(cut)
        path = tmp_path / f"{cut}.ckpt"
        half.save_checkpoint(path)
        _, continued, rest = run(6, path)
        assert equal(weights_of(continued), weights_of(whole))
        same_rows([*first, *rest], rows)
        if whole._run.tasks is not None:
            assert continued._run.tasks.state_dict() == whole._run.tasks.state_dict()


def test_the_table_has_a_row_for_each_stage_and_its_measures_are_those_of_the_curve():
    watch = Rows()
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 7, data_of(by_tasks()), callbacks=[watch])
    names = ["0", "1", "2"]
    curve = [[row[f"global/acc_task/{name}"] for name in names] for row in watch.rows]
    rows = loop._run.tasks.table.rows()
    assert rows.table.tolist() == [curve[1], curve[3], curve[6]]
    assert rows.first.tolist() == rows.last.tolist() == [0, 1, 2]
    last = watch.rows[-1]
    assert last["global/acc_tasks"] == pytest.approx(sum(curve[6]) / 3)
    table = torch.tensor([curve[1], curve[3], curve[6]], dtype=torch.float64)
    assert last["global/forgetting_tasks"] == pytest.approx(float(continual.tasks_forgetting(table, rows.first)))
    assert last["global/backward_transfer"] == pytest.approx(float(continual.backward_transfer(table, rows.last)))
    ahead = continual.forward_transfer(table, rows.initial, rows.first)
    assert last["global/forward_transfer"] == pytest.approx(float(ahead))
    assert last["global/learning_accuracy"] == pytest.approx((curve[1][0] + curve[3][1] + curve[6][2]) / 3)


def test_rows_are_the_last_evaluations_before_a_stage_where_not_every_round_is_evaluated():
    scenario = by_tasks()
    watch = Rows()
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
    fitted = trainer(7, callbacks=[watch], check_val_every_n_epoch=3)
    fitted.fit(loop, datamodule=data_of(scenario))
    evaluated = [row for row in watch.rows if "global/acc_task/0" in row]
    assert len(evaluated) == 2
    # After rounds 2 and 5 the clients were in stages 1 and 2.
    assert len(loop._run.tasks.table.rows().table) == 2


def test_who_did_not_take_part_has_not_trained_on_a_task():
    schedule = [[0], [0], [0], [1]]
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 4, toy_data(SIZES, scenario=by_tasks(), schedule=schedule))
    rows = loop._run.tasks.table.rows()
    assert rows.first.tolist() == [0, 1, -1]


def test_a_table_is_its_state():
    table = TaskTable()
    table.pending = {1}
    table.take([0.1, 0.2], 0, begins_row=False)
    table.pending = {0}
    again = TaskTable.of(table.state())
    for each in (table, again):
        each.take([0.3, 0.4], 3, begins_row=True)
    assert again.state() == table.state()
    assert again.trained == [[1], [0]]


def test_a_task_that_is_trained_on_again_was_learned_in_its_first_row():
    table = TaskTable()
    for round_idx, (tasks, accuracies) in enumerate([({0}, [0.5, 0.0]), ({1}, [0.25, 0.75]), ({0}, [0.875, 0.5])]):
        table.pending = tasks
        table.take(accuracies, round_idx, begins_row=True)
    assert table.measures()["learning_accuracy"] == (0.5 + 0.75) / 2


def test_the_weight_of_a_client_is_the_number_of_its_samples_in_the_round():
    data = data_of(by_tasks(), cohort_size=4)
    data.setup("fit")
    seen = {}

    class Watch(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            seen[loop.current_epoch, update.client_id] = (update.num_samples, loop.server.size(update.client_id))

    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 6, data_of(by_tasks(), cohort_size=4), callbacks=[Watch()])
    assert len(seen) == 24
    for (round_idx, client_id), sizes in seen.items():
        assert sizes == (data.size(client_id, round_idx),) * 2


def test_monitors_measure_a_client_on_its_samples_of_the_round(tmp_path):
    """A client that learns one class answers it, and is not asked for the classes of other rounds."""
    table = ClientTable(dirpath=tmp_path)
    data = toy_data((30, 30), scenario=by_tasks())
    fit(FedAvg(net=Perceptron, optimizer=sgd(0.3)), 6, data, callbacks=[table], local_epochs=20)
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    names = lines[0].split(",")
    for line in lines[1:]:
        row = dict(zip(names, line.split(","), strict=True))
        assert int(row["samples"]) == data.size(int(row["client"]), int(row["round"]))
        if row.get("loss_after"):
            assert float(row["loss_after"]) < 0.3


def test_without_a_scenario_no_task_is_kept():
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1)
    assert loop._run.tasks is None


class Gap(Scenario):
    """Nobody has samples in rounds 2 and 4."""

    def stage(self, client_id, round_idx):
        return min(round_idx, 5)

    def keeps(self, client_id, stage):
        return [False] * SIZES[client_id] if stage in (2, 4) else None


@pytest.mark.parametrize(
    ("cohort_size", "advice"),
    [(3, "raise data.participation or data.cohort_size, change the scenario"), (len(SIZES), "change the scenario")],
)
def test_a_round_in_which_nobody_has_samples_is_named_before_any_trains(cohort_size, advice):
    changing = data_of(Gap(), cohort_size=cohort_size)
    with pytest.raises(ValueError, match=f"in round 2 none of the cohort has any; {advice}, or lower"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 4, changing)
    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data_of(Gap()))


def test_where_devices_lose_nobody_such_a_round_is_refused_too():
    changing = data_of(Gap(), devices=Devices(step_seconds=0.1))
    with pytest.raises(ValueError, match="in round 2 none of the cohort has any; raise"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 4, changing)


class Stop(pl.Callback):
    """The weights after each round, of a run that ends after some rounds."""

    def __init__(self, rounds):
        self.rounds = rounds
        self.weights = []

    def on_train_epoch_end(self, trainer, loop):
        self.weights.append(weights_of(loop))
        trainer.should_stop = len(self.weights) == self.rounds


def test_a_round_beyond_those_that_are_looked_at_leaves_the_model_and_is_told_once(monkeypatch):
    monkeypatch.setattr(scenario_checks, "MOST_ROUNDS", 2)
    watch = Stop(6)
    loop = FederatedLoop(SCAFFOLD(net=BatchNormNet, optimizer=sgd()))
    with pytest.warns(UserWarning, match="no client of round 2 has samples: this round") as told:
        trainer(-1, callbacks=[watch]).fit(loop, datamodule=data_of(Gap()))
    assert len([warning for warning in told if "no client of round" in str(warning.message)]) == 1
    assert equal(watch.weights[2], watch.weights[1])
    assert not equal(watch.weights[3], watch.weights[2])
    assert equal(watch.weights[4], watch.weights[3])


class OnlyTheLast(Scenario):
    """Only the last client has samples from round `since` on."""

    def __init__(self, since):
        self.since = since

    def begin(self, data):
        self.sizes = [len(part) for part in data.parts]

    def stage(self, client_id, round_idx):
        return int(round_idx >= self.since)

    def keeps(self, client_id, stage):
        return [not stage or client_id == len(self.sizes) - 1] * self.sizes[client_id]


PACINGS = {
    "FedAsync": FedAsync,
    "FedBuff": lambda: FedBuff(buffer=2),
    "over_selection": lambda: Rounds(over_selection=0.5),
}


@pytest.mark.parametrize("kind", PACINGS)
def test_rounds_in_which_all_who_come_back_have_no_samples_are_foretold_and_leave_the_model(kind):
    devices = Devices(step_seconds=0.1, latency=0.05)
    watch = Stop(10)
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), pacing=PACINGS[kind]())
    changing = data_of(OnlyTheLast(2), cohort_size=2, devices=devices)
    with pytest.warns(UserWarning, match="no client that comes back has samples in") as told:
        trainer(10, callbacks=[watch]).fit(loop, datamodule=changing)
    pace = loop._run.pace
    empty = []
    for round_idx in range(10):
        jobs = [pace.job(client_id, round_idx) for client_id in pace.cohort(round_idx)]
        if not any(changing.size(job.client_id, job.version) for job in jobs):
            empty.append(round_idx)
    assert 0 < len(empty) < 10
    said = [str(warning.message) for warning in told if "samples" in str(warning.message)]
    assert [text.partition(":")[0] for text in said] == [
        f"no client that comes back has samples in {len(empty)} of 10 rounds, the first of which is round {empty[0]}"
    ]
    kept = [r for r in range(1, 10) if equal(watch.weights[r], watch.weights[r - 1])]
    assert kept == empty


def test_a_round_in_which_nobody_comes_back_is_none_of_clients_without_samples():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
    losing = data_of(OnlyTheLast(99), cohort_size=1, devices=Devices(step_seconds=0.1, dropout=0.5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(8).fit(loop, datamodule=losing)
    assert any(not loop._run.pace.cohort(round_idx) for round_idx in range(8))
    assert not any("has samples" in str(warning.message) for warning in told)


def test_a_run_in_which_nobody_who_comes_back_ever_has_samples_is_refused():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), pacing=FedAsync())
    never = toy_data((14, 9, 12, 0), scenario=OnlyTheLast(0), devices=Devices(step_seconds=0.1))
    with pytest.raises(ValueError, match=r"must leave clients that come back samples, and in 5 rounds none of them"):
        trainer(5).fit(loop, datamodule=never)


def test_another_scenario_or_file_is_another_run(tmp_path):
    def run(scenario, rounds, ckpt_path=None):
        loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
        fitted = trainer(rounds)
        fitted.fit(loop, datamodule=data_of(scenario), ckpt_path=ckpt_path)
        return fitted

    path = tmp_path / "run.ckpt"
    run(by_tasks(), 1).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"data\.scenario"):
        run(ClassIncremental(TASKS, rounds_per_task=3), 2, path)
    with pytest.raises(ValueError, match=r"data\.scenario"):
        run(by_tasks(blur=0.5), 2, path)
    file = tmp_path / "rounds.csv"
    lines = [f"{sample},0," for sample in range(sum(SIZES))]
    file.write_text("\n".join(["sample,first,last", *lines]))
    run(ListedSamples(file), 1).save_checkpoint(path)
    moved = tmp_path / "moved.csv"
    moved.write_text(file.read_text())
    run(ListedSamples(moved), 2, path)
    file.write_text("\n".join(["sample,first,last", *lines[:-1]]))
    with pytest.raises(ValueError, match=r"data\.scenario"):
        run(ListedSamples(file), 2, path)
    # The first rounds, of whose samples there is a digest, are the same.
    file.write_text("\n".join(["sample,first,last", *lines[:-1], f"{lines[-1]}150"]))
    with pytest.raises(ValueError, match=r"data\.scenario\.content"):
        run(ListedSamples(file), 2, path)


def test_another_answer_of_a_scenario_of_ones_own_is_another_run(tmp_path):
    def of(present, name="all"):
        class Own(Scenario):
            tasks = (Task(name),)

            def stage(self, client_id, round_idx):
                return 0

            def keeps(self, client_id, stage):
                return [index < present for index in range(SIZES[client_id])]

        return data_of(Own())

    def loop():
        return FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))

    first = trainer(1)
    first.fit(loop(), datamodule=of(7))
    first.save_checkpoint(tmp_path / "run.ckpt")
    trainer(2).fit(loop(), datamodule=of(7), ckpt_path=tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"data\.scenario\.samples"):
        trainer(2).fit(loop(), datamodule=of(8), ckpt_path=tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"data\.scenario\.samples"):
        trainer(2).fit(loop(), datamodule=of(7, name="other"), ckpt_path=tmp_path / "run.ckpt")


def test_a_private_run_is_refused():
    rule = DPFedAvg(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"data\.scenario changes which samples a client has"):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, toy_data(SIZES, scenario=by_tasks()), aggregator=rule)


def test_fednova_and_lwf_train_on_changing_sizes():
    for kind, settings in ((FedLwF, {}), (FedAvg, {"aggregator": FedNovaAggregator()})):
        loop = fit(kind(net=BatchNormNet, optimizer=sgd()), 6, data_of(by_tasks(delay=1)), **settings)
        assert all(value.isfinite().all() for value in weights_of(loop).values())


def test_a_client_that_begins_late_has_no_forward_transfer_of_what_others_have_trained():
    schedule = [[0], [0], [1], [1], [1], [1]]
    data = toy_data(SIZES, scenario=by_tasks(), schedule=schedule)
    loop = fit(FedAvg(net=Perceptron, optimizer=sgd()), 6, data, evaluate_clients_every=1)
    assert loop.tasks.of_clients[1].trained == [[], [1], [2]]
    row = loop.round_metrics
    assert "global/forward_transfer" in row
    assert "local/acc_tasks" in row
    assert "local/forward_transfer" not in row
    # Client 0 trains in the stage of task 0, and client 1 in those of tasks 1 and 2. The others never train.
    one, other = (loop.tasks.of_clients[client].accuracies for client in (0, 1))
    assert row["local/learning_accuracy"] == pytest.approx((one[0][0] + (other[1][1] + other[2][2]) / 2) / 2)
    assert not any("forward_transfer" in line.measures for line in saved_tasks(loop.tasks).of("clients"))
