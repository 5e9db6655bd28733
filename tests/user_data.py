"""Data modules as users write them for a plain Trainer. Nothing here knows of federations."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

CENTRES = torch.randn(3, 4, generator=torch.Generator().manual_seed(99)) * 2


def points(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return CENTRES[y] + torch.randn(n, 4, generator=g), y


class Pairs(pl.LightningDataModule):
    """Has (x, y) in memory, with a validation and a test loader."""

    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size
        self.stages = []

    def setup(self, stage):
        self.stages.append(stage)
        self.sets = [TensorDataset(*points(n, seed)) for seed, n in enumerate((90, 30, 40))]

    def train_dataloader(self):
        return DataLoader(self.sets[0], self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.sets[1], 16)

    def test_dataloader(self):
        return DataLoader(self.sets[2], 16)


class DictSamples(Dataset):
    def __init__(self, n, seed):
        self.x, self.y = points(n, seed)
        self.writer = [f"w{i % 6}" for i in range(n)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.randn(4) * 0.01
        return {"image": self.x[index] + noise, "label": int(self.y[index]), "writer": self.writer[index]}


class Dicts(pl.LightningDataModule):
    """Makes dictionary batches of a dataset that draws at random, by its own collate function, without a test set."""

    def train_dataloader(self):
        return DataLoader(DictSamples(60, 0), batch_size=6, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(DictSamples(20, 1), batch_size=6, collate_fn=self.collate)

    @staticmethod
    def collate(items):
        return {
            "image": torch.stack([item["image"] for item in items]),
            "label": torch.tensor([item["label"] for item in items]),
        }


class Curve(pl.LightningDataModule):
    """Has float targets for a regression, and no classes."""

    def train_dataloader(self):
        x = torch.linspace(-2, 2, 64)[:, None]
        return DataLoader(TensorDataset(x, torch.sin(x)), batch_size=8, shuffle=True)

    def val_dataloader(self):
        x = torch.linspace(-1.9, 1.9, 20)[:, None]
        return DataLoader(TensorDataset(x, torch.sin(x)), batch_size=8)


class Sensor(IterableDataset):
    """Gives `n` labeled readings of one place as they come, or readings without end for None."""

    def __init__(self, place, n=None):
        self.place = place
        self.n = n

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.place)
        read = 0
        while self.n is None or read < self.n:
            y = int(torch.randint(3, (), generator=draw))
            yield CENTRES[y] + torch.randn(4, generator=draw), y
            read += 1


class Sensors(pl.LightningDataModule):
    """Has a stream for each client: two without end, one whose third batch is small, and an empty one."""

    def __init__(self, batch_size=4, num_workers=0, drop_last=False):
        super().__init__()
        self.lengths = (None, 10, 0, None)
        self.settings = {"batch_size": batch_size, "num_workers": num_workers, "drop_last": drop_last}

    def train_dataloader(self):
        return {place: DataLoader(Sensor(place, n), **self.settings) for place, n in enumerate(self.lengths)}

    def val_dataloader(self):
        return DataLoader(TensorDataset(*points(30, 9)), batch_size=10)
