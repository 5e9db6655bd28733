"""The law of skipped clients: a round with one is the round whose cohort lacks it, in all that is kept of it."""

import math
import re
from functools import cache, partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import Aggregator, ClientModule, FederatedLoop, methods
from fl_lightning.aggregation import KrumAggregator, MedianAggregator, NormClip, ServerModule, UpdateTransform
from fl_lightning.methods import FedAvg, FedEXPAggregator, FedNovaAggregator
from fl_lightning.monitors import ClientTable, DriftMonitor
from tests.toys import SIZES, BatchNormNet, equal, fit, folded, sgd, toy_data, trainer, weights_of

CLIENT = 2
ROUND = 1
EVERYONE = list(range(len(SIZES)))
OTHERS = [client_id for client_id in EVERYONE if client_id != CLIENT]
BYTES = "comm/"
"""Keys that differ: a client that is skipped was sent something, and a round that is run again is sent again."""

METHODS = {
    name: kind
    for name, kind in ((name, getattr(methods, name)) for name in methods.__all__)
    if isinstance(kind, type) and issubclass(kind, ClientModule)
}
SEVERAL = ("FedPAC", "KnFu", "FedMD", "SelectiveFD")
"""Methods with two exchanges a round."""


class Fails:
    """Client 2 fails at the end of an exchange of round 1; derive it together with the class of a client."""

    how = ""
    fails_in = ""

    def reply(self, exchange, local):
        extras = super().reply(exchange, local)
        if (local.client_id, local.round_idx, exchange) != (CLIENT, ROUND, self.fails_in):
            return extras
        if self.how == "raise":
            raise ValueError("broken")
        if self.how == "long":
            with torch.no_grad():
                for value in self.params().values():
                    value.add_(1e4)
            return extras
        return {**extras, "broken": torch.tensor(torch.nan)} if self.how == "NaN" else extras


def failing(kind, how="", exchange=-1, **settings):
    """A client of that kind, which may fail in its first (0) or last (-1) exchange."""
    made = type(
        f"Failing{kind.__name__}", (Fails, kind), {"how": how, "fails_in": kind.exchanges[exchange], "stackable": False}
    )
    return made(net=BatchNormNet, optimizer=sgd(0.05), **settings)


class Counts(UpdateTransform):
    """Keeps who came by, and adds a little more to every update than to the one before."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_server(self, update, broadcast):
        self.seen.append(update.client_id)
        moved = {
            n: v + 1e-3 * len(self.seen) if v.is_floating_point() else v for n, v in (update.weights or {}).items()
        }
        return update if update.weights is None else type(update)(**{**vars(update), "weights": moved})

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Rows(pl.Callback):
    """The rows and skipped clients of every round."""

    def __init__(self):
        self.rows = []
        self.skipped = []
        self.reasons = []

    def on_train_epoch_end(self, trainer, loop):
        self.complete = dict(loop.round_metrics)
        kept = {key: v for key, v in loop.round_metrics.items() if not key.startswith(BYTES) and key != "train/skipped"}
        self.rows.append(kept)
        self.skipped.append([fault.client_id for fault in loop.skipped])
        self.reasons.append(" ".join(fault.reason for fault in loop.skipped))


def data(**settings):
    return toy_data(transfer_size=8, proxy_size=8, partition=None, **settings)


def run(client, lacks=False, callbacks=(), **settings):
    """Three rounds: with everybody, client 2 may fail, or with a cohort that lacks it."""
    watch = Rows()
    schedule = {"schedule": [EVERYONE, OTHERS, EVERYONE]} if lacks else {}
    settings = {"nonfinite": "skip", "on_error": "skip", "seed": 3, "threads": 1, **settings}
    loop = fit(None, 3, data(**schedule), loop=FederatedLoop(client, **folded(settings)), callbacks=[watch, *callbacks])
    return loop, watch


def records(loop):
    return {c: loop.store.record(c) for c in EVERYONE}


def same(a, b):
    """True for equal nests, to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@cache
def lacking(kind, rule=None):
    """The run of a method, or of a rule, whose cohort lacks client 2; only to be read."""
    return (
        run(failing(kind), lacks=True) if rule is None else run(failing(kind), lacks=True, aggregator=rule(), **RULED)
    )


def check(make, lacks=None, **settings):
    """Compare a run in which client 2 fails with one that lacks it; returns the former's loop and rows."""
    (loop, watch), (other, without) = run(make(), **settings), lacks or run(make(), lacks=True, **settings)
    assert watch.skipped == [[], [CLIENT], []]
    assert equal(weights_of(loop), weights_of(other))
    assert same(records(loop), records(other))
    assert same(watch.rows, without.rows)
    return loop, watch


def cases():
    """Every method with NaN and an exception in each of its exchanges; `make test` takes a few."""
    for name, kind in METHODS.items():
        for exchange in range(len(kind.exchanges)):
            for how in ("raise", "NaN"):
                quick = name in ("FedAvg", "FedMD", "SCAFFOLD") or (name in SEVERAL and exchange == 1)
                yield pytest.param(kind, how, exchange, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "how", "exchange"), [*cases()])
def test_a_method_is_as_without_the_skipped_client(kind, how, exchange):
    check(partial(failing, kind, how, exchange), lacking(kind))


HOWS = ("raise", "NaN", "long")
BOUND = {"max_update_norm": 1e3}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [FedAvg, methods.SCAFFOLD])
def test_a_transform_with_state_has_not_seen_it(how, kind):
    seen = []

    def make(how=""):
        seen.append(Counts())
        return failing(kind, how)

    for lacks in (False, True):
        client = make("" if lacks else how)
        loop, _ = run(client, lacks, transforms=[seen[-1]], **BOUND)
        seen[-1].weights = weights_of(loop)
    assert seen[0].seen == seen[1].seen == [*EVERYONE, *OTHERS, *EVERYONE]
    assert equal(seen[0].weights, seen[1].weights)


class Tallies(ServerModule):
    """Counts updates and cohorts in buffers, the former in `add`."""

    def setup(self):
        self.updates, self.asked = (nn.Buffer(torch.zeros((), dtype=torch.int64)) for _ in range(2))

    def begin_round(self, cohort):
        self.asked += len(cohort)

    def add(self, update):
        self.updates += 1


@pytest.mark.parametrize("how", HOWS)
def test_a_server_module_has_neither_counted_nor_expected_it(how):
    loop, _ = run(failing(FedAvg, how), server_module=Tallies(), **BOUND)
    assert int(loop.server_module.updates) == int(loop.server_module.asked) == 2 * len(EVERYONE) + len(OTHERS)


RULED = {"personal": "net.head.*", "transforms": (NormClip(0.5),), **BOUND}
RULES = [partial(KrumAggregator, f=0), MedianAggregator, FedEXPAggregator, FedNovaAggregator, Aggregator]


@pytest.mark.parametrize("rule", RULES, ids=["Krum", "median", "FedEXP", "FedNova", "mean"])
@pytest.mark.parametrize("how", HOWS)
def test_a_rule_is_as_without_it(rule, how):
    """Krum's choice among those that are left, too; a personal head's mean, a clipped update."""
    loop, watch = run(failing(FedAvg, how), aggregator=rule(), **RULED)
    other, without = lacking(FedAvg, rule)
    assert watch.skipped[1] == [CLIENT]
    assert equal(weights_of(loop), weights_of(other))
    assert same(watch.rows, without.rows)


@pytest.mark.parametrize("how", HOWS)
def test_krum_that_needs_the_skipped_client_ends_the_run_or_loses_the_round(how):
    rule = partial(KrumAggregator, f=1)  # of five clients
    with pytest.raises(ValueError, match=re.escape("needs m ≥ 2f + 3 = 5 clients (f=1), got 4 clients")):
        run(failing(FedAvg, how), aggregator=rule(), **BOUND)
    _, watch = run(failing(FedAvg, how), aggregator=rule(), min_clients=5, **BOUND)
    assert watch.skipped == [[], EVERYONE, []]


class LogsMetric(FedAvg):
    """Logs a metric object besides numbers."""

    def __init__(self, **base):
        super().__init__(**base)
        self.accuracy = MulticlassAccuracy(3, average="micro", sync_on_compute=False)

    def training_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("train/accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("how", HOWS)
def test_a_metric_object_counts_the_other_clients_all_of_them(how):
    without = run(failing(LogsMetric), lacks=True, **BOUND)
    _, watch = check(partial(failing, LogsMetric, how), without, **BOUND)
    assert 0 < watch.rows[1]["train/accuracy"] < 1


class Counted(methods.FedPAC):
    """Every client raises in the second exchange of a round in which client 2 has ended the first one."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        first = broadcast.exchange == self.exchanges[0]
        if first and local.client_id == 0:
            type(self).seen = set()
        if first:
            self.seen.add(local.client_id)
        elif local.round_idx == ROUND and CLIENT in self.seen:
            raise ValueError("nothing can be made of what client 2 sent")


def test_nobody_is_blamed_for_what_a_client_did_in_the_exchange_before():
    client = failing(Counted, "NaN", 0)
    loop, watch = run(client)
    assert watch.skipped == [[], [CLIENT], []]
    assert "returned NaN" in watch.reasons[1]
    other, _ = run(failing(methods.FedPAC), lacks=True)
    assert equal(weights_of(loop), weights_of(other))


class ByLoss(Aggregator):
    """Weighs a client by what it sends of its loss."""

    def weight(self, update):
        return torch.exp(-update.extras["loss"])


class SendsLoss(FedAvg):
    def reply(self, exchange, local):
        return {"loss": self.net.head.weight.detach().square().mean()}


@pytest.mark.parametrize("how", HOWS)
def test_a_rule_that_weighs_by_itself_is_as_without_it(how):
    pairs = [run(failing(SendsLoss, h), lacks, aggregator=ByLoss(), **BOUND) for h, lacks in ((how, False), ("", True))]
    assert pairs[0][1].skipped[1] == [CLIENT]
    assert equal(weights_of(pairs[0][0]), weights_of(pairs[1][0]))


@pytest.mark.parametrize("kind", [FedAvg, methods.KnFu, methods.FedPAC])
def test_monitors_begin_anew_with_a_round_that_is_repeated(kind, tmp_path):
    folders = [tmp_path / name for name in ("with", "without")]
    kinds = [DriftMonitor, ClientTable] if kind is methods.FedPAC else [ClientTable]
    pairs = [
        run(failing(kind, how), lacks, [made(dirpath=folder) for made in kinds])
        for how, lacks, folder in (("NaN", False, folders[0]), ("", True, folders[1]))
    ]
    assert same(pairs[0][1].rows, pairs[1][1].rows)
    for made in kinds:
        name = "drift.csv" if made is DriftMonitor else "clients.csv"
        first, other = (without_bytes((folder / name).read_text().splitlines()) for folder in folders)
        # Without shared weights every client is evaluated, also one that is not in the cohort.
        found = [[row for row in rows if row[:2] != [str(ROUND), str(CLIENT)]] for rows in (first, other)]
        assert found[0] == found[1]


def without_bytes(lines):
    """The cells of a table. Bytes of an attempt that is repeated were sent all the same."""
    header, *rows = [line.split(",") for line in lines]
    columns = [place for place, name in enumerate(header) if not name.startswith("bytes_")]
    return [[row[place] for place in columns] for row in (header, *rows)]


def test_too_few_that_are_left_lose_the_round_and_say_whom():
    loop, watch = run(failing(methods.KnFu, "raise"), min_clients=5)
    assert watch.skipped == [[], EVERYONE, []]
    other, _ = run(failing(methods.KnFu), min_clients=5)
    assert not same(records(loop), records(other))


def test_the_row_of_a_run_that_max_steps_ends_is_whole():
    """Its last round is evaluated and counted like any other, also one with a skipped client."""
    watch = Rows()
    whole = run(failing(FedAvg, "NaN"))[1]
    loop = FederatedLoop(failing(FedAvg, "NaN"), seed=3, threads=1, faults="skip")
    trainer(-1, max_steps=2, callbacks=[watch]).fit(loop, datamodule=data())
    assert watch.skipped == [[], [CLIENT]]
    assert same(watch.rows, whole.rows[:2])
    assert watch.complete.keys() >= {"global/acc", "train/ce", "train/skipped", "comm/bytes_up"}
