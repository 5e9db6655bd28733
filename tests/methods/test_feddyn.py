"""FedDyn: its invariant, its optimum, the weights that are evaluated, and what it refuses."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.functional.state import StateSum, mean_of
from fl_lightning.methods import FedAvg, FedDyn
from fl_lightning.nets import Perceptron
from tests.methods.convex import mean_in_memory, solve
from tests.toys import BatchNormNet, fit, sgd, toy_data

Small = partial(Perceptron, hidden=(6,))
PARTIAL = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]


class LastMean(pl.Callback):
    """Takes the weighted mean of the last round's clients."""

    def on_train_epoch_start(self, trainer, loop):
        self.total = StateSum()

    def on_client_end(self, trainer, loop, update):
        self.total.add(update.weights, update.num_samples)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_h_is_the_mean_of_all_clients_g_i(weighting):
    """Under partial participation, with a client that has no data; the mean's weights do not matter."""
    data = toy_data((7, 0, 5, 9, 16), participation=0.6)
    loop = fit(FedDyn(net=BatchNormNet, optimizer=sgd()), 4, data, local_epochs=2, weighting=weighting)
    h = loop.server_module.correction
    mean = mean_in_memory(loop, "gradient")
    assert any(value.abs().max() > 1e-4 for value in mean.values())
    assert not loop.store.record(1)[0]
    for name, value in mean.items():
        torch.testing.assert_close(h[name], value, rtol=1e-5, atol=1e-7)


def test_it_reaches_the_optimum_that_fedavg_misses():
    """Unequal quadratics, unequal work, partial participation."""
    work = {"lr": 0.2, "local_epochs": [3, 2, 4, 1]}
    _, missed = solve(FedAvg, 60, PARTIAL, **work)
    _, gap = solve(partial(FedDyn, alpha=1.0), 60, PARTIAL, **work)
    assert missed > 0.02
    assert gap < missed / 50


def test_the_active_mean_is_evaluated_but_not_trained_from():
    """The clients' mean by hand; its buffers are the server's, and the run is the same."""
    last = LastMean()
    server, active = (
        fit(FedDyn(evaluates=evaluates, net=BatchNormNet, optimizer=sgd()), 3, callbacks=[last])
        for evaluates in ("server", "active_mean")
    )
    weights = server.client.state_dict()
    for name, value in active.client.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    evaluated = active.server_module.evaluation_weights(weights)
    assert server.server_module.evaluation_weights(weights) is weights
    for name, value in mean_of(last.total).items():
        torch.testing.assert_close(evaluated[name], value, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(evaluated[name], weights[name]) for name in weights)


def test_alpha_must_be_above_0():
    for alpha in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="alpha must be above 0"):
            FedDyn(alpha=alpha)
    with pytest.raises(ValueError, match="evaluates must be one of"):
        FedDyn(evaluates="cloud")


@pytest.mark.parametrize("step", [sgd(1.0, 0.0), sgd(1.0, 0.9), partial(torch.optim.Adam, lr=0.1)])
def test_a_server_optimizer_is_refused(step):
    with pytest.raises(ValueError, match=r"FedDyn takes its own server step.*leave model.server_optimizer unset"):
        fit(FedDyn(net=Small, optimizer=sgd()), 1, server_optimizer=step)
