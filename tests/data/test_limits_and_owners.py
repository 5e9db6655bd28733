"""`limit` of a source, and natural partitions: `by`, and `num_clients` None."""

import numpy as np
import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    ColumnPartition,
    Digits,
    FixedPartition,
    IIDPartition,
    PartitionInput,
    PooledSource,
    TensorSource,
    TensorSplit,
)
from fl_lightning.data.limiting import stratified
from fl_lightning.data.partitions import Dealt
from fl_lightning.data.sources import Source

OWNERS = np.array(["b", "a", "b", "c", "a", "b"])


class Owned(Source):
    """Six samples of three owners; the test samples are of two of them and of one that nobody knows."""

    num_classes = 2

    def load(self):
        x = torch.arange(6.0)[:, None]
        y = torch.tensor([0, 1, 0, 1, 0, 1])
        test = TensorSplit(x[:3], y[:3], columns={"owner": np.array(["c", "b", "d"])})
        return TensorSplit(x, y, columns={"owner": OWNERS}), test


def clients_of(data, split="train"):
    data.setup()
    return [data.client_indices(split, client_id).tolist() for client_id in range(data.num_clients)]


def test_a_limited_split_keeps_the_class_proportions_and_is_the_same_in_every_run():
    labels = np.repeat([0, 2], [90, 10])
    drawn = stratified(labels, 100, 20)
    assert np.bincount(labels[drawn]).tolist() == [18, 0, 2]
    assert drawn.tolist() == sorted(set(drawn)) == stratified(labels, 100, 20).tolist()
    assert len(stratified(None, 100, 20)) == 20
    assert stratified(labels, 100, 100).tolist() == list(range(100))


def test_a_limit_holds_for_both_splits_and_a_pool():
    whole = Digits()
    tiny = Digits(limit=100)
    assert list(map(len, tiny.read())) == [100, 100]
    assert list(map(len, whole.read())) == [1437, 360]
    assert list(map(len, PooledSource(Digits(limit=100), limit=40).read())) == [40, 40]
    data = FederatedDataModule(tiny, num_clients=5)
    data.setup()
    assert (data.label_counts.sum(), data.label_counts.sum(0).min() >= 9) == (100, True)


def test_samples_without_classes_are_limited_too():
    source = TensorSource((torch.randn(50, 2), torch.randn(50)), (torch.randn(5, 2), torch.randn(5)))
    source.limit = 7
    assert list(map(len, source.read())) == [7, 5]
    assert source.left_out["train"] == 43


def test_a_limit_below_1_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        Digits(limit=0).read()


def test_owners_are_the_clients():
    data = FederatedDataModule(Owned(), num_clients=None, by="owner", participation=0.7)
    assert data.num_clients == 0  # not known yet
    assert clients_of(data) == [[1, 4], [0, 2, 5], [3]]
    told = r"owners in column 'owner' that have test samples only: 1, with 1 of 3 test samples; no client is tested on"
    with pytest.warns(UserWarning, match=told):
        assert clients_of(data, "test") == [[], [1], [0]]
    assert (data.num_clients, data.cohort_size, len(data.cohort(0))) == (3, 2, 2)


def test_owners_are_dealt_to_fewer_clients():
    assert clients_of(FederatedDataModule(Owned(), num_clients=2, by="owner")) == [[1, 3, 4], [0, 2, 5]]


def test_an_owner_whose_samples_are_all_held_back_is_no_client():
    data = FederatedDataModule(Owned(), num_clients=None, by="owner", val_fraction=0.5)
    assert all(clients_of(data))


def test_a_secret_seed_keys_the_cohorts_of_owners():
    data = FederatedDataModule(Owned(), num_clients=None, by="owner", secret_seed=True)
    data.setup()
    assert data.cohort.seed == int(data.secret, 16)


def test_a_partition_may_tell_how_many_clients_there_are():
    data = FederatedDataModule(Digits(), num_clients=None, partition=FixedPartition([[0], [1, 2]]))
    assert clients_of(data) == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"num_clients": None}, TypeError, "nothing names the owners of the samples, got None with IIDPartition"),
        ({"by": "owner", "partition": IIDPartition()}, ValueError, "got by=owner and IIDPartition; leave one"),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        FederatedDataModule(Owned(), **settings)


@pytest.mark.parametrize(
    "owners", [["a", "", "b"], [1.0, float("nan"), 2.0], np.array(["a", None, "b"]), np.array([1, None, 2])]
)
def test_a_training_sample_without_an_owner_is_refused(owners):
    samples = PartitionInput(3, np.asarray(owners))
    with pytest.raises(
        ValueError, match="'who' must name the owner of every training sample, got none for 1 of 3; fill"
    ):
        ColumnPartition("who").count_owners(samples)


def test_a_column_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(ValueError, match="no column 'writer'; there are owner"):
        FederatedDataModule(Owned(), by="writer").setup()


class Hashed(str):
    """A text that cannot be compared one by one."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        Hashed.compared += 1
        return str.__eq__(self, other)

    compared = 0


@pytest.mark.parametrize(
    ("owners", "test", "told"),
    [
        (np.array(["a", "b"], object), np.array([np.nan, np.nan]), "test samples only: 1, with 2 of 2"),
        (np.array([1, 2]), np.array([1, np.nan, np.nan]), "test samples only: 1, with 2 of 3"),
    ],
)
def test_test_samples_without_an_owner_are_one_owner_in_the_warning(owners, test, told):
    partition = ColumnPartition("who")
    samples = PartitionInput(2, owners)
    parts = partition(samples, 2, np.random.default_rng(0))
    with pytest.warns(UserWarning, match=told):
        partition.partition_test(Dealt(parts, samples, np.random.default_rng(0)), PartitionInput(len(test), test))


def test_a_training_sample_of_no_day_is_refused():
    days = np.array(["2024-01-01", "NaT"], "datetime64[D]")
    with pytest.raises(ValueError, match="'who' must name the owner of every training sample, got none for 1 of 2"):
        ColumnPartition("who").count_owners(PartitionInput(2, days))


def test_texts_are_not_compared_with_every_owner():
    owners = np.empty(900, object)
    owners[:] = [Hashed(i % 30) for i in range(900)]
    samples = PartitionInput(900, owners)
    partition = ColumnPartition("who")
    Hashed.compared = 0
    partition.partition_test(
        Dealt(partition(samples, 30, np.random.default_rng(0)), samples, np.random.default_rng(0)), samples
    )
    assert Hashed.compared < 900 * 20  # 900 * 30 for every split where each text is compared with each owner
