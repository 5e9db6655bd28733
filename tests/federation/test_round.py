"""A round that fails, and what leaves it."""

from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torchmetrics import MeanMetric

from fl_lightning import Aggregator, FederatedLoop, NonFiniteUpdateError
from fl_lightning.aggregation import KrumAggregator, MedianAggregator, ServerModule, UpdateTransform
from fl_lightning.functional.state import clone
from fl_lightning.methods import Ditto, FedAvg, FedEXPAggregator, FedNovaAggregator
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of


class MakesNaN(Aggregator):
    """In round 1 of finite updates."""

    def finish(self):
        new = super().finish()
        if self.server.round_idx == 1:
            new["net.head.bias"] = new["net.head.bias"] / 0.0
        return new


def client():
    return FedAvg(net=BatchNormNet, optimizer=sgd())


def test_a_rule_that_makes_nan_of_finite_updates_is_named_and_the_model_stays():
    loop = FederatedLoop(client(), MakesNaN(), seed=3)
    with pytest.raises(NonFiniteUpdateError, match=r"MakesNaN and ServerModule made NaN.*finite updates in round 1"):
        fit(None, 3, loop=loop)
    assert equal(weights_of(loop), weights_of(fit(client(), 1)))
    assert loop.round_metrics == {}


@pytest.mark.parametrize("broken", [False, True])
def test_under_skip_such_a_round_is_lost(broken):
    """With a client left out too: what is aggregated of the others is checked all the same."""
    data = toy_data()
    if broken:
        data.setup()
        data.split("train").x[8] = torch.nan  # of client 1
    loop = fit(client(), 2, data, aggregator=MakesNaN(), nonfinite="skip")
    assert equal(weights_of(loop), weights_of(fit(client(), 1, data, nonfinite="skip")))
    assert loop.round_metrics["train/skipped"] == 5
    said = {fault.client_id: fault.reason for fault in loop.skipped}
    assert "MakesNaN" in said[0]
    assert said[1].startswith("returned NaN") == broken


class LeavesAllOut(UpdateTransform):
    """In round 1, by a number on the device."""

    def on_server(self, update, broadcast):
        included = torch.tensor(int(broadcast.round_idx != 1))
        return replace(update, num_samples=included * update.num_samples, included=included > 0)


class Flagged(BatchNormNet):
    """With an entry that is not a number."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("flags", torch.tensor([True, False]))


class Divides(Aggregator):
    """A user's rule, to which a weight of 0 is NaN."""

    def finish(self):
        return self.moved(
            self.server.weights, {n: v / self.total_weight("weights") for n, v in self.summed("weights").items()}
        )


class AfterRounds(pl.Callback):
    """Keeps all entries, what was skipped, and whether the rule is finite, after each round."""

    def __init__(self):
        self.weights = []
        self.skipped = []
        self.finite = []

    def on_train_epoch_end(self, trainer, loop):
        self.weights.append(clone(loop.global_weights.live(loop.global_weights.entries)))
        self.skipped.append(loop.round_metrics.get("train/skipped", 0))
        self.finite.append(all(value.isfinite().all() for value in loop.aggregator.buffers()))


RULES = [Aggregator, Divides, MedianAggregator, KrumAggregator, FedEXPAggregator, FedNovaAggregator]


@pytest.mark.parametrize("aggregator", RULES)
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
@pytest.mark.parametrize("personal", [None, "*head*"])
def test_a_round_in_which_nobody_has_any_weight_moves_nothing(aggregator, nonfinite, personal):
    """Nor does the server's momentum, which has moved the weights in the round before."""
    settings = {
        "transforms": [LeavesAllOut()],
        "server_optimizer": partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        "nonfinite": nonfinite,
        "personal": personal,
    }
    net = BatchNormNet if aggregator is Divides else Flagged
    watch = AfterRounds()
    fit(FedAvg(net=net, optimizer=sgd()), 3, aggregator=aggregator(), callbacks=[watch], **settings)
    before, after, later = watch.weights
    assert equal(before, after)
    assert not equal(after, later)
    assert watch.skipped[1] == 0
    assert watch.finite[1]


def stop():
    next(iter(()))


class StopsRule(Aggregator):
    def finish(self):
        stop()


class StopsServer(ServerModule):
    def begin_round(self, cohort):
        stop()


class StopsTransform(UpdateTransform):
    def on_server(self, update, broadcast):
        stop()


class StopsCallback(pl.Callback):
    def on_client_end(self, *arguments):
        stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": StopsRule()},
        {"server_module": StopsServer()},
        {"transforms": [StopsTransform()]},
        {"callbacks": [StopsCallback()]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_stop_iteration_on_the_server_does_not_end_the_round_in_silence(settings):
    with pytest.raises(RuntimeError, match=r"StopIteration ended round 0|client 0 raised StopIteration in round 0"):
        fit(FedAvg(), 2, **settings)


class Raising(MeanMetric):
    """Raises when the values of round 1 are computed."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.add_state("last_round", torch.tensor(0), dist_reduce_fx="max")

    def update(self, value, round_idx):
        super().update(value)
        self.last_round = torch.tensor(round_idx)

    def compute(self):
        if self.error is not None and self.last_round == 1:
            raise self.error
        return super().compute()


class Measured(Ditto):
    """Keeps a model of its own, and logs a metric object that raises in round 1."""

    def __init__(self, error, **base):
        super().__init__(**base)
        self.metric = Raising(error)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach(), self.current_epoch)
        self.log("train/measured", self.metric)
        return loss


@pytest.mark.parametrize("error", [ValueError("planned"), StopIteration()])
def test_a_metric_object_that_raises_undoes_the_whole_round(error):
    """Weights, the clients' records and the server optimizer are as after round 0."""
    settings = {"server_optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9)}
    loop = FederatedLoop(Measured(error, net=BatchNormNet, optimizer=sgd()), seed=3, **settings)
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else ValueError):
        fit(None, 3, loop=loop)
    before = FederatedLoop(Measured(None, net=BatchNormNet, optimizer=sgd()), seed=3, **settings)
    fit(None, 1, loop=before)
    assert equal(weights_of(loop), weights_of(before))
    assert list(loop.store.clients) == list(before.store.clients)
    for client_id in before.store.clients:
        memory, personal = before.store.record(client_id)
        kept_memory, kept_personal = loop.store.record(client_id)
        torch.testing.assert_close(kept_memory, memory, rtol=0, atol=0)
        assert (personal is None) == (kept_personal is None)
    momentum, *_ = (state["momentum_buffer"] for state in loop.trainer.optimizers[0].state.values())
    expected, *_ = (state["momentum_buffer"] for state in before.trainer.optimizers[0].state.values())
    assert torch.equal(momentum, expected)
