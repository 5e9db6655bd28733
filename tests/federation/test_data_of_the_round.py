"""Places that once asked for a client's data without a round: each answers for the round now, or is refused."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping

from fl_lightning import FederatedLoop
from fl_lightning.data import ClassIncremental, DomainIncremental, TensorSource, Window
from fl_lightning.data.checks import check_simulated
from fl_lightning.methods import DPFedAvg, FedAvg, FedFOMO, FedMD, SelectiveFD, dp_sgd, local_dp
from fl_lightning.metrics.keys import is_accuracy
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, fit, samples, sgd, toy_data, trainer

SIZES = (24, 18)
TASKS = [[0], [1], [2]]


def by_tasks(rounds=1):
    return ClassIncremental(TASKS, rounds_per_task=rounds)


def data_of(scenario, **settings):
    return toy_data(SIZES, scenario=scenario, **settings)


def set_up(scenario, **settings):
    data = data_of(scenario, **settings)
    data.setup("fit")
    return data


def fedavg(**settings):
    return FedAvg(net=BatchNormNet, optimizer=sgd(), **settings)


# --- 1: FedFOMO's validation samples ---


def test_a_validation_sample_of_fedfomo_is_never_trained_on():
    data = set_up(Window(per_round=0.2, keep=2, first=0.3))
    client = FedFOMO(net=BatchNormNet, optimizer=sgd(), val_share=0.4)
    trained = set()
    held = set()
    for round_idx in range(5):
        indices = data.client_samples().indices(0, round_idx)
        for_training, for_validation = client.parts(data.view(0, round_idx))
        trained |= set(indices[for_training].tolist())
        held |= set(indices[for_validation].tolist())
    assert len(trained) + len(held) == SIZES[0]
    assert not trained & held


# --- 2 and 3: what monitors evaluate ---


class Looks(pl.Callback):
    """Evaluates client 0 on its own samples in every round, with the same key of weights that never change."""

    def __init__(self):
        self.losses = []
        self.scores = []

    def on_exchange_end(self, trainer, loop, exchange):
        inspection = loop.evaluation.inspection
        self.losses.append(inspection.own_loss(("received", "same"), 0))
        self.scores.append(inspection.own_scores(("received", "same"), 0, "train"))


def test_own_samples_of_a_monitor_are_those_of_the_round_even_where_the_weights_are_the_same():
    looks = Looks()
    loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd(lr=0.0)), seed=3)
    data = data_of(by_tasks())
    trainer(3, callbacks=[looks]).fit(loop, datamodule=data)
    for round_idx, (loss, scores) in enumerate(zip(looks.losses, looks.scores, strict=True)):
        x, y = data.view(0, round_idx).all()
        with torch.no_grad():
            logits = loop.client(x)
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)
        assert float(scores[-2]) == pytest.approx(float((logits.argmax(1) == y).double().mean()))
        # A round has the samples of one class, and the others have no accuracy.
        assert scores[:3].isnan().tolist() == [class_idx != round_idx for class_idx in range(3)]


# --- 4: numbers of samples ---


def test_the_server_knows_the_number_of_samples_of_the_round():
    found = []

    class Sizes(pl.Callback):
        def on_exchange_end(self, trainer, loop, exchange):
            cost = loop._run.client_cost
            found.append([(loop.server.size(client_id), cost(client_id)) for client_id in (0, 1)])

    data = data_of(by_tasks())
    fit(fedavg(), 3, data, callbacks=[Sizes()])
    for round_idx, sizes in enumerate(found):
        assert sizes == [(data.size(client_id, round_idx),) * 2 for client_id in (0, 1)]
    assert sum(sizes[0][0] for sizes in found) == SIZES[0]


# --- 5 and 17: own test samples ---


def test_clients_are_tested_on_tasks_that_they_have_met_and_by_test_as_of_the_last_round():
    """Two rounds end where the second task would begin, so that a round too far shows."""
    loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()), seed=3, evaluate_clients_every=1)
    fitted = trainer(2)
    data = data_of(by_tasks(rounds=2))
    fitted.fit(loop, datamodule=data)
    for client_id in (0, 1):
        own = data.split("test").labels[data.client_indices("test", client_id)]
        assert data.view(client_id, 1).size("test") == int((own == 0).sum())
        assert data.view(client_id, 2).size("test") == int((own < 2).sum()) > int((own == 0).sum())
    hits = []
    for client_id in (0, 1):
        x, y = data.view(client_id, 1).all("test")
        hits.append(float((loop.client(x).argmax(1) == y).double().mean()))
    after_fit = loop.round_metrics["local/alma"]
    assert after_fit == pytest.approx(sum(hits) / 2)
    loop.deploy("all")
    tested = fitted.test(loop, datamodule=data, verbose=False)[0]
    assert tested["local/alma"] == pytest.approx(after_fit)
    loop.deploy(0)
    assert fitted.test(loop, datamodule=data, verbose=False)[0]["test/acc"] == pytest.approx(hits[0])


# --- 6: ways of seeing ---


def test_a_round_is_seen_in_its_way_and_all_clients_share_a_split():
    data = set_up(DomainIncremental(1, permutations=3))
    kept = [[data.view(client_id, round_idx).source("train") for client_id in (0, 1)] for round_idx in range(3)]
    assert [first is second for first, second in kept] == [True] * 3
    assert len({id(first) for first, _ in kept}) == 3
    views = [data.view(0, round_idx).all()[0] for round_idx in range(3)]
    assert not any(torch.equal(views[index], views[index - 1]) for index in range(3))


# --- 7: counts of classes ---


def test_counts_of_a_view_are_those_of_its_round_and_those_of_the_data_of_all_rounds():
    data = set_up(by_tasks())
    for client_id in (0, 1):
        counts = [data.view(client_id, round_idx).label_counts for round_idx in range(3)]
        assert [(count > 0).nonzero().flatten().tolist() for count in counts] == TASKS
        assert torch.stack(counts).sum(0).tolist() == data.label_counts[client_id].tolist()


# --- 8, 13, 14, 18: what is refused ---


def test_pooled_data_are_refused():
    with pytest.raises(ValueError, match=r"data\.pooled puts the samples of all rounds and clients together"):
        set_up(by_tasks(), pooled=True)


def test_the_parties_of_a_real_federation_refuse_a_scenario():
    with pytest.raises(ValueError, match=r"data\.scenario belongs to simulations"):
        check_simulated(data_of(by_tasks()))


PRIVATE = {
    "rule": lambda: (fedavg(), {"aggregator": DPFedAvg(clip=1.0, noise_multiplier=1.0)}),
    "client": lambda: (dp_sgd(FedAvg(net=Perceptron, optimizer=sgd()), noise_multiplier=1.0, delta=0.01), {}),
    "sent": lambda: (local_dp(FedAvg(net=Perceptron, optimizer=sgd()), noise_multiplier=1.0), {}),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_rules_and_clients_are_refused(kind):
    client, settings = PRIVATE[kind]()
    with pytest.raises(ValueError, match=r"data\.scenario changes which samples a client has, and the guarantees"):
        fit(client, 1, data_of(by_tasks()), **settings)


def test_samples_are_not_held_back_from_data_that_change():
    with pytest.raises(ValueError, match="set_class_count takes samples from a client"):
        set_up(by_tasks()).set_class_count(0, 1, 2)


# --- 9: SelectiveFD's choice ---


@pytest.mark.parametrize(
    ("scenario", "rounds"),
    [(None, [0]), (by_tasks(rounds=2), [0, 2]), (DomainIncremental(2, permutations=2), [0, 2])],
    ids=["fixed", "classes", "domains"],
)
def test_selectivefd_chooses_anew_where_the_data_are_others(scenario, rounds):
    chosen = []

    class Watch(pl.Callback):
        def on_fit_start(self, trainer, loop):
            select = loop.client.select
            loop.client.select = lambda local: chosen.append((local.client_id, local.round_idx)) or select(local)

    data = toy_data(SIZES, scenario=scenario, transfer_size=9, partition=None)
    fit(SelectiveFD(net=BatchNormNet, optimizer=sgd()), 4, data, callbacks=[Watch()])
    assert [round_idx for client_id, round_idx in chosen if client_id == 0] == rounds


# --- 10: sets that everyone has ---


def warned_of_later_tasks(client, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(client, 1, data)
    return [text for text in (str(warning.message) for warning in caught) if "of later tasks of data.scenario" in text]


def without_later_classes():
    x, y = samples(40, seed=5)
    return TensorSource((x[y == 0], y[y == 0]), samples(3), num_classes=3)


def test_a_set_with_samples_of_later_tasks_is_named_once():
    fedmd = lambda: FedMD(net=BatchNormNet, optimizer=sgd())  # noqa: E731
    (said,) = warned_of_later_tasks(fedmd(), data_of(by_tasks(), transfer_size=9, partition=None))
    assert said.startswith("the transfer set has samples of later tasks")
    assert said.endswith("give data.extra_splits.transfer without them if that must not be")
    first_task = {"transfer": without_later_classes()}
    assert not warned_of_later_tasks(fedmd(), data_of(by_tasks(), extra_splits=first_task))
    assert not warned_of_later_tasks(fedavg(), data_of(by_tasks()))
    # In a domain that comes later, the set's samples would look otherwise.
    turned = data_of(DomainIncremental(1, permutations=2), transfer_size=9, partition=None)
    assert not warned_of_later_tasks(fedmd(), turned)


# --- 12: who watches a value over tasks (`best`: tests/runs/test_best.py) ---


@pytest.mark.parametrize(
    ("scenario", "stops", "told"),
    [(by_tasks(), True, True), (by_tasks(), False, False), (Window(per_round=0.5), True, False), (None, True, False)],
    ids=["tasks", "another callback", "no tasks", "no scenario"],
)
def test_early_stopping_beside_tasks_is_told_of(scenario, stops, told):
    callbacks = [EarlyStopping("global/acc", mode="max", patience=9) if stops else pl.Callback()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(fedavg(), 1, data_of(scenario), callbacks=callbacks)
    said = [str(warning.message) for warning in caught if "EarlyStopping may end" in str(warning.message)]
    assert len(said) == told
    assert all("because global/acc gets worse" in text for text in said)


# --- 11 and 19: values of tasks ---


def test_forgetting_of_classes_and_of_tasks_are_two_values_and_a_task_is_no_summary():
    loop = fit(fedavg(), 3, data_of(by_tasks()))
    row = loop.round_metrics
    assert {"global/forgetting", "global/forgetting_tasks", "global/acc_task/0", "global/acc_tasks"} <= row.keys()
    assert not is_accuracy("global/acc_task/0")
    assert is_accuracy("global/acc_tasks")
    assert loop.final_key == "global/acc"
