"""What a client keeps and is asked: memory, deployed, round buffers, teachers, steps and accumulated lr."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedLoop
from fl_lightning.functional import state as S
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from tests.hooks.toy import Quadratic, Updates
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

# --- memory, deployed, ALMA


class Keeps(FedAvg):
    """Remembers its weights after training and deploys them; before that, the received ones."""

    def reply(self, exchange, local):
        if self.num_steps:
            self.memory["own"] = dict(self.net.state_dict())
            self.memory["times"] = [*self.memory.get("times", []), local.round_idx]
        return {}

    def deployed(self):
        own = self.memory.get("own", self.net.state_dict())
        self.net.load_state_dict(own)  # edits the shared module: the next client must not see it
        return self


@pytest.mark.parametrize("raises", [False, True])
def test_alma_is_the_mean_over_all_clients_of_what_they_deploy(raises):
    class Rows(pl.Callback):
        rows = ()

        def on_train_epoch_end(self, trainer, loop):
            self.rows = (*self.rows, dict(loop.round_metrics))

    class Fails(Keeps):
        def deployed(self):
            super().deployed()
            raise ZeroDivisionError

    rows = Rows()
    data = toy_data((7, 12, 0, 9), schedule=[[0, 1], [1, 2], [0], [0, 1]])
    loop = FederatedLoop(
        (Fails if raises else Keeps)(net=BatchNormNet, optimizer=sgd()), evaluate_clients_every=2, seed=3
    )
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2 if raises else 3, data)
    if raises:
        with pytest.raises(ZeroDivisionError):
            fit(None, 3, data, loop=loop)
        assert equal(weights_of(loop), weights_of(plain))  # the round was complete
        return
    fit(None, 3, data, loop=loop, callbacks=[rows])
    assert equal(weights_of(loop), weights_of(plain))
    assert loop.client.training
    assert ["local/alma" in row for row in rows.rows] == [False, True, False]
    assert [loop.store.memory(c).get("times") for c in range(4)] == [[0, 2], [0, 1], None, None]
    two = FederatedLoop(Keeps(net=BatchNormNet, optimizer=sgd()), seed=3)
    fit(None, 2, data, loop=two)
    accuracies = []
    for client_id in range(4):
        net = BatchNormNet(3, (4,)).eval()
        net.load_state_dict(two.store.memory(client_id).get("own", two.client.net.state_dict()))
        x, y = data.view(client_id, 0).all("test")
        accuracies.append((net(x).argmax(1) == y).double().mean())
    assert rows.rows[1]["local/alma"] == pytest.approx(torch.stack(accuracies).mean().item())


def test_memory_holds_what_a_checkpoint_can_and_outlives_a_failed_round_unchanged():
    class Counts(FedAvg):
        def reply(self, exchange, local):
            self.memory.setdefault("times", torch.zeros(()))
            self.memory["times"] += 1  # in place, on purpose
            return {}

    class Stop(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            if trainer.current_epoch == 2 and update.client_id == 3:
                raise ZeroDivisionError

    loop = FederatedLoop(Counts(), seed=0)
    with pytest.raises(ClientError, match="raised ZeroDivisionError"):
        fit(None, 3, loop=loop, callbacks=[Stop()])
    assert [loop.store.memory(c)["times"].item() for c in range(5)] == [2] * 5

    class Wrong(FedAvg):
        def reply(self, exchange, local):
            self.memory["net"] = {"it": [self.net]}
            return {}

    with pytest.raises(TypeError, match=r"memory of client 0\['net'\]\['it'\] must consist of tensors.*Perceptron"):
        fit(Wrong(), 1)


# --- round buffers, received, teacher


def test_round_buffers_are_the_clients_own_and_no_attributes():
    class Buffers(FedAvg):
        def receive(self, broadcast, local):
            assert self.round == {}
            self.round_buffer("mine", torch.tensor(float(local.client_id)))
            self.round_buffer("state", {"w": torch.ones(2)})

        def training_step(self, batch, batch_idx):
            assert self.round["mine"] == self.context.client_id
            return super().training_step(batch, batch_idx) + 0 * self.round["state"]["w"].sum()

    loop = fit(Buffers(), 2)
    assert not any("mine" in name or name.endswith("state.w") for name in loop.state_dict())
    assert not hasattr(loop.client, "mine")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_teacher_is_frozen_and_shared(mode):
    """No gradient, no BatchNorm update, absent from state dict, parameters and optimizer; one copy for all clients."""

    class Teaches(FedNTD):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            self.first = self.teacher_state()
            assert all(torch.equal(self.net.state_dict()[name], value) for name, value in self.first.items())
            assert self.teacher("global").batch_statistics == (mode == "train")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            teacher = self.teacher("global")
            out = teacher(batch[0])
            assert not out.requires_grad
            assert not out.is_inference()
            self.loads.add((id(teacher.net), self.context.weights_token))
            return loss

        def reply(self, exchange, local):
            assert equal(self.first, self.teacher_state())
            assert all(p.grad is None and not p.requires_grad for p in self.teacher("global").net.parameters())
            optimizer = self.optimizers(use_pl_optimizer=False)
            assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in self.net.parameters()}
            return {}

        def teacher_state(self):
            state = S.clone(self.teacher("global").net.state_dict())
            return {n: v for n, v in state.items() if mode == "eval" or not n.endswith("num_batches_tracked")}

    client = Teaches(net=BatchNormNet, optimizer=sgd(), teacher_mode=mode)
    client.loads = set()
    loop = fit(client, 3)
    assert len({net for net, _ in client.loads}) == 1
    assert len({key for _, key in client.loads}) == 3  # loaded once a round, not once a client
    assert sorted(loop.client.state_dict()) == sorted(f"net.{name}" for name in BatchNormNet(3, (4,)).state_dict())
    assert not any("teacher" in name for name, _ in loop.named_modules())


def test_the_teacher_of_another_fit_is_not_the_last_one():
    """Round 0 of a second fit has the key of round 0 of the first, and other weights."""
    loop = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=3)
    fit(None, 1, loop=loop)
    again = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=3)
    again.client.build(3, (4,))
    again.client.load_state_dict(loop.client.state_dict())
    fit(None, 1, loop=loop)
    fit(None, 1, loop=again)
    assert equal(weights_of(loop), weights_of(again))


def test_a_teacher_needs_a_net():
    class Teaches(FedAvg):
        def receive(self, broadcast, local):
            self.load_teacher("global")

    with pytest.raises(ValueError, match=r"load_teacher\('global'\) needs a client built with net="):
        fit(Teaches(module=Quadratic()), 1)


# --- steps and accumulated lr


def closed_form(K, lr, rho):
    return lr * K if rho == 0 else lr * (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_exposure_is_how_far_a_unit_gradient_carries(rho, mu, nesterov):
    """E of baselines.md §1: by the closed form, and by a real optimizer on one scalar with gradient 1 − μ·E."""
    if nesterov and not rho:
        pytest.skip("Nesterov needs momentum")
    watch = Updates()
    lr = 0.1
    decay = 0.5
    optimizer = sgd(lr, rho, nesterov=nesterov, weight_decay=0.1)
    client = FedProx(mu=mu, optimizer=optimizer) if mu else FedAvg(optimizer=optimizer)
    fit(client, 2, toy_data((7, 0, 20)), callbacks=[watch], local_epochs=2, lr_decay=decay)
    for r, updates in enumerate(watch.rounds):
        assert updates[1].num_steps == updates[1].accumulated_lr == 0
        for client_id, steps in ((0, 4), (2, 8)):
            scalar = nn.Parameter(torch.zeros((), dtype=torch.float64))
            walk = torch.optim.SGD([scalar], lr=lr * decay**r, momentum=rho, nesterov=nesterov)
            for _ in range(steps):
                scalar.grad = -(1 - mu * scalar.detach())  # it walks up by E where the gradient points down
                walk.step()
            update = updates[client_id]
            assert update.num_steps == steps
            assert update.accumulated_lr == pytest.approx(scalar.item(), rel=1e-12)
            if not mu and not nesterov:
                assert update.accumulated_lr == pytest.approx(closed_form(steps, lr * decay**r, rho), rel=1e-12)
            if mu and not rho:
                assert update.accumulated_lr == pytest.approx((1 - (1 - lr * decay**r * mu) ** steps) / mu, rel=1e-12)


def test_exposure_follows_a_schedule_and_is_nan_where_it_is_not_defined():
    class Scheduled(FedAvg):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class TwoRates(FedAvg):
        def configure_optimizers(self):
            head = self.net.head.parameters()
            body = self.net.body.parameters()
            return torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": body, "lr": 0.2}])

    watch = Updates()
    data = toy_data((12,))
    fit(Scheduled(), 1, data, callbacks=[watch])
    assert watch.rounds[0][0].accumulated_lr == pytest.approx(0.1 + 0.05 + 0.025)
    for client in (TwoRates(), FedAvg(optimizer=partial(torch.optim.Adam, lr=0.01))):
        fit(client, 1, data, callbacks=[watch])
        update = watch.rounds[-1][0]
        assert update.num_steps == 3
        assert update.accumulated_lr != update.accumulated_lr
