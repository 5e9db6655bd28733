"""Stored positions number the training samples as given, whatever is held out of them."""

import inspect
import json
from contextlib import nullcontext
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch

import fl_lightning.data
from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    FixedPartition,
    HuggingFace,
    ImageFolder,
    Partition,
    PooledSource,
    TableSource,
    TensorSource,
)
from tests.commands import refusal, say, working_in

SIZE = 60
STORED = [list(range(10)), list(range(20, 45)), [50, 3, 59]]
HELD = [
    {"val_fraction": 0.3},
    {"val_fraction": 0.3, "val_by": "patient"},
    {"proxy_size": 12},
    {"proxy_size": 12, "proxy_overlap": True},
    {"transfer_size": 0.25},
    {"shared_per_class": 3},
]
PAIRS = [{}, *HELD, *({**one, **other} for one, other in combinations(HELD, 2))]
KINDS = [
    kind
    for kind in (getattr(fl_lightning.data, name) for name in fl_lightning.data.__all__)
    if inspect.isclass(kind) and issubclass(kind, Partition)
]


class Stored(Partition):
    """A user's partition, which does not say that its positions are stored."""

    def __call__(self, samples, num_clients, generator):
        return [np.array(part) for part in STORED]


class StoredWithoutLabels(Stored):
    needs_labels = False


class WithRest(Partition):
    """Stores the positions of two clients, and gives the rest to the third."""

    def __call__(self, samples, num_clients, generator):
        rest = np.setdiff1d(np.arange(samples.size), STORED[0] + STORED[1])
        return [np.array(STORED[0]), STORED[1], rest]


class RestFirst(WithRest):
    """Stores the positions of the last client only, shuffled, and deals the rest."""

    def __call__(self, samples, num_clients, generator):
        rest = np.setdiff1d(np.arange(samples.size), STORED[1])
        return [*np.array_split(rest, 2), generator.permutation(STORED[1])]


class Nested(Partition):
    """Asks a partition that it holds, which refuses positions that are none."""

    def __init__(self):
        self.inner = FixedPartition(STORED)

    def __call__(self, samples, num_clients, generator):
        return self.inner(samples, num_clients, generator)


class Strict(Stored):
    """Refuses fewer samples than its positions were stored for."""

    def __call__(self, samples, num_clients, generator):
        if samples.size != SIZE:
            raise RuntimeError(f"these positions are of {SIZE} samples")
        return super().__call__(samples, num_clients, generator)


class Says(Partition):
    """Says that its positions are stored, because asking it could not tell."""

    def __init__(self):
        self.stores_positions = True

    def __call__(self, samples, num_clients, generator):
        return np.array_split(np.arange(samples.size), num_clients)


class StoredOfPackage(FixedPartition):
    def __init__(self):
        super().__init__(STORED)


USERS = [Stored, StoredWithoutLabels, WithRest, RestFirst, Nested, Strict, Says, StoredOfPackage]


def as_given(partition):
    """The samples that the partition means: those of all training samples."""
    return [sorted(part) for part in dealt(partition)[0]]


class Numbered(TensorSource):
    """Samples of twenty patients."""

    def load(self):
        train, test = super().load()
        train.columns = {"patient": np.arange(SIZE) // 3}
        return train, test


def numbered(limit=None):
    x = torch.arange(float(SIZE))[:, None]
    source = Numbered((x, torch.arange(SIZE) % 3), (x[:9], torch.arange(9) % 3), num_classes=3)
    source.limit = limit
    return source


def dealt(partition, num_clients=3, **settings):
    """The numbers of the samples of each client, and of those that are held out."""
    data = FederatedDataModule(numbered(), num_clients=num_clients, partition=partition, **settings)
    data.setup("fit")
    held = [
        data.split(name).all()[0].flatten().long().tolist()
        for name in ("val", "proxy", "transfer")
        if name in data._splits and not (name == "proxy" and data.proxy_overlap)
    ]
    clients = [
        data.view(k, 0).all()[0].flatten().long().tolist() if data.size(k, 0) else [] for k in range(data.num_clients)
    ]
    return clients, {i for part in held for i in part}


@pytest.mark.filterwarnings("ignore:.*stored positions")
@pytest.mark.parametrize("kind", USERS)
def test_a_client_has_its_stored_samples_without_those_held_out(kind):
    given = as_given(kind())
    for settings in PAIRS:
        clients, held = dealt(kind(), **settings)
        assert [sorted(part) for part in clients] == [[i for i in part if i not in held] for part in given], settings


def test_every_setting_that_holds_samples_out_is_among_them():
    names = {name for settings in HELD for name in settings}
    parameters = set(inspect.signature(FederatedDataModule.__init__).parameters)
    assert names == {name for name in parameters if name.startswith(("val_", "proxy_", "transfer_", "shared_"))}


def test_it_is_said_how_many_are_left_out():
    with pytest.warns(
        UserWarning, match=r"FixedPartition deals 38 stored positions .* and (\d+) of them are held out"
    ) as seen:
        clients, _ = dealt(FixedPartition(STORED), val_fraction=0.3)
    count = sum(map(len, clients))
    assert any(f"and {38 - count} of them are held out" in str(w.message) for w in seen)
    assert any(f"the other {count}" in str(w.message) for w in seen)


@pytest.mark.parametrize("kind", USERS)
def test_a_limit_that_numbers_them_anew_is_refused(kind):
    data = FederatedDataModule(numbered(SIZE - 1), num_clients=3, partition=kind())
    own = r"these positions are of 60 samples|must lie in 0 ... 58, got 59"  # of partitions that refuse what is left
    with pytest.raises(
        (ValueError, RuntimeError),
        match=rf"number all training samples, and data.source.limit leaves 1 of 60 out|{own}",
    ):
        data.setup("fit")
    for limit in (SIZE, SIZE + 1):  # nothing is left out
        FederatedDataModule(numbered(limit), num_clients=3, partition=kind()).setup("fit")


def test_a_limit_of_the_source_that_a_source_reads_is_one_too():
    for limit, refused in ((50, True), (SIZE, False)):
        data = FederatedDataModule(PooledSource(numbered(limit), 0.1), num_clients=3, partition=Stored())
        with pytest.raises(ValueError, match=r"leaves 10 of") if refused else nullcontext():
            data.setup("fit")


def folders(tmp_path):
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((4, 4), 9 * i, np.uint8)).save(tmp_path / "train" / name / f"{i}.png")
    return partial(ImageFolder, str(tmp_path))


def table(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(6)))
    return partial(TableSource, str(tmp_path / "a.csv"), label="y", test=str(tmp_path / "a.csv"))


def hub(tmp_path):
    datasets = pytest.importorskip("datasets")
    opened = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(6)], "y": [0, 1] * 3})
    return partial(HuggingFace, opened, input="x", label="y")


@pytest.mark.parametrize("source", [folders, table, hub])
def test_a_source_says_how_many_its_limit_left_out(source, tmp_path):
    made = source(tmp_path)
    for limit, left_out in ((None, 0), (6, 0), (9, 0), (4, 2)):
        read = made(limit=limit)
        train, _ = read.read()
        assert (len(train), read.left_out.get("train", 0)) == (6 - left_out, left_out)


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
from tests.data.test_stored_positions import Numbered, Stored, numbered

class OwnSource(Numbered):
    def __init__(self, limit: int | None = None):
        source = numbered()
        super().__init__(source.train, source.test, 3)
        self.limit = limit
"""


@pytest.mark.parametrize("partition", ["own.Stored", f"FixedPartition --data.partition.indices '{json.dumps(STORED)}'"])
def test_the_commands_have_the_same_samples(partition, tmp_path):
    words = f"--model.client FedAvg --data.source own.OwnSource --data.num_clients 3 --data.partition {partition}"
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
        assert say(f"partition {words} --data.source.limit 60").code == 0


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
