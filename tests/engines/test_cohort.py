"""The cohort engine: what it gives is what the sequential engine gives, or a line says why it does not stack."""

import logging
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import NormClip
from fl_lightning.attacks.attack import attacked
from fl_lightning.attacks.weights import SignFlip
from fl_lightning.client.teacher import Teacher
from fl_lightning.engines.cohort import CohortEngine, ignores_module
from fl_lightning.engines.lockstep import Passes, lockstep
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.functional.state import clone
from fl_lightning.methods import MOON, SCAFFOLD, FedAvg, FedDyn, FedNTD, FedProx, FedRep, KnFu
from fl_lightning.methods.fednova import FedNovaAggregator
from fl_lightning.nets import FedNTDCNN, HeterogeneousNets, Perceptron
from fl_lightning.types import Phase
from tests.engines.test_sequential import SHAPE, jobs_of
from tests.test_contract import EXPORTED, NAMES, data_of, settings_of, some
from tests.toys import BatchNormNet, equal, fit, folded, sgd, toy_data

Net = partial(BatchNormNet, dropout=0.0)
RAGGED = (1, 17, 0, 41, 9, 10, 11, 17)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def nest(value):
    """Tensors and numbers of a store's record, as float64."""
    if isinstance(value, dict):
        return {name: nest(item) for name, item in value.items()}
    return torch.as_tensor(value, dtype=torch.float64) if isinstance(value, torch.Tensor | float | int) else value


def one_by_one_and_at_once(make, data=toy_data, chunk=4, rounds=2, precision="64-true", **settings):
    """Fit a loop twice and compare weights, server state, memory, personal entries and logged values.

    Returns:
        The loop that stacks.
    """
    alone, together = (
        fit(None, rounds, data(), loop=make(chunk=size, seed=3, **settings), precision=precision) for size in (1, chunk)
    )
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), **CLOSE)
    for client_id in range(alone.data.num_clients):
        torch.testing.assert_close(nest(together.store.record(client_id)), nest(alone.store.record(client_id)), **CLOSE)
    assert together.round_metrics == pytest.approx(alone.round_metrics, rel=1e-9, abs=1e-9)
    return together


def looped(client, **fixed):
    def make(**settings):
        torch.manual_seed(0)  # for the first weights of a user's module
        return FederatedLoop(client(), **folded({**fixed, **settings}))

    return make


def fedavg(net=Net, optimizer=None):
    return FedAvg(net=net, optimizer=optimizer or sgd())


# --- the engine by itself


def test_the_engine_trains_clients_without_a_trainer_and_a_loop():
    results = {}
    for kind, more in ((SequentialEngine, {}), (CohortEngine, {"chunk": 3})):
        torch.manual_seed(0)
        client = FedProx(mu=0.5, net=Net, optimizer=sgd(), **SHAPE)
        engine = kind(client.double(), LocalSettings(local_epochs=2, seed=3), **more)
        jobs = jobs_of(engine, toy_data((7, 0, 12, 5), dtype=torch.float64))
        results[kind] = [
            one._replace(update=replace(one.update, weights=clone(one.update.weights)))
            for one in engine.run("train", jobs)
        ]
    assert engine.why_not() is None
    for alone, together in zip(*results.values(), strict=True):
        assert (alone.update.client_id, alone.update.num_samples) == (
            together.update.client_id,
            together.update.num_samples,
        )
        assert (alone.update.num_steps, alone.update.accumulated_lr) == (
            together.update.num_steps,
            together.update.accumulated_lr,
        )
        torch.testing.assert_close(together.update.weights, alone.update.weights, **CLOSE)
        (_, own), (_, other) = alone.logged.drain(), together.logged.drain()
        assert own.keys() == other.keys()
        for name, (kind, pairs) in own.items():
            assert other[name][0] == kind
            torch.testing.assert_close(torch.tensor(other[name][1]), torch.tensor(pairs), **CLOSE)


@pytest.mark.parametrize("shuffle", [False, True])
def test_last_batches_are_left_out_as_one_by_one(shuffle):
    steps = []
    for kind, more in ((SequentialEngine, {}), (CohortEngine, {"chunk": 3})):
        torch.manual_seed(0)
        client = fedavg(partial(Perceptron, hidden=(4,)))
        client.build(3, (4,))
        engine = kind(client, LocalSettings(local_epochs=2), **more)
        jobs = list(jobs_of(engine, toy_data((7, 8, 6, 13), shuffle=shuffle)))
        for job in jobs:
            job.data.drop_last = True
        steps.append([(one.update.num_steps, clone(one.update.weights)) for one in engine.run("train", jobs)])
        assert kind is SequentialEngine or engine.why_not() is None
    for (number, weights), (same, close) in zip(*steps, strict=True):
        assert number == same
        torch.testing.assert_close(close, weights)


@pytest.mark.parametrize("away", [False, True])
def test_clients_are_put_into_the_module_for_callbacks_that_look_at_it(away):
    seen = {}

    def on_client_end(self, trainer, loop, update):
        live = loop.global_weights.live(loop.global_weights.shared)
        seen[update.client_id] = equal(clone(live), clone(update.weights))

    hook = ignores_module(on_client_end) if away else on_client_end
    callback = type("Own", (pl.Callback,), {"on_client_end": hook})()
    fit(None, 1, toy_data((8, 8)), loop=looped(fedavg)(chunk=2, seed=3), callbacks=[callback])
    assert seen == dict.fromkeys((0, 1), not away)


def sloped_fedavg():
    client = FedAvg(net=Perceptron, optimizer=sgd(), **SHAPE)
    client.net.body[2] = nn.LeakyReLU(0.1)
    return client


def test_what_a_callback_changes_between_two_epochs_counts_at_once():
    class Steepens(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            loop.client.net.body[2].negative_slope = 0.1

        def on_client_epoch_end(self, trainer, loop, client_id, epoch):
            loop.client.net.body[2].negative_slope = 0.1 * (epoch + 2)

    alone, together = (
        fit(
            *(None, 2, toy_data((8, 8))),
            loop=looped(sloped_fedavg, local_epochs=3)(chunk=chunk, seed=3),
            callbacks=[Steepens()],
            precision="64-true",
        )
        for chunk in (1, 2)
    )
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), **CLOSE)


class Shares(FedAvg):
    """All clients of a round have the same samples, one tensor."""

    made = -1, None

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.validating:
            return batch
        if self.made[0] != self.trainer.current_epoch:
            generator = torch.Generator().manual_seed(self.trainer.current_epoch)
            self.made = self.trainer.current_epoch, torch.randn(batch[0].shape, generator=generator).double()
        return self.made[1], batch[1]


def test_samples_that_clients_share_are_those_of_the_step():
    def make(chunk, **settings):
        return looped(partial(Shares, net=Perceptron, optimizer=sgd()))(chunk=chunk, **settings)

    one_by_one_and_at_once(make, partial(toy_data, (5, 5)), rounds=3)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (9, 4, 7)], ids=["even", "ragged"])
def test_a_teachers_logits_are_computed_in_the_first_epoch_only(sizes, monkeypatch):
    calls = Counter()

    def counted(self, x):
        calls[chunk] += 1
        return compute(self, x)

    compute = Teacher._logits
    chunk = 1
    monkeypatch.setattr(Teacher, "_logits", counted)
    make = looped(partial(FedNTD, net=partial(Perceptron, hidden=(4,)), optimizer=sgd()), local_epochs=3)
    found = []
    for chunk in (1, 3):
        found.append(fit(None, 2, toy_data(sizes), loop=make(chunk=chunk, seed=3), precision="64-true"))
    torch.testing.assert_close(found[1].state_dict(), found[0].state_dict(), **CLOSE)
    assert found[1].round_metrics == pytest.approx(found[0].round_metrics, rel=1e-9, abs=1e-9)
    batches = sum(-(-size // 5) for size in sizes)
    assert calls[1] == 2 * batches  # in each of two rounds once
    assert calls[3] == 2 * (2 if len(set(sizes)) == 1 else 4)  # full batches together, then the tails by size


@pytest.mark.parametrize("chunk", [1, 3])
def test_with_last_batches_left_out_the_teacher_sees_every_sample_anew(chunk):
    """Another epoch leaves other samples out: their logits were never computed."""
    weights = []
    for cached in (True, False):
        client = FedNTD(net=partial(Perceptron, hidden=(4,)), optimizer=sgd(), **SHAPE)
        torch.manual_seed(0)
        for parameter in client.parameters():
            torch.nn.init.normal_(parameter)
        engine = CohortEngine(client, LocalSettings(local_epochs=4), chunk=chunk)
        jobs = list(jobs_of(engine, toy_data((7, 8, 9))))
        for job in jobs:
            job.data.drop_last = True
            job.data.augments = lambda split="train", own=cached: not own
        weights.append([clone(one.update.weights) for one in engine.run("train", jobs)])
    torch.testing.assert_close(*weights)


def test_afterwards_the_module_is_as_any_other():
    for broken in (False, True):
        client = fedavg()
        client.build(3, (4,))
        engine = CohortEngine(client, chunk=2)
        before = set(vars(client))
        modes = [module.training for module in client.modules()]
        running = engine.run("train", jobs_of(engine, toy_data((7, 5, 6))))
        next(running)
        running.close() if broken else list(running)
        assert set(vars(client)) == before
        assert [module.training for module in client.modules()] == modes
        assert all(parameter.grad is None for parameter in client.parameters())


def test_jobs_are_drawn_a_stack_at_a_time():
    engine = CohortEngine(fedavg(), chunk=2)
    drawn = []
    engine.client.build(3, (4,))
    engine = CohortEngine(engine.client, chunk=2)

    def watched():
        for job in jobs_of(engine, toy_data((7, 5, 6, 8, 9))):
            drawn.append(job.client_id)
            yield job

    seen = [(result.update.client_id, len(drawn)) for result in engine.run("train", watched())]
    assert seen == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


@pytest.mark.parametrize("limit", [None, 1, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4, "full"])
def test_in_lockstep_every_client_takes_its_own_batches_in_order(batch_size, limit):
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(0, 20, (9,), generator=generator).tolist()
    cuts = [max(1, n) if batch_size == "full" else batch_size for n in sizes]
    passes = sorted(Passes.over(n, cut, 2, drops_single=False) for n, cut in zip(sizes, cuts, strict=True))
    taken = [[] for _ in passes]
    for epoch in range(2):
        for rows, index in lockstep([own.of_epoch(epoch, limit) for own in passes]):
            widths = set()
            for row in range(rows.start, rows.stop):
                own = passes[row]
                taken[row].append((epoch, index))
                widths.add(own.batch_size if index < own.full else own.tail)
            assert len(widths) == 1
    for own, steps in zip(passes, taken, strict=True):
        assert steps == [(epoch, index) for epoch in range(2) for index in range(own.steps)][:limit]


# --- the same numbers


def stacks(name):
    return getattr(EXPORTED[name], "stackable", False) if name in EXPORTED else False


@pytest.mark.parametrize("name", sorted(filter(stacks, NAMES)) + some(sorted(set(NAMES) - set(filter(stacks, NAMES)))))
def test_every_method_gives_the_same_at_once_or_says_why_not(name):
    more = {"local_epochs": 2, "evaluate_clients_every": 1}

    def make(**settings):
        return FederatedLoop(**settings_of(name, net=Net, optimizer=sgd()), **folded(settings), **folded(more))

    declared = vars(type(make().client)).get("stackable")
    data = partial(data_of, sizes=(7, 0, 9, 1, 10, 10))
    engine = one_by_one_and_at_once(make, data, rounds=2 if declared else 1).engine
    # An empty buffer of Replay must not reach the BatchNorm of the net.
    assert (engine.why_not() is None) == (declared and name not in ("SAM", "Replay")), engine.why_not()
    assert engine.why_not() is None or len(engine.why_not()) > 10


OPTIMIZERS = {
    "SGD": sgd(),
    "nesterov": sgd(nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "fused": sgd(fused=True),  # one by one; a stack is stepped without
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1, lr_decay=0.01),
}


def optimizer(name):
    """Slow: those whose steps another one of its family takes, too."""
    return pytest.param(name, marks=[pytest.mark.slow] * (name in ("SGD", "Adam", "Adagrad")))


@pytest.mark.parametrize("sizes", [pytest.param((10,) * 6, marks=pytest.mark.slow), RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("name", [optimizer(name) for name in OPTIMIZERS])
def test_every_optimizer_steps_each_client_as_it_would_alone(name, sizes):
    """Without BatchNorm, before which a bias has a gradient of rounding errors, which Adam would make steps of."""
    client = partial(fedavg, net=partial(Perceptron, hidden=(8,)), optimizer=OPTIMIZERS[name])
    loop = one_by_one_and_at_once(looped(client, local_epochs=2), partial(toy_data, sizes), rounds=2)
    assert loop.engine.why_not() is None


@pytest.mark.parametrize(
    "settings",
    [
        {"local_epochs": 3},
        {"local_epochs": [1, 2, 3, 0, 2, 1, 2, 3]},
        {"local_epochs": 3, "max_local_steps": 5},
        {"clip_norm": 0.3, "lr_decay": 0.5},
        {"personal": "net.head.*"},
        {"weighting": "uniform", "transforms": NormClip(0.1)},
        {"server_optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9)},
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("kind", [FedAvg, pytest.param(FedDyn, marks=pytest.mark.slow)])  # every method: see above
def test_ragged_clients_give_the_same_whatever_the_settings(settings, kind):
    if kind is FedDyn and "server_optimizer" in settings:
        pytest.skip("is refused")
    loop = one_by_one_and_at_once(looped(lambda: kind(net=Net, optimizer=sgd()), **settings), partial(toy_data, RAGGED))
    assert loop.engine.why_not() is None


Own = type("Own", (pl.Callback,), {})


@pytest.mark.parametrize(
    ("net", "callbacks", "times"),
    [
        (partial(Perceptron, hidden=(8,)), [], 1),
        (partial(Perceptron, hidden=(8,)), [ignores_module(type("Apart", (pl.Callback,), {}))()], 1),
        (partial(Perceptron, hidden=(8,)), [Own()], 3),
        (Net, [], 3),
    ],
    ids=["known", "apart", "callback", "net"],
)
def test_what_was_stacked_is_examined_again_only_where_foreign_code_runs(net, callbacks, times, monkeypatch):
    asked = []
    monkeypatch.setattr("fl_lightning.engines.cohort.why_not", lambda client, **given: asked.append(client))
    fit(None, 3, toy_data(), loop=FederatedLoop(fedavg(net), chunk=4, seed=3), callbacks=callbacks)
    assert len(asked) == times


class HooksLater(pl.Callback):
    """Doubles the gradients of a layer from the second round on."""

    def on_train_epoch_start(self, trainer, loop):
        if trainer.current_epoch == 1:
            loop.client.net.head.register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))


class DropsLater(pl.Callback):
    """Adds a dropout from the second round on."""

    def on_train_epoch_start(self, trainer, loop):
        if trainer.current_epoch == 1:
            loop.client.net.body.append(nn.Dropout(0.5))


def hooks_later():
    return pl.callbacks.LambdaCallback(on_train_epoch_start=partial(HooksLater.on_train_epoch_start, None))


@pytest.mark.parametrize("changes", [HooksLater, DropsLater, hooks_later])
def test_what_a_callback_does_to_the_module_after_stacked_rounds_counts(changes):
    alone, together = (
        fit(
            *(None, 2, toy_data((8, 8))),
            loop=looped(partial(fedavg, partial(Perceptron, hidden=(4,))))(chunk=chunk, seed=3),
            callbacks=[changes()],
            precision="64-true",
        )
        for chunk in (1, 2)
    )
    assert together.engine.why_not() is not None
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), **CLOSE)


class OddNet(nn.Module):
    """A net whose parameters or gradients do not lie in memory as most do, or are none."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(8, *input_shape).t())
        self.bias = nn.Parameter(torch.zeros(8))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.zeros(3, 2))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x):
        hidden = torch.tanh(x @ self.transposed + self.bias) * self.scale
        hidden = torch.tanh(self.convolution(hidden.unsqueeze(1))).transpose(1, 2).flatten(1)
        return self.head(hidden) + self.empty.sum()


@pytest.mark.parametrize(
    "settings",
    [{"amsgrad": True, "weight_decay": 0.1, "maximize": True}, {"lr": torch.tensor(0.01)}, {"foreach": True}],
    ids=", ".join,
)
def test_adam_steps_parameters_and_gradients_of_any_layout(settings):
    client = partial(fedavg, OddNet, partial(torch.optim.Adam, **{"lr": 0.01, **settings}))
    loop = one_by_one_and_at_once(looped(client, clip_norm=0.5), partial(toy_data, (9, 4, 7, 7)))
    assert loop.engine.why_not() is None


@pytest.mark.parametrize("batch_size", [4, "full"])
@pytest.mark.parametrize("net", [BatchNormNet, partial(BatchNormNet, running=False)])
def test_batch_norm_has_the_statistics_of_each_client(net, batch_size):
    sizes = RAGGED if net is BatchNormNet else RAGGED[1:]  # one sample has no statistics of its own
    data = partial(toy_data, sizes, batch_size=batch_size)
    loop = one_by_one_and_at_once(looped(partial(fedavg, net=partial(net, dropout=0.0)), local_epochs=2), data)
    assert loop.engine.why_not() is None


class Scheduled(pl.LightningModule):
    """Two schedules, a parameter that no loss depends on, a buffer that is assigned anew, a number logged."""

    def __init__(self, interval="epoch", frequency=1):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("last", torch.zeros(3))
        self.interval = interval
        self.frequency = frequency

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.last = 0.5 * self.last + logits.detach().mean(0)
        loss = nn.functional.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "index": float(batch_idx)}, on_epoch=True)
        self.log("worst", loss, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        settings = {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": settings}


@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_users_own_module_stacks_where_it_is_asked_for(interval, frequency):
    make = looped(partial(Scheduled, interval, frequency), local_epochs=2, lr_decay=0.9)
    loop = one_by_one_and_at_once(make, partial(toy_data, RAGGED))
    assert loop.engine.why_not() is None
    assert loop.client.module.unused.eq(1).all()  # no weight decay: its gradient is None
    auto = fit(None, 1, loop=make(chunk="auto", seed=3))
    assert "ask for it by model.chunk=K" in auto.engine.why_not()


class Phased(FedAvg):
    """Every option of a phase that is the same for all clients, in two exchanges."""

    exchanges = ("first", "second")

    def phases(self, exchange):
        if exchange == "second":
            return [Phase(lr=0.01), Phase()]
        return (
            Phase(epochs=2, trains=("net.head.*",), lr=0.2),
            Phase("transfer", epochs=1, batch_size=4, with_index=True, counts=False),
            Phase(batch_size="full", lr=0.05),
            Phase(),
        )

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], torch.Tensor):
            return self.local_loss(batch, batch_idx)
        batch, positions = batch
        return self.local_loss(batch, batch_idx) * (1 + positions.double().mean())


@pytest.mark.parametrize("settings", [{}, {"max_local_steps": 6, "clip_norm": 0.2}, {"local_epochs": [1, 2, 0, 3, 1]}])
def test_phases_and_exchanges_go_on_where_the_one_before_ended(settings):
    data = partial(data_of, sizes=(7, 12, 0, 9, 16))
    loop = one_by_one_and_at_once(looped(lambda: Phased(net=Net, optimizer=sgd()), **settings), data)
    assert loop.engine.why_not() is None


def test_tied_weights_are_one():
    class Tied(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)
            self.second = self.first

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.head(self.second(self.first(x).relu())), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert one_by_one_and_at_once(looped(Tied)).engine.why_not() is None


def test_a_client_whose_update_is_not_finite_is_skipped():
    data = toy_data((10, 10, 12, 7))
    data.source.train[0][12] = float("inf")
    loop = one_by_one_and_at_once(looped(fedavg, nonfinite="skip"), lambda: data)
    assert [fault.client_id for fault in loop.skipped] == [1]


def test_callbacks_see_every_trained_client_in_the_module():
    class Watch(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_client_start(self, trainer, loop, client_id):
            self.seen.append((client_id, clone(loop.client.state_dict())))

        def on_client_end(self, trainer, loop, update):
            own = dict(loop.client.state_dict())
            assert equal(own, dict(update.weights))
            assert loop.client.num_steps == update.num_steps
            self.seen.append((update.client_id, clone(own)))

    seen = []
    for chunk in (1, 3):
        watch = Watch()
        fit(fedavg(), 1, chunk=chunk, callbacks=[watch], precision="64-true")
        seen.append(sorted(watch.seen, key=lambda one: one[0]))
    for (a, one), (b, other) in zip(*seen, strict=True):
        assert a == b
        torch.testing.assert_close(one, other, **CLOSE)


class Epochs(pl.Callback):
    """Notes each client as it is after each of its epochs."""

    def __init__(self):
        self.seen = []

    def on_client_epoch_end(self, trainer, loop, client_id, epoch):
        assert loop.client.context.client_id == client_id
        own = clone(loop.client.state_dict())
        self.seen.append(
            ((trainer.current_epoch, client_id, epoch), loop.client.num_steps, loop.client.accumulated_lr, own)
        )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(FedAvg, {}), (FedAvg, {"max_local_steps": 3}), (SCAFFOLD, {}), pytest.param(FedRep, {}, marks=pytest.mark.slow)],
)
def test_callbacks_see_every_client_of_a_stack_after_each_of_its_epochs(kind, settings):
    """Without the callback, the stack is the same."""

    def run(chunk, *callbacks):
        client = kind(net=Net, optimizer=sgd(momentum=0.0))
        more = {"local_epochs": 2, "precision": "64-true", "chunk": chunk, **settings}
        return fit(client, 2, toy_data((10, 7, 12, 10)), callbacks=list(callbacks), **more)

    one = Epochs()
    other = Epochs()
    run(1, one)
    stacked = run(3, other)
    bare = run(3)
    assert stacked.engine.why_not() is None
    assert equal(dict(stacked.state_dict()), dict(bare.state_dict()))
    assert stacked.round_metrics == bare.round_metrics
    assert len(one.seen) == len(other.seen) > 0
    for (*a, weights), (*b, expected) in zip(*(sorted(w.seen, key=lambda s: s[0]) for w in (other, one)), strict=True):
        assert a[:2] == b[:2]
        assert a[2] == pytest.approx(b[2], nan_ok=True)
        torch.testing.assert_close(weights, expected, **CLOSE)


def test_phases_that_train_no_shared_parameter_leave_the_exposure():
    """FedNova normalises by it: heads are trained first, and do not travel."""
    make = looped(partial(FedRep, net=Net, optimizer=sgd(momentum=0.0)), aggregator=FedNovaAggregator())
    assert one_by_one_and_at_once(make).engine.why_not() is None


class BranchesLate(FedAvg):
    """Its second epoch cannot be stacked."""

    stackable = True

    def phases(self, exchange):
        return [Phase(epochs=1), Phase(epochs=1, batch_size=3)]

    def training_step(self, batch, batch_idx):
        loss = self.local_loss(batch, batch_idx)
        return loss if len(batch[1]) != 3 else loss * (1.0 if loss.item() > 0 else 2.0)


def test_epochs_are_told_once_where_a_stack_fails_after_the_first():
    watch = Epochs()
    loop = fit(BranchesLate(net=Net, optimizer=sgd()), 2, toy_data((9, 9, 9)), chunk=3, callbacks=[watch])
    assert "item()" in loop.engine.why_not()
    told = [name for name, *_ in watch.seen]
    # each phase numbers its epochs; of the first round the stack has told the first ones
    assert told[:6] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)] * 2
    assert told[6:] == [(1, i, 0) for i in (0, 0, 1, 1, 2, 2)]


def test_bf16_mixed_follows_the_one_by_one():
    rows = [fit(fedavg(), 2, chunk=chunk, precision="bf16-mixed") for chunk in (1, 5)]
    assert rows[1].engine.why_not() is None
    assert rows[1].round_metrics == pytest.approx(rows[0].round_metrics, rel=1e-2, abs=1e-2)


@pytest.mark.parametrize("kind", [FedNTD, FedDyn])
def test_a_run_that_is_continued_is_the_uninterrupted_one(tmp_path, kind):
    def run(rounds, ckpt_path=None):
        loop = fit(kind(net=Net, optimizer=sgd()), rounds, ckpt_path=ckpt_path, chunk=3, personal="net.head.*")
        assert (loop.engine.why_not() is None) == (kind is FedDyn)  # teachers differ in their heads
        return loop

    whole = run(4)
    run(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = run(4, tmp_path / "half.ckpt")
    assert equal(dict(whole.state_dict()), dict(again.state_dict()))
    assert whole.round_metrics == again.round_metrics


# --- reasons against it


class Undeclared(FedAvg):
    """Says nothing."""


class Hooked(Undeclared):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Branches(Undeclared):
    def training_step(self, batch, batch_idx):
        loss = self.local_loss(batch, batch_idx)
        return loss if loss.item() < 100 else 0 * loss


class Remembers(Undeclared):
    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * self.memory.get("factor", 1.0)


class Counts(Undeclared):
    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * (1 + self.num_steps)


class Favours(Undeclared):
    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * (1 + (self.context.client_id == 2))


class Scales(Undeclared):
    def receive(self, broadcast, local):
        self.factor = 1 / (1 + local.client_id)

    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * self.factor


class Between(Undeclared):
    def phases(self, exchange):
        yield Phase()


class Some(Undeclared):
    def phases(self, exchange):
        return (Phase(indices=torch.arange(2)),)


class Uneven(Undeclared):
    def phases(self, exchange):
        return (Phase(epochs=1 + self.context.client_id),)


def malicious_fedavg(**base):
    return attacked(FedAvg(**base), SignFlip, [1])


def with_a_hook_of_a_parameter(**base):
    torch.manual_seed(0)
    client = FedAvg(**base, **SHAPE)
    client.net.head.weight.register_hook(lambda gradient: 0.1 * gradient)
    return client


def with_a_backward_hook(**base):
    torch.manual_seed(0)
    client = FedAvg(**base, **SHAPE)
    client.net.head.register_full_backward_hook(lambda module, given, gradients: (0.1 * given[0],))
    return client


def with_a_frozen_parameter(**base):
    torch.manual_seed(0)
    client = FedAvg(**base, **SHAPE)
    client.net.head.bias.requires_grad_(False)
    return client


class Draws(Undeclared):
    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * torch.rand(())


class Measures(Undeclared):
    def __init__(self, **base):
        super().__init__(**base)
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return self.local_loss(batch, batch_idx)


@pytest.mark.parametrize(
    ("reason", "client", "settings"),
    [
        ("Dropout would draw other numbers", {"net": BatchNormNet}, {}),
        ("says stackable = False", {"kind": MOON}, {}),
        ("on_train_batch_end is called for one client at a time", {"kind": Hooked}, {}),
        (r"item\(\)", {"kind": Branches}, {}),
        ("reads client_id, memory", {"kind": Remembers}, {}),
        ("reads client_id, memory", {"kind": Counts}, {}),
        ("reads client_id, memory", {"kind": Favours}, {}),
        ("different values of factor", {"kind": Scales}, {}),
        ("phases run code between", {"kind": Between}, {}),
        ("a phase has indices", {"kind": Some}, {}),
        ("different phases", {"kind": Uneven}, {}),
        ("SignFlip says stackable = False|Attack says stackable = False", {"kind": malicious_fedavg}, {}),
        ("random", {"kind": Draws}, {}),
        ("a hook of the parameter 'net.head.weight'", {"kind": with_a_hook_of_a_parameter}, {}),
        ("a backward hook of Linear", {"kind": with_a_backward_hook}, {}),
        ("the parameter 'net.head.bias' is not trained", {"kind": with_a_frozen_parameter}, {}),
        ("MulticlassAccuracy counts", {"kind": Measures}, {}),
        ("NAdam is not known", {"optimizer": torch.optim.NAdam}, {}),
        ("accumulate_grad_batches is 2", {}, {"accumulate_grad_batches": 2}),
        ("client_timeout", {}, {"client_timeout": 100.0}),
        ("on_error=skip", {}, {"on_error": "skip"}),
        ("does not say stackable", {"kind": Undeclared}, {"chunk": "auto"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_said_once(reason, client, settings, caplog):
    """Its bits are those of `chunk: 1`."""
    caplog.set_level(logging.INFO)

    def run(chunk):
        made = {"kind": FedAvg, "net": Net, "optimizer": sgd(), **client}
        return fit(made.pop("kind")(**made), 2, **{"chunk": chunk, **settings, **({} if chunk > 1 else {"chunk": 1})})

    together = run(3)
    alone = run(1)
    (said,) = [record.message for record in caplog.records if "one after the other" in record.message]
    assert re.search(reason, said)
    assert equal(dict(together.state_dict()), dict(alone.state_dict()))
    assert together.round_metrics == alone.round_metrics


@pytest.mark.parametrize("chunk", [2, "auto"])
def test_what_a_callback_sets_for_each_client_counts_for_this_one(chunk):
    class Coefficients(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            loop.client.mu = 5.0 * client_id

    alone, together = (
        fit(
            *(None, 2, toy_data((8, 8, 8, 8))),
            loop=looped(partial(FedProx, mu=1.0, net=Perceptron, optimizer=sgd()))(chunk=size, seed=3),
            callbacks=[Coefficients()],
        )
        for size in (1, chunk)
    )
    assert equal(alone.state_dict(), together.state_dict())


def test_clients_with_different_nets_are_trained_one_by_one():
    client = KnFu(net=partial(HeterogeneousNets, nets=[Net, Net]), **SHAPE)
    assert "different nets" in CohortEngine(client, chunk=2).why_not()


def test_auto_leaves_convolutions_on_a_cpu_alone():
    client = FedAvg(net=FedNTDCNN, num_classes=3, input_shape=(3, 32, 32))
    assert "Conv2d is slower" in CohortEngine(client, chunk="auto").why_not()
    assert CohortEngine(client, chunk=2).why_not() is None


def test_auto_stacks_clients_that_step_together_only(caplog):
    caplog.set_level(logging.INFO)
    fit(fedavg(), 1, toy_data((10,) * 6), chunk="auto")
    assert "one after the other" not in caplog.text
    together, alone = (fit(fedavg(), 1, toy_data((7, 11, 16, 4, 23)), chunk=chunk) for chunk in ("auto", 1))
    assert "few can step together" in caplog.text
    assert equal(dict(together.state_dict()), dict(alone.state_dict()))


def test_by_default_and_with_chunk_1_the_engine_is_the_sequential_one():
    assert type(fit(fedavg(), 1).engine) is SequentialEngine
    assert type(fit(fedavg(), 1, chunk="auto").engine) is CohortEngine
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        fit(fedavg(), 1, chunk=0)


def test_a_stack_whose_clients_differ_is_trained_one_by_one(caplog):
    """Also after others; the later ones are stacked again."""
    caplog.set_level(logging.INFO)

    class Differs(Undeclared):
        def receive(self, broadcast, local):
            self.memory["rounds"] = self.memory.get("rounds", 0) + 1
            if broadcast.round_idx == 1:
                self.round_buffer("own", torch.ones(1 + local.client_id % 2))

        def training_step(self, batch, batch_idx):
            return self.local_loss(batch, batch_idx) * (self.round["own"].sum() if self.round else 1.0)

    loop = one_by_one_and_at_once(looped(lambda: Differs(net=Net, optimizer=sgd())), rounds=4)
    assert loop.store.record(0)[0] == {"rounds": 4}
    assert loop.engine.why_not() is None
    assert "its clients have tensors of different shapes" in caplog.text


def test_an_error_in_the_first_stack_names_its_client():
    class Fails(Undeclared):
        def receive(self, broadcast, local):
            if local.client_id == 2:
                raise ValueError("no such thing")

    with pytest.raises(RuntimeError, match="client 2 raised ValueError in round 0: no such thing"):
        fit(Fails(net=Net), 1, chunk=3)


def test_an_error_in_a_later_stack_names_its_clients():
    class Fails(Undeclared):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1:
                raise ValueError("no such thing")
            return self.local_loss(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"clients 0, 1, 2, trained at once in round 1, raised ValueError: no such"):
        fit(Fails(net=Net), 2, chunk=3)
