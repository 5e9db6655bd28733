"""An id of a client is a whole number in its range, wherever it is given, and is refused before anything trains."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import GroupMetrics
from fl_lightning.nets import Perceptron
from tests.commands import TINY, say
from tests.toys import sgd, toy_data, trainer

NO_IDS = [True, 1.0, np.array([0, 1]), torch.tensor([[1]])]
"""Values that are no ids. A list of these is no list of ids."""


def model_of(loop, client_id, folder):
    trainer(1).fit(loop, datamodule=toy_data())
    return loop.client_model(client_id)


def passed(loop, client_id, folder):
    loop.deploy(client_id)
    return trainer(1).test(loop, datamodule=toy_data(), verbose=False)


def written(loop, client_id, folder):
    run = trainer(1, callbacks=[ClientCheckpoint(folder, clients=[client_id])])
    run.fit(loop, datamodule=toy_data())
    return (folder / "client-1.ckpt").stat()


def written_alone(loop, client_id, folder):
    run = trainer(1, callbacks=[ClientCheckpoint(folder, clients=client_id)])
    run.fit(loop, datamodule=toy_data())
    return (folder / "client-1.ckpt").stat()


PLACES = [model_of, passed, written, written_alone]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("client_id", [1, np.int64(1), torch.tensor(1)], ids=["int", "numpy", "torch"])
def test_a_whole_number_is_an_id(place, client_id, tmp_path):
    assert place(FederatedLoop(FedAvg(optimizer=sgd()), seed=1), client_id, tmp_path)


@pytest.mark.parametrize("place", [model_of, passed, written], ids=lambda place: place.__name__)
@pytest.mark.parametrize("client_id", NO_IDS, ids=["truth", "float", "array", "tensor"])
def test_another_value_is_none(place, client_id, tmp_path):
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1)
    with pytest.raises(TypeError, match=r"must be (the id of a client|ids in \[0, 5\), names of clients or all), got "):
        place(loop, client_id, tmp_path)
    if place is written:
        assert not (tmp_path / "client.ckpt").exists()


@pytest.mark.parametrize("clients", ["none", "ALL", 1.5, True])
def test_clients_that_are_no_list_of_ids(clients, tmp_path):
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1)
    rule = r"ClientCheckpoint.clients must be ids in \[0, 5\), names of clients or all"
    with pytest.raises((TypeError, ValueError), match=rf"{rule}, got {clients!r}; give such clients"):
        written_alone(loop, clients, tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_command_line_asks_for_a_client_that_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted = say(f"fit {TINY} --trainer.max_epochs 1 --plots.format none")
    assert fitted.code == 0, fitted.err
    for client in ("abc", "2.0", "true", "-1", "4"):
        refused = say(f"test {TINY} --ckpt_path last --client={client}")
        assert refused.code
        rule = f"client must be the id of a client in [0, 4), got {client}; give one of these"
        assert rule.lower() in refused.err.lower()


# --- names ---

OWNERS = ("east", "17", "west", "2")
"""Names of owners in their order by the data. The last one is the digits of another client's id."""


def owned():
    """Data of four owners, each with four samples."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, torch.arange(16) % 3)
    dataset.owner = np.repeat(np.array(OWNERS), 4)
    return FederatedDataModule.from_datasets(dataset, dataset, by="owner", num_clients=None, seed=1)


def names_of_owners():
    data = owned()
    data.setup("fit")
    return data.client_names


@pytest.mark.parametrize("name", OWNERS)
def test_a_client_is_named_in_every_place(name, tmp_path):
    names = names_of_owners()
    assert sorted(names) == sorted(OWNERS)
    client_id = names.index(name)
    loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()), seed=1)
    groups = GroupMetrics({"one": [name]}, {"right": MulticlassAccuracy(3)})
    run = trainer(1, callbacks=[ClientCheckpoint(tmp_path, clients=[name]), groups])
    run.fit(loop, datamodule=owned())
    assert (tmp_path / f"client-{client_id}.ckpt").is_file()
    assert groups._clients == {"one": [client_id]}
    by_name = loop.client_model(name).state_dict()
    by_id = loop.client_model(client_id).state_dict()
    assert all(torch.equal(by_name[key], value) for key, value in by_id.items())
    values = []
    for client in (name, client_id):
        loop.deploy(client)
        values.append(trainer(1).test(loop, datamodule=owned(), verbose=False))
    assert values[0] == values[1]
    data = FederatedDataModule(**{**vars_of(owned()), "unseen": [name]})
    data.setup("fit")
    data.client_samples()
    assert data.unseen_clients == (client_id,)


def vars_of(data):
    return {"source": data.source, "by": "owner", "num_clients": None, "seed": 1}


def test_digits_are_an_id_where_nobody_has_that_name():
    data = owned()
    data.setup("fit")
    assert data.client_id("2") == data.client_names.index("2")
    assert data.client_id(2) == 2
    assert data.client_id("3") == 3
    with pytest.raises(ValueError, match=r"in \[0, 4\) or the name of one \(17, 2, east, west\), got north"):
        data.client_id("north", setting="client")


def test_the_command_line_takes_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{index / 7:.3f},{index % 5},{('west', 'st. mary/2')[index % 2]},{index % 3}" for index in range(40)]
    (tmp_path / "rows.csv").write_text("a,b,hospital,target\n" + "\n".join(rows) + "\n", "utf-8")
    (tmp_path / "own.yaml").write_text(
        "trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false}\n"
        "model: {client: {class_path: fl_lightning.methods.FedAvg, init_args: {net: Perceptron}}}\n"
        "data:\n  source: {class_path: TableSource, init_args: {train: rows.csv, label: target, ignored: [hospital]}}\n"
        "  by: hospital\n  num_clients: null\n"
    )
    fitted = say("fit -c own.yaml --plots.format none")
    assert fitted.code == 0, fitted.err
    tested = say("test -c own.yaml --ckpt_path last --client west")
    assert tested.code == 0, tested.err
    predicted = say("predict -c own.yaml --ckpt_path last --client 'st. mary/2'")
    assert predicted.code == 0, predicted.err
    assert len(list(tmp_path.rglob("predictions-client-st*.csv"))) == 1
    refused = say("test -c own.yaml --ckpt_path last --client north")
    assert "client must be the id of a client in [0, 2) or the name of one (st. mary/2, west), got north" in refused.err
