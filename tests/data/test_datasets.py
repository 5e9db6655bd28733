"""Datasets and data modules of one's own."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from fl_lightning import FederatedDataModule
from fl_lightning.data import DatasetSource, DirichletPartition
from fl_lightning.data.datasets import labels_of
from tests.user_data import Dicts, DictSamples, Pairs, points


def ready(data):
    data.setup("fit")
    return data


class Targets(torch.utils.data.Dataset):
    """As torchvision's: images by index, all labels in `targets`."""

    def __init__(self, n=12):
        self.x, y = points(n, 0)
        self.targets = y.tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.x[index], self.targets[index]


class Items(Targets):
    def __init__(self, n=12):
        super().__init__(n)
        self.hidden = self.targets
        del self.targets

    def __len__(self):
        return len(self.hidden)

    def __getitem__(self, index):
        return self.x[index], self.hidden[index]


LABELS = points(12, 0)[1].tolist()


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (TensorDataset(*points(12, 0)), LABELS),
        (Targets(), LABELS),
        (Items(), LABELS),
        (DictSamples(12, 0), LABELS),
        (Subset(Targets(), [3, 1]), [LABELS[3], LABELS[1]]),
        (ConcatDataset([Targets(), TensorDataset(*points(12, 0))]), LABELS * 2),
        (TensorDataset(torch.zeros(3, 1), torch.zeros(3, 1)), None),
        (TensorDataset(torch.zeros(3, 1), torch.zeros(3)), None),
        (TensorDataset(torch.zeros(3, 1)), None),
    ],
)
def test_labels_are_found_where_they_are(dataset, expected):
    found = labels_of(dataset)
    assert (found is None) if expected is None else found.tolist() == expected


def test_every_sample_belongs_to_one_client_and_keeps_its_label():
    dataset = Items(40)
    data = ready(FederatedDataModule.from_datasets(dataset, num_clients=4, partition=DirichletPartition(1.0, 2)))
    seen = []
    for client_id in range(4):
        for x, y in data.view(client_id, 0).batches("train", epoch=0, batch_size=7):
            seen += [tuple(row.tolist()) for row in torch.cat([x, y[:, None].float()], 1)]
    assert sorted(seen) == sorted((*x.tolist(), float(y)) for x, y in (dataset[i] for i in range(40)))
    assert data.label_counts.sum(0).tolist() == np.bincount(dataset.hidden, minlength=3).tolist()
    assert data.input_shape == (4,)


def test_the_loader_is_read_and_ours_wins_where_set():
    data = ready(FederatedDataModule.from_datamodule(Pairs(batch_size=9), num_clients=2))
    assert (data.batch_size, data.shuffle, data.evaluated) == (9, True, "val")
    data = ready(FederatedDataModule.from_datamodule(Pairs(), num_clients=2, batch_size=4, shuffle=False))
    assert (data.batch_size, data.shuffle) == (4, False)


def test_collate_and_missing_test_split():
    data = ready(FederatedDataModule.from_datamodule(Dicts(), num_clients=3))
    batch = next(data.view(0, 0).batches("train", epoch=0))
    assert batch.keys() == {"image", "label"}
    assert data.evaluated == "val"
    with pytest.raises(ValueError, match="the data have no split 'test'"):
        data.split("test")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_clients_epoch_can_be_repeated_exactly(workers):
    class Noisy(Items):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + np.random.randn(), y

    data = ready(FederatedDataModule.from_datasets(Noisy(), num_workers=workers, num_clients=1, batch_size=5))
    draw = [torch.cat([x for x, _ in data.view(0, r).batches("train", epoch=0)]) for r in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


class TestNaturalUsers:
    def test_each_user_is_a_client(self):
        data = ready(FederatedDataModule.from_datasets(DictSamples(20, 0), DictSamples(13, 1), by="writer"))
        assert data.num_clients == 6
        for client_id in range(6):
            assert data.client_indices("train", client_id).tolist() == list(range(client_id, 20, 6))
            assert data.client_indices("test", client_id).tolist() == list(range(client_id, 13, 6))

    def test_by_a_key_of_the_items(self):
        class Keys(DictSamples):
            def __init__(self, n):
                super().__init__(n, 0)
                self.user = self.writer
                del self.writer

            def __getitem__(self, index):
                return {"image": self.x[index], "label": int(self.y[index]), "writer": self.user[index]}

        assert FederatedDataModule.from_datasets(Keys(20), by="writer").num_clients == 6

    def test_by_a_list(self):
        data = ready(FederatedDataModule.from_datasets(Items(6), by=["b", "a", "b", "c", "a", "b"]))
        assert [data.client_indices("train", i).tolist() for i in range(3)] == [[1, 4], [0, 2, 5], [3]]

    def test_users_are_dealt_to_fewer_clients(self):
        data = ready(FederatedDataModule.from_datasets(DictSamples(20, 0), by="writer", num_clients=4))
        sizes = [len(data.client_indices("train", i)) for i in range(4)]
        assert sum(sizes) == 20
        assert min(sizes) > 0

    def test_more_clients_than_users_are_refused(self):
        with pytest.raises(ValueError, match=r"at most the number of values in column 'writer' \(6\), got 9"):
            ready(FederatedDataModule.from_datasets(DictSamples(20, 0), by="writer", num_clients=9))

    def test_a_column_that_is_not_there_is_refused(self):
        with pytest.raises(ValueError, match="have no column 'author'; name an attribute"):
            FederatedDataModule.from_datasets(DictSamples(20, 0), by="author")


class Streams(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


def module_of(loader):
    class One(pl.LightningDataModule):
        def train_dataloader(self):
            return loader

    return One()


PAIRS = TensorDataset(*points(8, 0))


class Backwards(torch.utils.data.Sampler):
    def __init__(self, dataset):
        self.size = len(dataset)

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


@pytest.mark.parametrize(
    ("loader", "error", "words"),
    [
        (DataLoader(Streams(), batch_size=2), ValueError, "a stream does not have, got a DataLoader of Streams"),
        (DataLoader(PAIRS, batch_size=None), ValueError, "must have a batch_size"),
        (
            DataLoader(PAIRS, sampler=WeightedRandomSampler([1.0] * 8, 8)),
            ValueError,
            "a WeightedRandomSampler draws from",
        ),
        (DataLoader(PAIRS, sampler=Backwards(PAIRS)), ValueError, "sequential or shuffled, got Backwards"),
        ([DataLoader(PAIRS), DataLoader(PAIRS)], TypeError, "must return one torch DataLoader, got 2"),
        (None, ValueError, "must define train_dataloader"),
    ],
)
def test_loaders_that_cannot_be_divided_are_refused(loader, error, words):
    with pytest.raises(error, match=words):
        ready(FederatedDataModule(module_of(loader)))


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(TypeError, match="a dataset needs __len__ and __getitem__, got Streams"):
        ready(FederatedDataModule(DatasetSource(Streams())))


def test_a_label_outside_the_classes_is_refused():
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 2\), got 2"):
        ready(FederatedDataModule.from_datasets(Targets(), num_classes=2))


class Grades(Items):
    def __init__(self):
        super().__init__()
        self.hidden = [label - 1 for label in self.hidden]


@pytest.mark.parametrize("dataset", [Grades(), TensorDataset(torch.zeros(12, 4), torch.arange(12) - 3)])
def test_whole_numbers_below_zero_are_no_classes(dataset):
    data = ready(FederatedDataModule.from_datasets(dataset, num_clients=2, transfer_size=3))
    assert data.num_classes is None
    assert data.split("train").labels is data.split("transfer").labels is None
    with pytest.raises(ValueError, match="label_counts needs samples with integer labels"):
        _ = data.view(0, 0).label_counts
