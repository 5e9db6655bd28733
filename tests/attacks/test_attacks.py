"""Attacks: what malicious clients send, that nobody else is touched, and which rules withstand them."""

import copy
import csv
import pickle
from functools import partial

import pytest
import torch

from fl_lightning import Aggregator, ClientModule, FederatedDataModule, methods
from fl_lightning.aggregation import (
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    TrimmedMeanAggregator,
)
from fl_lightning.attacks import label_flip, noise, sign_flip
from fl_lightning.attacks.labels import FlippedData, flipped
from fl_lightning.data import Digits, TensorSource
from fl_lightning.methods import SAM, FedAvg, FedED, FedKA, FedProx, Local
from fl_lightning.nets import Perceptron
from tests.commands import CONFIGS, say
from tests.hooks.toy import SCAFFOLD, Updates
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
ATTACKS = [sign_flip, noise, label_flip]


def updates(client, rounds=1, data=None, **settings):
    watch = Updates()
    loop = fit(client, rounds, data, callbacks=[watch], **settings)
    return loop, watch


@pytest.mark.parametrize("client", [FedAvg, partial(FedProx, mu=0.3), SCAFFOLD, partial(FedProx, mu=0.0)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_only_the_attackers_updates_differ(attack, client):
    """In the first round."""
    make = partial(client, net=BatchNormNet, optimizer=sgd())
    (loop, honest), (_, poisoned) = updates(make()), updates(attack(make(), attackers=[1, 3]))
    for client_id, update in honest.rounds[0].items():
        found = poisoned.rounds[0][client_id]
        same = [torch.equal(found.weights[name], update.weights[name]) for name in loop.server.trainable]
        assert all(same) == (client_id not in (1, 3))
        assert (found.num_samples, found.num_steps) == (update.num_samples, update.num_steps)


def added_noise(std=None):
    """What the attacker adds to all its trained weights."""
    settings = {} if std is None else {"std": std}
    (loop, honest), (_, poisoned) = (
        updates(client, precision="64-true", data=toy_data(dtype=torch.float64))
        for client in (FedAvg(net=Small), noise(FedAvg(net=Small), [2], **settings))
    )
    entries = loop.server.trainable
    sent, trained = (watch.rounds[0][2].weights for watch in (poisoned, honest))
    return torch.cat([(sent[name] - trained[name]).flatten() for name in entries])


def test_noise_is_normal_around_the_trained_weights_and_of_its_deviation():
    once = added_noise(1.0)
    assert len(once) == 6 * 4 + 6 + 3 * 6 + 3
    assert abs(float(once.mean())) < 0.5
    assert 0.7 < float(once.std()) < 1.3
    torch.testing.assert_close(added_noise(3.0), 3 * once)
    torch.testing.assert_close(added_noise(), once)


def test_a_flipped_sign_goes_ten_times_the_other_way_unless_a_factor_is_given():
    (_, by_default), (_, given) = (
        updates(client)
        for client in (sign_flip(FedAvg(net=Small), [2]), sign_flip(FedAvg(net=Small), [2], factor=10.0))
    )
    assert equal(by_default.rounds[0][2].weights, given.rounds[0][2].weights)


def test_a_flipped_sign_goes_the_other_way_times_the_factor():
    (loop, honest), (_, poisoned) = (
        updates(client, precision="64-true", data=toy_data(dtype=torch.float64))
        for client in (FedAvg(net=Small), sign_flip(FedAvg(net=Small), [2], factor=3.0))
    )
    start = fit(FedAvg(net=Small), 0, precision="64-true", data=toy_data(dtype=torch.float64)).client.state_dict()
    for name in loop.server.trainable:
        moved = honest.rounds[0][2].weights[name] - start[name]
        torch.testing.assert_close(poisoned.rounds[0][2].weights[name], start[name] - 3 * moved)


def test_noise_has_the_given_size_is_drawn_every_round_and_is_the_same_in_every_run():
    client = partial(FedAvg, net=partial(Perceptron, hidden=(400,)), optimizer=sgd(lr=1e-9))
    (_, first), (_, again) = (updates(noise(client(), [0], std=0.5), 2) for _ in range(2))
    assert equal(first.rounds[1][0].weights, again.rounds[1][0].weights)
    name = "net.head.weight"
    drawn = [first.rounds[r][0].weights[name] - first.rounds[r][1].weights[name] for r in range(2)]
    assert drawn[0].std().item() == pytest.approx(0.5, rel=0.1)
    assert not torch.equal(*drawn)


def test_labels_are_flipped_wherever_a_method_sees_them():
    data = toy_data()
    data.setup()
    local = data.view(1, 0)
    seen = FlippedData(local, 3)
    assert torch.equal(seen.label_counts, local.label_counts.flip(0))
    for (x, y), (same, other) in zip(local.batches(epoch=0), seen.batches(epoch=0), strict=True):
        assert torch.equal(x, same)
        assert torch.equal(y, 2 - other)
    (_, y), _ = flipped((local.all(), torch.arange(12)), 3)
    assert torch.equal(y, 2 - local.all()[1])
    assert torch.equal(seen.restricted("train", torch.tensor([3])).all()[1], 2 - local.all()[1][3:4])
    assert torch.equal(seen.all("test")[1], local.all("test")[1])
    assert seen.size() == 12


SET = TensorSource(samples(11, seed=5), samples(2), num_classes=3)
SETS = {"proxy": SET, "transfer": SET, "shared": SET}
"""Splits that methods need besides the clients' own."""


def test_everything_that_a_client_is_given_is_flipped_but_what_it_is_evaluated_on():
    data = toy_data(extra_splits={**SETS, "mine": SET})
    data.setup()
    local = data.view(1, 0)
    chosen = torch.tensor([1, 0])
    seen = FlippedData(local, 3)
    for split in ("train", "transfer", "shared", "mine", "test"):
        turned = (lambda y: y) if split == "test" else (lambda y: 2 - y)
        whole, part = (one.restricted(split, chosen) for one in (local, seen))
        assert torch.equal(seen.labels(split), turned(local.labels(split)))
        assert torch.equal(part.labels(split), turned(whole.labels(split)))
        assert torch.equal(part.all(split)[1], turned(whole.all(split)[1]))
        for one, other in zip(seen.batches(split, with_index=True), local.batches(split, with_index=True), strict=True):
            assert torch.equal(one[0][1], turned(other[0][1]))
            assert torch.equal(one[1], other[1])
    assert torch.equal(seen.label_counts, torch.bincount(seen.labels(), minlength=3))
    assert torch.equal(
        seen.restricted("train", chosen).label_counts, torch.bincount(2 - local.labels()[chosen], minlength=3)
    )


METHODS = [kind for kind in vars(methods).values() if isinstance(kind, type) and issubclass(kind, ClientModule)]
READERS = ("FedAvg", "FedED", "FedKA", "FedLC", "FedPAC", "FedGen", "Replay")
"""Methods that read labels, counts or samples in ways of their own, and one that does not: the others are like it."""


@pytest.mark.parametrize(
    "sizes",  # in small clients classes are missing
    [pytest.param((12, 0, 3, 1, 9), id="small"), pytest.param((7, 12, 5, 9, 16), id="large", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=() if kind.__name__ in READERS else pytest.mark.slow)
        for kind in METHODS
    ],
)
def test_flipped_labels_are_flipped_data_for_every_method(kind, sizes):
    """Two rounds in which all clients attack, and two of honest clients whose data are flipped."""
    make = partial(kind, net=partial(BatchNormNet, dropout=0.0), optimizer=sgd(0.05, momentum=0.0))
    runs = []
    for flips in (True, False):
        data = toy_data(sizes, extra_splits=SETS)
        data.setup()
        for split in map(data.split, ("train", "shared", "transfer") if not flips else ()):
            split.y = 2 - split.y
            split.labels = 2 - split.labels
        client = label_flip(make(), list(range(5))) if flips else make()
        runs.append(updates(client, 2, data, local_epochs=2))  # anchors and teachers tell from the second step on
    (attacked, poisoned), (loop, honest) = runs
    assert equal(weights_of(attacked), weights_of(loop))
    for one, other in zip(poisoned.rounds, honest.rounds, strict=True):
        for client_id, update in one.items():
            assert (update.weights is None) == (other[client_id].weights is None)
            assert update.weights is None or equal(update.weights, other[client_id].weights)
    logged = [{k: v for k, v in one.round_metrics.items() if k.startswith("train/")} for one in (attacked, loop)]
    assert logged[0]
    assert logged[0] == logged[1]


def test_a_client_with_flipped_labels_is_an_honest_one_with_flipped_data():
    """Also where the method counts classes, where it makes its own passes, and with an optimizer that asks twice."""
    for client in (FedED, partial(FedKA, gamma=0.4, beta=0.2), FedAvg):
        for optimizer in (sgd(0.05), partial(SAM, base=sgd(0.05))):
            make = partial(client, net=Small, optimizer=optimizer)
            _, poisoned = updates(label_flip(make(), [0, 1, 2, 3, 4]))
            assert all(value.isfinite().all() for value in poisoned.rounds[0][1].weights.values())
    other = toy_data()
    other.setup()
    train = other.split("train")
    train.y, train.labels = 2 - train.y, 2 - train.y
    for client in (FedED, FedAvg):
        _, honest = updates(client(net=Small, optimizer=sgd(0.05)), data=other)
        _, poisoned = updates(label_flip(client(net=Small, optimizer=sgd(0.05)), [0, 1, 2, 3, 4]))
        for client_id, update in honest.rounds[0].items():
            assert equal(update.weights, poisoned.rounds[0][client_id].weights)


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_can_be_copied_and_sent_to_another_process(attack):
    client = attack(FedProx(mu=0.2, net=Small, optimizer=sgd()), attackers=[1])
    whole = weights_of(fit(copy.deepcopy(client), 2))
    for again in (copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
        assert type(again) is type(client)
        assert again.attackers == {1}
        assert again.mu == 0.2
        assert equal(weights_of(fit(again, 2)), whole)


def test_a_module_of_one_s_own_can_attack():
    assert type(sign_flip(Regression(), [0])).__name__ == "SignFlipClientModule"
    _, poisoned = updates(sign_flip(Regression(), [0]))
    assert all(value.isfinite().all() for value in poisoned.rounds[0][0].weights.values())


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (lambda: sign_flip(FedAvg(net=Small), []), r"attackers must be the ids of one or more clients, got \[\]"),
        (lambda: noise(FedAvg(net=Small), [-1]), r"attackers must be the ids of one or more clients, got \[-1\]"),
        (lambda: noise(FedAvg(net=Small), [5]), r"attackers must lie in \[0, 5\), got \[5\]"),
        (lambda: sign_flip(FedAvg(net=Small), [0], factor=0.0), "factor must be above 0, got 0.0"),
        (lambda: noise(FedAvg(net=Small), [0], std=-1.0), "std must be above 0, got -1.0"),
        (lambda: noise(sign_flip(FedAvg(net=Small), [0]), [1]), "takes one attack, and SignFlipFedAvg has one"),
        (lambda: label_flip(FedAvg(module=Regression()), [0]), "label_flip needs a client built with net="),
        (lambda: sign_flip(Local(net=Small), [0]), "those of SignFlipLocal share none; take label_flip"),
    ],
)
def test_what_cannot_be_is_refused(client, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(client(), 1)


@pytest.mark.slow
def test_the_command_line_takes_an_attack_around_a_client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = say(f"fit -c {CONFIGS}/experiment/digits_krum.yaml --trainer.max_epochs 1 --model.local_epochs 1")
    assert said.code == 0, said.err
    with next(tmp_path.glob("runs/*/0*/metrics.csv")).open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 1


# --- which rules withstand them

MARGIN = 0.05
"""Accuracy that a robust rule may lose to two attackers of ten clients, against its own run without them."""
RULES = {
    "median": MedianAggregator,
    "trimmed_mean": TrimmedMeanAggregator,
    "krum": partial(KrumAggregator, 2),
    "multi_krum": partial(KrumAggregator, 2, 6),
    "geometric_median": GeometricMedianAggregator,
}


def accuracy(rule, attack=None):
    """After ten rounds on IID digits."""
    client = FedAvg(net=partial(Perceptron, hidden=(32,)), optimizer=sgd(0.05))
    client = client if attack is None else attack(client, [2, 7])
    loop = fit(client, 10, FederatedDataModule(Digits(), num_clients=10), aggregator=rule(), local_epochs=2, seed=0)
    return loop.round_metrics["global/acc"]


def slow(name):
    """By default the median stands for all: docs/attacks.md has them."""
    return [] if name == "median" else [pytest.mark.slow]


@pytest.mark.parametrize("rule", [pytest.param(rule, id=name, marks=slow(name)) for name, rule in RULES.items()])
def test_a_robust_rule_keeps_its_accuracy_with_a_fifth_of_the_clients_malicious(rule):
    clean = accuracy(rule)
    assert clean > 0.75
    for attack in (sign_flip, noise):
        assert accuracy(rule, attack) > clean - MARGIN, attack


@pytest.mark.parametrize("attack", [sign_flip, pytest.param(noise, marks=pytest.mark.slow)])
def test_the_mean_does_not(attack):
    assert accuracy(Aggregator, attack) < accuracy(Aggregator) - 3 * MARGIN


@pytest.mark.parametrize("split", ["test", "val", "train", "proxy"])
def test_splits_for_evaluation_keep_their_labels_and_no_other_does(split):
    class Local:
        """A client of which each split has the labels 0, 1 and 2."""

        def all(self, split):
            return torch.zeros(3), torch.arange(3)

        def labels(self, split):
            return torch.arange(3)

        def batches(self, split):
            return iter([self.all(split)])

    seen = FlippedData(Local(), 3)
    expected = [0, 1, 2] if split in ("test", "val") else [2, 1, 0]
    assert seen.labels(split).tolist() == expected
    assert seen.all(split)[1].tolist() == expected
    assert [y.tolist() for _, y in seen.batches(split)] == [expected]


def test_labels_are_flipped_once_the_number_of_classes_is_known():
    client = label_flip(FedAvg(net=Small), [0])
    client.context.client_id = 0
    with pytest.raises(RuntimeError, match="knows the number of classes once its net is built"):
        client.reply("train", None)
