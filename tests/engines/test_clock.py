"""Under `model.clock: run` the rounds of one client are one plain fit; under `round` each round is a fit by itself."""

import warnings
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.engines.clock import COUNTS, ClientClock, Work
from fl_lightning.engines.schedules import (
    LEAST_SPACING,
    MOST_PLACES,
    SPACING,
    Course,
    Place,
    asks_others,
    key_of,
)
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import Perceptron
from tests.federation.test_clients_by_own_steps import QUIET, LogsMetrics, regression_data
from tests.toys import fit, samples, sgd, toy_data, trainer

ROUNDS = 3
EPOCHS = 2
SAMPLES = 19
BATCHES = 5
"""Batches of an epoch. Neither an accumulation nor a frequency below divides it."""


def by_a_table(optimizer, table):
    """A scheduler within another one, whose function reads a table."""
    after = schedules.LambdaLR(optimizer, lambda step: table["factors"][min(step, 3)])
    return schedules.SequentialLR(optimizer, [schedules.ConstantLR(optimizer, 0.3, 2), after], milestones=[2])


class Ruled(schedules.LRScheduler):
    """A scheduler of a user's own that keeps a function, as torch's SWALR does."""

    def __init__(self, optimizer, rule):
        self.rule = rule
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.rule(self.last_epoch) for base in self.base_lrs]

    def step(self, *args):
        super().step(*args)


def halved(step):
    return 0.5 ** (step // 4)


SCHEDULES = {
    "StepLR": lambda optimizer, module: schedules.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer, module: schedules.OneCycleLR(
        optimizer, 0.3, total_steps=int(module.trainer.estimated_stepping_batches)
    ),
    "CosineAnnealingLR": lambda optimizer, module: schedules.CosineAnnealingLR(
        optimizer, module.trainer.max_epochs, eta_min=0.001
    ),
    "LambdaLR": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7)),
    "SequentialLR": lambda optimizer, module: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "by a table": lambda optimizer, module: by_a_table(optimizer, {"factors": [1.0, 0.5, 0.25, 0.125]}),
    "by a rule": lambda optimizer, module: Ruled(optimizer, rule=halved),
    "by the epoch": lambda optimizer, module: schedules.LambdaLR(optimizer, lambda _: 1 / (1 + module.current_epoch)),
}


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(SAMPLES)), batch_size=4)


class Net(pl.LightningModule):
    """Notes learning rates and what its Trainer tells it, in each hook.

    Args:
        schedule: Name of its schedule, or None.
        settings: Settings of the schedule.
    """

    def __init__(self, schedule=None, **settings):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.schedule = schedule
        self.settings = settings
        self.rates = []
        self.told = []

    def note(self, place):
        trainer = self.trainer
        assert isinstance(trainer, pl.Trainer)
        counts = {name: getattr(trainer, name) for name in NUMBERS}
        loader = (len(trainer.train_dataloader), len(trainer.train_dataloader.dataset))
        self.told.append((place, self.current_epoch, self.global_step, counts, loader))

    def training_step(self, batch, batch_idx):
        self.note("step")
        optimizer = self.optimizers()
        self.rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self):
        self.note("epoch start")

    def on_train_batch_start(self, batch, batch_idx):
        self.note("batch start")

    def on_before_zero_grad(self, optimizer):
        self.note("before zero_grad")

    def on_after_backward(self):
        self.note("after backward")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch end")

    def on_train_epoch_end(self):
        self.note("epoch end")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        if self.schedule is None:
            return optimizer
        scheduler = SCHEDULES[self.schedule](optimizer, self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.settings}}


NUMBERS = (
    "current_epoch",
    "global_step",
    "max_epochs",
    "max_steps",
    "num_training_batches",
    "estimated_stepping_batches",
    "is_last_batch",
    "accumulate_grad_batches",
    "world_size",
    "global_rank",
    "num_nodes",
    "num_devices",
)


def by_place(told):
    """What was told, by the place: Lightning calls `on_before_zero_grad` between `training_step` and backward."""
    places = {}
    for place, *values in told:
        places.setdefault(place, []).append(values)
    return places


def plain(module, epochs=ROUNDS * EPOCHS, **settings):
    trainer(epochs, **settings).fit(module, datamodule=Data())
    return module


def federated(module, rounds=ROUNDS, epochs=EPOCHS, path=None, callbacks=(), **settings):
    data = FederatedDataModule.from_datamodule(Data(), num_clients=1)
    loop = FederatedLoop(module, local_epochs=epochs, **settings)
    trainer(rounds, callbacks=list(callbacks)).fit(loop, datamodule=data, ckpt_path=path)
    return module


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_the_rates_of_all_rounds_are_those_of_one_plain_fit(schedule, interval, frequency, accumulated):
    if schedule == "by the epoch" and frequency == 3:
        pytest.skip("the rate of the first epochs comes from the epoch in which the schedule is made")
    settings = {"interval": interval, "frequency": frequency}
    expected = plain(Net(schedule, **settings), accumulate_grad_batches=accumulated)
    found = federated(Net(schedule, **settings), accumulate_grad_batches=accumulated)
    assert len(found.rates) == ROUNDS * EPOCHS * BATCHES
    assert found.rates == expected.rates


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_counts_in_every_hook_are_those_of_one_plain_fit(accumulated):
    expected = plain(Net(), accumulate_grad_batches=accumulated)
    found = federated(Net(), accumulate_grad_batches=accumulated)
    assert len(by_place(found.told)) == 7
    assert by_place(found.told) == by_place(expected.told)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_round_is_one_plain_fit_under_the_clock_round(accumulated):
    expected = plain(Net("OneCycleLR", interval="step"), EPOCHS, accumulate_grad_batches=accumulated)
    found = federated(Net("OneCycleLR", interval="step"), clock="round", accumulate_grad_batches=accumulated)
    assert by_place(found.told) == by_place(expected.told * ROUNDS)
    assert found.rates == expected.rates * ROUNDS


class InEveryHook(pl.LightningModule):
    """Notes rate, epoch and step in each hook, and within its own step of the optimizer.

    Args:
        interval: Interval of its schedule.
        skips: Indices of batches that it skips.
        ends_at: Index of the batch at which it ends an epoch. None: at none.
    """

    def __init__(self, interval="step", skips=(), ends_at=None):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.interval = interval
        self.skips = skips
        self.ends_at = ends_at
        self.told = []

    def note(self, place):
        rate = self.optimizers().param_groups[0]["lr"]
        self.told.append((place, rate, self.current_epoch, self.global_step))

    def training_step(self, batch, batch_idx):
        self.note("step")
        return None if batch_idx in self.skips else F.cross_entropy(self.net(batch[0]), batch[1])

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.note("before optimizer step")
        optimizer.step(closure=optimizer_closure)
        self.note("after optimizer step")

    def on_train_batch_start(self, batch, batch_idx):
        self.note("batch start")
        return -1 if batch_idx == self.ends_at else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch end")

    def on_train_epoch_start(self):
        self.note("epoch start")

    def on_train_epoch_end(self):
        self.note("epoch end")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = schedules.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("skips", [(), (1,), (0, 4), (0, 1, 2, 3, 4)], ids=str)
def test_the_rates_in_every_hook_are_those_of_one_plain_fit(skips, interval, accumulated):
    """An epoch's schedule is stepped before the hooks of its last batch, and a skipped batch counts as a step."""
    expected = plain(InEveryHook(interval, skips), accumulate_grad_batches=accumulated)
    found = federated(InEveryHook(interval, skips), accumulate_grad_batches=accumulated)
    assert found.told == expected.told


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("ends_at", [0, 2, 4])
def test_an_epoch_that_the_module_ends_steps_its_schedules_as_in_one_plain_fit(ends_at, interval, accumulated):
    """The steps of a round before are not known, so that there is one round."""
    expected = plain(InEveryHook(interval, ends_at=ends_at), epochs=4, accumulate_grad_batches=accumulated)
    found = federated(InEveryHook(interval, ends_at=ends_at), 1, epochs=4, accumulate_grad_batches=accumulated)
    assert found.told == expected.told


class Holes(InEveryHook):
    """The first and the last batch of each epoch are None."""

    batches = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.batches += 1
        return None if self.batches % BATCHES in (0, 1) else batch


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_batch_that_is_none_steps_the_schedules_as_in_one_plain_fit(interval, accumulated):
    expected = plain(Holes(interval), epochs=4, accumulate_grad_batches=accumulated)
    found = federated(Holes(interval), 1, epochs=4, accumulate_grad_batches=accumulated)
    assert found.told == expected.told


class Keeps(Logger):
    """Keeps what is logged."""

    name = "keeps"
    version = 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, *metrics))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


@pytest.mark.parametrize("clock", ["run", "round"])
def test_what_a_client_logs_by_its_logger_lands_at_the_round(clock):
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            assert isinstance(self.logger, Keeps)
            self.logger.log_metrics({"by step": 1.0}, step=self.global_step)
            self.trainer.loggers[0].log_metrics({"by epoch": 1.0}, step=self.current_epoch)
            return super().training_step(batch, batch_idx)

    logger = Keeps()
    data = FederatedDataModule.from_datamodule(Data(), num_clients=1)
    trainer(ROUNDS, logger=logger).fit(FederatedLoop(Logs(), local_epochs=EPOCHS, clock=clock), datamodule=data)
    for key in ("by step", "by epoch"):
        steps = [step for step, name, *_ in logger.rows if name == key]
        assert steps == [round_idx for round_idx in range(ROUNDS) for _ in range(EPOCHS * BATCHES)]


class Save(pl.Callback):
    """Saves a checkpoint after a round."""

    def __init__(self, path, round_idx=0):
        self.path = path
        self.round_idx = round_idx

    def on_train_epoch_end(self, trainer, loop):
        if trainer.current_epoch == self.round_idx:
            trainer.save_checkpoint(self.path)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_has_the_same_bits(tmp_path, schedule):
    save = Save(tmp_path / "2.ckpt", round_idx=1)
    whole = federated(Net(schedule, interval="step"), rounds=4, callbacks=[save])
    resumed = federated(Net(schedule, interval="step"), rounds=4, path=save.path)
    assert resumed.rates == whole.rates[2 * EPOCHS * BATCHES :]
    assert resumed.told == whole.told[len(whole.told) // 2 :]
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name])


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CosineAnnealingLR"])
def test_more_rounds_are_refused_where_the_module_has_asked_for_the_length(tmp_path, schedule):
    save = Save(tmp_path / "1.ckpt")
    federated(Net(schedule), rounds=2, callbacks=[save])
    with pytest.raises(ValueError, match=r"planned_rounds was 2, is 3 .* model\.planned_rounds"):
        federated(Net(schedule), rounds=3, path=save.path)


def test_more_rounds_are_trained_where_the_schedule_does_not_depend_on_them(tmp_path):
    class Silent(Net):
        def note(self, place):
            pass

    save = Save(tmp_path / "1.ckpt")
    federated(Silent("StepLR"), rounds=1, callbacks=[save])
    more = federated(Silent("StepLR"), rounds=3, path=save.path)
    assert more.rates == federated(Silent("StepLR"), rounds=3).rates[EPOCHS * BATCHES :]


def test_the_limits_of_the_loop_are_those_of_the_fit():
    module = federated(Net(), max_local_steps=7, clip_norm=2.0)
    told = [counts for _, _, _, counts, _ in module.told]
    assert {counts["max_steps"] for counts in told} == {7 * ROUNDS}
    assert {counts["estimated_stepping_batches"] for counts in told} == {7 * ROUNDS}
    steps = [counts["global_step"] for place, _, _, counts, _ in module.told if place == "step"]
    assert steps == list(range(7 * ROUNDS))


def test_without_a_limit_of_rounds_the_estimate_is_infinite():
    class Stops(Net):
        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            self.trainer.should_stop = True

    module = federated(Stops(), rounds=-1)
    assert {counts["estimated_stepping_batches"] for _, _, _, counts, _ in module.told} == {float("inf")}
    assert {counts["max_epochs"] for _, _, _, counts, _ in module.told} == {-1}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_cannot_be_set(name):
    class Sets(Net):
        def training_step(self, batch, batch_idx):
            setattr(self.trainer, name, 3)

    with pytest.raises(Exception, match=f"trainer.{name} cannot be set by a module"):
        federated(Sets())


# --- catching up


class Quiet(Net):
    """Asks its Trainer for nothing but by its schedule."""

    def note(self, place):
        pass


def counted_steps(schedule, rounds, monkeypatch, **settings):
    """How often the schedulers of one client are stepped in each round."""
    counts = Counter()
    own_step = schedules.LRScheduler.step

    def step(self, *args, **kwargs):
        counts["steps"] += 1
        return own_step(self, *args, **kwargs)

    class Counting(Quiet):
        def lr_scheduler_step(self, scheduler, metric):
            counts["hooks"] += 1
            super().lr_scheduler_step(scheduler, metric)

    steps = []

    class Note(pl.Callback):
        def on_train_batch_start(self, *args):
            counts.clear()

        def on_train_batch_end(self, *args):
            steps.append(counts["steps"])

    monkeypatch.setattr(schedules.StepLR, "step", step)
    monkeypatch.setattr(schedules.LambdaLR, "step", step)
    monkeypatch.setattr(schedules.ExponentialLR, "step", step)
    monkeypatch.setattr(Ruled, "step", step)
    module = (Counting if settings.pop("own_hook", False) else Quiet)(schedule, interval="step")
    federated(module, rounds=rounds, callbacks=[Note()], **settings)
    return steps


@pytest.mark.parametrize("own_hook", [False, True])
@pytest.mark.parametrize("schedule", ["StepLR", "LambdaLR", "by a table", "by a rule", "by the epoch"])
def test_catching_up_does_not_grow_with_the_round(schedule, own_hook, monkeypatch):
    steps = counted_steps(schedule, 12, monkeypatch, own_hook=own_hook)
    in_a_round = EPOCHS * BATCHES + 1  # A new scheduler steps itself once.
    assert max(steps) <= 2 * in_a_round + LEAST_SPACING
    assert 0 < steps[0] <= in_a_round


def test_a_course_keeps_places_on_its_way_and_forgets_every_second_one():
    course = Course()
    place = Place([], [])
    for number in range(0, 4 * MOST_PLACES, 2):
        course.keep(number, place)
    assert course.before(-1) == (0, None)
    number, found = course.before(4 * MOST_PLACES)
    assert found is place
    assert 4 * MOST_PLACES - number <= 8
    number, _ = course.before(MOST_PLACES)
    assert MOST_PLACES - number <= 16


def test_clients_of_other_sizes_share_a_course(monkeypatch):
    """A client that takes part for the first time in a late round steps from a place of the others."""
    own = torch.optim.lr_scheduler.StepLR.step
    count = Counter()

    def step(self, *args, **kwargs):
        count["steps"] += 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(schedules.StepLR, "step", step)
    late = {"schedule": [[0]] * 20 + [[1]]}
    loop = FederatedLoop(Quiet("StepLR", interval="step"), local_epochs=4)
    trainer(20).fit(loop, datamodule=toy_data((40, 31), batch_size=2, **late))
    count.clear()
    loop = FederatedLoop(Quiet("StepLR", interval="step"), local_epochs=4)
    trainer(21).fit(loop, datamodule=toy_data((40, 31), batch_size=2, **late))
    of_first = 20 * 2 * 4 * 20  # steps and catching up of client 0
    at_start = 21 * 4 * 20  # the check of the schedule's length
    assert count["steps"] <= of_first + at_start + 4 * 16 + SPACING + LEAST_SPACING


def rates_of(make, rate=lambda: lambda: 0.1, interval="step", rounds=ROUNDS):
    """The rates of one plain fit and of a federation. `rate` makes what gives the rate of each optimizer of a fit."""

    class Own(Net):
        def __init__(self):
            super().__init__()
            self.value = rate()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.value(), momentum=0.5)
            return [optimizer], [{"scheduler": make(optimizer, self), "interval": interval}]

        def training_step(self, batch, batch_idx):
            self.rates.append(float(self.optimizers().param_groups[0]["lr"]))
            return F.cross_entropy(self.net(batch[0]), batch[1])

    return plain(Own(), rounds * EPOCHS).rates, federated(Own(), rounds).rates


def makes_rates_one_tensor():
    """Whether this torch makes the rate and the initial rate one tensor, so that a schedule loses the latter."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    SCHEDULES["SequentialLR"](optimizer, None)
    (group,) = optimizer.param_groups
    return group["lr"] is group["initial_lr"]


@pytest.mark.skipif(
    makes_rates_one_tensor(), reason="SequentialLR of this torch loses an initial rate that is a tensor"
)
def test_a_rate_that_is_a_tensor_is_caught_up():
    """Schedulers write into the tensor, so that a place must have a copy of it (with all its digits)."""

    def shared():
        tensor = torch.tensor(0.1234567890123456, dtype=torch.float64)
        return lambda: tensor

    for rate in (shared, lambda: shared()().clone):
        expected, found = rates_of(SCHEDULES["SequentialLR"], rate)
        assert found == expected


class Warmup(schedules.LRScheduler):
    """A scheduler of a user's own with another one inside, whose state is no plain value."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < 4:
            return [base * (self.last_epoch + 1) / 4 for base in self.base_lrs]
        return [0.5 * rate for rate in self.after.get_last_lr()]

    def step(self, *args):
        if self.last_epoch >= 4:
            self.after.step()
        super().step(*args)


def test_a_scheduler_within_a_scheduler_of_ones_own_is_caught_up():
    expected, found = rates_of(lambda optimizer, _: Warmup(optimizer, schedules.ExponentialLR(optimizer, 0.9)))
    assert found == expected


def noted_by_list(optimizer, _):
    steps = []

    def factor(step):
        steps.append(step)
        return 1 / len(steps)

    return schedules.LambdaLR(optimizer, factor)


def noted_by_dict(optimizer, _):
    kept = {"factor": 1.0}

    def factor(step):
        kept["factor"] *= 0.9
        return kept["factor"]

    after = schedules.LambdaLR(optimizer, factor)
    return schedules.SequentialLR(optimizer, [schedules.ConstantLR(optimizer, 0.5, 2), after], milestones=[2])


def noted_by_itself(optimizer, _):
    class LeavesOut(schedules.LRScheduler):
        """A scheduler whose state has not all that it depends on."""

        calls = 0

        def get_lr(self):
            self.calls += 1
            return [base / self.calls for base in self.base_lrs]

        def state_dict(self):
            return {"last_epoch": self.last_epoch}

    return LeavesOut(optimizer)


@pytest.mark.parametrize("make", [noted_by_list, noted_by_dict, noted_by_itself], ids=lambda make: make.__name__)
def test_a_scheduler_whose_state_tells_not_all_is_caught_up_from_the_first_round(make):
    for interval in ("step", "epoch"):
        expected, found = rates_of(make, interval=interval, rounds=6)
        assert found == expected


def test_two_schedulers_of_one_optimizer_are_caught_up_together():
    class Two(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
            by_step = {"scheduler": schedules.ExponentialLR(optimizer, 0.99), "interval": "step", "frequency": 3}
            by_epoch = {"scheduler": schedules.MultiStepLR(optimizer, [1, 3]), "interval": "epoch"}
            return [optimizer], [by_step, by_epoch]

    assert federated(Two()).rates == plain(Two()).rates


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda k: lambda step: 1 / (1 + step / k), 3.0),
        (lambda k: partial(max, k), 3.0),
        (lambda k: torch.tensor(k, dtype=torch.float64), 0.1),
        (lambda k: {"a": [k, (k,)]}, 0.1),
    ],
)
def test_a_key_has_all_digits(one, other):
    assert key_of(one(other)) == key_of(one(other))
    assert key_of(one(other)) != key_of(one(other + 1e-15))


def test_a_key_of_an_object_is_the_object():
    module = Net()
    assert key_of(lambda: module) != key_of(lambda: Net)
    assert asks_others(key_of(lambda: module))
    assert not asks_others(key_of(lambda: 3))
    one, other = object(), object()
    assert key_of([one]) == key_of([one]) != key_of([other])


def test_schedules_stepped_by_hand_begin_anew_and_the_counts_go_on():
    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.steps = []

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.steps.append((self.global_step, self.trainer.global_step, self.trainer.is_last_batch))
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [schedules.ExponentialLR(optimizer, 0.5)]

    expected = plain(ByHand())
    found = federated(ByHand())
    assert found.steps == expected.steps
    assert found.rates == expected.rates[: EPOCHS * BATCHES] * ROUNDS


def test_two_optimizers_stepped_by_hand_count_as_in_one_plain_fit():
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.steps = []

        def training_step(self, batch, batch_idx):
            self.steps.append((self.global_step, self.trainer.estimated_stepping_batches))
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net.parameters()]

    assert federated(Two()).steps == plain(Two()).steps


def test_a_client_without_foreign_code_has_no_clock(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a net has no clock")

    for name in ("begin", "begin_epoch", "attached", "ask", "counted"):
        monkeypatch.setattr(ClientClock, name, fail)
    monkeypatch.setattr(Work, "of", fail)
    for chunk in (1, 3):
        fit(FedProx(mu=0.1, net=Perceptron, optimizer=sgd()), 2, toy_data(), chunk=chunk)


def test_the_clock_leaves_nothing_behind():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    for module in (Net(), Fails()):
        data = FederatedDataModule.from_datamodule(Data(), num_clients=1)
        loop = FederatedLoop(module, local_epochs=EPOCHS)
        run = trainer(2)
        with suppress(Exception):
            run.fit(loop, datamodule=data)
        assert module.trainer.max_epochs == 2
        assert "num_training_batches" not in vars(module.trainer)["_makers"]


def test_a_loop_is_copied_while_a_client_is_trained():
    copies = []

    class Copies(Quiet):
        def on_train_epoch_start(self):
            copies.append(deepcopy(self))

    class CopiesLoop(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            copies.append(deepcopy(loop))

    federated(Copies("LambdaLR"), callbacks=[CopiesLoop()])
    assert len(copies) == ROUNDS * (EPOCHS + 1)


def test_stragglers_have_the_steps_that_they_take():
    module = Net()
    loop = FederatedLoop(module, local_epochs=EPOCHS)
    trainer(2).fit(loop, datamodule=toy_data((20,), batch_size=4, local_work=0.5))
    assert {counts["estimated_stepping_batches"] for *_, counts, _ in module.told} == {2 * EPOCHS * BATCHES / 2}
    assert [step for place, _, step, *_ in module.told if place == "step"] == list(range(EPOCHS * BATCHES))


def test_a_module_of_the_twin_package_has_the_same_course():
    twin = pytest.importorskip("lightning.pytorch")

    class Twin(twin.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)
            self.schedule = "StepLR"
            self.settings = {"interval": "step"}
            self.rates = []

        configure_optimizers = Net.configure_optimizers

        def training_step(self, batch, batch_idx):
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return F.cross_entropy(self.net(batch[0]), batch[1])

    found = federated(Twin())
    assert found.rates == [rate for rate, _ in plain(Net("StepLR", interval="step")).rates]


@pytest.mark.parametrize("clock", ["run", "round"])
def test_a_run_of_an_earlier_version_is_told_of_the_clock(tmp_path, clock):
    """Its checkpoint names no clock, and its schedulers began anew in every round."""
    path = tmp_path / "last.ckpt"
    loop = FederatedLoop(FedAvg(module=LogsMetrics()), seed=1)
    runner = pl.Trainer(max_epochs=1, **QUIET)
    runner.fit(loop, datamodule=regression_data())
    runner.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    del content["federated"]["settings"]["objects"]["model.clock"], content["digest"]
    torch.save(content, path)
    again = FederatedLoop(FedAvg(module=LogsMetrics()), seed=1, clock=clock)
    again.parts.identity.allow(["model.clock"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pl.Trainer(max_epochs=2, **QUIET).fit(again, datamodule=regression_data(), ckpt_path=path)
    assert any("--model.clock round" in str(warning.message) for warning in told) is (clock == "run")
