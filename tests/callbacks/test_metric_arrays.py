"""Matrices and curves of `model.metrics` after `test` and `validate`: of all samples, and of a client's own."""

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score, MulticlassROC
from torchmetrics.functional.classification import multiclass_confusion_matrix

from fl_lightning.callbacks import MetricArrays
from tests.callbacks.toy import data, loop, trainer
from tests.commands import TINY, run_in, say

pytestmark = pytest.mark.filterwarnings("ignore")


def evaluated(folder, verb, client_id=None, metrics=None, **settings):
    """Fit a round, evaluate, and return the loop, the data and the names of the files that the evaluation wrote."""
    divided = data()
    confusion = {"of classes": MulticlassConfusionMatrix(3)}
    federated = loop(metrics=confusion if metrics is None else metrics)
    trainer([], rounds=1).fit(federated, datamodule=divided)
    federated.deploy(client_id)
    run = trainer([MetricArrays(folder, **settings)])
    getattr(run, verb)(federated, datamodule=divided, verbose=False)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return federated, divided, names


def matrix_of(federated, batch):
    x, y = batch
    with torch.no_grad(), federated.evaluation.evaluated_entries():
        return multiclass_confusion_matrix(federated.client(x).argmax(1), y, 3)


@pytest.mark.parametrize("verb", ["test", "validate"])
def test_the_matrix_of_all_samples(verb, tmp_path):
    federated, divided, names = evaluated(tmp_path, verb)
    assert names == [f"metrics/{verb}/of_classes.npz", f"metrics/{verb}/of_classes.png"]
    found = np.load(tmp_path / names[0])["value"]
    assert found.tolist() == matrix_of(federated, divided.split("test").all()).tolist()


@pytest.mark.parametrize("verb", ["test", "validate"])
def test_the_matrix_of_a_client_lies_beside_it(verb, tmp_path):
    evaluated(tmp_path, verb)
    federated, divided, names = evaluated(tmp_path, verb, client_id=2)
    assert names[2:] == [f"metrics/{verb}/of_classes.npz", f"metrics/{verb}/of_classes.png"]
    found = np.load(tmp_path / f"metrics/{verb}-client-2/of_classes.npz")["value"]
    assert found.sum() == divided.view(2, 0).size("test")
    expected = matrix_of(federated, next(iter(divided.view(2, 0).batches("test", batch_size=1000, shuffle=False))))
    assert found.tolist() == expected.tolist()


def test_a_curve_has_an_array_for_each_part(tmp_path):
    _, _, names = evaluated(tmp_path, "test", metrics={"roc": MulticlassROC(3, thresholds=5)}, format="none")
    assert names == ["metrics/test/roc.npz"]
    with np.load(tmp_path / names[0]) as file:
        assert file.files == ["value_0", "value_1", "value_2"]


@pytest.mark.parametrize("metrics", [{}, {"f1": MulticlassF1Score(3)}], ids=["none", "a number"])
def test_no_file_without_a_matrix(metrics, tmp_path):
    assert evaluated(tmp_path, "test", metrics=metrics)[2] == []


def test_the_commands_write_them_into_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        "model: {metrics: {confusion: {class_path: torchmetrics.classification.MulticlassConfusionMatrix, "
        "init_args: {num_classes: 10}}}}\n"
    )
    line = f"{TINY} -c my.yaml --trainer.max_epochs 1"
    say(f"fit {line} --plots.format none")
    run = run_in(tmp_path)
    say(f"test {line} --ckpt_path last --client 1 --plots.format none")
    say(f"validate {line} --ckpt_path last --plots.format svg")
    folders = sorted(path.relative_to(run).as_posix() for path in run.glob("metrics/*/*"))
    assert folders == [
        "metrics/test-client-1/confusion.npz",
        "metrics/validate/confusion.npz",
        "metrics/validate/confusion.svg",
    ]


def test_a_fit_writes_its_own_files(tmp_path):
    federated = loop(metrics={"of classes": MulticlassConfusionMatrix(3)})
    trainer([MetricArrays(tmp_path)], rounds=1).fit(federated, datamodule=data(val_fraction=0.2))
    assert "of classes" in federated.evaluation.arrays
    assert not any(tmp_path.iterdir())
