"""What a method reads of its client: shared trainable weights, teachers, own passes over data."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.aggregation import ServerModule
from fl_lightning.data import TensorSource
from fl_lightning.functional import state as S
from fl_lightning.functional.losses import proximal
from fl_lightning.methods import SCAFFOLD, FedALA, FedAvg, FedCL, FedCurv, FedFOMO, FedProx
from fl_lightning.types import Broadcast
from tests.hooks.toy import Updates
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of
from tests.user_modules import Classifier

HEAD = ["net.head.*"]


def data(**settings):
    """The toy clients, and a proxy set of the server's own."""
    return toy_data(extra_splits={"proxy": TensorSource(samples(11, seed=5), samples(2), num_classes=3)}, **settings)


# --- a personal head is in neither `params` nor `received`


@pytest.mark.parametrize("how", ["pattern", "method"])
def test_params_and_received_are_the_shared_trainable_weights(how):
    class Looks(FedAvg):
        def is_personal(self, name, owner):
            return how == "method" and ".head." in name

        def training_step(self, batch, batch_idx):
            shared = {name for name, _ in self.named_parameters() if ".head." not in name}
            assert self.params().keys() == self.received.keys() == shared
            assert self.trained().keys() == dict(self.named_parameters()).keys()
            if not self.num_steps:
                assert equal(S.clone(self.params()), self.received)
            return super().training_step(batch, batch_idx)

    loop = fit(Looks(net=BatchNormNet, optimizer=sgd()), 2, personal=HEAD if how == "pattern" else None)
    assert set(loop.server.trainable) == set(loop.client.params())


class PullsBody(FedProx):
    """The law that FedProx must keep: only what is shared is pulled to what was received."""

    def training_step(self, batch, batch_idx):
        body = {n: p for n, p in self.named_parameters() if ".head." not in n}
        return self.local_loss(batch, batch_idx) + self.mu * proximal(body, {n: self.received[n] for n in body})


def test_fedprox_does_not_pull_a_personal_head():
    runs = [fit(k(mu=5.0, net=BatchNormNet, optimizer=sgd()), 3, personal=HEAD) for k in (FedProx, PullsBody)]
    assert equal(*map(weights_of, runs))
    heads = [[loop.store.personal(c) for c in range(5)] for loop in runs]
    assert all(map(equal, *heads))


@pytest.mark.parametrize("method", [FedProx, FedCL])
def test_a_huge_pull_holds_the_body_and_leaves_a_personal_head_free(method):
    """The body stays near what was received; a head moves about as far as without a pull."""
    name = "mu" if method is FedProx else "strength"
    moved = {}
    for coefficient in (1e-12, 100.0):
        watch = Updates()
        client = method(net=BatchNormNet, optimizer=sgd(1e-3, 0.0), **{name: coefficient})
        loop = fit(client, 1, data(), callbacks=[watch], personal=HEAD, local_epochs=20)
        start = fit(FedAvg(net=BatchNormNet), 0, personal=HEAD)
        body = S.sub({n: watch.rounds[0][4].weights[n] for n in loop.server.trainable}, start.client.state_dict())
        head = S.sub(loop.store.personal(4), start.initial_personal)
        moved[coefficient] = [S.inner(part, part).sqrt().item() for part in (body, head)]
    (free_body, free_head), (held_body, held_head) = moved.values()
    assert held_body < 0.6 * free_body
    assert held_head == pytest.approx(free_head, rel=0.2)


@pytest.mark.parametrize("personal", [["*"], ["*weight", "*bias"]])
def test_where_no_parameter_is_shared_nothing_is_pulled(personal):
    """Only BatchNorm's statistics are, or nothing at all: then it is FedAvg with as much of its own."""
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data(), personal=personal)
    for client in (
        FedProx(mu=5.0, net=BatchNormNet, optimizer=sgd()),
        FedCL(strength=5.0, interval=2, when_missing="local", net=BatchNormNet, optimizer=sgd()),
    ):
        loop = fit(
            client,
            2,
            data(),
            personal=personal,
        )
        assert all(equal(loop.store.personal(c), plain.store.personal(c)) for c in range(5))


# --- what a server side sends


class Sends(ServerModule):
    def setup(self):
        self.kept = self.server_state(self.server.trainable)
        self.sizes = [self.server.size(client_id) for client_id in range(self.server.num_clients)]

    def broadcast(self, exchange, client_id):
        assert all(value.dtype == torch.float64 for value in self.kept.values())
        return self.sends(exchange, kept=self.kept, size=self.server.size(client_id))


class Reads(FedAvg):
    server_class = Sends

    def receive(self, broadcast, local):
        assert broadcast.extras["size"] == local.size()
        assert broadcast.extras["kept"].keys() == self.received.keys()
        self.round_buffer("kept", broadcast.extras["kept"])
        self.types = {value.dtype for value in (*broadcast.extras["kept"].values(), *self.round["kept"].values())}

    def training_step(self, batch, batch_idx):
        loss = self.local_loss(batch, batch_idx) + S.inner(self.round["kept"], self.params())
        self.losses.add(loss.dtype)
        return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_server_state_is_sent_in_the_weights_own_type(dtype):
    """So a float32 client's loss stays float32; the server keeps float64, and knows the clients' sizes."""
    client = Reads(net=BatchNormNet, optimizer=sgd())
    client.losses = set()
    precision = "64-true" if dtype == torch.float64 else "32-true"
    loop = fit(client, 1, toy_data((7, 0, 12), dtype=dtype), precision=precision)
    assert client.types == client.losses == {dtype}
    assert loop.server_module.sizes == [7, 0, 12]


# --- uploads, teachers of given weights, own passes


class Half(ServerModule):
    """Sends no weights and asks for them, or the other way round."""

    def __init__(self, down, up):
        super().__init__()
        self.down = down
        self.up = up

    def broadcast(self, exchange, client_id):
        weights = self.server.weights if self.down else None
        return Broadcast(self.server.round_idx, exchange, weights, uploads=self.up)


def test_what_goes_down_and_what_comes_back_are_apart():
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2)
    begun = weights_of(fit(FedAvg(net=BatchNormNet), 0))
    moved = plain.round_metrics["comm/bytes_up"]
    for down in (True, False):
        for up in (True, False):
            loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, server_module=Half(down, up))
            assert equal(weights_of(loop), weights_of(plain) if up else begun)
            row = loop.round_metrics
            assert (row["comm/bytes_down"], row["comm/bytes_up"]) == (moved * down, moved * up)


def test_a_teacher_is_what_was_received_wherever_the_client_begins():
    """One copy serves all clients, so that one which moves its starting point first must not show in it."""

    class Moves(FedAvg):
        def receive(self, broadcast, local):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(1.0 + local.client_id)
            self.load_teacher("global")
            teacher = {f"net.{name}": value for name, value in self.teacher("global").net.state_dict().items()}
            assert equal(teacher, dict(broadcast.weights))

    fit(Moves(net=BatchNormNet, optimizer=sgd()), 2)


def test_a_teacher_of_given_weights_is_another_one():
    class Teaches(FedAvg):
        def receive(self, broadcast, local):
            zeros = S.zeros_like(broadcast.weights)
            self.load_teacher("global")
            self.load_teacher("zero", state=zeros)
            assert equal(self.teacher("zero").net.state_dict(), S.zeros_like(self.net.state_dict()))
            assert equal(self.teacher("global").net.state_dict(), S.clone(self.net.state_dict()))

    fit(Teaches(net=BatchNormNet, optimizer=sgd()), 2)
    with pytest.raises(ValueError, match=r"teacher\('other'\) needs load_teacher\('other'\) in receive"):
        Teaches(net=BatchNormNet, num_classes=3, input_shape=(4,)).teacher("other")


class Shifts(FedAvg):
    """A user's hook that changes every batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]


def test_own_passes_see_the_batches_of_training_in_eval_mode_and_log_nothing():
    class Looks(Shifts):
        def receive(self, broadcast, local):
            modes = [module.training for module in self.modules()]

            def look(batch):
                assert not any(module.training for module in self.modules())
                self.log("never", batch[0].sum())
                return batch

            seen = self.over(local, look, batch_size=4)
            x = local.all()[0] if local.size() else torch.empty(0, 4)
            assert torch.equal(torch.cat([batch[0] for batch in seen] or [x]), x + 1 if len(x) else x)
            assert [module.training for module in self.modules()] == modes

    assert "never" not in fit(Looks(net=BatchNormNet), 1, toy_data((7, 0))).round_metrics


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_pass_gives_features_in_eval_mode_without_gradients_and_the_labels(precision):
    seen = []

    class Looks(Shifts):
        def receive(self, broadcast, local):
            rows = []
            self.features_over(local, lambda features, labels: rows.append((features, labels)))
            assert len(rows) == -(-local.size() // 5)
            for features, labels in rows:
                assert features.dtype == torch.float32
                assert not features.requires_grad
                assert len(features) == len(labels)
            if rows and precision == "32-true":
                x, y = local.all()
                with self.evaluation_mode():
                    torch.testing.assert_close(torch.cat([f for f, _ in rows]), self.net.features(x + 1).detach())
                assert torch.equal(torch.cat([labels for _, labels in rows]), y)
            seen.append(len(rows))

    fit(Looks(net=BatchNormNet), 1, toy_data((7, 0)), precision=precision)
    assert seen == [2, 0]


def test_a_loss_at_other_weights_is_differentiable_in_them():
    client = FedAvg(net=BatchNormNet, num_classes=3, input_shape=(4,))
    batch = samples(6)
    params = {name: value.detach().requires_grad_() for name, value in client.params().items()}
    with client.evaluation_mode():
        gradients = torch.autograd.grad(client.loss_at(params, batch), list(params.values()))
        client.local_loss(batch, 0).backward()
    for gradient, parameter in zip(gradients, client.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class Measured(Classifier):
    """Its metric object is updated in training_step, as in many users' modules."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", [FedALA, FedCL, FedCurv, FedFOMO, partial(SCAFFOLD, option="I")])
def test_own_passes_count_in_no_metric_object(kind):
    """Neither do they break it: under torch.func they would leave it dead tensors."""

    class Counted(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            seen.append(int(sum(getattr(loop.client.module.train_acc, n).sum() for n in ("tp", "fn"))))

    seen = []
    fit(kind(module=Measured()), 2, data(sizes=(7, 9)), callbacks=[Counted()])
    assert seen == ([6, 8] if kind is FedFOMO else [7, 9]) * 2  # FedFOMO holds a sample of each back
