"""A method whose coefficients are 0 is FedAvg, bit for bit; each class says so itself in `fedavg_equivalent`."""

import inspect
from functools import cache, partial

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ClientModule, FederatedLoop, methods
from fl_lightning.aggregation import FedBuff
from fl_lightning.data import Devices, TensorSource
from fl_lightning.methods import DPFedAvg, FedAvg, FedNTD
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of

EXPORTED = [kind for kind in vars(methods).values() if inspect.isclass(kind) and issubclass(kind, ClientModule)]
EQUIVALENT = [partial(kind, **kind.fedavg_equivalent) for kind in EXPORTED if kind.fedavg_equivalent]
EQUIVALENT += [partial(FedNTD, beta=0.0, kd_form="convex")]
NEED_LOGITS = [kind for kind in EQUIVALENT if "logits" in kind.func.needs]
QUICK = {"FedDecorr", "FedGen", "FedGKD", "FedLMD"}
"""Methods of this list are tested by default where the others are like them: with a server that sends, and without."""


def data(**settings):
    """The toy clients, with every set that a method may need."""
    source = TensorSource(samples(11, seed=5), samples(2), num_classes=3)
    return toy_data(extra_splits={"proxy": source, "transfer": source}, **settings)


def name(kind):
    return kind.func.__name__


def quick_or_slow(kinds):
    return [pytest.param(kind, id=name(kind), marks=[] if name(kind) in QUICK else pytest.mark.slow) for kind in kinds]


class StepsItself(LightningModule):
    """A classifier that steps its optimizer by hand, and returns no loss."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.line = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.line(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
    assert plain.recorder.history.names == fedavg_equivalent.recorder.history.names
    for column in plain.recorder.history.names:
        assert plain.recorder.history.curve(column) == fedavg_equivalent.recorder.history.curve(column)
    assert not fedavg_equivalent.client.distils


def around(kind, module, clients=None, **settings):
    """A run of two rounds around a module that starts from the same weights each time."""
    torch.manual_seed(0)
    return fit(kind(module=module()), 2, clients, **settings)


@pytest.mark.parametrize("kind", quick_or_slow(EQUIVALENT))
@pytest.mark.parametrize("module", [Regression, StepsItself])
def test_around_any_module_too(kind, module):
    """The values and bytes of a round, too. It needs no set."""
    plain = around(FedAvg, module)
    fedavg_equivalent = around(kind, module)
    assert equal(weights_of(plain), weights_of(fedavg_equivalent))
    assert plain.round_metrics == fedavg_equivalent.round_metrics


@pytest.mark.parametrize("kind", quick_or_slow(EQUIVALENT))
def test_clients_that_are_late_go_with_it(kind):
    """Nothing of a round is sent that another round could not have."""
    settings = {"pacing": FedBuff(buffer=2)}
    plain = around(FedAvg, Regression, toy_data(devices=Devices(step_seconds=0.1)), **settings)
    ours = around(kind, Regression, toy_data(devices=Devices(step_seconds=0.1)), **settings)
    assert equal(weights_of(plain), weights_of(ours))


def alone(client):
    """Weights after two epochs of a plain Trainer."""
    torch.manual_seed(1)
    trainer(2).fit(client, DataLoader(TensorDataset(*samples(16)), batch_size=4))
    return dict(client.state_dict())


@pytest.mark.parametrize("kind", quick_or_slow(EQUIVALENT))
def test_a_plain_trainer_trains_it_as_fedavg(kind):
    """No part of a federation is missing."""
    net = {"net": BatchNormNet, "num_classes": 3, "input_shape": (4,), "optimizer": sgd()}
    for settings in (lambda: net, lambda: {"module": StepsItself()}):
        trained = []
        for one in (FedAvg, kind):
            torch.manual_seed(0)
            trained.append(alone(one(**settings())))
        assert equal(*trained)


@pytest.mark.parametrize("kind", quick_or_slow(NEED_LOGITS))
def test_another_coefficient_is_refused_around_a_module(kind):
    """A client cannot know it when it is built, the loop does. What is set later is found before the first round."""
    coefficient, equivalent = next(iter(kind.keywords.items()))
    other = 0.5
    assert other != equivalent
    sentence = f"{name(kind)} needs the logits of a net, got module=Regression; give .*net="
    client = kind(module=Regression(), **{coefficient: other})
    with pytest.raises(ValueError, match=sentence):
        FederatedLoop(client)
    with pytest.raises(ValueError, match=sentence):
        alone(client)
    loop = FederatedLoop(kind(module=Regression()), seed=3)
    setattr(loop.client, coefficient, other)
    with pytest.raises(ValueError, match=sentence):
        fit(None, 1, loop=loop)


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
