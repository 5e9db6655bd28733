"""Labels of every integer type and bool are classes, with every method and every form of data."""

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import DirichletPartition, HuggingFace, IIDPartition, TensorSource
from fl_lightning.data.splits import TensorSplit
from fl_lightning.functional.classes import WHOLE, class_labels
from fl_lightning.methods import FedAvg
from tests.data.test_hub import Rows, value
from tests.test_contract import NAMES, Net, cohorts_of, settings_of
from tests.toys import equal, fit, sgd, weights_of

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
TYPES = sorted(WHOLE, key=str)


class Items(Dataset):
    """A dataset that is read item by item."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Made(Dataset):
    """Items whose label is made anew, and is no attribute."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], self.make(int(Y[index]))


class Endless(IterableDataset):
    """The samples of one client, again and again."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __iter__(self):
        while True:
            yield from zip(self.x, self.y, strict=True)


def in_memory(y, **settings):
    return FederatedDataModule(TensorSource((X, y), (X, y), num_classes=2), **settings)


def of_tensors(y, **settings):
    return FederatedDataModule.from_datasets(TensorDataset(X, y), TensorDataset(X, y), **settings)


def of_items(y, **settings):
    return FederatedDataModule.from_datasets(Items(X, y), Items(X, y), num_classes=2, **settings)


def of_streams(y, **settings):
    settings |= {"num_clients": 3, "input_shape": (4,)}
    streams = {i: Endless(X[i::3], y[i::3]) for i in range(3)}
    return FederatedDataModule.from_datasets(streams, Items(X, y), num_classes=2, **settings)


def of_parts(y, **settings):
    whole = TensorDataset(X, y)
    parts = ConcatDataset([Subset(whole, range(12)), Subset(whole, range(12, 24))])
    return FederatedDataModule.from_datasets(parts, whole, **settings)


def of_rows(y, **settings):
    features = {"x": type("Sequence", (), {"feature": value("float32")})(), "label": value(str(y.dtype)[6:])}
    rows = Rows(features, x=X.numpy(), label=y.numpy())
    return FederatedDataModule(HuggingFace({"train": rows, "test": rows}, input="x"), **settings)


FORMS = {make.__name__: make for make in (in_memory, of_tensors, of_items, of_streams, of_parts, of_rows)}


def run(make, y, name="FedAvg", rounds=1, **settings):
    data = make(y, num_clients=3, batch_size=4, **cohorts_of(name))
    parts = settings_of(name, net=Net, optimizer=sgd())
    limits = {"max_local_steps": 2} if make is of_streams else {}
    return fit(None, rounds, data, loop=FederatedLoop(**parts, **limits, **settings, seed=0))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_labels_of_every_type_are_classes_in_every_form_of_data(form, kind):
    whole = run(FORMS[form], Y, metrics=MulticlassF1Score(2))
    other = run(FORMS[form], Y.to(kind), metrics=MulticlassF1Score(2))
    assert equal(weights_of(whole), weights_of(other))
    assert whole.round_metrics == other.round_metrics


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [torch.bool, torch.int16], ids=str)
def test_every_method_takes_them(name, kind):
    def make(y, **settings):
        further = {"proxy": TensorSource((X, y), (X, y), 2), "transfer": TensorSource((X, y), (X, y), 2)}
        return of_tensors(y, extra_splits=further, partition=IIDPartition(), **settings)

    whole = run(make, Y, name)
    other = run(make, Y.to(kind), name)
    assert equal(weights_of(whole), weights_of(other))
    assert whole.round_metrics.keys() == other.round_metrics.keys()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_split_counts_them(kind):
    split = TensorSplit(X, Y.to(kind))
    assert (split.labels.dtype, split.labels.tolist()) == (torch.int64, Y.tolist())
    data = of_items(Y.to(kind), num_clients=2)
    data.setup()
    assert data.label_counts.sum(0).tolist() == Y.bincount().tolist()


def test_a_module_of_the_users_gets_truth_values_as_they_are():
    seen = []

    class Own(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            seen.append(y.dtype)
            return self.net(x)[y].square().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for make in (of_tensors, of_items):
        fit(FedAvg(module=Own()), 1, make(Y.bool(), num_clients=2, batch_size=4))
    assert set(seen) == {torch.bool}
    assert class_labels(torch.tensor([0.5])).dtype == torch.float32


SCALARS = {
    "int": int,
    "bool": bool,
    "np.uint8": np.uint8,
    "np.bool": np.bool_,
    "array": np.array,
    "tensor": torch.tensor,
    "truth tensor": lambda label: torch.tensor(bool(label)),
    "uint64 tensor": lambda label: torch.tensor(label, dtype=torch.uint64),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_a_label_may_be_any_whole_number(kind):
    data = FederatedDataModule.from_datasets(
        Made(SCALARS[kind]), Made(SCALARS[kind]), num_clients=3, batch_size=4, partition=DirichletPartition(10.0, 1)
    )
    loop = fit(None, 1, data, loop=FederatedLoop(FedAvg(net=Net, optimizer=sgd()), seed=0))
    assert data.label_counts.sum(0).tolist() == Y.bincount().tolist()
    whole = FederatedDataModule.from_datasets(
        Made(int), Made(int), num_clients=3, batch_size=4, partition=DirichletPartition(10.0, 1)
    )
    other = fit(None, 1, whole, loop=FederatedLoop(FedAvg(net=Net, optimizer=sgd()), seed=0))
    assert equal(weights_of(loop), weights_of(other))


@pytest.mark.parametrize(
    "attribute", [list, np.array, tuple, lambda y: np.array(y, dtype=object), lambda y: [bool(label) for label in y]]
)
def test_labels_may_be_an_attribute_of_any_form(attribute):
    items = Items(X, Y)
    items.targets = attribute(Y.tolist())
    data = FederatedDataModule.from_datasets(items, items, num_clients=2, partition=DirichletPartition(10.0, 1))
    data.setup()
    assert data.label_counts.sum(0).tolist() == Y.bincount().tolist()


OTHERS = {
    "float64": float,
    "float32": lambda label: torch.tensor(float(label)),
    "a column": lambda label: torch.tensor([label]),
    "one-hot rows": lambda label: torch.nn.functional.one_hot(torch.tensor(label), 2),
    "float32 ": lambda label: torch.nn.functional.one_hot(torch.tensor(label), 2).float(),
    "str": lambda label: "ab"[label],
    "-1 of 2 classes|-2 of": lambda label: label - 2,
    "5 of 2 classes|6 of": lambda label: label + 5,
}


@pytest.mark.parametrize("found", OTHERS)
def test_other_targets_are_refused_before_a_net_trains(found):
    make = OTHERS[found]
    data = FederatedDataModule.from_datasets(Made(make), num_classes=2, num_clients=2, partition=IIDPartition())
    with pytest.raises(ValueError, match=rf"targets must be the number of a class .* with net=, got ({found.strip()})"):
        fit(None, 1, data, loop=FederatedLoop(FedAvg(net=Net, optimizer=sgd()), seed=0))


def test_items_that_cannot_be_joined_to_a_batch_are_refused_before_a_net_trains():
    data = FederatedDataModule.from_datasets(Made(np.uint64), num_classes=2, num_clients=2, partition=IIDPartition())
    with pytest.raises(ValueError, match=r"items of Made cannot be joined to a batch .*; return tensors, arrays or"):
        fit(None, 1, data, loop=FederatedLoop(FedAvg(net=Net, optimizer=sgd()), seed=0))


def test_a_loss_of_the_users_may_read_other_targets():
    class Regression(FedAvg):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self(x)[:, 0] - y).square().mean()

    data = FederatedDataModule.from_datasets(Made(float), num_classes=1, num_clients=2, partition=IIDPartition())
    fit(None, 1, data, loop=FederatedLoop(Regression(net=Net, optimizer=sgd()), seed=0))
