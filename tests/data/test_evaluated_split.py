"""Which split is evaluated is decided once, after setup, and everything that writes or measures follows."""

import inspect

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop, monitors
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import Monitor
from fl_lightning.nets import Perceptron
from fl_lightning.runs.best import BestCheckpoint
from tests.commands import say, working_in
from tests.toys import samples, trainer

OWN = """
from tests.data.test_evaluated_split import *
"""


class Base(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(40)), 5)


class HasTests(Base):
    def test_dataloader(self):
        return DataLoader(TensorDataset(*samples(12, seed=1)), 5)


class GivesNone(HasTests):
    def val_dataloader(self):
        return None


class GivesNothing(HasTests):
    def val_dataloader(self):
        return []


class GivesNoLoaders(HasTests):
    def val_dataloader(self):
        return {}


class GivesNoSamples(HasTests):
    """Loaders of no samples, which Lightning leaves out, too."""

    def val_dataloader(self):
        return [DataLoader(TensorDataset(*samples(0, seed=2)), 5)] * 2


class NothingTested(Base):
    def test_dataloader(self):
        return DataLoader(TensorDataset(*samples(0, seed=1)), 5)


class NoneTested(Base):
    def test_dataloader(self):
        return None


class Validated(Base):
    def val_dataloader(self):
        return DataLoader(TensorDataset(*samples(9, seed=2)), 5)


class Both(HasTests, Validated):
    pass


class Several(HasTests):
    def val_dataloader(self):
        return {name: DataLoader(TensorDataset(*samples(9, seed=2)), 5) for name in "ab"}


class ValidatedOnly(Validated, NothingTested):
    pass


class Late(HasTests):
    """Has validation samples once it is set up."""

    def setup(self, stage):
        self.val_dataloader = lambda: DataLoader(TensorDataset(*samples(9, seed=2)), 5)


KINDS = {
    HasTests: "test",
    GivesNone: "test",
    GivesNothing: "test",
    GivesNoLoaders: "test",
    GivesNoSamples: "test",
    NothingTested: None,
    NoneTested: None,
    Several: "val",
    ValidatedOnly: "val",
    Validated: "val",
    Both: "val",
    Late: "val",
    Base: None,
}
MONITORS = [
    kind
    for kind in (getattr(monitors, name) for name in dir(monitors) if name[0].isupper())
    if inspect.isclass(kind) and issubclass(kind, Monitor) and kind is not Monitor
]


def federated(kind):
    return FederatedDataModule(kind(), num_clients=2)


@pytest.mark.parametrize(("kind", "split"), KINDS.items())
def test_the_split_is_known_after_setup(kind, split):
    data = federated(kind)
    with pytest.raises(ValueError, match="the samples must be loaded first"):
        _ = data.evaluated
    data.setup("fit")
    assert data.evaluated == split
    assert data.evaluated_prefix == ("val" if split == "val" else "global")
    loaders = data.val_dataloader()
    loaders = loaders if isinstance(loaders, list) else [loaders]
    assert len(loaders) == (2 if kind is Several else int(split is not None))
    assert all(len(loader) for loader in loaders)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_in_python_says_the_same(kind, tmp_path):
    """Keys of the row, names of the best checkpoint, and what `validate` measures, all of one split."""
    loop = FederatedLoop(FedAvg(net=Perceptron))
    best = BestCheckpoint(tmp_path, "best")
    run = trainer(2, tmp_path, callbacks=[best], enable_checkpointing=True)
    data = federated(kind)
    run.fit(loop, datamodule=data)
    scopes = {key.split("/")[0] for key in loop.round_metrics if key.split("/")[1].startswith("acc")}
    names = {path.name for path in tmp_path.rglob("best*")}
    if KINDS[kind] is None:
        assert not scopes | names
        return
    assert scopes == {data.evaluated_prefix}
    assert names == {"best.ckpt" if KINDS[kind] == "val" else "best-on-test.ckpt"}
    measured = run.validate(loop, datamodule=data, verbose=False)[0]
    assert {key.split("/")[0] for key in measured} == {data.evaluated_prefix}


@pytest.mark.parametrize("kind", [GivesNone, GivesNothing, Late, Validated])
def test_keys_files_and_tables_are_of_one_split(kind, tmp_path, without_pictures):
    scope, name = ("val", "best") if KINDS[kind] == "val" else ("global", "best-on-test")
    with working_in(tmp_path, OWN):
        source = f"--data.source tests.data.test_evaluated_split.{kind.__name__} --data.num_clients 2"
        said = say(f"fit --model.client FedAvg --model.client.net Perceptron {source} --trainer.max_epochs 2")
    assert said.code == 0, said.err
    (run,) = (tmp_path / "runs").glob("*/*")
    assert {path.name for path in (run / "checkpoints").glob("best*")} == {f"{name}.ckpt"}
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert f"{scope}/acc" in header
    assert not {"val/acc", "global/acc"} - {f"{scope}/acc"} & set(header)
    assert f"({'val' if scope == 'val' else 'test'} split)" in said.out


def quick(kind):
    arguments = inspect.signature(kind.__init__).parameters
    tiny = {"samples": 6, "grid": 3, "repeats": 1, "iterations": 2, "every": 1, "plot": False}
    given = {name: value for name, value in tiny.items() if name in arguments}
    if "groups" in arguments:
        given["groups"] = {"all": [0, 1]}
    if "class_idx" in arguments:
        given |= {"class_idx": 0, "client": 0}
    return given


@pytest.mark.parametrize("faults", ["error", "skip"])
@pytest.mark.parametrize("kind", MONITORS, ids=lambda kind: kind.__name__)
def test_monitors_blame_no_client_for_a_split_that_is_not_there(kind, faults, tmp_path):
    """With validation samples only each measures on these, or is refused at the start by the setting to add."""
    arguments = inspect.signature(kind.__init__).parameters
    needed = [
        n for n, p in arguments.items() if p.default is p.empty and n not in {"self", *quick(kind)} and p.kind < 2
    ]
    if needed:
        pytest.skip(f"{kind.__name__} needs {needed}, which quick() does not know")
    loop = FederatedLoop(FedAvg(net=Perceptron), faults=faults)
    run = trainer(
        1,
        tmp_path,
        callbacks=[kind(**quick(kind), dirpath=tmp_path)] if "dirpath" in arguments else [kind(**quick(kind))],
    )
    refusal = ""
    try:
        run.fit(loop, datamodule=federated(Validated))
    except ValueError as refused:
        refusal = str(refused)
    if refusal:
        assert refusal.startswith(("the data have no split", kind.__name__))
        assert "client 0" not in refusal
        assert not loop.round_metrics
    else:
        assert loop.skipped == []
        assert torch.isfinite(torch.tensor(loop.round_metrics["val/acc"]))


@pytest.mark.parametrize("kind", [kind for kind in MONITORS if "split" in inspect.signature(kind.__init__).parameters])
def test_a_split_that_is_asked_for_is_refused_at_the_start(kind, tmp_path):
    loop = FederatedLoop(FedAvg(net=Perceptron), faults="skip")
    with pytest.raises(ValueError, match="the data have no split 'proxy'"):
        trainer(1, tmp_path, callbacks=[kind(split="proxy", **quick(kind))]).fit(loop, datamodule=federated(Both))
