"""Monitors: what they measure is right, and a run does not know that they were there."""

import copy
import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.functional.accuracy import class_accuracy, class_counts
from fl_lightning.functional.classes import class_split, in_local, out_local
from fl_lightning.methods import SCAFFOLD, FedAvg, FedBN, FedCL, FedNTD, KnFu, Local
from fl_lightning.monitors import (
    ClientTable,
    DriftMonitor,
    ForgettingMonitor,
    Monitor,
    PersonalisedAccuracy,
    SampleReduction,
)
from fl_lightning.monitors.drift import moved
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.callbacks import toy
from tests.commands import TINY, say
from tests.federation.faulty import faulty
from tests.toys import SIZES, BatchNormNet, equal, folded, sgd, toy_data, trainer, weights_of
from tests.user_data import Pairs
from tests.user_modules import Classifier


def monitors(folder=None):
    """Every monitor, all on."""
    return [
        ForgettingMonitor(epochs=True, samples=20, dirpath=folder),
        PersonalisedAccuracy(train=True),
        DriftMonitor(dirpath=folder),
        ClientTable(dirpath=folder),
    ]


def run(client=None, callbacks=(), rounds=3, data=None, ckpt_path=None, folder=None, **settings):
    client = FedAvg(net=BatchNormNet, optimizer=sgd()) if client is None else client
    loop = FederatedLoop(client, **folded({"seed": 3, "local_epochs": 2, **settings}))
    logger = {"logger": RoundCSVLogger(folder)} if folder else {}
    fitted = trainer(rounds, callbacks=list(callbacks), log_every_n_steps=1, **logger)
    fitted.fit(loop, datamodule=toy_data() if data is None else data, ckpt_path=ckpt_path)
    return loop


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Copies(pl.Callback):
    """Keeps a copy of every client's net as it is received and as it is trained."""

    def __init__(self):
        self.received = {}
        self.trained = {}
        self.losses = {}

    def on_client_start(self, trainer, loop, client_id):
        self.received[trainer.current_epoch, client_id] = copy.deepcopy(loop.client.net).eval()

    def on_client_end(self, trainer, loop, update):
        self.trained[trainer.current_epoch, update.client_id] = copy.deepcopy(loop.client.net).eval()


@torch.no_grad()
def accuracy_of(net, batch):
    return class_accuracy(class_counts(net(batch[0]), batch[1], 3))


CLIENTS = {
    "FedAvg": lambda: (FedAvg(net=BatchNormNet, optimizer=sgd()), toy_data()),
    "FedNTD": lambda: (FedNTD(net=BatchNormNet, optimizer=sgd()), toy_data()),
    "SCAFFOLD": lambda: (SCAFFOLD(net=BatchNormNet, optimizer=sgd(momentum=0)), toy_data()),
    "FedCL": lambda: (FedCL(net=BatchNormNet, optimizer=sgd()), toy_data(proxy_size=6, partition=None)),
    "FedBN": lambda: (FedBN(net=BatchNormNet, optimizer=sgd()), toy_data(participation=0.6)),
    "Local": lambda: (Local(net=BatchNormNet, optimizer=sgd()), toy_data()),
    "KnFu": lambda: (KnFu(net=BatchNormNet, optimizer=sgd()), toy_data(transfer_size=9, partition=None)),
    "module": lambda: (Classifier(), None),
    "regression": lambda: (toy.Regression(), toy.data(classes=False)),
}


def slow(name):
    """Others have their traits: FedAvg and FedNTD with weights, KnFu without."""
    return pytest.param(name, marks=[pytest.mark.slow] * (name in ("SCAFFOLD", "FedCL", "Local")))


@pytest.mark.parametrize("name", [slow(name) for name in CLIENTS])
def test_a_run_with_every_monitor_has_the_weights_of_one_without(name, tmp_path):
    def fitted(callbacks):
        from fl_lightning import FederatedDataModule

        pl.seed_everything(1, verbose=False)
        client, data = CLIENTS[name]()
        if data is None:
            data = FederatedDataModule.from_datamodule(Pairs(), num_clients=5)
        return run(client, callbacks, data=data)

    callbacks = monitors(tmp_path)[2:] if name == "regression" else monitors(tmp_path)
    with_them = fitted(callbacks)
    without = fitted([])
    assert equal(weights_of(with_them), weights_of(without))
    measured = with_them.round_metrics
    plain = without.round_metrics
    assert measured.keys() > plain.keys() or name in ("KnFu", "Local")
    assert {key: measured[key] for key in plain} == plain
    assert rows_of(tmp_path / "clients.csv")


def test_accuracies_are_those_of_copies_of_the_nets(tmp_path):
    copies = Copies()
    loop = run(callbacks=[copies, ForgettingMonitor(epochs=True, dirpath=tmp_path), PersonalisedAccuracy(train=True)])
    test = loop.data.split("test").all()
    row = loop.round_metrics
    table = rows_of(tmp_path / "client_classwise.csv")
    assert [r["moment"] for r in table[:4]] == ["received", "0", "1", "trained"]
    assert len(table) == 3 * len(SIZES) * 4
    for r in table:
        if r["moment"] in ("received", "trained"):
            net = getattr(copies, r["moment"])[int(r["round"]), int(r["client"])]
            assert [float(r[c]) for c in ("00", "01", "02")] == accuracy_of(net, test).tolist()
    received, trained = (
        torch.stack([accuracy_of(found[2, i], test) for i in range(5)]) for found in (copies.received, copies.trained)
    )
    degree = ((received - trained) / (received + 1e-8)).masked_fill(received == 0, torch.nan)
    counts = loop.data.label_counts
    assert row["local/forgetting_degree"] == pytest.approx(float(degree.nanmean(1).nanmean()))
    dominant = class_split(counts, 0.5 / 3).dominant
    by_client = degree.masked_fill(~dominant, torch.nan).nanmean(1)
    assert row["local/forgetting_degree/dominant"] == pytest.approx(float(by_client.nanmean()))
    inside = (in_local(counts) * trained).sum(1)
    assert row["local/acc_in_local"] == pytest.approx(float(inside.mean()))
    assert row["local/acc_in_local/std"] == pytest.approx(float(inside.std()))
    assert row["local/acc_in_local/weighted"] == pytest.approx(float(inside @ counts.sum(1).double() / counts.sum()))
    outside = (out_local(counts) * received).sum(1)
    assert row["local/acc_out_local/received"] == pytest.approx(float(outside.mean()))
    pooled = in_local(counts.sum(0))
    accuracy = torch.tensor([row[f"global/acc_class/{c:02d}"] for c in range(3)], dtype=torch.float64)
    assert row["global/acc_in_local"] == pytest.approx(float(pooled @ accuracy))
    own = [loop.data.view(i, 0).all("test") for i in range(5)]
    hits = {n: [float((net[2, i](x).argmax(1) == y).float().mean()) for i, (x, y) in enumerate(own)]
            for n, net in (("initial", copies.received), ("personalised", copies.trained))}  # fmt: skip
    for name, values in hits.items():
        assert row[f"local/{name}"] == pytest.approx(sum(values) / 5)
        assert row[f"local/{name}/std"] == pytest.approx(float(torch.tensor(values).std()), abs=1e-6)


def test_drift_is_that_of_the_copies(tmp_path):
    copies = Copies()
    loop = run(callbacks=[copies, DriftMonitor(dirpath=tmp_path)])
    flat = {
        name: [torch.cat([p.detach().flatten() for p in found[2, i].parameters()]).double() for i in range(5)]
        for name, found in (("received", copies.received), ("trained", copies.trained))
    }
    moves = torch.stack(flat["trained"]) - torch.stack(flat["received"])
    row = loop.round_metrics
    assert row["local/drift"] == pytest.approx(float(moves.norm(dim=1).mean()))
    assert row["local/weight_divergence"] == pytest.approx(float(moves.abs().sum(1).mean()))
    diversity = float(moves.square().sum() / moves.sum(0).square().sum())
    assert row["train/drift_diversity"] == pytest.approx(diversity)
    assert row["train/gradient_diversity"] == pytest.approx(5 * diversity)
    accuracy = torch.tensor([row[f"global/acc_class/{c:02d}"] for c in range(3)], dtype=torch.float64)
    distance = (accuracy / accuracy.sum() - in_local(loop.data.label_counts)).abs().sum(1)
    assert row["local/distribution_distance"] == pytest.approx(float(distance.mean()))
    table = rows_of(tmp_path / "drift.csv")
    assert [float(r["distribution_distance"]) for r in table[-5:]] == pytest.approx(distance.tolist())
    assert [float(r["weight_divergence"]) for r in table[-5:]] == pytest.approx(moves.abs().sum(1).tolist())


def test_the_table_of_clients(tmp_path):
    copies = Copies()
    loop = run(callbacks=[copies, ClientTable(dirpath=tmp_path)])
    table = rows_of(tmp_path / "clients.csv")
    assert [(int(r["round"]), int(r["client"])) for r in table] == [(t, i) for t in range(3) for i in range(5)]
    size = sum(value.nbytes for value in BatchNormNet(3, (4,)).state_dict().values())
    for r in table:
        t = int(r["round"])
        i = int(r["client"])
        x, y = loop.data.view(i, t).all()
        assert int(r["samples"]) == SIZES[i] == len(y)
        assert int(r["steps"]) == 2 * (-(-SIZES[i] // 5) - (SIZES[i] % 5 == 1))
        assert int(r["bytes_down"]) == int(r["bytes_up"]) == size
        with torch.no_grad():
            before, after = (F.cross_entropy(net[t, i](x), y) for net in (copies.received, copies.trained))
        assert float(r["loss_before"]) == pytest.approx(float(before), rel=1e-5)
        assert float(r["loss_after"]) == pytest.approx(float(after), rel=1e-5)
        assert r["skipped"] == ""
        assert 0 <= float(r["acc_global_before"]) <= 1


def test_bytes_and_steps_are_those_of_all_exchanges(tmp_path):
    client, data = CLIENTS["KnFu"]()
    loop = run(client, [ClientTable(dirpath=tmp_path)], rounds=1, data=data)
    table = rows_of(tmp_path / "clients.csv")
    row = loop.round_metrics
    for way in ("down", "up"):
        assert sum(int(r[f"bytes_{way}"]) for r in table) == row[f"comm/bytes_{way}"] > 0
    assert all(int(r["steps"]) > 4 for r in table)
    assert all(r["drift"] == "" for r in table)  # it receives no weights


@pytest.mark.parametrize("how", ["NaN", "exception"])
def test_a_client_that_is_skipped_is_named_and_left_out(how, tmp_path):
    loop = faulty(how, "skip")
    trainer(3, callbacks=monitors(tmp_path)).fit(loop, datamodule=toy_data())
    table = rows_of(tmp_path / "clients.csv")
    named = [(int(r["round"]), int(r["client"])) for r in table if r["skipped"]]
    assert named == [(1, 2)]
    assert len(table) == 15
    for way in ("down", "up"):
        for round_idx, total in loop.recorder.history.curve(f"comm/bytes_{way}").items():
            of_round = [int(r[f"bytes_{way}"]) for r in table if int(r["round"]) == round_idx]
            assert sum(of_round) == total > 0
    if how == "exception":
        assert not [r for r in rows_of(tmp_path / "client_classwise.csv") if (r["round"], r["client"]) == ("1", "2")]
        others = [r for r in table if r["round"] == "1" and not r["skipped"]]
        assert len({r["bytes_up"] for r in others}) == len({r["bytes_down"] for r in others}) == 1


def test_a_resumed_run_measures_what_the_whole_one_does(tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    loop = run(callbacks=monitors(whole), rounds=4, folder=whole)
    first = run(callbacks=[*monitors(parts), toy.At(1, lambda t: t.save_checkpoint(tmp_path / "at.ckpt"))], rounds=3,
                folder=parts)  # fmt: skip
    assert first.round_metrics
    again = run(callbacks=monitors(parts), rounds=4, ckpt_path=tmp_path / "at.ckpt", folder=parts)
    assert again.round_metrics == loop.round_metrics
    for name in ("clients.csv", "drift.csv", "client_classwise.csv", "metrics.csv"):
        assert (parts / name).read_text() == (whole / name).read_text(), name


def test_some_rounds_and_clients_only(tmp_path):
    callbacks = [ForgettingMonitor(every=2, clients=[1, 3], dirpath=tmp_path), DriftMonitor(every=2, dirpath=tmp_path)]
    loop = run(callbacks=callbacks, rounds=5)
    found = {(r["round"], r["client"]) for r in rows_of(tmp_path / "client_classwise.csv")}
    assert found == {(t, i) for t in "13" for i in "13"}
    assert "local/drift" not in loop.round_metrics
    assert set(loop.recorder.history.curve("local/drift")) == {1, 3}


def test_monitors_share_what_they_evaluate(monkeypatch):
    from fl_lightning.engines.inspection import Inspection

    looks = []
    plain = Inspection._scores
    monkeypatch.setattr(Inspection, "_scores", lambda self, batches: looks.append(1) or plain(self, batches))
    run(callbacks=[ForgettingMonitor(), ClientTable(loss=False), PersonalisedAccuracy()], rounds=1)
    assert len(looks) == 1 + 2 * 5 + 5  # the received weights once; their own test samples twice, the trained weights


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="ForgettingMonitor needs data with classes, and these have none"):
        run(toy.Regression(), [ForgettingMonitor()], data=toy.data(classes=False))
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        DriftMonitor(every=0)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        ForgettingMonitor(samples=0)


def test_half_precision_and_a_whole_cohort_of_monitors(tmp_path):
    def fitted(callbacks):
        loop = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=3, local_epochs=2)
        trainer(2, callbacks=callbacks, precision="bf16-mixed").fit(loop, datamodule=toy_data())
        return loop

    assert equal(weights_of(fitted(monitors(tmp_path))), weights_of(fitted([])))


class Norms(Monitor):
    """A monitor of one's own: the norm of the head before and after."""

    def start(self, loop, client_id):
        return {"before": float(loop.client.net.head.weight.detach().norm())}

    def end(self, loop, update, found):
        found["after"] = float(loop.client.net.head.weight.detach().norm())

    def summarise(self, trainer, loop, found):
        assert list(found) == sorted(found)
        loop.log("local/growth", sum(v["after"] - v["before"] for v in found.values()) / len(found))


def test_a_monitor_of_ones_own_is_three_methods():
    copies = Copies()
    loop = run(callbacks=[copies, Norms()])
    growth = [
        copies.trained[2, i].head.weight.norm() - copies.received[2, i].head.weight.norm() for i in range(len(SIZES))
    ]
    assert loop.round_metrics["local/growth"] == pytest.approx(float(sum(growth) / 5), abs=1e-6)


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line_puts_their_files_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = "--trainer.callbacks+=ForgettingMonitor --trainer.callbacks+=ClientTable --trainer.callbacks.every 2"
    said = say(f"fit {TINY} --trainer.max_epochs 2 --trainer.enable_progress_bar false {callbacks}")
    assert said.code == 0, said.err
    (folder,) = tmp_path.glob("runs/*/*")
    assert {row["round"] for row in rows_of(folder / "clients.csv")} == {"1"}
    assert {row["round"] for row in rows_of(folder / "client_classwise.csv")} == {"0", "1"}
    assert "local/forgetting_degree" in (folder / "metrics.csv").read_text()


def test_the_document_names_every_metric_and_monitor():
    import fl_lightning.metrics as M
    import fl_lightning.monitors as C

    text = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text(encoding="utf-8")
    kinds = [
        kind
        for kind in (getattr(C, name) for name in C.__all__)
        if isinstance(kind, type) and issubclass(kind, (Monitor, SampleReduction))
    ]
    names = {kind.__name__ for kind in kinds} | {name for name in M.__all__ if name != "FederatedMetric"}
    assert not {name for name in names if f"`{name}`" not in text}


def test_an_exchange_without_weights_adds_nothing_to_a_clients_move():
    before = {"w": torch.ones(2, dtype=torch.float64)}
    client = SimpleNamespace(params=lambda: {"w": torch.tensor([3.0, 5.0])}, received={})
    assert moved(client, before) is before
    client.received = {"w": torch.tensor([1.0, 1.0])}
    assert moved(client, before)["w"].tolist() == [3.0, 5.0]
