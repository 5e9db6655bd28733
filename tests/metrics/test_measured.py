"""The module of docs/measuring.md logs the class-wise accuracies of a round and the forgetting over all rounds."""

import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from tests.toys import samples, trainer

PAGE = Path(__file__).resolve().parents[2] / "docs/measuring.md"
EPOCHS = 5


def documented():
    """Return the class of the page, for three classes."""
    block = next(part for part in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Measured" in part)
    names = {}
    exec(block.replace("num_classes=10", "num_classes=3"), names)
    return names["Measured"]


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(20)), batch_size=4)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*samples(30, seed=1)), batch_size=7)


class Net(documented()):
    """Forgets: its learning rate is large. Notes its hits by class itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.hits = []
        self.rows = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_validation_start(self):
        x, y = samples(30, seed=1)
        right = (self.net(x).argmax(1) == y).double()
        if not self.trainer.sanity_checking:
            self.hits.append(torch.stack([right[y == label].mean() for label in range(3)]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=3.0)


class Noted(pl.Callback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, run, module):
        self.rows.append({name: float(value) for name, value in run.callback_metrics.items()})


@pytest.mark.parametrize("federated", [False, True])
def test_the_documented_module_is_right(federated):
    module = Net()
    noted = Noted()
    model, data = module, Data()
    if federated:
        model = FederatedLoop(module)
        data = FederatedDataModule.from_datamodule(Data(), num_clients=2)
    trainer(EPOCHS, callbacks=[noted], num_sanity_val_steps=2).fit(model, datamodule=data)
    assert len(module.hits) == len(noted.rows) == EPOCHS
    for epoch, row in enumerate(noted.rows):
        by_round = torch.stack(module.hits[: epoch + 1])
        for label in range(3):
            assert row[f"accuracy/{label}"] == pytest.approx(float(by_round[-1, label]))
        assert row["forgetting"] == pytest.approx(float((by_round.amax(0) - by_round[-1]).mean()), abs=1e-6)
    assert max(row["forgetting"] for row in noted.rows) > 0
