"""Batches that are copied as they are read: the same fits, bit for bit, and nothing that goes on after them."""

import random
import threading
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from fl_lightning import FederatedDataModule
from fl_lightning.data import FixedPartition, TensorSource, splits
from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.utils.staging import Staging
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of
from tests.user_data import Sensors

PARTS = FixedPartition([list(range(7)), list(range(7, 19)), list(range(19, 24))])


class Drawing(Dataset):
    """Samples that are drawn at from all generators of the process, which the net's dropout draws from, too."""

    def __init__(self, n=24, broken=None):
        (self.x, self.y), self.broken = samples(n), broken

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("this sample is broken")
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, int(self.y[index])


class Hooked(FedAvg):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]


class After(FedAvg):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]


def read_by(workers, broken=None):
    settings = {"num_clients": 3, "partition": PARTS, "batch_size": 3, "num_workers": workers}
    return FederatedDataModule.from_datasets(Drawing(broken=broken), Drawing(9), **settings)


def drawn(x, generator):
    """A transform that augments."""
    return x if generator is None else x + torch.randn(x.shape, generator=generator).to(x.device)


def in_memory():
    data = toy_data((7, 12, 5), batch_size=3)
    data.setup("fit")
    data.split("train").transform = drawn
    data.split("train").augments = True
    return data


DATA = {
    "read here": lambda: read_by(0),
    "read by workers": lambda: read_by(1),
    "streams": lambda: FederatedDataModule.from_datamodule(Sensors(), num_clients=4),
    "too large": in_memory,
}
RUNS = {
    "plain": (FedAvg, {}),
    "cut": (FedAvg, {"local_epochs": 2, "max_local_steps": 3}),
    "accumulated": (FedAvg, {"accumulate_grad_batches": 2}),
    "teacher": (FedNTD, {"local_epochs": 2}),
    "stacked": (FedAvg, {"chunk": 3}),
    "after": (After, {}),
    "before": (Hooked, {}),
}


@pytest.fixture
def staged(monkeypatch):
    """Let a CPU's batches be copied as a GPU's are; gives what was begun, and those that were used."""
    begun = []
    used = []

    def begin(batch, device):
        begun.append(batch)
        return lambda: used.append(batch) or batch

    def switch(room=False):
        monkeypatch.setattr(splits, "staging_for", lambda device: Staging(device, begin))
        monkeypatch.setattr(splits, "fits", lambda num_bytes, device: room)
        return begun, used

    return switch


def run(kind, way):
    method, settings = RUNS[way]
    if kind == "streams":
        settings = {"max_local_steps": 4, **settings}
    pl.seed_everything(3, verbose=False)
    net = partial(BatchNormNet, dropout=0.0) if "chunk" in settings else BatchNormNet
    client = method(net=net, optimizer=sgd(), num_classes=3, input_shape=(4,))
    return weights_of(fit(client, 2, DATA[kind](), **settings))


def rows():
    """Every kind of samples in every way; processes that read are started anew for every pass, which takes time."""
    quick = {
        ("read here", "before"),
        ("read here", "cut"),
        ("streams", "cut"),
        ("too large", "stacked"),
        ("too large", "accumulated"),
    }
    for kind in DATA:
        own = {"read by workers": {"cut", "before"}, "streams": {*RUNS} - {"stacked"}}.get(kind, RUNS)
        for way in (way for way in RUNS if way in own):
            yield pytest.param(kind, way, marks=[] if (kind, way) in quick else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "way"), list(rows()))
def test_fits_have_the_same_bits(kind, way, staged):
    plain = run(kind, way)
    begun, used = staged(room=kind != "too large")
    assert equal(run(kind, way), plain)
    early = kind == "too large" or way != "before"
    assert bool(begun) == early
    assert len(used) <= len(begun) <= 2 * len(used)
    assert threading.active_count() <= threads_before


threads_before = threading.active_count() + 1  # torch's own, once backward has run


def test_an_error_in_reading_is_raised(staged):
    staged()
    with pytest.raises(Exception, match="this sample is broken"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1, read_by(0, broken=9))


def test_samples_that_do_not_fit_stay_where_they_are(staged):
    staged()
    source = TensorSource(samples(6), samples(3), num_classes=3)
    data = FederatedDataModule(source, num_clients=1)
    data.setup("fit")
    split = data.split("train")
    x = split.x
    data.to(torch.device("cuda", 0))  # which there need not be
    assert split.x is x
    (batch, y), *rest = split.batches([torch.tensor([4, 1]), torch.tensor([0])], None)
    assert torch.equal(batch, x[[4, 1]])
    assert torch.equal(y, split.y[[4, 1]])
    assert len(rest) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", list(DATA))
def test_batches_on_a_gpu_are_those_of_the_cpu(kind, monkeypatch):
    monkeypatch.setattr(splits, "fits", lambda num_bytes, device: kind != "too large")

    def batches(device):
        data = DATA[kind]()
        data.setup("fit")
        if data.has_streams:
            data.limit_streams(3)
        data.to(device)
        torch.manual_seed(5)
        found = [batch for client_id in range(3) for batch in data.view(client_id, 0).batches(epoch=0)]
        assert all(part.device == device for batch in found for part in batch)
        return [part.cpu() for batch in found for part in batch]

    plain = batches(torch.device("cpu"))
    staged = batches(torch.device("cuda", 0))
    assert len(plain) == len(staged)
    assert all(map(torch.equal, staged, plain))
