"""The index of a run's checkpoints: what it names, and when it is written."""

import json
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule

from fl_lightning.runs.checkpoints import CHECKPOINTS, INDEX, CheckpointIndex, indexed
from fl_lightning.runs.folder import readable
from fl_lightning.utils.run_folder import run_folder


def trainer_of(is_global_zero=True, **paths):
    """What the index asks a Trainer for."""
    callback = SimpleNamespace(monitor="val/loss", **paths)
    return SimpleNamespace(is_global_zero=is_global_zero, checkpoint_callbacks=[callback])


MOMENTS = {
    "on_train_epoch_end": (),
    "on_train_end": (),
    "on_exception": (KeyboardInterrupt(),),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_index_is_written_at_every_end(tmp_path, moment):
    run = tmp_path / "run"
    run.mkdir()
    path = tmp_path / "kept" / "last.ckpt"
    path.parent.mkdir()
    path.touch()
    index = CheckpointIndex(run)
    getattr(index, moment)(trainer_of(last_model_path=str(path)), LightningModule(), *MOMENTS[moment])
    assert indexed(run, "last") == path


def test_one_process_writes_the_index(tmp_path):
    CheckpointIndex(tmp_path).on_train_end(trainer_of(False, last_model_path="a/last.ckpt"), LightningModule())
    assert not (tmp_path / INDEX).exists()


def test_a_path_in_the_runs_folder_moves_with_it_and_another_one_stays(tmp_path):
    run = tmp_path / "run"
    (run / "mine").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    own = run / "mine" / "last.ckpt"
    other = tmp_path / "kept" / "best.ckpt"
    own.touch()
    other.touch()
    trainer = trainer_of(last_model_path=str(own), best_model_path=str(other))
    CheckpointIndex(run).on_train_end(trainer, LightningModule())
    assert json.loads((run / INDEX).read_text()) == {"last": "mine/last.ckpt", "best": str(other)}
    moved = run.rename(tmp_path / "moved")
    assert indexed(moved, "last") == moved / "mine" / "last.ckpt"
    assert indexed(moved, "best") == other


def test_what_the_folder_shows_is_not_in_the_index(tmp_path):
    (tmp_path / CHECKPOINTS).mkdir()
    last = str(tmp_path / CHECKPOINTS / "last.ckpt")
    best = str(tmp_path / CHECKPOINTS / "epoch=3.ckpt")
    index = CheckpointIndex(tmp_path)
    index.on_train_end(trainer_of(last_model_path=last), LightningModule())
    assert not (tmp_path / INDEX).exists()
    index.on_train_end(trainer_of(last_model_path=last, best_model_path=best), LightningModule())
    assert json.loads((tmp_path / INDEX).read_text()) == {"best": f"{CHECKPOINTS}/epoch=3.ckpt"}


# --- a checkpoint that cannot be read ---


def write_checkpoint(path, rounds):
    path.parent.mkdir(parents=True, exist_ok=True)
    federated = {"recorder": {"pending_round": None}, "format": 1}
    torch.save({"global_step": rounds, "federated": federated}, path)


@pytest.mark.parametrize("folder", [CHECKPOINTS, "kept"])
def test_only_a_checkpoint_of_the_runs_folder_is_replaced_by_another_one(tmp_path, monkeypatch, folder):
    monkeypatch.setattr("fl_lightning.runs.folder.federated", lambda checkpoint, name: checkpoint["federated"])
    damaged = tmp_path / folder / "last.ckpt"
    damaged.parent.mkdir()
    damaged.write_bytes(b"cut")
    write_checkpoint(tmp_path / CHECKPOINTS / "best.ckpt", rounds=2)
    if folder == CHECKPOINTS:
        assert readable(damaged).name == "best.ckpt"
        return
    with pytest.raises(ValueError, match=r"no checkpoint in .*kept can be read"):
        readable(damaged)


def test_a_clients_file_is_no_checkpoint_of_the_run(tmp_path):
    (tmp_path / CHECKPOINTS).mkdir()
    damaged = tmp_path / CHECKPOINTS / "last.ckpt"
    damaged.write_bytes(b"cut")
    torch.save({"state_dict": {}}, tmp_path / CHECKPOINTS / "client.ckpt")
    with pytest.raises(ValueError, match=r"can be read: .*last\.ckpt"):
        readable(damaged)


# --- the folder of a run ---


class Strategy:
    """Broadcasts nothing, as a run of one process."""

    def broadcast(self, value):
        return value


@pytest.mark.parametrize("given", ["a/run", 3, None, object()])
def test_an_attribute_of_a_users_loop_that_is_no_folder_is_not_the_runs(tmp_path, given):
    """The command line gives the loop a path. A subclass of the loop may have such a name for its own purposes."""
    trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(run_folder=given), strategy=Strategy(), log_dir=None, loggers=[]
    )
    assert run_folder(trainer) is None
    trainer.lightning_module.run_folder = tmp_path
    assert run_folder(trainer) == tmp_path
    assert run_folder(trainer, "own").name == "own"
