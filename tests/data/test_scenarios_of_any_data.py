"""Each scenario over each kind of source and partition: clients have what was dealt to them, and nothing else."""

import csv

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from fl_lightning import data as D
from fl_lightning.data import FederatedDataModule

NUM = 90
NUM_CLASSES = 3
NUM_CLIENTS = 3
ROUNDS = 6


def arrays(num=NUM, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.random((num, 1, 4, 4), dtype=np.float32)
    y = np.arange(num) % NUM_CLASSES
    return torch.from_numpy(x), torch.from_numpy(y)


class Pairs(Dataset):
    """Samples that are read one at a time."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, position):
        return self.x[position], int(self.y[position])


class Loaders(LightningDataModule):
    """A data module of a user."""

    def train_dataloader(self):
        return DataLoader(Pairs(*arrays()), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Pairs(*arrays(12, seed=1)), batch_size=8)


def tensors(folder, **settings):
    return FederatedDataModule(D.TensorSource(arrays(), arrays(12, seed=1), num_classes=NUM_CLASSES), **settings)


def dataset(folder, **settings):
    source = D.DatasetSource(Pairs(*arrays()), Pairs(*arrays(12, seed=1)), num_classes=NUM_CLASSES)
    return FederatedDataModule(source, **settings)


def table(folder, **settings):
    paths = {"train": folder / "train.csv", "test": folder / "test.csv"}
    for (name, path), num in zip(paths.items(), (NUM, 12), strict=True):
        x, y = arrays(num, seed=len(name))
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["first", "second", "risk"])
            rows.writerows([*row[0, 0, :2].tolist(), label] for row, label in zip(x, y.tolist(), strict=True))
    return FederatedDataModule(D.TableSource(paths["train"], "risk", paths["test"]), **settings)


def user_module(folder, **settings):
    return FederatedDataModule.from_datamodule(Loaders(), **settings)


SOURCES = (tensors, dataset, table, user_module)

READ_BY_CODE = (dataset, user_module)
"""Sources whose samples cannot be seen in another way."""

PARTITIONS = (
    D.IIDPartition(),
    D.DirichletPartition(1.0, min_samples=3),
    D.ShardPartition(2),
    D.ClientDirichletPartition(1.0),
    D.QuantityPartition(2, shuffle_clients=True),
    D.QuantityDirichletPartition(1.0, min_samples=3),
    D.FixedPartition([list(range(client_id, NUM, NUM_CLIENTS)) for client_id in range(NUM_CLIENTS)]),
)


def listed(folder):
    path = folder / "rounds.csv"
    lines = [f"{sample},{sample % 3},{sample % 3 + 2}" for sample in range(NUM)]
    path.write_text("\n".join(["sample,first,last", *lines]) + "\n")
    return D.ListedSamples(path)


SCENARIOS = {
    "classes": lambda folder: D.ClassIncremental([[0], [1], [2]], rounds_per_task=2, delay=2, blur=0.2),
    "cumulative": lambda folder: D.ClassIncremental([[0], [1], [2]], rounds_per_task=2, cumulative=True),
    "domains": lambda folder: D.DomainIncremental(rounds_per_task=2, permutations=3),
    "drift": lambda folder: D.LabelDrift(alpha=1.0, rounds=ROUNDS, samples=0.5),
    "window": lambda folder: D.Window(per_round=0.2, keep=3),
    "listed": listed,
    "removed": lambda folder: D.RemoveSamples(class_idx=0, client=1, start=1, every=1, step=0.5),
}


def check(data, *, looks_the_same):
    """Check that a client has some of what was dealt to it in each round, and that its batches are of these samples."""
    data.prepare_data()
    data.setup("fit")
    train = data.split("train")
    some = 0
    for client_id in range(NUM_CLIENTS):
        part = data.client_samples().dealt[client_id].tolist()
        before = None
        for round_idx in range(ROUNDS):
            there = data.client_samples().indices(client_id, round_idx)
            positions = there.tolist()
            assert [sample for sample in part if sample in set(positions)] == positions
            view = data.view(client_id, round_idx)
            assert view.num_samples == data.size(client_id, round_idx) == len(positions)
            assert view.labels().equal(train.labels[there])
            assert view.label_counts.tolist() == torch.bincount(view.labels(), minlength=NUM_CLASSES).tolist()
            batches = list(view.batches("train", epoch=0))
            given = [batch[1] for batch in batches]
            assert sum(map(len, given)) == len(positions)
            if positions:
                assert torch.cat(given).sort().values.equal(view.labels().sort().values)
                some += 1
            if positions and looks_the_same:
                x = torch.cat([batch[0] for batch in batches])
                (expected,) = train.batches([there], None)
                assert x.double().sum().item() == pytest.approx(expected[0].double().sum().item(), rel=1e-9)
            if before is not None and looks_the_same:
                arrived = view.arrived(round_idx - 1)
                assert sorted(there[arrived].tolist()) == sorted(set(positions) - set(before))
            before = positions
    assert some


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_each_source_changes(make, scenario, tmp_path):
    settings = {"num_clients": NUM_CLIENTS, "partition": PARTITIONS[1], "batch_size": 7, "seed": 4}
    data = make(tmp_path, scenario=SCENARIOS[scenario](tmp_path), **settings)
    if scenario == "domains" and make in READ_BY_CODE:
        with pytest.raises(ValueError, match=r"change samples in memory, .* give tensors"):
            check(data, looks_the_same=False)
    else:
        check(data, looks_the_same=scenario != "domains")


class TurnsLater(D.Scenario):
    """All samples are seen in another way from round 3 on."""

    def stage(self, client_id, round_idx):
        return int(round_idx >= 3)

    def seen(self, client_id, stage):
        return torch.neg if stage else None


def test_samples_that_cannot_be_seen_in_another_way_are_refused_before_the_first_round(tmp_path):
    with pytest.raises(ValueError, match=r"change samples in memory, .* give tensors"):
        dataset(tmp_path, scenario=TurnsLater(), num_clients=NUM_CLIENTS).setup("fit")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: type(partition).__name__)
def test_each_partition_changes(partition, scenario, tmp_path):
    settings = {"num_clients": NUM_CLIENTS, "partition": partition, "batch_size": 7, "seed": 4}
    data = tensors(tmp_path, scenario=SCENARIOS[scenario](tmp_path), **settings)
    check(data, looks_the_same=scenario != "domains")
