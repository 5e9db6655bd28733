"""Any rule goes with any method that sends weights up: SCAFFOLD with a median, FedCL with FedEXP."""

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.functional import state as S
from fl_lightning.methods import FedAvg, FedCL, FedEXPAggregator
from tests.hooks.toy import SCAFFOLD, Median, Updates
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

    whole, mean = run(callbacks=[Invariant()]), fit(SCAFFOLD(net=BatchNormNet, optimizer=sgd(0.05)), 4, local_epochs=2)
    assert not equal(whole.client.state_dict(), mean.client.state_dict())
    assert equal(weights_of(whole), weights_of(run(ckpt_path=tmp_path / "two.ckpt")))


def proxy_data(**settings):
    source = TensorSource(samples(11, seed=5), samples(2), num_classes=3)
    return toy_data((2, 3, 2, 3), extra_splits={"proxy": source}, **settings)


def test_fedcl_with_fedexp():
    """Ω goes down, the norm goes up, and the step is longer than the mean's."""
    watch = Updates()
    client = FedCL(strength=0.5, net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 3, proxy_data(), callbacks=[watch], aggregator=FedEXPAggregator(eps=1e-6), local_epochs=2)
    assert loop.aggregator.eta_g > 1
    assert loop.round_metrics["train/penalty"] > 0
    trainable = sum(value.numel() for value in client.params().values())
    row, plain = loop.round_metrics, fit(FedAvg(net=BatchNormNet), 1, proxy_data()).round_metrics
    assert row["comm/bytes_down"] == plain["comm/bytes_down"] + 4 * 4 * trainable
    assert row["comm/bytes_up"] == plain["comm/bytes_up"] + 4 * 4
    before, updates = watch.after[1], watch.rounds[2].values()
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

    noted, watch = Noted(), Updates()
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd(0.05))
    loop = FederatedLoop(client, Median(), server_module=Halves(), seed=3)
    fit(None, 2, loop=loop, callbacks=[noted, watch])
    for name in loop.server.trainable:
        stacked = torch.stack([u.weights[name] for u in watch.rounds[0].values()]).double()
        torch.testing.assert_close(noted.after[0][name], 0.5 * stacked.quantile(0.5, 0).float())
    assert equal(*noted.after)
