"""Nets and modules that change themselves whenever they are called, in evaluation too."""

import random
from math import prod

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from fl_lightning.nets import Backbone

HABITS = ("max_norm", "norm", "count", "assign", "grow", "power", "draw", "freeze", "extra")


class Remembers(nn.Module):
    """Adds a constant that is in no parameter and no buffer and grows with every batch."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(2)

    def get_extra_state(self):
        return self.seen.clone()

    def set_extra_state(self, state):
        self.seen = state.clone()

    def forward(self, x):
        self.seen = self.seen + torch.tensor([1.0, 0.01])
        return x + self.seen[1]


class RestlessNet(Backbone):
    """Is a classifier with one habit, or all of them.

    - `max_norm` scales rows of an embedding.
    - `norm` has BatchNorm in train mode.
    - `count` counts in buffers that are saved or not.
    - `assign` puts new tensors into the place of the buffers, `grow` longer ones.
    - `power` iterates for a spectral norm.
    - `draw` draws random numbers.
    - `freeze` freezes a parameter.
    - `extra` has extra state.
    """

    def __init__(self, num_classes, input_shape, habit="all"):
        super().__init__()
        self.habits = HABITS if habit == "all" else (habit,)
        size = prod(input_shape)
        max_norm = 0.5 if "max_norm" in self.habits else None
        self.words = nn.Embedding(8, size, max_norm=max_norm)
        self.norm = nn.BatchNorm1d(size)
        body = nn.Linear(size, 8)
        self.body = spectral_norm(body) if "power" in self.habits else body
        self.remembers = Remembers() if "extra" in self.habits else nn.Identity()
        self.head = nn.Linear(8, num_classes)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("passing", torch.zeros(()), persistent=False)
        self.register_buffer("cache", torch.zeros(1))

    def features(self, x):
        self.change()
        x = x.flatten(1)
        word = x[:, 0].mul(3).long().remainder(8)
        x = self.norm(x + self.words(word))
        x = self.remembers(torch.tanh(self.body(x)))
        return x * (1 + 0.01 * torch.tanh(self.count + self.passing) + 0.01 * torch.tanh(self.cache.sum()))

    def change(self):
        """Change what the habits change before a forward pass."""
        evaluates = not self.training
        if "norm" in self.habits:
            self.norm.train()
        if "power" in self.habits:
            self.body.parametrizations.train()
        if "count" in self.habits:
            self.count += 0.1
            self.passing += 0.2
        if "assign" in self.habits:
            self.count = self.count + 0.1
            self.passing = self.passing + 0.2
        if "grow" in self.habits and evaluates:
            self.cache = torch.cat([self.cache, torch.ones(1)])
        if "draw" in self.habits:
            torch.rand(())
            np.random.rand()
            random.random()
        if "freeze" in self.habits and evaluates:
            self.body.requires_grad_(requires_grad=False)


class Restless(pl.LightningModule):
    """Has the same net in a user's own module."""

    def __init__(self, habit="all"):
        super().__init__()
        self.net = RestlessNet(3, (4,), habit)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
