"""Exchanges, phases and client callbacks, each tried by a small method; the methods of papers are made of these."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import Aggregator, ClientModule
from fl_lightning.aggregation import ServerModule
from fl_lightning.functional import state as S
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from fl_lightning.types import Phase
from tests.hooks.toy import Updates
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data

# --- exchanges


class TwoExchanges(ClientModule):
    """Trains in the second exchange only."""

    exchanges = ("first", "second")

    def __init__(self, **base):
        super().__init__(**base)
        self.seen = []

    def receive(self, broadcast, local):
        same = all(torch.equal(value, self.received[name]) for name, value in self.params().items())
        self.seen.append((broadcast.round_idx, broadcast.exchange, local.client_id, self.num_steps, same))

    def phases(self, exchange):
        return (Phase(),) if exchange == "second" else ()


class Halving(ServerModule):
    """Halves the weights after the first exchange; after the second, on demand, leaves them."""

    def __init__(self, keep_first=False):
        super().__init__()
        self.keep_first = keep_first
        self.sent = []
        self.returned = []
        self.begun = []

    def begin_round(self, cohort):
        self.begun.append(cohort)

    def broadcast(self, exchange, client_id):
        sent = super().broadcast(exchange, client_id)
        self.sent.append((exchange, S.clone(sent.weights)))
        return sent

    def finish(self, exchange, aggregate):
        if exchange == "second":
            return None if self.keep_first else aggregate
        self.returned.append(S.clone({name: (value * 0.5).to(value.dtype) for name, value in aggregate.items()}))
        return self.returned[-1]


@pytest.mark.parametrize("keep_first", [False, True])
def test_two_exchanges(keep_first):
    """The second receives what `finish` of the first returned; the server steps once, to the last State returned."""
    client = TwoExchanges(net=BatchNormNet)
    halving = Halving(keep_first)
    watch = Updates()
    start = []

    class Start(pl.Callback):
        def on_train_batch_start(self, trainer, loop, *_):
            start.append(S.clone(loop.client.state_dict()))

    data = toy_data((4, 6, 5), schedule=[[2, 0], [1, 2]])
    server = partial(torch.optim.SGD, lr=0.5)
    fit(client, 2, data, callbacks=[watch, Start()], server_module=halving, server_optimizer=server)
    order = [(r, e, c, 0, True) for r, cohort in enumerate(data.schedule) for e in client.exchanges for c in cohort]
    assert client.seen == order
    assert halving.begun == data.schedule
    for r in range(2):
        sent = halving.sent[4 * r : 4 * r + 4]
        halved = halving.returned[r]
        assert all(equal(weights, start[r]) for exchange, weights in sent if exchange == "first")
        assert all(equal(weights, halved) for exchange, weights in sent if exchange == "second")
        updates = [watch.rounds[r][c] for c in data.schedule[r]]
        last = halved if keep_first else weighted_mean([u.weights for u in updates], [u.num_samples for u in updates])
        for name, value in watch.after[r].items():
            moved = start[r][name] + 0.5 * (last[name] - start[r][name]) if name in client.params() else last[name]
            torch.testing.assert_close(value, moved)


# --- phases


class HeadThenBody(FedAvg):
    """One epoch of the head in batches of 2 with its own lr, then two of the body as the loop says."""

    def phases(self, exchange):
        yield Phase(epochs=1, batch_size=2, trains=("*head*",), lr=0.05)
        yield Phase(trains=("net.body.1.weight", "net.body.1.bias"))


def test_phases_equal_a_loop_by_hand():
    """Each phase has its own parameters, lr, epochs, batch size and optimizer state; lr_decay holds for both."""
    data = toy_data((5, 6), dtype=torch.float64, shuffle=False, batch_size=4)
    client = HeadThenBody(net=partial(Perceptron, hidden=(3,)), optimizer=sgd(0.2, 0.9))
    watch = Updates()
    fit(client, 2, data, callbacks=[watch], precision="64-true", local_epochs=2, lr_decay=0.5)
    net = Perceptron(3, (4,), (3,)).double()
    for r, (start, updates) in enumerate(zip(watch.after, watch.rounds[1:], strict=False), 1):
        for client_id, rows in enumerate([slice(0, 5), slice(5, 11)]):
            net.load_state_dict({name.removeprefix("net."): value for name, value in start.items()})
            x = data.split("train").x[rows]
            y = data.split("train").y[rows]
            steps = 0
            for part, lr, epochs, size in ((net.head, 0.05, 1, 2), (net.body, 0.2, 2, 4)):
                optimizer = torch.optim.SGD(part.parameters(), lr=lr * 0.5**r, momentum=0.9)
                for _ in range(epochs):
                    for batch_x, batch_y in zip(x.split(size), y.split(size), strict=True):
                        net.zero_grad()
                        F.cross_entropy(net(batch_x), batch_y).backward()
                        optimizer.step()
                        steps += 1
            assert updates[client_id].num_steps == steps
            for name, value in net.state_dict().items():
                torch.testing.assert_close(updates[client_id].weights[f"net.{name}"], value, rtol=1e-12, atol=1e-12)
    assert all(parameter.requires_grad for parameter in client.parameters())


def test_a_phase_that_trains_nothing_is_refused():
    class Wrong(FedAvg):
        def phases(self, exchange):
            return (Phase(trains=("*heed*",)),)

    with pytest.raises(ValueError, match=r"Phase\(trains=...\).*'\*heed\*'.*none of.*net\.head\.weight"):
        fit(Wrong(), 1)


def test_an_optimizer_that_depends_on_the_client_is_built_for_every_client():
    class PerClient(FedAvg):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.context.client_id))

    watch = Updates()
    fit(PerClient(), 1, toy_data((4, 4, 4), batch_size=2), callbacks=[watch])
    assert [watch.rounds[0][c].accumulated_lr for c in range(3)] == pytest.approx([0.2, 0.4, 0.6])


# --- callbacks, and what the two views offer


def test_client_callbacks_are_called_in_order_with_their_arguments():
    class Log(pl.Callback):
        def __init__(self):
            self.calls = []

        def note(self, trainer, loop, *rest):
            assert isinstance(trainer, pl.Trainer)
            assert loop is trainer.lightning_module
            self.calls.append((trainer.current_epoch, *rest))

        def on_client_start(self, trainer, loop, client_id):
            self.note(trainer, loop, "start", client_id)

        def on_client_epoch_end(self, trainer, loop, client_id, epoch):
            self.note(trainer, loop, "epoch", client_id, epoch)

        def on_client_end(self, trainer, loop, update):
            live = {name: value for name, value in loop.client.state_dict().items() if name in update.weights}
            assert equal(dict(update.weights), live)  # here, and only here, the client's own weights
            self.note(trainer, loop, "end", update.client_id)

        def on_exchange_end(self, trainer, loop, exchange):
            self.note(trainer, loop, "exchange", exchange)

    log = Log()
    fit(TwoExchanges(), 2, toy_data((4, 0), schedule=[[1, 0], [0]]), callbacks=[log, pl.Callback()], local_epochs=2)
    empty = [("start", 1), ("end", 1)]
    first = [("start", 0), ("end", 0)]
    second = [("start", 0), ("epoch", 0, 0), ("epoch", 0, 1), ("end", 0)]
    round_0 = [*empty, *first, ("exchange", "first"), *empty, *second, ("exchange", "second")]
    round_1 = [*first, ("exchange", "first"), *second, ("exchange", "second")]
    assert log.calls == [(0, *call) for call in round_0] + [(1, *call) for call in round_1]


def test_views_of_client_and_server():
    class Sees(FedAvg):
        def receive(self, broadcast, local):
            x, y = local.all()
            n = local.size()
            assert torch.equal(torch.bincount(y, minlength=3), local.label_counts)
            assert (len(x), local.label_counts.sum()) == (n, n)
            plain = list(local.batches())
            shuffled = list(local.batches(epoch=1, batch_size=3, with_index=True))
            assert sum(len(b[1]) for b in plain) == n
            if n:
                assert torch.equal(torch.cat([b[0] for b in plain]), x)
            for (batch, _), positions in shuffled:
                assert torch.equal(batch, x[positions])
            assert sorted(torch.cat([p for _, p in shuffled]).tolist()) == list(range(n)) if n else not shuffled
            draws = [torch.rand((), generator=local.generator(purpose)).item() for purpose in ("a", "a", "b")]
            assert draws[0] == draws[1] != draws[2]

    class ServerSees(Aggregator):
        def setup(self):
            assert self.server.num_clients == 3
            assert len(self.server.data("train").labels) == 9
            assert self.server.trainable == tuple(name for name, _ in self.server.module.named_parameters())
            self.kept = self.server_state(self.server.trainable)
            assert all(v.dtype == torch.float64 and not v.any() for v in self.kept.values())
            self.start = None

        def begin_round(self, cohort):
            self.start = S.clone(self.server.weights)

        def add(self, update):
            super().add(update)
            assert equal(dict(self.server.weights), self.start)  # a snapshot, not what the client left in the module
            assert not equal(dict(update.weights), self.start) or not update.num_steps

        def finish(self):
            a, b = (torch.rand((), generator=self.server.generator("x")).item() for _ in range(2))
            assert a == b
            assert self.summed("nothing") == {}
            return super().finish()

    fit(Sees(), 2, toy_data((4, 0, 5)), aggregator=ServerSees())
