"""FedEWC, FedLwF and Replay: what changes once a client's data have changed, and FedAvg before that."""

from collections import Counter
from functools import partial

import pytest
import torch

from fl_lightning.data import ClassIncremental, Scenario, Window
from fl_lightning.methods import FedAvg, FedEWC, FedLwF, Replay
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
SIZES = (12, 17, 9)
METHODS = {
    "FedEWC": (FedEWC, {"lam": 0.5}, {"lam": 0.0}),
    "FedLwF": (FedLwF, {"alpha": 1.0}, {"alpha": 0.0}),
    "ER": (Replay, {"size": 6}, {"size": 0}),
    "DER++": (Replay, {"size": 6, "alpha": 0.5}, {"size": 0, "alpha": 0.5}),
}


def changing(rounds_per_task=2, **settings):
    return toy_data(SIZES, scenario=ClassIncremental([[0, 1], [2]], rounds_per_task), **settings)


def run(kind, rounds=4, data=None, net=BatchNormNet, **settings):
    return fit(kind(net=net, optimizer=sgd(), **settings), rounds, changing() if data is None else data)


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


def test_the_penalty_stacks():
    client = FedEWC(net=Small, num_classes=3, input_shape=(4,)).double()
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=draws).double()
    y = torch.randint(3, (3, 5), generator=draws)
    entries = {name: torch.rand(3, *value.shape, generator=draws).double() for name, value in client.params().items()}
    buffers = {"omega": entries, "anchor": {name: 0.1 * value for name, value in entries.items()}}
    torch.testing.assert_close(*stacked_and_alone(client, buffers, x, y))


def test_the_more_weight_the_nearer_the_weights_stay_to_the_model_of_the_change():
    start = weights_of(run(FedEWC, 2, net=Small, lam=1.0))
    client = run(FedEWC, 3, net=Small, lam=1.0).store.record(1)[0]
    omega = client["omega"]
    distances = []
    for lam in (0.0, 1.0, 10.0):
        end = weights_of(fit(FedEWC(lam=lam, net=Small, optimizer=sgd(0.02, 0.0)), 4, changing()))
        begun = weights_of(fit(FedEWC(lam=lam, net=Small, optimizer=sgd(0.02, 0.0)), 2, changing()))
        moved = {name: (end[f"client.{name}"] - begun[f"client.{name}"]).square() for name in omega}
        distances.append(sum(float((omega[name] * moved[name]).sum()) for name in omega))
    assert distances[0] > distances[1] > distances[2] > 0
    assert start.keys() == end.keys()


def test_omega_adds_the_information_of_each_stage_and_fades():
    tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=1)
    found = {}
    for rounds in (1, 2, 3):
        loop = run(FedEWC, rounds, toy_data(SIZES, scenario=tasks), net=Small, lam=1e-9, gamma=0.5)
        found[rounds] = loop.store.record(1)[0]
    assert "omega" not in found[1]
    for name, value in found[1]["fisher"].items():
        torch.testing.assert_close(found[2]["omega"][name], value)
        expected = 0.5 * found[2]["omega"][name] + found[2]["fisher"][name]
        torch.testing.assert_close(found[3]["omega"][name], expected)


def test_the_old_model_is_the_one_received_at_the_change():
    held = weights_of(run(FedLwF, 2))
    loop = run(FedLwF, 4)
    for client in range(3):
        memory = loop.store.record(client)[0]
        for name, value in memory["old"].items():
            assert value.equal(held[f"client.{name}"]), name
        assert memory["met"].tolist() == [True, True, False]


def test_new_classes_are_those_that_the_client_has_not_met():
    assert not equal(weights_of(run(FedLwF, 4)), weights_of(run(FedLwF, 4, classes="new")))
    assert equal(weights_of(run(FedLwF, 2)), weights_of(run(FedLwF, 2, classes="new")))


def buffers_of(data, rounds, **settings):
    loop = run(Replay, rounds, data, net=Small, **settings)
    return {client: loop.store.record(client)[0] for client in loop.store.clients}


def test_each_sample_comes_to_the_buffer_once():
    kept = buffers_of(changing(), 6, size=100)
    data = changing()
    data.setup("fit")
    for client, memory in kept.items():
        part = data.client_samples().dealt[client]
        assert memory["count"] == sum(memory["seen"].values()) == len(part)
        rows = memory["buffer"]["x"][: memory["count"]]
        expected = data.split("train").x[part]
        assert sorted(rows[:, 0].tolist()) == sorted(expected[:, 0].tolist())
        assert not memory["buffer"]["x"][memory["count"] :].any()


def test_every_sample_stays_in_the_reservoir_with_one_probability():
    client = Replay(size=4)
    draws = torch.rand(4000, 12, 2, generator=torch.Generator().manual_seed(0)).tolist()
    counts = Counter()
    for of_run in draws:
        buffer = []
        for sample in range(12):
            place = client._place(torch.tensor(buffer), label=0, seen={0: sample + 1}, draws=of_run[sample])
            if place is not None:
                buffer[place : place + 1] = [sample]
        assert len(set(buffer)) == 4
        counts.update(buffer)
    for sample in range(12):
        assert counts[sample] / 4000 == pytest.approx(4 / 12, abs=0.03)


def test_the_buffer_is_filled_over_the_rounds():
    data = toy_data((12,), scenario=Window(per_round=0.25))
    memory = fit(Replay(size=4, net=Small, optimizer=sgd()), 4, data).store.record(0)[0]
    assert (memory["count"], sum(memory["seen"].values())) == (4, 12)


def test_balanced_buffers_have_as_many_of_each_class_as_they_can():
    tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=1)
    for memory in buffers_of(toy_data((40, 40), scenario=tasks), 3, size=7, select="balanced").values():
        assert sorted(Counter(memory["buffer"]["y"].tolist()).values()) == [2, 2, 3]


def test_stored_logits_are_those_of_the_client_that_stored_them():
    memory = buffers_of(changing(), 1, size=30, alpha=0.5)[1]
    assert memory["buffer"]["z"][: memory["count"]].abs().sum() > 0
    assert "z" not in buffers_of(changing(), 1, size=30)[1]["buffer"]


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
