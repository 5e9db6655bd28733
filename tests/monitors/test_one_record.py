"""One record of a client's round: clients.csv, drift.csv, `cost/steps` and `local/drift` agree, for every method."""

import csv
import inspect
import math

import pytest

from fl_lightning import ClientModule, FederatedLoop, methods
from fl_lightning.monitors import ClientTable, CostMonitor, DriftMonitor
from tests.federation.test_evaluated_model import all_classes
from tests.toys import BatchNormNet, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = [kind for kind in all_classes(ClientModule) if kind.__name__ in methods.__all__]


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_tables_and_values_of_a_round_agree(kind, tmp_path):
    required = [p.name for p in inspect.signature(kind.__init__).parameters.values() if p.default is p.empty]
    if set(required) - {"self", "base"}:
        pytest.skip(f"{kind.__name__} has arguments that must be given")
    data = toy_data((8, 0, 12, 5), transfer_size=9, proxy_size=6, partition=None)
    try:
        loop = FederatedLoop(kind(net=BatchNormNet, optimizer=sgd(0.01, 0.0)), seed=3)
        callbacks = [ClientTable(loss=False, accuracy=False, dirpath=tmp_path), CostMonitor()]
        callbacks.append(DriftMonitor(dirpath=tmp_path))
        trainer(1, callbacks=callbacks).fit(loop, datamodule=data)
    except ValueError as error:
        pytest.skip(f"{kind.__name__}: {error}")
    clients = read(tmp_path / "clients.csv")
    drifts = read(tmp_path / "drift.csv")
    assert sum(int(row["steps"]) for row in clients) == loop.round_metrics["cost/steps"]
    assert [row["drift"] for row in clients] == [row["drift"] for row in drifts]
    for row in clients:
        assert row["samples"] != "0" or row["drift"] == ""
    known = [float(row["drift"]) for row in clients if row["drift"]]
    if known:
        assert math.fsum(known) / len(known) == pytest.approx(loop.round_metrics["local/drift"], rel=1e-9)


def test_a_client_without_samples_and_uncounted_steps_are_met():
    assert {"Ditto", "FedAvg"} <= {kind.__name__ for kind in METHODS}
