"""FedAvgM: torch's SGD with momentum, its two other forms, and its state."""

from functools import partial

import pytest
import torch

from fl_lightning.methods import FedAvg, FedAvgM
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of


def server(optimizer, rounds=3, **settings):
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    return fit(client, rounds, toy_data(participation=0.6, **settings), server_optimizer=optimizer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_as_printed_it_is_torchs_sgd_with_momentum(nesterov):
    ours = server(partial(FedAvgM, lr=0.5, momentum=0.9, nesterov=nesterov))
    torchs = server(partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=nesterov))
    for name, value in weights_of(torchs).items():
        torch.testing.assert_close(weights_of(ours)[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("form", [{}, {"nesterov": True}, {"ema": True}])
def test_without_momentum_it_is_fedavg(form):
    plain = weights_of(server(None))
    ours = weights_of(server(partial(FedAvgM, momentum=0.0, **form)))
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-7)


def test_the_first_step_of_a_moving_average_is_a_part_of_the_mean_s():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    weight.grad = torch.tensor([2.0])
    FedAvgM([weight], momentum=0.9, ema=True).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([2.8]))


def test_a_round_in_which_nobody_had_data_changes_nothing():
    data = {"sizes": (7, 0, 5)}
    skipped = server(FedAvgM, 2, schedule=[[0, 2], [1]], **data)
    one = server(FedAvgM, 1, schedule=[[0, 2]], **data)
    assert equal(weights_of(skipped), weights_of(one))
    kept = [[state["v"] for state in loop.trainer.optimizers[0].state.values()] for loop in (skipped, one)]
    assert all(map(torch.equal, *kept))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"nesterov": True, "ema": True}, "takes nesterov or ema, got both"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedAvgM([torch.nn.Parameter(torch.zeros(1))], **settings)
