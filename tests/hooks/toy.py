"""What the tests of the hooks share."""

import copy
from functools import partial
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning.functional import state as S
from fl_lightning.nets import Perceptron

Linear = partial(Perceptron, hidden=())
FLOATS = 4 * 8 + 8 + 4 * 8 + 8 * 3 + 3
"""Float entries of BatchNormNet: two linear layers, BatchNorm's weight, bias and two running statistics."""


class Updates(pl.Callback):
    """Copies of every update, by round and client (the last exchange's), and of the global weights after each round."""

    def __init__(self):
        self.rounds, self.after = [], []

    def on_train_epoch_start(self, trainer, loop):
        self.rounds.append({})

    def on_client_end(self, trainer, loop, update):
        weights = None if update.weights is None else S.clone(update.weights)
        copied = SimpleNamespace(**{**vars(update), "weights": weights, "extras": copy.deepcopy(update.extras)})
        self.rounds[-1][update.client_id] = copied

    def on_train_batch_end(self, trainer, loop, *_):
        self.after.append(S.clone(loop.client.state_dict()))


class Quadratic(pl.LightningModule):
    """A module without logits."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.w(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
