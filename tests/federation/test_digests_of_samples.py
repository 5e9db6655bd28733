"""The digest of the inputs sees every kind of sample, and is the same for the same samples."""

import datetime
import decimal
import enum
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fl_lightning import FederatedDataModule
from fl_lightning.federation.fingerprint import digest_of_inputs

Pair = namedtuple("Pair", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: int


class ByHand:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x = x
        self.y = y


class Named:
    def __init__(self, x, y):
        self.x = x
        self.y = y


def pixels(scale):
    return Image.fromarray((np.arange(16).reshape(4, 4) * scale).astype("uint8"))


KINDS = {
    "tuple": lambda x, scale: (x * scale, 1),
    "object": lambda x, scale: Named(x * scale, 1),
    "slotted dataclass": lambda x, scale: Slotted(x * scale, 1),
    "slots": lambda x, scale: ByHand(x * scale, 1),
    "named tuple": lambda x, scale: Pair(x * scale, 1),
    "user dict": lambda x, scale: UserDict(x=x * scale, y=1),
    "picture": lambda x, scale: (pixels(scale), 1),
    "set": lambda x, scale: ({"a", "b", "cde", str(scale)}, 1),
    "array of texts": lambda x, scale: (np.array(["a" * scale]), 1),
    "array of objects": lambda x, scale: (np.array([x.numpy() * scale, None], dtype=object), 1),
    "array of dates": lambda x, scale: (np.array([f"2020-01-{scale:02}"], dtype="datetime64[D]"), 1),
    "array of records": lambda x, scale: (np.array([(scale, 0.5)], dtype=[("a", "i4"), ("b", "f4")]), 1),
    "date": lambda x, scale: (datetime.date(2020, 1, scale), 1),
    "decimal": lambda x, scale: (decimal.Decimal(scale), 1),
    "enum": lambda x, scale: (Color.RED if scale == 1 else Color.BLUE, 1),
    "class": lambda x, scale: (Named if scale == 1 else ByHand, 1),
    "view that was flipped": lambda x, scale: ((x.numpy() * scale)[::-1], 1),
    "jagged tensor": lambda x, scale: (torch.nested.nested_tensor([x * scale, x[:2]], layout=torch.jagged), 1),
    "conjugate": lambda x, scale: (torch.complex(x, x * scale).conj(), 1),
    "sparse": lambda x, scale: ((x * scale).to_sparse(), 1),
}


class Samples(Dataset):
    def __init__(self, kind, scale):
        self.kind = kind
        self.scale = scale
        self.x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return KINDS[self.kind](self.x[index], self.scale)


class Data(pl.LightningDataModule):
    def __init__(self, kind, scale):
        super().__init__()
        self.samples = Samples(kind, scale)

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4, collate_fn=list)


def digest(kind, scale):
    data = FederatedDataModule(Data(kind, scale), num_clients=3, batch_size=4)
    data.prepare_data()
    data.setup("fit")
    return digest_of_inputs(data.split("train"), data.seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_changed_have_another_digest(kind):
    assert digest(kind, 1) == digest(kind, 1) is not None
    assert digest(kind, 1) != digest(kind, 7)
