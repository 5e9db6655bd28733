"""Methods and a callback that the tests of the hooks share."""

from functools import partial
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from fl_lightning.aggregation import GatheringAggregator, ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.functional import state as S
from fl_lightning.nets import Perceptron

Linear = partial(Perceptron, hidden=())
FLOATS = 4 * 8 + 8 + 4 * 8 + 8 * 3 + 3
"""Float entries of BatchNormNet: two linear layers, BatchNorm's weight, bias and two running statistics."""
BYTES = 4 * FLOATS + 8
"""Bytes of all entries of BatchNormNet: float32, and an int64 that counts batches."""


class Updates(pl.Callback):
    """Copies the updates of each round's last exchange by client, and the global weights after each round."""

    def __init__(self):
        self.rounds = []
        self.after = []

    def on_train_epoch_start(self, trainer, loop):
        self.rounds.append({})

    def on_client_end(self, trainer, loop, update):
        weights = None if update.weights is None else S.clone(update.weights)
        extras = apply_to_collection(dict(update.extras), torch.Tensor, lambda value: value.detach().clone())
        copied = SimpleNamespace(**{**vars(update), "weights": weights, "extras": extras})
        self.rounds[-1][update.client_id] = copied

    def on_train_batch_end(self, trainer, loop, *_):
        self.after.append(S.clone(loop.client.state_dict()))


class Quadratic(pl.LightningModule):
    """Is a module without logits."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return self.w(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SCAFFOLDServer(ServerModule):
    """Keeps any rule for the weights, and computes c <- c + (1/N) sum_i (c_i+ - c_i) (line 17)."""

    def setup(self):
        self.control = self.server_state(self.server.trainable)

    def broadcast(self, exchange, client_id):
        return self.sends(exchange, control=self.control)

    def add(self, update):
        self.sum("control", update.extras["control_delta"])

    def finish(self, exchange, aggregate):
        S.add_(self.control, self.summed("control"), 1 / self.server.num_clients)
        return aggregate


class SCAFFOLD(ClientModule):
    """Is the whole method in one screen (Karimireddy et al. 2020, Algorithm 1, Option II)."""

    server_class = SCAFFOLDServer
    needs = frozenset({"accumulated_lr"})

    def receive(self, broadcast, local):
        c = broadcast.extras["control"]
        self.round_buffer("c", c)
        self.round_buffer("c_i", self.memory.get("control", S.zeros_like(c)))

    def training_step(self, batch, batch_idx):
        correction = S.sub(self.round["c"], self.round["c_i"])
        return self.local_loss(batch, batch_idx) + S.inner(correction, self.params())

    def reply(self, exchange, local):
        c = self.round["c"]
        c_i = self.round["c_i"]
        if not self.num_steps:
            return {"control_delta": S.zeros_like(c_i)}
        moved = S.sub(self.received, self.params())
        delta = S.sub(S.scale(moved, 1 / self.accumulated_lr), c)
        self.memory["control"] = S.add(c_i, delta)
        return {"control_delta": delta}


class Median(GatheringAggregator):
    """Takes the median of every trainable entry over the clients with samples."""

    def reduce(self, updates):
        assert list(updates) == sorted(updates)
        rows = [update.weights for update in updates.values()]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in self.server.trainable}
        return {name: value.double().quantile(0.5, 0).to(value.dtype) for name, value in stacked.items()}
