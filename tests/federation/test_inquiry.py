"""An inquiry: what a server module asks of clients after their own exchanges, around any method."""

import csv
import itertools
from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import QSGD, Inquiry, MedianAggregator, ServerModule
from fl_lightning.attacks import label_flip
from fl_lightning.callbacks import RoundProgressBar
from fl_lightning.federation.configured import flat
from fl_lightning.methods import (
    MOON,
    DPFedAvg,
    FedAvg,
    FedBN,
    FedEXPAggregator,
    FedNovaAggregator,
    FedPAC,
    FedProx,
    Local,
    dp_sgd,
    local_dp,
)
from fl_lightning.monitors import ClientTable, DriftMonitor, Monitor
from fl_lightning.nets import Perceptron
from tests.toys import SIZES, BatchNormNet, equal, fit, folded, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))


class Describe(Inquiry):
    """Sends the number and classes of a client's samples, and what the module in which it lies has."""

    exchange = "ask"
    sends = frozenset({"statistics", "label counts"})
    reads = frozenset({"batches"})

    def __init__(self):
        self.entries = []
        self.memories = []

    def answer(self, client, broadcast, local):
        assert client.context.client_id == local.client_id
        assert broadcast.exchange == "ask"
        self.entries.append((local.round_idx, local.client_id, {n: v.clone() for n, v in client.state_dict().items()}))
        self.memories.append(sorted(client.memory))
        counts = sum(
            (torch.bincount(y, minlength=3) for y in client.over(local, lambda batch: batch[1])), torch.zeros(3)
        )
        return {"counts": counts, "drawn": torch.rand(1)}


class Asks(ServerModule):
    """Asks in every round, or in some, and keeps what came."""

    def __init__(self, rounds=None):
        super().__init__()
        self.inquiry = Describe()
        self.rounds = rounds
        self.order = []
        self.means = {}
        self.answers = {}
        self.made = {}

    def inquires(self, round_idx):
        return self.rounds is None or round_idx in self.rounds

    def begin_round(self, cohort):
        self.answers[self.server.round_idx] = {}

    def broadcast(self, exchange, client_id):
        return replace(self.sends(exchange), uploads=exchange != "ask")

    def add(self, update):
        if "counts" in update.extras:
            assert update.weights is None
            assert update.num_steps == 0
            self.answers[self.server.round_idx][update.client_id] = dict(update.extras)
            self.sum("counts", {"counts": update.extras["counts"]}, 1.0 * update.included)

    def finish(self, exchange, aggregate):
        self.order.append((self.server.round_idx, exchange))
        if exchange == "ask":
            assert aggregate is None
            self.means[self.server.round_idx] = self.server.weights
            self.made[self.server.round_idx] = self.summed("counts")
        return aggregate


def ask(client, rounds=2, data=None, asked=None, rule=None, callbacks=None, **settings):
    loop = FederatedLoop(client, rule, server_module=Asks(asked), seed=3, **folded(settings))
    return fit(None, rounds, data, loop=loop, callbacks=callbacks)


def client(kind=FedAvg, net=BatchNormNet, **settings):
    return kind(net=net, optimizer=sgd(0.05), **settings)


@pytest.mark.parametrize(
    "made",
    [
        client,
        partial(client, FedProx, mu=0.1),
        partial(client, MOON),
        partial(client, FedBN),
        partial(client, FedProx, mu=0.0),  # is FedAvg's loop, which calls no hook of the method
    ],
    ids=["FedAvg", "FedProx", "MOON", "FedBN", "equivalent"],
)
def test_clients_are_asked_after_their_training_with_the_new_weights_and_training_is_the_same(made):
    plain = fit(made(), 3)
    loop = ask(made(), 3)
    side = loop.server_module
    kept = {name: value for name, value in weights_of(loop).items() if name in weights_of(plain)}
    assert equal(kept, weights_of(plain))
    assert all(loop.store.record(i)[0].keys() == plain.store.record(i)[0].keys() for i in plain.store.clients)
    assert side.order == list(itertools.product(range(3), ("train", "ask")))
    for r, client_id, entries in side.inquiry.entries:
        shared = side.means[r]
        assert all(torch.equal(entries[name], value) for name, value in shared.items())
        assert side.answers[r][client_id]["counts"].sum() == SIZES[client_id]
    last = loop.client.state_dict()
    assert all(torch.equal(last[name], value) for name, value in side.means[2].items())


def test_each_client_has_its_own_entries_and_memory_when_it_is_asked():
    loop = ask(client(FedBN), 2)
    last = {client_id: entries for r, client_id, entries in loop.server_module.inquiry.entries if r == 1}
    for client_id, entries in last.items():
        kept = loop.store.record(client_id)[1]
        assert kept
        assert all(torch.equal(entries[name], value) for name, value in kept.items())
    assert ask(client(MOON)).server_module.inquiry.memories[-1] == ["own_models"]


def test_rounds_without_the_exchange_send_nothing_for_it():
    class Rows(pl.Callback):
        rows = ()

        def on_train_epoch_end(self, trainer, loop):
            self.rows = (*self.rows, dict(loop.round_metrics))

    watch = Rows()
    side = ask(client(), 3, asked={1}, callbacks=[watch]).server_module
    assert [exchange for r, exchange in side.order if r != 1] == ["train", "train"]
    size = watch.rows[0]["comm/bytes_down/train"]
    assert size
    assert [row["comm/bytes_down/ask"] for row in watch.rows] == [0, size, 0]
    assert [row["comm/bytes_down"] for row in watch.rows] == [size, 2 * size, size]
    up = 16 * len(SIZES)  # three counts and a number, float32
    assert [row["comm/bytes_up/ask"] for row in watch.rows] == [0, up, 0]
    assert "comm/bytes_down/train" not in fit(client(), 1).round_metrics


@pytest.mark.parametrize("rule", [MedianAggregator, FedNovaAggregator, FedEXPAggregator])
def test_a_rule_sees_no_weights_of_it(rule):
    plain = fit(client(), 2, aggregator=rule())
    loop = ask(client(), 2, rule=rule())
    assert equal({n: v for n, v in weights_of(loop).items() if n in weights_of(plain)}, weights_of(plain))


def test_around_a_method_with_several_exchanges_or_without_shared_weights():
    class Twice(FedAvg):
        exchanges = ("train", "again")

    for made in (client(Twice), client(Local)):
        side = ask(made, 2, asked={1}).server_module
        own = made.exchanges
        assert [exchange for _, exchange in side.order] == [*own, *own, "ask"]
        assert side.made[1]["counts"].sum() == sum(SIZES)


def test_a_client_with_a_server_of_its_own_is_refused():
    with pytest.raises(ValueError, match="FedPAC needs a FedPACServer, got Asks"):
        FederatedLoop(client(FedPAC), server_module=Asks())


def test_clients_that_are_trained_at_once_are_asked_one_by_one():
    alone = ask(client(net=Small), 2)
    stacked = ask(client(net=Small), 2, chunk=3)
    assert stacked.engine.why_not() is None
    assert stacked.engine._proven == {"train"}
    for r in range(2):
        for client_id, answer in alone.server_module.answers[r].items():
            assert equal(answer, stacked.server_module.answers[r][client_id])


def test_draws_are_keyed_by_round_and_client():
    """Neither the order of clients nor who else is asked changes them."""
    orders = [[0, 1, 2]] * 2, [[2, 1, 0]] * 2, [[2]] * 2
    runs = [ask(client(net=Small), 2, toy_data(schedule=order)).server_module.answers for order in orders]
    drawn = [[run[r][2]["drawn"].item() for r in range(2)] for run in runs]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({*drawn[0], runs[0][0][0]["drawn"].item()}) == 3


def test_a_client_without_samples_is_asked_too():
    side = ask(client(), 1, toy_data((7, 0, 5))).server_module
    assert side.answers[0][1]["counts"].tolist() == [0, 0, 0]


class Breaks(FedAvg):
    """Client 2 answers wrongly in round 1."""

    how = ""

    def answer(self, inquiry, broadcast, local):
        answer = super().answer(inquiry, broadcast, local)
        if (local.client_id, local.round_idx) != (2, 1):
            return answer
        if self.how == "raises":
            raise OSError("no disk")
        if self.how == "NaN":
            return {**answer, "counts": answer["counts"] * torch.nan}
        return None


def broken(how):
    made = Breaks(net=BatchNormNet, optimizer=sgd(0.05))
    made.how = how
    return made


@pytest.mark.parametrize("how", ["raises", "NaN"])
def test_a_client_that_is_skipped_leaves_the_round_without_it(how):
    schedule = [[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    expected = ask(client(Breaks), 3, toy_data(schedule=schedule))
    skipped = ask(broken(how), 3, faults="skip")
    assert equal(weights_of(skipped), weights_of(expected))
    assert skipped.server_module.made[1]["counts"].sum() == sum(SIZES) - SIZES[2]
    assert equal(skipped.server_module.made[1], expected.server_module.made[1])


class Diverges(FedAvg):
    """Client 2 ends its training of round 1 with weights that are not finite."""

    def reply(self, exchange, local):
        if (local.client_id, local.round_idx) == (2, 1):
            with torch.no_grad():
                self.net.head.weight.mul_(torch.nan)
        return {}


def test_clients_are_judged_before_the_others_are_asked():
    side = ask(client(Diverges), 2, faults="skip").server_module
    assert side.order == list(itertools.product(range(2), ("train", "ask")))
    assert sorted(side.answers[1]) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", "client 2 .*no disk"),
        ("NaN", "client 2 .*NaN"),
        ("None", r"Describe.answer must return a dict of what goes up, got NoneType; return \{\} for nothing"),
    ],
)
def test_a_client_that_answers_wrongly_ends_the_run_by_name(how, sentence):
    with pytest.raises(Exception, match=sentence):
        ask(broken(how), 2)


def test_a_malicious_client_answers_by_the_classes_that_it_trains_on():
    honest = ask(client(), 1).server_module.answers[0]
    flipped = ask(label_flip(client(), [1]), 1).server_module.answers[0]
    assert torch.equal(flipped[1]["counts"], honest[1]["counts"].flip(0))
    assert torch.equal(flipped[0]["counts"], honest[0]["counts"])


def without_bytes(path):
    """The rows of a table without the bytes of the messages, which answers add to."""
    with path.open(encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if "bytes" not in key} for row in csv.DictReader(file)]


def test_monitors_measure_the_training_and_not_the_answers(tmp_path):
    def rows(fitted):
        return {key: value for key, value in fitted.round_metrics.items() if "comm/" not in key}

    def monitors(name):
        return [DriftMonitor(dirpath=tmp_path / name), ClientTable(dirpath=tmp_path / name)]

    plain = fit(client(), 2, callbacks=monitors("plain"))
    asked = ask(client(), 2, callbacks=monitors("asked"))
    assert rows(asked) == rows(plain)
    assert any("drift" in key for key in rows(asked))
    paths = sorted((tmp_path / "plain").glob("*.csv"))
    assert len(paths) == 2
    for path in paths:
        assert without_bytes(path) == without_bytes(tmp_path / "asked" / path.name)


def test_the_last_exchange_of_a_monitor_comes_before_its_end():
    class Order(Monitor):
        seen = ()

        def exchange_end(self, loop, update, measured):
            self.seen = (*self.seen, "exchange")

        def end(self, loop, update, measured):
            self.seen = (*self.seen, "end")

    watch = Order()
    ask(client(), 2, callbacks=[watch])
    assert watch.seen == ("exchange", "end") * 2 * len(SIZES)


def test_the_hooks_of_the_method_do_not_see_it():
    class Hooks(FedAvg):
        seen = frozenset()

        def receive(self, broadcast, local):
            self.seen |= {("receive", broadcast.exchange)}

        def phases(self, exchange):
            self.seen |= {("phases", exchange)}
            return super().phases(exchange)

        def reply(self, exchange, local):
            self.seen |= {("reply", exchange)}
            return {}

    loop = ask(client(Hooks), 1)
    assert loop.server_module.answers[0]
    assert loop.client.seen == {("receive", "train"), ("phases", "train"), ("reply", "train")}


def test_the_bar_counts_the_exchanges_of_the_round():
    class Seen(RoundProgressBar):
        def on_train_batch_start(self, *args):
            super().on_train_batch_start(*args)
            self.seen = (*getattr(self, "seen", ()), self.num_exchanges)

    bar = Seen()
    loop = FederatedLoop(client(), server_module=Asks({1}), seed=3)
    trainer(3, callbacks=[bar], enable_progress_bar=True).fit(loop, datamodule=toy_data())
    assert bar.seen == (1, 2, 1)


def test_a_codec_leaves_the_answers_as_they_are():
    plain = ask(client(), 2)
    coded = ask(client(), 2, codec=QSGD(bits=8))
    assert equal(plain.server_module.made[1], coded.server_module.made[1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"client": client, "rule": lambda: DPFedAvg(noise_multiplier=1.0, delta=0.01)},
            "the guarantee of DPFedAvg covers the weights that clients send, and Asks also asks them for label counts "
            "and statistics, which would reach the server as they are; leave model.server_module unset",
        ),
        (
            {"client": lambda: dp_sgd(client(net=Small), noise_multiplier=1.0, sample_rate=0.5)},
            "the guarantee of DPSGD.* and Asks also asks them for label counts and statistics",
        ),
        (
            {"client": lambda: local_dp(client(net=Small), noise_multiplier=1.0)},
            "the guarantee of LocalDP.* and Asks also asks them for label counts and statistics",
        ),
    ],
    ids=["rule", "samples", "local"],
)
def test_no_guarantee_covers_what_is_asked(settings, sentence):
    rule = settings.get("rule", lambda: None)()
    with pytest.raises(ValueError, match=sentence):
        ask(settings["client"](), 1, toy_data(sampling="poisson", participation=0.5), rule=rule)


def test_an_answer_that_cannot_be_called_is_refused_where_it_is_defined():
    with pytest.raises(TypeError, match=r"Wrong\.answer .*client, broadcast, local"):

        class Wrong(Inquiry):
            def answer(self, client):
                return {}


def test_an_exchange_has_a_name_of_its_own():
    class Heads(Asks):
        def __init__(self):
            super().__init__()
            self.inquiry.exchange = "train"

    with pytest.raises(ValueError, match="Describe needs an exchange of its own, got 'train', which is one of FedAvg"):
        FederatedLoop(client(), server_module=Heads())


class Plans(ServerModule):
    """Depends on the number of planned rounds where it stops early."""

    def __init__(self, stops=True):
        super().__init__()
        self.stops = stops

    @classmethod
    def plans(cls, arguments):
        return arguments.get("stops", True)


def test_a_server_module_says_whether_it_depends_on_the_planned_rounds():
    def settings(path, **arguments):
        module = {"class_path": path, "init_args": arguments}
        return flat({"model": {"server_module": module}, "trainer": {"max_epochs": 7}})

    assert settings("tests.federation.test_inquiry.Plans", stops=True)["planned_rounds"] == 7
    assert "planned_rounds" not in settings("tests.federation.test_inquiry.Plans", stops=False)
    assert "planned_rounds" not in settings("fl_lightning.methods.FedDFServer")
