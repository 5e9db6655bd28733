"""Modules, data modules, callbacks and loggers of `lightning.pytorch`, the twin package of `pytorch_lightning`."""

import lightning.pytorch as twin
import pytest
import pytorch_lightning as pl
import pytorch_lightning.demos
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.__main__ import main
from fl_lightning.methods import FedProx
from tests.toys import equal, samples, trainer, weights_of


def module_of(package):
    class Mine(package.LightningModule):
        def __init__(self, lr: float = 0.1):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            self.called = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y) + 0 * self.current_epoch
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

        def on_train_start(self):
            self.called.append(("on_train_start", self.trainer.max_epochs))

        def on_before_optimizer_step(self, optimizer):
            self.called.append("step")

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.called.append(str(self.dtype))
            return batch

        def configure_callbacks(self):
            return [package.callbacks.EarlyStopping("val_loss", patience=5)]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Mine


def data_of(package):
    class Data(package.LightningDataModule):
        def setup(self, stage=None):
            self.train, self.val = (TensorDataset(*samples(n, seed)) for n, seed in ((40, 0), (12, 1)))

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=5, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, batch_size=6)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer.max_epochs == 3
            return batch[0] * 2, batch[1]

    return Data


def run(module, data, tmp_path=None, ckpt_path=None, **settings):
    data = FederatedDataModule.from_datamodule(data, num_clients=3)
    fitted = trainer(3, tmp_path, **settings)
    loop = FederatedLoop(module, seed=3, local_epochs=2)
    fitted.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop, fitted


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_a_module_and_its_data_equal_those_of_pytorch_lightning(precision):
    found = [run(module_of(p)(), data_of(p)(), precision=precision) for p in (pl, twin)]
    (ours, our_trainer), (theirs, their_trainer) = found
    assert equal(weights_of(ours), weights_of(theirs))
    assert ours.client.module.called == theirs.client.module.called
    assert ("on_train_start", 3) in theirs.client.module.called
    assert our_trainer.callback_metrics == their_trainer.callback_metrics
    assert any(isinstance(callback, EarlyStopping) for callback in their_trainer.callbacks)


def test_a_method_goes_around_it_in_a_federation_and_alone():
    federated = []
    alone = []
    for package in (pl, twin):
        loop, _ = run(FedProx(module=module_of(package)(), mu=0.1), data_of(package)())
        federated.append(weights_of(loop))
        torch.manual_seed(0)
        module = package.demos.boring_classes.BoringModel()
        trainer(1).fit(FedProx(module=module, mu=0.1), DataLoader(torch.ones(16, 32), batch_size=4))
        alone.append(module.state_dict())
    assert equal(*federated)
    assert equal(*alone)


def test_callbacks_and_loggers_take_part(tmp_path):
    class Counts(twin.Callback):
        rounds = 0
        clients = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.rounds += 1

        def on_client_start(self, trainer, loop, client_id):
            self.clients += 1

    counts = Counts()
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    settings = {"callbacks": [counts, stop, checkpoint], "logger": CSVLogger(tmp_path, "logs")}
    module = module_of(twin)()
    module.configure_callbacks = list  # its own EarlyStopping would replace this one
    run(module, data_of(twin)(), tmp_path, enable_checkpointing=True, **settings)
    assert (counts.rounds, counts.clients) == (2, 6)  # the second round is not 100 better
    rows = (tmp_path / "logs/version_0/metrics.csv").read_text()
    assert "val_loss" in rows.splitlines()[0]
    run(module_of(twin)(), data_of(twin)(), tmp_path, ckpt_path=checkpoint.best_model_path)


def test_resume_is_exact(tmp_path):
    whole, _ = run(module_of(twin)(), data_of(twin)())
    data = FederatedDataModule.from_datamodule(data_of(pl)(), num_clients=3)
    first = trainer(3, tmp_path, max_steps=1)
    first.fit(FederatedLoop(module_of(twin)(), seed=3, local_epochs=2), datamodule=data)
    first.save_checkpoint(tmp_path / "one.ckpt")
    again, _ = run(module_of(twin)(), data_of(twin)(), ckpt_path=tmp_path / "one.ckpt")
    assert equal(weights_of(whole), weights_of(again))


def test_a_module_without_training_step_is_refused():
    class Empty(twin.LightningModule):
        def configure_optimizers(self):
            return None

    with pytest.raises(TypeError, match="Empty has none; define training_step"):
        FederatedLoop(Empty())


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), twin.LightningModule, object()])
def test_what_cannot_do_it_is_refused(wrong):
    with pytest.raises(
        TypeError, match=r"a client must be a LightningModule, of pytorch_lightning or lightning\.pytorch"
    ):
        FederatedLoop(wrong)
    with pytest.raises(TypeError, match="a data module must be a LightningDataModule"):
        FederatedDataModule.from_datamodule(wrong, num_clients=2)


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line_takes_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    place = "lightning.pytorch.demos.boring_classes"
    (tmp_path / "mine.yaml").write_text(
        "trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false}\n"
        f"model: {{client: {{class_path: {__name__}.Quiet}}}}\n"
        f"data: {{source: {{class_path: {place}.BoringDataModule}}, num_clients: 2}}\n"
    )
    main(["fit", "-c", "mine.yaml"])
    found = next(tmp_path.rglob("client.ckpt"))
    assert "layer.weight" in torch.load(found)["state_dict"]
    around = ["--model.client", "FedProx", "--model.client.module", f"{__name__}.Quiet"]
    main(["fit", "-c", "mine.yaml", *around, "--trainer.logger", "false"])


class Quiet(BoringModel):
    """Without the loaders that belong to the data module."""

    train_dataloader = twin.LightningModule.train_dataloader
    val_dataloader = twin.LightningModule.val_dataloader
    test_dataloader = twin.LightningModule.test_dataloader
    predict_dataloader = twin.LightningModule.predict_dataloader


def test_a_trainer_of_the_twin_package_refuses_the_loop():
    data = FederatedDataModule.from_datamodule(BoringDataModule(), num_clients=2)
    with pytest.raises(TypeError, match=r"must be a `LightningModule`.* got `FederatedLoop`"):
        twin.Trainer(max_epochs=1, logger=False).fit(FederatedLoop(Quiet()), datamodule=data)


def test_callbacks_that_are_refused_are_so_from_either_package():
    for callback in (ModelCheckpoint(every_n_train_steps=2), StochasticWeightAveraging(0.1)):
        with pytest.raises(ValueError, match=r"ModelCheckpoint|StochasticWeightAveraging"):
            run(module_of(twin)(), data_of(twin)(), callbacks=[callback])
