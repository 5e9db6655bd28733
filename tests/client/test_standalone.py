"""A ClientModule without a federation."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.methods import FedAvg, FedCL, FedED, FedNTD, FedProx, KnFu, Local
from fl_lightning.nets import Perceptron
from fl_lightning.types import Phase
from tests.hooks.toy import SCAFFOLD
from tests.toys import equal, fit, sgd, toy_data, trainer
from tests.user_data import points
from tests.user_modules import Classifier, Lazy, WarmUp

SHAPE = {"num_classes": 3, "input_shape": (4,)}


def loader(batch_size=8):
    return DataLoader(TensorDataset(*points(48, 0)), batch_size=batch_size)


def alone(client, epochs=2):
    run = trainer(epochs)
    run.fit(client, loader())
    return client, run


def test_fedavg_is_plain_training():
    client, _ = alone(FedAvg(**SHAPE, optimizer=sgd(0.1)))
    assert client.num_steps == 12
    torch.manual_seed(0)
    ours = FedAvg(**SHAPE, optimizer=sgd(0.1))
    theirs = Perceptron(3, (4,))
    theirs.load_state_dict(ours.net.state_dict())
    alone(ours)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(theirs(x), y).backward()
            optimizer.step()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.net.state_dict()[name], value)


def test_the_broadcast_is_the_starting_weights():
    client, run = alone(FedNTD(**SHAPE, beta=1.0))
    assert run.callback_metrics["train/ntd"] > 0
    client, run = alone(FedProx(**SHAPE, mu=1.0))
    moved = sum((client.received[n] - p).square().sum() for n, p in client.params().items())
    assert moved > 0
    assert client.received.keys() == client.params().keys()


def test_around_a_module():
    client, run = alone(FedProx(module=Classifier(), mu=0.5))
    assert {"loss", "train/proximal"} <= run.callback_metrics.keys()
    assert "log" not in vars(client.module)
    assert len(run.lr_scheduler_configs) == 1


def test_a_module_with_hooks_that_nobody_would_call_is_refused():
    with pytest.raises(ValueError, match="WarmUp overrides on_before_optimizer_step, which is not called"):
        alone(FedProx(module=WarmUp()))


@pytest.mark.parametrize("hook", ["setup", "prepare_data", "transfer_batch_to_device", "backward", "on_train_start"])
def test_a_hook_that_a_trainer_calls_in_the_fitted_module_only_is_refused_in_the_one_within(hook):
    inner = type("Inner", (Classifier,), {hook: lambda self, *args: pytest.fail("it was called")})
    with pytest.raises(ValueError, match=f"Inner overrides {hook}, which is not called inside FedProx"):
        alone(FedProx(module=inner()))


def test_own_passes_see_the_batches_as_the_data_module_makes_them():
    class Ones(pl.LightningDataModule):
        def train_dataloader(self):
            return loader(48)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return torch.ones_like(batch[0]), batch[1]

    class Sums(FedAvg):
        def receive(self, broadcast, local):
            self.sums = self.over(local, lambda batch: batch[0].sum())

        def training_step(self, batch, batch_idx):
            self.sums.append(batch[0].sum())
            return super().training_step(batch, batch_idx)

    client = Sums(**SHAPE)
    trainer(1).fit(client, datamodule=Ones())
    assert client.sums == [48 * 4, 48 * 4]


class Head(FedAvg):
    def phases(self, exchange):
        return (Phase(trains=("net.head.*",)),)


class Warm(FedAvg):
    def phases(self, exchange):
        yield Phase()
        self.round["never reached"]


class Twice(FedAvg):
    exchanges = ("train", "again")


class Needs(FedAvg):
    needs = frozenset({"accumulated_lr"})


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        (Head, "training in phases"),
        (Warm, "training in phases"),
        (Local, "training in phases"),
        (Twice, "several exchanges a round"),
        (Needs, "the accumulated lr of its optimizer"),
        (SCAFFOLD, "the accumulated lr of its optimizer, what SCAFFOLDServer sends"),
        (FedCL, "the split 'proxy', what FedCLServer sends"),
        (KnFu, "the split 'transfer', several exchanges a round, what KnFuServer sends"),
    ],
)
def test_what_a_plain_trainer_would_not_do_is_refused_before_it_trains(kind, lacks):
    client = kind(**SHAPE)
    before = {name: value.clone() for name, value in client.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{kind.__name__} needs a federation \({lacks}\).*FederatedLoop\(client="):
        alone(client)
    assert equal(before, dict(client.state_dict()))


def test_what_is_only_local_trains_alone():
    """A teacher and a prior of the own data, the usual phase, a FedAvg-equivalent coefficient."""

    class Usual(FedAvg):
        def phases(self, exchange):
            return (Phase(),)

    for client in (FedED(**SHAPE), Usual(**SHAPE), FedNTD(**SHAPE, beta=0.0)):
        alone(client)
        assert client.num_steps == 12


def test_the_federations_own_data_are_refused():
    with pytest.raises(ValueError, match="alone trains on the batches of a DataLoader"):
        trainer(1).fit(FedAvg(**SHAPE), datamodule=toy_data())


def test_lazy_modules_are_built():
    client, _ = alone(FedProx(module=Lazy(), mu=0.1))
    assert client.module.net is not None


def test_net_client_loads_from_client_ckpt(tmp_path):
    loop = fit(FedNTD(beta=0.3, temperature=2.0), callbacks=[ClientCheckpoint(tmp_path)])
    loaded = FedNTD.load_from_checkpoint(tmp_path / "client.ckpt", net=Perceptron)
    assert (loaded.beta, loaded.temperature) == (0.3, 2.0)
    x = torch.randn(5, 4)
    torch.testing.assert_close(loaded.eval()(x), loop.client.eval()(x))
