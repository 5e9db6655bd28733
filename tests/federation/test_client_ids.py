"""An id of a client is a whole number in its range, wherever it is given, and is refused before anything trains."""

import numpy as np
import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.methods import FedAvg
from tests.commands import TINY, refusal
from tests.toys import sgd, toy_data, trainer

NO_IDS = [True, 1.0, "3", np.array([0, 1]), torch.tensor([[1]])]
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
@pytest.mark.parametrize("client_id", NO_IDS, ids=["truth", "float", "text", "array", "tensor"])
def test_another_value_is_none(place, client_id, tmp_path):
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1)
    with pytest.raises(TypeError, match=r"must be (the id of a client|ids in \[0, 5\) or all), got "):
        place(loop, client_id, tmp_path)
    if place is written:
        assert not (tmp_path / "client.ckpt").exists()


@pytest.mark.parametrize("clients", ["none", "ALL", 1.5, True])
def test_clients_that_are_no_list_of_ids(clients, tmp_path):
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1)
    with pytest.raises(
        TypeError, match=rf"ClientCheckpoint.clients must be ids in \[0, 5\) or all, got {clients!r}; give such ids"
    ):
        written_alone(loop, clients, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("client", ["abc", "2.0", "true", "[1]"])
def test_the_command_line_asks_for_a_number(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = refusal(f"test {TINY} --client {client}", 2)
    assert refused.endswith(f"client must be int or all, got {client}; write a whole number, such as 3")
