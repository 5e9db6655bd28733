import numpy as np
import pytest

from fl_lightning.data import ClientDirichletPartition, PartitionInput, QuantityPartition
from fl_lightning.data import partitioning as PC


def rng(seed=0):
    return np.random.default_rng(seed)


def client_dirichlet(labels, num_clients, num_classes, alpha, generator, size=None, overlap=False):
    samples = PartitionInput(len(labels), np.asarray(labels), num_classes)
    return ClientDirichletPartition(alpha, size, overlap)(samples, num_clients, generator)


def quantity(labels, num_clients, num_classes, classes_per_client, generator, upper="mean", shuffle_clients=False):
    samples = PartitionInput(len(labels), np.asarray(labels), num_classes)
    return QuantityPartition(classes_per_client, upper, shuffle_clients)(samples, num_clients, generator)


LABELS = rng(7).permutation(np.repeat(np.arange(10), [50, 10, 30, 60, 5, 45, 100, 50, 40, 10]))


def counts_of(labels, parts, classes=10):
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


@pytest.mark.parametrize(
    ("shares", "size", "counts"),
    [
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([0.5, 0.3, 0.2], 5, [3, 1, 1]),  # fractions .5, .5, 0: the first of the equal ones
        ([1, 1, 1], 2, [1, 1, 0]),
        ([0, 2, 0], 7, [0, 7, 0]),
        ([0.4, 0.6], 0, [0, 0]),
    ],
)
def test_largest_remainder(shares, size, counts):
    assert PC.largest_remainder(shares, size).tolist() == counts


@pytest.mark.parametrize("seed", range(20))
def test_class_counts_end_and_stay_within_what_there_is(seed):
    g = rng(seed)
    available = g.integers(0, 20, size=6)
    shares = g.dirichlet(np.full(6, 0.05))
    for size in (0, 1, int(available.sum() // 2), int(available.sum())):
        counts = PC.counts_for_shares(shares, size, available)
        assert counts.sum() == size
        assert (counts >= 0).all()
        assert (counts <= available).all()


def test_a_class_that_has_run_out_leaves_its_share_to_the_others():
    assert PC.counts_for_shares([0.6, 0.2, 0.2], 10, [2, 9, 9]).tolist() == [2, 4, 4]
    assert PC.counts_for_shares([1.0, 0.0, 0.0], 5, [2, 2, 4]).tolist() == [2, 1, 2]  # by what is left


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1, 10, 1e308, float("inf")])
@pytest.mark.parametrize("num_clients", [1, 3, 40])
def test_client_dirichlet_is_disjoint_and_equal_in_size(alpha, num_clients):
    parts = client_dirichlet(LABELS, num_clients, 10, alpha, rng())
    assert {len(part) for part in parts} == {400 // num_clients}
    everything = np.concatenate(parts)
    assert len(set(everything.tolist())) == len(everything)


def test_client_dirichlet_holds_the_drawn_proportions():
    labels = np.repeat(np.arange(4), 1000)
    q = rng(3).dirichlet(np.full(4, 0.7), size=5)  # the proportions are drawn first
    for overlap in (False, True):
        parts = client_dirichlet(labels, 5, 4, 0.7, rng(3), size=100, overlap=overlap)
        assert abs(counts_of(labels, parts, 4) / 100 - q).max() < 0.01
    overlapping = client_dirichlet(labels, 5, 4, 0.7, rng(3), size=1500, overlap=True)
    assert [len(set(part.tolist())) for part in overlapping] == [1500] * 5


def test_infinite_alpha_gives_equal_shares():
    parts = client_dirichlet(np.repeat(np.arange(5), 40), 4, 5, float("inf"), rng())
    assert (counts_of(np.repeat(np.arange(5), 40), parts, 5) == 10).all()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("classes_per_client", "upper"),
    [(1, "mean"), (2, "mean"), (5, "mean"), (10, "mean"), (1, "class"), (2, "class"), (5, "class")],
)
def test_quantity_gives_every_client_its_classes_and_deals_every_sample(classes_per_client, upper, shuffle):
    labels = np.repeat(np.arange(10), 60)
    parts = quantity(labels, 10, 10, classes_per_client, rng(), upper, shuffle)
    counts = counts_of(labels, parts)
    assert ((counts > 0).sum(1) <= classes_per_client).all()
    if upper == "mean":
        assert ((counts > 0).sum(1) == classes_per_client).all()
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))


def test_quantity_deals_classes_in_id_order_unless_shuffled():
    labels = np.repeat(np.arange(10), 60)
    held = counts_of(labels, quantity(labels, 10, 10, 2, rng())) > 0
    assert [np.flatnonzero(row).tolist() for row in held] == [[c, c + 1] for c in (0, 0, 2, 2, 4, 4, 6, 6, 8, 8)]
    shuffled = counts_of(labels, quantity(labels, 10, 10, 2, rng(), shuffle_clients=True)) > 0
    assert not np.array_equal(held, shuffled)
    assert (shuffled.sum(0) == 2).all()


def test_quantity_draws_sizes_within_their_bounds():
    labels = np.repeat(np.arange(10), 100)  # ν = 50: drawn in [5, 50), the last of a class takes the rest
    sizes = []
    for seed in range(20):
        counts = counts_of(labels, quantity(labels, 10, 10, 2, rng(seed)))
        sizes += counts[::2].max(1).tolist() + counts[::2].sum(1).tolist()
        first = counts[::2]
        last = counts[1::2]
        assert (first + last).sum() == 1000
        assert ((first[first > 0] >= 5) & (first[first > 0] < 50)).all()
        assert (last[last > 0] > 50).all()
    assert len(set(sizes)) > 20


def test_quantity_of_scarce_or_absent_classes():
    labels = np.array([0, 0, 0, 1])
    parts = quantity(labels, 4, 4, 2, rng())
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: quantity(LABELS, 7, 10, 2, rng()), r"must be a multiple .* in id order.* got 2 · 7 for 10 classes"),
        (lambda: quantity(LABELS, 10, 10, 3, rng()), r"got 3 · 10 for 10 .* or set shuffle_clients to true"),
        (lambda: quantity(LABELS, 10, 10, 11, rng()), r"classes_per_client must lie in 1 ... 10, got 11"),
        (lambda: quantity([0, 1], 3, 2, 2, rng()), "got 3 clients for 2 samples"),
        (
            lambda: quantity(np.zeros(1000, dtype=int), 30, 1, 1, rng(), upper="class"),
            "1000 draws of the sizes of 30 clients' parts all exceeded the 1000 samples of class 0: set upper to mean",
        ),
        (lambda: client_dirichlet([0, 1], 3, 2, 1.0, rng()), "got 3 clients for 2 samples"),
        (lambda: client_dirichlet([0, 1], 2, 2, -1.0, rng()), "alpha must be positive, got -1.0"),
        (lambda: client_dirichlet([0, 5], 2, 2, 1.0, rng()), r"labels must lie in 0 ... 1, got 0 ... 5"),
        (
            lambda: client_dirichlet([0, 1, 1], 2, 2, 1.0, rng(), size=2),
            "got 2 for each of 2 clients and 3 samples",
        ),
    ],
)
def test_errors_name_the_rule_and_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_shuffled_quantity_takes_what_id_order_cannot():
    counts = counts_of(LABELS, quantity(LABELS, 10, 10, 3, rng(), shuffle_clients=True))
    assert ((counts > 0).sum(1) == 3).all()
