"""A run itself tells whether it has ended: at its last round, stopped early, or cut."""

import json

import pytest
import yaml
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.reports.saved import grouped, read_run
from fl_lightning.runs.loggers import STATUS, RoundCSVLogger, read_status
from tests.toys import BatchNormNet, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 9, "callbacks": [{"class_path": "pytorch_lightning.callbacks.EarlyStopping"}]},
    "model": {"client": {"class_path": "fl_lightning.methods.FedAvg", "init_args": {}}},
    "data": {"num_clients": 3},
}


class Crash(Callback):
    """Ends a fit by an error after some rounds."""

    def __init__(self, after: int, error: type[BaseException] = RuntimeError) -> None:
        self.after = after
        self.error = error

    def on_train_epoch_start(self, trainer, loop):
        if trainer.current_epoch == self.after:
            raise self.error("cut")


def fit(folder, *callbacks, rounds=9, ckpt_path=None):
    """Fit a run of a folder as the command line would, with the configuration above."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    last = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    fitted = trainer(
        rounds,
        logger=RoundCSVLogger(folder),
        callbacks=[*callbacks, last],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    fitted.fit(loop, datamodule=toy_data((8, 12, 5)), ckpt_path=ckpt_path)


def stop_early():
    return EarlyStopping("global/acc", mode="max", min_delta=10.0, patience=3)


def test_a_run_that_stopped_early_is_finished(tmp_path):
    fit(tmp_path / "run", stop_early())
    run = read_run(tmp_path / "run")
    assert run.num_rounds == 4
    assert run.planned == 9
    assert run.is_finished


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_with_early_stopping_that_was_cut_is_not_finished(tmp_path, error):
    with pytest.raises((error, SystemExit)):
        fit(tmp_path / "run", stop_early(), Crash(2, error))
    run = read_run(tmp_path / "run")
    assert run.num_rounds == 2
    assert read_status(tmp_path / "run") == -1
    assert not run.is_finished


def test_a_continued_run_is_finished_once_its_last_fit_is(tmp_path):
    folder = tmp_path / "run"
    fit(folder, rounds=3)
    assert read_run(folder).is_finished
    with pytest.raises(RuntimeError, match="cut"):
        fit(folder, Crash(5), ckpt_path=folder / "last.ckpt")
    run = read_run(folder)
    assert run.num_rounds == 5
    assert not run.is_finished
    fit(folder, ckpt_path=folder / "last.ckpt")
    run = read_run(folder)
    assert run.num_rounds == 9
    assert run.is_finished
    assert json.loads((folder / STATUS).read_text()) == {"ended": True, "round": 8}


def test_the_finished_run_counts_and_the_longer_one_that_was_cut_is_named(tmp_path):
    fit(tmp_path / "ended", stop_early())
    with pytest.raises(RuntimeError, match="cut"):
        fit(tmp_path / "cut", Crash(6))
    (group,) = grouped(read_run(tmp_path / name) for name in ("ended", "cut"))
    assert [run.folder.name for run in group.runs] == ["ended"]
    (note,) = group.notes
    assert "cut is left out" in note
    assert "it is not finished (6 of 9 rounds), and that one is (4 rounds)" in note


def test_a_folder_of_an_earlier_version_is_read_as_before(tmp_path):
    fit(tmp_path / "run", stop_early())
    (tmp_path / "run" / STATUS).unlink()
    assert read_status(tmp_path / "run") is None
    assert read_run(tmp_path / "run").is_finished
    config = {**CONFIG, "trainer": {"max_epochs": 9}}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    assert not read_run(tmp_path / "run").is_finished
    (tmp_path / "run" / STATUS).write_text('{"ended": 1}')
    with pytest.raises(ValueError, match=r"status\.json must be whether a fit has ended"):
        read_run(tmp_path / "run")
