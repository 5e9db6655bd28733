"""Modules as users write them for a plain Trainer. Nothing here knows of federations."""

import copy
from typing import NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric, MeanSquaredError, MetricCollection

from tests.user_data import Curve, Dicts, Pairs


class Classifier(pl.LightningModule):
    """Has a scheduler, a metric object and hyper-parameters."""

    def __init__(self, hidden=8, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))
        self.train_acc = Accuracy("multiclass", num_classes=3)
        self.val_acc = Accuracy("multiclass", num_classes=3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self(x), y)
        self.log_dict({"val_acc": self.val_acc, "val_loss": F.cross_entropy(self(x), y)})

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Regression(pl.LightningModule):
    """Has a scheduler that watches a logged value."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.mse = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_mse", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mse(self.net(x), y)
        self.log("val_mse", self.mse)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_mse"}}


class TinyGAN(pl.LightningModule):
    """Steps two optimizers by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        g, c = self.optimizers()
        z = torch.randn(len(real), 2)
        self.toggle_optimizer(c)
        fake = self.generator(z).detach()
        loss_c = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        c.zero_grad()
        self.manual_backward(loss_c)
        self.clip_gradients(c, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        c.step()
        self.untoggle_optimizer(c)
        self.toggle_optimizer(g)
        loss_g = F.softplus(-self.critic(self.generator(z))).mean()
        g.zero_grad()
        self.manual_backward(loss_g)
        g.step()
        self.untoggle_optimizer(g)
        self.log_dict({"g_loss": loss_g, "c_loss": loss_c}, prog_bar=True)

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        return [of_generator, of_critic], []


class Lazy(pl.LightningModule):
    """Builds its layers in configure_model."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Linear(4, 3)

    def training_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class DictNet(pl.LightningModule):
    """Has dictionary batches, BatchNorm, a step-wise schedule, and a hook that counts."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.epochs = 0

    def on_train_epoch_start(self):
        self.epochs += 1

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["image"]), batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch["image"]), batch["label"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WarmUp(Classifier):
    """Overrides optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = self.hparams.lr * min(1.0, (batch_idx + 1) / 4)
        optimizer.step(closure=optimizer_closure)

    def on_before_optimizer_step(self, optimizer):
        self.log("grad_norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


SIX = ((Classifier, Pairs), (Regression, Curve), (TinyGAN, Pairs), (Lazy, Pairs), (DictNet, Dicts), (WarmUp, Pairs))


class Plain(pl.LightningModule):
    """Has the least that a module needs. The modules below differ from it in one habit each."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Newton(Plain):
    """Has an optimizer that calls its closure several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4)


class Metrics(Plain):
    """Logs collections of metrics whole or computes them by hand, and keeps lists of outputs."""

    def __init__(self):
        super().__init__()
        both = MetricCollection({"acc": Accuracy("multiclass", num_classes=3), "mean": MeanMetric()})
        self.train_metrics = both["acc"].clone()
        self.val_metrics = both.clone(prefix="val/")
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.train_metrics.update(self.net(batch[0]), batch[1])
        self.log_dict({"half": np.float32(0.5), "largest": loss}, reduce_fx="max")
        return loss

    def on_train_epoch_end(self):
        self.log_dict({"epoch_loss": torch.stack(self.losses).mean(), "epoch_acc": self.train_metrics.compute()})
        self.losses.clear()
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.val_metrics["acc"].update(logits, batch[1])
        self.val_metrics["mean"].update(F.cross_entropy(logits, batch[1]))
        self.log_dict({name: self.val_metrics[name] for name in ("acc", "mean")})

    def on_validation_epoch_end(self):
        self.log("seen", float(self.val_metrics["acc"].update_count))


class Copies(Plain):
    """Keeps averaged weights and counters beside the net, by what the step returns."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(requires_grad=False)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("smooth", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert not outputs["loss"].requires_grad
        assert outputs["size"] == len(batch[0])
        self.batches += 1
        self.smooth.lerp_(outputs["loss"], 0.1)
        for mean, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mean.data.lerp_(new.data, 0.5)


class FineTune(Plain):
    """Has a frozen part, parameter groups, a clipping of its own and a step-wise schedule."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(requires_grad=False)

    def configure_optimizers(self):
        groups = [{"params": self.net[2].weight, "lr": 0.05}, {"params": [self.net[2].bias], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step", "name": "warm"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


class ByHand(Plain):
    """Optimizes by hand with accumulation and a scheduler, and returns nothing."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, *args):
        batch, batch_idx = args
        optimizer = self.optimizers()
        with optimizer.toggle_model():
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
        self.log("lr", self.lr_schedulers().get_last_lr()[0], reduce_fx="min")

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Worded(Pairs):
    """Has a vocabulary that its module asks for, and batches that are named tuples."""

    vocabulary = ("a", "b", "c")

    def train_dataloader(self):
        return DataLoader(self.sets[0], self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.sets[1], self.batch_size, collate_fn=self.collate)

    @staticmethod
    def collate(items):
        return Words(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


class Words(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Asking(Plain):
    """Asks the Trainer for many things, and stops when a validated value stands still."""

    def setup(self, stage):
        assert len(self.trainer.datamodule.vocabulary) == 3

    def training_step(self, batch, batch_idx):
        self.log("round", float(self.current_epoch), reduce_fx="max")
        self.log("steps", float(self.trainer.global_step), reduce_fx="max")
        if self.logger is not None:
            self.logger.log_metrics({"size": len(batch.x)}, step=self.global_step)
        return super().training_step((batch.x, batch.y), batch_idx)

    def configure_callbacks(self):
        return EarlyStopping("val_loss", patience=1, min_delta=100.0)


MORE = ((Newton, Pairs), (Metrics, Pairs), (Copies, Pairs), (FineTune, Pairs), (ByHand, Pairs), (Asking, Worded))


class LowRank(nn.Module):
    """Has a frozen linear layer and a trained low-rank change of the layer, as LoRA has."""

    def __init__(self, inputs, outputs, rank=1):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) * 0.1)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body = LowRank(4, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = LowRank(64, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
