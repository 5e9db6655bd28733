"""Loggers that take pictures get the class-wise ones once, at the end of fit; real ones in the slow test."""

import numpy as np
import pytest
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger, Logger

from fl_lightning.callbacks import RunPlots
from fl_lightning.runs.logged_figures import figure_writer
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.callbacks.toy import data, loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["local/partition", "global/classwise", "global/confusion"]


class Scalars(Logger):
    """A logger without pictures and without a folder."""

    name = version = ""

    def __init__(self):
        super().__init__()
        self.taken = []

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass


class Images(Scalars):
    """Takes arrays by itself, as Weights & Biases."""

    def log_image(self, key, images, step=None):
        (image,) = images
        assert image.dtype == np.uint8
        assert image.shape[2] == 3
        assert image.std() > 0  # not an empty page
        self.taken.append((key, step))


class Writer(Scalars):
    """Takes figures by its experiment, as TensorBoard, and is its own experiment."""

    experiment = property(lambda self: self)

    def add_figure(self, tag, figure, global_step=None, close=True):
        assert figure.axes
        self.taken.append((tag, global_step))


class Store(Scalars):
    """Takes figures as files, as MLflow."""

    run_id = "run 7"
    experiment = property(lambda self: self)

    def log_figure(self, run_id, figure, artifact_file):
        assert run_id == self.run_id
        assert figure.axes
        assert artifact_file.endswith(".png")
        self.taken.append((artifact_file.removesuffix(".png"), 2))


class Broken(Scalars):
    def log_image(self, key, images, step=None):
        raise ConnectionError("no network")


def test_each_logger_that_can_gets_each_figure_once_with_its_scope(tmp_path):
    kinds = [Images(), Writer(), Store(), Scalars()]
    trainer([RunPlots(every=0)], tmp_path, logger=kinds).fit(loop(), datamodule=data())
    for logger in kinds[:3]:
        assert logger.taken == [(name, 2) for name in NAMES], type(logger).__name__
    assert not kinds[3].taken


def test_no_folder_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer([RunPlots()], logger=(logger := Images())).fit(loop(), datamodule=data())
    assert [name for name, _ in logger.taken] == NAMES
    assert not list(tmp_path.rglob("*.png"))


def test_the_validation_split_names_its_scope(tmp_path):
    trainer([RunPlots()], tmp_path, logger=(logger := Images())).fit(loop(), datamodule=data(val_fraction=0.2))
    assert [name for name, _ in logger.taken] == ["local/partition", "val/classwise", "val/confusion"]


def test_a_fit_without_a_round_hands_over_nothing(tmp_path):
    trainer([RunPlots()], tmp_path, rounds=0, logger=(logger := Images())).fit(loop(), datamodule=data())
    assert not logger.taken


def test_a_logger_that_fails_does_not_end_the_run_or_keep_others_from_theirs(tmp_path):
    good = Images()
    runner = trainer([RunPlots()], tmp_path, logger=[Broken(), good])
    with pytest.warns(UserWarning, match=r"Broken did not take the figures local/partition, .*no network"):
        runner.fit(loop(), datamodule=data())
    assert len(good.taken) == len(NAMES)
    assert runner.state.finished


def test_loggers_that_swallow_every_call_take_no_figures(tmp_path):
    for logger in (DummyLogger(), RoundCSVLogger(tmp_path), CSVLogger(tmp_path), Scalars()):
        assert figure_writer(logger) is None, type(logger).__name__


@pytest.mark.slow
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    trainer([RunPlots()], logger=logger).fit(loop(), datamodule=data())
    events = EventAccumulator(logger.log_dir).Reload()
    assert sorted(events.Tags()["images"]) == sorted(NAMES)
    for name in NAMES:
        (image,) = events.Images(name)
        assert image.step == 2
        assert image.encoded_image_string.startswith(b"\x89PNG")


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="toy")
    try:
        trainer([RunPlots()], logger=logger).fit(loop(), datamodule=data())
    finally:
        logger.experiment.finish()
    for name in NAMES:
        (image,) = tmp_path.glob(f"wandb/offline-run-*/files/media/images/{name}_*.png")
        assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("toy", tracking_uri=tmp_path.as_uri())
    trainer([RunPlots()], logger=logger).fit(loop(), datamodule=data())
    for name in NAMES:
        (image,) = tmp_path.glob(f"*/{logger.run_id}/artifacts/{name}.png")
        assert image.read_bytes().startswith(b"\x89PNG")
