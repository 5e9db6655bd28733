"""A method whose coefficients are 0 is FedAvg, bit for bit; each class says so itself in `fedavg_equivalent`."""

import inspect
from functools import cache, partial

import pytest
import torch

from fl_lightning import ClientModule, FederatedLoop, methods
from fl_lightning.data import TensorSource
from fl_lightning.methods import DPFedAvg, FedAvg, FedNTD
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

EXPORTED = [kind for kind in vars(methods).values() if inspect.isclass(kind) and issubclass(kind, ClientModule)]
EQUIVALENT = [partial(kind, **kind.fedavg_equivalent) for kind in EXPORTED if kind.fedavg_equivalent]
EQUIVALENT += [partial(FedNTD, beta=0.0, kd_form="convex")]
WITHOUT_LOGITS = [kind for kind in EQUIVALENT if "logits" not in kind.func.needs]


def data(**settings):
    """The toy clients, with every set that a method may need."""
    source = TensorSource(samples(11, seed=5), samples(2), num_classes=3)
    return toy_data(extra_splits={"proxy": source, "transfer": source}, **settings)


def name(kind):
    return kind.func.__name__


def moved(row):
    """What a round logged, but for the sets that a method needs once."""
    return {key: value for key, value in row.items() if key != "comm/bytes_sets"}


def test_every_fedavg_equivalent_coefficient_is_an_argument():
    assert {"FedProx", "FedNTD", "FedED", "FedKA", "FedCL"} <= set(map(name, EQUIVALENT))
    for kind in EXPORTED:
        assert kind.fedavg_equivalent.keys() <= inspect.signature(kind).parameters.keys()


def trained(kind, personal):
    settings = {"server_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9), "lr_decay": 0.9}
    client = kind(net=BatchNormNet, optimizer=sgd(weight_decay=1e-3))
    return fit(client, 3, data(participation=0.6), local_epochs=2, personal=personal, **settings)


fedavg = cache(partial(trained, FedAvg))


@pytest.mark.parametrize("personal", [None, "net.head.*"])
@pytest.mark.parametrize("kind", EQUIVALENT, ids=name)
def test_a_fedavg_equivalent_coefficient_is_fedavg_bit_for_bit(kind, personal):
    """With shuffling, dropout, BatchNorm, momentum, partial participation: weights, values and bytes of every round."""
    plain = fedavg(personal)
    fedavg_equivalent = trained(kind, personal)
    assert equal(weights_of(plain), weights_of(fedavg_equivalent))
    assert plain.recorder.history.names == [
        n for n in fedavg_equivalent.recorder.history.names if n != "comm/bytes_sets"
    ]
    for column in plain.recorder.history.names:
        assert plain.recorder.history.curve(column) == fedavg_equivalent.recorder.history.curve(column)
    assert not fedavg_equivalent.client.distils


@pytest.mark.parametrize("kind", WITHOUT_LOGITS, ids=name)
def test_around_a_module_too(kind):
    torch.manual_seed(0)
    start = Regression().state_dict()
    runs = []
    for client in (FedAvg, kind):
        module = Regression()
        module.load_state_dict(start)
        runs.append(fit(client(module=module), 2, data()))
    assert equal(*map(weights_of, runs))
    assert moved(runs[0].round_metrics) == moved(runs[1].round_metrics)


def hidden(kind):
    """Weights of a private run."""
    rule = DPFedAvg(noise_multiplier=1.0, delta=0.01, clip=0.5)
    client = kind(net=BatchNormNet, optimizer=sgd())
    return weights_of(fit(client, 2, data(sampling="poisson", participation=0.6), aggregator=rule))


@pytest.mark.parametrize("kind", EQUIVALENT, ids=name)
def test_a_private_rule_goes_with_it(kind):
    """It sends weights only, whatever else it sends at other coefficients."""
    assert equal(hidden(kind), hidden(FedAvg))


@pytest.mark.parametrize("kind", EQUIVALENT, ids=name)
def test_the_exposure_is_fedavg_s_too(kind):
    """A method's own slope is 1 where its terms are gone."""
    client = kind(net=BatchNormNet, optimizer=sgd())
    loops = [FederatedLoop(one, seed=3) for one in (client, FedAvg(net=BatchNormNet, optimizer=sgd()))]
    for loop in loops:
        fit(None, 1, data(sizes=(7, 9)), loop=loop)
    assert loops[0].client.accumulated_lr == loops[1].client.accumulated_lr > 0
