"""Every hook of a client and an aggregator, each tried by a small method; the methods of papers are made of these."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import Aggregator, ClientModule, FederatedLoop
from fl_lightning.functional import state as S
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from fl_lightning.types import Broadcast, Phase
from tests.toys import SIZES, BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of

Linear = partial(Perceptron, hidden=())
FLOATS = 4 * 8 + 8 + 4 * 8 + 8 * 3 + 3
"""Float entries of BatchNormNet: two linear layers, BatchNorm's weight, bias and two running statistics."""


class Updates(pl.Callback):
    """Copies of every update, by round and client (the last exchange's), and of the global weights after each round."""

    def __init__(self):
        self.rounds, self.after = [], []

    def on_train_epoch_start(self, trainer, loop):
        self.rounds.append({})

    def on_client_end(self, trainer, loop, update):
        weights = None if update.weights is None else S.clone(update.weights)
        copied = SimpleNamespace(**{**vars(update), "weights": weights, "extras": copy.deepcopy(update.extras)})
        self.rounds[-1][update.client_id] = copied

    def on_train_batch_end(self, trainer, loop, *_):
        self.after.append(S.clone(loop.client.state_dict()))


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


class Halving(Aggregator):
    """Halves the weights after the first exchange; after the second, on demand, leaves them."""

    def __init__(self, keep_first=False):
        super().__init__()
        self.keep_first, self.sent, self.returned, self.begun = keep_first, [], [], []

    def begin_round(self, cohort):
        self.begun.append(cohort)

    def broadcast(self, exchange, client_id):
        sent = super().broadcast(exchange, client_id)
        self.sent.append((exchange, S.clone(sent.weights)))
        return sent

    def finish(self, exchange):
        new = super().finish(exchange)
        if exchange == "second":
            return None if self.keep_first else new
        self.returned.append(S.clone({name: (value * 0.5).to(value.dtype) for name, value in new.items()}))
        return self.returned[-1]


@pytest.mark.parametrize("keep_first", [False, True])
def test_two_exchanges(keep_first):
    """The second receives what `finish` of the first returned; the server steps once, to the last State returned."""
    client, aggregator, watch = TwoExchanges(net=BatchNormNet), Halving(keep_first), Updates()
    start = []

    class Start(pl.Callback):
        def on_train_batch_start(self, trainer, loop, *_):
            start.append(S.clone(loop.client.state_dict()))

    data = toy_data((4, 6, 5), schedule=[[2, 0], [1, 2]])
    server = partial(torch.optim.SGD, lr=0.5)
    fit(client, 2, data, callbacks=[watch, Start()], aggregator=aggregator, server_optimizer=server)
    order = [(r, e, c, 0, True) for r, cohort in enumerate(data.schedule) for e in client.exchanges for c in cohort]
    assert client.seen == order
    assert aggregator.begun == data.schedule
    for r in range(2):
        sent, halved = aggregator.sent[4 * r : 4 * r + 4], aggregator.returned[r]
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
            x, y = data.split("train").x[rows], data.split("train").y[rows]
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
    assert [watch.rounds[0][c].exposure for c in range(3)] == pytest.approx([0.2, 0.4, 0.6])


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
        client, personal = OwnNorms(net=BatchNormNet, optimizer=sgd()), None
    else:
        client, personal = FedAvg(net=BatchNormNet, optimizer=sgd()), ["*.body.1.*"]
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
    assert all(set(u.weights) == set(loop.weights.shared) for updates in watch.rounds for u in updates.values())
    shared = FLOATS - 4 * 8
    assert (loop.row["comm/bytes_down"], loop.row["comm/bytes_up"]) == (4 * 2 * shared, 4 * 2 * shared)


def test_a_personal_pattern_without_a_match_is_refused():
    with pytest.raises(ValueError, match=r"pattern must match an entry.*'heed\*'.*net\.head"):
        fit(FedAvg(), 1, personal=["heed*"])


def test_nothing_shared_moves_no_bytes():
    loop = fit(FedAvg(net=BatchNormNet), 2, personal=["*"])
    assert loop.row["comm/bytes_down"] == loop.row["comm/bytes_up"] == 0
    assert sorted(loop.store.state_dict()) == list(range(len(SIZES)))
    with pytest.raises(ValueError, match="server_optimizer needs trainable entries that the clients share"):
        fit(FedAvg(net=BatchNormNet), 1, personal=["*"], server_optimizer=sgd(1.0))


# --- broadcasts


class Shifted(Aggregator):
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
        teacher = self.frozen("teacher").net.state_dict()
        for name, value in self.net.state_dict().items():
            assert torch.equal(teacher[name], value)
        assert all(torch.equal(self.received[name], value) for name, value in self.params().items())
        assert broadcast.extras["shift"] == local.client_id
        self.starts.append((local.client_id, S.clone(self.net.state_dict())))


@pytest.mark.parametrize("body_only", [False, True])
def test_every_client_may_be_sent_other_weights(body_only):
    client, watch = Checks(net=BatchNormNet, optimizer=sgd()), Updates()
    client.starts = []
    loop = fit(client, 2, callbacks=[watch], aggregator=Shifted(body_only))
    first = watch.after[0]
    for client_id, start in client.starts[len(SIZES) :]:
        for name, value in start.items():
            sent = value.is_floating_point() and not (body_only and name.startswith("head."))
            assert torch.equal(value, first[f"net.{name}"] + client_id if sent else first[f"net.{name}"])
    down = FLOATS - (8 * 3 + 3 if body_only else 0) + 1
    assert loop.row["comm/bytes_down"] == 4 * len(SIZES) * down
    assert loop.row["comm/bytes_up"] == 4 * len(SIZES) * FLOATS


class ScoresOnly(Aggregator):
    """Sends no weights: the sum of what clients reply crosses, and goes down in the next round."""

    def setup(self):
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))

    def broadcast(self, exchange, client_id):
        return Broadcast(self.server.round_idx, exchange, None, {"total": self.total})

    def add(self, update):
        assert update.weights is None
        self.sum("scores", {"total": update.extras["scores"]}, update.num_samples)

    def finish(self, exchange):
        self.total.copy_(self.summed("scores")["total"])


class Scores(FedAvg):
    aggregator_class = ScoresOnly

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
    assert (loop.row["comm/bytes_down"], loop.row["comm/bytes_up"]) == (4 * 3 * 3, 4 * 3 * 3)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_bytes_of_fedavg(precision):
    """G11: 4 bytes for every float entry, buffers included, a client without data included; counters are free."""
    loop = fit(
        FedAvg(net=BatchNormNet),
        1,
        toy_data((4, 0, 6), dtype=torch.float64 if "64" in precision else torch.float32),
        precision=precision,
    )
    assert loop.row["comm/bytes_down"] == loop.row["comm/bytes_up"] == 4 * 3 * FLOATS


# --- aggregators with state, and those that gather


class ScaffoldAggregator(Aggregator):
    def setup(self):
        self.control = self.server_state(self.server.trainable)

    def broadcast(self, exchange, client_id):
        return self.sends(exchange, control=self.control)

    def add(self, update):
        super().add(update)
        self.sum("control", update.extras["control_delta"])

    def finish(self, exchange):
        S.add_(self.control, self.summed("control"), 1 / self.server.num_clients)
        return super().finish(exchange)


class Scaffold(ClientModule):
    """As in CONTRIBUTING's spirit: the whole method in one screen (Karimireddy et al. 2020, Option II)."""

    aggregator_class = ScaffoldAggregator

    def receive(self, broadcast, local):
        c = broadcast.extras["control"]
        self.round_buffer("c", c)
        self.round_buffer("c_i", self.memory.get("control", S.zeros_like(c)))

    def training_step(self, batch, batch_idx):
        correction = S.sub(self.round["c"], self.round["c_i"])
        return self.local_loss(batch, batch_idx) + S.inner(correction, self.params())

    def reply(self, exchange, local):
        c, c_i = self.round["c"], self.round["c_i"]
        if not self.num_steps:
            return {"control_delta": S.zeros_like(c_i)}
        delta = S.sub(S.scale(S.sub(self.received, self.params()), 1 / self.exposure), c)
        self.memory["control"] = S.add(c_i, delta)
        return {"control_delta": delta}


def scaffold_loop():
    return FederatedLoop(
        Scaffold(net=BatchNormNet, optimizer=sgd()), weighting="uniform", local_epochs=2, lr_decay=0.9, seed=3
    )


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_an_aggregator_with_state_keeps_its_invariant_and_resumes(participation, tmp_path):
    """SCAFFOLD: c = (1/N) Σ c_i over all clients, in every round; c and c_i are in the checkpoint."""

    class Invariant(pl.Callback):
        rounds = 0

        def on_train_batch_end(self, trainer, loop, *_):
            self.rounds += 1
            for name, c in loop.aggregator.control.items():
                kept = [loop.store.memory(i)["control"][name] for i in loop.store.state_dict()]
                torch.testing.assert_close(c, sum(v.double() for v in kept) / loop.server.num_clients)
            assert any(c.any() for c in loop.aggregator.control.values())
            if self.rounds == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    sizes = (7, 12, 0, 9, 16)
    whole, check = scaffold_loop(), Invariant()
    fit(None, 4, toy_data(sizes, participation=participation), loop=whole, callbacks=[check])
    assert check.rounds == 4
    assert any("control" in name for name in whole.state_dict())
    assert 2 not in whole.store.state_dict()  # without data it keeps nothing
    resumed = scaffold_loop()
    fit(None, 4, toy_data(sizes, participation=participation), loop=resumed, ckpt_path=tmp_path / "two.ckpt")
    assert equal(weights_of(whole), weights_of(resumed))
    for client_id in whole.store.state_dict():
        assert equal(whole.store.memory(client_id)["control"], resumed.store.memory(client_id)["control"])


def test_scaffold_bytes_and_the_first_control_variate_is_the_gradient():
    """After one step c_i = ∇f_i(x): line 12 with c = c_i = 0; W + θ go either way."""
    data = toy_data((6,), batch_size="full", dtype=torch.float64)
    loop = fit(Scaffold(net=Linear, optimizer=sgd(0.3, 0.9)), 0, data, precision="64-true", seed=8)
    start = copy.deepcopy(loop.client.net).double()
    loop = fit(Scaffold(net=Linear, optimizer=sgd(0.3, 0.9)), 1, data, precision="64-true", seed=8)
    F.cross_entropy(start(data.split("train").x), data.split("train").y).backward()
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(loop.store.memory(0)["control"][f"net.{name}"], parameter.grad)
    assert loop.row["comm/bytes_down"] == loop.row["comm/bytes_up"] == 4 * 2 * 15


class Median(Aggregator):
    gathers = True

    def finish(self, exchange):
        assert list(self.rows) == sorted(self.rows)
        rows = [update for update in self.rows.values() if update.num_samples]
        stacked = {name: torch.stack([row.weights[name] for row in rows]) for name in rows[0].weights}
        return {name: value.double().quantile(0.5, 0).to(value.dtype) for name, value in stacked.items()}


def test_an_aggregator_that_gathers_has_every_row():
    watch = Updates()
    data = toy_data((7, 12, 0, 9, 16), schedule=[[0, 1, 2, 3, 4], [1, 3]])
    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data, callbacks=[watch], aggregator=Median())
    for updates, after in zip(watch.rounds, watch.after, strict=True):
        for name, value in after.items():
            rows = torch.stack([u.weights[name].double() for u in updates.values() if u.num_samples])
            low, high = (rows.sort(0).values[k] for k in ((len(rows) - 1) // 2, len(rows) // 2))
            torch.testing.assert_close(value, ((low + high) / 2).to(value.dtype))


class LastTwo(Aggregator):
    """Evaluates the mean of the last two models (FedEXP), which the clients never see."""

    def setup(self):
        self.before = self.server_state(self.server.trainable)
        self.now = self.server_state(self.server.trainable)

    def finish(self, exchange):
        new = super().finish(exchange)
        for name, value in self.now.items():
            self.before[name].copy_(value)
            value.copy_(new[name])
        return new

    def evaluation_weights(self, weights):
        means = {name: (self.before[name] + self.now[name]).div(2).to(weights[name].dtype) for name in self.now}
        return {**weights, **means}


def test_evaluation_weights_are_evaluated_and_not_fed_back(tmp_path):
    client, watch = FedAvg(net=BatchNormNet, optimizer=sgd()), Updates()
    loop = fit(client, 3, callbacks=[watch], aggregator=LastTwo())
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3)
    assert equal(loop.client.state_dict(), plain.client.state_dict())
    net = BatchNormNet(3, (4,)).eval()
    last, before = watch.after[2], watch.after[1]
    trainable = set(client.params())
    mean = {n: (v.double() + before[n].double()).div(2).to(v.dtype) if n in trainable else v for n, v in last.items()}
    net.load_state_dict({name.removeprefix("net."): value for name, value in mean.items()})
    x, y = samples(30, seed=1)
    assert loop.row["global/loss"] == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-6)
    assert loop.row["global/loss"] != pytest.approx(plain.row["global/loss"], rel=1e-6)
    loop.trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = FederatedLoop(FedAvg(net=BatchNormNet), aggregator=LastTwo(), seed=1)
    (tested,) = trainer(0).test(other, datamodule=toy_data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert tested["test/loss"] == pytest.approx(loop.row["global/loss"], rel=1e-6)
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


# --- memory, deployed, ALMA


class Keeps(FedAvg):
    """Remembers its weights after training and deploys them; before that, the received ones."""

    def reply(self, exchange, local):
        if self.num_steps:
            self.memory["own"] = dict(self.net.state_dict())
            self.memory["times"] = [*self.memory.get("times", []), local.round_idx]
        return {}

    def deployed(self):
        own = self.memory.get("own", self.net.state_dict())
        self.net.load_state_dict(own)  # edits the shared module: the next client must not see it
        return self


@pytest.mark.parametrize("raises", [False, True])
def test_alma_is_the_mean_over_all_clients_of_what_they_deploy(raises):
    class Rows(pl.Callback):
        rows = ()

        def on_train_epoch_end(self, trainer, loop):
            self.rows = (*self.rows, dict(loop.row))

    class Fails(Keeps):
        def deployed(self):
            super().deployed()
            raise ZeroDivisionError

    rows, data = Rows(), toy_data((7, 12, 0, 9), schedule=[[0, 1], [1, 2], [0], [0, 1]])
    loop = FederatedLoop((Fails if raises else Keeps)(net=BatchNormNet, optimizer=sgd()), alma_every=2, seed=3)
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2 if raises else 3, data)
    if raises:
        with pytest.raises(ZeroDivisionError):
            fit(None, 3, data, loop=loop)
        assert equal(weights_of(loop), weights_of(plain))  # the round was complete
        return
    fit(None, 3, data, loop=loop, callbacks=[rows])
    assert equal(weights_of(loop), weights_of(plain))
    assert loop.client.training
    assert ["local/alma" in row for row in rows.rows] == [False, True, False]
    assert [loop.store.memory(c).get("times") for c in range(4)] == [[0, 2], [0, 1], None, None]
    two = FederatedLoop(Keeps(net=BatchNormNet, optimizer=sgd()), seed=3)
    fit(None, 2, data, loop=two)
    accuracies = []
    for client_id in range(4):
        net = BatchNormNet(3, (4,)).eval()
        net.load_state_dict(two.store.memory(client_id).get("own", two.client.net.state_dict()))
        x, y = data.view(client_id, 0).all("test")
        accuracies.append((net(x).argmax(1) == y).double().mean())
    assert rows.rows[1]["local/alma"] == pytest.approx(torch.stack(accuracies).mean().item())


def test_memory_holds_what_a_checkpoint_can_and_outlives_a_failed_round_unchanged():
    class Counts(FedAvg):
        def reply(self, exchange, local):
            self.memory.setdefault("times", torch.zeros(()))
            self.memory["times"] += 1  # in place, on purpose
            return {}

    class Stop(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            if trainer.current_epoch == 2 and update.client_id == 3:
                raise ZeroDivisionError

    loop = FederatedLoop(Counts(), seed=0)
    with pytest.raises(ZeroDivisionError):
        fit(None, 3, loop=loop, callbacks=[Stop()])
    assert [loop.store.memory(c)["times"].item() for c in range(5)] == [2] * 5

    class Wrong(FedAvg):
        def reply(self, exchange, local):
            self.memory["net"] = {"it": [self.net]}
            return {}

    with pytest.raises(TypeError, match=r"memory of client 0\['net'\]\['it'\] must consist of tensors.*Perceptron"):
        fit(Wrong(), 1)


# --- round buffers, received, teacher


def test_round_buffers_are_the_clients_own_and_no_attributes():
    class Buffers(FedAvg):
        def receive(self, broadcast, local):
            assert self.round == {}
            self.round_buffer("mine", torch.tensor(float(local.client_id)))
            self.round_buffer("state", {"w": torch.ones(2)})

        def training_step(self, batch, batch_idx):
            assert self.round["mine"] == self.context.client_id
            return super().training_step(batch, batch_idx) + 0 * self.round["state"]["w"].sum()

    loop = fit(Buffers(), 2)
    assert not any("mine" in name or name.endswith("state.w") for name in loop.state_dict())
    assert not hasattr(loop.client, "mine")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_teacher_is_frozen_and_shared(mode):
    """No gradient, no BatchNorm update, absent from state dict, parameters and optimizer; one copy for all clients."""

    class Teaches(FedNTD):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            self.first = self.teacher_state()
            assert all(torch.equal(self.net.state_dict()[name], value) for name, value in self.first.items())
            assert self.frozen("teacher").net.training == (mode == "train")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            teacher = self.frozen("teacher")
            out = teacher(batch[0])
            assert not out.requires_grad
            assert not out.is_inference()
            self.loads.add((id(teacher.net), self.context.weights_key))
            return loss

        def reply(self, exchange, local):
            assert equal(self.first, self.teacher_state())
            assert all(p.grad is None and not p.requires_grad for p in self.frozen("teacher").net.parameters())
            optimizer = self.optimizers(use_pl_optimizer=False)
            assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in self.net.parameters()}
            return {}

        def teacher_state(self):
            state = S.clone(self.frozen("teacher").net.state_dict())
            return {n: v for n, v in state.items() if mode == "eval" or not n.endswith("num_batches_tracked")}

    client = Teaches(net=BatchNormNet, optimizer=sgd(), teacher_mode=mode)
    client.loads = set()
    loop = fit(client, 3)
    assert len({net for net, _ in client.loads}) == 1
    assert len({key for _, key in client.loads}) == 3  # loaded once a round, not once a client
    assert sorted(loop.client.state_dict()) == sorted(f"net.{name}" for name in BatchNormNet(3, (4,)).state_dict())
    assert not any("teacher" in name for name, _ in loop.named_modules())


def test_the_teacher_of_another_fit_is_not_the_last_one():
    """Round 0 of a second fit has the key of round 0 of the first, and other weights."""
    loop = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=3)
    fit(None, 1, loop=loop)
    again = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=3)
    again.client.build(3, (4,))
    again.client.load_state_dict(loop.client.state_dict())
    fit(None, 1, loop=loop)
    fit(None, 1, loop=again)
    assert equal(weights_of(loop), weights_of(again))


def test_a_teacher_needs_a_net():
    class Teaches(FedAvg):
        def receive(self, broadcast, local):
            self.frozen("teacher")

    with pytest.raises(ValueError, match=r"frozen\('teacher'\) needs a client built with net="):
        fit(Teaches(module=Quadratic()), 1)


# --- steps and exposure


def closed_form(K, lr, rho):
    return lr * K if rho == 0 else lr * (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_exposure_is_how_far_a_unit_gradient_carries(rho, mu, nesterov):
    """E of baselines.md §1: by the closed form, and by a real optimizer on one scalar with gradient 1 − μ·E."""
    if nesterov and not rho:
        pytest.skip("Nesterov needs momentum")
    watch, lr, decay = Updates(), 0.1, 0.5
    optimizer = sgd(lr, rho, nesterov=nesterov, weight_decay=0.1)
    client = FedProx(mu=mu, optimizer=optimizer) if mu else FedAvg(optimizer=optimizer)
    fit(client, 2, toy_data((7, 0, 20)), callbacks=[watch], local_epochs=2, lr_decay=decay)
    for r, updates in enumerate(watch.rounds):
        assert updates[1].num_steps == updates[1].exposure == 0
        for client_id, steps in ((0, 4), (2, 8)):
            scalar = nn.Parameter(torch.zeros((), dtype=torch.float64))
            walk = torch.optim.SGD([scalar], lr=lr * decay**r, momentum=rho, nesterov=nesterov)
            for _ in range(steps):
                scalar.grad = -(1 - mu * scalar.detach())  # it walks up by E where the gradient points down
                walk.step()
            update = updates[client_id]
            assert update.num_steps == steps
            assert update.exposure == pytest.approx(scalar.item(), rel=1e-12)
            if not mu and not nesterov:
                assert update.exposure == pytest.approx(closed_form(steps, lr * decay**r, rho), rel=1e-12)
            if mu and not rho:
                assert update.exposure == pytest.approx((1 - (1 - lr * decay**r * mu) ** steps) / mu, rel=1e-12)


def test_exposure_follows_a_schedule_and_is_nan_where_it_is_not_defined():
    class Scheduled(FedAvg):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class TwoRates(FedAvg):
        def configure_optimizers(self):
            head, body = self.net.head.parameters(), self.net.body.parameters()
            return torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": body, "lr": 0.2}])

    watch, data = Updates(), toy_data((12,))
    fit(Scheduled(), 1, data, callbacks=[watch])
    assert watch.rounds[0][0].exposure == pytest.approx(0.1 + 0.05 + 0.025)
    for client in (TwoRates(), FedAvg(optimizer=partial(torch.optim.Adam, lr=0.01))):
        fit(client, 1, data, callbacks=[watch])
        update = watch.rounds[-1][0]
        assert update.num_steps == 3
        assert update.exposure != update.exposure


# --- what does not fit is refused


class Quadratic(pl.LightningModule):
    """A module without logits."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.w(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeedsProxy(FedAvg):
    needs = frozenset({"proxy"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedNTD(module=Quadratic()), r"FedNTD needs the logits.*module=Quadratic.*give it net="),
        (lambda: FederatedLoop(Scaffold(), aggregator=Median()), "Scaffold needs a ScaffoldAggregator, got Median"),
        (lambda: fit(NeedsProxy(), 1), "NeedsProxy needs the split 'proxy'.*no split 'proxy'"),
    ],
)
def test_what_a_method_needs_and_does_not_get_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


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
    empty, first = [("start", 1), ("end", 1)], [("start", 0), ("end", 0)]
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
            plain, shuffled = list(local.batches()), list(local.batches(epoch=1, batch_size=3, with_index=True))
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

        def finish(self, exchange):
            a, b = (torch.rand((), generator=self.server.generator("x")).item() for _ in range(2))
            assert a == b
            assert self.summed("nothing") == {}
            return super().finish(exchange)

    fit(Sees(), 2, toy_data((4, 0, 5)), aggregator=ServerSees())
