"""Clients are evaluated by the steps and hooks of their own module, as plain Lightning evaluates it."""

import copy
import csv
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torchmetrics
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAvg, FedProx, Local
from fl_lightning.monitors import ClientTable
from tests.toys import sgd, toy_data

pytestmark = pytest.mark.filterwarnings("ignore")
CLIENTS = 3
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Base(LightningModule):
    """A regression that is trained by its mean squared error, always from the same weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def error(self, batch):
        x, y = batch
        return mse_loss(self.layer(x).squeeze(1), y)

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LogsValues(Base):
    def validation_step(self, batch, batch_idx):
        self.log("val/mse", self.error(batch))
        self.log_dict({"largest": batch[1].max(), "count": len(batch[1])}, reduce_fx="sum")


class LogsMetrics(Base):
    """Its metric objects are logged, computed in a hook, and kept in a dict of torch."""

    def __init__(self):
        super().__init__()
        self.mae = torchmetrics.MeanAbsoluteError()
        self.more = nn.ModuleDict({"r2": torchmetrics.R2Score()})

    def validation_step(self, batch, batch_idx):
        x, y = batch
        predictions = self.layer(x).squeeze(1)
        self.mae(predictions, y)
        self.log("val/mae", self.mae, on_step=False, on_epoch=True)
        self.more["r2"].update(predictions, y)

    def on_validation_epoch_end(self):
        self.log("val/r2", self.more["r2"].compute())
        self.more["r2"].reset()


class AsksItsStage(Base):
    """It logs what its Trainer says of the stage."""

    def note(self, batch):
        trainer = self.trainer
        told = [trainer.training, trainer.validating, trainer.testing, trainer.evaluating, trainer.sanity_checking]
        told_by = sum(2**place for place, is_so in enumerate(told) if is_so)
        self.log(f"{trainer.state.stage.value}/told", float(told_by))
        self.log(f"{trainer.state.stage.value}/error", self.error(batch))

    def validation_step(self, batch, batch_idx):
        self.note(batch)

    def on_validation_epoch_end(self):
        self.log("ends", float(self.trainer.evaluating))


class CountsInHooks(Base):
    """Its value is what its hooks have seen."""

    def on_validation_epoch_start(self):
        self.seen = []

    def on_validation_batch_start(self, batch, batch_idx):
        self.seen.append(batch_idx)

    def validation_step(self, batch, batch_idx):
        return {"error": self.error(batch), "training": self.training}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        assert not outputs["training"]
        self.seen.append(float(outputs["error"]))

    def on_validation_epoch_end(self):
        self.log("seen", sum(self.seen))


class OnlyTested(Base):
    def test_step(self, batch, batch_idx, stage="test"):
        self.log(f"{stage}_mse", self.error(batch))


MODULES = (LogsValues, LogsMetrics, CountsInHooks, OnlyTested, AsksItsStage)


def regression_data(sizes=(23, 17), **settings):
    generator = torch.Generator().manual_seed(0)
    splits = []
    for size in sizes:
        x = torch.randn(size, 4, generator=generator)
        splits.append((x, x.sum(1) + torch.randn(size, generator=generator)))
    return FederatedDataModule(TensorSource(*splits), num_clients=CLIENTS, eval_batch_size=2, seed=1, **settings)


def fitted(client, rounds=2, callbacks=(), **settings):
    loop = FederatedLoop(client, seed=1, **{"evaluate_clients_every": 1, **settings})
    Trainer(max_epochs=rounds, callbacks=list(callbacks), **QUIET).fit(loop, datamodule=regression_data())
    return loop


def plain(module, data, client_id):
    """What a Trainer reports of a module on a client's test samples."""
    batches = list(data.view(client_id, 0).batches("test", batch_size=data.eval_batch_size))
    loader = DataLoader(batches, batch_size=None)
    alone = Trainer(**QUIET)
    has_validation = type(module).validation_step is not LightningModule.validation_step
    evaluate = alone.validate if has_validation else alone.test
    (values,) = evaluate(module, loader, verbose=False)
    return values


def modules_of_clients(loop):
    """A copy of what each client would deploy."""
    models = {}
    for job in loop.evaluation.of_clients._jobs(loop.server.round_idx):
        loop.engine.load_client(job)
        loop.client.deployed()
        model = copy.deepcopy(loop.client.module)
        models[job.client_id] = model
    return models


@pytest.mark.parametrize("around", [FedAvg, partial(FedProx, mu=0.1), Local], ids=["FedAvg", "FedProx", "Local"])
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_each_client_has_the_values_of_plain_lightning(kind, around):
    loop = fitted(around(module=kind()))
    scores = loop.recorder.client_values
    data = loop.data
    expected = {k: plain(model, data, k) for k, model in modules_of_clients(loop).items()}
    assert len(expected) == CLIENTS
    for client_id, values in expected.items():
        named = {f"local/{name}": value for name, value in values.items()}
        assert scores[client_id] == pytest.approx(named, rel=1e-6)
    for key in scores[0]:
        mean = sum(scores[k][key] for k in range(CLIENTS)) / CLIENTS
        assert loop.round_metrics[key] == pytest.approx(mean)
    assert "local/alma" not in loop.round_metrics


def test_training_has_the_same_bits_with_and_without_the_evaluation():
    class Draws(LogsMetrics):
        def validation_step(self, batch, batch_idx):
            torch.rand(3)
            self.layer.weight.data += 1.0  # what a step leaves behind is not the model
            super().validation_step(batch, batch_idx)

    states = []
    for every in (None, 1):
        loop = fitted(Draws(), evaluate_clients_every=every)
        states.append(loop.client.module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_draws_of_a_step_do_not_depend_on_the_clients_before():
    class Draws(Base):
        def validation_step(self, batch, batch_idx):
            self.log("drawn", torch.rand(()))

    found = []
    for clients in (range(CLIENTS), [2]):
        loop = fitted(Draws())
        jobs = [job for job in loop.evaluation.of_clients._jobs(1) if job.client_id in clients]
        how = loop.evaluation.of_clients.how("validation")
        found.append({score.client_id: score.logged for score in loop.engine.evaluate(iter(jobs), how)})
    assert found[0][2] == found[1][2]


def test_model_metrics_and_own_values_stand_side_by_side():
    class Flat(LogsValues):
        def forward(self, x):
            return self.layer(x).squeeze(1)

    loop = fitted(Flat(), metrics={"mae": torchmetrics.MeanAbsoluteError()})
    assert {"local/mae", "local/val/mse", "local/count"} <= loop.round_metrics.keys()
    with pytest.raises(ValueError, match="must not have the name of a value that the module logs itself, got 'count'"):
        fitted(Flat(), metrics={"count": torchmetrics.MeanAbsoluteError()})


def test_a_module_that_nothing_measures_is_refused():
    with pytest.raises(ValueError, match="evaluate_clients_every needs a validation_step or test_step of Base, or"):
        fitted(Base())
    assert not [
        key for key in fitted(Local(module=Base()), evaluate_clients_every=None).round_metrics if "local" in key
    ]


def test_clients_without_test_samples_are_refused():
    class Untested(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12)), batch_size=4)

        val_dataloader = train_dataloader

    data = FederatedDataModule.from_datamodule(Untested(), num_clients=CLIENTS)
    loop = FederatedLoop(LogsValues(), evaluate_clients_every=1)
    with pytest.raises(ValueError, match="evaluate_clients_every needs test samples of the clients, and none of them"):
        Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=data)


def test_a_key_of_the_package_is_refused():
    class Drift(Base):
        def validation_step(self, batch, batch_idx):
            self.log("drift", 1.0)

    with pytest.raises(ValueError, match="must not be given 'local/drift'"):
        fitted(Drift())


def test_a_test_takes_the_test_step():
    class Both(LogsValues):
        def test_step(self, batch, batch_idx):
            self.log("tested", self.error(batch))

    loop = fitted(Local(module=Both()), evaluate_clients_every=None)
    assert "local/val/mse" in loop.round_metrics
    (values,) = Trainer(**QUIET).test(loop, datamodule=regression_data(), verbose=False)
    assert list(values) == ["local/tested"]
    (values,) = Trainer(**QUIET).validate(loop, datamodule=regression_data(), verbose=False)
    assert "local/val/mse" in values


def test_nets_have_the_accuracy_and_modules_have_not():
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1, evaluate_clients_every=1)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=toy_data((4, 4)))
    scores = loop.recorder.client_values
    assert loop.round_metrics["local/alma"] == pytest.approx(sum(s["local/alma"] for s in scores.values()) / 2)


def test_a_round_is_evaluated_once_though_its_checkpoint_lies_between(tmp_path):
    class Counts(LogsValues):
        passes = 0

        def on_validation_start(self):
            Counts.passes += 1

    class Saves(Callback):
        def on_validation_start(self, trainer, loop):
            if not trainer.sanity_checking and trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    whole = fitted(Local(module=Counts()), evaluate_clients_every=None, callbacks=[Saves()])
    assert Counts.passes == 2 * CLIENTS
    loop = FederatedLoop(Local(module=Counts()), seed=1)
    again = Trainer(max_epochs=2, **QUIET)
    again.fit(loop, datamodule=regression_data(), ckpt_path=tmp_path / "between.ckpt")
    assert loop.round_metrics == whole.round_metrics
    assert Counts.passes == 2 * CLIENTS


# --- the table ---


def table(folder):
    with Path(folder, "clients.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def in_folder(folder, rounds, callbacks=(), ckpt_path=None, client=None, every=2):
    """Fit in a folder, and return the loop and the Trainer."""
    loop = FederatedLoop(client or Local(module=LogsValues()), seed=1, evaluate_clients_every=every)
    settings = {**QUIET, "logger": CSVLogger(folder, name="", version="")}
    run = Trainer(max_epochs=rounds, callbacks=list(callbacks), **settings)
    run.fit(loop, datamodule=regression_data(), ckpt_path=ckpt_path)
    run.save_checkpoint(Path(folder, "last.ckpt"))
    return loop


def test_the_table_has_a_row_for_each_client_and_evaluated_round(tmp_path):
    loop = in_folder(tmp_path, 4)
    rows = table(tmp_path)
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in "13" for c in "012"]
    for row in rows[3:]:
        of_client = loop.recorder.client_values[int(row["client"])]
        assert {key: float(row[key]) for key in of_client} == of_client
    assert list(rows[0]) == ["round", "client", "owner", "local/val/mse", "local/largest", "local/count"]


def test_a_run_whose_clients_are_not_evaluated_has_no_table(tmp_path):
    in_folder(tmp_path, 2, client=FedAvg(module=LogsValues()), every=None)
    assert not Path(tmp_path, "clients.csv").exists()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_callback_s_table_has_the_values_too(tmp_path, every):
    in_folder(tmp_path / "plain", 4)
    in_folder(tmp_path / "more", 4, callbacks=[ClientTable(every=every)])
    expected = table(tmp_path / "plain")
    found = [row for row in table(tmp_path / "more") if row["local/val/mse"]]
    assert [{key: row[key] for key in expected[0]} for row in found] == expected
    measured = {row["round"] for row in table(tmp_path / "more") if row["samples"]}
    assert measured == {str(r) for r in range(4) if (r + 1) % every == 0}


@pytest.mark.parametrize("callbacks", [(), [ClientTable()]], ids=["alone", "callback"])
def test_a_continued_run_keeps_the_rows_of_before(tmp_path, callbacks):
    in_folder(tmp_path, 2)
    before = table(tmp_path)
    in_folder(tmp_path, 4, callbacks, ckpt_path=tmp_path / "last.ckpt")
    rows = [row for row in table(tmp_path) if row["local/val/mse"]]
    assert [{key: row[key] for key in before[0]} for row in rows][:3] == before
    assert [row["round"] for row in rows] == ["1"] * 3 + ["3"] * 3


def test_a_checkpoint_between_evaluation_and_table_has_the_values(tmp_path):
    class Saves(Callback):
        def on_validation_start(self, trainer, loop):
            if not trainer.sanity_checking and trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    in_folder(tmp_path / "whole", 2, callbacks=[Saves()])
    in_folder(tmp_path / "continued", 2, ckpt_path=tmp_path / "between.ckpt")
    assert table(tmp_path / "continued") == table(tmp_path / "whole")


# --- on the training samples ---


def on_training_samples(loop):
    """The values that a Trainer gives of the global model on all clients' training samples, in one pass."""
    data = loop.data
    batches = []
    for client_id in range(CLIENTS):
        batches += data.view(client_id, 0).batches("train", batch_size=data.eval_batch_size)
    (values,) = Trainer(**QUIET).validate(
        copy.deepcopy(loop.client.module), DataLoader(batches, batch_size=None), verbose=False
    )
    return {f"global/train/{name}": value for name, value in values.items()}


@pytest.mark.parametrize("kind", [LogsValues, LogsMetrics, CountsInHooks], ids=lambda kind: kind.__name__)
def test_the_training_samples_have_the_values_of_plain_lightning(kind):
    loop = fitted(FedAvg(module=kind()), evaluate_clients_every=None, evaluate_training_every=2)
    found = {name: value for name, value in loop.round_metrics.items() if name.startswith("global/train/")}
    assert found == pytest.approx(on_training_samples(loop), rel=1e-6)
    assert set(loop.recorder.history.curve(next(iter(found)))) == {1}


def test_a_net_has_accuracy_loss_and_metrics_on_the_training_samples():
    metrics = {"recall": torchmetrics.classification.MulticlassRecall(3, average="micro")}
    loop = FederatedLoop(FedAvg(optimizer=sgd()), seed=1, evaluate_training_every=1, metrics=metrics)
    data = toy_data((7, 5))
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=data)
    parts = [data.view(client_id, 0).all("train") for client_id in range(2)]
    x = torch.cat([part[0] for part in parts])
    y = torch.cat([part[1] for part in parts])
    loop.client.eval()
    with torch.no_grad():
        logits = loop.client(x)
    row = loop.round_metrics
    assert row["global/train/acc"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert row["global/train/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
    assert row["global/train/recall"] == pytest.approx(row["global/train/acc"])


def test_training_has_the_same_bits_with_and_without_the_pass_over_its_samples():
    states = []
    for every in (None, 1):
        loop = fitted(LogsMetrics(), evaluate_clients_every=None, evaluate_training_every=every)
        states.append(loop.client.module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_without_a_global_model_there_are_no_training_samples_to_evaluate_it_on():
    with pytest.raises(ValueError, match="evaluate_training_every needs a global model"):
        fitted(Local(module=LogsValues()), evaluate_training_every=1)


# --- what a module, a checkpoint and a callback find ---


def test_what_a_callback_of_a_module_counts_is_of_the_passes_of_the_trainer():
    made = []

    class Counts(Callback):
        def __init__(self):
            self.samples = 0
            made.append(self)

        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            if not trainer.sanity_checking:
                self.samples += len(batch[1])

    class Makes(LogsValues):
        def configure_callbacks(self):
            return [Counts()]

    loop = fitted(Makes(), rounds=1, evaluate_training_every=1)
    of_trainer, *of_passes = made
    assert of_trainer.samples == len(loop.data.split("test"))
    assert len(of_passes) == CLIENTS + 1


class Doubles(Callback):
    """Changes a batch in place, as a preprocessor does."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch[0].mul_(2)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        batch[0].mul_(2)

    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        batch[0].mul_(2)


class DoublesByTheModule(Doubles):
    """Asks the module that it is called with."""

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        batch[1].add_(module.layer.bias.detach())


class LogsBefore(Doubles):
    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        super().on_validation_batch_start(trainer, module, batch, batch_idx)
        module.log("largest", batch[0].max(), reduce_fx="max")


@pytest.mark.parametrize("around", [FedAvg, Local], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("callback", [Doubles, DoublesByTheModule, LogsBefore])
@pytest.mark.parametrize("kind", [LogsMetrics, CountsInHooks, OnlyTested], ids=lambda kind: kind.__name__)
def test_a_callback_of_the_module_changes_the_batches_that_clients_are_evaluated_on(kind, callback, around):
    class Makes(kind):
        def configure_callbacks(self):
            return [callback()]

    loop = fitted(around(module=Makes()), evaluate_training_every=1 if around is FedAvg else None)
    for client_id, values in loop.recorder.client_values.items():
        found = plain(loop.client_model(client_id), loop.data, client_id)
        assert values == pytest.approx({f"local/{name}": value for name, value in found.items()}, rel=1e-5)


def test_values_that_a_hook_logs_before_the_step_weigh_as_in_lightning():
    class Before(LogsValues):
        def on_validation_batch_start(self, batch, batch_idx):
            self.log("before", batch[1].mean())

        def validation_step(self, batch, batch_idx):
            self.log("within", batch[1].mean())

    loop = fitted(Before())
    for client_id, values in loop.recorder.client_values.items():
        assert values["local/before"] == pytest.approx(values["local/within"])
        found = plain(loop.client_model(client_id), loop.data, client_id)
        assert values == pytest.approx({f"local/{name}": value for name, value in found.items()})


def test_metric_objects_of_clients_tell_their_directions():
    class Scores(LogsMetrics):
        def validation_step(self, batch, batch_idx):
            self.more["r2"].update(self.layer(batch[0]).squeeze(1), batch[1])
            self.log("score", self.more["r2"])

        def on_validation_epoch_end(self):
            pass

    loop = fitted(Local(module=Scores()))
    assert loop.recorder.directions["local/score"] == "max"
    assert loop.final_key == "local/score"
    assert fitted(Scores(), evaluate_training_every=1).recorder.directions["global/train/score"] == "max"


def test_early_stopping_waits_for_the_training_samples():
    stop = EarlyStopping("global/train/val/mse", patience=5, check_on_train_epoch_end=True)
    loop = fitted(LogsValues(), 4, [stop], evaluate_clients_every=None, evaluate_training_every=2)
    assert loop.trainer.current_epoch == 4


def test_a_module_that_nothing_measures_costs_no_pass():
    class Watched(Base):
        def forward(self, x):
            raise AssertionError("nobody needs it")

    fitted(Local(module=Watched()), evaluate_clients_every=None)


def test_a_checkpoint_at_the_end_of_training_writes_its_round_once(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    in_folder(tmp_path, 3, callbacks=[Saves()], every=1)
    before = table(tmp_path)
    in_folder(tmp_path, 3, ckpt_path=tmp_path / "between.ckpt", every=1)
    assert table(tmp_path) == before


def test_a_number_of_a_metric_and_a_dictionary_with_a_matrix():
    class Number(torchmetrics.Metric):
        def update(self, predictions, targets):
            pass

        def compute(self):
            return 0.5

    class Both(Number):
        def compute(self):
            return {"matrix": torch.zeros(2, 2), "number": torch.tensor(1.0)}

    class Flat(LogsValues):
        def forward(self, x):
            return self.layer(x).squeeze(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = fitted(Flat(), metrics={"fixed": Number(), "both": Both()})
    assert loop.round_metrics["global/fixed"] == loop.round_metrics["local/fixed"] == 0.5
