"""Fits on a GPU: what a CPU gives, half precision, exact resume, no host that waits. `make gpu` runs them."""

from functools import partial

import pytest
import torch

from bench.gpu import Syncs
from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.__main__ import main
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.federation.rounds import Rounds
from fl_lightning.methods import SCAFFOLD, FedAvg, FedNTD, FedProx
from fl_lightning.nets import FedNTDCNN, Perceptron
from tests.federation.test_host_syncs import READS_OF
from tests.test_contract import CONFIGS, NAMES, data_of, settings_of
from tests.toys import BatchNormNet, equal, folded, sgd, toy_data, trainer, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
Net = partial(BatchNormNet, dropout=0.0)
CPU = {"accelerator": "cpu"}
GPU = {"accelerator": "gpu", "devices": 1}


def run(loop, data, rounds=2, ckpt_path=None, **settings):
    trainer(rounds, **settings).fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop


def images():
    """Four clients with 20 images of noise each."""
    generator = torch.Generator().manual_seed(2)
    train, test = ((torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 10) for n in (80, 20))
    parts = FixedPartition([list(range(20 * k, 20 * k + 20)) for k in range(4)])
    return FederatedDataModule(TensorSource(train, test, num_classes=10), num_clients=4, partition=parts, batch_size=10)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_what_it_gives_on_a_cpu(name, chunk):
    """In float64, so that another order of sums hardly shows."""

    def fit(**settings):
        more = folded({"chunk": chunk, "local_epochs": 2, "evaluate_clients_every": 1})
        loop = FederatedLoop(**settings_of(name, net=Net, optimizer=sgd()), seed=3, **more)
        return run(loop, data_of(batch_size=4), precision="64-true", **settings)

    on_cpu = fit(**CPU)
    on_gpu = fit(**GPU)
    found = {name: value.cpu() for name, value in on_gpu.state_dict().items()}
    torch.testing.assert_close(found, on_cpu.state_dict(), rtol=1e-6, atol=1e-8)
    assert on_gpu.round_metrics == pytest.approx(on_cpu.round_metrics, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("method", [FedAvg, FedNTD, partial(FedProx, mu=0.1)])
def test_half_precision_learns_in_float32(method, precision, chunk):
    loop = FederatedLoop(method(net=Net, optimizer=sgd()), seed=3, chunk=chunk)
    run(loop, toy_data(), 5, precision=precision, **GPU)
    weights = loop.state_dict()
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}
    assert all(value.isfinite().all() for value in weights.values())
    assert loop.round_metrics["global/acc"] > 0.5


@pytest.mark.parametrize("chunk", [1, 4])
def test_convolutions_in_half_precision_lie_channels_last_and_are_near_to_float32(chunk):
    def fit(precision):
        loop = FederatedLoop(FedAvg(net=FedNTDCNN, optimizer=sgd(0.01)), seed=3, chunk=chunk)
        return run(loop, images(), 2, precision=precision, **GPU).state_dict()

    half = fit("bf16-mixed")
    full = fit("32-true")
    for name, value in full.items():
        assert (half[name] - value).norm() < 0.05 * value.norm(), name


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("method", [SCAFFOLD, FedNTD])
def test_a_resumed_run_is_the_uninterrupted_one(method, chunk, tmp_path):
    """Bit for bit, on one GPU and with deterministic algorithms."""

    def begun():
        return FederatedLoop(method(net=BatchNormNet, optimizer=sgd()), seed=3, chunk=chunk)

    settings = {**GPU, "deterministic": "warn"}
    whole = run(begun(), toy_data(), 4, **settings)
    half = trainer(2, **settings)
    half.fit(begun(), datamodule=toy_data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(begun(), toy_data(), 4, ckpt_path=tmp_path / "half.ckpt", **settings)
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in READS_OF])
def test_the_host_waits_for_no_value_in_an_exchange(name, chunk, monkeypatch):
    seen = []
    exchange = Rounds._exchange

    def watched(self, *args):
        with Syncs(torch.device("cuda")) as counted:
            exchange(self, *args)
        seen.append(counted.places)

    monkeypatch.setattr(Rounds, "_exchange", watched)
    loop = FederatedLoop(
        **settings_of(name, net=Net, optimizer=sgd()), local_epochs=2, seed=3, **folded({"chunk": chunk})
    )
    run(loop, data_of(batch_size=4), 3, **GPU)
    assert seen[-1] == ()


def test_clients_in_processes_of_their_own_run_on_a_gpu():
    """One process: there may be one GPU only."""

    def fit(**settings):
        loop = FederatedLoop(FedAvg(net=partial(Perceptron, hidden=(8,)), optimizer=sgd()), seed=3)
        return weights_of(run(loop, toy_data(), **GPU, **settings))

    assert equal(fit(strategy="client_parallel"), fit())


@pytest.mark.parametrize("name", ["fedavg", "feddf", "fedexp", "fedrep"])
def test_the_command_fits_and_reports(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ("--trainer.accelerator", "gpu", "--trainer.max_epochs", "2", "--model.evaluate_clients_every", "1")
    main(["fit", "-c", str(CONFIGS / "experiment" / f"digits_{name}.yaml"), *settings])
    assert "Class-wise accuracy" in capsys.readouterr().out
    (table,) = tmp_path.glob("runs/*/0/classification.csv")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 13
