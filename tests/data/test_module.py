"""Who has which samples, who takes part, and in which batches: what each depends on, and on nothing else."""

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import Digits, DirichletPartition, ShardPartition, TensorSource
from tests.toys import toy_data


def digits(**settings) -> FederatedDataModule:
    data = FederatedDataModule(Digits(), **{"num_clients": 10, "partition": DirichletPartition(0.3), **settings})
    data.setup("fit")
    return data


def parts(data, split="train"):
    return [data.client_indices(split, client_id).tolist() for client_id in range(data.num_clients)]


@pytest.mark.parametrize("partition", [None, DirichletPartition(0.1), ShardPartition(2)])
def test_clients_share_out_the_training_samples(partition):
    data = digits(partition=partition)
    assert sorted(i for part in parts(data) for i in part) == list(range(1437))
    assert data.label_counts.sum(1).tolist() == [len(part) for part in parts(data)]
    assert data.label_counts.sum(0).tolist() == data.split("train").labels.bincount().tolist()


def test_the_partition_depends_on_the_data_seed_alone():
    base = parts(digits())
    assert parts(digits(sampling_seed=9, participation=0.3, batch_size=7, shuffle=False)) == base
    assert parts(digits(seed=1)) != base


def test_a_clients_own_test_samples_follow_its_classes():
    data = digits()
    labels = data.split("test").labels
    for client_id, part in enumerate(parts(data, "test")):
        assert part
        assert set(labels[part].tolist()) <= set(data.label_counts[client_id].nonzero().flatten().tolist())


def cohorts(data, rounds=40):
    return [data.cohort(t) for t in range(rounds)]


def test_cohorts_depend_on_the_sampling_seed_and_the_round_alone():
    one = cohorts(digits(participation=0.3))
    assert one == cohorts(digits(participation=0.3))
    assert digits(participation=0.3).cohort(17) == one[17]  # whatever was drawn before
    assert one == cohorts(digits(participation=0.3, seed=5, sampling_seed=0))
    assert one != cohorts(digits(participation=0.3, sampling_seed=1))
    assert all(len(set(cohort)) == 3 for cohort in one)
    assert {client_id for cohort in one for client_id in cohort} == set(range(10))
    assert len({tuple(cohort) for cohort in one}) > 20


@pytest.mark.parametrize(
    ("participation", "clients", "size"), [(1.0, 7, 7), (0.1, 100, 10), (0.29, 100, 29), (0.01, 5, 1), (0.7, 10, 7)]
)
def test_the_size_of_a_cohort_is_the_floor_and_at_least_one(participation, clients, size):
    data = toy_data([1] * clients, participation=participation)
    assert data.cohort_size == size == len(data.cohort(0))


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own():
    data = toy_data((23,))
    data.setup("fit")
    rows = data.split("train").x.tolist()
    orders = set()
    for round_idx, epoch in ((0, 0), (0, 1), (1, 0)):
        batches = [x for x, _ in data.view(0, round_idx).batches(epoch=epoch)]
        assert [len(x) for x in batches] == [5, 5, 5, 5, 3]
        order = [rows.index(row) for row in torch.cat(batches).tolist()]
        assert sorted(order) == list(range(23))
        orders.add(tuple(order))
    assert len(orders) == 3


def test_a_full_batch_is_all_of_a_clients_samples():
    data = toy_data((23, 4), batch_size="full")
    data.setup("fit")
    assert [[len(y) for _, y in data.view(client_id, 0).batches(epoch=0)] for client_id in (0, 1)] == [[23], [4]]


def test_batches_come_with_their_positions():
    data = toy_data((7, 16))
    data.setup("fit")
    view = data.view(1, 0)
    x, y = view.all()
    assert torch.equal(y.bincount(minlength=3), view.label_counts)
    for (batch, labels), positions in view.batches(epoch=2, batch_size=3, with_index=True):
        assert torch.equal(batch, x[positions])
        assert torch.equal(labels, y[positions])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ({"participation": 0.0}, r"participation must lie in \(0, 1\], got 0.0"),
        ({"participation": 1.1}, r"participation must lie in \(0, 1\], got 1.1"),
        ({"participation": float("nan")}, r"participation must lie in \(0, 1\], got nan"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0; 'full' is the whole split"),
        ({"val_fraction": 1.0}, r"val_fraction must lie in \[0, 1\), got 1.0"),
        ({"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
        ({"schedule": [[0], []]}, r"must name different clients in \[0, 5\), got \[\]; mend data.schedule"),
        ({"schedule": [[0, 0]]}, r"must name different clients in \[0, 5\), got \[0, 0\]"),
        ({"schedule": [[5]]}, r"must name different clients in \[0, 5\), got \[5\]"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy_data(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_classes": 4}, r"data.num_classes must be that of the source \(3\), got 4; leave it unset"),
        ({"input_shape": (5,)}, r"data.input_shape must be that of the source \(\(4,\)\), got \(5,\)"),
        ({"num_clients": 4}, "got 5 lists for 4 clients: set num_clients to 5"),
    ],
)
def test_a_setting_that_contradicts_the_source_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy_data(**settings).setup("fit")


@pytest.mark.parametrize(("given", "expected"), [(None, [125, 1000]), (7, [7, 7])])
def test_evaluation_batches_are_smaller_on_a_cpu_unless_they_are_set(given, expected):
    found = []
    for shape in ((3, 16, 16), (4,)):
        x = torch.zeros(6, *shape)
        y = torch.arange(6) % 2
        data = FederatedDataModule(TensorSource((x, y), (x, y)), num_clients=2, eval_batch_size=given)
        data.setup("fit")
        found.append(data.eval_batch_size)
    assert found == expected
