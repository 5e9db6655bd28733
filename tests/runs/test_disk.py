"""A disk that is full or cannot be written, and a folder that is gone: one sentence, and what was whole stays whole."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager

import pytest

from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils import files
from tests.commands import TINY, refusal, run_in, say, working_in

FIT = f"fit {TINY} --trainer.enable_progress_bar false"
OWN = """
import os
import shutil
from pytorch_lightning import Callback

class Deletes(Callback):
    def __init__(self, hook: str, whole: bool = True):
        self.whole = whole
        setattr(self, hook, self.delete)

    def delete(self, trainer, *args):
        if trainer.current_epoch == 1:
            for logger in trainer.loggers:
                logger.save()
            folder = trainer.default_root_dir if self.whole else f"{trainer.default_root_dir}/checkpoints"
            while os.path.exists(folder):  # TensorBoard's thread may just be making its file anew
                shutil.rmtree(folder, ignore_errors=True)
"""


@contextmanager
def largest_file(size):
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def here(tmp_path, without_pictures):
    with working_in(tmp_path, OWN):
        yield tmp_path


@pytest.fixture
def begun(here):
    """A run of one round; its folder and its last checkpoint."""
    assert say(f"{FIT} --trainer.max_epochs 1").code == 0
    run = run_in(here)
    return run, run / "checkpoints" / "last.ckpt"


def goes_on(run):
    """The run is continued as if nothing had been, to its fourth round."""
    assert not list(run.rglob("*.part"))
    said = say(f"{FIT} --ckpt_path last --trainer.max_epochs 4")
    assert said.code == 0, said.err
    assert [row.partition(",")[0] for row in (run / "metrics.csv").read_text().splitlines()[1:]] == list("0123")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("last.ckpt", errno.ENOSPC),
        pytest.param("metrics.csv", errno.EIO, marks=pytest.mark.slow),
        pytest.param("config.yaml", errno.EROFS, marks=pytest.mark.slow),
    ],
)
def test_a_file_that_cannot_be_written(begun, name, code, monkeypatch):
    run, last = begun
    before = last.read_bytes()
    flush = files.flush_to_disk

    def fails(path):
        if name in path.name:
            raise OSError(code, os.strerror(code))
        flush(path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "flush_to_disk", fails)
        said = refusal(f"{FIT} --ckpt_path last --trainer.max_epochs 4", 1)
    assert f"{name} cannot be written ({os.strerror(code)})" in said
    assert "continue with --ckpt_path last" in said
    assert last.read_bytes() == before or name != "last.ckpt"
    goes_on(run)


def test_a_full_disk_while_a_checkpoint_is_written(begun):
    run, last = begun
    before = last.read_bytes()
    with largest_file(len(before) // 2):
        said = refusal(f"{FIT} --ckpt_path last --trainer.max_epochs 4", 1)
    assert "cannot be written (File too large)" in said
    assert last.read_bytes() == before
    goes_on(run)


def test_a_new_run_that_cannot_write_leaves_nothing(here):
    with largest_file(1000):
        assert "cannot be written (File too large)" in refusal(f"{FIT} --trainer.max_epochs 1", 1)
    assert not list(here.glob("runs/*"))


def test_a_full_disk_leaves_whole_rows(tmp_path):
    logger = RoundCSVLogger(tmp_path)

    def log_many():
        for round_idx in range(100):
            logger.log_metrics({"a": 1 / 3}, round_idx)

    with largest_file(200), pytest.raises(OSError, match="File too large") as caught:
        log_many()
    assert caught.value.filename == str(logger.path)
    logger.finalize("failed")
    rows = RoundCSVLogger(tmp_path).rows_on_disk()
    assert len(rows) > 2
    assert all(row == {"a": 1 / 3} for row in rows.values())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_start"])
def test_a_folder_that_is_deleted(here, hook):
    said = refusal(f"{FIT} --trainer.max_epochs 4 --trainer.callbacks own.Deletes --trainer.callbacks.hook {hook}", 1)
    assert "the run's folder was deleted or moved while it ran; leave it where it is until the run ends" in said
    assert not list(here.glob("runs/*/*"))


@pytest.mark.slow
def test_a_folder_of_checkpoints_that_is_deleted_comes_back(here):
    """Nothing of the run is lost with it."""
    deletes = "--trainer.callbacks own.Deletes --trainer.callbacks.whole false --trainer.callbacks.hook"
    assert say(f"{FIT} --trainer.max_epochs 3 {deletes} on_train_batch_start").code == 0
    shutil.rmtree(run_in(here) / "clients", ignore_errors=True)
    goes_on(run_in(here))
