"""The hooks of a local step come in the order of a plain fit, and may change the weights between them."""

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import IIDPartition
from tests.toys import equal, trainer

SAMPLES = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))


class Notes(LightningModule):
    """Notes which hooks are called, and has whole gradients only where Lightning has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.notes = []

    def note(self, name):
        grad = self.layer.weight.grad
        self.notes.append((name, None if grad is None else round(float(grad.abs().sum()), 4)))

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        return self.layer(batch[0]).pow(2).mean()

    def on_before_zero_grad(self, optimizer):
        self.note("on_before_zero_grad")

    def on_before_backward(self, loss):
        self.note("on_before_backward")

    def on_after_backward(self):
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.note("on_before_optimizer_step")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Constrains(Notes):
    """Puts the weights back onto the sphere before the gradients are zeroed, as pykeen's modules do."""

    def on_before_zero_grad(self, optimizer):
        super().on_before_zero_grad(optimizer)
        self.layer.weight.data = nn.functional.normalize(self.layer.weight.data)


class Closure(Notes):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class OwnZeroGrad(Constrains):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.note("optimizer_zero_grad")
        optimizer.zero_grad(set_to_none=False)


class Skips(LightningModule):
    """Skips every second batch, which ends an accumulation over two batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_skipped_batch_ends_an_accumulation_as_in_a_plain_fit(accumulate):
    data = FederatedDataModule.from_datasets(
        SAMPLES, SAMPLES, num_clients=1, partition=IIDPartition(), batch_size=2, shuffle=False
    )
    data.setup("fit")
    ordered = TensorDataset(SAMPLES.tensors[0][data.client_indices("train", 0)])
    plain = Skips()
    trainer(1, accumulate_grad_batches=accumulate).fit(plain, DataLoader(ordered, batch_size=2))
    client = Skips()
    loop = FederatedLoop(client, seed=1, accumulate_grad_batches=accumulate)
    trainer(1, limit_val_batches=0).fit(loop, datamodule=data)
    assert equal(dict(client.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Notes, Constrains, Closure, OwnZeroGrad], ids=lambda kind: kind.__name__)
def test_the_hooks_of_a_client_come_as_in_a_plain_fit(kind, accumulate):
    if kind is Closure and accumulate > 1:
        pytest.skip("LBFGS is refused with accumulate_grad_batches")
    plain = kind()
    trainer(1, accumulate_grad_batches=accumulate).fit(plain, DataLoader(SAMPLES, batch_size=4))
    client = kind()
    data = FederatedDataModule.from_datasets(
        SAMPLES, SAMPLES, num_clients=1, partition=IIDPartition(), batch_size=4, shuffle=False
    )
    # What is looked at is the training of the one client, whose indices the partition may have in another order.
    data.setup("fit")
    order = data.client_indices("train", 0).tolist()
    assert sorted(order) == list(range(12))
    again = kind()
    ordered = TensorDataset(SAMPLES.tensors[0][order])
    trainer(1, accumulate_grad_batches=accumulate).fit(again, DataLoader(ordered, batch_size=4))
    loop = FederatedLoop(client, seed=1, accumulate_grad_batches=accumulate)
    trainer(1, limit_val_batches=0).fit(loop, datamodule=data)
    assert [name for name, _ in client.notes] == [name for name, _ in plain.notes]
    assert client.notes == again.notes
    assert equal(dict(client.state_dict()), dict(again.state_dict()))
