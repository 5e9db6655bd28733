"""Metric objects of clients: each client counts anew, and the states are joined in the order of client ids."""

import inspect
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from fl_lightning import ClientModule, FaultPolicy, FederatedDataModule, FederatedLoop, methods, monitors
from fl_lightning.aggregation import MedianAggregator
from fl_lightning.client.metric_states import ClientMetric, fresh_metrics, joined_value, parts_that_count, states_of
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.methods import FedALA, FedAvg, FedCurv, Local, dp_sgd
from tests.toys import samples, trainer

REGRESSION = {
    "mae": torchmetrics.MeanAbsoluteError,
    "mean": torchmetrics.MeanMetric,
    "sum": torchmetrics.SumMetric,
    "largest": torchmetrics.MaxMetric,
    "least": torchmetrics.MinMetric,
    "cat": torchmetrics.CatMetric,
    "r2": torchmetrics.R2Score,
    "pearson": torchmetrics.PearsonCorrCoef,
    "spearman": torchmetrics.SpearmanCorrCoef,
    "difference": lambda: torchmetrics.MeanAbsoluteError() - torchmetrics.MeanSquaredError(),
    "smallest so far": lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanAbsoluteError()),
}


def updated(metric, preds, target):
    takes_one = isinstance(metric, torchmetrics.aggregation.BaseAggregator)
    metric.update(*([preds] if takes_one else [preds, target]))


def parts(sizes=(7, 1, 12, 4)):
    """Predictions and targets of some clients."""
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(size, generator=draw), torch.randn(size, generator=draw)) for size in sizes]


def value_of(metric):
    value = metric.compute()
    return value["raw"] if isinstance(value, dict) else value


@pytest.mark.parametrize("name", [name for name in REGRESSION if name not in ("cat", "smallest so far")])
def test_the_joined_value_is_that_of_all_samples(name):
    whole = REGRESSION[name]()
    counted = []
    for client_id, part in enumerate(parts()):
        updated(whole, *part)
        metric = REGRESSION[name]()
        updated(metric, *part)
        counted.append(ClientMetric(client_id, name="a", path="", states=states_of(metric)))
    expected = float(whole.compute())
    metric = REGRESSION[name]()
    assert joined_value(metric, counted) == pytest.approx(expected, rel=1e-5)
    assert joined_value(metric, counted[::-1]) == joined_value(metric, counted)  # the order of ids, not of processes
    assert metric.update_count == 0


@pytest.mark.parametrize("name", [name for name in REGRESSION if name not in ("cat", "smallest so far")])
def test_one_client_has_plain_lightnings_value(name):
    whole = REGRESSION[name]()
    for part in parts():
        updated(whole, *part)
    counted = ClientMetric(3, name="a", path="", states=states_of(whole))
    assert joined_value(REGRESSION[name](), [counted]) == float(whole.compute())


@pytest.mark.parametrize("name", REGRESSION)
def test_fresh_metrics_are_as_before_afterwards(name):
    """States may have a graph of gradients, which cannot be copied."""
    first, second, *_ = [(preds.requires_grad_(), target) for preds, target in parts((7, 9))]
    untouched = REGRESSION[name]()
    metric = REGRESSION[name]()
    for each in (untouched, metric):
        updated(each, *first)
    module = nn.ModuleDict({"metric": metric})
    with fresh_metrics(parts_that_count(module)):
        updated(metric, *second)
        alone = REGRESSION[name]()
        updated(alone, *second)
        assert torch.equal(value_of(metric), value_of(alone))
    for each in (untouched, metric):
        updated(each, *second)
    assert metric.update_count == untouched.update_count
    assert torch.equal(value_of(metric), value_of(untouched))


def test_a_collection_keeps_its_groups():
    def make():
        return MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)])

    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(9, 3, generator=draw), torch.randint(3, (9,), generator=draw)) for _ in range(4)]
    untouched = make()
    metrics = make()
    for each in (untouched, metrics):
        each.update(*batches[0])
    with fresh_metrics(parts_that_count(nn.ModuleDict({"all": metrics}))):
        metrics.update(*batches[1])
        alone = make()
        alone.update(*batches[1])
        assert metrics.compute() == alone.compute()
    for each in (untouched, metrics):
        each.update(*batches[2])
    assert metrics.compute() == untouched.compute()
    assert metrics.compute_groups == untouched.compute_groups


@pytest.mark.parametrize("registered", [False, True])
def test_what_a_client_has_counted_is_taken_once(registered):
    """An object outside of the module, which is not fresh for each client, is reset. Callbacks may look at others."""
    metric = torchmetrics.MeanMetric()
    root = nn.ModuleDict({"mean": metric} if registered else {})
    logged = MetricAccumulator()
    for client_id, value in enumerate((1.0, 5.0)):
        with fresh_metrics(parts_that_count(root)):
            metric.update(value)
            logged.log("mean", metric, weight=1)
            logged.end_client(client_id, root)
            assert metric.update_count == int(registered)
    assert metric.update_count == 0
    assert logged.metrics == {}
    assert logged.joined(logged.counted, root) == {"mean": 3.0}
    assert logged.counted == []


# --- in a federation ---


class Logging(pl.LightningModule):
    """Logs a metric object of float32 states, a collection and a list state in training and validation."""

    def __init__(self, graph=False, lr=0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.graph = graph
        self.mae = torchmetrics.MeanAbsoluteError()
        self.auroc = MulticlassAUROC(3)
        self.several = MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)], prefix="train/")
        self.val_acc = MulticlassAccuracy(3)
        self.best = torchmetrics.MaxMetric()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        counted = logits if self.graph else logits.detach()
        self.mae.update(counted[:, 0], y.float())
        self.auroc.update(counted, y)
        self.several.update(counted, y)
        self.log("train/mae", self.mae, on_step=False, on_epoch=True)
        self.log("train/auroc", self.auroc, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        self.val_acc.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.best.update(self.val_acc.compute())
        self.log("val/acc", self.val_acc)
        self.log("val/best", self.best.compute())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(22)), batch_size=8)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*samples(12, seed=1)), batch_size=8)

    test_dataloader = val_dataloader


def federate(client, rounds=2, clients=3, callbacks=(), proxy_size=0.0, **settings):
    data = FederatedDataModule.from_datamodule(Data(), num_clients=clients, proxy_size=proxy_size)
    loop = FederatedLoop(client, seed=3, **settings)
    run = trainer(rounds, callbacks=list(callbacks))
    run.fit(loop, datamodule=data)
    return loop


def test_one_client_logs_what_plain_lightning_logs():
    run = trainer(1)
    run.fit(Logging(lr=0.0), datamodule=Data())  # the client takes the samples in another order
    loop = federate(Logging(lr=0.0), rounds=1, clients=1)
    for key in ("train/mae", "train/auroc", "train/MulticlassF1Score", "train/MulticlassAccuracy"):
        assert loop.round_metrics[key] == pytest.approx(float(run.callback_metrics[key]), rel=1e-5), key


def test_a_metric_over_rounds_is_kept():
    module = Logging()
    values = []

    class Noted(pl.Callback):
        def on_validation_end(self, run, loop):
            values.append((loop.round_metrics["val/acc"], loop.round_metrics["val/best"]))

    federate(module, rounds=4, callbacks=[Noted()])
    assert [best for _, best in values] == [max(acc for acc, _ in values[: i + 1]) for i in range(4)]
    assert module.best.update_count == 4


def test_what_a_client_counts_ends_with_it():
    seen = []

    class Unlogged(Logging):
        def training_step(self, batch, batch_idx):
            seen.append((batch_idx, self.mae.update_count))
            self.mae.update(self.net(batch[0])[:, 0].detach(), batch[1].float())
            return F.cross_entropy(self.net(batch[0]), batch[1])

    federate(Unlogged())
    assert all(count == batch_idx for batch_idx, count in seen)


METHODS = {
    name: kind
    for name in dir(methods)
    if inspect.isclass(kind := getattr(methods, name)) and issubclass(kind, ClientModule) and not kind.needs
}
"""Methods around any module."""
METHODS["FedBABU"] = partial(methods.FedBABU, head="module.net.bias")  # which must be told a part of the module


@pytest.mark.parametrize("method", METHODS)
def test_states_with_a_graph_do_not_end_a_method(method):
    loop = federate(METHODS[method](module=Logging(graph=True)), proxy_size=0.2)
    assert "train/mae" in loop.round_metrics


MONITORS = {
    name: kind
    for name in dir(monitors)
    if inspect.isclass(kind := getattr(monitors, name))
    and issubclass(kind, monitors.Monitor)
    and kind is not monitors.Monitor
}
SETTINGS = {
    "ClassCount": {"class_idx": 0},
    "SampleReduction": {"class_idx": 0},
    "NeuronActivations": {"layer": "module.net"},
    "FeatureProbe": {"layer": "module.net"},
    "GroupMetrics": {"groups": {"first": [0]}, "metrics": {"f1": MulticlassF1Score(3)}},
}
"""Settings of the monitors that need some."""


@pytest.mark.parametrize("name", MONITORS)
def test_states_with_a_graph_do_not_end_a_monitor(name, tmp_path):
    monitor = MONITORS[name](**SETTINGS.get(name, {}))
    data = FederatedDataModule.from_datamodule(Data(), num_clients=3, transfer_size=4)
    loop = FederatedLoop(Logging(graph=True), seed=3)
    run = trainer(1, tmp_path, callbacks=[monitor])
    run.fit(loop, datamodule=data)
    assert "train/mae" in loop.round_metrics


@pytest.mark.parametrize("repeats", [False, True])
def test_a_client_that_is_left_out_has_counted_nothing(repeats):
    def run(failures, cohort):
        class Failing(Logging):
            def on_train_epoch_end(self):
                if failures:
                    failures.pop()
                    raise RuntimeError("no more")

        data = FederatedDataModule.from_datamodule(Data(), num_clients=3, schedule=[cohort])
        # A rule that needs the cohort as it is repeats a round from which a client was left out.
        rule = MedianAggregator() if repeats else None
        loop = FederatedLoop(Failing(), rule, seed=3, faults=FaultPolicy(on_error="skip"))
        trainer(1).fit(loop, datamodule=data)
        return loop.round_metrics

    failed = run([1, 1] if repeats else [1], [0, 1, 2])
    remaining = [2] if repeats else [1, 2]
    without = run([], remaining)
    for key in ("train/mae", "train/auroc", "train/MulticlassF1Score"):
        assert failed[key] == without[key], key


class LogsInSteps(Logging):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("kind", [Logging, LogsInSteps])
def test_local_logs_no_values_of_a_model_that_does_not_exist(kind):
    loop = federate(Local(module=kind()))
    assert not [key for key in loop.round_metrics if key.startswith(("val/", "global/"))]


@dataclass
class Record:
    mae: torchmetrics.Metric


class Tracker:
    """A helper that is no module."""

    def __init__(self, metric):
        self.of_stages = {"train": [metric]}


class Slots:
    __slots__ = ("mae", "unset")

    def __init__(self, metric):
        self.mae = metric


HOLDERS = {
    "list": (lambda metric: [metric], lambda held: held[0]),
    "tuple": (lambda metric: (metric,), lambda held: held[0]),
    "dict": (lambda metric: {"mae": metric}, lambda held: held["mae"]),
    "ModuleDict": (lambda metric: nn.ModuleDict({"mae": metric}), lambda held: held["mae"]),
    "ModuleList": (lambda metric: nn.ModuleList([metric]), lambda held: held[0]),
    "dicts of stages": (lambda metric: {"train": {"mae": metric}, "val": {}}, lambda held: held["train"]["mae"]),
    "list of dicts": (lambda metric: [{"lr": 0.1}, {"mae": (metric,)}], lambda held: held[1]["mae"][0]),
    "collection in a list": (lambda metric: [MetricCollection({"mae": metric})], lambda held: held[0]["mae"]),
    "set": (lambda metric: {metric}, lambda held: next(iter(held))),
    "user's dict": (lambda metric: UserDict(mae=metric), lambda held: held["mae"]),
    "namespace": (lambda metric: SimpleNamespace(mae=metric), lambda held: held.mae),
    "dataclass": (Record, lambda held: held.mae),
    "slots": (Slots, lambda held: held.mae),
    "helper": (Tracker, lambda held: held.of_stages["train"][0]),
}
"""How a module may keep a metric object, and how it finds it there."""


class Held(pl.LightningModule):
    """Keeps its metric object in a list, a dict or an object, of which torch may know nothing.

    Args:
        holder: Name of the kind of holder.
    """

    def __init__(self, holder):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        make, self.find = HOLDERS[holder]
        self.metrics = make(torchmetrics.MeanAbsoluteError())
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        metric = self.find(self.metrics)
        self.seen.append((batch_idx, metric.update_count))
        metric.update(logits[:, 0], y.float())
        self.log("train/mae", metric)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def holders_and_settings():
    """All holders of clients at once, and a few of each kind with other settings."""
    for holder in HOLDERS:
        yield pytest.param(holder, {})
        marks = () if holder in ("list", "ModuleDict", "dataclass", "collection in a list") else pytest.mark.slow
        for settings in ({"chunk": 3}, {"method": FedALA}, {"method": FedCurv}):
            yield pytest.param(holder, settings, marks=marks)


@pytest.mark.parametrize(("holder", "settings"), list(holders_and_settings()))
def test_a_metric_object_counts_wherever_a_module_keeps_it(holder, settings):
    def run(kept_in):
        module = Held(kept_in)
        rest = dict(settings)
        client = rest.pop("method", FedAvg)(module=module)
        return federate(client, **rest), module.seen

    loop, seen = run(holder)
    expected, seen_of_part = run("ModuleDict")
    assert loop.round_metrics == expected.round_metrics
    assert seen == seen_of_part


@pytest.mark.parametrize("holder", HOLDERS)
def test_dp_sgd_refuses_a_metric_object_wherever_a_module_keeps_it(holder):
    with pytest.raises(ValueError, match=r"'module\.metrics\.[\w.]+' is a metric object"):
        federate(dp_sgd(Held(holder), noise_multiplier=1.0))
