"""Stragglers (`local_work`), and all samples at one place (`pooled`)."""

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.aggregation import (
    QSGD,
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    TrimmedMeanAggregator,
)
from fl_lightning.client import ClientModule
from fl_lightning.data import Digits, DirichletPartition, FeatureShift, QuantityDirichletPartition
from fl_lightning.data.local_work import LocalWork
from fl_lightning.federation.identity import shared_settings
from fl_lightning.methods import Ditto, DPFedAvg, FedAvg, KnFu, Local
from fl_lightning.monitors import ClientTable, CostMonitor, DriftMonitor
from fl_lightning.nets import Perceptron
from tests.toys import equal, fit, sgd, weights_of


def federation(**settings):
    skew = QuantityDirichletPartition(1.0)
    return FederatedDataModule(Digits(limit=120), 4, **{"partition": skew, "batch_size": 8, **settings})


def train(data, client=FedAvg, rounds=2, **settings):
    return fit(client(net=Perceptron, optimizer=sgd(0.05)), rounds, data, **{"local_epochs": 2, **settings})


class StepCounter(FedAvg):
    """Remembers the steps of every client."""

    taken: list[int]

    def reply(self, exchange, local):
        self.taken.append(self.num_steps)
        return {}


def steps_of(data, **settings):
    StepCounter.taken = []
    train(data, StepCounter, 1, chunk=1, **settings)
    return StepCounter.taken


def test_work_is_drawn_by_seed_round_and_client():
    work = LocalWork([0.2, 0.6], seed=1)
    drawn = [work(client_id, round_idx) for client_id in range(20) for round_idx in range(20)]
    assert len(set(drawn)) == 400
    assert 0.2 <= min(drawn) < 0.25
    assert 0.55 < max(drawn) <= 0.6
    assert drawn[:2] == [LocalWork([0.2, 0.6], seed=1)(0, t) for t in (0, 1)]
    assert LocalWork([0.2, 0.6], seed=2)(0, 0) != drawn[0]
    assert {LocalWork(0.4, 0)(client_id, 3) for client_id in range(5)} == {0.4}


@pytest.mark.parametrize("given", [0.0, 1.5, [0.5], [0.6, 0.4], [0.0, 1.0]])
def test_a_share_out_of_its_range_is_refused(given):
    with pytest.raises(ValueError, match=r"local_work must be a share in \(0, 1\], or two of them"):
        federation(local_work=given)


def test_a_secret_seed_keys_the_work():
    data = federation(local_work=[0.1, 1.0], secret_seed=True)
    before = data.work_of(0, 0)
    data.take_secret("ab")
    assert data.work_of(0, 0) == LocalWork([0.1, 1.0], 0xAB)(0, 0) != before


@pytest.mark.parametrize(
    ("settings", "whole"), [({}, None), ({"max_local_steps": 5}, 5), ({"accumulate_grad_batches": 2}, None)]
)
def test_a_straggler_makes_its_share_of_the_steps_rounded_up(settings, whole):
    all_steps = steps_of(federation(), **settings)
    some = steps_of(federation(local_work=0.3), **settings)
    for every, few in zip(all_steps, some, strict=True):
        assert few <= -(-3 * every // 10) + ("accumulate_grad_batches" in settings)
        assert few >= (1 if "accumulate_grad_batches" in settings else 0.3 * every - 1e-9)  # of the batches
    assert whole is None or max(all_steps) == whole


def test_a_straggler_is_a_client_with_fewer_steps():
    equal_sizes = {"partition": None, "batch_size": 10}  # 30 samples: 6 batches in two epochs
    half = weights_of(train(federation(local_work=0.5, **equal_sizes)))
    assert equal(half, weights_of(train(federation(**equal_sizes), max_local_steps=3)))


@pytest.mark.parametrize("client", [FedAvg, Ditto])
def test_stragglers_trained_at_once_are_those_trained_one_by_one(client):
    one, many = (weights_of(train(federation(local_work=[0.2, 1.0]), client, chunk=chunk)) for chunk in (1, 4))
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, atol=1e-6, rtol=1e-5)
    assert not equal(one, weights_of(train(federation(), client)))


# --- pooled


def test_pooled_samples_are_trained_as_one_clients():
    pooled = federation(pooled=True, partition=None)
    alone = FederatedDataModule(Digits(limit=120), 1, batch_size=8)
    assert equal(weights_of(train(pooled)), weights_of(train(alone)))
    assert (pooled.num_clients, pooled.label_counts.sum(), len(pooled.client_indices("test", 0))) == (1, 120, 120)


def test_a_pooled_round_has_the_steps_of_the_cohorts_share_of_samples():
    given = {"participation": 0.5, "batch_size": 1, "availability": 0.8, "local_work": [0.5, 1.0]}
    pooled = federation(pooled=True, **given)
    split = federation(**given)
    split.setup()
    for round_idx in range(6):
        pooled.setup()
        cohort = split.cohort(round_idx)
        share = sum(split.size(c, round_idx) * split.work_of(c, round_idx) for c in cohort) / 120
        assert pooled.work_of(0, round_idx) == pytest.approx(share)
        assert pooled.cohort(round_idx) == ([0] if cohort else [])
    full = federation(pooled=True, participation=0.5, batch_size=1)
    cohort = sum(steps_of(federation(participation=0.5, batch_size=1)))
    assert steps_of(full) == [cohort]


def test_pooled_samples_leave_out_those_that_are_held_back():
    data = federation(pooled=True, val_fraction=0.25, partition=DirichletPartition(0.5, min_samples=1))
    data.setup()
    assert len(data.client_indices("train", 0)) == 90


def test_what_cannot_be_pooled_is_refused():
    with pytest.raises(ValueError, match=r"as they are stored, which data\.feature_shift do not allow"):
        federation(pooled=True, feature_shift=FeatureShift(noise=0.1)).setup()


@pytest.mark.parametrize(
    "part",
    [
        *(kind() for kind in (KrumAggregator, TrimmedMeanAggregator, MedianAggregator, GeometricMedianAggregator)),
        DPFedAvg(noise_multiplier=1.0, delta=1e-3, clip=1.0),
        QSGD(),
        Local(net=Perceptron),
        KnFu(net=Perceptron),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_needs_several_clients_is_refused_beside_pooled_samples(part):
    data = federation(pooled=True, transfer_size=6)
    name = type(part).__name__
    client = part if isinstance(part, ClientModule) else FedAvg(net=Perceptron)
    setting = {} if part is client else {"codec" if isinstance(part, QSGD) else "aggregator": part}
    with pytest.raises(ValueError, match=rf"{name} needs several clients, and data\.pooled=true .* leave {name} out"):
        fit(client, 1, data, **setting)


def test_one_place_sends_nothing_and_has_no_values_of_clients():
    settings = {"evaluate_clients_every": 1, "callbacks": [DriftMonitor(), ClientTable(), CostMonitor()]}
    of_clients = {True: set(), False: {"comm/bytes_down", "comm/bytes_up", "local/alma", "local/drift"}}
    for pooled, expected in of_clients.items():
        row = train(federation(pooled=pooled), rounds=1, **settings).round_metrics
        names = {key for key in row if key.startswith(("comm/", "local/"))}
        assert expected <= names if expected else not names
        assert {"global/acc", "train/ce", "cost/steps"} <= row.keys()


@pytest.mark.parametrize(
    "settings", [{"local_work": 0.5}, {"pooled": True}, {"feature_shift": FeatureShift(noise=0.1)}]
)
def test_a_federation_of_several_parties_refuses_what_only_a_simulation_can_have(settings):
    with pytest.raises(ValueError, match=rf"data\.{next(iter(settings))} belongs to simulations"):
        shared_settings(None, federation(**settings), "32-true", 1)
