"""One record of a client's round: clients.csv, drift.csv, `cost/steps` and `local/drift` agree, for every method."""

import csv
import inspect
import math

import pytest

from fl_lightning import ClientModule, FaultPolicy, FederatedLoop, methods
from fl_lightning.monitors import ClientTable, CostMonitor, DriftMonitor
from tests.federation.faulty import CLIENT, ROUND, Faulty
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


@pytest.mark.parametrize("how", ["exception", "NaN", "receive"])
@pytest.mark.parametrize("least", [1, 3])
def test_they_agree_if_a_client_fails_or_too_few_are_left(how, least, tmp_path):
    faults = FaultPolicy(nonfinite="skip", on_error="skip", min_clients=least)
    loop = FederatedLoop(Faulty(how=how, net=BatchNormNet, optimizer=sgd()), seed=3, faults=faults)
    callbacks = [ClientTable(loss=False, accuracy=False, dirpath=tmp_path), CostMonitor()]
    callbacks.append(DriftMonitor(dirpath=tmp_path))
    trainer(3, callbacks=callbacks).fit(loop, datamodule=toy_data((8, 12, 5, 0)))
    curves = loop.recorder.history
    for round_idx in range(3):
        clients = [row for row in read(tmp_path / "clients.csv") if int(row["round"]) == round_idx]
        drifts = [row for row in read(tmp_path / "drift.csv") if int(row["round"]) == round_idx]
        known = [float(row["drift"]) for row in clients if row["drift"]]
        assert known == [float(row["drift"]) for row in drifts if row["drift"]]
        assert sum(int(row["steps"] or 0) for row in clients) == curves.curve("cost/steps").get(round_idx, 0)
        for way in ("down", "up"):
            total = curves.curve(f"comm/bytes_{way}")[round_idx]
            assert sum(int(row[f"bytes_{way}"]) for row in clients) == total
        if known:
            assert curves.curve("local/drift")[round_idx] == pytest.approx(math.fsum(known) / len(known), rel=1e-9)
        for row in clients:
            assert bool(row["skipped"]) == (round_idx == ROUND and row["client"] == str(CLIENT))


def test_a_client_without_samples_and_uncounted_steps_are_met():
    assert {"Ditto", "FedAvg"} <= {kind.__name__ for kind in METHODS}
