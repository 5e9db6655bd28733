"""Rules and server sides with state, rules that gather, and what does not fit together."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg, FedNTD
from tests.hooks.toy import SCAFFOLD, Linear, Median, Quadratic, Updates
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of

# --- parts with state, and rules that gather


def scaffold_loop():
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd())
    rule = Aggregator(weighting="uniform")
    return FederatedLoop(client, rule, local_epochs=2, lr_decay=0.9, seed=3)


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_a_server_module_with_state_keeps_its_invariant_and_resumes(participation, tmp_path):
    """SCAFFOLD: c = (1/N) Σ c_i over all clients, in every round; c and c_i are in the checkpoint."""

    class Invariant(pl.Callback):
        rounds = 0

        def on_train_batch_end(self, trainer, loop, *_):
            self.rounds += 1
            for name, c in loop.server_module.control.items():
                kept = [loop.store.memory(i)["control"][name] for i in sorted(loop.store.clients)]
                torch.testing.assert_close(c, sum(v.double() for v in kept) / loop.server.num_clients)
            assert any(c.any() for c in loop.server_module.control.values())
            if self.rounds == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    sizes = (7, 12, 0, 9, 16)
    whole = scaffold_loop()
    check = Invariant()
    fit(None, 4, toy_data(sizes, participation=participation), loop=whole, callbacks=[check])
    assert check.rounds == 4
    assert any("control" in name for name in whole.state_dict())
    assert 2 not in whole.store.clients  # without data it keeps nothing
    resumed = scaffold_loop()
    fit(None, 4, toy_data(sizes, participation=participation), loop=resumed, ckpt_path=tmp_path / "two.ckpt")
    assert equal(weights_of(whole), weights_of(resumed))
    for client_id in whole.store.clients:
        assert equal(whole.store.memory(client_id)["control"], resumed.store.memory(client_id)["control"])


def test_scaffold_bytes_and_the_first_control_variate_is_the_gradient():
    """After one step c_i = ∇f_i(x): line 12 with c = c_i = 0; W + θ go either way."""
    data = toy_data((6,), batch_size="full", dtype=torch.float64)
    loop = fit(SCAFFOLD(net=Linear, optimizer=sgd(0.3, 0.9)), 0, data, precision="64-true", seed=8)
    start = copy.deepcopy(loop.client.net).double()
    loop = fit(SCAFFOLD(net=Linear, optimizer=sgd(0.3, 0.9)), 1, data, precision="64-true", seed=8)
    F.cross_entropy(start(data.split("train").x), data.split("train").y).backward()
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(loop.store.memory(0)["control"][f"net.{name}"], parameter.grad)
    assert loop.round_metrics["comm/bytes_down"] == loop.round_metrics["comm/bytes_up"] == 8 * 2 * 15


def test_a_rule_that_gathers_has_every_row_and_buffers_take_the_mean():
    watch = Updates()
    data = toy_data((7, 12, 0, 9, 16), schedule=[[0, 1, 2, 3, 4], [1, 3]])
    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data, callbacks=[watch], aggregator=Median())
    for updates, after in zip(watch.rounds, watch.after, strict=True):
        used = [u for u in updates.values() if u.num_samples]
        mean = weighted_mean([u.weights for u in used], [u.num_samples for u in used])
        for name, value in after.items():
            if name not in {f"net.{n}" for n, _ in BatchNormNet(3, (4,)).named_parameters()}:
                assert torch.equal(value, mean[name])
                continue
            rows = torch.stack([u.weights[name].double() for u in used])
            low, high = (rows.sort(0).values[k] for k in ((len(rows) - 1) // 2, len(rows) // 2))
            torch.testing.assert_close(value, ((low + high) / 2).to(value.dtype))


class LastTwo(Aggregator):
    """Evaluates the mean of the last two models (FedEXP), which the clients never see."""

    def setup(self):
        self.before = self.server_state(self.server.trainable)
        self.now = self.server_state(self.server.trainable)

    def finish(self):
        new = super().finish()
        for name, value in self.now.items():
            self.before[name].copy_(value)
            value.copy_(new[name])
        return new

    def evaluation_weights(self, weights):
        means = {name: (self.before[name] + self.now[name]).div(2).to(weights[name].dtype) for name in self.now}
        return {**weights, **means}


def test_evaluation_weights_are_evaluated_and_not_fed_back(tmp_path):
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    watch = Updates()
    loop = fit(client, 3, callbacks=[watch], aggregator=LastTwo())
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3)
    assert equal(loop.client.state_dict(), plain.client.state_dict())
    net = BatchNormNet(3, (4,)).eval()
    last = watch.after[2]
    before = watch.after[1]
    trainable = set(client.params())
    mean = {n: (v.double() + before[n].double()).div(2).to(v.dtype) if n in trainable else v for n, v in last.items()}
    net.load_state_dict({name.removeprefix("net."): value for name, value in mean.items()})
    x, y = samples(30, seed=1)
    assert loop.round_metrics["global/loss"] == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-6)
    assert loop.round_metrics["global/loss"] != pytest.approx(plain.round_metrics["global/loss"], rel=1e-6)
    loop.trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = FederatedLoop(FedAvg(net=BatchNormNet), aggregator=LastTwo(), seed=1)
    (tested,) = trainer(0).test(other, datamodule=toy_data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert tested["test/loss"] == pytest.approx(loop.round_metrics["global/loss"], rel=1e-6)
    assert equal(other.client.state_dict(), loop.client.state_dict())


def test_an_evaluation_that_is_broken_off_does_not_become_the_model():
    class Stop(pl.Callback):
        def on_validation_batch_end(self, trainer, *_):
            if trainer.current_epoch == 1:
                raise ZeroDivisionError

    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), aggregator=LastTwo(), seed=3)
    with pytest.raises(ZeroDivisionError):
        fit(None, 3, loop=loop, callbacks=[Stop()])
    two = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, aggregator=LastTwo())
    assert equal(dict(loop.state_dict()), weights_of(two))
    loop.train()  # Lightning, too, leaves a module in eval mode there, and warns when it is fitted
    fit(None, 1, loop=loop)
    fit(None, 1, loop=two)
    assert equal(weights_of(loop), weights_of(two))


# --- what does not fit is refused


class NeedsProxy(FedAvg):
    needs = frozenset({"proxy"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FederatedLoop(FedNTD(module=Quadratic())), r"FedNTD needs the logits.*module=Quadratic.*give it net="),
        (
            lambda: FederatedLoop(SCAFFOLD(), server_module=ServerModule()),
            "SCAFFOLD needs a SCAFFOLDServer, got ServerModule",
        ),
        (lambda: fit(NeedsProxy(), 1), "NeedsProxy needs the split 'proxy'.*no split 'proxy'"),
    ],
)
def test_what_a_method_needs_and_does_not_get_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
