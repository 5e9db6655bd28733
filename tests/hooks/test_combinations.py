"""Any rule goes with any method that sends weights up; what cannot combine is refused at start with the reason."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import KrumAggregator, MedianAggregator
from fl_lightning.data import TensorSource
from fl_lightning.functional import state as S
from fl_lightning.methods import (
    SAM,
    SCAFFOLD,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedCL,
    FedCurv,
    FedDyn,
    FedED,
    FedEXPAggregator,
    FedKA,
    FedNovaAggregator,
    FedNTD,
    FedProx,
    KnFu,
)
from tests.hooks.toy import Median, Updates
from tests.methods.own_models import transfer_data
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_scaffold_with_a_median_keeps_the_invariant_of_the_one_and_the_rule_of_the_other(participation, tmp_path):
    """c = (1/N) Σ c_i, whatever the rule; the weights are the median of what the clients returned; resume is exact."""

    class Invariant(Updates):
        def on_train_batch_end(self, trainer, loop, *_):
            super().on_train_batch_end(trainer, loop)
            controls = [loop.store.memory(i)["control"] for i in sorted(loop.store.clients)]
            assert any(c.any() for c in loop.server_module.control.values())
            for name, c in loop.server_module.control.items():
                mean = sum(one[name].double() for one in controls) / 5
                torch.testing.assert_close(c, mean, rtol=0, atol=1e-5)  # c_i are float32
            rows = [u.weights for u in self.rounds[-1].values() if u.num_samples]
            for name in loop.server.trainable:
                stacked = torch.stack([row[name] for row in rows]).double()
                assert torch.equal(self.after[-1][name], stacked.quantile(0.5, 0).float())
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    def run(**more):
        client = SCAFFOLD(net=BatchNormNet, optimizer=sgd(0.05))
        data = toy_data((7, 12, 0, 9, 16), participation=participation)
        return fit(client, 4, data, aggregator=Median(), local_epochs=2, **more)

    whole = run(callbacks=[Invariant()])
    mean = fit(SCAFFOLD(net=BatchNormNet, optimizer=sgd(0.05)), 4, local_epochs=2)
    assert not equal(whole.client.state_dict(), mean.client.state_dict())
    assert equal(weights_of(whole), weights_of(run(ckpt_path=tmp_path / "two.ckpt")))


def proxy_data(**settings):
    source = TensorSource(samples(11, seed=5), samples(2), num_classes=3)
    return toy_data((2, 3, 2, 3), extra_splits={"proxy": source}, **settings)


def test_fedcl_with_fedexp():
    """Ω goes down, the norm is taken at the server, and the step is longer than the mean's."""
    watch = Updates()
    client = FedCL(strength=0.5, net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 3, proxy_data(), callbacks=[watch], aggregator=FedEXPAggregator(eps=1e-6), local_epochs=2)
    assert loop.aggregator.eta_g > 1
    assert loop.round_metrics["train/penalty"] > 0
    trainable = sum(value.numel() for value in client.params().values())
    row = loop.round_metrics
    plain = fit(FedAvg(net=BatchNormNet), 1, proxy_data()).round_metrics
    assert row["comm/bytes_down"] == plain["comm/bytes_down"] + 4 * 4 * trainable
    assert row["comm/bytes_up"] == plain["comm/bytes_up"]
    before = watch.after[1]
    updates = watch.rounds[2].values()
    n = sum(u.num_samples for u in updates)
    for name in loop.server.trainable:
        mean = sum(u.num_samples * u.weights[name].double() for u in updates) / n
        step = loop.aggregator.eta_g * (mean - before[name].double())
        torch.testing.assert_close(watch.after[2][name], (before[name] + step).float())


def test_what_the_server_module_makes_of_the_aggregate_is_the_model():
    """`finish` has the rule's aggregate before it; None leaves the weights, whatever the rule."""

    class Halves(SCAFFOLD.server_class):
        def finish(self, exchange, aggregate):
            super().finish(exchange, aggregate)
            if self.server.round_idx == 1:
                return None
            return self.moved(aggregate, S.scale({n: aggregate[n].double() for n in self.server.trainable}, 0.5))

    class Noted(pl.Callback):
        after = ()

        def on_train_batch_end(self, trainer, loop, *_):
            self.after = (*self.after, weights_of(loop.client))

    noted = Noted()
    watch = Updates()
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd(0.05))
    loop = FederatedLoop(client, Median(), server_module=Halves(), seed=3)
    fit(None, 2, loop=loop, callbacks=[noted, watch])
    for name in loop.server.trainable:
        stacked = torch.stack([u.weights[name] for u in watch.rounds[0].values()]).double()
        torch.testing.assert_close(noted.after[0][name], 0.5 * stacked.quantile(0.5, 0).float())
    assert equal(*noted.after)


# --- pairs of papers: each part does its own, and both together differ from either


def sam(params):
    return SAM(params, base=sgd(0.05), sam_rho=0.2)


PAIRS = {
    "FedED + FedEXP": (FedED, {"aggregator": partial(FedEXPAggregator, eps=1e-6)}),
    "FedED + SAM": (FedED, {"optimizer": sam}),
    "FedNTD + FedAvgM": (FedNTD, {"server_optimizer": FedAvgM}),
    "FedKA + FedNova": (FedKA, {"aggregator": FedNovaAggregator}),
    "FedProx + median": (partial(FedProx, mu=0.5), {"aggregator": MedianAggregator}),
    "SCAFFOLD + Krum": (SCAFFOLD, {"aggregator": KrumAggregator}),
}


def of_pair(kind, rounds=3, optimizer=None, **parts):
    """Clients of unequal work, one of them without data, in cohorts of six of eight."""
    client = kind(net=BatchNormNet, optimizer=optimizer or sgd(0.05))
    made = {name: part() if name == "aggregator" else part for name, part in parts.items()}
    sizes = (7, 12, 0, 9, 16, 5, 8, 6)
    data = toy_data(sizes, participation=0.8)
    ckpt_path = made.pop("ckpt_path", None)
    callbacks = made.pop("callbacks", None)
    epochs = [1 + i % 3 for i in range(len(sizes))]
    return fit(client, rounds, data, ckpt_path=ckpt_path, callbacks=callbacks, local_epochs=epochs, **made)


def pair(name):
    """Slow: a rule or an optimizer of another kind stands for it by default."""
    repeats = name in ("FedED + SAM", "FedKA + FedNova", "FedProx + median")
    return pytest.param(*PAIRS[name], id=name, marks=[pytest.mark.slow] * repeats)


@pytest.mark.parametrize(("kind", "parts"), [pair(name) for name in PAIRS])
def test_two_papers_together_are_neither_alone_and_resume_exactly(kind, parts, tmp_path):
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    both = of_pair(kind, callbacks=[Save()], **parts)
    assert all(value.isfinite().all() for value in weights_of(both).values())
    for alone in (of_pair(kind), of_pair(FedAvg, **parts)):
        assert not equal(both.client.state_dict(), alone.client.state_dict())
    assert equal(weights_of(both), weights_of(of_pair(kind, ckpt_path=tmp_path / "two.ckpt", **parts)))


def test_scaffold_with_krum_takes_one_client_s_weights_and_everyone_s_control():
    watch = Updates()
    loop = of_pair(SCAFFOLD, aggregator=KrumAggregator, callbacks=[watch])
    rows = [update.weights for update in watch.rounds[-1].values() if update.num_samples]
    assert any(all(torch.equal(row[n], watch.after[-1][n]) for n in loop.server.trainable) for row in rows)
    for name, c in loop.server_module.control.items():
        mean = sum(loop.store.memory(i)["control"][name].double() for i in sorted(loop.store.clients)) / 8
        torch.testing.assert_close(c, mean, rtol=0, atol=1e-5)


def test_fedka_with_fednova_divides_by_each_client_s_length():
    watch = Updates()
    loop = of_pair(FedKA, 1, aggregator=FedNovaAggregator, callbacks=[watch])
    start = of_pair(FedKA, 0).client.state_dict()
    updates = [update for update in watch.rounds[0].values() if update.num_steps]
    assert len({update.accumulated_lr for update in updates}) > 2
    n = sum(update.num_samples for update in updates)
    tau = sum(update.num_samples * update.accumulated_lr for update in updates) / n
    for name in loop.server.trainable:
        moved = sum(u.num_samples * (u.weights[name] - start[name]).double() / u.accumulated_lr for u in updates) / n
        torch.testing.assert_close(watch.after[0][name], (start[name] + tau * moved).float(), rtol=1e-5, atol=1e-6)


MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
IMPOSSIBLE = [
    (SCAFFOLD, {"optimizer": ADAM}, r"SCAFFOLD needs to know how far .* got Adam; set that optimizer"),
    (
        FedAvg,
        {"optimizer": ADAM, "aggregator": FedNovaAggregator()},
        r"FedNovaAggregator needs to .* got Adam; set",
    ),
    (FedAvg, {"optimizer": sam, "aggregator": FedNovaAggregator()}, r"FedNovaAggregator needs to know .* got SAM; set"),
    (FedDyn, {"server_optimizer": FedAvgM}, r"h is the mean of the clients' gradients, .* got FedAvgM; leave"),
    (SCAFFOLD, {"server_optimizer": FedAdam}, r"keeps the clients near the weights .* got FedAdam; set that, or"),
    (SCAFFOLD, {"server_optimizer": MOMENTUM}, r"without momentum and weight decay, got SGD; set that, or leave"),
    (FedCurv, {"server_optimizer": MOMENTUM}, r"the global weights must stay among these: .* got SGD; set that, or"),
    (KnFu, {"server_optimizer": FedAdam}, r"a server_optimizer needs trainable entries .* got none; leave it unset"),
    (KnFu, {"aggregator": FedNovaAggregator()}, r"FedNovaAggregator makes one set .* those of KnFu share none"),
    (
        FedAvg,
        {"aggregator": KrumAggregator(f=2)},
        r"KrumAggregator needs m ≥ 2f \+ 3 = 7 .*, got cohorts of 5",
    ),
]


@pytest.mark.parametrize(("kind", "parts", "words"), IMPOSSIBLE)
def test_what_cannot_combine_is_refused_before_any_client_trains(kind, parts, words):
    class Never(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            pytest.fail("a client was trained")

    parts = {"optimizer": sgd(0.05), **parts}
    client = kind(net=BatchNormNet, optimizer=parts.pop("optimizer"))
    with pytest.raises(ValueError, match=words):
        fit(client, 1, transfer_data(), callbacks=[Never()], **parts)
