"""Reads of device values by the host: none while clients train, so that a GPU never waits for Python."""

import math
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fl_lightning import FederatedLoop
from fl_lightning.federation.round import Round
from fl_lightning.methods import FedAvg, FedED, FedKA, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from tests.toys import fit, sgd, toy_data

READS = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"),
    *("nonzero", "masked_select", "unique", "allclose", "equal", "is_nonzero"),
}


class DeviceReads(TorchFunctionMode):
    """Lists reads of values that would lie on the device.

    Such are the tensors given to `place`, and whatever is computed with one.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def place(self, *tensors):
        for tensor in tensors:
            tensor.on_device = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(getattr(one, "on_device", False) for one in tensors_in((args, kwargs))):
            if func.__name__ in READS:
                self.found.append(func.__name__)
            self.place(*tensors_in(result))
        return result


def tensors_in(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    items = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list | tuple) else ()
    return [one for item in items for one in tensors_in(item)]


@pytest.fixture
def reads(monkeypatch):
    mode, train = DeviceReads(), Round._train

    def watched(self, exchange, clients, partials, result):
        data = self.client.trainer.datamodule
        for name in ("train", *(["shared"] if "shared" in self.client.needs else [])):
            split = data.split(name)
            split.labels = split.labels.clone()  # on a CPU these are y itself
            mode.place(split.x, split.y)
        mode.place(*self.client.parameters(), *self.client.buffers(), *self.server.weights.values())
        with mode:
            return train(self, exchange, clients, partials, result)

    monkeypatch.setattr(Round, "_train", watched)
    return mode.found


METHODS = {
    "fedavg": FedAvg,
    "fedprox": partial(FedProx, mu=0.1),
    "fedntd": FedNTD,
    "feded": FedED,
    "fedka": partial(FedKA, gamma=math.inf),
}


def rows():
    """Every method alone, and two of them in every way; the others so are slow."""
    ways = {"alone": {}, "stacked": {"chunk": 3}, "skip": {"nonfinite": "skip"}}
    for method in METHODS:
        for way, settings in ways.items():
            repeats = way != "alone" and method not in ("fedavg", "fedntd")
            yield pytest.param(method, settings, id=f"{method}-{way}", marks=[pytest.mark.slow] * repeats)


@pytest.mark.parametrize(("method", "settings"), list(rows()))
def test_no_value_is_read_while_clients_train(method, settings, reads):
    client = METHODS[method](net=partial(Perceptron, hidden=(8,)), optimizer=sgd())
    loop = fit(None, 2, toy_data((7, 9, 0, 12), batch_size=4), loop=FederatedLoop(client, local_epochs=2, **settings))
    assert loop.round_metrics["train/ce"] > 0
    assert reads == []


def test_a_read_is_seen(reads):
    class Reads(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train/read", float(loss))
            return loss

    fit(Reads(net=partial(Perceptron, hidden=(8,)), optimizer=sgd()), 1, toy_data((7, 9)))
    assert set(reads) == {"__float__"}
