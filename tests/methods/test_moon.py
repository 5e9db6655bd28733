"""MOON: its term against a loop, the models that a client keeps, and the projection head."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.methods import MOON, FedAvg
from fl_lightning.methods.moon import model_contrastive
from fl_lightning.nets import HeterogeneousNets, Perceptron, Projected
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


def features(number, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 4, generator=g).double() for _ in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_term_is_that_of_a_loop(number):
    z, received, *previous = features(2 + number)

    def similarity(a, b):
        return float(a @ b / (a.norm() * b.norm())) / 0.5

    terms = []
    for row in range(len(z)):
        s = [torch.tensor(similarity(z[row], other[row])).double().exp() for other in (received, *previous)]
        terms.append(-(s[0] / sum(s)).log())
    torch.testing.assert_close(model_contrastive(z, received, previous, 0.5), torch.stack(terms).mean())


def test_the_received_model_as_its_own_negative_gives_log_2_and_no_gradient():
    z, received = features(2)
    z.requires_grad_()
    value = model_contrastive(z, received, [received])
    assert float(value) == pytest.approx(0.6931471805599453)
    assert not torch.autograd.grad(value, z)[0].any()
    assert model_contrastive(z, received, []) == 0


def test_dead_features_are_finite():
    z, received, previous = (torch.zeros(3, 4, requires_grad=True) for _ in range(3))
    value = model_contrastive(z, received, [previous])
    assert value.isfinite()
    assert torch.autograd.grad(value, z)[0].isfinite().all()


class Trained(pl.Callback):
    """Keeps every client's whole model after its training, by round."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_start(self, trainer, loop):
        self.rounds.append({})

    def on_client_end(self, trainer, loop, update):
        self.rounds[-1][update.client_id] = {n: v.clone() for n, v in loop.client.state_dict().items()}


@pytest.mark.parametrize("number", [1, 2])
def test_a_client_keeps_its_last_trained_models_with_their_statistics(number):
    """Its personal entries too; a client without data, or not yet drawn, keeps none."""
    trained = Trained()
    schedule = [[0, 1], [0, 2], [0, 1, 2]]
    client = MOON(previous_models=number, net=BatchNormNet, optimizer=sgd())
    data = toy_data((7, 0, 5, 9), schedule=schedule)
    loop = fit(client, 3, data, callbacks=[trained], personal="net.head.*")
    took_part = {0: [0, 1, 2], 2: [1, 2]}
    for client_id, rounds in took_part.items():
        kept = loop.store.record(client_id)[0]["own_models"]
        assert len(kept) == min(number, len(rounds))
        for state, r in zip(kept, rounds[-number:], strict=True):
            assert equal(state, trained.rounds[r][client_id])
    assert not [i for i in (1, 3) if loop.store.record(i)[0].get("own_models")]


class Seen(MOON):
    """Notes client, round, and the modes of the nets in the contrast."""

    seen: list

    def contrast(self, x, features):
        teachers = [self.teacher("global"), self.teacher("previous/0")]
        self.seen.append(self.context.client_id)
        assert not any(t.net.training for t in teachers)
        assert self.net.training
        assert not any(name.startswith("_teachers") for name in self.state_dict())
        return super().contrast(x, features)


def test_there_is_no_contrast_at_the_first_participation():
    client = Seen(net=BatchNormNet, optimizer=sgd())
    client.seen = []
    loop = fit(client, 2, toy_data((10, 5, 10), schedule=[[0, 1], [0, 2]]))
    assert set(client.seen) == {0}
    first = fit(MOON(net=BatchNormNet, optimizer=sgd()), 1)
    assert equal(weights_of(first), weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1)))
    assert loop.round_metrics["train/contrast"] > 0


def test_a_larger_mu_stays_nearer_to_the_received_features():
    def contrast(mu):
        loop = fit(MOON(mu=mu, net=Small, optimizer=sgd(0.05)), 6, local_epochs=3)
        return loop.round_metrics["train/contrast"]

    assert contrast(20.0) < contrast(1e-6)


@pytest.mark.parametrize(("hidden", "units"), [("full", 8), ("half", 4)])
def test_the_projection_head_is_what_the_classifier_reads(hidden, units):
    net = Projected(3, (4,), net=BatchNormNet, width=5, hidden=hidden)
    assert [tuple(p.shape) for p in net.projection.parameters()] == [(units, 8), (units,), (5, units), (5,)]
    assert not [name for name in net.state_dict() if name.startswith("body.head")]
    x = torch.randn(6, 4)
    net.eval()
    assert net.features(x).shape == (6, 5)
    assert torch.equal(net(x), net.head(net.projection(net.body.features(x))))
    loop = fit(MOON(net=partial(Projected, net=BatchNormNet, width=5, hidden=hidden), optimizer=sgd()), 3)
    assert loop.round_metrics["train/contrast"] > 0


def test_the_projection_is_as_wide_as_the_papers_by_default():
    assert Projected(3, (4,), net=BatchNormNet).head.in_features == 256


def test_bad_settings():
    for settings, sentence in (
        ({"mu": -1.0}, "mu must be at least 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"previous_models": 0}, "previous_models must be at least 1"),
        ({"module": Regression()}, "MOON needs the logits"),
    ):
        with pytest.raises(ValueError, match=sentence):
            FederatedLoop(MOON(**settings))
    for settings, sentence in (({"width": 0}, "a width of at least 1"), ({"hidden": "none"}, "full or half")):
        with pytest.raises(ValueError, match=sentence):
            Projected(3, (4,), **settings)


def test_what_a_client_deploys_is_the_received_model():
    """As FedAvg's: its own models serve the contrast only."""
    loop = fit(MOON(net=Small, optimizer=sgd()), 1, toy_data((7, 9)))
    client = loop.client
    shared = {name: value.clone() for name, value in loop.client.state_dict().items()}
    client.context.memory = loop.store.memory(0)
    assert client.deployed() is client
    assert equal(client.state_dict(), shared)


def test_a_net_without_a_head_is_refused():
    net = partial(HeterogeneousNets, nets=[Small])
    with pytest.raises(ValueError, match=r"MOON needs a net whose last layer is .* called head, got HeterogeneousNets"):
        fit(MOON(net=net), 1, personal="*")
