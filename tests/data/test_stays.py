"""`data.stays`: clients that join and leave."""

import pytest

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import FedAsync, FedBuff
from fl_lightning.aggregation.pacing import Rounds
from fl_lightning.data import ClassIncremental, Devices, Stragglers
from fl_lightning.data.checks import check_simulated
from fl_lightning.federation.scenario_checks import check_somebody_there
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.monitors import ClientTable
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

CLIENTS = 6
STAYS = {0: [2, None], 1: [0, 3], 4: [1, 1], 5: [3, 40]}
ROUNDS = 60


def is_there(client_id, round_idx):
    first, last = STAYS.get(client_id, (0, None))
    return first <= round_idx and (last is None or round_idx <= last)


def made(**settings):
    return toy_data((8,) * CLIENTS, **{"stays": STAYS, **settings})


KINDS = [
    {},
    {"cohort_size": 3},
    {"participation": 0.5, "sampling": "poisson"},
    {"availability": 0.6},
    {"availability": [0.0, 1.0, 0.5, 1.0, 1.0, 1.0], "cohort_size": 2},
    {"availability": 0.6, "cohort_size": 3, "over_selection": 0.5},
    {"availability": "trace", "cohort_size": 4},
    {"local_work": Stragglers(0.4, "drop")},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_cohorts_are_of_clients_that_are_there_and_within_the_bounds(settings, tmp_path):
    if settings.get("availability") == "trace":
        (tmp_path / "trace.txt").write_text("0 1 2 3 4 5\n1 2 3\n4 0\n")
        settings = {**settings, "availability": str(tmp_path / "trace.txt")}
    data = made(**settings)
    seen = []
    for round_idx in range(ROUNDS):
        cohort = data.cohort(round_idx)
        assert all(is_there(client_id, round_idx) for client_id in cohort)
        assert cohort == sorted(set(cohort))
        present = [client_id for client_id in range(CLIENTS) if is_there(client_id, round_idx)]
        assert data.present_clients(round_idx) == data.cohort.there(round_idx) == present
        seen.append(len(cohort))
    least, most = data.cohort.bounds
    assert least <= min(seen) <= max(seen) <= most
    if "sampling" not in settings and settings.get("availability") != 0.6:
        assert (least, most) == (min(seen), max(seen))


def test_a_cohort_is_drawn_among_those_who_are_there_and_has_all_of_them_if_they_are_few():
    data = made(cohort_size=3)
    counts = dict.fromkeys(range(CLIENTS), 0)
    for round_idx in range(41, 641):
        cohort = data.cohort(round_idx)
        assert len(cohort) == 3
        for client_id in cohort:
            counts[client_id] += 1
    # Clients 0, 2 and 3 stay to the end, and a larger cohort is all of them.
    assert counts == {0: 600, 1: 0, 2: 600, 3: 600, 4: 0, 5: 0}
    two = [made(cohort_size=2).cohort(round_idx) for round_idx in range(41, 641)]
    for client_id in (0, 2, 3):
        assert sum(client_id in cohort for cohort in two) == pytest.approx(400, abs=45)


def test_who_leaves_later_changes_no_draw_before():
    for settings in ({"cohort_size": 2}, {"participation": 0.5, "sampling": "poisson"}):
        plain = [made(stays=None, **settings).cohort(round_idx) for round_idx in range(5)]
        assert [made(stays={2: [0, 4]}, **settings).cohort(round_idx) for round_idx in range(5)] == plain


def test_a_file_is_the_same_setting_and_may_have_several_spans(tmp_path):
    path = tmp_path / "stays.csv"
    path.write_text("client,first,last\n0,2,\n1,0,3\n4,1,1\n5,3,40\n")
    assert made(stays=str(path)).stays == made().stays == STAYS
    path.write_text("client , first , last\n0, 2 ,\n1,0,3\n4,1,1\n5,3,40\n")
    assert made(stays=str(path)).stays == STAYS
    path.write_text("client,first,last\n1,0,0\n1,3,\n")
    data = made(stays=str(path))
    assert [1 in data.cohort(round_idx) for round_idx in range(5)] == [True, False, False, True, True]


WRONG = [
    ({"stays": {6: [0, 1]}}, r"data\.stays must name clients in \[0, 6\), got 6"),
    ({"stays": {1: [3, 2]}}, r"the first not after the last, got \[3, 2\] for client 1"),
    ({"stays": {1: [-1, None]}}, r"rounds of at least 0"),
    ({"unseen": [1]}, r"must leave out the clients of data\.unseen, which never train, got client 1"),
    ({"schedule": [[0], [1]]}, r"data\.schedule names the clients of every round, and data\.stays says who is there"),
    ({"pooled": True}, r"data\.pooled gives one client the samples of all, and data\.stays says"),
]


@pytest.mark.parametrize(("settings", "error"), WRONG, ids=[error for _, error in WRONG])
def test_wrong_settings_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        made(**settings)


@pytest.mark.parametrize("text", ["{3:[10,null]}", "{3: [[0, 1], [4, 5]]}"])
def test_a_text_that_is_no_mapping_is_not_taken_for_a_file(text):
    with pytest.raises(TypeError, match=r"must give one first and one last round by client id, got \{3:.* with spaces"):
        made(stays=text)


@pytest.mark.parametrize("span", [3, [1], [0, 1, 2], "01", [None, 1], [0.5, 1], [True, 1], [0, True]])
def test_what_is_no_span_is_refused(span):
    with pytest.raises(TypeError, match=r"data\.stays"):
        made(stays={1: span})


@pytest.mark.parametrize(
    ("text", "error"),
    [("client,first\n1,0\n", "has no last"), ("client,first,last\n1,0,\nx,0,1\n", "whole numbers, .* and line 3 of")],
)
def test_a_wrong_file_is_refused(text, error, tmp_path):
    path = tmp_path / "stays.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        made(stays=str(path))
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        made(stays=str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    "pacing", [FedBuff(buffer=2), FedAsync(), Rounds(over_selection=0.5)], ids=lambda pacing: type(pacing).__name__
)
def test_a_pacing_that_counts_on_cohorts_of_one_size_is_refused(pacing):
    data = made(cohort_size=3, devices=Devices(step_seconds=0.1))
    with pytest.raises(ValueError, match=r"got data\.stays; leave data\.stays out, or model\.pacing"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data, pacing=pacing)


def test_a_party_of_a_real_federation_refuses_it():
    with pytest.raises(ValueError, match=r"data\.stays belongs to simulations"):
        check_simulated(made())


def test_a_round_in_which_nobody_is_there_is_named_before_any_trains():
    gap = {client_id: [0, 2] for client_id in range(CLIENTS)}
    with pytest.raises(ValueError, match=r"in round 3 none is there; .* or set trainer\.max_epochs to 3"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 4, made(stays=gap))
    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3, made(stays=gap))
    late = {client_id: [1, None] for client_id in range(CLIENTS)}
    with pytest.raises(ValueError, match=r"in round 0 none is there; let one join earlier or leave later$"):
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, made(stays=late))


def test_a_run_without_a_limit_needs_somebody_in_each_of_its_rounds():
    data = made(stays={client_id: [0, 2000] for client_id in range(CLIENTS)})
    check_somebody_there(data, 2001)
    with pytest.raises(ValueError, match=r"in round 2001 none is there; .* or set trainer\.max_epochs to 2001"):
        check_somebody_there(data, None)


def test_only_clients_that_are_there_are_tested_and_those_that_never_train(tmp_path):
    stays = {0: [2, None], 1: [0, 1], 4: [1, 1]}
    rows = []

    class Watch(ClientTable):
        def on_train_epoch_end(self, trainer, loop):
            rows.append((sorted(loop.recorder.client_values), loop.round_metrics["global/train/acc"]))

    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), evaluate_clients_every=1, evaluate_training_every=1)
    data = made(stays=stays, unseen=[3])
    trainer(3, callbacks=[Watch(dirpath=tmp_path)]).fit(loop, datamodule=data)
    assert [clients for clients, _ in rows] == [[1, 2, 3, 5], [1, 2, 3, 4, 5], [0, 2, 3, 5]]
    # 0 of 24 samples, of 32 and of 24: the training samples too are of those who are there.
    for (_, accuracy), num_samples in zip(rows, (24, 32, 24), strict=True):
        assert accuracy * num_samples == pytest.approx(round(accuracy * num_samples), abs=1e-4)


def test_a_continued_run_has_the_bits_of_a_whole_one(tmp_path):
    def run(rounds, ckpt_path=None):
        loop = FederatedLoop(SCAFFOLD(net=BatchNormNet, optimizer=sgd(momentum=0.0)), evaluate_clients_every=2)
        fitted = trainer(rounds)
        changes = ClassIncremental([[0], [1, 2]], rounds_per_task=2)
        fitted.fit(loop, datamodule=made(cohort_size=3, scenario=changes), ckpt_path=ckpt_path)
        return fitted, loop

    _, whole = run(5)
    half, _ = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, continued = run(5, tmp_path / "half.ckpt")
    assert equal(weights_of(continued), weights_of(whole))
    assert continued.recorder.client_values == whole.recorder.client_values


def test_other_stays_are_another_run(tmp_path):
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    first = trainer(1)
    first.fit(FederatedLoop(client), datamodule=made())
    first.save_checkpoint(tmp_path / "run.ckpt")
    for stays in (None, {**STAYS, 5: [3, 41]}):
        other = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
        with pytest.raises(ValueError, match=r"data\.stays"):
            trainer(2).fit(other, datamodule=made(stays=stays), ckpt_path=tmp_path / "run.ckpt")
