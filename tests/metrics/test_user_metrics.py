"""`model.metrics`: the user's torchmetrics objects on the global model and on every client's."""

import base64

import numpy as np
import pytest
import torch
from torchmetrics import ClasswiseWrapper, MeanAbsoluteError, MetricCollection
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
    MulticlassROC,
)

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import RunPlots
from fl_lightning.methods import FedAvg, Local
from fl_lightning.metrics import ClasswiseAccuracy, InLocalAccuracy
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.callbacks import toy
from tests.commands import TINY, say
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of


def run(metrics, rounds=2, data=None, client=None, **settings):
    client = client or FedAvg(net=BatchNormNet, optimizer=sgd())
    return fit(client, rounds, data=data, metrics=metrics, **settings)


def by_hand(loop, metric, split="test"):
    """The metric of the global model over a split, without the loop."""
    x, y = loop.data.split(split).all()
    with torch.no_grad(), loop.client.evaluation_mode():
        metric.update(loop.client(x), y)
    return metric.compute()


@pytest.mark.parametrize("as_given", [dict, MetricCollection, lambda found: found["f1"]])
def test_a_metric_is_that_of_torchmetrics_over_the_whole_split(as_given):
    loop = run(as_given({"f1": MulticlassF1Score(3)}), data=toy_data(eval_batch_size=7))
    name = "global/f1" if "global/f1" in loop.round_metrics else "global/MulticlassF1Score"
    assert loop.round_metrics[name] == pytest.approx(float(by_hand(loop, MulticlassF1Score(3))), abs=1e-6)
    assert loop.trainer.callback_metrics[name] == pytest.approx(loop.round_metrics[name])


@pytest.mark.parametrize(
    "settings",
    [{}, {"client": Local(net=BatchNormNet, optimizer=sgd()), "evaluate_clients_every": 1}],
    ids=["global model", "clients"],
)
def test_a_metric_that_does_not_take_the_predictions_is_named(settings):
    metrics = {"recall": MulticlassRecall(3), "f1": MulticlassF1Score(3), "mae": MeanAbsoluteError()}
    said = r"the metric 'mae' must take predictions of shape \(\d+, 3\) and targets of shape \(\d+,\), got RuntimeError"
    with pytest.raises(ValueError, match=said):
        run(metrics, **settings)


def test_vectors_dicts_and_wrappers_are_named():
    names = ["a", "b", "c"]
    metrics = {
        "recall": MulticlassRecall(3, average=None),
        "in": InLocalAccuracy(torch.tensor([[1, 0, 0], [0, 1, 1]])),
        "own": ClasswiseWrapper(ClasswiseAccuracy(3), labels=names, prefix="own/"),
    }
    row = run(metrics).round_metrics
    for c in range(3):
        accuracy = row[f"global/acc_class/{c:02d}"]
        assert row[f"global/recall/{c:02d}"] == pytest.approx(accuracy)
        assert row[f"global/own/{names[c]}"] == accuracy
    assert row["global/in/0"] == row["global/acc_class/00"]
    assert row["global/in/1"] == pytest.approx((row["global/acc_class/01"] + row["global/acc_class/02"]) / 2)


def test_the_servers_validation_split_and_test_have_them_too():
    data = toy_data(val_fraction=0.3, partition=None)
    loop = run({"f1": MulticlassF1Score(3)}, data=data)
    assert loop.round_metrics["val/f1"] == pytest.approx(float(by_hand(loop, MulticlassF1Score(3), "val")), abs=1e-6)
    assert "global/f1" not in loop.round_metrics
    again = trainer(1)
    again.test(loop, datamodule=data, verbose=False)
    expected = float(by_hand(loop, MulticlassF1Score(3)))
    assert float(again.callback_metrics["test/f1"]) == pytest.approx(expected, abs=1e-6)


def test_the_clients_own_models_are_evaluated_where_alma_is():
    recall = MulticlassRecall(3, average="micro")  # the accuracy
    row = run({"recall": recall}, client=Local(net=BatchNormNet, optimizer=sgd())).round_metrics
    assert row["local/recall"] == pytest.approx(row["local/alma"])
    assert "global/recall" not in row
    row = run({"recall": recall}, evaluate_clients_every=2).round_metrics
    assert row["local/recall"] == pytest.approx(row["local/alma"])
    assert "global/recall" in row


def test_a_users_module_is_measured_by_its_predictions():
    data = toy.data(classes=False)
    module = toy.Regression()
    module.forward = module.net.forward
    loop = fit(FedAvg(module=module), 2, data=data, metrics={"mae": MeanAbsoluteError()})
    x, y = data.split("test").all()
    expected = (module.net(x) - y).abs().mean().item()
    assert loop.round_metrics["global/mae"] == pytest.approx(expected, rel=1e-5)
    assert loop.round_metrics["val_loss"] > 0


def test_metrics_leave_the_weights_and_the_checkpoint_alone(tmp_path):
    plain = run(None)
    measured = run({"f1": MulticlassF1Score(3)}, evaluate_clients_every=1)
    assert equal(weights_of(plain), weights_of(measured))
    measured.trainer.save_checkpoint(tmp_path / "at.ckpt")
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    trainer(3).fit(loop, datamodule=toy_data(), ckpt_path=tmp_path / "at.ckpt")  # goes on without them
    assert equal(weights_of(loop), weights_of(run(None, rounds=3)))


def test_what_cannot_stand_in_a_row_is_refused():
    with pytest.raises(
        ValueError, match=r"model\.metrics must not be named acc, loss, acc_class, forgetting, got 'acc'"
    ):
        FederatedLoop(FedAvg(), metrics={"acc": MulticlassF1Score(3)})


def test_names_of_one_file_are_refused():
    for other in ("a_b", "A b"):
        with pytest.raises(ValueError, match=r"names of metrics must differ as names of files, got '[aA][ _]b' and"):
            FederatedLoop(FedAvg(), metrics={"a b": MulticlassF1Score(3), other: MulticlassRecall(3)})


ARRAYS = {
    "matrix": MulticlassConfusionMatrix(3),
    "roc": MulticlassROC(3, thresholds=None),
    "curve": MulticlassPrecisionRecallCurve(3, thresholds=5),
}
"""Metrics whose values have no place in a row."""


def test_matrices_and_curves_stand_in_files_beside_the_row_and_draw_themselves(tmp_path):
    recall = {"recall": MulticlassRecall(3, average="micro")}
    callbacks = [RunPlots(tmp_path)]
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, metrics=ARRAYS | recall)
    loop.run_folder = tmp_path
    trainer(2, callbacks=callbacks).fit(loop, datamodule=toy_data())
    assert {path.name for path in (tmp_path / "metrics").iterdir()} == {
        *(f"{name}-{round_idx}.npz" for name in ARRAYS for round_idx in range(2)),
        *(f"{name}-1.png" for name in ARRAYS),
    }
    matrix = np.load(tmp_path / "metrics" / "matrix-1.npz")["value"]
    assert matrix.shape == (3, 3)
    assert matrix.trace() / matrix.sum() == pytest.approx(loop.round_metrics["global/recall"])
    curve = np.load(tmp_path / "metrics" / "curve-1.npz")
    assert {name: curve[name].shape for name in curve.files} == {
        "value_0": (3, 6),
        "value_1": (3, 6),
        "value_2": (5,),
    }
    assert not [key for key in loop.round_metrics if key.split("/")[1] in ARRAYS]


def test_the_page_shows_what_they_have_drawn_and_a_run_may_draw_nothing_else(tmp_path):
    for form in ("metrics", "none"):
        folder = tmp_path / form
        loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, metrics=ARRAYS)
        loop.run_folder = folder
        logger = RoundCSVLogger(folder)
        trainer(2, callbacks=[RunPlots(folder, format=form)], logger=logger).fit(loop, datamodule=toy_data())
    assert {path.stem for path in (tmp_path / "metrics").rglob("*.png")} == {f"{name}-1" for name in ARRAYS}
    assert not list((tmp_path / "none").rglob("*.png"))
    group = Group("FedAvg", [read_run(tmp_path / "metrics")])
    page = write_report([group], tmp_path, forms=["svg"]).read_text("utf-8")
    for name in ARRAYS:
        picture = (tmp_path / f"metrics/metrics/{name}-1.png").read_bytes()
        assert f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}" in page
        assert (tmp_path / f"figures/{name}-FedAvg.png").read_bytes() == picture


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_picture_of_an_earlier_round_is_not_shown_once_there_are_later_values(tmp_path, form):
    """The pages are of the run after its first fit, of its continuation without drawing, and of one that draws."""
    pages = []
    for rounds, drawn_as in ((2, form), (3, "none"), (4, "metrics")):
        loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, metrics=ARRAYS)
        loop.run_folder = tmp_path
        run = trainer(rounds, callbacks=[RunPlots(tmp_path, format=drawn_as)], logger=RoundCSVLogger(tmp_path))
        ckpt_path = tmp_path / "last.ckpt" if pages else None
        run.fit(loop, datamodule=toy_data(), ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / "last.ckpt")
        pages.append(write_report([Group("FedAvg", [read_run(tmp_path)])], tmp_path).read_text("utf-8"))
    for name in ARRAYS:
        assert f"{name} after round 1: FedAvg." in pages[0]
        assert f"{name} after round" not in pages[1]
        assert f"{name} is not shown: its last picture is of round 1, and its last value of round 2." in pages[1]
        assert f"{name} after round 3: FedAvg." in pages[2]
        assert f"{name} is not shown" not in pages[2]


def test_files_of_rounds_that_are_run_again_go(tmp_path):
    def fit_on(rounds, ckpt_path=None):
        loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, metrics=ARRAYS)
        loop.run_folder = tmp_path
        run = trainer(rounds)
        run.fit(loop, datamodule=toy_data(), ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / f"{rounds}.ckpt")

    fit_on(1)
    fit_on(3, tmp_path / "1.ckpt")
    fit_on(2, tmp_path / "1.ckpt")
    assert sorted(path.name for path in tmp_path.glob("metrics/matrix-*")) == ["matrix-0.npz", "matrix-1.npz"]


def test_clients_have_the_numbers_only():
    loop = run(ARRAYS | {"recall": MulticlassRecall(3)}, evaluate_clients_every=1)
    assert {key for key in loop.round_metrics if key.startswith("local/")} == {"local/alma", "local/recall"}


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.yaml").write_text(
        "model:\n  metrics:\n    f1: {class_path: torchmetrics.classification.MulticlassF1Score, "
        "init_args: {num_classes: 10}}\n    own: {class_path: fl_lightning.metrics.NormalisedClassAccuracy, "
        "init_args: {num_classes: 10}}\n"
    )
    said = say(f"fit {TINY} -c metrics.yaml --trainer.max_epochs 1 --trainer.enable_progress_bar false")
    assert said.code == 0, said.err
    (table,) = tmp_path.glob("runs/*/*/metrics.csv")
    header = table.read_text().splitlines()[0].split(",")
    assert "global/f1" in header
    assert [f"global/own/{name.rpartition('/')[2]}" for name in header if "acc_class" in name] == [
        name for name in header if "/own/" in name
    ]
