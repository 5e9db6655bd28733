"""What travels and what stays: personal entries, and broadcasts that differ between clients."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.aggregation import ServerModule
from fl_lightning.functional import state as S
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.types import Broadcast
from tests.hooks.toy import BYTES, FLOATS, Updates
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data

# --- personal entries


class OwnNorms(FedAvg):
    """FedBN: all of a norm layer stays, found by the owner's type."""

    def is_personal(self, name, owner):
        return isinstance(owner, nn.BatchNorm1d)

    def receive(self, broadcast, local):
        assert not any(".body.1." in name for name in broadcast.weights)
        entries = {name: value for name, value in self.net.body[1].state_dict().items()}
        self.came.setdefault(local.client_id, []).append(S.clone(entries))


@pytest.mark.parametrize("how", ["type", "pattern"])
def test_personal_entries(how):
    if how == "type":
        client = OwnNorms(net=BatchNormNet, optimizer=sgd())
        personal = None
    else:
        client = FedAvg(net=BatchNormNet, optimizer=sgd())
        personal = ["*.body.1.*"]
        client.receive = partial(OwnNorms.receive, client)
    client.came = {}
    watch = Updates()
    data = toy_data((7, 12, 0, 9), schedule=[[0, 1], [1, 2], [0, 3]])
    loop = fit(client, 3, data, callbacks=[watch], personal=personal)
    initial = {name.removeprefix("net.body.1."): value for name, value in loop.initial_personal.items()}
    assert sorted(initial) == ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    assert all(equal(client.came[c][0], initial) for c in range(4))  # until the first training, whatever others did
    assert loop.store.personal(2) is None or equal(loop.store.personal(2), loop.initial_personal)
    kept = {name.removeprefix("net.body.1."): value for name, value in loop.store.personal(1).items()}
    assert kept["num_batches_tracked"] == 2 * 3  # its own, through two rounds
    assert not equal(client.came[1][1], client.came[0][1])
    owns = [loop.store.personal(0), loop.store.personal(3)]
    assert equal({n: v for n, v in watch.after[2].items() if ".body.1." in n}, weighted_mean(owns, [7, 9]))
    assert all(set(u.weights) == set(loop.global_weights.shared) for updates in watch.rounds for u in updates.values())
    shared = FLOATS - 4 * 8
    both = (loop.round_metrics["comm/bytes_down"], loop.round_metrics["comm/bytes_up"])
    assert both == (4 * 2 * shared, 4 * 2 * shared)


def test_a_personal_pattern_without_a_match_is_refused():
    with pytest.raises(ValueError, match=r"pattern must match an entry.*'heed\*'.*net\.head"):
        fit(FedAvg(), 1, personal=["heed*"])


def test_nothing_shared_moves_no_bytes():
    loop = fit(FedAvg(net=BatchNormNet), 2, personal=["*"])
    assert loop.round_metrics["comm/bytes_down"] == loop.round_metrics["comm/bytes_up"] == 0
    assert sorted(loop.store.clients) == list(range(len(SIZES)))
    with pytest.raises(ValueError, match="server_optimizer needs trainable entries that the clients share"):
        fit(FedAvg(net=BatchNormNet), 1, personal=["*"], server_optimizer=sgd(1.0))


# --- broadcasts


class Shifted(ServerModule):
    """Sends client i the global weights plus i, with i as an extra; of the head nothing where `body_only`."""

    def __init__(self, body_only=False):
        super().__init__()
        self.body_only = body_only

    def broadcast(self, exchange, client_id):
        weights = {
            name: value + client_id if value.is_floating_point() else value
            for name, value in self.server.weights.items()
            if not (self.body_only and ".head." in name)
        }
        return Broadcast(self.server.round_idx, exchange, weights, {"shift": float(client_id)})


class Checks(FedNTD):
    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        teacher = self.teacher("global").net.state_dict()
        for name, value in self.net.state_dict().items():
            assert torch.equal(teacher[name], value)
        assert all(torch.equal(self.received[name], value) for name, value in self.params().items())
        assert broadcast.extras["shift"] == local.client_id
        self.starts.append((local.client_id, S.clone(self.net.state_dict())))


@pytest.mark.parametrize("body_only", [False, True])
def test_every_client_may_be_sent_other_weights(body_only):
    client = Checks(net=BatchNormNet, optimizer=sgd())
    watch = Updates()
    client.starts = []
    loop = fit(client, 2, callbacks=[watch], server_module=Shifted(body_only))
    first = watch.after[0]
    for client_id, start in client.starts[len(SIZES) :]:
        for name, value in start.items():
            sent = value.is_floating_point() and not (body_only and name.startswith("head."))
            assert torch.equal(value, first[f"net.{name}"] + client_id if sent else first[f"net.{name}"])
    down = BYTES - 4 * (8 * 3 + 3 if body_only else 0) + 8
    assert loop.round_metrics["comm/bytes_down"] == len(SIZES) * down
    assert loop.round_metrics["comm/bytes_up"] == len(SIZES) * BYTES


class ScoresOnly(ServerModule):
    """Sends no weights: the sum of what clients reply crosses, and goes down in the next round."""

    def setup(self):
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))

    def broadcast(self, exchange, client_id):
        return Broadcast(self.server.round_idx, exchange, None, {"total": self.total}, uploads=False)

    def add(self, update):
        assert update.weights is None
        self.sum("scores", {"total": update.extras["scores"]}, update.num_samples)

    def finish(self, exchange, aggregate):
        self.total.copy_(self.summed("scores")["total"])


class Scores(FedAvg):
    server_class = ScoresOnly

    def receive(self, broadcast, local):
        self.seen.append((S.clone(self.net.state_dict()), broadcast.extras["total"].clone()))

    def reply(self, exchange, local):
        return {"scores": torch.ones(3) * (local.client_id + 1), "steps": self.num_steps}


def test_broadcasts_without_weights_leave_the_global_ones():
    """Clients start from the global weights, nothing of theirs comes back, bytes are the extras'."""
    client = Scores(net=BatchNormNet)
    client.seen = []
    loop = fit(client, 2, toy_data((4, 0, 6)))
    assert all(equal(weights, client.seen[0][0]) for weights, _ in client.seen)
    assert equal(loop.client.net.state_dict(), client.seen[0][0])
    total = 4 * 1 + 0 * 2 + 6 * 3
    assert [received[0].item() for _, received in client.seen] == [0, 0, 0, total, total, total]
    assert (loop.round_metrics["comm/bytes_down"], loop.round_metrics["comm/bytes_up"]) == (3 * 3 * 8, 3 * (3 * 4 + 8))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_bytes_of_fedavg(precision):
    """Every entry as its type has it, buffers and counters included, for a client without data, too."""
    loop = fit(
        FedAvg(net=BatchNormNet),
        1,
        toy_data((4, 0, 6), dtype=torch.float64 if "64" in precision else torch.float32),
        precision=precision,
    )
    assert (
        loop.round_metrics["comm/bytes_down"]
        == loop.round_metrics["comm/bytes_up"]
        == 3 * (BYTES + (4 * FLOATS if "64" in precision else 0))
    )
