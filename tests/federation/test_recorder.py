"""The recorder: what is logged is reduced as it was asked for, and the history is the table of all rounds."""

import csv
import math
import random

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedLoop
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.federation.recorder import Recorder
from fl_lightning.functional.forgetting import forgetting
from fl_lightning.methods import FedAvg
from fl_lightning.metrics.history import History
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.types import RoundOutcome
from tests.toys import BatchNormNet, fit, sgd, toy_data, trainer

KINDS = ("mean", "sum", "max", "min")


def reduced(recorder, root=None):
    """The values of one process."""
    root = root or torch.nn.Module()
    return recorder.logged.reduce([recorder.logged.drain()[1]], [recorder.logged.metric_paths(root)], root)


def values(n=40, seed=0):
    """(value, weight) pairs whose float sum depends on the order."""
    draw = random.Random(seed)
    return [(draw.uniform(-1, 1) * 10 ** draw.randint(-8, 8), draw.randint(1, 9)) for _ in range(n)]


# --- what is logged


def test_a_value_is_reduced_as_it_was_asked_for():
    recorder = Recorder()
    pairs = values()
    for value, weight in pairs:
        for kind in KINDS:
            recorder.log(kind, torch.tensor(value, dtype=torch.float64) if weight % 2 else value, weight, kind)
    numbers = [value for value, _ in pairs]
    mean = math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
    assert reduced(recorder) == {"mean": mean, "sum": math.fsum(numbers), "max": max(numbers), "min": min(numbers)}
    assert reduced(recorder) == {}  # a round's values are its own


def test_neither_the_order_of_clients_nor_their_processes_can_be_seen():
    pairs = values()

    def logged(some):
        recorder = Recorder()
        for value, weight in some:
            of_client = MetricAccumulator()
            for kind in KINDS:
                of_client.log(kind, value, weight, kind)
            recorder.logged.absorb(of_client)
        return recorder.logged.drain()[1]

    recorder = Recorder()
    root = torch.nn.Module()
    whole = recorder.logged.reduce([logged(pairs)], [{}], root)
    assert recorder.logged.reduce([logged(pairs[::-1])], [{}], root) == whole
    assert recorder.logged.reduce([logged(pairs[k::3]) for k in range(3)], [{}] * 3, root) == whole


def test_tensors_cross_to_the_host_with_the_flags_of_the_round():
    recorder = Recorder()
    recorder.log("a", torch.tensor([2.0]))
    host, rows = recorder.logged.drain([torch.tensor(7.0), torch.tensor(float("nan"), dtype=torch.float64)])
    assert host[0] == 7
    assert math.isnan(host[1])
    assert rows == {"a": ("mean", [(2.0, 1.0)])}


def test_a_metric_object_is_computed_once_and_reset_where_it_was_not_logged_too():
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.level = MeanMetric()
    root.inner.level.update(torch.tensor([1.0, 2.0, 6.0]))
    logging = Recorder()
    silent = Recorder()
    logging.log("level", root.inner.level)
    paths = logging.logged.metric_paths(root)
    assert paths == {"level": "inner.level"}
    assert silent.logged.reduce([{}, {}], [{}, paths], root) == {"level": 3.0}
    assert root.inner.level.update_count == 0


def test_a_round_that_failed_leaves_nothing():
    metric = MeanMetric()
    recorder = Recorder()
    metric.update(1.0)
    recorder.log("a", 1.0)
    recorder.log("b", metric)
    recorder.end_training(3, {"old": 1.0})
    recorder.discard_round()
    assert metric.update_count == 0
    assert (recorder.round_metrics, recorder.take_pending(), reduced(recorder)) == ({}, None, {})


def test_what_a_client_that_is_left_out_has_counted_does_not_reach_the_next_round():
    root = torch.nn.Module()
    root.level = MeanMetric()
    recorder = Recorder(root=root)
    for round_idx, failed in enumerate([{0: "gone"}, {}]):
        if round_idx == 0:
            root.level.update(2.0)
            recorder.log("level", root.level)
            recorder.logged.end_client(0, root)
        outcome = RoundOutcome(round_idx, [0], before={}, failed=failed)
        recorder.read([])
        assert recorder.reduce(outcome, [recorder.share()]) == {}


@pytest.mark.parametrize(
    ("value", "settings", "sentence"),
    [
        (torch.ones(2), {}, r"self.log\('a'\) takes one number, got a tensor of shape \(2,\)"),
        ("high", {}, "takes a number, a tensor or a metric, got str"),
        (1.0, {"reduce": "median"}, "reduce_fx must be mean, sum, max or min, got 'median'"),
    ],
)
def test_what_is_no_value_is_refused(value, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recorder().log("a", value, **settings)


# --- the history


def check(history, rows):
    """The history against a dictionary of rows."""
    assert history.rounds == sorted(rows)
    assert len(history) == len(rows)
    for name in history.names:
        known = {r: row[name] for r, row in sorted(rows.items()) if name in row}
        assert history.curve(name) == known
        column = history.table[:, history.names.index(name)]
        assert column.isnan().tolist() == [name not in rows[r] for r in history.rounds]


def test_the_history_is_a_dictionary_of_rows():
    draw = random.Random(0)
    history = History()
    rows = {}
    for step in range(300):
        if draw.random() < 0.05:
            first = draw.randrange(step + 1)
            history.drop(first)
            rows = {r: row for r, row in rows.items() if r < first}
        last = max(rows, default=-1)
        round_idx = draw.choice([last + 1, last + 2, max(last, 0), draw.randrange(last + 2)])
        row = {f"k{k}": draw.random() for k in range(40) if draw.random() < 0.3}
        history.record(round_idx, row)
        rows = {**{r: old for r, old in rows.items() if r < round_idx}, round_idx: row}
        check(history, rows)
    assert history.curve("unknown") == {}


def test_columns_are_those_with_a_part_in_their_name_over_the_rounds_that_have_one():
    history = History()
    history.record(0, {"loss": 3.0, "global/acc_class/a": 0.5})
    history.record(1, {"loss": 2.0})
    history.record(2, {"global/acc_class/a": 0.75, "global/acc_class/b/c": 0.25})
    rounds, names, table = history.columns("/acc_class/")
    assert (rounds, names) == ([0, 2], ["a", "b/c"])
    assert torch.equal(table.nan_to_num(-1), torch.tensor([[0.5, -1], [0.75, 0.25]], dtype=torch.float64))
    assert history.columns("/nothing/")[:2] == ([], [])


def test_what_was_dropped_does_not_come_back_with_a_key_of_later():
    history = History()
    history.record(0, {"a": 1.0, "b": 2.0})
    history.drop(0)
    history.record(0, {"a": 3.0})
    assert history.curve("b") == {}


def test_the_history_goes_on_from_the_rows_that_a_logger_has_kept():
    whole = Recorder()
    first = Recorder()
    resumed = Recorder()
    for recorder, rounds in ((whole, range(40)), (first, range(25))):
        for t in rounds:
            recorder.round_metrics = {"a": float(t), **({"late": 1.0} if t % 7 == 6 else {})}
            recorder.keep_round(t)
    resumed.load_state_dict(first.state_dict())
    kept = {t: {"a": float(t), **({"late": 1.0} if t % 7 == 6 else {})} for t in range(30)}
    resumed.restore(kept)
    resumed.go_back(25)
    for t in range(25, 40):
        resumed.round_metrics = {"a": float(t), **({"late": 1.0} if t % 7 == 6 else {})}
        resumed.keep_round(t)
    assert (resumed.history.names, resumed.history.rounds) == (whole.history.names, whole.history.rounds)
    assert torch.equal(resumed.history.table.nan_to_num(-1), whole.history.table.nan_to_num(-1))


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path):
    sizes = []
    for rounds in (2, 40):
        trained = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), rounds, toy_data())
        trained.trainer.save_checkpoint(tmp_path / "at.ckpt")
        sizes.append((tmp_path / "at.ckpt").stat().st_size)
    assert sizes[1] <= sizes[0] + 64


# --- forgetting


def test_forgetting_is_that_of_the_history():
    recorder = Recorder()
    table = torch.rand(12, 5, dtype=torch.float64)
    table[:, 3] = math.nan
    for t, row in enumerate(table):
        recorder.take_class_accuracy(row)
        recorder.end_evaluation(t)
        assert recorder.forgetting() == float(forgetting(table[: t + 1]))
    assert torch.equal(recorder.peak.nan_to_num(-1), table.amax(0).nan_to_num(-1))
    recorder.take_class_accuracy(None)
    recorder.end_evaluation(12)
    assert recorder.forgetting() is None


def test_forgetting_writes_nothing():
    recorder = Recorder()
    for t, row in enumerate([[0.9, 0.1], [0.5, 0.3]]):
        recorder.take_class_accuracy(torch.tensor(row, dtype=torch.float64))
        recorder.end_evaluation(t)
    before = recorder.state_dict()
    peak = recorder.peak.clone()
    assert recorder.forgetting() == recorder.forgetting() == pytest.approx(0.2)
    assert torch.equal(recorder.peak, peak)
    assert recorder.state_dict()["evaluated_rounds"] == before["evaluated_rounds"] == 2


class Save(pl.Callback):
    """After round 2."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, loop):
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(self.path)


def test_forgetting_of_a_run_is_that_of_its_history_after_a_resume_and_a_second_fit_too(tmp_path):
    def run(ckpt_path=None, loop=None, callbacks=None):
        client = FedAvg(net=BatchNormNet, optimizer=sgd(0.5))
        return fit(client, 6, toy_data(participation=0.4), ckpt_path, loop=loop, callbacks=callbacks)

    def check(loop):
        rounds, _, table = loop.recorder.history.columns("/acc_class/")
        assert rounds == list(range(6))
        found = loop.recorder.history.curve("global/forgetting")
        assert found == {t: float(forgetting(table[: t + 1])) for t in rounds}
        assert found[5] > 0

    whole = run(callbacks=[Save(tmp_path / "two.ckpt")])
    check(whole)
    resumed = run(tmp_path / "two.ckpt")  # without a logger that keeps rows the table begins anew
    later = {t: value for t, value in whole.recorder.history.curve("global/forgetting").items() if t >= 2}
    assert resumed.recorder.history.curve("global/forgetting") == later
    check(run(loop=whole))


# --- who writes


class Writes(pl.Callback):
    """Logs in every hook that a callback has for clients."""

    def on_client_start(self, trainer, loop, client_id):
        loop.log("own/started", client_id, reduce_fx="sum")

    def on_client_epoch_end(self, trainer, loop, client_id, epoch):
        loop.log("own/epochs", 1.0, reduce_fx="sum")

    def on_client_end(self, trainer, loop, update):
        loop.log("own/samples", float(update.num_samples), batch_size=update.num_samples)

    def on_exchange_end(self, trainer, loop, exchange):
        loop.log_dict({"own/exchanges": torch.ones(())}, reduce_fx="sum")


def test_what_callbacks_log_in_client_hooks_is_in_the_rounds_row(tmp_path):
    loop = FederatedLoop(FedAvg(net=BatchNormNet), local_epochs=2, seed=0)
    trainer(2, callbacks=[Writes()], logger=RoundCSVLogger(tmp_path)).fit(loop, datamodule=toy_data())
    sizes = (7, 12, 5, 9, 16)
    row = {name: value for name, value in loop.round_metrics.items() if name.startswith("own/")}
    mean = math.fsum(n * n for n in sizes) / sum(sizes)
    assert row == {"own/started": 10, "own/epochs": 10, "own/samples": mean, "own/exchanges": 1}
    assert loop.recorder.history.curve("own/samples") == {0: mean, 1: mean}
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{name: float(line[name]) for name in row} for line in table] == [row, row]


def test_directions_of_metric_objects_are_known_after_a_resume(tmp_path):
    """Metrics of clients are computed every second round only, and what they tell is part of a checkpoint."""

    class Odd(MulticlassAccuracy):
        higher_is_better = False

    def loop():
        metrics = {"odd": Odd(3)}
        client = FedAvg(net=BatchNormNet, optimizer=sgd())
        return FederatedLoop(client, seed=3, metrics=metrics, evaluate_clients_every=2)

    saved = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    whole = loop()
    trainer(2, callbacks=[saved], enable_checkpointing=True).fit(whole, datamodule=toy_data())
    assert whole.recorder.directions == {"local/odd": "min", "global/odd": "min"}
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(dict(pl_module.recorder.directions))

    for given in ({}, {"local/odd": "max"}):
        resumed = loop()
        resumed.recorder.directions |= given
        run = trainer(3, callbacks=[Look()])
        run.fit(resumed, datamodule=toy_data(), ckpt_path=tmp_path / "last.ckpt")
        assert seen.pop() == {**whole.recorder.directions, **given}
