"""Modules as people write them for a plain Trainer: each uses one more of Lightning's hooks or of torch's parts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.third_party.modules import SIZE, Loaded, classes, drawn, images, text


class Base(LightningModule):
    """A classifier with SGD; the others change one thing of it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TwoByHand(Base):
    """Manual optimization with two optimizers, each with a scheduler: one by batch, one by epoch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        by_batch, _ = self.lr_schedulers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        by_batch.step()
        self.log("train_loss", loss)

    def on_train_epoch_end(self):
        self.lr_schedulers()[1].step()

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(self.net[2].parameters(), lr=0.01)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.5),
            torch.optim.lr_scheduler.StepLR(second, 1, 0.1),
        ]
        return [first, second], schedulers


class Stateful(Base):
    """An LSTM whose state goes from batch to batch, in buffers that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("h", torch.zeros(1, 8), persistent=False)
        self.register_buffer("c", torch.zeros(1, 8), persistent=False)

    def forward(self, x):
        out, (h, c) = self.lstm(x, (self.h, self.c))
        if self.training:
            self.h = h.detach()
            self.c = c.detach()
        return self.head(out)


class Configured(Base):
    """Layers come to be in configure_model."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class VAE(Base):
    """Draws in its training step."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        mean, log_var = self.encoder(batch[0]).chunk(2, dim=1)
        std = torch.exp(0.5 * log_var)
        q = torch.distributions.Normal(mean, std)
        p = torch.distributions.Normal(0.0, 1.0)
        z = q.rsample()
        kl = torch.distributions.kl_divergence(q, p).sum(1).mean()
        reconstruction = F.mse_loss(self.decoder(z), batch[0])
        self.log_dict({"kl": kl, "reconstruction": reconstruction})
        return {"loss": reconstruction + 0.1 * kl, "z": z}

    def validation_step(self, batch, batch_idx):
        return None


class Triples(Dataset):
    """Anchor, one of its class, one of another."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x = drawn(SIZE, 4)
        return {"anchor": x[i], "same": x[(i + 3) % SIZE], "other": x[(i + 1) % SIZE]}


class Siamese(Base):
    """One net for three inputs, the triplet loss of torch."""

    def __init__(self):
        super().__init__()
        self.loss = nn.TripletMarginLoss()

    def step(self, batch, stage):
        loss = self.loss(*(F.normalize(self(batch[name])) for name in ("anchor", "same", "other")))
        self.log(f"{stage}_triplet", loss, batch_size=len(batch["anchor"]))
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")


class Collections(Base):
    """A collection of metrics for each stage, computed by hand at the end of the epoch."""

    def __init__(self):
        super().__init__()
        both = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.metrics = nn.ModuleDict({f"{s}_metrics": both.clone(prefix=f"{s}/") for s in ("train", "val", "test")})

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log_dict(self.metrics["train_metrics"](logits, y), on_step=True, on_epoch=False)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log_dict({f"{k}_epoch": v for k, v in self.metrics["train_metrics"].compute().items()})
        self.metrics["train_metrics"].reset()

    def validation_step(self, batch, batch_idx):
        self.metrics["val_metrics"].update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics["val_metrics"].compute())
        self.metrics["val_metrics"].reset()


class EndsEarly(Base):
    """Ends an epoch at its third batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Clips(Base):
    """Its own rule for gradients."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Warms(Base):
    """Warms the learning rate up over the batches."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (batch_idx + 1) / 3)


class SharpnessAware(torch.optim.Optimizer):
    """SAM as a widely used implementation of it."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        norms: list[torch.Tensor] = []
        for group in self.param_groups:
            norms += [p.grad.norm() for p in group["params"]]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Sharp(Base):
    """SAM by its closure."""

    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class SharpByHand(Base):
    """SAM by manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        own = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
        own.first_step()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.second_step()
        return loss

    configure_optimizers = Sharp.configure_optimizers


class Scheduled(Base):
    """Steps its scheduler in its own way."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch + 1)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Averages(Base):
    """Keeps an exponential average of its net in a copy, moved before gradients are cleared."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(requires_grad=False)

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(now, 0.1)


class Skips(Base):
    """Returns None for a batch, and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Normed(Base):
    """Parametrized weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3)))


class Newton(Base):
    """LBFGS, which evaluates its closure several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Sparse(Base):
    """Sparse gradients of an embedding, and groups of their own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.table = nn.Embedding(3, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.head(self.table(y)), x))
        for optimizer in self.optimizers():
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_mse", F.mse_loss(self.head(self.table(batch[1])), batch[0]))

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.table.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters())


class OneCycle(Base):
    """OneCycleLR over the local batches, two groups."""

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Reads(Base):
    """Reads what a Trainer tells: device, type, epoch, hyper-parameters, its optimizers and loaders."""

    def __init__(self, width: int = 8, rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.empty = nn.Parameter(torch.zeros(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += len(y)
        if self.global_rank > 0:
            self.print("a line")
        weight = torch.ones(3, device=self.device, dtype=self.dtype)
        loss = F.cross_entropy(self(x), y, weight=weight)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=self.hparams.rate)


class Tied(Base):
    """GPT-2: the head is the embedding."""

    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.net = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, **quiet))

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Timm(Base):
    """A net and a scheduler of timm."""

    def __init__(self):
        super().__init__()
        import timm

        self.net = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=12, depth=1, num_heads=2, num_classes=3
        )

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)

    def configure_optimizers(self):
        from timm.scheduler import CosineLRScheduler

        optimizer = super().configure_optimizers()
        scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-3)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


def points() -> TensorDataset:
    return TensorDataset(drawn(SIZE, 4), classes())


def pictures() -> TensorDataset:
    return TensorDataset(images(), classes())


ON_POINTS = (
    TwoByHand, Stateful, Configured, VAE, Collections, EndsEarly, Clips, Warms, Sharp, SharpByHand, Scheduled, Averages,
    Skips, Normed, Newton, Sparse, OneCycle, Reads,
)  # fmt: skip
WRITTEN: dict[str, tuple[Callable[[], Dataset[Any]], tuple[str, ...]]] = {
    **{kind.__name__: (points, ()) for kind in ON_POINTS},
    "Siamese": (Triples, ()),
    "Tied": (text, ("transformers",)),
    "Timm": (pictures, ("timm",)),
}
"""Data and packages of each module of this file."""


def written(name: str) -> tuple[LightningModule, LightningDataModule]:
    """Make a module of this file with its data."""
    return globals()[name](), Loaded(WRITTEN[name][0]())
