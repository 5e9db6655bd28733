"""Labels of every integer type and bool are classes, with every method and every form of data."""

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import IIDPartition, TensorSource
from fl_lightning.data.splits import TensorSplit
from fl_lightning.functional.classes import WHOLE, class_labels
from fl_lightning.methods import FedAvg
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


FORMS = {make.__name__: make for make in (in_memory, of_tensors, of_items, of_streams)}


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
