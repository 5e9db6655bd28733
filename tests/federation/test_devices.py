"""Fits on a stand-in for a GPU: torch's `meta` device, whose tensors have no values. No operation mixes two devices."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.overrides import TorchFunctionMode

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import KrumAggregator, NormClip
from fl_lightning.callbacks import ClasswiseReport
from fl_lightning.engines.local import local_engine
from fl_lightning.methods import SCAFFOLD, FedAvg, FedED, FedEXPAggregator, FedKA, FedNovaAggregator, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from tests.callbacks.toy import data, loop, trainer
from tests.federation.test_host_syncs import tensors_in
from tests.toys import folded, sgd, toy_data

META = torch.device("meta")
MOVES = {"to", "copy_", "cpu", "_has_compatible_shallow_copy_type"}
METHODS = {
    "fedavg": FedAvg,
    "fedprox": partial(FedProx, mu=0.1),
    "fedntd": FedNTD,
    "feded": FedED,
    "fedka": FedKA,
    "scaffold": SCAFFOLD,
}


class StandIn(CPUAccelerator):
    """A CPU that takes any device."""

    def setup_device(self, device):
        pass


class OneDevice(TorchFunctionMode):
    """Lists operations on tensors of both devices, and lets what the host reads be 1."""

    def __init__(self):
        super().__init__()
        self.mixed = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = tensors_in((args, kwargs))
        kinds = {one.device.type for one in given if one.ndim or one.device == META}
        if len(kinds) > 1 and name not in MOVES:
            self.mixed.append(name)
        if given and given[0].device == META:
            if name in {"tolist", "item", "__bool__", "__float__", "__int__"}:
                return getattr(torch.ones(given[0].shape, dtype=given[0].dtype), name)()
            if name == "cpu" or (name == "to" and torch.device("cpu") in args[1:]):
                return torch.ones(given[0].shape, dtype=given[0].dtype)
        return func(*args, **kwargs)


def operations(client, net=None, callbacks=(), **settings):
    """Names of the operations of a round that mixed the devices."""
    loop = FederatedLoop(
        client(net=net or partial(Perceptron, hidden=(8,)), optimizer=sgd()), seed=3, **folded(settings)
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = SingleDeviceStrategy(META, StandIn())
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **quiet)
    seen = OneDevice()
    devices = []
    trainer.callbacks.extend(callbacks)
    trainer.callbacks.append(pl.callbacks.LambdaCallback(on_train_end=lambda *_: devices.append(loop.device)))
    with seen:
        trainer.fit(loop, datamodule=toy_data((7, 9, 5, 12, 9)))
    assert devices == [META]
    return seen.mixed


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """There is none for `meta`."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize(
    "method", ["fedntd", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "fedntd")]
)
def test_clients_are_trained_on_one_device(method, chunk):
    assert operations(METHODS[method], chunk=chunk, local_epochs=2, clip_norm=1.0) == []


@pytest.mark.parametrize("rule", [KrumAggregator, FedNovaAggregator])
def test_rules_and_transforms_stay_on_it(rule):
    assert operations(FedAvg, aggregator=rule(), transforms=[NormClip(1.0)]) == []


@pytest.mark.parametrize("rule", [Aggregator, FedEXPAggregator])
def test_the_report_after_the_last_round_evaluates_where_the_samples_lie(rule, capsys):
    """There Lightning has moved the module, and the rule with the model before, to the CPU."""
    assert operations(FedAvg, callbacks=[ClasswiseReport()], aggregator=rule()) == []
    assert "Class-wise accuracy" in capsys.readouterr().out


def test_first_weights_are_drawn_on_the_cpu():
    """Lightning makes tensors on the device, whose own generator would draw other ones."""
    drawn = []

    def net(*data):
        made = Perceptron(*data, hidden=(8,))
        drawn.extend(value.device.type for value in made.parameters())
        return made

    operations(FedAvg, net=net)
    local_engine(FedAvg(net=net, optimizer=sgd()), toy_data(), device=META)
    assert set(drawn) == {"cpu"}


def test_a_mixture_is_seen():
    class Mixes(FedAvg):
        def training_step(self, batch, batch_idx):
            first = batch[0].index_select(0, torch.zeros(1, dtype=torch.int64))  # as an order that stayed on the host
            return super().training_step(batch, batch_idx) + first.sum()

    assert set(operations(Mixes)) == {"index_select"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_step_asks_the_driver_for_devices(tmp_path, monkeypatch):
    """Adam asks for an accelerator in every step: Lightning's way, through the driver's library, took a tenth of it."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    trainer([], tmp_path, rounds=1).fit(loop(), datamodule=data())
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "0"
    assert not torch.cuda.is_available()
