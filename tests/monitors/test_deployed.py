"""Monitors ask what a client deploys after its training, and see its moves in all exchanges; numbers by hand."""

import copy
import csv
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import ClientModule, FederatedLoop
from fl_lightning.functional.accuracy import class_accuracy, class_counts
from fl_lightning.functional.classes import in_local, out_local
from fl_lightning.methods import MOON, Ditto, FedALA, FedAvg, FedFOMO, FedPAC, FedRoD, Local
from fl_lightning.monitors import ClientTable, DriftMonitor, ForgettingMonitor, PersonalisedAccuracy
from tests.toys import SIZES, BatchNormNet, equal, folded, sgd, toy_data, trainer, weights_of

Plain = partial(BatchNormNet, dropout=0.0)
EVERYONE = range(len(SIZES))


def monitors(folder):
    return [
        ForgettingMonitor(dirpath=folder),
        PersonalisedAccuracy(train=True),
        DriftMonitor(dirpath=folder),
        ClientTable(dirpath=folder),
    ]


def run(client, callbacks=(), rounds=2, **settings):
    loop = FederatedLoop(client, seed=3, local_epochs=2, **folded(settings))
    trainer(rounds, callbacks=list(callbacks)).fit(loop, datamodule=toy_data())
    return loop


def rows(path):
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["round"] == "1"]


class Copies(pl.Callback):
    """Copies of the module and of its client's memory, in the order of the exchanges, of the last round."""

    def on_train_epoch_start(self, trainer, loop):
        self.started, self.ended = ({i: [] for i in EVERYONE} for _ in range(2))

    def keep(self, found, client):
        found.append(({n: v.clone() for n, v in client.state_dict().items()}, copy.deepcopy(client.memory)))

    def on_client_start(self, trainer, loop, client_id):
        self.keep(self.started[client_id], loop.client)

    def on_client_end(self, trainer, loop, update):
        self.keep(self.ended[update.client_id], loop.client)


def net_of(state):
    """The net with these weights, in eval mode."""
    net = Plain(3, (4,)).eval()
    net.load_state_dict({name.removeprefix("net."): v for name, v in state.items() if name.startswith("net.")})
    return net


def both_heads(state, memory):
    """FedRoD's predictor."""
    net = net_of(state)
    weight = state["personal_head.weight"]
    bias = state["personal_head.bias"]
    return lambda x: net(x) + F.linear(net.features(x), weight, bias)


def own_model(state, memory):
    """Predictor of a client that keeps a model of its own."""
    return net_of(memory["own_models"][-1])


def trained(state, memory):
    return net_of(state)


CASES = {
    "FedRoD": (FedRoD, both_heads, True),
    "Ditto": (partial(Ditto, lam=2.0, personal_epochs=3), own_model, True),
    "FedALA": (FedALA, own_model, False),
    "FedFOMO": (FedFOMO, own_model, False),
    "MOON": (MOON, trained, False),
    "FedAvg": (FedAvg, trained, False),
}
"""Client, its predictor by hand, and whether that is another one than the weights in the module."""


def slow(name):
    return pytest.param(name, marks=[pytest.mark.slow] * (name in ("FedALA", "FedFOMO", "MOON")))


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_what_is_measured_after_training_is_what_the_client_deploys(name, chunk, tmp_path):
    kind, predictor, differs = CASES[name]
    copies = Copies()
    loop = run(kind(net=Plain, optimizer=sgd()), [copies, *monitors(tmp_path)], chunk=chunk)
    predict = [predictor(*copies.ended[i][-1]) for i in EVERYONE]
    received = [net_of(copies.started[i][0][0]) for i in EVERYONE]
    test = loop.data.split("test").all()
    row = loop.round_metrics
    counts = loop.data.label_counts
    by_class = [class_accuracy(class_counts(model(test[0]), test[1], 3)) for model in predict]
    module = [class_accuracy(class_counts(net_of(copies.ended[i][-1][0])(test[0]), test[1], 3)) for i in EVERYONE]
    assert differs != all(map(torch.equal, by_class, module))

    def accuracy(model, batch):
        return float((model(batch[0]).argmax(1) == batch[1]).double().mean())

    own = {split: [loop.data.view(i, 1).all(split) for i in EVERYONE] for split in ("train", "test")}
    for key, models, split in (
        ("personalised", predict, "test"),
        ("train", predict, "train"),
        ("initial", received, "test"),
    ):
        wanted = [accuracy(model, batch) for model, batch in zip(models, own[split], strict=True)]
        assert row[f"local/{key}"] == pytest.approx(sum(wanted) / 5), key
    for key, p in (("acc_in_local", in_local(counts)), ("acc_out_local", out_local(counts))):
        assert row[f"local/{key}"] == pytest.approx(float((p * torch.stack(by_class)).sum(1).mean())), key
    found = [r for r in rows(tmp_path / "client_classwise.csv") if r["moment"] == "trained"]
    assert [[float(r[c]) for c in ("00", "01", "02")] for r in found] == [accuracy.tolist() for accuracy in by_class]
    for i, r in enumerate(rows(tmp_path / "clients.csv")):
        assert float(r["acc_own"]) == pytest.approx(accuracy(predict[i], own["test"][i]))
        assert float(r["acc_own_before"]) == pytest.approx(accuracy(received[i], own["test"][i]))
        assert float(r["acc_global"]) == pytest.approx(accuracy(predict[i], test))
        x, y = own["train"][i]
        assert float(r["loss_before"]) == pytest.approx(float(F.cross_entropy(received[i](x), y)), rel=1e-5)
        assert float(r["loss_after"]) == pytest.approx(float(F.cross_entropy(predict[i](x), y)), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_a_look_at_it_leaves_no_trace(name, chunk, tmp_path):
    """In the weights, in what a later callback sees of the client, and in the values of the round."""
    kind = CASES[name][0]
    after = Copies()
    with_them = run(kind(net=BatchNormNet, optimizer=sgd()), [*monitors(tmp_path), after], 3, chunk=chunk)
    alone = Copies()
    without = run(kind(net=BatchNormNet, optimizer=sgd()), [alone], 3, chunk=chunk)
    assert equal(weights_of(with_them), weights_of(without))
    for i in EVERYONE:
        assert with_them.store.memory(i).keys() == without.store.memory(i).keys()
        assert equal(after.ended[i][-1][0], alone.ended[i][-1][0])
    plain = without.round_metrics
    measured = with_them.round_metrics
    assert {key: measured[key] for key in plain} == plain


@pytest.mark.parametrize("kind", [Ditto, FedFOMO, Local], ids=lambda kind: kind.__name__)
def test_models_of_their_own_are_as_good_as_at_the_end_of_the_round(kind):
    loop = run(kind(net=BatchNormNet, optimizer=sgd()), [PersonalisedAccuracy()], evaluate_clients_every=1)
    assert loop.round_metrics["local/personalised"] == pytest.approx(loop.round_metrics["local/alma"])


# --- moves


class Twice(ClientModule):
    """Trains in both exchanges; the server averages after each."""

    exchanges = ("first", "second")


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("kind", [FedPAC, Twice, FedAvg], ids=lambda kind: kind.__name__)
def test_a_client_s_move_is_that_of_all_its_exchanges(kind, chunk, tmp_path):
    copies = Copies()
    loop = run(kind(net=BatchNormNet, optimizer=sgd()), [*monitors(tmp_path), copies], chunk=chunk)
    names = loop.server.trainable
    assert ("net.head.weight" in names) == (kind is not FedPAC)
    moves = torch.zeros(5, sum(loop.client.state_dict()[name].numel() for name in names), dtype=torch.float64)
    for i in EVERYONE:
        assert len(copies.ended[i]) == len(kind.exchanges)
        for (before, _), (after, _) in zip(copies.started[i], copies.ended[i], strict=True):
            moves[i] += torch.cat([(after[name].double() - before[name].double()).flatten() for name in names])
    assert float(moves.norm()) > 0.01
    row = loop.round_metrics
    diversity = float(moves.square().sum() / moves.sum(0).square().sum())
    assert row["local/drift"] == pytest.approx(float(moves.norm(dim=1).mean()))
    assert row["local/weight_divergence"] == pytest.approx(float(moves.abs().sum(1).mean()))
    assert row["train/drift_diversity"] == pytest.approx(diversity)
    assert row["train/gradient_diversity"] == pytest.approx(5 * diversity)
    for name in ("clients.csv", "drift.csv"):
        assert [float(r["drift"]) for r in rows(tmp_path / name)] == pytest.approx(moves.norm(dim=1).tolist()), name
