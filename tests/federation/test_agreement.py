"""Processes compare their data before anything trains."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.distributed import Communicator
from fl_lightning.federation import evaluation, parts
from fl_lightning.federation.agreement import check_same_everywhere, digest_of
from tests.toys import samples, toy_data, trainer
from tests.user_modules import Classifier


class Pair(Communicator):
    """Two processes, which have noted what each shares.

    Args:
        shared: What the other one shares. None: nothing yet.
    """

    def __init__(self, shared=None):
        super().__init__()
        self.world = 2
        self.shared = shared

    def gather(self, value):
        if self.shared is None:
            self.shared = copy.deepcopy(value)
        return [self.shared, value]


def data_of(size=40, labels=None, inputs=None, test=10, **settings):
    x, y = samples(size)
    x = x if inputs is None else inputs(x)
    source = TensorSource((x, y if labels is None else labels(y)), samples(test, seed=1), num_classes=3)
    data = FederatedDataModule(source, num_clients=4, **settings)
    data.setup()
    return data


def compare(first, other, fits=True):
    pair = Pair()
    check_same_everywhere(first, pair, fits=fits)
    check_same_everywhere(other, pair, fits=fits)


def test_equal_data_pass():
    compare(data_of(), data_of())
    compare(data_of(val_fraction=0.2), data_of(val_fraction=0.2))


DIFFERENCES = {
    "length": ({"size": 20}, "got 40 train samples at rank 0 and 20 at rank 1"),
    "length of another split": ({"test": 5}, "got 10 test samples at rank 0 and 5 at rank 1"),
    "labels": ({"labels": lambda y: y.flip(0)}, "got other labels of the train samples at rank 1"),
    "inputs": ({"inputs": lambda x: x + 1}, "got other inputs of the train samples at rank 1"),
    "batch size": ({"batch_size": 4}, "data.batch_size .* got 32 at rank 0 and 4 at rank 1"),
    "batch size of evaluation": ({"eval_batch_size": 4}, "data.eval_batch_size .* and 4 at rank 1"),
    "order": ({"shuffle": False}, "data.shuffle .* got True at rank 0 and False at rank 1"),
    "partition": ({"seed": 1}, "data.partition must deal the same samples"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_data_are_refused(name):
    settings, sentence = DIFFERENCES[name]
    with pytest.raises(ValueError, match=sentence):
        compare(data_of(), data_of(**settings))


def test_what_is_dealt_counts_in_a_fit_only():
    compare(data_of(), data_of(seed=1), fits=False)


def test_one_process_compares_nothing():
    alone = Communicator()
    alone.gather = None
    check_same_everywhere(toy_data(), alone, fits=True)  # its data are not even set up


@pytest.mark.parametrize("shape", [(1,), (0,), (3,), (2, 2)])
def test_expanded_tensors_have_a_digest(shape):
    expanded = torch.tensor(7).expand(shape)
    assert digest_of(expanded) == digest_of(torch.full(shape, 7))


PASSES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class Loaders(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(12)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Shard(pl.LightningDataModule):
    """Takes every second sample, from the one of its rank on: of equal number, without labels.

    Args:
        rank: The rank.
        split: The split of which it takes a part.
        draws: Whether reading a sample draws from the generators of torch.
    """

    def __init__(self, rank, split, draws=False):
        super().__init__()
        self.rank = rank
        self.split = split
        self.draws = draws

    def loader(self, name):
        dataset = Targets(draws=self.draws)
        if name == self.split:
            dataset = Subset(dataset, range(self.rank, 24, 2))
        return DataLoader(dataset, batch_size=4)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")


class Targets(Dataset):
    def __init__(self, draws=False):
        self.draws = draws

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = torch.rand(2) if self.draws else 0.0
        return torch.full((2,), float(index)) + noise, torch.tensor([float(index)])


def sharded(rank, split, **settings):
    data = FederatedDataModule.from_datamodule(Shard(rank, split, **settings), num_clients=2)
    data.setup("fit")
    return data


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("draws", [False, True])
def test_shards_of_equal_length_without_labels_are_refused(split, draws):
    compare(sharded(0, split, draws=draws), sharded(0, split, draws=draws))
    with pytest.raises(ValueError, match=f"got other inputs of the {split} samples at rank 1"):
        compare(sharded(0, split, draws=draws), sharded(1, split, draws=draws))


@pytest.mark.parametrize("name", PASSES)
def test_every_use_of_the_trainer_compares_the_samples_it_needs(name, monkeypatch):
    compared = []

    def compare_nothing(data, communicator, *, fits):
        compared.append((fits, PASSES[name] in data.loaded_splits))

    for module in (parts, evaluation):
        monkeypatch.setattr(module, "check_same_everywhere", compare_nothing)
    data = FederatedDataModule.from_datamodule(Loaders(), num_clients=2)
    getattr(trainer(2), name)(FederatedLoop(Classifier()), datamodule=data)
    assert compared == [(name == "fit", True)]
