"""The memory format of weights: which one is chosen, and that it changes the last bits only."""

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.engines import execution
from fl_lightning.engines.execution import Execution, evaluates_channels_last
from fl_lightning.federation import evaluation
from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.nets import FedNTDCNN, Perceptron
from tests.toys import equal, sgd, trainer, weights_of

LAST = torch.channels_last
FIRST = torch.contiguous_format


def images() -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    samples = torch.rand(12, 3, 8, 8, generator=g), torch.arange(12) % 3
    partition = FixedPartition([range(0, 5), range(5, 12)])
    source = TensorSource(samples, samples, num_classes=3)
    return FederatedDataModule(source, num_clients=2, partition=partition, batch_size=4)


def loop_of(chunk: int = 1) -> FederatedLoop:
    return FederatedLoop(FedNTD(net=FedNTDCNN, optimizer=sgd()), seed=3, threads=1, local_epochs=2, chunk=chunk)


def fitted(layout: str, rounds: int = 2, **settings) -> FederatedLoop:
    """Fit where weights (`channels_last`), batches of an evaluation (`evaluation`) or neither are laid out so."""
    loop = loop_of()
    ckpt_path = settings.pop("ckpt_path", None)
    with pytest.MonkeyPatch.context() as patch:
        if layout != "channels_last":
            patch.setattr(execution, "convolves", lambda client: False)
        patch.setattr(evaluation, "evaluates_channels_last", lambda client, device: layout != "contiguous")
        trainer(rounds, **settings).fit(loop, datamodule=images(), ckpt_path=ckpt_path)
    return loop


def first_convolution(loop: FederatedLoop) -> torch.Tensor:
    return next(part for part in loop.modules() if isinstance(part, nn.Conv2d)).weight


def test_channels_last_changes_the_last_bits_only():
    plain = fitted("contiguous")
    other = fitted("channels_last")
    assert first_convolution(other).is_contiguous(memory_format=LAST)
    assert first_convolution(plain).is_contiguous(memory_format=FIRST)
    for name, value in weights_of(plain).items():
        torch.testing.assert_close(weights_of(other)[name], value, atol=1e-6, rtol=1e-5)


def test_resume_is_exact_with_channels_last(tmp_path):
    whole = weights_of(fitted("channels_last", rounds=3))
    saved = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fitted("channels_last", rounds=1, callbacks=[saved], enable_checkpointing=True)
    resumed = fitted("channels_last", rounds=3, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert equal(weights_of(resumed), whole)


@pytest.mark.parametrize(
    ("device", "precision", "chunk", "expected"),
    [
        ("cpu", "32-true", 1, LAST),
        ("cpu", "32-true", 4, FIRST),
        ("cuda", "32-true", 1, FIRST),
        ("cuda", "bf16-mixed", 1, LAST),
    ],
)
def test_auto_asks_device_and_stack(device, precision, chunk, expected):
    client = FedAvg(net=FedNTDCNN, num_classes=3, input_shape=(3, 8, 8))
    Execution(chunk=chunk).lay_out(client, torch.device(device), precision)
    weight = next(part for part in client.modules() if isinstance(part, nn.Conv2d)).weight
    assert weight.is_contiguous(memory_format=expected)


def test_auto_leaves_a_net_without_convolutions_and_a_module_of_the_users():
    perceptron = FedAvg(net=Perceptron, num_classes=3, input_shape=(4,))
    Execution().lay_out(perceptron, torch.device("cpu"))
    module = FedAvg(num_classes=3, input_shape=(3, 8, 8), net=FedNTDCNN)
    around = FedAvg(module=module)
    Execution().lay_out(around, torch.device("cpu"))
    assert all(value.is_contiguous() for value in [*perceptron.parameters(), *around.parameters()])


def test_images_are_evaluated_channels_last_on_a_cpu():
    """In stacks, too, where the weights and the training stay as they are."""
    loop = loop_of(chunk=2)
    seen = {True: set(), False: set()}

    class Watch(Callback):
        def on_fit_start(self, trainer, pl_module):
            def look(net, inputs):
                seen[net.training].add(inputs[0].is_contiguous(memory_format=LAST))

            pl_module.client.net.register_forward_pre_hook(look)

    trainer(1, callbacks=[Watch()]).fit(loop, datamodule=images())
    assert True in seen[False]
    assert True not in seen[True]
    assert first_convolution(loop).is_contiguous(memory_format=FIRST)


def test_evaluation_channels_last_changes_the_last_bits_of_what_is_evaluated_only():
    plain = fitted("contiguous")
    other = fitted("evaluation")
    assert equal(weights_of(plain), weights_of(other))
    assert plain.round_metrics == pytest.approx(other.round_metrics, rel=1e-5)
    found = [torch.cat(trainer(1).predict(loop, datamodule=images())) for loop in (plain, other)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("net", "device", "expected"), [(FedNTDCNN, "cpu", True), (FedNTDCNN, "cuda", False), (Perceptron, "cpu", False)]
)
def test_what_is_evaluated_channels_last(net, device, expected):
    client = FedAvg(net=net)
    client.net = net(3, (3, 8, 8))
    assert evaluates_channels_last(client, torch.device(device)) is expected
