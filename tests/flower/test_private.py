"""Differential privacy in a federation: of clients at the server, of samples at the nodes."""

import pytest

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")
pytest.importorskip("dp_accounting", reason="pip install 'fl_lightning[dp]'")

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.methods import DPFedAvg, FedAvg, dp_sgd, local_dp
from tests.flower.grid import federate
from tests.methods.test_dpsgd import Net
from tests.toys import equal, fit, sgd, toy_data, weights_of


def rule():
    return {
        "aggregator": DPFedAvg(noise_multiplier=1.0, delta=1e-3, clip=0.5, quantile=0.5),
        "faults": FaultPolicy(min_clients=0),
    }


PRIVATE = {
    "clients": (lambda: FedAvg(net=Net, optimizer=sgd()), {"rule": True}),
    "samples": (lambda: dp_sgd(FedAvg(net=Net, optimizer=sgd()), 1.0, 1.0, 1e-3, 0.5), {}),
    "updates": (lambda: local_dp(FedAvg(net=Net, optimizer=sgd()), 1.0, 1.0, 1e-3), {}),
}


def data(**settings):
    return toy_data((7, 12, 5, 9), **settings)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_simulations_bits_and_epsilon(name, tmp_path):
    client, settings = PRIVATE[name]

    def loop():
        return FederatedLoop(client(), seed=3, **(rule() if settings else {}))

    sampling = {"sampling": "poisson", "participation": 0.5} if settings else {}
    plain = fit(None, 4, data(**sampling), loop=loop())
    server, *_ = federate(loop, lambda: data(**sampling), tmp_path, rounds=4)
    assert equal(weights_of(plain), weights_of(server))
    assert plain.round_metrics == server.round_metrics
    assert any("epsilon" in key for key in server.round_metrics)


@pytest.mark.parametrize("name", ["samples", "updates"])
def test_an_owners_noise_is_drawn_by_a_seed_that_nobody_else_has(name, tmp_path):
    client, _ = PRIVATE[name]
    runs = [
        federate(lambda: FederatedLoop(client(), seed=3), lambda: data(secret_seed=True), tmp_path / run, rounds=1)[0]
        for run in ("a", "b")
    ]
    assert not equal(*map(weights_of, runs))
