"""A fit deletes no file and no row that another program has written into the folder of the run."""

import numpy as np
import pytest
from pytorch_lightning.loggers import TensorBoardLogger
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, Local
from fl_lightning.monitors import ClientTable
from tests.toys import sgd, toy_data, trainer

PATIENTS = "client,age\n0,61\n1,47\n"


def fit(folder, *, client=FedAvg, callbacks=None, **settings):
    loop = FederatedLoop(client(optimizer=sgd()), seed=1, **settings)
    logger = TensorBoardLogger(folder, name="", version="")
    trainer(1, folder, logger=logger, callbacks=callbacks).fit(loop, datamodule=toy_data())


def test_a_run_that_evaluates_no_clients_leaves_a_file_of_that_name(tmp_path):
    (tmp_path / "clients.csv").write_text(PATIENTS)
    fit(tmp_path)
    assert (tmp_path / "clients.csv").read_text() == PATIENTS


@pytest.mark.parametrize(
    "settings",
    [{"evaluate_clients_every": 1}, {"client": Local}, {"callbacks": [ClientTable()]}],
    ids=["evaluates", "own models", "monitor"],
)
def test_a_table_without_rounds_is_refused(settings, tmp_path):
    (tmp_path / "clients.csv").write_text(PATIENTS)
    with pytest.raises(ValueError, match=r"clients\.csv must be a table with a row for each round, got .*client, age"):
        fit(tmp_path, **settings)
    assert (tmp_path / "clients.csv").read_text() == PATIENTS


def test_a_header_that_was_cut_is_written_again(tmp_path):
    (tmp_path / "clients.csv").write_text("rou")
    fit(tmp_path, evaluate_clients_every=1)
    assert (tmp_path / "clients.csv").read_text().startswith("round,client,owner,")


@pytest.mark.parametrize("metrics", [None, {"cm": MulticlassConfusionMatrix(3)}], ids=["none", "matrix"])
def test_arrays_of_others_stay(metrics, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    np.savez(folder / "embedding-5.npz", points=np.zeros(3))
    (folder / "notes-6.npz").write_text("no arrays")
    fit(tmp_path, metrics=metrics)
    assert {"embedding-5.npz", "notes-6.npz"} <= {path.name for path in folder.iterdir()}


def test_arrays_of_rounds_that_are_run_again_are_deleted(tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    for number in (1, 5):
        np.savez(folder / f"cm-{number}.npz", value=np.zeros((3, 3)))
    np.savez(folder / "roc-4.npz", value_0=np.zeros(3), value_1=np.zeros(3))
    fit(tmp_path, metrics={"cm": MulticlassConfusionMatrix(3)})
    assert {path.name for path in folder.glob("*.npz")} == {"cm-0.npz"}
