"""Predictions of a data module's own `predict_dataloader`, as plain Lightning makes them."""

import csv

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import SavePredictions
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.commands import empty_pictures, say, working_in
from tests.federation.test_clients_by_own_steps import QUIET

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(11, 2, generator=torch.Generator().manual_seed(0))


class Items(Dataset):
    """Inputs alone, or with their names."""

    def __init__(self, named=False):
        self.named = named

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"x": X[index], "id": f"p{index}"} if self.named else X[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


PAIRS = TensorDataset(X, torch.zeros(11, 1))
LOADERS = {
    "pairs": lambda: DataLoader(PAIRS, batch_size=4),
    "inputs alone": lambda: DataLoader(Items(), batch_size=4),
    "dicts": lambda: DataLoader(Items(named=True), batch_size=4),
    "several": lambda: [DataLoader(Items(), batch_size=4), DataLoader(Items(named=True), batch_size=3)],
    "several by name": lambda: {"a": DataLoader(Items(), batch_size=4), "b": DataLoader(Items(), batch_size=3)},
    "without the last batch": lambda: DataLoader(Items(), batch_size=4, drop_last=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "one by one": lambda: DataLoader(Items(), batch_size=None),
    "batches of a sampler": lambda: DataLoader(
        Items(), batch_sampler=BatchSampler(SequentialSampler(Items()), batch_size=4, drop_last=False)
    ),
}


class Ward(LightningDataModule):
    """Its hooks are those of a project that predicts by plain Lightning."""

    def __init__(self, kind="pairs", trains=True):
        super().__init__()
        self.kind = kind
        self.trains = trains
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        assert self.trains, "the training samples were asked for"
        return DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=4)

    def predict_dataloader(self):
        assert self.calls[-1] == "predict"
        return LOADERS[self.kind]()


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        if isinstance(batch, dict):
            return self.layer(batch["x"])
        return self.layer(batch[0] if isinstance(batch, list) else batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def flat(outputs):
    """The outputs of all batches of all loaders, and their sizes."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [output for of_part in outputs for output in flat(of_part)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    loop = FederatedLoop(Regression(), seed=1)
    fit = Trainer(max_epochs=1, **QUIET)
    fit.fit(loop, datamodule=FederatedDataModule.from_datamodule(Ward(), num_clients=2))
    path = tmp_path_factory.mktemp("fit") / "last.ckpt"
    fit.save_checkpoint(path)
    return path, loop.client_model()


def loop_of_regression():
    """A loop that takes a checkpoint of a data module with another argument."""
    loop = FederatedLoop(Regression(), seed=1)
    loop.identity.allow(["data.source"])
    return loop


@pytest.mark.parametrize("relies", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_answers_are_those_of_plain_lightning(kind, relies, checkpoint, tmp_path):
    path, model = checkpoint
    expected = Trainer(**QUIET).predict(model, datamodule=Ward(kind))
    ward = Ward(kind, trains=not relies)
    data = FederatedDataModule.from_datamodule(ward, num_clients=2)
    if relies:
        data.rely_on(path)
    runner = Trainer(callbacks=[SavePredictions(tmp_path)], **QUIET)
    found = runner.predict(loop_of_regression(), datamodule=data, ckpt_path=path)
    assert len(flat(found)) == len(flat(expected))
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert torch.equal(one, other)
    if relies:
        assert ward.calls == ["prepare_data", "predict"]
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    saved = torch.load(tmp_path / "predictions.pt")
    several = kind.startswith("several")
    of_loaders = saved if several else [saved]
    assert [float(row["predicted"]) for row in rows] == pytest.approx(torch.cat(of_loaders).flatten().tolist())
    assert [int(row["row"]) for row in rows] == list(range(11)) * len(of_loaders)
    assert [row.get("dataloader_idx") for row in rows] == (["0"] * 11 + ["1"] * 11 if several else [None] * 11)


def test_rows_of_a_loader_that_shuffles_are_those_of_the_dataset(checkpoint, monkeypatch):
    monkeypatch.setitem(LOADERS, "shuffled", lambda: DataLoader(Items(), batch_size=4, shuffle=True))
    path, model = checkpoint
    data = FederatedDataModule.from_datamodule(Ward("shuffled"), num_clients=2)
    found = Trainer(**QUIET).predict(loop_of_regression(), datamodule=data, ckpt_path=path)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found), model.layer(X))


class Classes(Ward):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, 2), torch.arange(12) % 3), batch_size=4)


def test_a_net_takes_inputs_alone_or_in_front_and_nothing_else(monkeypatch):
    loop = FederatedLoop(FedAvg(net=Perceptron), seed=1)
    ward = Classes("inputs alone")
    data = FederatedDataModule.from_datamodule(ward, num_clients=2)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=data)
    answers = []
    for kind in ("inputs alone", "pairs"):
        ward.kind = kind
        answers.append(torch.cat(Trainer(**QUIET).predict(loop, datamodule=data)))
    assert answers[0].shape == (11, 3)
    assert torch.equal(answers[0], answers[1])
    ward.kind = "dicts"
    with pytest.raises(TypeError, match=r"a batch that a net predicts must be its inputs .* got dict; give module="):
        Trainer(**QUIET).predict(loop, datamodule=data)


OWN = """
from pathlib import Path
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

class Data(LightningDataModule):
    def setup(self, stage):
        if stage == "fit":
            self.train = TensorDataset(torch.load("train.pt"), torch.arange(24) % 3)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.train, batch_size=4)

    def predict_dataloader(self):
        return [DataLoader(TensorDataset(torch.ones(5, 2)), batch_size=2), DataLoader(torch.zeros(3, 2), batch_size=2)]
"""


def test_the_command_line_needs_no_training_file(tmp_path):
    (tmp_path / "it.yaml").write_text(
        "data:\n  source: own.Data\n  num_clients: 2\nmodel:\n  client: {class_path: FedAvg, init_args: {net: "
        "{class_path: Perceptron}}}\n  personal: [net.head.*]\ntrainer: {max_epochs: 1, accelerator: cpu}\n"
    )
    torch.save(torch.randn(24, 2), tmp_path / "train.pt")
    with working_in(tmp_path, OWN), empty_pictures():
        said = say("fit -c it.yaml")
        assert said.code == 0, said.err
        answers = []
        for name in ("with", "without"):
            for options in ("", "--client 1", "--client all"):
                output = f"{name}{options.replace('--client ', '-')}.csv"
                said = say(f"predict -c it.yaml --ckpt_path last --output {output} {options}")
                assert said.code == 0, said.err
                answers.append((tmp_path / output).read_text())
            (tmp_path / "train.pt").unlink(missing_ok=True)
    assert answers[:3] == answers[3:]
    assert answers[0].splitlines()[0] == "dataloader_idx,row,predicted,p_0,p_1,p_2"
    assert answers[2].splitlines()[0] == "client,dataloader_idx,row,predicted,p_0,p_1,p_2"
    assert len(answers[2].splitlines()) == 1 + 2 * (5 + 3)
