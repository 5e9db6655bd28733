"""A module and a data module as one writes them for Lightning. Neither knows of a federation."""

import csv
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Subset, TensorDataset


class Patients(LightningDataModule):
    """Patients of a clinic: a csv with a header, measurements, and in the last column what is predicted.

    Every fifth patient is tested.

    Args:
        path: The csv.
        batch_size: Number of patients per batch.
    """

    def __init__(self, path: str, batch_size: int = 16) -> None:
        super().__init__()
        self.path = path
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        with Path(self.path).open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        table = torch.tensor([[float(cell) for cell in row] for row in rows])
        self.patients = TensorDataset(table[:, :-1], table[:, -1])

    def train_dataloader(self) -> DataLoader:
        places = [place for place in range(len(self.patients)) if place % 5]
        return DataLoader(Subset(self.patients, places), batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Subset(self.patients, range(0, len(self.patients), 5)), batch_size=self.batch_size)


class Regressor(LightningModule):
    """A linear regression.

    Args:
        lr: Learning rate.
    """

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.net = torch.nn.Linear(10, 1)
        self.lr = lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.error(batch, "train/mse")

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.error(batch, "test/mse")

    def error(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
        x, y = batch
        mse = torch.nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log(name, mse)
        return mse

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
