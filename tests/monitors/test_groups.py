"""Metrics of the global model on groups of clients are those of their test samples taken together."""

import copy
import csv

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedEXPAggregator
from fl_lightning.monitors import GroupMetrics
from tests.callbacks.toy import Regression, data, trainer
from tests.federation.test_clients_by_own_steps import QUIET, LogsMetrics, regression_data
from tests.toys import BatchNormNet, sgd, toy_data
from tests.toys import trainer as quiet_trainer

GROUPS = {"north": [0, 2], "south": [3], "all": [0, 1, 2, 3]}


class Line(Regression):
    def forward(self, x):
        return self.net(x)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fitted(tmp_path, groups=GROUPS, metrics=None, of_loop=None, rounds=2):
    loop = FederatedLoop(Line(), metrics=of_loop)
    divided = data(classes=False)
    watch = GroupMetrics(groups, metrics, dirpath=tmp_path)
    trainer([watch], rounds=rounds).fit(loop, datamodule=divided)
    return loop, divided


def test_each_group_has_its_own_values(tmp_path, capsys):
    own = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()})
    loop, divided = fitted(tmp_path, metrics=own)
    table = rows(tmp_path / "groups.csv")
    assert [(row["round"], row["group"]) for row in table] == [(str(r), name) for r in range(2) for name in GROUPS]
    x, y = divided.split("test").all()
    for row in table[3:]:
        chosen = torch.cat([divided.client_indices("test", client) for client in GROUPS[row["group"]]])
        with torch.no_grad():
            residual = (loop.client.module(x[chosen]) - y[chosen]).double()
        assert float(row["samples"]) == len(chosen)
        assert float(row["mae"]) == pytest.approx(float(residual.abs().mean()), rel=1e-5)
        assert float(row["mse"]) == pytest.approx(float(residual.square().mean()), rel=1e-5)
        assert loop.round_metrics[f"global/mse/{row['group']}"] == float(row["mse"])
    assert "Groups of clients" in capsys.readouterr().out


def test_the_metrics_are_those_of_the_loop_where_none_are_given(tmp_path):
    loop, _ = fitted(tmp_path, of_loop={"mae": MeanAbsoluteError()}, rounds=1)
    assert loop.round_metrics.keys() >= {"global/mae", "global/mae/north", "global/mae/south"}


def test_the_weights_are_those_that_are_evaluated():
    """FedEXP's mean of the last two rounds; the next round begins from the last one's."""
    after = []

    class Weights(Callback):
        def on_train_batch_end(self, trainer, loop, *_):
            after.append(copy.deepcopy(loop.client.module.net.state_dict()))

    loop = FederatedLoop(Line(), FedEXPAggregator(), seed=0)
    divided = data(classes=False)
    trainer([GroupMetrics(GROUPS, {"mae": MeanAbsoluteError()}), Weights()], rounds=2).fit(loop, datamodule=divided)
    weight, bias = (after[0][name] / 2 + after[1][name] / 2 for name in ("weight", "bias"))
    x, y = divided.split("test").all()
    for name, clients in GROUPS.items():
        chosen = torch.cat([divided.client_indices("test", client) for client in clients])
        wanted = float((x[chosen] @ weight.T + bias - y[chosen]).abs().mean())
        assert loop.round_metrics[f"global/mae/{name}"] == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(loop.client.module.net.weight, after[1]["weight"])


@pytest.mark.parametrize(
    ("groups", "metrics", "words"),
    [
        ({"a": [4]}, MeanSquaredError(), r"name some in \[0, 4\), got \[4\] for 'a'"),
        ({"a": []}, MeanSquaredError(), r"got \[\] for 'a'"),
    ],
)
def test_what_cannot_be_measured_is_refused(groups, metrics, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        fitted(tmp_path, groups, metrics)


def test_a_net_without_metrics_is_refused(tmp_path):
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    run = quiet_trainer(1, callbacks=[GroupMetrics({"a": [1]}, dirpath=tmp_path)])
    with pytest.raises(
        ValueError, match="needs metrics or a module with a validation_step, got none; give it metrics="
    ):
        run.fit(loop, datamodule=toy_data())


def test_a_group_without_test_samples_has_empty_cells(tmp_path, capsys, monkeypatch):
    evaluate = GroupMetrics._evaluated
    none = {"samples": 0.0}
    monkeypatch.setattr(GroupMetrics, "_evaluated", lambda *of: none if of[-1] == [3] else evaluate(*of))
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    groups = {"nobody": [3], "all": [0, 1, 2, 3]}
    metrics = {"accuracy": MulticlassAccuracy(3)}
    run = quiet_trainer(1, callbacks=[GroupMetrics(groups, metrics, dirpath=tmp_path)])
    run.fit(loop, datamodule=toy_data((8, 12, 5, 9)))
    assert "global/accuracy/nobody" not in loop.round_metrics
    assert "global/accuracy/all" in loop.round_metrics
    lines = (tmp_path / "groups.csv").read_text().splitlines()
    assert lines[0] == "round,group,samples,accuracy"
    assert lines[1] == "0,nobody,0.0,"
    assert "accuracy" in capsys.readouterr().out


def test_without_metrics_a_group_has_the_values_of_the_modules_own_step(tmp_path):
    loop = FederatedLoop(FedAvg(module=LogsMetrics()), seed=1)
    groups = GroupMetrics({"two": [0, 2], "one": [1]}, dirpath=tmp_path)
    Trainer(max_epochs=1, callbacks=[groups], **QUIET).fit(loop, datamodule=regression_data())
    dealt = loop.data
    for name, clients in groups.groups.items():
        batches = [batch for k in clients for batch in dealt.view(k, 0).batches("test", batch_size=2)]
        loader = DataLoader(batches, batch_size=None)
        (expected,) = Trainer(**QUIET).validate(copy.deepcopy(loop.client.module), loader, verbose=False)
        found = {key: loop.round_metrics[f"global/{key}/{name}"] for key in expected}
        assert found == pytest.approx(expected, rel=1e-6)
