import numpy as np
import pytest

from fl_lightning.data import DirichletPartition, IIDPartition, PartitionInput, ShardPartition
from fl_lightning.data import partitioning as P


def rng(seed=0):
    return np.random.default_rng(seed)


def iid(n, num_clients, generator):
    return IIDPartition()(PartitionInput(n), num_clients, generator)


def dirichlet(labels, num_clients, num_classes, alpha, generator, min_samples=10):
    samples = PartitionInput(len(labels), np.asarray(labels), num_classes)
    return DirichletPartition(alpha, min_samples)(samples, num_clients, generator)


def shards(labels, num_clients, num_classes, shards_per_client, seed=0):
    samples = PartitionInput(len(labels), np.asarray(labels), num_classes)
    indices = ShardPartition(shards_per_client)(samples, num_clients, rng(seed))
    return indices, P.shard_classes(num_clients, num_classes, shards_per_client, rng(seed))


def skewed_labels(seed=0, n=997, num_classes=7):
    return rng(seed).choice(num_classes, n, p=np.arange(1, num_classes + 1) / sum(range(num_classes + 1)))


def assert_deals(parts, n):
    assert all(part.dtype == np.int64 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


def naive_lda_counts(class_sizes, proportions):
    num_clients = len(proportions[0])
    held = [0] * num_clients
    table = []
    for size, shares in zip(class_sizes, proportions, strict=True):
        kept = [s if h < sum(class_sizes) / num_clients else 0.0 for s, h in zip(shares, held, strict=True)]
        row = []
        running = 0.0
        start = 0
        for share in kept[:-1]:
            running += share / sum(kept)
            row.append(int(running * size) - start)
            start += row[-1]
        table.append([*row, size - start])
        held = [h + k for h, k in zip(held, table[-1], strict=True)]
    return table


@pytest.mark.parametrize("seed", range(10))
def test_lda_counts_equals_a_naive_loop_and_deals_everything(seed):
    sizes = rng(seed).integers(20, 60, 6)
    proportions = rng(seed).dirichlet(np.full(4, 0.4), 6)
    counts = P.lda_counts(sizes, proportions)
    assert np.array_equal(counts.sum(1), sizes)
    assert (counts >= 0).all()
    assert counts.tolist() == naive_lda_counts(sizes.tolist(), proportions.tolist())


def test_lda_counts_passes_over_clients_that_hold_their_share():
    assert P.lda_counts([10, 10], [[1.0, 0.0], [0.9, 0.1]]).tolist() == [[10, 0], [0, 10]]
    assert P.lda_counts([10, 0, 10], [[1.0, 0.0], [1.0, 0.0], [0.9, 0.1]]).tolist() == [
        [10, 0],
        [0, 0],
        [0, 10],
    ]
    with pytest.raises(ValueError, match="shares of class 1 are 0"):
        P.lda_counts([10, 10], [[1.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize("num_clients", [1, 3, 10])
@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.1, 10, 1e308, float("inf")])
def test_dirichlet_is_disjoint_complete_and_ends(alpha, num_clients):
    labels = skewed_labels()
    parts = dirichlet(labels, num_clients, 7, alpha, rng(), min_samples=0)
    assert len(parts) == num_clients
    assert_deals(parts, len(labels))


def test_dirichlet_keeps_min_samples_and_depends_on_the_generator_alone():
    labels = skewed_labels()
    first, again, other = (dirichlet(labels, 5, 7, 0.3, rng(s), min_samples=25) for s in (1, 1, 2))
    assert min(map(len, first)) >= 25
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_small_alpha_concentrates_the_classes():
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha):
        parts = dirichlet(labels, 10, 10, alpha, rng(), min_samples=1)
        return np.mean([np.bincount(labels[p], minlength=10).max() / len(p) for p in parts])

    assert largest_share(0.05) > largest_share(0.5) > largest_share(100.0)
    equal = dirichlet(labels, 10, 10, float("inf"), rng())
    assert all(abs(np.bincount(labels[p], minlength=10) - 20).max() <= 1 for p in equal)


def test_dirichlet_handles_absent_classes_and_unordered_labels():
    labels = rng().permutation(np.repeat([1, 4], 50))
    parts = dirichlet(labels, 4, 6, 0.5, rng(), min_samples=5)
    assert_deals(parts, 100)


def test_dirichlet_draws_are_bounded_and_the_error_names_the_settings(monkeypatch):
    monkeypatch.setattr(P, "MAX_DRAWS", 20)
    with pytest.raises(ValueError, match=r"min_samples=9 \(alpha=0.01, num_clients=20, 200 samples\), the smal"):
        dirichlet(np.repeat(np.arange(2), 100), 20, 2, 0.01, rng(), min_samples=9)


def test_many_clients_have_fewer_draws(monkeypatch):
    monkeypatch.setattr(P, "MAX_SHARES", 20 * 2 * 15)
    with pytest.raises(ValueError, match="no Dirichlet split in 15 draws gave"):
        dirichlet(np.repeat(np.arange(2), 100), 20, 2, 0.01, rng(), min_samples=9)


def test_what_no_draw_can_be_expected_to_give_is_refused_after_a_few():
    with pytest.raises(ValueError, match="no Dirichlet split in 10 draws gave every client min_samples=10 "):
        dirichlet(np.repeat(np.arange(10), 20_000), 10_000, 10, 0.1, rng())


def test_unreachable_min_samples_is_refused_at_once():
    generator = rng()
    with pytest.raises(ValueError, match=r"must not exceed the number of samples, got 10 · 4 for 39 samples"):
        dirichlet(np.zeros(39, dtype=int), 4, 1, 1.0, generator)
    assert generator.bit_generator.state == rng().bit_generator.state


def test_iid_parts_are_equal_shuffled_and_complete():
    parts = iid(103, 10, rng())
    assert [len(p) for p in parts] == [11] * 3 + [10] * 7
    assert_deals(parts, 103)
    assert not np.array_equal(parts[0], np.arange(11))
    assert_deals(iid(3, 3, rng()), 3)


@pytest.mark.parametrize("shards_per_client", [1, 2, 5])
def test_shards_cut_classes_equally_in_file_order(shards_per_client):
    labels = rng(3).permutation(np.repeat(np.arange(5), 43))
    indices, dealt = shards(labels, 10, 5, shards_per_client)
    assert_deals(indices, 215)
    per_class = shards_per_client * 2
    cut = {tuple(shard.tolist()) for c in range(5) for shard in np.array_split(np.flatnonzero(labels == c), per_class)}
    assert np.bincount(dealt.ravel()).tolist() == [per_class] * 5
    for part, classes in zip(indices, dealt, strict=True):
        assert set(labels[part]) == set(classes)
        runs = [part[labels[part] == c].tolist() for c in sorted(set(classes))]
        for run, c in zip(runs, sorted(set(classes)), strict=True):
            if (classes == c).sum() == 1:
                assert tuple(run) in cut


def test_the_test_split_gets_the_same_classes():
    labels = skewed_labels(1)
    test_labels = skewed_labels(2, n=300)
    _, dealt = shards(labels, 7, 7, 2)
    test = P.deal_shards(test_labels, dealt, rng(5))
    assert_deals(test, 300)
    for part, classes in zip(test, dealt, strict=True):
        assert set(test_labels[part]) <= set(classes)


def test_a_class_smaller_than_its_shards_leaves_some_empty():
    parts = P.deal_shards([0, 0, 0, 1], np.array([[0], [1], [0], [1]]), rng())
    assert sorted(len(p) for p in parts) == [0, 1, 1, 2]
    assert_deals(parts, 4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: iid(3, 4, rng()),
            "num_clients must lie between 1 and the number of samples, got 4 clients for 3",
        ),
        (lambda: iid(3, 0, rng()), "got 0 clients for 3 samples"),
        (lambda: dirichlet([0, 1], 3, 2, 1.0, rng(), 0), "got 3 clients for 2 samples"),
        (lambda: dirichlet([0, 1], 1, 2, 0.0, rng(), 0), "alpha must be positive, got 0.0"),
        (lambda: dirichlet([0, 1], 1, 2, 1.0, rng(), -1), "min_samples must be at least 0, got -1"),
        (lambda: dirichlet([0, 2], 1, 2, 1.0, rng(), 0), r"labels must lie in 0 ... 1, got 0 ... 2"),
        (lambda: dirichlet([0.5, 1.0], 1, 2, 1.0, rng(), 0), "labels must be one integer per sample"),
        (
            lambda: shards([0, 1, 2, 3], 3, 4, 2),
            r"multiple of the number of classes, got 2 · 3 = 6 for 4",
        ),
        (lambda: shards([0, 1], 3, 2, 2), "got 3 clients for 2 samples"),
        (lambda: shards([0, 1], 2, 2, 0), "shards_per_client must be at least 1, got 0"),
        (lambda: P.deal_shards([0, 1], [[1], [1]], rng()), "every label needs a shard, got none for class 0"),
    ],
)
def test_errors_name_the_rule_and_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
