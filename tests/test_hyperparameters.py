"""Hyper-parameters, images and text of a client, as its loggers get them."""

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.federation.final import FINAL
from fl_lightning.methods import FedProx
from fl_lightning.runs.loggers import RoundCSVLogger, RunTensorBoard
from tests.toys import toy_data, trainer
from tests.user_modules import Classifier


def events(folder):
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    found.Reload()
    return found


def scalars(folder):
    """Steps and values by tag. TensorBoard reads the two files of a writer that was opened again by their names.

    Within a second the names differ by a counter alone, of which 10 comes before 9: the steps tell the order.
    """
    read = events(folder)
    values = {}
    for tag in read.Tags()["scalars"]:
        values[tag] = sorted((one.step, str(one.value)) for one in read.Scalars(tag))
    return values


def session(folder):
    """Hyper-parameters as TensorBoard's HPARAMS page reads them."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = events(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    return {key: value.string_value or value.number_value for key, value in data.session_start_info.hparams.items()}


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_client_and_federation_are_in_hparams_yaml(kind, tmp_path):
    loop = FederatedLoop(FedProx(module=Classifier(hidden=6, lr=0.2), mu=0.3), seed=1, local_epochs=2)
    logger = kind(tmp_path)
    trainer(2, tmp_path, logger=logger).fit(loop, datamodule=toy_data(batch_size=5))
    params = yaml.safe_load((tmp_path / logger.name / "version_0" / "hparams.yaml").read_text())
    assert (params["hidden"], params["lr"]) == (6, 0.2)  # under the names that the client saved them by
    assert (params["model.client.mu"], params["model.local_epochs"], params["data.batch_size"]) == (0.3, 2, 5)
    assert params["model.client"].endswith("FedProx")
    assert not {"data.labels", "data.clients"} & params.keys()


@pytest.mark.parametrize("kind", [TensorBoardLogger, RunTensorBoard])
def test_tensorboard_shows_them_with_the_final_metric(kind, tmp_path):
    loop = FederatedLoop(FedProx(mu=0.3), seed=1)
    logger = kind(tmp_path)
    trainer(3, tmp_path, logger=logger).fit(loop, datamodule=toy_data())
    found = events(logger.log_dir)
    assert found.Scalars(FINAL)[-1].value == pytest.approx(loop.round_metrics["global/acc"])
    assert session(logger.log_dir)["model.client.mu"] == 0.3


def test_the_events_of_a_run_hold_what_lightnings_own_do(tmp_path):
    found = []
    for kind in (TensorBoardLogger, RunTensorBoard):
        logger = kind(tmp_path / kind.__name__)
        for step in range(3):
            logger.log_metrics({"a": 0.1 * step, "b/c": step}, step)
            logger.log_metrics({"t": torch.tensor(step)}, step)
        logger.experiment.close()
        logger.log_metrics({"a": float("nan")}, 3)  # opens the writer again
        logger.save()
        found.append(scalars(logger.log_dir))
    assert found[0] == found[1]
    assert len(found[0]["a"]) == 4


class GAN(pl.LightningModule):
    """Lightning's own example (examples/pytorch/domain_templates/generative_adversarial_net.py), on points."""

    def __init__(self, latent_dim: int = 2, lr: float = 0.02, b1: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(opt_g)
        self.generated_imgs = self(z)
        self.logger.experiment.add_image(
            "train/generated", self.generated_imgs.detach().view(1, -1, 4), self.global_step
        )
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), torch.zeros_like(valid))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        lr = self.hparams.lr
        b1 = self.hparams.b1
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(b1, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(b1, 0.999))
        return [opt_g, opt_d], []

    def on_validation_epoch_end(self):
        sample = self(self.validation_z.type_as(self.generator[0].weight))
        self.logger.experiment.add_image("generated", sample.view(1, -1, 4), self.current_epoch)
        self.logger.experiment.add_text("note", f"round {self.current_epoch}", self.current_epoch)
        for logger in self.loggers:
            logger.experiment.add_image("everywhere", sample.view(1, -1, 4), self.current_epoch)


def test_images_and_text_land_at_the_round(tmp_path):
    pl.seed_everything(3, verbose=False)
    loop = FederatedLoop(GAN(), seed=1)
    loggers = [RunTensorBoard(tmp_path), RoundCSVLogger(tmp_path)]
    trainer(3, tmp_path, logger=loggers).fit(loop, datamodule=toy_data((6, 6), batch_size=6))
    found = events(tmp_path)
    assert [image.step for image in found.Images("generated")] == [0, 1, 2]
    # The module names `global_step`, which counts the steps of both optimizers of each of two clients.
    assert [image.step for image in found.Images("train/generated")] == [0, 0, 2, 2, 4, 4]
    assert [text.step for text in found.Tensors("note/text_summary")] == [0, 1, 2]
    assert [value.step for value in found.Scalars("g_loss")] == [0, 1, 2]


def test_every_logger_has_an_experiment(tmp_path):
    """Lightning's example crashed where metrics.csv was the only logger."""
    trainer(1, tmp_path, logger=[RoundCSVLogger(tmp_path)]).fit(
        FederatedLoop(GAN(), seed=1), datamodule=toy_data((6, 6), batch_size=6)
    )
    assert "g_loss" in (tmp_path / "metrics.csv").read_text()
