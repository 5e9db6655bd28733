"""Passes aside of a training step leave nothing in what is logged, counted, drawn or kept."""

import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torchmetrics import MeanMetric

from fl_lightning.client.services import attach_services
from fl_lightning.client.side_passes import SidePasses
from fl_lightning.methods import FedAvg
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.toys import BatchNormNet


class Draws(pl.LightningModule):
    """Draws from each kind of generator, counts and logs."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.counted = MeanMetric()
        self.rng = np.random.default_rng(0)
        self.drawn = []

    def training_step(self, batch, batch_idx):
        drawn = [torch.rand(()).item(), random.random(), np.random.rand(), self.rng.random()]
        self.drawn.append(drawn)
        loss = self.line(batch).mean()
        self.counted.update(loss.detach())
        self.log("mine", loss)
        return {"loss": loss, "drawn": drawn}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_next_pass_draws_counts_and_logs_as_if_it_were_the_first():
    client = FedAvg(module=Draws())
    passes = SidePasses(client)
    batch = torch.ones(3, 2)
    logged = []
    services = {"log": lambda name, value, **_: logged.append((name, value.item()))}
    with attach_services(client.lightning_modules(), services):
        first = client.local_loss(batch, 0)
        outputs = client.outputs
        with passes.aside():
            aside = client.local_loss(batch + 1, 0)
        assert client.outputs is outputs
        client.local_loss(batch, 0)
    drawn = client.module.drawn
    assert drawn[1] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    assert logged == [("mine", first.item())] * 2
    assert aside != first
    assert client.module.counted.compute() == pytest.approx(first.item())


def test_a_pass_that_fails_leaves_nothing_either():
    client = FedAvg(module=Draws())
    state = torch.get_rng_state()

    batch = torch.ones(3, 5)  # of another width
    with pytest.raises(RuntimeError, match="shapes"), SidePasses(client).aside():
        client.local_loss(batch, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert "log" not in vars(client)


def test_a_loss_at_other_values_moves_what_it_was_given_alone():
    client = FedAvg(net=lambda c, s: BatchNormNet(c, s, dropout=0.0), num_classes=3, input_shape=(4,))
    passes = SidePasses(client)
    x = torch.randn(6, 4)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    before = {name: value.clone() for name, value in client.state_dict().items()}
    buffers = passes.buffers()
    other = {name: (w.detach() + 1).requires_grad_() for name, w in client.trained().items()}
    with passes.aside():
        loss = passes.loss_at({**other, **buffers}, (x, y), 0)
    loss.backward()
    assert all(value.grad is not None for value in other.values())
    assert all(w.grad is None for w in client.parameters())
    for name, value in client.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert buffers["net.body.1.num_batches_tracked"] == 1


def test_only_a_client_s_own_net_has_buffers():
    def nets(num_classes, input_shape):
        return HeterogeneousNets(num_classes, input_shape, nets=[BatchNormNet, Perceptron])

    client = FedAvg(net=nets, num_classes=3, input_shape=(4,))
    for client_id, has_buffers in ((0, True), (1, False)):
        client.context.client_id = client_id
        assert bool(SidePasses(client).buffers()) is has_buffers
