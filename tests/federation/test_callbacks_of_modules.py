"""Callbacks that a module makes: their hooks of an evaluation see the module, at clients as in plain Lightning."""

import pytest
import torch
import torchmetrics
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint

from fl_lightning.methods import FedAvg, Local
from fl_lightning.monitors import GroupMetrics
from tests.federation.test_clients_by_own_steps import (
    QUIET,
    Base,
    CountsInHooks,
    LogsMetrics,
    LogsValues,
    OnlyTested,
    fitted,
    plain,
    regression_data,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class BothSteps(Callback):
    """Lets a callback that is written for validation act in the same way in a test."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name, hook in list(vars(cls).items()):
            if name.startswith("on_validation"):
                setattr(cls, name.replace("validation", "test"), hook)


class LogsAtTheEnd(BothSteps):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("norm", pl_module.layer.weight.norm())


class LogsByItself(BothSteps):
    """It never begins anew, so that its value is of all passes that it has seen."""

    def __init__(self):
        self.seen = 0.0

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen += float(batch[1].sum())

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("seen", self.seen)


class ChangesOutputs(BothSteps):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if outputs is not None:
            outputs["error"] = outputs["error"] * 2


class SetsUp(BothSteps):
    """It counts by a metric object that `setup` makes, and asks for its stage."""

    def setup(self, trainer, pl_module, stage):
        self.largest = torchmetrics.MaxMetric()

    def on_validation_start(self, trainer, pl_module):
        assert trainer.evaluating
        self.largest.reset()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        batch[0].mul_(3)
        self.largest.update(batch[1])

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log_dict({"top": self.largest.compute(), "stage": float(trainer.validating)})


class ChangesTheModule(BothSteps):
    """What it changes is undone after the pass, as the changes of the module's own hooks are."""

    def on_validation_epoch_start(self, trainer, pl_module):
        pl_module.layer.bias.data.add_(1.0)

    def on_validation_end(self, trainer, pl_module):
        pl_module.layer.bias.data.sub_(1.0)


def by_lambda():
    return LambdaCallback(
        on_validation_epoch_end=lambda trainer, module: module.log("norm", module.layer.weight.norm()),
        on_test_epoch_end=lambda trainer, module: module.log("norm", module.layer.weight.norm()),
    )


CALLBACKS = (LogsAtTheEnd, LogsByItself, ChangesOutputs, SetsUp, ChangesTheModule, by_lambda)
MODULES = (LogsMetrics, CountsInHooks, OnlyTested)


def with_callbacks(kind, *callbacks):
    class Makes(kind):
        def configure_callbacks(self):
            return [callback() for callback in callbacks]

    return Makes()


def assert_as_plain(loop):
    assert len(loop.recorder.client_values) == 3
    for client_id, values in loop.recorder.client_values.items():
        found = plain(loop.client_model(client_id), loop.data, client_id)
        assert values == pytest.approx({f"local/{name}": value for name, value in found.items()}, rel=1e-5)


@pytest.mark.parametrize("around", [FedAvg, Local], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda made: made.__name__)
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_values_of_clients_are_those_of_plain_lightning_with_the_modules_callbacks(kind, callback, around):
    loop = fitted(around(module=with_callbacks(kind, callback)))
    assert_as_plain(loop)


def test_several_callbacks_act_in_their_order_and_those_of_lightning_see_rounds(tmp_path):
    loop = fitted(with_callbacks(CountsInHooks, ChangesOutputs, SetsUp, lambda: ModelCheckpoint(tmp_path)))
    assert_as_plain(loop)
    assert len(list(tmp_path.iterdir())) == 1


class KeepsCounting(BothSteps):
    """Its metric object is never reset."""

    def __init__(self):
        self.largest = torchmetrics.MaxMetric()
        self.stages = []

    def setup(self, trainer, pl_module, stage):
        self.stages.append(stage)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.largest.update(batch[1])

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("top", self.largest.compute())


@pytest.mark.parametrize("place", ["module", "elsewhere"])
@pytest.mark.parametrize("callback", [SetsUp, KeepsCounting], ids=lambda made: made.__name__)
def test_a_callback_that_is_kept_acts_too(callback, place):
    kept = callback()

    class Keeps(LogsValues):
        def __init__(self):
            super().__init__()
            if place == "module":
                self.kept = kept

        def configure_callbacks(self):
            return kept if place == "elsewhere" else self.kept

    loop = fitted(Keeps())
    if callback is KeepsCounting:
        assert kept.stages == ["fit"]
        (batch,) = loop.data.split("test").batches([torch.arange(17)], None)
        assert float(kept.largest.compute()) == pytest.approx(float(batch[1].max()))
        assert vars(kept)["log"] == loop.log
        kept.largest.reset()
        for client_id, values in loop.recorder.client_values.items():
            found = max(float(batch[1].max()) for batch in loop.data.view(client_id, 0).batches("test", batch_size=2))
            assert values["local/top"] == pytest.approx(found)
    if place == "module":
        assert_as_plain(loop)


class NotesHooks(BothSteps):
    """Notes the hooks that are called, and the class of the module that each gets."""

    calls = []


def noting(name):
    def hook(self, trainer, pl_module, *args, **named):
        NotesHooks.calls.append((name, type(pl_module).__name__, len(args), named))

    return hook


HOOKS_OF_A_PASS = [name for name in dir(Callback) if name.startswith(("on_validation", "on_test"))]
for hook_name in ("setup", "teardown", *HOOKS_OF_A_PASS):
    setattr(NotesHooks, hook_name, noting(hook_name))


@pytest.mark.parametrize("kind", [LogsMetrics, OnlyTested], ids=lambda kind: kind.__name__)
def test_the_hooks_and_their_order_are_those_of_a_trainer(kind):
    loop = fitted(with_callbacks(kind, NotesHooks))
    NotesHooks.calls.clear()
    plain(loop.client_model(1), loop.data, 1)
    wanted = [*NotesHooks.calls]
    NotesHooks.calls.clear()
    of_clients = loop.evaluation.of_clients
    of_clients._jobs = lambda round_idx, jobs=of_clients._jobs: [job for job in jobs(round_idx) if job.client_id == 1]
    of_clients.evaluate(2, "validation")
    assert NotesHooks.calls == wanted
    assert {name.split("_")[1] for name, *_ in wanted if name.startswith("on_")} <= {"validation", "test"}


def test_the_passes_of_the_trainer_give_these_hooks_the_module_too():
    class Asks(BothSteps):
        asked = []

        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                Asks.asked.append(type(pl_module).__name__)

        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("norm", pl_module.layer.weight.norm())
            self.log("twice", 2 * pl_module.layer.weight.norm())

    loop = fitted(with_callbacks(LogsValues, Asks), evaluate_clients_every=None)
    assert Asks.asked == ["Makes"] * 2
    norm = float(loop.client.module.layer.weight.norm())
    assert loop.round_metrics["norm"] == pytest.approx(norm)
    assert loop.round_metrics["twice"] == pytest.approx(2 * norm)
    (tested,) = Trainer(**QUIET).test(loop, regression_data(), verbose=False)
    assert tested["norm"] == pytest.approx(norm)


def test_groups_and_training_samples_are_evaluated_with_the_callbacks():
    groups = GroupMetrics({"all": [0, 1, 2]})
    loop = fitted(with_callbacks(LogsValues, LogsByItself), callbacks=[groups], evaluate_training_every=1, rounds=1)
    data = loop.data
    for split, key in (("train", "global/train/seen"), ("test", "global/seen/all")):
        targets = [batch[1].sum() for k in range(3) for batch in data.view(k, 0).batches(split, batch_size=2)]
        assert loop.round_metrics[key] == pytest.approx(float(sum(targets)), rel=1e-5)


def test_a_trainers_callback_sees_no_client():
    class Counts(Callback):
        passes = []

        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.passes.append(type(pl_module).__name__)

    fitted(LogsValues(), callbacks=[Counts()], rounds=2)
    assert Counts.passes == ["FederatedLoop"] * 2


def test_a_module_without_callbacks_of_its_own_is_asked_for_none(monkeypatch):
    asked = []

    class MakesOnlyLightnings(Base):
        def configure_callbacks(self):
            asked.append(1)
            return []

    fitted(LogsValues())
    assert not asked
    fitted(MakesOnlyLightnings(), evaluate_clients_every=None)
    assert asked == [1]
