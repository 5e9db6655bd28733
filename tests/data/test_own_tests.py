"""A client is tested on what it can have, and what is held back is seen as test samples are."""

import inspect
import warnings
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import fl_lightning.data
from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    ClientDirichletPartition,
    ColumnPartition,
    DatasetSource,
    DirichletPartition,
    Elsewhere,
    Partition,
    PartitionInput,
    Source,
    TableSource,
    TensorSplit,
)
from fl_lightning.data.partitions import Dealt
from fl_lightning.functional.classes import distance_from_uniform
from tests.commands import refusal
from tests.user_data import Sensors

SIZE = 240
CLASSES = 5
GIVEN = {
    "alpha": 0.05,
    "shards_per_client": 3,
    "classes_per_client": 2,
    "column": "owner",
    "indices": [list(range(8 * k, 8 * k + 1 + k)) for k in range(10)],
    "client_id": 3,
}
"""Arguments of the partitions; another argument without a default is to be added."""
KINDS = [
    kind
    for kind in (getattr(fl_lightning.data, name) for name in fl_lightning.data.__all__)
    if inspect.isclass(kind) and issubclass(kind, Partition) and not inspect.isabstract(kind)
]


class Skewed(Source):
    """Few samples of the last classes, which run out; the owners have some classes each."""

    num_classes = CLASSES

    def __init__(self, tells_owners=True):
        self.tells_owners = tells_owners

    def load(self):
        draw = np.random.default_rng(0)
        y = torch.from_numpy(np.repeat(np.arange(CLASSES), [134, 60, 30, 13, 3]))
        owners = (y.numpy() * 2 + draw.integers(3, size=SIZE)) % 10
        owners[:10] = range(10)
        train = TensorSplit(torch.arange(float(SIZE))[:, None], y, columns={"owner": owners})
        test = torch.from_numpy(draw.integers(CLASSES, size=200))
        columns = {"owner": draw.integers(10, size=200)} if self.tells_owners else {}
        return train, TensorSplit(torch.zeros(200, 1), test, columns=columns)


def made(kind):
    every = list(inspect.signature(kind.__init__).parameters.values())[1:]
    parameters = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    arguments = {p.name: GIVEN[p.name] for p in parameters if p.name in GIVEN or p.default is p.empty}
    if "min_samples" in {p.name for p in parameters}:
        arguments["min_samples"] = 0
    if "shuffle_clients" in {p.name for p in parameters}:
        arguments |= {"shuffle_clients": True, "upper": "class"}
    return kind(**arguments)


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("tells_owners", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_client_is_tested_on_what_it_lacks(kind, tells_owners, size):
    """On classes that it has; where owners are known, on its own owner's samples; at most as many as asked."""
    partition = made(kind)
    for seed in range(2):
        data = FederatedDataModule(
            Skewed(tells_owners), num_clients=10, partition=partition, client_test_size=size, seed=seed
        )
        data.setup("fit")
        labels = {name: data.split(name).labels.numpy() for name in ("train", "test")}
        for client_id in range(10):
            train, test = (data.client_indices(name, client_id).numpy() for name in ("train", "test"))
            assert size is None or len(test) <= size
            assert len(set(test.tolist())) == len(test)
            if partition.column is not None and tells_owners:
                owners = {name: data.split(name).column("owner") for name in ("train", "test")}
                assert set(owners["test"][test]) <= set(owners["train"][train])
            elif len(train) and kind.__name__ != "OwnerPartition":  # its test samples are the party's own
                assert set(labels["test"][test]) <= set(labels["train"][train])


ODD = {
    "alpha": [1e-4, 1.0, 100.0],
    "min_samples": [0],
    "samples_per_client": [None, 3],
    "overlap": [False, True],
    "shards_per_client": [1, 4],
    "classes_per_client": [1, 4],
    "shuffle_clients": [True],
    "upper": ["mean", "class"],
    "indices": [[[0], [], [1, 2]]],
    "column": ["owner"],
    "client_id": [1],
}
"""Values of the partitions' arguments that are far from the usual ones."""


class Few(Source):
    num_classes = 4

    def __init__(self, size, classes, num_tests, tells_owners):
        self.size = size
        self.drawn_classes = classes
        self.num_tests = num_tests
        self.tells_owners = tells_owners

    def load(self):
        draw = np.random.default_rng(1)
        y = torch.from_numpy(draw.choice(self.drawn_classes, size=self.size))
        test = torch.from_numpy(draw.choice(4, size=self.num_tests))
        columns = {"owner": draw.integers(4, size=self.num_tests)} if self.tells_owners else {}
        train = TensorSplit(torch.zeros(self.size, 1), y, columns={"owner": np.arange(self.size) % 4})
        return train, TensorSplit(torch.zeros(self.num_tests, 1), test, columns=columns)


def odd(kind):
    """Every combination of odd arguments."""
    names = [name for name in inspect.signature(kind.__init__).parameters if name in ODD]
    return [kind(**dict(zip(names, values, strict=True))) for values in product(*map(ODD.get, names))]


MANY = ("ClientDirichletPartition", "DirichletPartition", "QuantityPartition", "QuantityDirichletPartition")
"""Partitions with many combinations of odd arguments."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.__name__, marks=pytest.mark.slow if kind.__name__ in MANY else ()) for kind in KINDS],
)
def test_so_it_is_with_odd_arguments_and_few_samples(kind):
    """Each federation is refused by a ValueError, or tests each client on classes, or on the owner, that it has."""
    made_ones = 0
    parameters = [p for p in inspect.signature(kind.__init__).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name for p in parameters if p.default is p.empty} <= {"self", *ODD}
    for size, classes, num_tests in product((1, 5, 30), ([0], [0, 1, 2, 3]), (1, 20)):
        for partition, num_clients, asked, tells in product(odd(kind), (1, 3, 8), (None, 1, 1000), (False, True)):
            source = Few(size, classes, num_tests, tells)
            data = FederatedDataModule(source, num_clients=num_clients, partition=partition, client_test_size=asked)
            try:
                data.setup("fit")
            except ValueError:
                continue
            made_ones += 1
            labels = {name: data.split(name).labels.numpy() for name in ("train", "test")}
            if partition.column is not None and tells:
                labels = {name: data.split(name).column("owner") for name in ("train", "test")}
            for client_id in range(num_clients):
                train, test = (data.client_indices(name, client_id).numpy() for name in ("train", "test"))
                assert asked is None or len(test) <= asked
                assert len(set(test.tolist())) == len(test)
                if len(train) and kind.__name__ != "OwnerPartition":
                    assert set(labels["test"][test]) <= set(labels["train"][train])
    assert made_ones


def test_client_dirichlet_tests_by_what_was_dealt():
    """Also where classes run out: shares differ by at most one sample, or as many as there are."""
    data = FederatedDataModule(Skewed(), num_clients=10, partition=ClientDirichletPartition(0.05), client_test_size=10)
    data.setup("fit")
    labels = {name: data.split(name).labels for name in ("train", "test")}
    available = labels["test"].bincount(minlength=CLASSES)
    for client_id in range(10):
        train, test = (
            labels[n][data.client_indices(n, client_id)].bincount(minlength=CLASSES) for n in ("train", "test")
        )
        wanted = 10 * train / train.sum()
        assert ((test - wanted).abs() < 1).logical_or(test == available).all()


@pytest.mark.parametrize("num_clients", [10, 40])
@pytest.mark.parametrize("overlap", [False, True])
def test_client_dirichlet_is_more_skewed_the_smaller_alpha_is(num_clients, overlap):
    labels = np.repeat(np.arange(10), 200)
    means = []
    for alpha in (1e-6, 1e-4, 1e-3, 1e-2, 1.0, 100.0):
        skew = []
        for seed in range(5):
            partition = ClientDirichletPartition(alpha, overlap=overlap)
            parts = partition(PartitionInput(2000, labels, 10), num_clients, np.random.default_rng(seed))
            counts = torch.tensor([np.bincount(labels[part], minlength=10).tolist() for part in parts])
            skew.append(float(distance_from_uniform(counts).mean()))
        means.append(np.mean(skew))
    assert all(a >= b - 0.03 for a, b in pairwise(means)), means


def test_owners_without_a_column_of_the_test_samples_are_tested_by_class():
    data = FederatedDataModule(Skewed(False), num_clients=None, by="owner", client_test_size=20)
    data.setup("fit")
    labels = {name: data.split(name).labels for name in ("train", "test")}
    for client_id in range(data.num_clients):
        train, test = (
            labels[n][data.client_indices(n, client_id)].bincount(minlength=CLASSES) for n in ("train", "test")
        )
        assert (test - 20 * train / train.sum()).abs().max() < 1


def test_a_party_has_as_many_test_samples_as_asked():
    partition = fl_lightning.data.OwnerPartition(1)
    dealt = Dealt([np.arange(0), np.arange(9)], PartitionInput(9), np.random.default_rng(0))
    assert [len(part) for part in partition.partition_test(dealt, PartitionInput(6), 4)] == [0, 4]
    assert [len(part) for part in partition.partition_test(dealt, PartitionInput(6), None)] == [0, 6]


# --- what is held back


def blacken(x, generator=None):
    return x * 0


def bright(x, generator=None):
    return x + 1


class Pictures(Dataset):
    def __init__(self, n, transform=None):
        self.x = torch.arange(1.0, n + 1)
        self.targets = torch.arange(n) % 3
        self.patient = [f"p{i // 3}" for i in range(n)]
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index][None]
        return (x if self.transform is None else self.transform(x)), int(self.targets[index])


class Own(Source):
    num_classes = 3

    def load(self):
        train = TensorSplit(torch.arange(1.0, 61)[:, None], torch.arange(60) % 3, blacken)
        return train, TensorSplit(torch.ones(9, 1), torch.arange(9) % 3, bright)


class Module(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Pictures(60, blacken), 5, collate_fn=self.broken)

    def test_dataloader(self):
        return DataLoader(Pictures(9, bright), 5)

    @staticmethod
    def broken(items):
        x, y = torch.utils.data.default_collate(items)
        return x * 0, y


class Base(Dataset):
    """Pictures in which `seen` says how a sample is seen."""

    def __init__(self, n, seen=None):
        self.x = torch.arange(1.0, n + 1)
        self.targets = torch.arange(n) % 3
        self.keep(seen)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.view(self.x[index][None]), int(self.targets[index])


class Otherwise(Base):
    def keep(self, seen):
        self._pipeline = seen

    def view(self, x):
        return self._pipeline(x)


class InSteps(Base):
    def keep(self, seen):
        self.steps = [seen]

    def view(self, x):
        for step in self.steps:
            x = step(x)
        return x


class InTable(Base):
    def keep(self, seen):
        self.table = {"x": seen}

    def view(self, x):
        return self.table["x"](x)


class Nothing(Base):
    """Has nothing to be called with where it does not blacken."""

    def keep(self, seen):
        self.distort = seen if seen is blacken else None

    def view(self, x):
        return x + 1 if self.distort is None else self.distort(x)


class ByMethod(Base):
    """Chooses one of its methods, which uses what else it keeps."""

    def keep(self, seen):
        self.change = seen
        self.view = self.dark if seen is blacken else self.light

    def dark(self, x):
        return x * 0

    def light(self, x):
        return self.change(x)


class ByModule(Base):
    def keep(self, seen):
        self.layer = torch.nn.Threshold(1e9 if seen is blacken else -1, 0)

    def view(self, x):
        return self.layer(x) + int(self.layer.threshold < 0)


class Wrapper(Dataset):
    def __init__(self, dataset, seen):
        self.dataset = dataset
        self.seen = seen

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        return self.seen(x), y


class OtherWrapper(Wrapper):
    """Keeps its dataset under another name, and not one of torch's."""

    def __init__(self, dataset, seen):
        self.base = dataset
        self.seen = seen

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        x, y = self.base[index]
        return self.seen(x), y


class Joined(Dataset):
    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return sum(map(len, self.parts))

    def __getitem__(self, index):
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError


class Transformed(Subset):
    """A part that transforms its samples itself."""

    def __init__(self, dataset, indices, transform):
        super().__init__(dataset, indices)
        self.transform = transform

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.transform(x), y

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def given(train, test, **settings):
    return FederatedDataModule.from_datasets(train, test, **{"num_clients": 3, "val_fraction": 0.3, **settings})


def of_datasets(wrap):
    return given(wrap(Pictures(60, blacken)), Pictures(9, bright))


def of_kind(kind):
    return given(kind(60, blacken), kind(9, bright))


def halves(dataset):
    return Subset(dataset, range(30)), Subset(dataset, range(30, 60))


PLACES = {
    "source": lambda: FederatedDataModule(Own(), num_clients=3, val_fraction=0.3),
    "module": lambda: FederatedDataModule(Module(), num_clients=3, val_fraction=0.3),
    "dataset": lambda: of_datasets(lambda dataset: dataset),
    "subset": lambda: of_datasets(lambda dataset: Subset(dataset, range(60))),
    "several": lambda: of_datasets(
        lambda dataset: ConcatDataset([Subset(dataset, range(30)), Subset(dataset, range(30, 60))])
    ),
    **{kind.__name__: partial(of_kind, kind) for kind in (Otherwise, InSteps, InTable, Nothing, ByMethod, ByModule)},
    "wrapper": lambda: given(Wrapper(Pictures(60), blacken), Wrapper(Pictures(9), bright)),
    "other wrapper": lambda: given(OtherWrapper(Pictures(60), blacken), OtherWrapper(Pictures(9), bright)),
    "part of a wrapper": lambda: given(
        Subset(Wrapper(Subset(Pictures(60), range(60)), blacken), range(60)), Wrapper(Pictures(9), bright)
    ),
    "wrapper of a wrapper": lambda: given(Wrapper(Pictures(60, bright), blacken), Wrapper(Pictures(9, None), bright)),
    "joined": lambda: given(Joined(*halves(Pictures(60, blacken))), Joined(Pictures(9, bright))),
    "joined wrappers": lambda: given(
        ConcatDataset([Wrapper(part, blacken) for part in halves(Pictures(60))]), Wrapper(Pictures(9), bright)
    ),
    "part": lambda: given(
        Transformed(Pictures(60), range(60), blacken), Transformed(Pictures(60), range(51, 60), bright)
    ),
}


class Blackening(Pictures):
    """Blackens in code of its own."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 0, y


class ByFlag(Pictures):
    def __init__(self, n, train):
        super().__init__(n)
        self.train = train

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 - int(self.train is True or self.train == "train")), y


class Drawing(Pictures):
    """Draws in code of its own, by a generator that nobody keys."""

    def __init__(self, n):
        super().__init__(n)
        self.generator = np.random.default_rng()

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + float(self.generator.random()), y


def jitter(x):
    return x + torch.rand(1)


def jittered(items):
    x, y = torch.utils.data.default_collate(items)
    return jitter(x), y


class Jittering(Source):
    num_classes = 3

    def load(self):
        return TensorSplit(torch.ones(60, 1), torch.arange(60) % 3, lambda x, generator: x + torch.rand(1)), None


UNDECIDED = {
    "code": lambda: given(Blackening(60), Pictures(9)),
    "code of a part": lambda: given(ConcatDataset(halves(Blackening(60))), Subset(Pictures(9), range(9))),
    "flag": lambda: given(ByFlag(60, True), ByFlag(9, False)),
    "phase": lambda: given(Wrapper(ByFlag(60, "train"), bright), Wrapper(ByFlag(9, "test"), bright)),
    "wrapper of one side": lambda: given(Wrapper(Pictures(60), blacken), Pictures(9)),
    "lacking": lambda: given(Pictures(60, blacken), TensorDataset(torch.ones(9, 1), torch.arange(9) % 3)),
    "random code": lambda: given(Drawing(60), Pictures(9)),
    "random without tests": lambda: given(Drawing(60), None),
    "transform without tests": lambda: given(Subset(Pictures(60, jitter), range(60)), None),
    "batches without tests": lambda: given(Pictures(60), None, collate_fn=jittered),
    "source without tests": lambda: FederatedDataModule(Jittering(), num_clients=3, val_fraction=0.3),
}
DECIDED = {
    "nothing differs": lambda: given(Pictures(60), Pictures(9)),
    "both are random": lambda: given(Drawing(60), Drawing(9)),
    "the same transform": lambda: given(Pictures(60, jitter), Pictures(9, jitter)),
    "tensors": lambda: given(TensorDataset(torch.ones(60, 1), torch.arange(60) % 3), Pictures(9)),
    "a flag that says nothing": lambda: given(ByFlag(60, 0), ByFlag(9, 1.5)),
    "without tests": lambda: given(Pictures(60, bright), None),
    "nothing is held back": lambda: given(Blackening(60), Pictures(9), val_fraction=0.0),
}


@pytest.mark.parametrize("name", [*PLACES, *UNDECIDED, *DECIDED])
def test_what_cannot_be_decided_is_said_once(name):
    """And what was decided leaves no doubt."""
    make = {**PLACES, **UNDECIDED, **DECIDED}[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = make()
        data.setup("fit")
        data.setup("test")
    found = [str(w.message) for w in said if "may be augmented" in str(w.message)]
    assert len(found) == int(name in UNDECIDED), found
    for message in found:
        assert message.startswith("data.val_fraction holds back 18 training samples (")
        assert message.endswith("validation samples of their own, by val_dataloader or from_datasets(val=...)")
        assert "\n" not in message


def test_looking_at_samples_leaves_the_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for make in UNDECIDED.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make().setup("fit")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_held_back_is_seen_as_the_test_samples_are(place):
    data = PLACES[place]()
    data.setup("fit")
    x, y = data.split("val").all()
    numbers = x.flatten() - 1
    assert len(numbers) == 18
    assert (numbers > 0).all()
    assert torch.equal((numbers - 1).long() % 3, y)
    assert (data.view(0, 0).all()[0] == 0).all()  # the clients' samples are seen as they were
    assert data.split("val").labels.tolist() == y.tolist()


def test_groups_are_held_back_whole():
    for seed in range(5):
        data = FederatedDataModule.from_datasets(
            Pictures(60), Pictures(9), num_clients=3, val_fraction=0.25, val_by="patient", seed=seed
        )
        data.setup("fit")
        held = {int(value) for value in data.split("val").all()[0]}
        left = {int(value) for k in range(3) for value in data.view(k, 0).all()[0]}
        assert held | left == set(range(1, 61))
        assert not held & left
        assert not {(i - 1) // 3 for i in held} & {(i - 1) // 3 for i in left}
        assert 15 <= len(held) < 18


class Rows(Dataset):
    """Items that are dictionaries, as many pipelines of text have them."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "y": index % 3, "patient": f"p{index // 3}"}


class Columns(Source):
    num_classes = 3

    def load(self):
        patients = np.arange(60) // 3
        y = torch.arange(60) % 3
        return TensorSplit(torch.arange(60.0)[:, None], y, columns={"patient": patients}), None


def with_attribute():
    dataset = TensorDataset(torch.arange(60.0)[:, None], torch.arange(60) % 3)
    dataset.patient = torch.arange(60) // 3
    return dataset


class OfPatients(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(ConcatDataset(halves(with_attribute())), 5)


def table_of_patients(tmp_path):
    rows = "".join(f"{index},{index % 3},{index // 3:03}\n" for index in range(60))
    (tmp_path / "train.csv").write_text(f"x,y,patient\n{rows}")
    (tmp_path / "test.csv").write_text(f"x,y,patient\n{rows}")
    paths = [str(tmp_path / f"{name}.csv") for name in ("train", "test")]
    return TableSource(paths[0], label="y", test=paths[1], ignored=["patient"])


GROUPED = {
    "columns": lambda tmp_path: Columns(),
    "table": table_of_patients,
    "attribute": lambda tmp_path: DatasetSource(with_attribute()),
    "part": lambda tmp_path: DatasetSource(Subset(with_attribute(), range(60))),
    "items": lambda tmp_path: DatasetSource(Rows()),
    "given": lambda tmp_path: DatasetSource(Pictures(60), columns={"patient": np.arange(60) // 3}),
    "module": lambda tmp_path: OfPatients(),
}


@pytest.mark.parametrize("partition", [None, "DirichletPartition", "ColumnPartition"])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_every_source_are_held_back_whole(name, partition, tmp_path):
    made_ones = {
        "DirichletPartition": lambda: DirichletPartition(0.5, min_samples=0),
        "ColumnPartition": lambda: ColumnPartition("patient"),
    }
    data = FederatedDataModule(
        GROUPED[name](tmp_path),
        num_clients=3,
        val_fraction=0.2,
        val_by="patient",
        partition=made_ones[partition]() if partition else None,
        transfer_size=5,
    )
    data.setup("fit")
    held = set(data.split("val").column("patient").tolist())
    train = data.split("train").column("patient")
    left = {patient for k in range(3) for patient in train[data.client_indices("train", k).numpy()].tolist()}
    assert len(held) == 4
    assert not held & left


def test_groups_that_cannot_be_held_back_are_refused():
    given = partial(FederatedDataModule.from_datasets, Pictures(60), num_clients=3)
    with pytest.raises(ValueError, match=r"data.val_by needs data.val_fraction, .* got val_by=patient"):
        given(val_by="patient")
    with pytest.raises(ValueError, match=r"data.val_by must leave groups of training samples to the clients, got 58"):
        given(val_by="patient", val_fraction=0.97).setup("fit")
    with pytest.raises(ValueError, match="no column 'doctor'"):
        given(val_by="doctor", val_fraction=0.1).setup("fit")
    words = "partition --model.client FedAvg --data.source Digits --data.val_by patient"
    assert "data.val_by needs data.val_fraction" in refusal(words, 1)


# --- validation samples in the place of test samples ------------------------------------------------


def test_validation_samples_take_the_place_of_test_samples():
    plain = FederatedDataModule(Skewed(), num_clients=10, partition=DirichletPartition(0.5), val_fraction=0.2)
    ours = FederatedDataModule(
        Skewed(), num_clients=10, partition=DirichletPartition(0.5), val_fraction=0.2, test_on_val=True
    )
    for data in (plain, ours):
        data.setup("fit")
    held = plain.split("val")
    assert torch.equal(ours.split("test").x, held.x)
    assert torch.equal(ours.split("test").labels, held.labels)
    for client_id in range(10):
        own = ours.client_indices("test", client_id)
        assert bool((own < len(held)).all())
        assert torch.equal(ours.client_indices("train", client_id), plain.client_indices("train", client_id))
    sampled = torch.cat([ours.view(client_id, 0).source("test").x for client_id in range(10)])
    training = ours.split("train").x[torch.cat([ours.client_indices("train", c) for c in range(10)])]
    assert not (sampled[:, None] == training[None]).flatten(2).all(2).any()


def test_owners_are_tested_on_their_own_validation_samples():
    data = FederatedDataModule(Skewed(), num_clients=None, by="owner", val_fraction=0.3, test_on_val=True)
    data.setup("fit")
    owners = data.split("test").column("owner")
    for client_id, name in enumerate(data.client_names):
        tested = {str(owner) for owner in owners[data.client_indices("test", client_id).numpy()]}
        assert tested <= {name}


def test_there_must_be_validation_samples():
    data = FederatedDataModule(Skewed(), num_clients=10, test_on_val=True)
    with pytest.raises(ValueError, match=r"data.test_on_val needs validation samples, got none; set data.val_fraction"):
        data.setup("fit")


def test_an_evaluation_sees_no_test_samples_either():
    data = FederatedDataModule(Skewed(), num_clients=10, val_fraction=0.2, test_on_val=True)
    data.setup("test")
    loader = data.test_dataloader()
    assert sum(len(y) for _, y in loader) == len(data.split("val"))


class StreamsWithTests(Sensors):
    """Streams beside 7 validation samples and 9 test samples."""

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(7, 4), torch.zeros(7, dtype=torch.int64)), batch_size=4)

    def test_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(9, 4), torch.ones(9, dtype=torch.int64)), batch_size=4)


def test_validation_samples_take_the_place_of_test_samples_beside_streams():
    data = FederatedDataModule.from_datamodule(StreamsWithTests(), num_clients=4, test_on_val=True)
    data.setup("fit")
    assert data.split("test") is data.split("val")
    assert all(bool((data.client_indices("test", client_id) < 7).all()) for client_id in range(4))


def test_clients_whose_samples_are_elsewhere_have_test_samples_of_their_own():
    data = FederatedDataModule(Elsewhere(), num_clients=2, num_classes=3, input_shape=(4,), test_on_val=True)
    with pytest.raises(ValueError, match=r"samples that their owners keep; leave data.test_on_val unset"):
        data.setup("fit")
