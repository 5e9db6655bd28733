"""FedProx: Eq. 2 by hand, around a net and around a module."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import Perceptron
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, fit, sgd, toy_data

Small = partial(Perceptron, hidden=(6,))


def test_a_round_equals_gradient_steps_with_the_pull_by_hand():
    """θ ← θ − η (∇L + μ (θ − x)) with momentum: the pull enters before decay and momentum."""
    mu = 0.7
    lr = 0.1
    decay = 0.05
    data = toy_data((9,), batch_size=4, dtype=torch.float64)
    client = FedProx(mu=mu, net=Small, optimizer=sgd(lr, 0.9, weight_decay=decay))
    loop = fit(client, 1, data, precision="64-true", local_epochs=3)
    net = fit(FedAvg(net=Small), 0, data, precision="64-true").client.net.double()
    start = copy.deepcopy(list(net.parameters()))
    speed = [torch.zeros_like(p) for p in start]
    for epoch in range(3):
        for x, y in data.view(0, 0).batches(epoch=epoch):
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p, x0, v in zip(net.parameters(), start, speed, strict=True):
                    v.mul_(0.9).add_(p.grad + mu * (p - x0) + decay * p)
                    p.sub_(lr * v)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(loop.client.net.state_dict()[name], value, rtol=1e-12, atol=1e-12)


class First(FedProx):
    """Keeps the pull of every step and its gradient at the first."""

    def training_step(self, batch, batch_idx):
        if not self.num_steps:
            loss = super().training_step(batch, batch_idx)
            plain = self.local_loss(batch, batch_idx)
            params = list(self.params().values())
            gradients = [torch.autograd.grad(value, params, retain_graph=True) for value in (loss, plain)]
            self.equal.append(all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and bool(loss == plain))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("net", [Small, partial(BatchNormNet, dropout=0.0)])
def test_the_pull_and_its_gradient_are_zero_at_the_first_step(net):
    client = First(mu=5.0, net=net, optimizer=sgd())
    client.equal = []
    fit(client, 2)
    assert client.equal == [True] * 10


def test_a_stronger_pull_stays_nearer():
    def moved(mu):
        loop = fit(FedProx(mu=mu, net=Small, optimizer=sgd(0.05)), 1, local_epochs=5)
        start = fit(FedAvg(net=Small), 0).client.state_dict()
        return sum((loop.client.state_dict()[name] - value).square().sum().item() for name, value in start.items())

    assert moved(0.0) > moved(1.0) > moved(10.0) > 0


def test_buffers_and_frozen_parameters_are_not_pulled():
    class HalfFrozen(BatchNormNet):
        def __init__(self, num_classes, input_shape):
            super().__init__(num_classes, input_shape)
            self.body[0].requires_grad_(False)

    client = FedProx(mu=0.5, net=HalfFrozen, optimizer=sgd())
    start = {name: value.clone() for name, value in fit(FedProx(net=HalfFrozen), 0).client.state_dict().items()}
    loop = fit(client, 2)
    assert sorted(client.params()) == ["net.body.1.bias", "net.body.1.weight", "net.head.bias", "net.head.weight"]
    for name, value in loop.client.state_dict().items():
        assert torch.equal(value, start[name]) == ("body.0" in name), name


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_around_a_module_its_own_loss_is_pulled(mu):
    data = toy_data((6,), batch_size=3, dtype=torch.float64, shuffle=False)
    module = Regression()
    by_hand = copy.deepcopy(module).double()
    fit(FedProx(mu=mu, module=module), 1, data, precision="64-true", local_epochs=2)
    start = copy.deepcopy(list(by_hand.parameters()))
    for _ in range(2):
        for batch in data.view(0, 0).batches():
            loss = by_hand.training_step(batch, 0)
            loss = loss + mu / 2 * sum((p - x).square().sum() for p, x in zip(by_hand.parameters(), start, strict=True))
            by_hand.zero_grad()
            loss.backward()
            torch.optim.SGD(by_hand.parameters(), lr=0.01).step()
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name].double(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_mu_below_zero_is_refused(mu):
    with pytest.raises(ValueError, match=f"mu must be at least 0, got {mu}; 0 is FedAvg"):
        FedProx(mu=mu)
