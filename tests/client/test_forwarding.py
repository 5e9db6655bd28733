"""Callbacks that a module makes in `configure_callbacks`: their hooks on batches get the clients' batches."""

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import nn

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.client.hooks import BATCH_HOOKS
from fl_lightning.methods import FedProx
from tests.toys import equal, folded, toy_data, trainer, weights_of
from tests.user_data import Pairs
from tests.user_modules import Plain

SIZES = (7, 12, 5)


class Scale(nn.Module, pl.Callback):
    """Scales batches in place, as a preprocessor does, and notes what it is called with."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.calls = []

    def note(self, name, module, batch):
        assert isinstance(batch[0], torch.Tensor)
        assert isinstance(module, Plain)
        self.calls.append((name, len(batch[0])))

    def change(self, name, module, batch):
        self.note(name, module, batch)
        batch[0].mul_(self.factor)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.change("train", pl_module, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note("train end", pl_module, batch)
        pl_module.log("scaled", batch[0].abs().mean())
        assert outputs["loss"].isfinite()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.change("validation", pl_module, batch)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("validation end", pl_module, batch)
        pl_module.log("val_scaled", batch[0].abs().mean())

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.change("test", pl_module, batch)

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.change("predict", pl_module, batch)

    def on_train_epoch_start(self, trainer, pl_module):
        assert isinstance(pl_module, FederatedLoop)
        self.calls.append(("round", trainer.current_epoch))


class Scaled(Plain):
    """Has its preprocessor among its modules."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.scale = Scale(factor)

    def configure_callbacks(self):
        return [self.scale]

    def test_step(self, batch, batch_idx):
        self.log("test_sum", batch[0].abs().sum())

    def predict_step(self, batch, batch_idx):
        return batch[0]


class ByItself(Plain):
    """The same without a callback."""

    def training_step(self, batch, batch_idx):
        return super().training_step((2 * batch[0], batch[1]), batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step((2 * batch[0], batch[1]), batch_idx)


def made(module):
    pl.seed_everything(7, verbose=False)
    return module()


def fit(module, rounds=2, data=None, callbacks=None, **settings):
    loop = FederatedLoop(module, seed=1, **folded(settings))
    run = trainer(rounds, callbacks=callbacks)
    run.fit(loop, datamodule=data or toy_data(SIZES, eval_batch_size=20))
    return loop, run


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 2}, {"chunk": 3}, {"on_error": "skip"}], ids=str)
def test_a_preprocessor_changes_the_clients_batches(settings):
    module = made(Scaled)
    loop, run = fit(module, **settings)
    wanted, _ = fit(made(ByItself), **{**settings, "chunk": 1})  # which this is with the callback
    assert equal(weights_of(loop), weights_of(wanted))
    assert loop.round_metrics["val_loss"] == wanted.round_metrics["val_loss"]
    assert loop.round_metrics["loss"] == wanted.round_metrics["loss"]
    assert {"scaled", "val_scaled"} <= loop.round_metrics.keys()
    epochs = settings.get("local_epochs", 1)
    batches = [5, 2, 5, 5, 2, 5]
    calls = module.scale.calls
    assert sorted(n for name, n in calls if name == "train") == sorted(batches * 2 * epochs)
    assert [n for name, n in calls if name == "validation end"] == [20, 10] * 2
    assert [n for name, n in calls if name == "round"] == [0, 1]

    calls.clear()
    run.test(loop, datamodule=loop.data, verbose=False)
    seen = run.predict(loop, datamodule=loop.data)
    assert [name for name, _ in calls] == ["test"] * 2 + ["predict"] * 2
    assert seen is None or len(seen) == 2


def test_a_change_in_place_stays_with_its_batch():
    """Whatever memory a batch lies in: the samples are those of the source in the next round."""
    for more in {"batch_size": "full"}, {"batch_size": "full", "shuffle": False}, {"eval_batch_size": 30}:
        loops = [fit(made(kind), 3, toy_data((6, 6), **more))[0] for kind in (Scaled, ByItself)]
        assert equal(*map(weights_of, loops))
        assert loops[0].round_metrics["val_loss"] == loops[1].round_metrics["val_loss"]


def test_a_method_around_the_module_hands_it_on():
    assert equal(
        *(weights_of(fit(FedProx(mu=0.1, module=made(module)))[0]) for module in (Scaled, ByItself)),
    )


class All(pl.Callback):
    """Notes the hooks in their order."""

    def __init__(self):
        self.calls = []


def noting(name):
    def hook(self, trainer, pl_module, *args):
        self.calls.append((name, type(pl_module).__name__))
        return -1  # nobody asks

    return hook


for hook_name in BATCH_HOOKS:
    setattr(All, hook_name, noting(hook_name))


class Noted(Plain):
    def __init__(self):
        super().__init__()
        self.all = All()

    def configure_callbacks(self):
        return self.all

    def on_train_batch_start(self, batch, batch_idx):
        self.all.calls.append(("own", ""))


def test_hooks_come_in_lightnings_order_and_those_of_the_loop_are_left_out():
    module = Noted()
    fit(module, 1, toy_data((4,)))
    order = [name for name, _ in module.all.calls]
    assert order[:8] == [
        "on_train_batch_start",
        "own",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_batch_start",
    ]
    assert {kind for name, kind in module.all.calls if name != "own"} == {"Noted"}


def test_callbacks_of_lightning_go_on_with_rounds(tmp_path):
    class Stops(Plain):
        def configure_callbacks(self):
            every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
            return [EarlyStopping("val_loss", patience=5), every]

    fit(Stops(), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={n}.ckpt" for n in (1, 2, 3)]


def test_a_lambda_callback_gets_batches_and_trainers_own_do_not():
    seen = []
    rounds = []

    class Lambda(Plain):
        def configure_callbacks(self):
            return [LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: seen.append(batch))]

    class Rounds(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rounds.append(batch)

    fit(Lambda(), 1, callbacks=[Rounds()])
    assert rounds == [3]
    assert [len(x) for x, _ in seen] == [5, 2, 5, 5, 2, 5]


def test_the_callback_works_as_before_under_a_plain_trainer_and_in_another_loop():
    module = Scaled()
    fit(module, 1)
    fit(module, 1)
    calls = module.scale.calls
    assert sum(name == "train" for name, _ in calls) == 12
    calls.clear()
    plain = Scaled()
    plain.scale = module.scale
    data = Pairs()
    module.scale.on_train_epoch_start = lambda trainer, pl_module: None
    trainer(1, limit_train_batches=2).fit(plain, datamodule=data)
    assert [name for name, _ in calls if name == "train"] == ["train"] * 2
    del module.scale.on_train_epoch_start
    again = pickle.loads(pickle.dumps(copy.deepcopy(module.scale)))
    assert again.factor == module.scale.factor


def test_a_fit_of_a_data_module_is_the_same():
    data = [FederatedDataModule.from_datamodule(Pairs(), num_clients=3) for _ in range(2)]
    one, other = (fit(made(module), 2, given)[0] for module, given in zip((Scaled, ByItself), data, strict=True))
    assert equal(weights_of(one), weights_of(other))


class LogsByItself(pl.Callback):
    """Logs by its own `log`, which the Trainer gives it, not by the module's."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("mean", batch[0].mean())
        self.log_dict({"twice": 2 * batch[0].mean()})

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_mean", batch[0].mean())

    def on_train_epoch_end(self, trainer, pl_module):
        self.log("rounds", float(trainer.current_epoch + 1))


class LogsByTheModule(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("mean", batch[0].mean())
        pl_module.log("twice", 2 * batch[0].mean())

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        pl_module.log("val_mean", batch[0].mean())

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("rounds", float(trainer.current_epoch + 1))


def test_what_a_callback_logs_by_itself_is_what_the_module_logs():
    def logged(callback):
        class Made(Plain):
            def configure_callbacks(self):
                return callback

        pl.seed_everything(7, verbose=False)
        run = trainer(2)
        run.fit(FederatedLoop(Made(), seed=1), datamodule=toy_data(SIZES))
        return {name: float(value) for name, value in run.callback_metrics.items()}

    own = logged(LogsByItself())
    of_module = logged(LogsByTheModule())
    assert own == of_module
    assert own.keys() >= {"mean", "twice", "val_mean", "rounds"}
