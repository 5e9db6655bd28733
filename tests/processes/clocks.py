"""Fits a module with a schedule over all rounds in a number of processes, in a folder, for test_clocks.py."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules

from fl_lightning import FederatedLoop
from tests.processes.strategies import forked
from tests.toys import toy_data, trainer


class Net(pl.LightningModule):
    """Has a loss that depends on the epoch and the step, and a schedule that depends on the length of the run."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def training_step(self, batch, batch_idx):
        world = (self.trainer.world_size, self.trainer.global_rank, self.trainer.num_nodes, self.trainer.num_devices)
        assert world == (1, 0, 1, 1)
        self.log_dict({"at/epoch": float(self.current_epoch), "at/step": float(self.global_step)})
        self.log("at/steps", float(self.trainer.estimated_stepping_batches))
        return self.loss(batch) / (1 + self.current_epoch + 0.1 * self.global_step)

    def validation_step(self, batch, batch_idx):
        drawn = torch.rand(()) + random.random() + np.random.rand()
        self.log("val_loss", self.loss(batch) + drawn)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        cycle = schedules.OneCycleLR(optimizer, 0.3, total_steps=int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Rows(pl.Callback):
    """Keeps the row of each round."""

    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))


def run(num_processes, folder):
    folder.mkdir()
    rows = Rows()
    loop = FederatedLoop(Net(), local_epochs=2, seed=3, threads=1)
    fit = trainer(4, callbacks=[rows, Write(folder, rows)], **forked(num_processes))
    fit.fit(loop, datamodule=toy_data((16, 12, 5, 9), cohort_size=3, eval_batch_size=7))


class Write(pl.Callback):
    """Writes rows and weights, in the process that has them."""

    def __init__(self, folder, rows):
        self.folder = folder
        self.rows = rows

    def on_train_end(self, trainer, loop):
        if trainer.global_rank == 0:
            (self.folder / "rows.json").write_text(json.dumps(self.rows.rows, sort_keys=True))
            torch.save(loop.client.module.state_dict(), self.folder / "weights.pt")


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
