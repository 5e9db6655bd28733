"""A run that is continued in the middle of a round's end gets that round's whole row."""

import csv
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.federation import resume
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import ClientTable
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.test_resume import Count, Remembering, Rows, SaveIn
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of
from tests.user_data import Pairs
from tests.user_modules import Plain

ROUNDS = 4
ENDS = ["on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end"]


class TwoLoaders(Pairs):
    def val_dataloader(self):
        return [super().val_dataloader(), torch.utils.data.DataLoader(self.sets[2], 16)]


class Worst(Plain):
    """Logs its worst batch at the end of a validation; the learning rate depends on it."""

    def on_validation_start(self):
        self.losses = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        assert not self.training
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("val_loss", self.losses[-1])

    def on_validation_epoch_end(self):
        self.log("worst", max(self.losses))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "worst"}}


def a_method():
    """With all that an evaluation is made of: the rule's own weights, personal entries, what clients would deploy."""
    loop = FederatedLoop(
        Remembering(net=BatchNormNet, optimizer=sgd()), Count(), personal=["*body.1*"], evaluate_clients_every=2, seed=5
    )
    return loop, toy_data(participation=0.6, eval_batch_size=8), {}


def a_module():
    torch.manual_seed(1)
    return FederatedLoop(Worst(), seed=5), FederatedDataModule(TwoLoaders(), num_clients=3), {}


class ShortHooks(Plain):
    """Its hooks take no index of a dataloader, which Lightning gives only if there are several."""

    def on_validation_batch_start(self, batch, batch_idx):
        self.begun = batch_idx

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", float(self.begun + batch_idx))


def short_hooks():
    torch.manual_seed(1)
    return FederatedLoop(ShortHooks(), seed=5), FederatedDataModule(Pairs(), num_clients=3), {}


def now_and_then():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=5)
    return loop, toy_data(eval_batch_size=8), {"check_val_every_n_epoch": 2, "limit_val_batches": 2}


def half():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=5)
    return loop, toy_data(eval_batch_size=8), {"limit_val_batches": 0.5, "precision": "64-true"}


def none():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=5)
    return loop, toy_data(), {"limit_val_batches": 0}


def run(make, folder, ckpt_path=None, callbacks=None):
    """The loop and the rows of a run."""
    loop, data, settings = make()
    rows = Rows()
    fits = trainer(ROUNDS, folder, callbacks=callbacks, **settings | {"logger": rows})
    fits.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop, rows.rows


@pytest.mark.parametrize(
    ("make", "hook", "round_idx"),
    [
        *((a_method, hook, 1) for hook in [*ENDS, "on_train_epoch_end"]),
        *((a_method, ENDS[k], round_idx) for k in (0, -1) for round_idx in (0, ROUNDS - 1)),
        *((a_module, hook, 1) for hook in ENDS),
        *((short_hooks, hook, 1) for hook in ENDS[:2]),
        *((now_and_then, hook, 1) for hook in ENDS[:2]),
        (now_and_then, ENDS[0], 2),
        (half, ENDS[0], 1),
        (none, ENDS[0], 1),
    ],
)
def test_the_row_is_that_of_the_run_that_was_not_cut(make, hook, round_idx, tmp_path):
    saver = SaveIn(hook, round_idx, tmp_path / "cut.ckpt")
    whole, rows = run(make, tmp_path, callbacks=[saver])
    assert saver.done
    resumed, later = run(make, tmp_path, tmp_path / "cut.ckpt")
    assert later == {step: row for step, row in rows.items() if step >= round_idx}
    assert equal(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize("hook", ENDS[1:])
def test_callbacks_that_watch_a_value_see_it(hook, tmp_path):
    """`callback_metrics` are in no checkpoint."""
    watch = partial(EarlyStopping, "global/acc", patience=99, mode="max")
    run(half, tmp_path, callbacks=[SaveIn(hook, 1, tmp_path / "cut.ckpt"), whole := watch()])
    run(half, tmp_path, tmp_path / "cut.ckpt", [resumed := watch()])
    assert resumed.state_dict() == whole.state_dict()


def rows_by_client(path, round_idx):
    """The values of an evaluation of the clients in a table of clients, by client."""
    with path.open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if int(row["round"]) == round_idx]
    values = {}
    for row in found:
        assert row["client"] not in values
        values[row["client"]] = {key: cell for key, cell in row.items() if key.startswith("local/") and cell}
    return {client: of_client for client, of_client in values.items() if of_client}


@pytest.mark.parametrize("monitors", [[], [ClientTable]], ids=["the run's own table", "ClientTable"])
@pytest.mark.parametrize("goes_on", ["in another folder", "in the same folder"])
@pytest.mark.parametrize("hook", ENDS)
def test_the_table_of_the_clients_has_the_values_of_a_round_that_is_completed(hook, goes_on, monitors, tmp_path):
    def fit_in(folder, ckpt_path=None, callbacks=()):
        loop, data, settings = a_method()
        loop.run_folder = folder
        tables = [kind(dirpath=folder) for kind in monitors]
        logger = RoundCSVLogger(folder)
        fits = trainer(ROUNDS, callbacks=[*tables, *callbacks], **settings, logger=logger)
        fits.fit(loop, datamodule=data, ckpt_path=ckpt_path)
        return [rows_by_client(folder / "clients.csv", round_idx) for round_idx in range(ROUNDS)]

    cut = tmp_path / "cut.ckpt"
    whole = fit_in(tmp_path / "whole", callbacks=[SaveIn(hook, 1, cut)])
    assert [len(of_round) for of_round in whole] == [0, 5, 0, 5]
    if goes_on == "in the same folder":
        assert fit_in(tmp_path / "whole", cut) == whole
    else:
        assert fit_in(tmp_path / "other", cut) == [{}, *whole[1:]]


class Broken(pl.Callback):
    """Breaks a run off in the evaluation of its first round."""

    def on_validation_start(self, trainer, pl_module):
        raise OSError("disk full")


def test_a_new_run_of_the_same_loop_completes_nothing(monkeypatch, tmp_path):
    loop, data, _ = half()
    with pytest.raises(OSError, match="disk full"):
        trainer(1, callbacks=[Broken()]).fit(loop, datamodule=data)
    monkeypatch.setattr(resume, "validate", None)
    rows = Rows()
    trainer(2, tmp_path, logger=rows).fit(loop, datamodule=data)
    assert list(rows.rows) == [0, 1]
    assert rows.rows[0]["global/forgetting"] == 0
