import time

import numpy as np
import pytest

from fl_lightning.data.partitions import DirichletPartition, FixedPartition, IIDPartition, ShardPartition

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
PARTITIONS = [IIDPartition(), DirichletPartition(0.3), ShardPartition(2)]


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("num_classes", [None, 10])
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
def test_partitions_deal_every_sample_once_and_follow_the_generator(partition, num_classes):
    parts, again, other = (partition(LABELS, 600, 10, num_classes, rng(s)) for s in (1, 1, 2))
    assert len(parts) == 10
    assert all(p.dtype == np.int64 for p in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
def test_more_clients_than_samples_are_refused(partition):
    with pytest.raises(ValueError, match="number of samples, got 11 clients for 10 samples"):
        partition(np.arange(10), 10, 11, 10, rng())


@pytest.mark.parametrize("partition", PARTITIONS[1:], ids=lambda p: type(p).__name__)
def test_label_skew_needs_labels(partition):
    with pytest.raises(ValueError, match=f"{type(partition).__name__} needs the labels .* use IIDPartition"):
        partition(None, 600, 10, None, rng())
    with pytest.raises(ValueError, match="one label per sample, got 600 labels for 599"):
        partition(LABELS, 599, 10, None, rng())


def test_iid_needs_no_labels():
    assert [len(p) for p in IIDPartition()(None, 7, 2, None, rng())] == [4, 3]


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan")])
def test_dirichlet_refuses_alpha_when_it_is_built(alpha):
    with pytest.raises(ValueError, match=f"alpha must be positive, got {alpha}: "):
        DirichletPartition(alpha)


def test_dirichlet_without_min_samples_allows_empty_clients():
    parts = DirichletPartition(1e-3, min_samples=0)(LABELS, 600, 50, 10, rng())
    assert len(parts) == 50
    assert min(map(len, parts)) == 0
    assert sum(map(len, parts)) == 600


def test_dirichlet_says_what_it_reached_and_what_to_change():
    with pytest.raises(ValueError, match=r"min_samples=12 \(alpha=0.01, num_clients=50, 600 samples\)") as info:
        DirichletPartition(0.01, min_samples=12)(LABELS, 600, 50, 10, rng())
    assert "the smallest share reached was 0: lower min_samples (0 allows empty clients)" in str(info.value)


def test_dirichlet_is_fast_for_many_clients():
    start = time.perf_counter()
    parts = DirichletPartition(0.1)(np.arange(60_000) % 10, 60_000, 100, 10, rng())
    assert time.perf_counter() - start < 2
    assert min(map(len, parts)) >= 10


def test_shards_bound_the_classes_of_a_client():
    parts = ShardPartition(2)(LABELS, 600, 10, None, rng())
    assert {len(p) for p in parts} == {60}
    assert max(len(set(LABELS[p])) for p in parts) == 2
    with pytest.raises(ValueError, match="shards_per_client must be at least 1, got 0"):
        ShardPartition(0)
    with pytest.raises(ValueError, match=r"got 2 · 7 = 14 for 10 classes"):
        ShardPartition(2)(LABELS, 600, 7, None, rng())


def test_shards_deal_the_test_split_by_the_same_classes():
    test_labels = rng(4).permutation(np.repeat(np.arange(10), 10))
    train, test = ShardPartition(2).with_test(LABELS, test_labels, 10, 10, rng(3))
    for a, b in zip(train, ShardPartition(2)(LABELS, 600, 10, 10, rng(3)), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(np.sort(np.concatenate(test)), np.arange(100))
    for a, b in zip(train, test, strict=True):
        assert set(LABELS[a]) == set(test_labels[b])


def test_fixed_returns_its_lists_as_copies():
    partition = FixedPartition([[3, 1], [], [1, 2]])
    parts = partition(None, 4, 3, None, rng())
    assert [p.tolist() for p in parts] == [[3, 1], [], [1, 2]]
    assert all(p.dtype == np.int64 for p in parts)
    parts[0][0] = 99
    assert partition(None, 4, 3, None, rng())[0].tolist() == [3, 1]


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
        FixedPartition(indices)(None, 4, num_clients, None, rng())
