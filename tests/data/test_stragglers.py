"""Stragglers of the FedProx paper: who is late, what they do of their epochs, and rounds without those dropped."""

import math
from collections import Counter

import pytest
import torch

from fl_lightning.data import Stragglers
from fl_lightning.federation.identity import shared_settings
from fl_lightning.methods import Ditto, DPFedAvg, FedAvg, FedProx
from fl_lightning.nets import Perceptron
from fl_lightning.utils.keyed import keyed_numpy
from tests.toys import equal, fit, sgd, toy_data, weights_of

SIZES = (5, 12, 5, 20, 10, 7)


def federation(share=0.5, late="cut", **settings):
    return toy_data(SIZES, local_work=Stragglers(share, late), **settings)


def drawn(seed, client_id, round_idx):
    """Two numbers in [0, 1): the client's place among all, and 1 − u."""
    return keyed_numpy(seed, "stragglers", round_idx, client_id).random(2).tolist()


def late_by_hand(cohort, round_idx, count, seed=0):
    return sorted(sorted(cohort, key=lambda client_id: drawn(seed, client_id, round_idx)[0])[:count])


def train(data, client=None, rounds=2, **settings):
    client = client or FedAvg(net=Perceptron, optimizer=sgd(0.05))
    return fit(client, rounds, data, **{"local_epochs": 4, **settings})


class StepCounter(FedAvg):
    """Remembers the steps of every client."""

    taken: dict[int, int]

    def reply(self, exchange, local):
        self.taken[local.client_id] = self.num_steps
        return {}


def steps_of(data, **settings):
    StepCounter.taken = {}
    train(data, StepCounter(net=Perceptron, optimizer=sgd(0.05)), rounds=1, **settings)
    return StepCounter.taken


# --- who is late


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 5), (0.9, 9), (1.0, 10), (0.04, 0), (0.05, 1)])
def test_a_share_of_each_cohort_is_late(share, count):
    data = toy_data((1,) * 30, local_work=Stragglers(share), cohort_size=10)
    for round_idx in range(20):
        cohort = data.cohort(round_idx)
        assert len(cohort) == 10
        late = [client_id for client_id in cohort if data.work_of(client_id, round_idx) < 1]
        assert late == late_by_hand(cohort, round_idx, count)


def test_methods_have_the_same_stragglers_which_those_of_a_larger_share_contain():
    few = federation(0.5, "cut")
    dropped = federation(0.5, "drop")
    many = federation(0.8, "drop")
    other = federation(0.5, "cut", sampling_seed=1)
    differs = False
    for round_idx in range(20):
        late = {client_id for client_id in range(6) if few.work_of(client_id, round_idx) < 1}
        assert set(dropped.cohort(round_idx)) == set(range(6)) - late
        assert set(many.cohort(round_idx)) < set(dropped.cohort(round_idx))
        differs |= late != {client_id for client_id in range(6) if other.work_of(client_id, round_idx) < 1}
    assert differs


def test_every_client_is_late_as_often_as_the_share_says():
    data = federation(0.5)
    counts = Counter(
        client_id for round_idx in range(1000) for client_id in range(6) if data.work_of(client_id, round_idx) < 1
    )
    for client_id in range(6):
        assert counts[client_id] == pytest.approx(500, abs=80)  # five standard deviations


def test_whoever_is_not_in_the_cohort_is_not_late():
    data = toy_data((1,) * 30, local_work=Stragglers(1.0), cohort_size=10)
    for client_id in set(range(30)) - set(data.cohort(3)):
        assert data.work_of(client_id, 3) == 1


def test_a_secret_seed_keys_cohorts_and_stragglers():
    asked = toy_data(SIZES, secret_seed=True, cohort_size=4)
    dropped = federation(0.5, "drop", secret_seed=True, cohort_size=4)
    cut = federation(0.5, "cut", secret_seed=True, cohort_size=4)
    for data in (asked, dropped, cut):
        data.work_of(0, 2)
        data.take_secret("ab")
    late = late_by_hand(asked.cohort(2), 2, 2, seed=0xAB)
    assert dropped.cohort(2) == [client_id for client_id in asked.cohort(2) if client_id not in late]
    assert [client_id for client_id in cut.cohort(2) if cut.work_of(client_id, 2) < 1] == late


# --- cut


def test_the_number_of_epochs_is_uniform_from_one_to_all():
    data = toy_data((1,) * 20, local_work=Stragglers(1.0))
    counts = Counter()
    for round_idx in range(100):
        counts.update(math.ceil(4 * data.work_of(client_id, round_idx)) for client_id in range(20))
    assert set(counts) == {1, 2, 3, 4}
    for count in counts.values():
        assert count == pytest.approx(500, abs=97)  # five standard deviations of 2,000 draws with probability 1/4


@pytest.mark.parametrize(("epochs", "limit"), [(4, None), (4, 7), ([2, 5, 1, 3, 4, 2], None)])
@pytest.mark.parametrize("chunk", [1, 6])
def test_a_straggler_makes_whole_epochs_within_other_limits(epochs, limit, chunk):
    taken = steps_of(federation(0.5), local_epochs=epochs, max_local_steps=limit, chunk=chunk)
    late = late_by_hand(range(6), 0, 3)
    for client_id, size in enumerate(SIZES):
        number = epochs[client_id] if isinstance(epochs, list) else epochs
        if client_id in late:
            share = 1 - drawn(0, client_id, 0)[1]
            number = next(k for k in range(1, number + 1) if share <= k / number)
        steps = number * -(-size // 5)
        assert taken[client_id] == (steps if limit is None else min(steps, limit))


@pytest.mark.parametrize("client", [FedAvg, Ditto])
def test_stragglers_trained_at_once_are_those_trained_one_by_one(client):
    one, many = (
        weights_of(train(federation(0.5), client(net=Perceptron, optimizer=sgd(0.05)), chunk=chunk)) for chunk in (1, 6)
    )
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, atol=1e-6, rtol=1e-5)
    assert not equal(one, weights_of(train(toy_data(SIZES), client(net=Perceptron, optimizer=sgd(0.05)))))


@pytest.mark.parametrize("late", ["cut", "drop"])
def test_a_share_of_zero_changes_nothing(late):
    plain = train(toy_data(SIZES))
    none = train(federation(0.0, late))
    assert equal(weights_of(plain), weights_of(none))
    assert plain.round_metrics == none.round_metrics


@pytest.mark.parametrize("late", ["cut", "drop"])
def test_a_run_is_continued_with_the_same_stragglers(tmp_path, late):
    whole = train(federation(0.5, late), rounds=4)
    first = train(federation(0.5, late), rounds=2)
    first.trainer.save_checkpoint(tmp_path / "at.ckpt")
    resumed = train(federation(0.5, late), rounds=4, ckpt_path=tmp_path / "at.ckpt")
    assert equal(weights_of(whole), weights_of(resumed))
    assert whole.round_metrics == resumed.round_metrics


# --- drop


def test_a_dropped_client_leaves_no_trace():
    data = federation(0.5, "drop", cohort_size=4)
    left = [data.cohort(round_idx) for round_idx in range(3)]
    assert [len(cohort) for cohort in left] == [2, 2, 2]
    prox = {"mu": 0.5, "net": Perceptron, "optimizer": sgd(0.05)}
    dropped = train(data, FedProx(**prox), rounds=3)
    chosen = train(toy_data(SIZES, schedule=left), FedProx(**prox), rounds=3)
    assert equal(weights_of(dropped), weights_of(chosen))
    assert dropped.round_metrics == chosen.round_metrics


def test_a_round_whose_cohort_is_dropped_leaves_the_model_as_it_was():
    schedule = [[0, 1, 2], [3], [1, 3, 4]]  # one of one is late, two of three are
    momentum = lambda params: torch.optim.SGD(params, 0.5, 0.9)  # noqa: E731
    data = federation(0.6, "drop", schedule=schedule)
    assert [len(data.cohort(round_idx)) for round_idx in range(3)] == [1, 0, 1]
    assert tuple(data.cohort.bounds) == (0, 1)
    after_one = train(federation(0.6, "drop", schedule=schedule), rounds=1, server_optimizer=momentum)
    after_two = train(federation(0.6, "drop", schedule=schedule), rounds=2, server_optimizer=momentum)
    assert equal(weights_of(after_one), weights_of(after_two))
    assert after_two.round_metrics["comm/bytes_down"] == 0
    assert after_two.round_metrics["global/acc"] == after_one.round_metrics["global/acc"]
    state_one = after_one.trainer.optimizers[0].state_dict()["state"]
    state_two = after_two.trainer.optimizers[0].state_dict()["state"]
    for key, entry in state_one.items():
        assert torch.equal(entry["momentum_buffer"], state_two[key]["momentum_buffer"])
    after_three = train(federation(0.6, "drop", schedule=schedule), rounds=3, server_optimizer=momentum)
    assert not equal(weights_of(after_two), weights_of(after_three))


@pytest.mark.parametrize("size", range(1, 11))
@pytest.mark.parametrize("share", [0.1, 0.29, 0.5, 0.9])
def test_the_bounds_are_those_of_the_rounds(share, size):
    if Stragglers(share).count(size) == size:
        with pytest.raises(
            ValueError, match=rf"must leave a client in a round, got {share} with late=drop, which drops"
        ):
            toy_data((1,) * 10, local_work=Stragglers(share, "drop"), cohort_size=size)
        return
    data = toy_data((1,) * 10, local_work=Stragglers(share, "drop"), cohort_size=size)
    sizes = {len(data.cohort(round_idx)) for round_idx in range(5)}
    assert {data.cohort.bounds.least, data.cohort.bounds.most} == sizes


def test_a_pooled_round_has_the_batches_of_those_who_are_not_dropped():
    pooled = federation(0.5, "drop", pooled=True)
    split = federation(0.5, "drop")
    for round_idx in range(4):
        pooled.setup()
        samples = sum(SIZES[client_id] for client_id in split.cohort(round_idx))
        assert pooled.work_of(0, round_idx) == pytest.approx(samples / sum(SIZES))


# --- refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"share": 1.5}, "share must be at most 1, got 1.5"),
        ({"share": -0.1}, "share must be at least 0, got -0.1"),
        ({"late": "keep"}, "late must be one of cut, drop, got 'keep'"),
        (
            {"share": 1.0, "late": "drop"},
            r"local_work.share must leave a client in a round, got 1.0",
        ),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=says):
        federation(**settings)


def test_one_local_epoch_cannot_be_cut():
    with pytest.raises(ValueError, match=r"model.local_epochs must be at least 2, got 1; raise it, or give data.local"):
        train(federation(0.5), local_epochs=1)
    train(federation(0.5, "drop"), local_epochs=1, rounds=1)


def test_epochs_of_a_cohort_are_not_those_of_one_place():
    with pytest.raises(ValueError, match=r"counts whole epochs of each client; set data.local_work.late to drop"):
        federation(0.5, pooled=True).setup()


def test_a_private_rule_refuses_clients_that_are_dropped_by_each_other():
    rule = DPFedAvg(noise_multiplier=1.0, delta=1e-3, clip=1.0)
    with pytest.raises(ValueError, match=r"data.local_work drops a share of each cohort; set"):
        train(federation(0.5, "drop"), aggregator=rule)
    train(federation(0.5, "cut"), aggregator=rule, rounds=1)


def test_a_federation_of_several_parties_refuses_stragglers():
    with pytest.raises(ValueError, match=r"data\.local_work belongs to simulations, .*got Stragglers\(share=0.5"):
        shared_settings(None, federation(0.5), "32-true", 1)
