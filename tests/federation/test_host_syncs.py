"""Reads of device values by the host: none in an exchange, so that a GPU never waits for Python.

Only entries that are boolean, of which there are none here, are compared on the host.
"""

from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fl_lightning import FederatedLoop
from fl_lightning.client.store import ClientStore
from fl_lightning.federation.rounds import Rounds
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.test_contract import NAMES, TRAITS, data_of, settings_of
from tests.toys import BatchNormNet, fit, folded, sgd, toy_data

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
                return result.clone() if isinstance(result, torch.Tensor) else result
            self.place(*tensors_in(result))
        return result


def tensors_in(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    items = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list | tuple) else ()
    return [one for item in items for one in tensors_in(item)]


@pytest.fixture
def reads(monkeypatch):
    mode = DeviceReads()
    run = Rounds._exchange
    read = ClientStore.record

    def watched(self, *args):
        data = self.parts.client.trainer.datamodule
        for name in ("train", *(["shared"] if "shared" in self.parts.client.needs else [])):
            split = data.split(name)
            split.labels = split.labels.clone()  # on a CPU these are y itself
            mode.place(split.x, split.y)
        loop = self.parts.client.trainer.lightning_module
        for part in (self.parts.client, loop.server_module, loop.aggregator):
            mode.place(*part.parameters(), *part.buffers())
        mode.place(*self.server.weights.values())
        with mode:
            run(self, *args)

    def placed(self, client_id):
        memory, personal = read(self, client_id)
        mode.place(*tensors_in((memory, personal)))
        return memory, personal

    monkeypatch.setattr(Rounds, "_exchange", watched)
    monkeypatch.setattr(ClientStore, "record", placed)
    return mode.found


WAYS = {"alone": {}, "stacked": {"chunk": 3}, "skip": {"nonfinite": "skip"}}
READS_OF = {
    "CCVR": {"cpu", "tolist"},  # samples are counted by class, and a head is trained on the host, once a calibration
    "FedAMP": {"__bool__", "nonzero", "tolist"},  # the server weighs the models that it mixes for a client
    "IFCA": {"cpu", "tolist"},  # a client chooses a model by its losses
    "FedALA": {"tolist"},  # the first mixing of a client lasts until its losses settle
    "FedFOMO": {"__bool__", "cpu", "tolist"},  # the server chooses the models that a client is sent
    "FedGen": {"cpu"},  # the number of Adam's steps is read once a round
    "FedMD": {"tolist"},  # finite knowledge is fused
    "FedPAC": {"cpu"},  # heads are combined by programs of a few numbers, solved on the host
    "KnFu": {"tolist"},  # as FedMD
    "Replay": {"tolist"},  # classes of samples that have arrived decide which of them stay
    "SelectiveFD": {"cpu", "nonzero"},  # samples are chosen by what the models say of them
}
"""Methods of which numbers on the device decide what is done, and how these are read."""
COMPARES = {"FedDF", "FedGen", "FedNova", "FedPAC", "SelectiveFD"}
"""Their servers ask, once an exchange, which clients are left, or clients are judged before their second exchange."""


def rows():
    """FedAvg and the trait methods alone, FedAvg in every way; the others so are slow."""
    for name in NAMES:
        for way in WAYS:
            often = name == "FedAvg" or (way == "alone" and name in TRAITS)
            yield pytest.param(name, way, id=f"{name}-{way}", marks=[] if often else pytest.mark.slow)


@pytest.mark.parametrize(("name", "way"), list(rows()))
def test_no_value_is_read_in_an_exchange(name, way, reads):
    loop = FederatedLoop(
        **settings_of(name, net=BatchNormNet, optimizer=sgd()), local_epochs=2, seed=3, **folded(WAYS[way])
    )
    fit(None, 2, data_of(batch_size=4), loop=loop)
    assert set(reads) == READS_OF.get(name, set()) | ({"tolist"} if way == "skip" and name in COMPARES else set())


def test_a_read_is_seen(reads):
    class Reads(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train/read", float(loss))
            return loss

    fit(Reads(net=partial(Perceptron, hidden=(8,)), optimizer=sgd()), 1, toy_data((7, 9)))
    assert set(reads) == {"__float__"}
