"""Half precision in the forward pass only: losses, gradients, steps and aggregates stay float32 or better."""

import copy

import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch.nn import functional as F

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.methods import FedAvg, FedED, FedNTD, FedProx
from tests.toys import BatchNormNet, equal, folded, sgd, toy_data, trainer, weights_of
from tests.user_modules import Plain

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def federate(client, precision="32-true", rounds=2, data=None, **settings):
    """16-mixed as on a GPU, with a gradient scaler for the CPU."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    loop = FederatedLoop(client, seed=3, **folded(settings))
    chosen = {"plugins": [plugin]} if precision == "16-mixed" else {"precision": precision}
    trainer(rounds, **chosen).fit(loop, datamodule=data or toy_data())
    return loop


def watched(method, **settings):
    """A client of the method that keeps the loss of every step, and the first step's gradients."""

    class Watched(method):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.detach())
            return loss

        def on_before_optimizer_step(self, optimizer):
            if len(self.losses) == 1:
                self.first = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])

    client = Watched(net=lambda c, s: BatchNormNet(c, s, dropout=0.0), optimizer=sgd(0.05), **settings)
    client.losses = []
    return client


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_and_aggregates_stay_float32(precision):
    seen = []

    class Watching(Aggregator):
        def add(self, update):
            seen.append({v.dtype for v in update.weights.values() if v.is_floating_point()})
            super().add(update)
            seen.append({v.dtype for v in self.partial.sums["weights"].flat.values()})

    client = watched(FedNTD)
    loop = federate(client, precision, aggregator=Watching())
    assert {loss.dtype for loss in client.losses} == {torch.float32}
    assert seen[::2] == [{torch.float32}] * 10
    assert seen[1::2] == [{torch.float64}] * 10
    assert {v.dtype for v in weights_of(loop).values() if v.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("method", [FedAvg, FedNTD, FedED, FedProx], ids=lambda method: method.__name__)
def test_fifty_local_steps_follow_float32(method, precision):
    """The loss falls as it does in float32 (an autocast region around all steps would keep stale weights)."""
    data = {"sizes": (20,), "batch_size": 20}
    full = watched(method)
    half = watched(method)
    federate(full, rounds=1, local_epochs=50, data=toy_data(**data))
    federate(half, precision, rounds=1, local_epochs=50, data=toy_data(**data))
    assert (half.first - full.first).norm() <= 1e-2 * full.first.norm()
    a = torch.stack(full.losses)
    b = torch.stack(half.losses)
    assert len(a) == 50
    assert a[-1] < 0.5 * a[0]
    torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("settings", [{}, {"server_optimizer": sgd(1.0, 0.9)}], ids=["mean", "FedAvgM"])
def test_16_mixed_does_not_depend_on_the_order_of_clients(settings):
    """Each client has a gradient scaler of its own; the server's gradient is not divided by any."""
    orders = ([[0, 1, 3]] * 2, [[3, 0, 1]] * 2)
    first, second = (federate(client(), "16-mixed", data=toy_data(schedule=s), **settings) for s in orders)
    assert equal(weights_of(first), weights_of(second))
    full = federate(client(), data=toy_data(schedule=orders[0]), **settings)
    assert distance(first, full) < 2e-2


def test_a_round_without_samples_moves_nothing_under_a_scaler():
    data = {"sizes": (7, 0), "schedule": [[0], [1], [0]]}
    settings = {"server_optimizer": sgd(0.5, 0.9)}
    one, two = (federate(client(), "16-mixed", rounds, toy_data(**data), **settings) for rounds in (1, 2))
    assert equal(weights_of(one), weights_of(two))
    assert federate(client(), "16-mixed", 3, toy_data(**data), **settings).round_metrics["train/ce"] > 0


def distance(loop, other):
    """Relative, of all weights."""
    a, b = (torch.cat([value.double().flatten() for value in weights_of(each).values()]) for each in (loop, other))
    return (a - b).norm() / b.norm()


def client():
    return FedNTD(net=BatchNormNet, optimizer=sgd())


def test_a_step_that_the_scaler_skips_is_no_step():
    """A gradient of about 3 times a scale of 65536 is beyond float16's range; the scale is halved until it fits."""
    steps = []

    class Steep(Plain):
        def training_step(self, batch, batch_idx):
            return (40 * self.net(batch[0]).logsumexp(1)).mean()

        def on_before_optimizer_step(self, optimizer):
            finite = all(p.grad.isfinite().all() for p in self.parameters())
            steps[-1].append(finite)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    class Counting(ServerModule):
        def broadcast(self, exchange, client_id):
            steps.append([])
            return super().broadcast(exchange, client_id)

        def add(self, update):
            assert update.num_steps == sum(steps[-1])

    federate(Steep(), "16-mixed", 1, server_module=Counting(), local_epochs=4)
    assert {step for found in steps for step in found} == {True, False}


def test_gradients_are_clipped_after_they_are_unscaled():
    clipped = federate(client(), "16-mixed", clip_norm=0.1)
    full = federate(client(), clip_norm=0.1)
    assert distance(clipped, full) < 2e-2


def test_an_optimizer_with_a_closure_refuses_the_scaler():
    class Newton(Plain):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match=r"LBFGS computes its gradient more than once a step.*=bf16-mixed"):
        federate(Newton(), "16-mixed")


class CastsItself(Plain):
    """Runs its net in a region of its own, whose cast weights torch keeps until the outermost region ends."""

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.net(batch[0])
        return F.cross_entropy(logits.float(), batch[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_that_casts_by_itself_casts_the_weights_of_every_step(precision):
    module = CastsItself()
    data = toy_data((20,), shuffle=False)
    alone = copy.deepcopy(module)
    trainer(1, precision=precision).fit(FederatedLoop(module, seed=1), datamodule=data)
    optimizer = alone.configure_optimizers()
    for i, batch in enumerate(data.view(0, 0).batches("train", 0, 5)):
        optimizer.zero_grad()
        alone.training_step(batch, i).backward()
        optimizer.step()
    assert equal(module.state_dict(), alone.state_dict())
