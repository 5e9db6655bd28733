"""Files and pictures of a run that was broken off, evaluated every second round: those of an unbroken one."""

import numpy as np
import pytest
import pytorch_lightning as pl

from fl_lightning.callbacks import ClasswiseReport, RunPlots
from fl_lightning.callbacks import plots as module
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.callbacks.toy import At, data, loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDS = 7  # evaluated are 1, 3 and 5


class SaveIn(pl.Callback):
    """Saves a checkpoint in a hook of a round."""

    def __init__(self, hook, round_idx, path):
        self.round_idx = round_idx
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.current_epoch == self.round_idx and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.fixture
def drawn(monkeypatch):
    """The last arguments of each picture."""
    seen = {}
    for name in ("plot_accuracy", "plot_classwise"):
        monkeypatch.setattr(module, name, lambda *given, name=name: seen.update({name: given}))
    monkeypatch.setattr(module, "plot_partition", lambda *given, **named: None)
    monkeypatch.setattr(module, "save", lambda figure, path: None)
    return seen


def run(folder, more=(), ckpt_path=None):
    callbacks = [ClasswiseReport(), RunPlots(), *more]
    settings = {"logger": RoundCSVLogger(folder), "check_val_every_n_epoch": 2}
    federated = loop(evaluate_clients_every=3)
    trainer(callbacks, folder, ROUNDS, **settings).fit(federated, datamodule=data(), ckpt_path=ckpt_path)


def as_lists(pictures):
    """The pictures' arguments, comparable where values are missing."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return np.nan_to_num(np.asarray(value), nan=-1).tolist() if not isinstance(value[0], str) else list(value)

    return {name: [plain(value) for value in given if len(value)] for name, given in pictures.items()}


@pytest.mark.parametrize(
    ("hook", "round_idx"),
    [
        ("on_client_end", 3),
        ("on_client_end", 4),
        ("on_train_batch_end", 4),
        ("on_validation_end", 3),
        ("on_train_epoch_end", 2),
        ("on_train_epoch_end", 3),
    ],
)
def test_files_and_pictures_are_those_of_an_unbroken_run(tmp_path, drawn, hook, round_idx):
    run(tmp_path / "whole")
    whole = as_lists(drawn)
    assert len(whole["plot_classwise"][0]) == 3
    drawn.clear()
    broken = tmp_path / "broken"
    path = tmp_path / "at.ckpt"
    with pytest.raises(ZeroDivisionError):  # a round later
        run(broken, [SaveIn(hook, round_idx, path), At(round_idx + 1, lambda _: 1 / 0)])
    drawn.clear()
    run(broken, ckpt_path=path)
    assert as_lists(drawn) == whole
    for file in ("classwise.csv", "metrics.csv"):
        assert (broken / file).read_text() == (tmp_path / "whole" / file).read_text()
