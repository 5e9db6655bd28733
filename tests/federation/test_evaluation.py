"""Evaluation leaves the model, and what the next round draws from, as they were."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import (
    ClientTable,
    FeatureProbe,
    ForgettingMonitor,
    GroupMetrics,
    LossLandscape,
    NeuronActivations,
    PersonalisedAccuracy,
)
from fl_lightning.nets import Perceptron
from tests.restless import HABITS, Restless, RestlessNet
from tests.toys import equal, folded, sgd, toy_data, trainer, weights_of
from tests.user_modules import Plain

SIZES = (7, 12, 5)


def data(**settings):
    return toy_data(SIZES, **settings)


def everything(loop):
    """Values, flags and modes of all that the client module consists of."""
    client = loop.client
    named = [*client.named_parameters(), *client.named_buffers(), *client.state_dict().items()]
    found = {name: value.detach().clone() for name, value in named if isinstance(value, torch.Tensor)}
    flags = {name: value.requires_grad for name, value in client.named_parameters()}
    return found, flags, {name: module.training for name, module in client.named_modules()}


def same(one, other):
    return equal(one[0], other[0]) and one[1:] == other[1:]


def fit(client, rounds=3, callbacks=None, run=None, more=None, **settings):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(client(), seed=1, **folded(settings))
    how = trainer(rounds, callbacks=callbacks, **(run or {}))
    how.fit(loop, datamodule=data(**(more or {})))
    return loop


def net(habit):
    return lambda: FedAvg(net=partial(RestlessNet, habit=habit), optimizer=sgd(0.1))


CLIENTS = {f"module {habit}": partial(Restless, habit) for habit in (*HABITS, "all")}
CLIENTS |= {f"net {habit}": net(habit) for habit in HABITS}


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_what_is_trained_does_not_depend_on_how_often_it_is_evaluated(client):
    never = fit(client, run={"limit_val_batches": 0})
    for run in {}, {"check_val_every_n_epoch": 2}, {"num_sanity_val_steps": 2}, {"inference_mode": False}:
        assert equal(weights_of(fit(client, run=run)), weights_of(never))


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_a_pass_of_its_own_leaves_everything(client, how):
    loop = fit(client, 1)
    run = trainer(1)
    before = everything(loop)
    for _ in range(2):
        getattr(run, how)(loop, datamodule=data(), **({} if how == "predict" else {"verbose": False}))
        assert same(everything(loop), before)


@pytest.mark.parametrize("habit", HABITS)
def test_no_client_is_evaluated_with_what_another_left(habit):
    """`local/alma` is the mean of what each client has by itself; training goes on as without."""

    def alma(**more):
        loop = fit(net(habit), 2, evaluate_clients_every=2, metrics={"accuracy": MulticlassAccuracy(3)}, **more)
        return loop, loop.round_metrics["local/alma"]

    loop, found = alma()
    assert equal(weights_of(loop), weights_of(fit(net(habit), 2)))
    evaluation = loop.evaluation
    server = loop.server
    own = []
    first = everything(loop)
    loop.data.setup("fit")
    for client_id in range(len(SIZES)):
        evaluation.data.view(client_id, 1)
        own.append(alone(loop, client_id))
        assert same(everything(loop), first)
    assert found == pytest.approx(sum(own) / len(own), abs=1e-12)
    assert server.num_clients == len(SIZES)


def alone(loop, client_id):
    """Accuracy of one client's own pass, in a copy of the module."""
    client = copy.deepcopy(loop.client).eval()
    hits = count = 0
    with torch.no_grad():
        for x, y in loop.data.view(client_id, 1).batches("test", batch_size=loop.data.eval_batch_size):
            hits = hits + int((client(x).argmax(1) == y).sum())
            count = count + len(y)
    return hits / count


def monitors(habit):
    # the gradients of a landscape are those of all parameters
    return [
        *([] if habit == "freeze" else [LossLandscape(every=1, repeats=1, grid=3, iterations=1)]),
        GroupMetrics({"first": [0, 1], "last": [2]}, {"accuracy": MulticlassAccuracy(3)}),
        ClientTable(),
        ForgettingMonitor(epochs=True),
        FeatureProbe(layer="net.head", plot=False, every=1),
        NeuronActivations(layer="net.head"),
        PersonalisedAccuracy(train=True),
    ]


@pytest.mark.parametrize("habit", HABITS)
def test_monitors_leave_the_clients_that_they_look_at(habit, tmp_path):
    watched = fit(net(habit), 2, monitors(habit), run={"default_root_dir": tmp_path})
    assert equal(weights_of(watched), weights_of(fit(net(habit), 2)))


class Swaps(Plain):
    """Evaluates other weights than it trains, put in and taken out in its own hooks."""

    def __init__(self, last):
        super().__init__()
        self.kept = [torch.full_like(p, 0.25) for p in self.parameters()]
        self.last = last
        self.seen = []

    def swap(self):
        for parameter, other in zip(self.parameters(), self.kept, strict=True):
            mine = parameter.detach().clone()
            parameter.data.copy_(other)
            other.copy_(mine)

    def on_validation_start(self):
        self.swap()

    def validation_step(self, batch, batch_idx):
        self.seen.append(float(self.net[0].weight.mean()))

    def on_validation_epoch_end(self):
        if self.last == "on_validation_epoch_end":
            self.swap()

    def on_validation_end(self):
        if self.last == "on_validation_end":
            self.swap()


@pytest.mark.parametrize("last", ["on_validation_epoch_end", "on_validation_end"])
def test_a_module_may_evaluate_other_weights_of_its_own(last):
    loop = fit(lambda: Swaps(last))
    assert loop.client.module.seen == pytest.approx([0.25] * 3)
    assert all(bool((other == 0.25).all()) for other in loop.client.module.kept)
    assert equal(weights_of(loop), weights_of(fit(lambda: Swaps(last), run={"limit_val_batches": 0})))


@pytest.mark.parametrize("last", ["on_validation_epoch_end", "on_validation_end"])
def test_a_monitor_of_the_global_model_comes_between_its_pass_and_the_last_hook(last):
    class Predicts(Swaps):
        def forward(self, x):
            return self.net(x)

    accuracy = {"accuracy": MulticlassAccuracy(3)}
    loop = fit(lambda: Predicts(last), callbacks=[GroupMetrics({"all": [0, 1, 2]}, accuracy)])
    assert loop.client.module.seen == pytest.approx([0.25] * 3)
    assert all(bool((other == 0.25).all()) for other in loop.client.module.kept)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_allocated_in_an_evaluation_is_gone_after_it(persistent):
    class Lazy(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", None, persistent=persistent)

        def training_step(self, batch, batch_idx):
            offset = 0 if self.offset is None else self.offset
            return F.cross_entropy(self.net(batch[0]) * (1 + offset), batch[1])

        def validation_step(self, batch, batch_idx):
            self.offset = torch.ones(()) if self.offset is None else self.offset + 1

    never = weights_of(fit(Lazy, run={"limit_val_batches": 0}))
    for run in {}, {"num_sanity_val_steps": 2}:
        assert equal(weights_of(fit(Lazy, run=run)), never)


CHANGES = {
    "parametrized": (lambda net: weight_norm(net[0]), "net.0.parametrizations.weight.original0"),
    "added": (lambda net: net.append(nn.Linear(3, 3)), "net.3.weight"),
    "removed": (lambda net: net.__setattr__("2", nn.Identity()), "net.2.weight"),
    "replaced": (lambda net: net.__setattr__("2", nn.Linear(8, 3)), "net.2.weight"),
}


@pytest.mark.parametrize("on_error", ["error", "skip"])
@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_an_evaluation_that_changes_what_parameters_there_are_is_refused_and_no_client_blamed(change, name, on_error):
    class Changes(Plain):
        def validation_step(self, batch, batch_idx):
            change(self.net)

    with pytest.raises(ValueError, match=rf"an evaluation must leave .* 'module\.{name}' was .* configure_model$"):
        fit(Changes, on_error=on_error)


def test_random_numbers_between_rounds_do_not_depend_on_evaluations():
    class Draws(pl.Callback):
        def __init__(self):
            self.drawn = []

        def on_train_epoch_start(self, trainer, pl_module):
            self.drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))

    class Noisy(Plain):
        def validation_step(self, batch, batch_idx):
            self.log("noise", torch.rand(()) + np.random.rand() + random.random())

    draws = []
    for run in {}, {"limit_val_batches": 0}, {"check_val_every_n_epoch": 2}:
        draws.append(Draws())
        fit(Noisy, callbacks=[draws[-1]], run=run)
    assert draws[0].drawn == draws[1].drawn == draws[2].drawn


def test_a_checkpoint_within_an_evaluation_has_the_model_before_it(tmp_path):
    class Saves(pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "one.ckpt")

    loop = fit(lambda: Restless("all"), 1, [Saves()])
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert equal(saved, weights_of(loop))


def test_a_metric_with_saved_states_is_computed_before_it_is_put_back():
    class Counts(Plain):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")
            self.accuracy.persistent(True)

        def validation_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.accuracy(logits, batch[1])
            self.log("val_acc", self.accuracy)
            self.log("by_hand", (logits.argmax(1) == batch[1]).float().mean())

    loop = fit(Counts, 2)
    assert loop.round_metrics["val_acc"] == pytest.approx(loop.round_metrics["by_hand"], abs=1e-6)


class Abandons(pl.Callback):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        raise RuntimeError("an evaluation is abandoned")


def test_an_abandoned_evaluation_leaves_the_generators_alone_when_it_is_collected():
    """It would put an old state back in the middle of what the next run draws."""
    loop = FederatedLoop(FedAvg(net=Perceptron), seed=1)
    with pytest.raises(RuntimeError, match="is abandoned"):
        trainer(1, callbacks=[Abandons()]).fit(loop, datamodule=toy_data())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    vars(loop.evaluation).clear()  # as if it were collected
    assert torch.equal(torch.rand(3), expected)
