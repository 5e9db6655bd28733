"""Bases of clients that keep a model or a head: what is kept, loaded, deployed."""

from functools import partial

import pytest
import torch

from fl_lightning.client import OwnModelClient, PersonalHeadClient
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.methods import MOON, FedAvg, FedPAC, FedRep, FedRoD
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


def test_the_model_after_training_is_kept_with_its_buffers_and_nothing_else_changes():
    data = {"sizes": (7, 0, 9), "schedule": [[0, 1], [0, 2]]}
    runs = [fit(kind(net=BatchNormNet, optimizer=sgd()), 2, toy_data(**data)) for kind in (OwnModelClient, FedAvg)]
    assert equal(*map(weights_of, runs))
    assert runs[0].round_metrics == runs[1].round_metrics
    alone = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, toy_data(sizes=(7, 0, 9), schedule=[[0, 1], [2]]))
    assert equal(runs[0].store.memory(2)["own_models"][-1], alone.client.state_dict())
    assert runs[0].store.memory(1) == {}  # it took no step


def test_deployed_is_the_own_model_once_there_is_one():
    loop = fit(OwnModelClient(net=BatchNormNet, optimizer=sgd()), 1, toy_data(schedule=[[0, 1]]))
    client = loop.client
    shared = {name: value.clone() for name, value in loop.client.state_dict().items()}
    client.context.memory = {}
    assert client.deployed() is client
    assert equal(client.state_dict(), shared)
    client.context.memory = loop.store.memory(1)
    client.deployed()
    assert equal(client.state_dict(), loop.store.memory(1)["own_models"][-1])
    assert not equal(client.state_dict(), shared)


def test_a_mean_over_samples_does_not_depend_on_the_batches():
    client = OwnModelClient(net=Small, optimizer=sgd(), num_classes=3, input_shape=(4,))
    means = []
    for batch_size in (2, 5, "full"):
        data = toy_data((7,), batch_size=batch_size)
        data.setup("fit")
        means.append(client.mean_over(data.view(0, 0), lambda batch: client.local_loss(batch, 0)))
    x, y = data.view(0, 0).all()
    for mean in means:
        torch.testing.assert_close(mean.float(), cross_entropy(client(x), y).detach())
        assert not mean.requires_grad


def test_body_and_head_are_all_there_is():
    client = PersonalHeadClient(net=BatchNormNet, num_classes=3, input_shape=(4,))
    assert {*client.head_names(), *client.body_names()} == {*client.trained()}
    assert client.head_names() == ("net.head.weight", "net.head.bias")
    assert client.head is client.net.head
    torch.testing.assert_close(client.eval().head(client.features(torch.ones(2, 4))), client(torch.ones(2, 4)))


@pytest.mark.parametrize("kind", [FedPAC, FedRep, FedRoD, MOON, PersonalHeadClient])
def test_a_method_that_asks_for_the_head_of_all_clients_refuses_nets_that_have_one_each(kind):
    """The nets have a `head`, that of the client which is trained, but its entries have other names for each client."""
    nets = partial(HeterogeneousNets, nets=[Small, Small])
    sentence = rf"{kind.__name__} needs a net .* called head, got HeterogeneousNets, .*; give all clients one net"
    with pytest.raises(ValueError, match=sentence):
        kind(net=nets, num_classes=3, input_shape=(4,))
