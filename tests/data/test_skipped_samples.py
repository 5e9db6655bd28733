"""Code that needs a batch, or a row for every sample, does without skipped batches or refuses them in a sentence."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop, callbacks, methods, monitors
from fl_lightning.aggregation import ServerModule
from fl_lightning.attacks import label_flip
from fl_lightning.data import ShardPartition
from fl_lightning.methods import FedAvg, FedCurv, FedDFServer, FedKA
from tests.data.test_loaders_beyond_settings import Data
from tests.toys import BatchNormNet, samples, sgd, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

DATASET = TensorDataset(*samples(60))


def none(items):
    return None


def some(items):
    """Leave out a batch with a large first number."""
    x, y = default_collate(items)
    return None if (x[:, 0] > 2.2).any() else [x, y]


COLLATE = {"all": none, "some": some}


def client(kind=FedAvg, **settings):
    optimizer = sgd(momentum=0)
    return kind(net=BatchNormNet, optimizer=optimizer, num_classes=3, input_shape=(4,), **settings)


def fit(collate, made, watch=(), skipped=("train", "val", "test"), **settings):
    loaders = Data("none", None)
    chosen = dict.fromkeys(skipped, collate)
    loaders.loader = lambda name: DataLoader(DATASET, batch_size=4, collate_fn=chosen.get(name))
    data = FederatedDataModule.from_datamodule(
        loaders,
        num_clients=3,
        eval_batch_size=4,
        proxy_size=15,
        transfer_size=15,
        num_classes=3,
        partition=ShardPartition(shards_per_client=2),
    )
    loop = FederatedLoop(made, seed=1, **settings)
    run = trainer(2, callbacks=list(watch))
    run.fit(loop, datamodule=data)
    return loop, run, data


def ends_or_says_so(collate, made, watch=(), **settings):
    """Fit. An error is one sentence of the package's own, which names what skips a batch, or an empty set."""
    try:
        return fit(collate, made, watch, **settings)[0]
    except Exception as error:
        sentence = str(error)
    assert "skips a batch" in sentence or "importance needs at least one sample, got none" in sentence
    assert " raised " not in sentence
    return None


def found_in(module, base):
    values = [getattr(module, name) for name in dir(module)]
    kinds = [value for value in values if inspect.isclass(value)]
    return {kind.__name__: kind for kind in kinds if issubclass(kind, base) and kind is not base}


METHODS = {
    name: kind
    for name, kind in found_in(methods, ClientModule).items()
    if name != "FedAlign"  # it trains nets of its own, and reads no samples besides its batches
}
SERVERS = {name: kind for name, kind in found_in(methods, ServerModule).items() if "proxy" in kind.needs}


@pytest.mark.parametrize("kind", COLLATE)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_without_skipped_batches_or_says_so(name, kind):
    ends_or_says_so(COLLATE[kind], client(METHODS[name]))


@pytest.mark.parametrize("kind", COLLATE)
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_module_goes_without_skipped_batches_or_says_so(name, kind):
    ends_or_says_so(COLLATE[kind], client(), server_module=SERVERS[name]())


@pytest.mark.parametrize("kind", COLLATE)
def test_a_server_module_only_looks_at_its_validation_samples(kind):
    """FedDF learns from its proxy samples, and needs no others."""
    server = FedDFServer(distill_steps=2, eval_every=1)
    loop, _, _ = fit(COLLATE[kind], client(), skipped=("val",), server_module=server)
    assert server.steps_taken == 2
    assert math.isfinite(loop.round_metrics["train/ce"])


MONITORS = {name: {} for name in found_in(monitors, monitors.Monitor)}
MONITORS["ClassCount"] = {"class_idx": 0}
MONITORS["SampleReduction"] = {"class_idx": 0}
MONITORS["GroupMetrics"] = {"groups": {"all": [0, 1, 2]}, "metrics": {"f1": MulticlassF1Score(3)}}
MONITORS["FeatureProbe"] = {"every": 1, "plot": False}
MONITORS["LossLandscape"] = {"every": 1, "grid": 3, "repeats": 1, "iterations": 2}


@pytest.mark.parametrize("kind", COLLATE)
@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_goes_without_skipped_batches_or_says_so(name, kind, tmp_path):
    kind_of_monitor = getattr(monitors, name)
    folder = {"dirpath": tmp_path} if "dirpath" in inspect.signature(kind_of_monitor).parameters else {}
    monitor = kind_of_monitor(**MONITORS[name], **folder)
    ends_or_says_so(COLLATE[kind], client(), [monitor])


def test_groups_without_a_batch_have_no_value():
    """A metric object that nobody has updated would give 0."""
    monitor = monitors.GroupMetrics({"all": [0, 1, 2]}, {"f1": MulticlassF1Score(3)})
    loop, _, _ = fit(none, client(), [monitor])
    assert not [key for key in loop.round_metrics if "f1" in key]


@pytest.mark.parametrize("kind", COLLATE)
def test_a_report_of_samples_that_are_skipped_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=r"ClasswiseReport needs a row for each of the 60 val samples, got .*skips a"):
        fit(COLLATE[kind], client(), [callbacks.ClasswiseReport(dirpath=tmp_path)])


def test_saved_predictions_of_two_processes_stay_in_order(tmp_path, monkeypatch):
    """The second process has skipped a batch, and the first one had the last batch alone."""
    parts = [["a", "c", "e"], [None, "d", None]]
    ranks = SimpleNamespace(world=2, gather_to_root=lambda own: parts)
    monkeypatch.setattr(callbacks.predictions, "current_communicator", lambda device: ranks)
    saver = callbacks.SavePredictions(tmp_path)
    saver.write_on_epoch_end(
        SimpleNamespace(is_global_zero=True, datamodule=None, num_predict_batches=[3]),
        SimpleNamespace(device="cpu"),
        parts[0],
        [],
    )
    assert torch.load(saver.path) == ["a", "c", "d", "e"]


def test_anchors_of_skipped_samples_are_refused():
    with pytest.raises(ValueError, match=r"must be a batch, got None; return a batch in collate_fn.*skips a batch"):
        fit(none, client(FedKA))


def test_an_attack_passes_skipped_batches_on():
    attacked = label_flip(client(FedCurv, fisher="batch"), [0, 1, 2])
    loop, _, _ = fit(some, attacked)
    assert math.isfinite(loop.round_metrics["train/ce"])
