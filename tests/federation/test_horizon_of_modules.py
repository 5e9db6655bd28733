"""A module, or data, that ask their Trainer how long the run is, wherever they ask: the run depends on the plan."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedLoop
from fl_lightning.client.hooks import FORWARDED
from fl_lightning.data import FederatedDataModule, Source, TensorSource
from fl_lightning.data.splits import TensorSplit
from fl_lightning.federation.horizon import LENGTHS, Horizon
from fl_lightning.utils.trainer_view import ALONE, TrainerView, whole_world

X = torch.linspace(0, 1, 48).reshape(12, 4)
Y = torch.arange(12) % 2


class Module(LightningModule):
    """A module of a user's own that plans nothing."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen: list[object] = []

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def asking(hook, name):
    """A module that asks its Trainer for a number in one hook."""

    def ask(self, *args, **kwargs):
        self.seen.append(getattr(self.trainer, name))
        return getattr(Module, hook)(self, *args, **kwargs)

    return type("Asking", (Module,), {hook: ask})()


def fitted(module, rounds, path=None, data=None, **planned):
    """A Trainer after a fit of a module, or of a loop."""
    data = data or FederatedDataModule(TensorSource((X, Y), (X, Y)), num_clients=2, batch_size=4)
    trainer = Trainer(
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    loop = module if isinstance(module, FederatedLoop) else FederatedLoop(module, **planned)
    trainer.fit(loop, datamodule=data, ckpt_path=path)
    return trainer


STEPS = ("forward", "training_step", "validation_step", "optimizer_step")
OTHERS = ("configure_callbacks", "configure_optimizers", *STEPS)
HOOKS = sorted({*FORWARDED, *OTHERS})
"""All hooks of a LightningModule that are called in a federation, and its steps."""


def called_before_a_checkpoint():
    """The hooks that are called by the end of two rounds, found by a module that asks nothing."""
    called = set()

    def note(hook):
        def noted(self, *args, **kwargs):
            if self._trainer is not None:
                called.add(hook)
            return getattr(Module, hook)(self, *args, **kwargs)

        return noted

    fitted(type("Noting", (Module,), {hook: note(hook) for hook in HOOKS})(), 2)
    return sorted(called - {"on_train_end", "on_fit_end", "teardown"})


CALLED = called_before_a_checkpoint()


def test_the_hooks_in_question_are_many():
    asked = {"setup", "configure_model", "configure_callbacks", "training_step", "on_train_batch_start"}
    assert asked | {"validation_step", "on_validation_start", "on_before_optimizer_step"} <= set(CALLED)


TRAINING = {
    *("configure_optimizers", "forward", "optimizer_step", "training_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *(hook for hook in CALLED if hook.startswith(("on_train_batch", "on_train_epoch", "on_before", "on_after"))),
}
"""The hooks in which a module is told of the local epochs and steps of all rounds."""

STEPS_OF_A_ROUND = 2


@pytest.mark.parametrize("hook", CALLED)
def test_a_module_that_asks_in_any_hook_is_not_continued_with_more_rounds(tmp_path, hook):
    trainer = fitted(asking(hook, "max_epochs"), 1)
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=r"(trainer\.max_epochs|planned_rounds) was 1, is 3 "):
        fitted(asking(hook, "max_epochs"), 3, tmp_path / "1.ckpt")


@pytest.mark.parametrize("hook", CALLED)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_module_is_told_the_planned_rounds_in_any_hook(hook, name):
    module = asking(hook, name)
    fitted(module, 1, planned_rounds=4, local_epochs=3, max_local_steps=3 * STEPS_OF_A_ROUND)
    in_training = {"max_epochs": 4 * 3}.get(name, 4 * 3 * STEPS_OF_A_ROUND)
    assert set(module.seen) <= {4, in_training}
    assert (in_training in module.seen) == (hook in TRAINING)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("hook", ["configure_optimizers", "training_step", "on_train_epoch_start"])
def test_under_the_clock_round_a_module_does_not_ask_how_long_the_run_is(tmp_path, hook, name):
    module = asking(hook, name)
    fitted(module, 1, clock="round", local_epochs=3, max_local_steps=6).save_checkpoint(tmp_path / "1.ckpt")
    assert set(module.seen) == {3 if name == "max_epochs" else 6}
    fitted(asking(hook, name), 3, tmp_path / "1.ckpt", clock="round", local_epochs=3, max_local_steps=6)


def test_a_module_that_asks_nothing_is_continued_with_more_rounds(tmp_path):
    fitted(asking("training_step", "current_epoch"), 1).save_checkpoint(tmp_path / "1.ckpt")
    fitted(asking("training_step", "current_epoch"), 3, tmp_path / "1.ckpt")


@pytest.mark.parametrize("name", ["max_epochs", "estimated_stepping_batches"])
def test_what_was_asked_in_one_run_is_not_asked_in_the_next(tmp_path, name):
    module = asking("training_step", name)
    loop = FederatedLoop(module)
    fitted(loop, 1)
    module.training_step = lambda batch, batch_idx: Module.training_step(module, batch, batch_idx)
    fitted(loop, 1).save_checkpoint(tmp_path / "1.ckpt")
    fitted(loop, 3, tmp_path / "1.ckpt")


class Outer(Module):
    """A module with another one that asks."""

    def __init__(self):
        super().__init__()
        self.inner = asking("forward", "max_epochs")

    def forward(self, x):
        return self.inner(x)


def test_modules_within_the_module_ask_too(tmp_path):
    fitted(Outer(), 1).save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=r"planned_rounds was 1, is 3 "):
        fitted(Outer(), 3, tmp_path / "1.ckpt")


def test_a_module_without_a_trainer_has_none():
    loop = FederatedLoop(Module())
    loop.trainer = None
    assert not isinstance(loop.client._trainer, TrainerView)


def test_in_an_evaluation_of_several_processes_a_module_sees_all_of_them_and_the_planned_rounds():
    run = SimpleNamespace(world_size=2, global_rank=1, num_nodes=1, num_devices=2, max_epochs=3)
    asked = []
    module = Module()
    module.trainer = TrainerView(run, {**ALONE, "max_epochs": 9}, {"max_epochs": asked.append})
    assert (module.trainer.world_size, module.trainer.max_epochs) == (1, 9)
    with whole_world([module]):
        assert (module.trainer.world_size, module.trainer.global_rank, module.trainer.max_epochs) == (2, 1, 9)
    assert module.trainer.world_size == 1
    assert asked == ["max_epochs", "max_epochs"]


def test_in_a_run_of_one_process_nothing_is_exchanged_for_an_evaluation():
    module = Module()
    module.trainer = TrainerView(SimpleNamespace(), {"max_epochs": 9})
    view = module.trainer
    with whole_world([module]):
        assert module.trainer is view


def test_a_copied_or_pickled_view_tells_the_same_horizon():
    horizon = Horizon()
    view = TrainerView(SimpleNamespace(max_epochs=3), {}, horizon.readers())
    horizon.begin_run(3)
    assert copy.deepcopy(view).max_epochs == 3
    assert horizon.state() == {"trainer.max_epochs": 3}
    horizon.forget()
    there, seen = pickle.loads(pickle.dumps((horizon, view)))
    assert seen.max_epochs == 3
    assert there.state() == {"trainer.max_epochs": 3}
    assert horizon.state() == {}


# --- data that ask ---


class Samples(LightningDataModule):
    """A data module of a user's own that plans nothing."""

    def __init__(self):
        super().__init__()
        self.seen: list[object] = []

    def prepare_data(self):
        pass

    def setup(self, stage):
        pass

    def train_dataloader(self):
        return DataLoader(TensorDataset(X, Y), batch_size=4)

    def val_dataloader(self):
        return DataLoader(TensorDataset(X, Y), batch_size=4)

    def state_dict(self):
        return {}


class OwnSource(Source):
    """A source of a user's own that plans nothing."""

    def __init__(self):
        super().__init__()
        self.seen: list[object] = []

    def attach(self, trainer):
        self.trainer = trainer

    def prepare(self):
        pass

    def load(self):
        return TensorSplit(X, Y), TensorSplit(X, Y)

    def state_dict(self):
        return {}


def asking_data(base, hook, name):
    """A source or data module that asks its Trainer for a number in one hook."""

    def ask(self, *args, **kwargs):
        self.seen.append(getattr(self.trainer, name))
        return getattr(base, hook)(self, *args, **kwargs)

    return type("AskingData", (base,), {hook: ask})()


DATA_HOOKS = [
    *((Samples, hook) for hook in ("prepare_data", "setup", "train_dataloader", "val_dataloader", "state_dict")),
    *((OwnSource, hook) for hook in ("prepare", "load", "state_dict")),
]


@pytest.mark.parametrize("place", ["source", "extra_splits"])
@pytest.mark.parametrize(("base", "hook"), DATA_HOOKS)
def test_data_that_ask_in_any_hook_are_not_continued_with_more_rounds(tmp_path, base, hook, place):
    def data(name):
        asks = asking_data(base, hook, name)
        if place == "source":
            return FederatedDataModule(asks, num_clients=2)
        return FederatedDataModule(TensorSource((X, Y), (X, Y)), num_clients=2, extra_splits={"proxy": asks})

    if place == "extra_splits" and (base is Samples or hook == "state_dict"):
        pytest.skip("extra splits are sources, and a checkpoint keeps the state of the first source alone")
    fitted(Module(), 1, data=data("max_epochs")).save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=r"trainer\.max_epochs was 1, is 3 "):
        fitted(Module(), 3, tmp_path / "1.ckpt", data=data("max_epochs"))
    fitted(Module(), 1, data=data("current_epoch")).save_checkpoint(tmp_path / "1.ckpt")
    fitted(Module(), 3, tmp_path / "1.ckpt", data=data("current_epoch"))


@pytest.mark.parametrize(("base", "hook"), DATA_HOOKS)
@pytest.mark.parametrize("name", LENGTHS)
def test_data_are_told_the_planned_rounds_in_any_hook(base, hook, name):
    asks = asking_data(base, hook, name)
    fitted(Module(), 1, data=FederatedDataModule(asks, num_clients=2), planned_rounds=4)
    assert set(asks.seen) <= {4}
    assert asks.seen or hook == "state_dict", "without a checkpoint nobody asks for the state"
