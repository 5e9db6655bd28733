"""What a round may expect of an engine: here one that draws all jobs before its first result, as a remote one must."""

import pytest

from fl_lightning import FederatedLoop
from fl_lightning.engines import SequentialEngine
from fl_lightning.methods import FedAvg
from tests.hooks.toy import SCAFFOLD, Updates
from tests.toys import BatchNormNet, equal, fit, folded, sgd, toy_data, weights_of


class Rows(Updates):
    """The values of every round besides."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(loop.round_metrics)


class AllJobsFirst:
    """Knows all clients before it trains one."""

    def __init__(self, local):
        self.local = local

    def run(self, exchange, jobs):
        yield from self.local.run(exchange, iter(list(jobs)))

    def evaluate(self, jobs, *args, **kwargs):
        yield from self.local.evaluate(iter(list(jobs)), *args, **kwargs)


class Fails(FedAvg):
    """Client 2 fails in round 1, after its training, between clients 0 and 3."""

    def reply(self, exchange, local):
        if (self.context.client_id, local.round_idx) == (2, 1):
            raise ValueError("no")
        return {}


class Keeps(FedAvg):
    """A client counts its rounds."""

    def reply(self, exchange, local):
        self.memory["times"] = self.memory.get("times", 0) + 1
        return {}


class Twice(Fails):
    """The failure is in the second exchange of the round."""

    exchanges = ("first", "train")

    def reply(self, exchange, local):
        return super().reply(exchange, local) if exchange == "train" else {}


def two(kind, **settings):
    """Loops and what was seen of three rounds, without and with all jobs first."""
    found = []
    for factory in (None, AllJobsFirst):
        watch = Rows()
        data = toy_data((7, 12, 5, 9), participation=0.75)
        loop = FederatedLoop(kind(net=BatchNormNet, optimizer=sgd()), evaluate_clients_every=1, **folded(settings))
        loop.engine_factory = factory
        fit(None, 3, data, callbacks=[watch], loop=loop)
        assert type(loop.clients_engine) is (factory or SequentialEngine)
        found.append((loop, watch))
    return found


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, Keeps])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"personal": "*head*"},
        {"nonfinite": "skip", "on_error": "skip", "max_update_norm": 2.5},
    ],
    ids=["error", "personal", "skip"],
)
def test_all_jobs_may_be_drawn_before_the_first_result(kind, settings):
    (plain, seen), (other, looked) = two(kind, **settings)
    assert_alike(plain, seen, other, looked)


@pytest.mark.parametrize("kind", [Fails, Twice])
def test_a_client_that_fails_is_left_out_alike(kind):
    (plain, seen), (other, looked) = two(kind, on_error="skip")
    assert seen.rounds[1].keys() >= {0, 3}
    assert_alike(plain, seen, other, looked)


def assert_alike(plain, seen, other, looked):
    assert equal(weights_of(plain), weights_of(other))
    for row, its in zip(seen.rows, looked.rows, strict=True):  # jobs that are drawn again are sent again
        again = {key for key in row if key.startswith("comm/bytes_down") and its[key] > row[key]}
        assert {key: row[key] for key in row.keys() - again} == {key: its[key] for key in its.keys() - again}
    for mine, its in zip(seen.rounds, looked.rounds, strict=True):
        assert mine.keys() == its.keys()
        for client_id, update in mine.items():
            assert equal(update.weights, its[client_id].weights)
    for client_id in plain.store.clients:
        assert plain.store.memory(client_id).keys() == other.store.memory(client_id).keys()
