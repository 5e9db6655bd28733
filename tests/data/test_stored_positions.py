"""Stored positions number the training samples as given, whatever is held out of them."""

import inspect
import json

import numpy as np
import pytest
import torch

import fl_lightning.data
from fl_lightning import FederatedDataModule
from fl_lightning.data import FixedPartition, Partition, TensorSource
from tests.commands import refusal, say, working_in

SIZE = 60
STORED = [list(range(10)), list(range(20, 45)), [50, 3, 59]]
HELD = [{"val_fraction": 0.3}, {"proxy_size": 12}, {"transfer_size": 0.25}, {"val_fraction": 0.2, "transfer_size": 9}]
KINDS = [kind for kind in vars(fl_lightning.data).values() if inspect.isclass(kind) and issubclass(kind, Partition)]


class Stored(Partition):
    """A user's partition, which does not say that its positions are stored."""

    def __call__(self, samples, num_clients, generator):
        return [np.array(part) for part in STORED]


class StoredWithoutLabels(Stored):
    needs_labels = False


def numbered(limit=None):
    x = torch.arange(float(SIZE))[:, None]
    source = TensorSource((x, torch.arange(SIZE) % 3), (x[:9], torch.arange(9) % 3), num_classes=3)
    source.limit = limit
    return source


def dealt(partition, num_clients=3, **settings):
    """The numbers of the samples of each client, and of those that are held out."""
    data = FederatedDataModule(numbered(), num_clients=num_clients, partition=partition, **settings)
    data.setup("fit")
    held = [
        data.split(name).all()[0].flatten().long().tolist()
        for name in ("val", "proxy", "transfer")
        if name in data._splits
    ]
    clients = [
        data.view(k, 0).all()[0].flatten().long().tolist() if data.size(k) else [] for k in range(data.num_clients)
    ]
    return clients, {i for part in held for i in part}


@pytest.mark.filterwarnings("ignore:.*stored positions")
@pytest.mark.parametrize("settings", [{}, *HELD, {"shared_per_class": 3}, {"proxy_size": 12, "proxy_overlap": True}])
@pytest.mark.parametrize("kind", [lambda: FixedPartition(STORED), Stored, StoredWithoutLabels])
def test_a_client_has_its_stored_samples_without_those_held_out(kind, settings):
    clients, held = dealt(kind(), **settings)
    if settings.get("proxy_overlap"):
        held = set()
    assert clients == [[i for i in part if i not in held] for part in STORED]


def test_it_is_said_how_many_are_left_out():
    with pytest.warns(
        UserWarning, match=r"FixedPartition deals 38 stored positions .* and (\d+) of them are held out"
    ) as seen:
        clients, _ = dealt(FixedPartition(STORED), val_fraction=0.3)
    count = sum(map(len, clients))
    assert any(f"and {38 - count} of them are held out" in str(w.message) for w in seen)
    assert any(f"the other {count}" in str(w.message) for w in seen)


@pytest.mark.parametrize("kind", [lambda: FixedPartition(STORED), Stored])
def test_a_limit_that_numbers_them_anew_is_refused(kind):
    data = FederatedDataModule(numbered(55), num_clients=3, partition=kind())
    with pytest.raises(ValueError, match=r"stored positions of \w+ number all training samples, and data.source.limit"):
        data.setup("fit")
    FederatedDataModule(numbered(100), num_clients=3, partition=kind()).setup("fit")


def test_partitions_that_deal_what_there_is_deal_what_is_left():
    """Also those of users, none of which store positions."""

    class Halves(Partition):
        def __call__(self, samples, num_clients, generator):
            return np.array_split(np.arange(samples.size), num_clients)

    clients, held = dealt(Halves(), val_fraction=0.3)
    assert sorted(i for part in clients for i in part) == sorted(set(range(SIZE)) - held)
    assert {kind for kind in KINDS if kind.stores_positions} == {FixedPartition}
    FederatedDataModule(numbered(30), num_clients=3, partition=Halves()).setup("fit")


OWN = """
import torch
from tests.data.test_stored_positions import Stored, numbered
from fl_lightning.data import TensorSource

class Numbered(TensorSource):
    def __init__(self, limit: int | None = None):
        source = numbered()
        super().__init__(source.train, source.test, 3)
        self.limit = limit
"""


@pytest.mark.parametrize("partition", ["own.Stored", f"FixedPartition --data.partition.indices '{json.dumps(STORED)}'"])
def test_the_commands_have_the_same_samples(partition, tmp_path):
    words = f"--model.client FedAvg --data.source own.Numbered --data.num_clients 3 --data.partition {partition}"
    _, held = dealt(Stored(), val_fraction=0.3)
    left = [[i for i in part if i not in held] for part in STORED]
    with working_in(tmp_path, OWN):
        with pytest.warns(UserWarning, match="of them are held out"):
            said = say(f"partition {words} --data.val_fraction 0.3")
        assert said.code == 0, said
        assert said.out.startswith(f"{sum(map(len, left))} training samples, 3 clients")
        with pytest.warns(UserWarning, match="of them are held out"):
            said = say(f"split {words} --data.val_fraction 0.3 --output parts")
        assert said.code == 0, said
        for client_id, part in enumerate(left):
            assert np.load(tmp_path / f"parts/client_{client_id}/x.npy").flatten().tolist() == part
        assert "leave out data.source.limit" in refusal(f"partition {words} --data.source.limit 55", 1)


class ReadsLabels(Stored):
    """Reads the labels of the positions that it stores, which fewer samples do not have."""

    def __call__(self, samples, num_clients, generator):
        assert samples.labels[STORED[2]].shape == (3,)
        return super().__call__(samples, num_clients, generator)


class Blocks(Partition):
    """Deals blocks of what there is, of a size that one sample more or less need not change."""

    def __call__(self, samples, num_clients, generator):
        size = samples.size // num_clients
        return [np.arange(client_id * size, (client_id + 1) * size) for client_id in range(num_clients)]


@pytest.mark.filterwarnings("ignore:.*stored positions")
def test_what_tells_stored_positions_from_those_of_what_there_is():
    settings = {"val_fraction": 0.2}
    assert dealt(ReadsLabels(), **settings) == dealt(Stored(), **settings)
    clients, held = dealt(Blocks(), num_clients=7, **settings)
    assert {len(client) for client in clients} == {(SIZE - len(held)) // 7}
