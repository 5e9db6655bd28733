import time

import numpy as np
import pytest
import torch

from fl_lightning.data import FederatedDataModule, TensorSource
from fl_lightning.data.partitions import (
    ClientDirichletPartition,
    Dealt,
    DirichletPartition,
    FixedPartition,
    IIDPartition,
    Partition,
    PartitionInput,
    QuantityPartition,
    ShardPartition,
)
from tests.toys import samples, toy_data

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
DEALT = PartitionInput(600, LABELS, 10)
PARTITIONS = [
    IIDPartition(),
    DirichletPartition(0.3),
    ShardPartition(2),
    ClientDirichletPartition(0.3),
    QuantityPartition(2),
]


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("num_classes", [None, 10])
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
def test_partitions_deal_every_sample_once_and_follow_the_generator(partition, num_classes):
    parts, again, other = (partition(PartitionInput(600, LABELS, num_classes), 10, rng(s)) for s in (1, 1, 2))
    assert len(parts) == 10
    assert all(p.dtype == np.int64 for p in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
def test_more_clients_than_samples_are_refused(partition):
    with pytest.raises(ValueError, match="number of samples, got 11 clients for 10 samples"):
        partition(PartitionInput(10, np.arange(10), 10), 11, rng())


@pytest.mark.parametrize("partition", PARTITIONS[1:], ids=lambda p: type(p).__name__)
def test_label_skew_needs_labels(partition):
    with pytest.raises(ValueError, match=f"{type(partition).__name__} needs the labels .* use IIDPartition"):
        partition(PartitionInput(600), 10, rng())
    with pytest.raises(ValueError, match="one label per sample, got 600 labels for 599"):
        PartitionInput(599, LABELS)


def test_iid_needs_no_labels():
    assert [len(p) for p in IIDPartition()(PartitionInput(7), 2, rng())] == [4, 3]


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan")])
def test_dirichlet_refuses_alpha_when_it_is_built(alpha):
    with pytest.raises(ValueError, match=f"alpha must be positive, got {alpha}: "):
        DirichletPartition(alpha)


def test_dirichlet_without_min_samples_allows_empty_clients():
    parts = DirichletPartition(1e-3, min_samples=0)(DEALT, 50, rng())
    assert len(parts) == 50
    assert min(map(len, parts)) == 0
    assert sum(map(len, parts)) == 600


def test_dirichlet_says_what_it_reached_and_what_to_change():
    with pytest.raises(ValueError, match=r"min_samples=12 \(alpha=0.01, num_clients=50, 600 samples\)") as info:
        DirichletPartition(0.01, min_samples=12)(DEALT, 50, rng())
    assert "the smallest share reached was 0: lower min_samples (0 allows empty clients)" in str(info.value)


def test_dirichlet_is_fast_for_many_clients():
    start = time.perf_counter()
    parts = DirichletPartition(0.1)(PartitionInput(60_000, np.arange(60_000) % 10, 10), 100, rng())
    assert time.perf_counter() - start < 2
    assert min(map(len, parts)) >= 10


def test_shards_bound_the_classes_of_a_client():
    parts = ShardPartition(2)(PartitionInput(600, LABELS, None), 10, rng())
    assert {len(p) for p in parts} == {60}
    assert max(len(set(LABELS[p])) for p in parts) == 2
    with pytest.raises(ValueError, match="shards_per_client must be at least 1, got 0"):
        ShardPartition(0)
    with pytest.raises(ValueError, match=r"got 2 · 7 = 14 for 10 classes"):
        ShardPartition(2)(PartitionInput(600, LABELS, None), 7, rng())


def test_shards_deal_the_test_split_by_the_same_classes():
    test_labels = rng(4).permutation(np.repeat(np.arange(10), 10))
    partition = ShardPartition(2)
    train = partition(DEALT, 10, rng(3))
    test = partition.partition_test(Dealt(train, DEALT, rng(3)), PartitionInput(100, test_labels, 10))
    assert np.array_equal(np.sort(np.concatenate(test)), np.arange(100))
    for a, b in zip(train, test, strict=True):
        assert set(LABELS[a]) == set(test_labels[b])


def shares(labels, part):
    return np.bincount(labels[part], minlength=10) / len(part)


@pytest.mark.parametrize("partition", PARTITIONS[:2] + PARTITIONS[4:], ids=lambda p: type(p).__name__)
def test_a_test_set_has_the_class_proportions_of_its_client(partition):
    test_labels = np.repeat(np.arange(10), 100)
    train = partition(DEALT, 10, rng())
    for size, expected in ((None, 100), (50, 50)):
        test = partition.partition_test(Dealt(train, DEALT, rng()), PartitionInput(1000, test_labels, 10), size)
        for a, b in zip(train, test, strict=True):
            assert len(set(b.tolist())) == len(b) == expected
            assert abs(shares(LABELS, a) - shares(test_labels, b)).max() <= 1 / expected


def test_a_client_is_not_tested_on_classes_that_it_lacks():
    test_labels = np.repeat(np.arange(10), 5)
    (test,) = IIDPartition().partition_test(
        Dealt([np.flatnonzero(LABELS == 3)], DEALT, rng()), PartitionInput(50, test_labels, 10)
    )
    assert test_labels[test].tolist() == [3] * 5
    (test,) = IIDPartition().partition_test(Dealt([np.arange(0)], DEALT, rng()), PartitionInput(50, test_labels, 10))
    assert len(test) == 50


def test_client_dirichlet_tests_by_the_samples():
    test_labels = np.repeat(np.arange(10), 1000)
    drawn = ClientDirichletPartition(0.5, overlap=True)
    train = drawn(DEALT, 2, rng(1))
    test = drawn.partition_test(Dealt(train, DEALT, rng(1)), PartitionInput(10_000, test_labels, 10), size=1000)
    for a, b in zip(train, test, strict=True):
        assert abs(shares(LABELS, a) - shares(test_labels, b)).max() <= 1e-3
    equal = ClientDirichletPartition(float("inf"), overlap=True)
    few = equal.partition_test(Dealt(train, DEALT, rng(1)), PartitionInput(100, test_labels[::100], 10))
    assert [len(part) for part in few] == [50, 50]

    fixed = ClientDirichletPartition(0.1, samples_per_client=40)
    train = fixed(DEALT, 10, rng(2))
    assert {len(part) for part in train} == {40}
    test = fixed.partition_test(Dealt(train, DEALT, rng(2)), PartitionInput(10_000, test_labels, 10))
    for a, b in zip(train, test, strict=True):
        assert np.array_equal(shares(LABELS, a), shares(test_labels, b))


def test_client_dirichlet_says_when_there_are_too_few_samples():
    with pytest.raises(ValueError, match="got 61 for each of 10 clients and 600 samples: lower samples_per_client"):
        ClientDirichletPartition(1.0, samples_per_client=61)(DEALT, 10, rng())
    parts = ClientDirichletPartition(1.0, samples_per_client=61, overlap=True)(DEALT, 10, rng())
    assert {len(set(part.tolist())) for part in parts} == {61}
    with pytest.raises(ValueError, match="samples_per_client must be at least 1, got 0"):
        ClientDirichletPartition(1.0, samples_per_client=0)
    with pytest.raises(ValueError, match="alpha must be positive, got 0"):
        ClientDirichletPartition(0)


def test_quantity_refuses_its_settings_when_it_is_built():
    with pytest.raises(ValueError, match="classes_per_client must be at least 1, got 0"):
        QuantityPartition(0)
    with pytest.raises(ValueError, match="upper must be one of mean, class, got 'max'"):
        QuantityPartition(2, upper="max")


def test_the_data_module_deals_test_sets_by_the_partition():
    def data(**settings):
        module = toy_data(num_clients=3, partition=ShardPartition(2), **settings)
        module.setup()
        return module

    dealt = data()
    parts = [dealt.client_indices("test", client_id) for client_id in range(3)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))
    _, y = samples(30, seed=1)
    for client_id, part in enumerate(parts):
        has = set(dealt.label_counts[client_id].nonzero().flatten().tolist())
        assert set(y[part].tolist()) == has
    assert [len(data(client_test_size=7).client_indices("test", c)) for c in range(3)] == [7] * 3


def test_fixed_returns_its_lists_as_copies():
    partition = FixedPartition([[3, 1], [], [1, 2]])
    parts = partition(PartitionInput(4), 3, rng())
    assert [p.tolist() for p in parts] == [[3, 1], [], [1, 2]]
    assert all(p.dtype == np.int64 for p in parts)
    parts[0][0] = 99
    assert partition(PartitionInput(4), 3, rng())[0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("indices", "num_clients", "sentence"),
    [
        ([[0], [4]], 2, r"must lie in 0 ... 3, got 4 for client 1"),
        ([[-1], [0]], 2, r"must lie in 0 ... 3, got -1 for client 0"),
        ([[0], [1]], 3, "got 2 lists for 3 clients: set num_clients to 2"),
        ([[0.5]], 1, "flat list of whole numbers"),
        ([[[0]]], 1, "flat list of whole numbers"),
    ],
)
def test_fixed_refuses_what_it_cannot_deal(indices, num_clients, sentence):
    with pytest.raises(ValueError, match=sentence):
        FixedPartition(indices)(PartitionInput(4), num_clients, rng())


class Outside(Partition):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, samples, num_clients, generator):
        return [np.array([samples.size - 1]), np.array([self.factor * samples.size])]


@pytest.mark.parametrize("val_fraction", [0, 0.1])
@pytest.mark.parametrize("factor", [-1, 1])
def test_indices_that_a_partition_makes_up_are_refused(factor, val_fraction):
    """They count the samples that are left, since they depend on these."""
    left = int(100 * (1 - val_fraction))
    split = torch.zeros(100, 2), torch.zeros(100, dtype=torch.int64)
    source = TensorSource(split, split, num_classes=2)
    data = FederatedDataModule(source, 2, Outside(factor), val_fraction=val_fraction)
    with pytest.raises(ValueError, match=rf"must lie in \[0, {left}\), got {factor * left};"):
        data.setup("fit")
