"""What users' modules and data do that a federation must bear: nothing may leak from one client into the next."""

import random
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop, NonFiniteUpdateError
from fl_lightning.data import DirichletPartition
from tests.toys import equal, folded, toy_data, trainer, weights_of
from tests.user_data import Pairs
from tests.user_modules import Plain


def fit(module, rounds=1, data=None, callbacks=None, ckpt_path=None, **settings):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(module(), **folded({"seed": 1, **settings}))
    data = toy_data((12, 7, 11), batch_size=3) if data is None else data
    trainer(rounds, callbacks=callbacks).fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop


class Accumulates(Plain):
    """Steps every second batch by hand; what the last one leaves is never used."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Mixes(Plain):
    """Draws from the generators of numpy and Python."""

    def training_step(self, batch, batch_idx):
        weight = np.random.beta(1, 1) + random.random()
        return weight * F.cross_entropy(self.net(batch[0]), batch[1])


class Keeps(Plain):
    """Hands out the same optimizer every time."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return self.optimizer


class Starts(Plain):
    """Logs where an epoch begins and ends."""

    def on_train_epoch_start(self):
        self.log("start", sum(p.sum() for p in self.parameters()).detach())

    def on_train_epoch_end(self):
        self.log("end", sum(p.sum() for p in self.parameters()).detach())


@pytest.mark.parametrize("module", [Accumulates, Mixes, Keeps, Starts])
def test_the_order_of_clients_does_not_matter_and_resume_is_exact(module, tmp_path):
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            if not trainer.current_epoch:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    def run(order, **more):
        data = toy_data((12, 7, 11), batch_size=3, schedule=[order, order])
        return fit(module, 2, data, **more)

    one = run([0, 1, 2], callbacks=[Save()])
    other = run([2, 1, 0])
    assert equal(weights_of(one), weights_of(other))
    rows = [{n: v for n, v in loop.round_metrics.items() if "/" not in n} for loop in (one, other)]
    assert rows[0] == rows[1]
    assert equal(weights_of(one), weights_of(run([0, 1, 2], ckpt_path=tmp_path / "one.ckpt")))


class Masked(Plain):
    """A constant with infinities, and a record that is infinite until it is first set."""

    def __init__(self, sets=False):
        super().__init__()
        self.sets = sets
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
        self.register_buffer("best", torch.tensor(torch.inf))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.sets:
            self.best = torch.minimum(self.best, loss.detach())
        return loss


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
@pytest.mark.parametrize("sets", [False, True])
def test_a_constant_that_is_not_finite_is_no_broken_client(sets, nonfinite):
    loop = fit(partial(Masked, sets), 2, toy_data((12, 0, 7)), nonfinite=nonfinite)
    mask = loop.client.module.mask
    assert torch.equal(mask, nn.Transformer.generate_square_subsequent_mask(3))
    assert bool(loop.client.module.best.isfinite()) is sets
    assert loop.round_metrics.get("train/skipped", 0) == 0
    assert all(p.isfinite().all() for p in loop.client.parameters())


class Watches(Plain):
    """ReduceLROnPlateau with its monitor beside it, as Lightning's documents have it; perhaps a step schedule too."""

    steps = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("watched", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "watched"}


class WatchesTwo(Watches):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        step = {"scheduler": StepLR(optimizer, 100), "interval": "step"}
        return [optimizer], [step, {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "watched"}]


def test_weights_that_are_not_finite_at_the_start_are_found():
    class Broken(Plain):
        def __init__(self):
            super().__init__()
            nn.init.constant_(self.net[0].bias, float("nan"))

    with pytest.raises(NonFiniteUpdateError, match="client 0 returned NaN"):
        fit(Broken)


@pytest.mark.parametrize("module", [Watches, WatchesTwo])
def test_a_plateau_finds_its_monitor(module):
    assert fit(module, local_epochs=2).round_metrics["watched"] > 0


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: CosineAnnealingLR(o, 4),
        lambda o: OneCycleLR(o, 0.8, total_steps=4),
        lambda o: SequentialLR(o, [LinearLR(o, 0.5, total_iters=2), ConstantLR(o, 0.3)], [2]),
    ],
)
def test_lr_decay_scales_every_schedule(schedule):
    seen = []

    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    # the hook above runs before the one that gives the schedule its own value back
    fit(Scheduled, 2, toy_data((12,), batch_size=3), lr_decay=0.1, clock="round")
    assert len(seen) == 8
    assert [0.1 * lr for lr in seen[:4]] == pytest.approx(seen[4:])


class Places(Pairs):
    """Shifts every batch where it is moved to the device, and counts."""

    def setup(self, stage):
        super().setup(stage)
        self.calls = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("before")
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("training" if self.trainer.training else "validating")
        return [batch[0] + 1, batch[1]]


def test_transfer_hooks_of_a_data_module_are_called():
    class Sees(Plain):
        def training_step(self, batch, batch_idx):
            self.log("mean", batch[0].mean())
            return super().training_step(batch, batch_idx)

    shifted, plain = (FederatedDataModule.from_datamodule(kind(), num_clients=3) for kind in (Places, Pairs))
    rows = [fit(Sees, data=data).round_metrics["mean"] for data in (shifted, plain)]
    assert rows[0] == pytest.approx(rows[1] + 1, rel=1e-5)
    assert {"before", "training", "validating"} <= set(shifted.source.datamodule.calls)


def test_an_entry_that_comes_to_be_in_training_is_refused():
    class Centres(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", None)

        def training_step(self, batch, batch_idx):
            self.center = batch[0].mean(0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"'module.center' came to be in it; allocate it in __init__"):
        fit(Centres)


def test_minus_one_ends_the_epoch():
    class Lazy(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

        def training_step(self, batch, batch_idx):
            self.log("steps", 1.0, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    assert fit(Lazy, local_epochs=2).round_metrics["steps"] == 3 * 2  # clients x epochs


def test_whole_numbers_that_are_no_classes():
    class Signs(Plain):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self.net(x)[:, 0] - y.float()).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val", self.training_step(batch, batch_idx))

    def data(**settings):
        x = torch.randn(30, 4)
        y = torch.randint(2, (30,)) * 2 - 1
        train = TensorDataset(x[:20], y[:20])
        test = TensorDataset(x[20:], y[20:])
        return FederatedDataModule.from_datasets(train, test, num_clients=3, **settings)

    assert fit(Signs, data=data()).round_metrics["val"] > 0
    with pytest.raises(ValueError, match="needs the labels of the samples, got none: use IIDPartition"):
        fit(Signs, data=data(partition=DirichletPartition(1.0)))


class Scripted(Plain):
    """A part of it is TorchScript. Client 1 fails by an error of its own."""

    def __init__(self):
        super().__init__()
        self.net = torch.jit.script(self.net)

    def training_step(self, batch, batch_idx):
        if len(self.trainer.train_dataloader.dataset) == 7:
            self.net.added = 1
            raise RuntimeError("this client has seven samples")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_an_error_of_a_client_with_torchscript_is_told_and_undone():
    with pytest.raises(RuntimeError, match="this client has seven samples"):
        fit(Scripted)
    loop = fit(Scripted, on_error="skip")
    assert not hasattr(loop.client.module.net, "added")
    data = toy_data((12, 7, 11), batch_size=3, schedule=[[0, 2]])
    assert equal(weights_of(loop), weights_of(fit(Scripted, data=data)))
