"""All monitors at once: a run does not know of them, and one that was broken off goes on measuring as if it was not."""

from pathlib import Path

import numpy as np
import pytest
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import FederatedLoop
from fl_lightning import monitors as kinds
from fl_lightning.data import DirichletPartition
from fl_lightning.methods import SCAFFOLD, FedAvg, FedNTD, KnFu
from fl_lightning.monitors import (
    ClassCount,
    ClientTable,
    CostMonitor,
    GroupMetrics,
    Monitor,
    PersonalisedAccuracy,
    PredictedDistribution,
    SampleReduction,
    features,
    landscape,
)
from fl_lightning.nets import Perceptron
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.types import FineTuning
from tests.callbacks import toy
from tests.federation.test_clients_by_own_steps import LogsValues, regression_data
from tests.monitors import test_monitors, test_probes
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of
from tests.user_modules import Plain

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = (10, 10, 10, 10)
CLIENTS = {
    "FedAvg": (FedAvg, {}),
    "FedNTD": (FedNTD, {}),
    "SCAFFOLD": (SCAFFOLD, {"optimizer": sgd(momentum=0)}),
    "KnFu": (KnFu, {}),
}


@pytest.fixture(autouse=True)
def _without_pictures_of_probes(monkeypatch):
    """Those are drawn in test_probes.py, and take most of its time."""
    for module in (features, landscape):
        for name in ("save", "plot_landscape", "plot_embedding", "joint_embedding"):
            monkeypatch.setattr(module, name, lambda *_, **__: None, raising=False)


def every_monitor(folder):
    """One of each kind, and the experiment that takes samples away."""
    groups = GroupMetrics({"first": [0], "others": [1, 2, 3]}, {"f1": MulticlassF1Score(3)}, dirpath=folder)
    study = SampleReduction(class_idx=0, start=1, every=1, step=0.1)
    own = [PredictedDistribution(dirpath=folder), groups, ClassCount(class_idx=0), study]
    return [*test_monitors.monitors(folder), *test_probes.probes(folder), *own]


def run(name, callbacks, rounds=3, chunk=1, folder=None, ckpt_path=None, **settings):
    kind, more = CLIENTS[name]
    # a stack draws its dropout for all of its clients, so the nets of stacks have none
    net = Perceptron if chunk > 1 else BatchNormNet
    partition = DirichletPartition(alpha=1.0, min_samples=2)
    data = toy_data(SIZES, partition=partition, transfer_size=9)
    loop = FederatedLoop(
        kind(**{"net": net, "optimizer": sgd(), **more}), seed=3, local_epochs=2, chunk=chunk, **settings
    )
    logger = {"logger": RoundCSVLogger(folder)} if folder else {}
    fitted = trainer(rounds, callbacks=list(callbacks), log_every_n_steps=1, **logger)
    fitted.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop


def test_there_is_one_of_each_kind():
    found = {type(callback) for callback in every_monitor(None)}
    measuring = {kind for kind in vars(kinds).values() if isinstance(kind, type) and issubclass(kind, Monitor)}
    assert found == (measuring - {Monitor, CostMonitor}) | {SampleReduction}  # seconds are never the same


@pytest.mark.parametrize("monitor", every_monitor(None), ids=lambda monitor: type(monitor).__name__)
def test_without_classes_a_monitor_measures_or_names_what_to_take_instead(monitor):
    """Clients and data are a regression. A monitor that is refused says so before anything trains."""
    if isinstance(monitor, GroupMetrics):
        monitor = GroupMetrics({"first": [0]})
    loop = FederatedLoop(LogsValues(), evaluate_clients_every=1)
    refusal = ""
    try:
        trainer(2, callbacks=[monitor]).fit(loop, datamodule=regression_data())
    except ValueError as error:
        refusal = str(error)
    if not refusal:
        assert loop.round_metrics["local/val/mse"] >= 0
        return
    kind = type(monitor).__name__
    beginning = f"{kind} needs data with classes, and these have none; set data.num_classes if the samples have classes"
    assert refusal.startswith(f"{beginning}, else take ")
    assert not loop.round_metrics
    for word in refusal.partition(", else take ")[2].replace(",", " ").split():
        if word.endswith(("Monitor", "Metrics")):
            assert hasattr(kinds, word)


def test_personalised_accuracy_without_classes_is_given_by_what_the_refusal_names():
    assert "local/tuned/KEY" in PersonalisedAccuracy.instead
    loop = FederatedLoop(LogsValues(), evaluate_clients_every=1, fine_tuning=FineTuning(epochs=1))
    trainer(1).fit(loop, datamodule=regression_data())
    assert {"local/val/mse", "local/tuned/val/mse"} <= loop.round_metrics.keys()


@pytest.mark.parametrize("monitor", every_monitor(None), ids=lambda monitor: type(monitor).__name__)
def test_what_a_monitor_needs_of_a_module_is_no_clients_fault(monitor):
    """`Plain` has no forward."""
    loop = FederatedLoop(Plain(), faults="skip")
    run = trainer(6, callbacks=[monitor])
    refusal = ""
    try:
        run.fit(loop, datamodule=toy_data(transfer_size=6))
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "has no forward" in refusal or "needs the name of a layer" in refusal
        assert not loop.round_metrics
    assert not loop.skipped


def test_metrics_of_a_module_without_outputs_are_refused():
    for fits in (True, False):
        loop = FederatedLoop(Plain(), faults="skip", metrics={"f1": MulticlassF1Score(3)})
        run = trainer(1)
        start = run.fit if fits else run.validate
        with pytest.raises(ValueError, match=r"model\.metrics needs the outputs of Plain, which has no forward"):
            start(loop, datamodule=toy_data())
        assert not loop.round_metrics


def test_a_table_without_accuracies_needs_no_outputs():
    for table in (ClientTable(accuracy=False), ClientTable()):
        loop = FederatedLoop(Plain() if not table.accuracy else WithForward(), faults="skip")
        trainer(1, callbacks=[table]).fit(loop, datamodule=toy_data())
        assert loop.round_metrics
        assert not loop.skipped


class WithForward(Plain):
    """The same module with outputs."""

    def forward(self, x):
        return self.net(x)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("FedAvg", 1),
        ("FedAvg", 4),
        *(slow("FedAvg", 2), slow("FedNTD", 1), slow("FedNTD", 2), slow("FedNTD", 4)),
        *(slow("SCAFFOLD", 1), slow("SCAFFOLD", 4), slow("KnFu", 1)),
    ],
)
def test_at_equal_chunk_the_weights_are_those_of_a_run_without(name, chunk, tmp_path):
    everything = every_monitor(tmp_path)
    with_them, without = (run(name, callbacks, 2, chunk) for callbacks in (everything, everything[-1:]))
    assert (with_them.engine.why_not() is None) if chunk > 1 else not hasattr(with_them.engine, "why_not")
    assert equal(weights_of(with_them), weights_of(without))
    measured = with_them.recorder.history
    plain = without.recorder.history
    assert {key: measured.curve(key) for key in plain.names} == {key: plain.curve(key) for key in plain.names}
    assert len(measured.names) > len(plain.names) + 20


def contents(folder):
    """What the files of a run hold: text, and arrays by name."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.csv")}
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            found |= {f"{path.name}/{name}": file[name].tobytes() for name in file.files}
    return found


@pytest.mark.parametrize(
    ("name", "chunk", "last"),
    [("FedAvg", 4, 0), slow("FedAvg", 1, 0), slow("FedAvg", 1, 1), slow("FedNTD", 4, 1), slow("KnFu", 1, 1)],
)
def test_a_run_that_was_broken_off_measures_what_the_whole_one_does(name, chunk, last, tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    rounds = last + 3
    expected = run(name, every_monitor(whole), rounds, chunk, whole)
    save = toy.At(last, lambda t: t.save_checkpoint(tmp_path / "at.ckpt"))
    broken = [*every_monitor(parts), save, toy.At(last + 1, lambda _: 1 / 0)]
    with pytest.raises(ZeroDivisionError):  # a round later, which has written its rows
        run(name, broken, rounds, chunk, parts)
    again = run(name, every_monitor(parts), rounds, chunk, parts, tmp_path / "at.ckpt")
    assert equal(weights_of(again), weights_of(expected))
    one = again.recorder.history
    other = expected.recorder.history
    assert one.names == other.names
    assert {key: one.curve(key) for key in one.names} == {key: other.curve(key) for key in other.names}
    assert contents(parts) == contents(whole)
    assert {Path(name).parts[0] for name in contents(whole)} >= {"clients.csv", "features-00001.npz"}
