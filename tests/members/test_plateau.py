"""ReduceLROnPlateau of a client's module, which the server steps once a round."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.methods import FedProx
from tests.toys import equal, folded, toy_data, trainer, weights_of
from tests.user_modules import Plain


class Plateaued(Plain):
    """As every torchgeo task: a plateau on the validation loss; here it never improves by the threshold."""

    monitor = "val_loss"
    settings = {"patience": 0, "factor": 0.5, "threshold": 0.9}
    rates: list[float] = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, **self.settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


class Watching(Plateaued):
    monitor = "train_loss"


class Unknown(Plateaued):
    monitor = "val_los"


class Stepped(Plateaued):
    """With another scheduler, which must not see the plateau's factor, and two parameter groups."""

    def configure_optimizers(self):
        first = self.net[0].parameters()
        last = self.net[2].parameters()
        optimizer = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.4}], lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, **self.settings)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.1), {"scheduler": plateau, "monitor": "val_loss"}]


def fit(module, rounds=4, ckpt_path=None, callbacks=None, wrap=lambda module: module, epochs=1, **settings):
    pl.seed_everything(7, verbose=False)
    Plateaued.rates.clear()
    loop = FederatedLoop(wrap(module()), seed=1, local_epochs=epochs, **folded(settings))
    run = trainer(rounds, callbacks=callbacks)
    run.fit(loop, datamodule=toy_data((8, 8), batch_size=8), ckpt_path=ckpt_path)
    return loop


@pytest.mark.parametrize("module", [Plateaued, Watching])
def test_the_rate_of_the_next_round_is_by_the_global_value(module, caplog):
    caplog.set_level("INFO")
    fit(module)
    rates = Plateaued.rates[-8:]  # one step a client, two clients a round; a probe may come before
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert sum("is stepped once a round with" in text for text in caplog.messages) == 1


def test_is_the_loop_by_hand():
    """Two clients of equal size, one full-batch step each: their mean is one step on all samples, with its plateau."""
    loop = fit(Plateaued, 6)
    pl.seed_everything(7, verbose=False)
    module = Plateaued()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, **Plateaued.settings)
    data = toy_data((8, 8), batch_size=8)
    (x, y), (x_val, y_val) = data.source.train, data.source.test
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(module.net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            plateau.step(F.cross_entropy(module.net(x_val), y_val))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(loop.client.module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_method_around_the_module_and_a_second_scheduler():
    seen = []

    class Seen(Stepped):
        def configure_optimizers(self):
            found = super().configure_optimizers()
            found[0][0].register_step_post_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
            return found

    fit(Seen, 3, wrap=lambda module: FedProx(module=module, mu=0.1), epochs=2, clock="round")
    taken = torch.tensor(seen[-4:])  # the third round: two clients, two epochs of one step; its rates are halved
    torch.testing.assert_close(taken, torch.tensor([[0.05, 0.2], [0.005, 0.02]] * 2))


@pytest.mark.parametrize("every", [1, 2])
def test_a_metric_that_nobody_logs_is_named_once_a_round_was_evaluated(every):
    rounds = []

    class Rounds(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rounds.append(trainer.current_epoch)

    run = trainer(4, callbacks=[Rounds()], check_val_every_n_epoch=every)
    with pytest.raises(ValueError, match=r"got monitor='val_los'; watch one of \[.*'train_loss', 'val_loss'\]"):
        run.fit(FederatedLoop(Unknown(), seed=1), datamodule=toy_data((8, 8), batch_size=8))
    assert rounds == [*range(every)]


def test_a_run_that_is_continued_before_its_first_evaluation_names_it_too(tmp_path):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_on_train_epoch_end=True)
    data = {"datamodule": toy_data((8, 8), batch_size=8)}
    trainer(1, callbacks=[keep], enable_checkpointing=True, check_val_every_n_epoch=2).fit(
        FederatedLoop(Unknown(), seed=1), **data
    )
    run = trainer(3, check_val_every_n_epoch=2)
    with pytest.raises(ValueError, match="got monitor='val_los'"):
        run.fit(FederatedLoop(Unknown(), seed=1), **data, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert run.current_epoch == 1


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_a_round_that_is_evaluated_after_its_run_was_cut_off_is_not_checked(tmp_path, monitor):
    """Its row has no values of the training, which an earlier run has logged."""

    class Watcher(Plateaued):
        pass

    Watcher.monitor = monitor
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    data = {"datamodule": toy_data((8, 8), batch_size=8)}
    trainer(1, callbacks=[keep], enable_checkpointing=True).fit(FederatedLoop(Watcher(), seed=1), **data)
    run = trainer(3)
    run.fit(FederatedLoop(Watcher(), seed=1), **data, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert run.current_epoch == 3


@pytest.mark.parametrize("at_validation", [False, True])
def test_resume_is_exact(tmp_path, at_validation):
    """A checkpoint written by the evaluation comes before the plateau's step, one of the epoch's end after it."""
    whole = fit(Plateaued, 5)
    rates = Plateaued.rates[-4:]
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not at_validation)
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(Plateaued(), seed=1)
    trainer(3, callbacks=[keep], enable_checkpointing=True).fit(loop, datamodule=toy_data((8, 8), batch_size=8))
    resumed = fit(Plateaued, 5, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert Plateaued.rates[-4:] == rates
    assert len(set(rates)) > 1
    assert equal(weights_of(resumed), weights_of(whole))


def test_rounds_without_the_value_wait():
    loop = FederatedLoop(Plateaued(), seed=1)
    Plateaued.rates.clear()
    trainer(6, check_val_every_n_epoch=2).fit(loop, datamodule=toy_data((8, 8), batch_size=8))
    assert Plateaued.rates == pytest.approx([0.1] * 8 + [0.05] * 4)


class Sometimes(Plateaued):
    def validation_step(self, batch, batch_idx):
        if self.current_epoch < 2:
            super().validation_step(batch, batch_idx)


def test_a_value_that_was_logged_once_may_be_absent_later():
    loop = fit(Sometimes, 4)
    assert "val_loss" not in loop.round_metrics
    assert Plateaued.rates == pytest.approx([0.1] * 4 + [0.05] * 4)


@pytest.mark.parametrize("broken_round", [0, 1])
def test_a_round_that_skips_all_clients_waits(broken_round):
    """Nobody logs anything in it, which is no reason to refuse the monitor."""

    class Broken(Watching):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if self.trainer.current_epoch == broken_round else loss

    loop = fit(Broken, 4, faults=FaultPolicy(nonfinite="skip", patience=2))
    assert "train_loss" in loop.round_metrics
    assert Plateaued.rates == pytest.approx([0.1] * 6 + [0.05] * 2)
