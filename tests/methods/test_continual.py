"""FedEWC, FedLwF and Replay: what changes once a client's data have changed, and FedAvg before that."""

from functools import partial

import pytest
import torch

from fl_lightning.data import ClassIncremental, Scenario
from fl_lightning.methods import FedAvg, FedEWC, FedLwF, Replay
from tests.methods.changing import Small, run
from tests.toys import equal, fit, sgd, toy_data, weights_of

METHODS = {
    "FedEWC": (FedEWC, {"lam": 0.5}, {"lam": 0.0}),
    "FedLwF": (FedLwF, {"alpha": 1.0}, {"alpha": 0.0}),
    "ER": (Replay, {"size": 6}, {"size": 0}),
    "DER++": (Replay, {"size": 6, "alpha": 0.5}, {"size": 0, "alpha": 0.5}),
}


@pytest.mark.parametrize("name", METHODS)
def test_before_the_data_change_earlier_stages_have_no_weight(name):
    kind, settings, _ = METHODS[name]
    rounds = 1 if kind is Replay else 2
    assert equal(weights_of(run(kind, rounds, **settings)), weights_of(run(FedAvg, rounds)))
    assert not equal(weights_of(run(kind, 4, **settings)), weights_of(run(FedAvg, 4)))


@pytest.mark.parametrize("name", METHODS)
def test_without_weight_the_method_is_fedavg_and_keeps_nothing(name):
    kind, _, none = METHODS[name]
    loop = run(kind, 4, **none)
    assert equal(weights_of(loop), weights_of(run(FedAvg, 4)))
    assert not any(loop.store.record(client)[0] for client in loop.store.clients)


@pytest.mark.parametrize("name", METHODS)
def test_a_stack_of_clients_trains_as_each_alone(name):
    kind, settings, _ = METHODS[name]
    data = partial(toy_data, (12, 12, 12), scenario=ClassIncremental([[0, 1], [2]], 2))
    alone = run(kind, 5, data(), net=Small, **settings)
    stacked = fit(kind(net=Small, optimizer=sgd(), **settings), 5, data(), chunk=3)
    for entry, value in weights_of(alone).items():
        torch.testing.assert_close(weights_of(stacked)[entry], value, atol=1e-5, rtol=1e-5)


class Absent(Scenario):
    """The first client has no samples in round 2."""

    def stage(self, client_id, round_idx):
        return min(round_idx, 3)

    def keeps(self, client_id, stage):
        return None if client_id or stage != 2 else [False] * 10


def absent_at_last():
    return toy_data((10, 12), scenario=Absent())


def test_a_client_without_samples_in_a_stage_keeps_its_memory():
    data = absent_at_last()
    data.setup("fit")
    counts = [data.size(0, round_idx) for round_idx in range(4)]
    assert counts[2] == 0 < counts[1]
    for kind, settings, _ in METHODS.values():
        loop = fit(kind(net=Small, optimizer=sgd(), **settings), 3, absent_at_last())
        shorter = fit(kind(net=Small, optimizer=sgd(), **settings), 2, absent_at_last())
        assert str(loop.store.record(0)[0]) == str(shorter.store.record(0)[0])


def test_what_they_refuse():
    for make, error in (
        (lambda: FedEWC(lam=-1.0), "lam must be at least 0"),
        (lambda: FedEWC(gamma=1.5), "gamma must be at most 1"),
        (lambda: FedEWC(fisher="exact"), "fisher must be one of sample, batch"),
        (lambda: FedLwF(alpha=-1.0), "alpha must be at least 0"),
        (lambda: FedLwF(classes="old"), "classes must be one of all, new"),
        (lambda: Replay(size=-1), "size must be at least 0"),
        (lambda: Replay(select="first"), "select must be one of reservoir, balanced"),
    ):
        with pytest.raises(ValueError, match=error):
            make()
