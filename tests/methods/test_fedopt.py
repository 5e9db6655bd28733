"""FedAdam, FedYogi and FedAdagrad: loops over numbers, what torch's Adam has to do with them, what they leave alone."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch

from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAdagrad, FedAdam, FedAvg, FedYogi, KnFu
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

ALL = [FedAdam, FedYogi, FedAdagrad]
DELTAS = [0.7, -0.2, 1.5, -3.0, 0.01]


def naive(kind, deltas, lr, beta1, beta2, tau, v, corrected):
    x = m = 0.0
    for t, delta in enumerate(deltas, start=1):
        m = beta1 * m + (1 - beta1) * delta
        if kind is FedAdagrad:
            v += delta**2
        elif kind is FedAdam:
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v -= (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))
        factor = math.sqrt(1 - beta2**t) / (1 - beta1**t) if corrected else 1.0
        x += lr * factor * m / (math.sqrt(v) + tau)
    return x


def ours(optimizer, deltas):
    (weight,) = optimizer.param_groups[0]["params"]
    for delta in deltas:
        weight.grad = torch.full_like(weight, -delta)  # as the loop has it: global - aggregate
        optimizer.step()
    return weight.item()


def one_weight():
    return [torch.nn.Parameter(torch.zeros((), dtype=torch.float64))]


@pytest.mark.parametrize("v_init", [0.0, 1e-6, 4.0])
@pytest.mark.parametrize(("kind", "corrected"), [(kind, False) for kind in ALL] + [(k, True) for k in ALL[:2]])
def test_steps_are_those_of_a_loop_over_numbers(kind, corrected, v_init):
    adaptive = {} if kind is FedAdagrad else {"beta2": 0.9, "bias_correction": corrected}
    optimizer = kind(one_weight(), lr=0.3, beta1=0.6, tau=0.02, v_init=v_init, **adaptive)
    expected = naive(kind, DELTAS, 0.3, 0.6, 0.9, 0.02, v_init, corrected)
    assert ours(optimizer, DELTAS) == pytest.approx(expected, rel=1e-12)


def test_torchs_adam_is_not_fedadam_but_the_corrected_form_comes_near_it():
    """Up to where the small number is added: torch corrects the bias under the root first."""
    settings = {"lr": 0.1, "betas": (0.9, 0.99)}
    adam = ours(torch.optim.Adam(one_weight(), eps=1e-12, **settings), DELTAS)
    corrected = ours(FedAdam(one_weight(), tau=1e-12, bias_correction=True), DELTAS)
    assert corrected == pytest.approx(adam, rel=1e-9)
    assert abs(ours(FedAdam(one_weight(), tau=1e-12), DELTAS) - adam) > 0.02


@pytest.mark.parametrize("kind", ALL)
def test_buffers_take_the_mean_and_a_round_without_data_does_not_count(kind):
    data = partial(toy_data, (7, 0, 5))
    client = partial(FedAvg, net=BatchNormNet, optimizer=sgd())
    loops = [
        fit(client(), len(schedule), data(schedule=schedule), server_optimizer=kind)
        for schedule in ([[0, 2]], [[0, 2], [1]])
    ]
    assert equal(*map(weights_of, loops))
    assert {state["t"] for state in loops[1].trainer.optimizers[0].state.values()} == {1}
    plain = fit(client(), 1, data(schedule=[[0, 2]]))
    for name, value in plain.client.named_buffers():
        assert torch.equal(value, dict(loops[0].client.named_buffers())[name])
    assert not all(map(torch.equal, plain.client.parameters(), loops[0].client.parameters()))


@pytest.mark.parametrize("kind", ALL)
def test_its_settings_and_state_travel_with_it(kind):
    whole = kind(one_weight(), v_init=0.5)
    ours(whole, DELTAS[:2])
    for again in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert again.param_groups[0]["v_init"] == 0.5
        assert ours(again, DELTAS[2:]) == ours(copy.deepcopy(whole), DELTAS[2:])


def test_where_clients_share_no_weights_it_is_refused_at_start():
    transfer = TensorSource(samples(9, seed=5), samples(2), num_classes=3)
    with pytest.raises(ValueError, match="server_optimizer needs trainable entries that the clients share, got none"):
        fit(KnFu(net=Perceptron), 1, toy_data(extra_splits={"transfer": transfer}), server_optimizer=FedAdam)


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (FedAdam, {"lr": 0.0}, "lr must be above 0, got 0.0"),
        (FedYogi, {"tau": 0.0}, "tau must be above 0, got 0.0"),
        (FedAdam, {"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        (FedAdagrad, {"beta1": -1.0}, "beta1 must be at least 0, got -1.0"),
        (FedAdagrad, {"v_init": -1.0}, "v_init must be at least 0, got -1.0"),
    ],
)
def test_wrong_settings_are_refused(kind, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        kind(one_weight(), **settings)
