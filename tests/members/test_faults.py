"""Faults of clients and rules: under `error` one sentence and an untouched model, under `skip` the others go on."""

import re
from dataclasses import replace
from functools import cache

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import Aggregator, FaultPolicy, FederatedLoop
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.members.faults import ClientError, FaultError
from fl_lightning.methods import FedAvg
from tests.federation.faulty import CLIENT, KINDS, ROUND, WEIGHT, Faulty, Weighs, faulty
from tests.toys import SIZES, BatchNormNet, equal, fit, folded, sgd, toy_data, weights_of

OTHERS = [client_id for client_id in range(len(SIZES)) if client_id != CLIENT]
EVERYONE = list(range(len(SIZES)))

SAYS = {
    "NaN": r"client 2 returned NaN or infinite values in round 1; ",
    "Inf": r"client 2 returned NaN or infinite values in round 1; ",
    "3e38": r"client 2 returned an update of norm 1.*e\+39 in round 1, above model.faults.max_update_norm=100.0; ",
    "shape": r"entry 'net.head.weight' .*shape \(3, 8\), got \(2, 8\).*client 2.*round 1",
    "key": r"entry 'net.head.weight' is missing.*client 2.*round 1",
    "type": r"entry 'net.head.weight' .*got list.*client 2.*round 1",
    "dtype": r"entry 'net.head.weight' .*float32.*got torch.float64.*client 2.*round 1",
    "n = 10^15": r"num_samples of an update must lie in \[0, 5\].*got 1000000000000000.*client 2.*round 1",
    "n = -5": r"num_samples of an update must lie in \[0, 5\].*got -5.*client 2.*round 1",
    "n = 2.5": r"num_samples of an update must be a whole number, got 2.5.*client 2.*round 1",
    "n = True": r"num_samples of an update must be a whole number, got True.*client 2.*round 1",
    "n = NaN": r"num_samples of an update must be a whole number, got nan.*client 2.*round 1",
    "n is None": r"num_samples of an update must be a whole number, got None.*client 2.*round 1",
    "negative weight": r"Weighs .*weight of client 2.*at least 0, got -1.0 in round 1",
    "exception": r"client 2 raised ZeroDivisionError in round 1: a bug of two lines \(.*faulty.py, line \d+\); ",
    "receive": r"client 2 raised ValueError in round 1: no disk \(.*faulty.py, line \d+\); ",
    "reply": r"Faulty.reply must return a dict.*got list.*client 2.*round 1",
    "StopIteration": r"client 2 raised StopIteration in round 1 \(.*faulty.py, line \d+\); ",
    "MemoryError": r"client 2 raised MemoryError in round 1 \(.*faulty.py, line \d+\); ",
    "time-out": r"model.faults.client_timeout=1.0 s.*client 2.*round 1",
    "adds": r"'net.extra.weight' came to be in it.*client 2.*round 1",
    "replaces": r"'net.head.weight' was replaced.*client 2.*round 1",
    "reshapes": r"'net.head.weight' .*\(4, 8\).*client 2.*round 1",
    "removes": r"'net.head.bias' is gone.*client 2.*round 1",
}


class Keeps(pl.Callback):
    """The skipped clients and rows of every round."""

    def __init__(self):
        self.skipped = []
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.skipped.append([fault.client_id for fault in loop.skipped])
        self.rows.append(dict(loop.round_metrics))


@cache
def faultless(rounds, *schedule):
    """Weights after rounds in which nothing fails, with all clients or with those of a schedule."""
    settings = {"schedule": [list(cohort) for cohort in schedule]} if schedule else {}
    return weights_of(fit(None, rounds, toy_data(**settings), loop=faulty("", "error")))


@pytest.mark.parametrize("how", KINDS)
def test_an_error_is_one_sentence_and_leaves_the_model_as_it_was(how):
    loop = faulty(how, "error")
    with pytest.raises((FaultError, ValueError, TypeError)) as caught:
        fit(None, 3, loop=loop)
    assert re.search(SAYS[how], str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert equal(weights_of(loop), faultless(1))
    assert loop.client.net.head.weight.requires_grad


@pytest.mark.parametrize("how", KINDS)
def test_a_client_that_is_skipped_is_named_and_the_others_are_as_without_it(how):
    watch = Keeps()
    loop = fit(None, 3, loop=faulty(how, "skip"), callbacks=[watch])
    lost = how in WEIGHT  # the rule is at fault, so the round is lost
    assert watch.skipped == [[], EVERYONE if lost else [CLIENT], []]
    assert [row["train/skipped"] for row in watch.rows] == [0, len(SIZES) if lost else 1, 0]
    if not lost:
        assert equal(weights_of(loop), faultless(3, tuple(EVERYONE), tuple(OTHERS), tuple(EVERYONE)))
    else:
        assert all(value.isfinite().all() for value in weights_of(loop).values())


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0), torch.tensor(-1)])
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_weight_that_is_none_costs_the_round(weight, nonfinite):
    loop = FederatedLoop(
        FedAvg(net=BatchNormNet, optimizer=sgd()), Weighs(weight), seed=3, faults=FaultPolicy(nonfinite=nonfinite)
    )
    if nonfinite == "error":
        with pytest.raises(FaultError, match=r"Weighs .*weight of client 2 .*in round 1"):
            fit(None, 2, loop=loop)
    else:
        fit(None, 2, loop=loop)
    assert equal(weights_of(loop), weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1)))


def test_a_server_optimizer_that_overflows_is_refused():
    def explodes(params):
        return torch.optim.SGD(params, lr=1e300)

    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    start = weights_of(fit(client, 0))
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), server_optimizer=explodes, seed=3)
    with pytest.raises(FaultError, match=r"SGD made NaN or infinite values .* in round 0"):
        fit(None, 1, loop=loop)
    assert equal(weights_of(loop), start)
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, server_optimizer=explodes, nonfinite="skip")
    assert equal(weights_of(loop), start)
    assert loop.round_metrics["train/skipped"] == len(SIZES)


class Another(SequentialEngine):
    """An engine from elsewhere, whose client 2 sends something else in round 1."""

    how = ""

    def run(self, exchange, jobs):
        for result in super().run(exchange, jobs):
            update = result.update
            late = (result.update.client_id, self.round_idx) == (CLIENT, ROUND)
            if late and self.how == "shape":
                update = replace(update, weights={name: value[None] for name, value in update.weights.items()})
            if late and self.how == "n":
                update = replace(update, num_samples=10**15)
            yield result._replace(update=update)

    def load_client(self, job):
        self.round_idx = job.broadcast.round_idx
        return super().load_client(job)


@pytest.mark.parametrize("how", ["shape", "n"])
def test_an_update_is_checked_also_where_there_are_no_transforms(how, monkeypatch):
    monkeypatch.setattr("fl_lightning.federation.run.SequentialEngine", type("Elsewhere", (Another,), {"how": how}))
    with pytest.raises(ValueError, match=r"of an update must (have shape|lie in).*client 2 in round 1"):
        fit(None, 3, loop=faulty("", "error"))
    loop = fit(None, 3, loop=faulty("", "skip"))
    assert equal(weights_of(loop), faultless(3, tuple(EVERYONE), tuple(OTHERS), tuple(EVERYONE)))


class MakesNaN(Aggregator):
    def finish(self):
        new = super().finish()
        return {name: value / 0 if value.is_floating_point() else value for name, value in new.items()}


class Doubles(Aggregator):
    def finish(self):
        new = super().finish()
        return {name: value * 2 if value.is_floating_point() else value for name, value in new.items()}


class Overshoots(FedAvg):
    """Sends finite weights, of which float32 holds no more than the mean."""

    def phases(self, exchange):
        for value in self.params().values():
            value.data.fill_(3e38)
        return ()


def test_finite_updates_whose_sum_overflows_do_not_become_the_model():
    loop = FederatedLoop(Overshoots(net=BatchNormNet, optimizer=sgd()), Doubles(), seed=3)
    with pytest.raises(FaultError, match=r"Doubles and ServerModule made NaN or infinite values .*round 0"):
        fit(None, 1, loop=loop)
    start = weights_of(loop)
    skips = FederatedLoop(
        Overshoots(net=BatchNormNet, optimizer=sgd()), Doubles(), seed=3, faults=FaultPolicy(nonfinite="skip")
    )
    assert equal(weights_of(fit(None, 1, loop=skips)), start)
    assert skips.round_metrics["train/skipped"] == len(SIZES)


@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_whose_every_client_is_skipped_stops(patience):
    loop = faulty("", "skip", aggregator=MakesNaN(), patience=patience)
    with pytest.raises(FaultError, match=rf"skipped for {patience} rounds? .*round {patience - 1}.*MakesNaN"):
        fit(None, 5, loop=loop)
    client = Faulty("receive", always=True, net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, faults=FaultPolicy(on_error="skip", patience=patience), seed=3)
    with pytest.raises(FaultError, match=rf"skipped for {patience} rounds?.*no disk"):
        fit(None, 5, loop=loop)


def test_fewer_clients_than_are_asked_for_leave_the_model_as_it_was():
    watch = Keeps()
    loop = fit(None, 2, loop=faulty("exception", "skip", min_clients=5), callbacks=[watch])
    assert watch.skipped == [[], EVERYONE]
    assert equal(weights_of(loop), weights_of(fit(None, 1, loop=faulty("", "error"))))
    assert "fewer than model.faults.min_clients=5" in loop.skipped[0].reason


class Remembers(Faulty):
    """Counts its rounds, and fails when it is done."""

    def reply(self, exchange, local):
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        if self.fails(local):
            raise ValueError("too late")
        return {}

    def is_personal(self, name, owner):
        return "head" in name


def test_what_a_skipped_client_keeps_is_that_of_its_last_round():
    client = Remembers(net=BatchNormNet, optimizer=sgd())
    loop = fit(None, 3, loop=FederatedLoop(client, faults=FaultPolicy(on_error="skip"), seed=3))
    assert [loop.store.memory(c)["rounds"] for c in EVERYONE] == [3, 3, 2, 3, 3]


class FailsAtEnd(pl.Callback):
    """The callback fails when the sums have the client already."""

    def on_client_end(self, trainer, loop, update):
        loop.log("ended", 1.0, reduce_fx="sum")
        if (update.client_id, trainer.current_epoch) == (CLIENT, ROUND):
            raise KeyError("missing")


def test_an_update_that_was_taken_in_already_is_taken_out_again():
    loop = fit(None, 2, loop=faulty("", "skip"), callbacks=[FailsAtEnd()])
    others = fit(None, 2, toy_data(schedule=[EVERYONE, OTHERS]), loop=faulty("", "error"))
    assert equal(weights_of(loop), weights_of(others))
    assert loop.round_metrics["train/ce"] == others.round_metrics["train/ce"]
    assert loop.round_metrics["ended"] == len(OTHERS)
    with pytest.raises(ClientError, match=r"client 2 raised KeyError in round 1: 'missing' \(.*test_faults.py, line"):
        fit(None, 2, loop=faulty("", "error"), callbacks=[FailsAtEnd()])


def test_freezing_is_no_fault_and_stays_with_the_client():
    loop = faulty("freezes", "error")
    fit(None, 3, loop=loop)
    assert all(parameter.requires_grad for parameter in loop.client.parameters())


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"on_error": "ignore"}, "on_error must be one of error, skip, got 'ignore'"),
        ({"max_update_norm": 0}, "max_update_norm must be above 0, got 0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"min_clients": 0}, "min_clients must be at least 1, got 0"),
        ({"min_clients": -1}, "min_clients must be at least 0, got -1"),
        ({"client_timeout": 0}, "client_timeout must be above 0, got 0"),
    ],
)
def test_settings_are_checked(setting, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        FederatedLoop(FedAvg(), **folded(setting))


class FailsAfterNaN(FedAvg):
    """Client 1 sends NaN, and client 2, after it, fails."""

    def training_step(self, batch, batch_idx):
        if self.context.client_id == 2:
            raise ZeroDivisionError
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.context.client_id == 1 else loss


def test_a_client_that_fails_does_not_hide_what_the_one_before_sent():
    client = FailsAfterNaN(net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 1, nonfinite="skip", on_error="skip")
    assert [fault.client_id for fault in loop.skipped] == [1, 2]
    assert all(value.isfinite().all() for value in weights_of(loop).values())
    with pytest.raises(FaultError, match="client 1 returned NaN"):
        fit(FailsAfterNaN(net=BatchNormNet, optimizer=sgd()), 1, on_error="skip")
