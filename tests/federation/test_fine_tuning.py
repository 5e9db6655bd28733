"""`model.fine_tuning`: what a client would deploy is trained on its own samples before a second test."""

import copy
import csv
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from torch import nn

from fl_lightning import ClientModule, FederatedLoop, FineTuning, methods
from fl_lightning.data import FederatedDataModule
from fl_lightning.methods import SCAFFOLD, Ditto, FedAvg, FedBN, KnFu, Local, dp_sgd
from fl_lightning.nets import HeterogeneousNets, Perceptron
from fl_lightning.types import Phase
from tests.commands import TINY, refusal, say
from tests.federation.test_clients_by_own_steps import CLIENTS, QUIET, LogsMetrics, plain, regression_data
from tests.federation.test_evaluated_model import all_classes
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of
from tests.user_data import Sensor

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = [kind for kind in all_classes(ClientModule) if kind.__name__ in methods.__all__]
TUNED = FineTuning(epochs=2, lr=0.2)


def client_of(kind):
    """A client of a method with a net that has BatchNorm and dropout."""
    try:
        return kind(net=BatchNormNet, optimizer=sgd())
    except (TypeError, ValueError) as error:
        pytest.skip(f"{kind.__name__} has arguments that must be given: {error}")


def data_of(**settings):
    return toy_data((16, 11, 0, 3, 14), transfer_size=9, proxy_size=6, **settings)


def is_tuned(name):
    return "/tuned/" in name


def untuned(row):
    return {name: value for name, value in row.items() if not is_tuned(name)}


def same_row(one, other):
    """Equality in which NaN equals NaN."""
    return {name: repr(value) for name, value in one.items()} == {name: repr(value) for name, value in other.items()}


class States(Callback):
    """Takes the states of the global generators at the end of each round."""

    def __init__(self):
        self.states = []

    def on_train_epoch_end(self, trainer, loop):
        self.states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))


# --- laws of all methods ---


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_training_is_the_same_with_and_without(kind):
    runs = []
    for settings in ({}, {"fine_tuning": TUNED}):
        states = States()
        loop = fit(
            client_of(kind),
            rounds=2,
            data=data_of(participation=0.7),
            evaluate_clients_every=1,
            callbacks=[states],
            **settings,
        )
        runs.append((loop, states.states))
    (without, states_without), (tuned, states_tuned) = runs
    assert equal(weights_of(without), weights_of(tuned))
    assert same_row(without.round_metrics, untuned(tuned.round_metrics))
    assert states_without == states_tuned
    assert "local/tuned/alma" in tuned.round_metrics
    assert list(without.recorder.client_values) == list(tuned.recorder.client_values)


class AsksWhetherItIsTrained(LogsMetrics):
    """It learns nothing where its Trainer says that it is not trained."""

    def training_step(self, batch, batch_idx):
        stage = self.trainer.state.stage.value
        is_fit = self.trainer.state.fn.value == "fit" and stage == "train"
        says_so = self.trainer.training and not self.trainer.evaluating and not self.trainer.testing
        return super().training_step(batch, batch_idx) * (is_fit and says_so)


def test_a_module_that_asks_its_stage_is_fine_tuned_in_a_test_as_in_a_fit():
    loop = FederatedLoop(FedAvg(module=AsksWhetherItIsTrained()), seed=1, evaluate_clients_every=1, fine_tuning=TUNED)
    runner = Trainer(max_epochs=1, **QUIET)
    runner.fit(loop, datamodule=regression_data())
    row = loop.round_metrics
    model = loop.client_model(1, tuned=True)
    assert not torch.equal(model.layer.weight, loop.client.module.layer.weight)
    for verb in ("validate", "test"):
        (found,) = getattr(runner, verb)(loop, datamodule=regression_data(), verbose=False)
        tuned = {name: value for name, value in found.items() if is_tuned(name)}
        assert tuned
        assert tuned == pytest.approx({name: row[name] for name in tuned})
        assert tuned["local/tuned/val/mae"] != found["local/val/mae"]


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_a_test_has_the_values_of_the_last_row(kind):
    loop = fit(client_of(kind), rounds=2, data=data_of(unseen=[4]), evaluate_clients_every=1, fine_tuning=TUNED)
    row = {name: value for name, value in loop.round_metrics.items() if name.startswith(("local/", "unseen/"))}
    assert {"local/alma", "local/tuned/alma", "unseen/alma", "unseen/tuned/alma"} <= row.keys()
    for function in ("test", "validate"):
        run = Trainer(**QUIET)
        (found,) = getattr(run, function)(loop, datamodule=loop.data, verbose=False)
        assert {name: found[name] for name in row} == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_the_tuned_model_comes_out(kind):
    loop = fit(client_of(kind), rounds=1, data=data_of(unseen=[4]), evaluate_clients_every=1, fine_tuning=TUNED)
    before = weights_of(loop)
    for client_id, values in loop.recorder.client_values.items():
        model = loop.client_model(client_id, tuned=True)
        x, y = loop.data.view(client_id, 0).all("test")
        with torch.no_grad():
            right = model.eval()(x).argmax(1) == y
        assert float(right.double().mean()) == pytest.approx(values["local/tuned/alma"])
    assert equal(before, weights_of(loop))
    assert all(part.training for part in loop.client.modules())


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD], ids=lambda kind: kind.__name__)
def test_the_value_depends_on_the_model_and_not_on_the_round(kind):
    rows = []

    class Rows(Callback):
        def on_train_epoch_end(self, trainer, loop):
            rows.append({name: value for name, value in loop.round_metrics.items() if is_tuned(name)})

    client = kind(optimizer=sgd(lr=0.0))
    fit(client, rounds=2, evaluate_clients_every=1, fine_tuning=FineTuning(lr=0.3), callbacks=[Rows()])
    assert rows[0]
    assert rows[0] == rows[1]


# --- what is done ---


class Fixed(LightningModule):
    """A linear regression whose fine-tuning a few lines repeat."""

    def __init__(self, momentum=0.9):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.momentum = momentum

    def error(self, batch):
        x, y = batch
        return (self.layer(x).squeeze(1) - y).square().mean()

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def validation_step(self, batch, batch_idx):
        self.log("mse", self.error(batch))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=self.momentum)


def regression_loop(tuning, module=None, client=None, rounds=2, **settings):
    settings = {"evaluate_clients_every": 1, "seed": 3, **settings}
    loop = FederatedLoop(client or FedAvg(module=module or Fixed()), fine_tuning=tuning, **settings)
    Trainer(max_epochs=rounds, **QUIET).fit(loop, datamodule=regression_data())
    return loop


def tuned_by_hand(model, batches, *, lr=0.01, epochs=1, max_steps=None, momentum=0.9):
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)
    steps = 0
    for epoch in range(epochs):
        for batch in batches(epoch=epoch):
            if max_steps is not None and steps == max_steps:
                return model
            optimizer.zero_grad()
            model.error(batch).backward()
            optimizer.step()
            steps += 1
    return model


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({}, {}),
        ({"epochs": 3}, {"epochs": 3}),
        ({"epochs": 3, "max_steps": 4}, {"epochs": 3, "max_steps": 4}),
        ({"max_steps": 1, "lr": 0.2}, {"max_steps": 1, "lr": 0.2}),
        ({"batch_size": "full", "epochs": 2}, {"epochs": 2}),
        ({"batch_size": 2}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "loop_settings",
    [{}, {"lr_decay": 0.1}, {"max_local_steps": 1}, {"local_epochs": 3}, {"lr_decay": {"cosine": 0.0}}],
    ids=str,
)
def test_it_is_plain_training_of_what_the_client_would_deploy(settings, by_hand, loop_settings):
    loop = regression_loop(FineTuning(**settings), **loop_settings)
    for client_id in range(CLIENTS):
        view = loop.data.view(client_id, 0).for_fine_tuning()
        size = view.samples_per_batch("train", settings.get("batch_size"))
        batches = partial(view.batches, "train", batch_size=size)
        model = tuned_by_hand(loop.client_model(client_id), batches, **by_hand)
        tuned = loop.client_model(client_id, tuned=True)
        torch.testing.assert_close(tuned.state_dict(), model.state_dict())
        expected = plain(model, loop.data, client_id)
        assert loop.recorder.client_values[client_id]["local/tuned/mse"] == pytest.approx(expected["mse"], rel=1e-5)


def test_only_some_parameters_are_trained():
    loop = fit(
        FedAvg(net=BatchNormNet, optimizer=sgd()),
        rounds=1,
        evaluate_clients_every=1,
        fine_tuning=FineTuning(trains="net.head.*", lr=0.5),
    )
    deployed = loop.client_model(0).state_dict()
    tuned = loop.client_model(0, tuned=True).state_dict()
    moved = {name for name in tuned if not torch.equal(tuned[name], deployed[name])}
    statistics = {name for name in tuned if "running_" in name or "num_batches" in name}
    assert moved == {"net.head.weight", "net.head.bias"} | statistics


def test_a_client_without_training_samples_is_tested_as_it_is():
    loop = fit(FedAvg(), rounds=1, data=data_of(), evaluate_clients_every=1, fine_tuning=TUNED)
    sizes = [loop.data.size(client_id, 0) for client_id in range(loop.data.num_clients)]
    for client_id, values in loop.recorder.client_values.items():
        if not sizes[client_id]:
            assert values["local/alma"] == values["local/tuned/alma"]


class Phases(FedAvg):
    """Trains the head first, then everything, at its own rate."""

    def fine_tuning(self, phase):
        assert not self.round
        yield Phase(epochs=1, trains=("net.head.*",), lr=0.3)
        yield Phase(epochs=phase.epochs, lr=0.0)


def test_a_method_chooses_the_phases():
    loop = fit(Phases(), rounds=1, evaluate_clients_every=1, fine_tuning=FineTuning(epochs=4))
    one = fit(FedAvg(), rounds=1, evaluate_clients_every=1, fine_tuning=FineTuning(trains=["net.head.*"], lr=0.3))
    assert equal(loop.client_model(1, tuned=True).state_dict(), one.client_model(1, tuned=True).state_dict())


@pytest.mark.parametrize("max_steps", [1, 3, 100])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_phase_of_a_round_ends_after_its_steps(max_steps, counts, chunk):
    class Limited(FedAvg):
        stackable = True

        def phases(self, exchange):
            return Phase(epochs=3, max_steps=max_steps, counts=counts), Phase()

        def reply(self, exchange, local):
            progress = self.context.progress
            seen[self.context.client_id] = (progress.num_steps, progress.uncounted_steps)
            return {}

    seen = {}
    data = toy_data((7, 12, 5))
    fit(Limited(), rounds=1, data=data, chunk=chunk)
    for client_id, batches in enumerate((2, 3, 1)):
        limited = min(3 * batches, max_steps)
        assert seen[client_id] == ((limited + batches, 0) if counts else (batches, limited))


# --- nothing is kept ---


class Leaves(Fixed):
    """It leaves traces of all kinds in training."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.seen = []
        self.rng = np.random.default_rng(0)
        self.mae = torchmetrics.MeanAbsoluteError()
        self.unlogged = torchmetrics.MeanMetric()
        self.register_buffer("moving", torch.zeros(()), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.seen.append(self.steps)
        self.moving = self.moving + 1
        self.count += 1
        x, y = batch
        predictions = self.layer(x).squeeze(1)
        self.mae(predictions, y)
        self.log("train/mae", self.mae)
        self.unlogged.update(predictions.mean())
        self.log("train/steps", float(self.steps))
        noise = self.rng.normal() + random.random() + np.random.rand() + torch.rand(()).item()
        return (predictions - y).square().mean() * (1 + 0.01 * noise) + 0 * self.moving

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("moving", self.moving, batch_size=1)


class Tally:
    """Counts steps."""

    def __init__(self):
        self.steps = 0
        self.by_batch = {}


class LeavesValues(Fixed):
    """Its training depends on values within attributes that are in no state dict."""

    def __init__(self):
        super().__init__()
        self.plain = torch.zeros(2)
        self.grown = torch.zeros(1)
        self.array = np.zeros(2)
        self.not_writable = (np.broadcast_to(np.zeros(1), (2,)), torch.zeros(1).expand(2))
        self.nested = {"steps": [0], "pair": ([0], {1})}
        self.tally = Tally()
        self.tallies = [Tally()]

    def training_step(self, batch, batch_idx):
        self.plain += 1
        self.grown.data = torch.cat([self.grown, torch.ones(1)])
        self.array += 1
        self.nested["steps"][0] += 1
        self.nested["pair"][0].append(batch_idx)
        self.tally.steps += 1
        self.tally.by_batch[len(self.tally.by_batch)] = batch_idx
        self.tallies[0].steps += 1
        counts = [
            float(self.plain.sum()),
            len(self.grown),
            self.array.sum(),
            self.nested["steps"][0],
            len(self.nested["pair"][0]),
            self.tally.steps,
            len(self.tally.by_batch),
            self.tallies[0].steps,
        ]
        return self.error(batch) * (1 + sum(counts) / 1000)


class LogsByItself(Fixed):
    """It gives its logger values and pictures by itself."""

    def training_step(self, batch, batch_idx):
        assert isinstance(self.logger, Keeps)
        assert self.logger.folder == "there"
        error = self.error(batch)
        self.logger.log_metrics({"by itself": float(error)}, step=self.global_step)
        self.logger.log_picture("picture", step=self.global_step)
        self.logger.experiment.add_scalar("scalar", float(error), self.global_step)
        for logger in self.trainer.loggers:
            logger.log_metrics({"by all": float(error)})
        return error


class Keeps(Logger):
    """Keeps what it is given."""

    name = "keeps"
    version = 0
    folder = "there"

    def __init__(self):
        super().__init__()
        self.given = []

    @property
    def experiment(self):
        return self

    def log_metrics(self, metrics, step=None):
        self.given.append((step, repr(untuned(metrics))))

    def log_picture(self, name, step):
        self.given.append((step, name))

    def add_scalar(self, name, value, step):
        self.given.append((step, name, value))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def test_it_is_not_logged():
    given = []
    for tuning in (None, FineTuning(epochs=2)):
        loop = FederatedLoop(FedAvg(module=LogsByItself()), seed=3, evaluate_clients_every=1, fine_tuning=tuning)
        logger = Keeps()
        runner = Trainer(max_epochs=2, **{**QUIET, "logger": logger})
        runner.fit(loop, datamodule=regression_data())
        loop.client_model(0, tuned=tuning is not None)
        given.append(logger.given)
    assert {"picture", "scalar"} <= {name for _, name, *_ in given[0]}
    assert given[0] == given[1]


class SameOptimizer(Fixed):
    """It hands out one optimizer again and again."""

    def configure_optimizers(self):
        if not hasattr(self, "made"):
            self.made = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return self.made


class ByHand(Fixed):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.error(batch))
        optimizer.step()


class Schedules(Fixed):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


@pytest.mark.parametrize(
    "kind", [Fixed, Leaves, LeavesValues, SameOptimizer, ByHand, Schedules, LogsMetrics], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("around", [FedAvg, Ditto, FedBN, Local, SCAFFOLD], ids=lambda k: k.__name__)
def test_a_users_module_is_as_it_was(kind, around):
    if kind is ByHand and around in (SCAFFOLD, Ditto):
        pytest.skip(f"{around.__name__} adds to the loss, which a module that steps by itself does not give")
    without = regression_loop(None, client=around(module=kind()), rounds=3)
    tuned = regression_loop(FineTuning(epochs=2), client=around(module=kind()), rounds=3)
    assert equal(weights_of(without), weights_of(tuned))
    assert same_row(without.round_metrics, untuned(tuned.round_metrics))
    assert any(is_tuned(name) for name in tuned.round_metrics)
    if kind is Leaves:
        assert without.client.module.steps == tuned.client.module.steps
        assert without.client.module.seen == tuned.client.module.seen
        assert equal(without.client.module.unlogged.metric_state, tuned.client.module.unlogged.metric_state)
    for client_id, values in tuned.recorder.client_values.items():
        model = tuned.client_model(client_id, tuned=True)
        if kind is not Leaves:
            found = {f"local/tuned/{name}": value for name, value in plain(model, tuned.data, client_id).items()}
            assert found == pytest.approx({name: values[name] for name in found}, rel=1e-5)


def test_an_optimizer_that_is_handed_out_again_begins_anew():
    """It still has the momentum of the last client of the round when the clients are tested."""
    fresh = regression_loop(FineTuning(epochs=2), module=Fixed())
    again = regression_loop(FineTuning(epochs=2), module=SameOptimizer())
    assert again.recorder.client_values == fresh.recorder.client_values


class Draws(BatchNormNet):
    """It draws from a generator of its own in training."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.rng = np.random.default_rng(0)

    def features(self, x):
        if self.training:
            x = x + 0.1 * float(self.rng.normal())
        return super().features(x)


def test_the_generators_of_a_net_are_as_they_were():
    states = []
    for settings in ({}, {"fine_tuning": TUNED}):
        loop = fit(FedAvg(net=Draws), rounds=1, evaluate_clients_every=1, **settings)
        states.append(loop.client.net.rng.bit_generator.state)
    assert states[0] == states[1]


def test_metric_objects_count_on_after_it():
    """A callback looks at them between two clients."""
    counted = []
    for settings in (None, FineTuning(epochs=2)):
        loop = regression_loop(settings, module=Leaves(), rounds=1)
        loop.client.module.unlogged.update(3.0)
        before = loop.client.module.unlogged.metric_state["mean_value"].clone()
        if settings is not None:
            loop.client_model(0, tuned=True)
        assert torch.equal(before, loop.client.module.unlogged.metric_state["mean_value"])
        counted.append(before)
    assert torch.equal(counted[0], counted[1])


class DrawsInATest(Fixed):
    """It measures at random points, by the generators of all three packages."""

    def validation_step(self, batch, batch_idx):
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        self.log("mse", self.error(batch) * (1 + noise))

    test_step = validation_step


def test_a_module_that_draws_has_the_values_of_the_last_row():
    """Its draws depend neither on the round, nor on the kind of the evaluation, nor on the training."""
    loop = FederatedLoop(FedAvg(module=DrawsInATest()), evaluate_clients_every=1, fine_tuning=FineTuning(), seed=3)
    Trainer(max_epochs=2, **QUIET).fit(loop, datamodule=regression_data(unseen=[1]))
    row = loop.round_metrics
    values = loop.recorder.client_values
    for verb in ("validate", "test"):
        (found,) = getattr(Trainer(**QUIET), verb)(loop, datamodule=loop.data, verbose=False)
        assert found == pytest.approx({name: row[name] for name in found})
        assert {"mse", "local/mse", "local/tuned/mse", "unseen/mse", "unseen/tuned/mse"} <= found.keys()
        assert loop.recorder.client_values == values


def test_a_plain_test_step_too():
    loop = regression_loop(FineTuning(epochs=2))
    (found,) = Trainer(**QUIET).test(loop, datamodule=loop.data, verbose=False)
    assert found["local/tuned/mse"] == pytest.approx(loop.round_metrics["local/tuned/mse"])


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_with_stacks(chunk):
    loop = fit(FedAvg(), rounds=2, evaluate_clients_every=1, fine_tuning=TUNED, chunk=chunk)
    without = fit(FedAvg(), rounds=2, evaluate_clients_every=1, chunk=chunk)
    assert equal(weights_of(loop), weights_of(without))


def test_private_values_are_marked():
    client = dp_sgd(FedAvg(), noise_multiplier=1.0, sample_rate=0.5)
    loop = fit(client, rounds=1, evaluate_clients_every=1, fine_tuning=TUNED)
    assert "unprotected/local/tuned/alma" in loop.round_metrics


def test_stragglers_and_timeouts_do_not_touch_it():
    loop = fit(FedAvg(), rounds=1, data=toy_data(), evaluate_clients_every=1, fine_tuning=TUNED)
    slow = fit(FedAvg(), rounds=1, data=toy_data(local_work=0.4), evaluate_clients_every=1, fine_tuning=TUNED)
    slow.client.load_state_dict(loop.client.state_dict())
    assert equal(loop.client_model(0, tuned=True).state_dict(), slow.client_model(0, tuned=True).state_dict())


def test_directions_of_tuned_values():
    loop = regression_loop(FineTuning(), module=LogsMetrics())
    directions = loop.recorder.directions
    assert directions["local/tuned/val/mae"] == directions["local/val/mae"] == "min"


def test_a_name_that_two_values_would_have():
    class Clash(Fixed):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("tuned/mse", 1.0)

    with pytest.raises(ValueError, match="a module must not log a value whose name begins with 'tuned/'"):
        regression_loop(FineTuning(), module=Clash())


# --- deploying ---


def test_a_test_of_one_client():
    loop = regression_loop(FineTuning(epochs=2))
    before = weights_of(loop)
    for client_id in range(CLIENTS):
        loop.deploy(client_id, tuned=True)
        values = loop.recorder.client_values[client_id]
        for function in ("test", "validate"):
            (found,) = getattr(Trainer(**QUIET), function)(loop, datamodule=loop.data, verbose=False)
            assert found == pytest.approx({"mse": values["local/tuned/mse"]})
        assert equal(before, weights_of(loop))
    loop.deploy(0)
    (found,) = Trainer(**QUIET).test(loop, datamodule=loop.data, verbose=False)
    assert found["mse"] == pytest.approx(loop.recorder.client_values[0]["local/mse"])


def test_tuned_needs_settings_and_a_client():
    loop = regression_loop(None)
    for ask in (loop.client_model, loop.deploy):
        with pytest.raises(ValueError, match=r"tuned needs model\.fine_tuning, got None; set it"):
            ask(1, tuned=True)
    with pytest.raises(ValueError, match="tuned needs the client that is fine-tuned, got none; give its id"):
        loop.deploy(None, tuned=True)


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"{TINY} --model.client FedBN --model.fine_tuning.epochs 2 --model.fine_tuning.lr 0.1"
    said = say(f"fit {words} --trainer.max_epochs 1 --model.evaluate_clients_every 1 --data.unseen [1]")
    assert said.code == 0, said.err
    (path,) = tmp_path.rglob("clients.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = {int(row["client"]): row for row in csv.DictReader(file)}
    assert [row["unseen"] for row in rows.values()] == ["0", "1", "0", "0"]
    for client_id in (1, 3):
        said = say(f"test {words} --data.unseen [1] --ckpt_path last --client {client_id} --tuned true")
        assert said.code == 0, said.err
        (printed,) = re.findall(r"test/acc +([\d.]+)", said.out)
        assert float(printed) == pytest.approx(float(rows[client_id]["local/tuned/alma"]), abs=1e-5)
    said = say(f"test {words} --data.unseen [1] --ckpt_path last")
    (printed,) = re.findall(r"unseen/tuned/alma +([\d.]+)", said.out)
    assert float(printed) == pytest.approx(float(rows[1]["local/tuned/alma"]), abs=1e-5)
    other = words.replace("epochs 2", "epochs 1")
    assert say(f"test {other} --data.unseen [1] --ckpt_path last").code == 0
    more = f"fit {other} --data.unseen [1] --model.evaluate_clients_every 1 --ckpt_path last --trainer.max_epochs 2"
    assert say(more).code == 0
    assert "tuned needs model.fine_tuning" in refusal(f"test {TINY} --ckpt_path last --client 1 --tuned true", 1)


# --- refused at the start ---


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": 0}, r"model\.fine_tuning\.epochs must be at least 1, got 0"),
        ({"epochs": None}, r"model\.fine_tuning\.epochs must be a whole number, got None; leave it out for 1"),
        ({"max_steps": 0}, r"model\.fine_tuning\.max_steps must be at least 1, got 0"),
        ({"lr": 0}, r"model\.fine_tuning\.lr must be above 0, got 0"),
        ({"batch_size": 0}, r"model\.fine_tuning\.batch_size must be at least 1, got 0"),
        ({"trains": []}, r"model\.fine_tuning\.trains must name parameters, got none"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        FineTuning(**settings)


@pytest.mark.parametrize(
    ("tuning", "loop", "data", "sentence"),
    [
        ({}, {"evaluate_clients_every": None}, {}, r"model\.fine_tuning needs model\.evaluate_clients_every"),
        ({"trains": "net.heed.*"}, {}, {}, r"model\.fine_tuning\.trains must match .* got 'net\.heed\.\*'"),
        ({"trains": ["net.head.*", "no"]}, {}, {}, r"model\.fine_tuning\.trains must match .* got 'no'"),
        ({"batch_size": 1}, {}, {}, r"raise model\.fine_tuning\.batch_size"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_at_the_start(tuning, loop, data, sentence):
    settings = {"evaluate_clients_every": 1, **loop}
    with pytest.raises(ValueError, match=sentence):
        fit(FedAvg(net=BatchNormNet), data=toy_data(**data), fine_tuning=FineTuning(**tuning), **settings)


def test_streams_are_refused():
    data = FederatedDataModule.from_datasets({0: Sensor(0), 1: Sensor(1)})
    with pytest.raises(ValueError, match=r"model\.fine_tuning needs training samples .* and these are streams; leave"):
        fit(FedAvg(module=Fixed()), rounds=1, data=data, max_local_steps=2, fine_tuning=TUNED)


def test_pooled_samples_have_no_client_that_is_tested():
    """A comparison has one setting for all its methods, one of which pools the samples."""
    without = fit(FedAvg(), rounds=1, data=toy_data(pooled=True))
    tuned = fit(FedAvg(), rounds=1, data=toy_data(pooled=True), fine_tuning=TUNED, evaluate_clients_every=1)
    assert equal(weights_of(without), weights_of(tuned))
    assert not [name for name in tuned.round_metrics if is_tuned(name)]


@pytest.mark.parametrize("kind", [KnFu, Local], ids=lambda kind: kind.__name__)
def test_nets_of_different_shapes(kind):
    runs = []
    for settings in ({}, {"fine_tuning": FineTuning(epochs=2)}):
        client = kind(net=partial(HeterogeneousNets, nets=[BatchNormNet, Perceptron]), optimizer=sgd())
        runs.append(fit(client, rounds=2, data=data_of(), evaluate_clients_every=1, **settings))
    assert equal(weights_of(runs[0]), weights_of(runs[1]))
    assert "local/tuned/alma" in runs[1].round_metrics


def test_mixed_precision():
    runs = []
    for settings in ({}, {"fine_tuning": TUNED}):
        runs.append(fit(FedAvg(), rounds=2, precision="bf16-mixed", evaluate_clients_every=1, **settings))
    assert equal(weights_of(runs[0]), weights_of(runs[1]))
    assert "local/tuned/alma" in runs[1].round_metrics


def test_methods_without_a_global_model_need_no_period():
    loop = fit(Local(), rounds=1, fine_tuning=TUNED)
    assert "local/tuned/alma" in loop.round_metrics


def test_no_settings():
    with pytest.raises(TypeError, match=r"fine_tuning must be a FineTuning, got \{'epochs': 1\}; give FineTuning"):
        FederatedLoop(FedAvg(), fine_tuning={"epochs": 1})


ASKED = []
"""What the Trainer said in each training step. Fine-tuning undoes what a module itself notes."""


class AsksTheClock(LogsMetrics):
    """Asks its Trainer in each training step."""

    def training_step(self, batch, batch_idx):
        ASKED.append((self.trainer.max_epochs, self.trainer.current_epoch, self.trainer.global_step))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("clock", ["run", "round"])
def test_fine_tuning_counts_from_the_begin_whatever_the_clock(clock):
    ASKED.clear()
    settings = {"fine_tuning": FineTuning(epochs=3), "evaluate_clients_every": 4, "clock": clock}
    loop = FederatedLoop(FedAvg(module=AsksTheClock()), seed=3, **settings)
    Trainer(max_epochs=4, **QUIET).fit(loop, datamodule=regression_data())
    tuned = {(epoch, step) for rounds, epoch, step in ASKED if rounds == 3}
    in_rounds = 4 if clock == "run" else 1
    assert {rounds for rounds, _, _ in ASKED} == {3, in_rounds}
    assert {epoch for epoch, _ in tuned} == {0, 1, 2}
    assert min(step for _, step in tuned) == 0
