"""`SavePredictions`: the table of predictions, by rows of the samples."""

import csv

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint, SavePredictions
from fl_lightning.callbacks.predictions import Answer, columns_of, joined
from fl_lightning.data import TableSource
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.data.test_new_samples import NEW, TEST, TRAIN

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def data(tmp_path):
    """Two hospitals, of which the first one has no test rows."""
    (tmp_path / "train.csv").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "test.csv").write_text(TEST.replace(",c,", ",b,"), encoding="utf-8")
    (tmp_path / "new.csv").write_text(NEW, encoding="utf-8")
    source = TableSource(tmp_path / "train.csv", "risk", tmp_path / "test.csv", ignored=["hospital"])
    return FederatedDataModule(source, num_clients=None, by="hospital")


def predicted(loop, data, folder, **settings):
    Trainer(callbacks=[SavePredictions(folder)], **QUIET, **settings).predict(loop, datamodule=data)
    return table(folder / "predictions.csv")


def test_a_client_without_test_samples_predicts_new_ones_and_all_of_them(data, tmp_path):
    loop = FederatedLoop(FedAvg(net=Perceptron), personal="net.head.*")
    Trainer(max_epochs=2, **QUIET).fit(loop, datamodule=data)
    assert data.client_indices("test", 0).tolist() == []
    data.predict_new(tmp_path / "new.csv")
    of_clients = []
    for client_id in (0, 1):
        loop.deploy(client_id)
        rows = predicted(loop, data, tmp_path)
        assert [row["row"] for row in rows] == ["2", "3"]
        of_clients.append(rows)
    assert of_clients[0] != of_clients[1]
    loop.deploy(0)
    data.predict_new(None)
    with pytest.raises(ValueError, match="client 0 has no test samples"):
        predicted(loop, data, tmp_path)


def test_the_rows_of_a_limited_pass_are_the_first_ones(data, tmp_path):
    loop = FederatedLoop(FedAvg(net=Perceptron))
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=data)
    data._eval_batch_size = 1
    data.predict_new(tmp_path / "new.csv")
    every = predicted(loop, data, tmp_path)
    assert predicted(loop, data, tmp_path, limit_predict_batches=1) == every[:1]
    assert set(data.loaded_splits) == {"train", "test"}  # a later fit has no other samples than before
    data.predict_new(None)
    assert [row["row"] for row in predicted(loop, data, tmp_path)] == ["0", "1"]


class Skips(LightningModule):
    """Answers some batches only."""

    def __init__(self, answers):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.answers = answers

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def predict_step(self, batch, batch_idx):
        return self.answers[batch_idx]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("answers", "columns"),
    [
        ([torch.tensor([1]), torch.tensor([0])], {"predicted": ["low", "high"]}),
        ([torch.tensor([1]), torch.tensor([7])], {"predicted": ["1", "7"]}),
        ([torch.tensor([1.5]), torch.tensor([0.1])], {"predicted": ["1.5", "0.1"]}),
        ([torch.tensor([1]), None], None),
        ([torch.zeros(2), torch.zeros(1)], None),
        ([torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)], None),
        (["low", "high"], None),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], None),
        ([torch.zeros(()), torch.zeros(())], None),
    ],
)
def test_answers_that_are_no_rows_of_the_samples_have_no_table(answers, columns, data, tmp_path):
    loop = FederatedLoop(Skips(answers))
    Trainer(max_epochs=1, limit_val_batches=0, **QUIET).fit(loop, datamodule=data)
    data._eval_batch_size = 1
    data.predict_new(tmp_path / "new.csv")
    (tmp_path / "predictions.csv").write_text("of an earlier pass")
    Trainer(callbacks=[SavePredictions(tmp_path)], **QUIET).predict(loop, datamodule=data)
    assert (tmp_path / "predictions.pt").is_file()
    if columns is None:
        assert not (tmp_path / "predictions.csv").exists()
        return
    rows = table(tmp_path / "predictions.csv")
    assert {name: [row[name] for row in rows] for name in rows[0]} == {"row": ["2", "3"], **columns}


class OfBothKinds(Skips):
    """Its dict of outputs has names that columns of the table have, and another column for one of the clients."""

    def predict_step(self, batch, batch_idx):
        found = {name: torch.full((len(batch[0]),), 7) for name in ("client", "row", "file", "mean")}
        return found if self.answers is None else {**found, self.answers.pop(): found["mean"]}


def test_outputs_do_not_take_the_place_of_rows_and_clients(data, tmp_path):
    loop = FederatedLoop(OfBothKinds(None))
    Trainer(max_epochs=1, limit_val_batches=0, **QUIET).fit(loop, datamodule=data)
    data.predict_new(tmp_path / "new.csv")
    writer = SavePredictions(tmp_path, by_client=True)
    for client_id in (0, 1):
        loop.deploy(client_id)
        Trainer(callbacks=[writer], **QUIET).predict(loop, datamodule=data)
    rows = table(tmp_path / "predictions.csv")
    assert list(rows[0]) == ["client", "row", "output_client", "output_row", "output_file", "mean"]
    assert [row["row"] for row in rows] == ["2", "3"] * 2
    assert [row["client"] for row in rows] == [name for name in data.client_names for _ in range(2)]
    assert {row["output_row"] for row in rows} == {"7"}
    loop.client.module.answers = ["of the second"]
    Trainer(callbacks=[writer], **QUIET).predict(loop, datamodule=data)
    assert not (tmp_path / "predictions.csv").exists()
    assert set(torch.load(tmp_path / "predictions.pt")) == set(data.client_names)


def test_the_predicted_class_is_the_one_of_the_largest_logit():
    logits = torch.tensor([[100.0, 100.0001, 0.0]])
    columns = columns_of(logits, Answer(3, None, are_logits=True))
    assert columns["predicted"] == ["1"]
    assert list(columns) == ["predicted", "p_0", "p_1", "p_2"]
    assert columns_of(torch.zeros(2, 4), Answer(3, None, are_logits=True)) is None
    assert joined([]) is None


def test_the_two_files_have_two_names(tmp_path):
    with pytest.raises(ValueError, match=r"filename must not end with .csv, got answers.csv; write predictions.pt"):
        SavePredictions(tmp_path, "answers.csv")


class Ward(LightningDataModule):
    """Gives new samples itself, which have no targets."""

    def train_dataloader(self):
        x = torch.arange(24.0).view(12, 2)
        return DataLoader(TensorDataset(x, torch.arange(12) % 3), 4)

    def predict_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(5, 2)), 2)


def test_a_data_module_is_asked_for_its_own_new_samples(tmp_path):
    loop = FederatedLoop(FedAvg(net=Perceptron))
    data = FederatedDataModule(Ward(), num_clients=2)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=data)
    rows = predicted(loop, data, tmp_path)
    assert [row["row"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert list(rows[0]) == ["row", "predicted", "p_0", "p_1", "p_2"]
    with pytest.raises(ValueError, match=r"let Ward.predict_dataloader give the new samples"):
        data.predict_new(tmp_path)


def test_a_fit_after_the_model_alone_counts_its_owners(data, tmp_path):
    loop = FederatedLoop(FedAvg(net=Perceptron))
    Trainer(max_epochs=1, callbacks=[ClientCheckpoint(tmp_path)], **QUIET).fit(loop, datamodule=data)
    again = FederatedDataModule(data.source, num_clients=None, by="hospital")
    again.rely_on(tmp_path / "client.ckpt")
    again.predict_new(tmp_path / "new.csv")
    rows = predicted(FederatedLoop(FedAvg(net=Perceptron), initial_weights=tmp_path / "client.ckpt"), again, tmp_path)
    data.predict_new(tmp_path / "new.csv")
    assert rows == predicted(loop, data, tmp_path)
    assert not again.loaded_splits
    Trainer(max_epochs=1, **QUIET).fit(FederatedLoop(FedAvg(net=Perceptron)), datamodule=again)
    assert again.client_names == ["a", "b"]
