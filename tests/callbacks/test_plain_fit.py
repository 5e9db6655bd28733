"""Callbacks in the fit of a module without a federation: each works, or says in one sentence that it does not."""

import warnings
from time import monotonic

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import callbacks, monitors
from fl_lightning.methods import FedProx

ARGUMENTS = {
    "GroupMetrics": {"groups": {"a": [0]}},
    "ClassCount": {"class_idx": 0},
    "SampleReduction": {"class_idx": 0},
}
WORK = {"ClasswiseReport", "ClientCheckpoint", "CostMonitor", "RunPlots"}
OUTSIDE = {"ClientsReport", "MetricArrays", "SavePredictions"}
"""Callbacks of `test`, `validate` and `predict`."""
KINDS = {
    name: kind
    for room in (callbacks, monitors)
    for name in dir(room)
    if isinstance(kind := getattr(room, name), type) and issubclass(kind, Callback) and name != "Monitor"
}


class Linear(LightningModule):
    def __init__(self, classes: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, classes)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        hits = self.layer(batch[0]).argmax(1) == batch[1]
        self.log_dict({"val_acc": hits.float().mean(), "val_width": 2.0})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, folder, callback, epochs=2):
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,))), batch_size=4)
    quiet = {"enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    if isinstance(callback, callbacks.RoundProgressBar):
        quiet["enable_progress_bar"] = True
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        default_root_dir=folder,
        callbacks=[callback],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **quiet,
    )
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.parametrize("name", sorted(KINDS.keys() - WORK - OUTSIDE))
def test_what_has_no_work_says_so_once(name, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Linear(), tmp_path, KINDS[name](**ARGUMENTS.get(name, {})), epochs=1)
    (said,) = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert said == (
        f"{name} does nothing here: it follows the clients of a FederatedLoop, got a fit of Linear; "
        f"fit FederatedLoop(client=Linear(...)), or leave {name} out"
    )


def test_client_checkpoint_writes_the_module(tmp_path):
    module = Linear(5)
    fit(module, tmp_path, callbacks.ClientCheckpoint(), epochs=1)
    again = Linear.load_from_checkpoint(tmp_path / "client.ckpt")
    assert torch.equal(again.layer.weight, module.layer.weight)
    wrapped = FedProx(module=Linear(5), mu=0.1)
    fit(wrapped, tmp_path, callbacks.ClientCheckpoint(filename="inner.ckpt"), epochs=1)
    again = Linear.load_from_checkpoint(tmp_path / "inner.ckpt")
    assert torch.equal(again.layer.weight, wrapped.module.layer.weight)


def test_plots_and_report_show_the_values_of_the_module(tmp_path, capsys):
    plots = callbacks.RunPlots(format="svg")
    trainer = fit(Linear(), tmp_path, plots)
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["accuracy.svg", "values.svg"]
    assert plots._history.curve("val_acc").keys() == {0, 1}
    fit(Linear(), tmp_path, callbacks.ClasswiseReport())
    said = capsys.readouterr().out
    assert "Last values" in said
    assert all(name in said for name in trainer.callback_metrics)


def test_cost_of_an_epoch(tmp_path):
    began = monotonic()
    trainer = fit(Linear(), tmp_path, monitors.CostMonitor())
    elapsed = monotonic() - began
    values = trainer.callback_metrics
    assert values["cost/steps"] == 3
    assert 0 < values["cost/seconds"] <= elapsed
    assert values["cost/memory"] > 1e6
    assert "cost/steps" in (tmp_path / "metrics.csv").read_text()
