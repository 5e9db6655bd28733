"""`data.unseen`: clients that never train, and are tested as clients are that come after the training."""

import csv
from itertools import pairwise

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, Trainer

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop, FineTuning, methods
from fl_lightning.attacks import noise
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.methods import SCAFFOLD, DPFedAvg, FedAvg, FedDyn, FedFOMO, Local
from fl_lightning.monitors import ClientTable
from tests.commands import TINY, say
from tests.federation.test_clients_by_own_steps import QUIET
from tests.federation.test_evaluated_model import all_classes
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = [kind for kind in all_classes(ClientModule) if kind.__name__ in methods.__all__]
SIZES = (13, 11, 9, 12, 8)
EXTRA = {"transfer": 9, "proxy": 6}


def client_of(kind):
    try:
        return kind(net=BatchNormNet, optimizer=sgd())
    except (TypeError, ValueError) as error:
        pytest.skip(f"{kind.__name__} has arguments that must be given: {error}")


def data_of(sizes=SIZES, other=(), **settings):
    """Data whose clients have the samples of one list, one after the other; `other`: clients with other samples."""
    total = sum(SIZES)
    x, y = samples(total)
    bounds = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    parts = [list(range(first, last)) for first, last in pairwise(bounds)]
    for client_id in other:
        x[parts[client_id]] = 7.0
        y[parts[client_id]] = 2
    extra = {}
    for place, (name, size) in enumerate(EXTRA.items()):
        extra[name] = TensorSource(samples(size, seed=5 + place), samples(1), num_classes=3)
    source = TensorSource((x, y), samples(30, seed=1), num_classes=3)
    return FederatedDataModule(
        source,
        num_clients=len(sizes),
        partition=FixedPartition(parts[: len(sizes)]),
        batch_size=5,
        extra_splits=extra,
        **settings,
    )


def of_training(row):
    """What a row says of training and of the global model."""
    return {name: repr(value) for name, value in row.items() if not name.startswith(("local/", "unseen/"))}


class Trained(Callback):
    """Takes the ids of the clients that are trained."""

    def __init__(self):
        self.ids = set()

    def on_client_start(self, trainer, loop, client_id):
        self.ids.add(client_id)


# --- laws of all methods ---


COUNTING = (FedAvg, SCAFFOLD, FedDyn, FedFOMO)
SAMPLING = ({}, {"sampling": "poisson", "participation": 0.7})
CASES = [(kind, {"participation": 0.75}) for kind in METHODS]
CASES += [(kind, settings) for kind in COUNTING for settings in SAMPLING]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_federation_is_the_one_without_these_clients(kind, settings):
    """It is in every bit, so that no method knows of their samples or counts them in N."""
    trained = Trained()
    with_unseen = fit(
        client_of(kind),
        rounds=2,
        data=data_of(unseen=[4], **settings),
        evaluate_clients_every=1,
        callbacks=[trained],
    )
    without = fit(client_of(kind), rounds=2, data=data_of(SIZES[:4], **settings), evaluate_clients_every=1)
    assert trained.ids <= {0, 1, 2, 3}
    ours, theirs = weights_of(with_unseen), weights_of(without)
    assert equal(ours, theirs)
    assert of_training(with_unseen.round_metrics) == of_training(without.round_metrics)
    assert {"local/alma", "unseen/alma"} <= with_unseen.round_metrics.keys()
    assert set(with_unseen.recorder.client_values) == {0, 1, 2, 3, 4}
    assert with_unseen.server.num_clients == without.server.num_clients == 4


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_their_training_samples_are_not_read(kind):
    loops = []
    for other in ((), (1, 3)):
        data = data_of(other=other, unseen=[1, 3])
        loops.append(fit(client_of(kind), rounds=2, data=data, evaluate_clients_every=1))
    one, two = loops
    assert equal(weights_of(one), weights_of(two))
    assert of_training(one.round_metrics) == of_training(two.round_metrics)
    assert one.server.clients == [0, 2, 4]
    assert not {1, 3} & set(one.store.owners)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, FedDyn], ids=lambda kind: kind.__name__)
def test_with_stacks(kind, chunk):
    loops = [
        fit(client_of(kind), rounds=2, data=data, chunk=chunk, evaluate_clients_every=1)
        for data in (data_of(unseen=[4]), data_of(SIZES[:4]))
    ]
    assert equal(weights_of(loops[0]), weights_of(loops[1]))


def test_the_training_samples_of_the_global_model_are_those_of_the_others():
    loops = [
        fit(FedAvg(), rounds=1, data=data, evaluate_training_every=1)
        for data in (data_of(unseen=[4]), data_of(SIZES[:4]), data_of(unseen=[0]))
    ]
    one, two, three = [loop.round_metrics["global/train/loss"] for loop in loops]
    assert one == two != three


def test_fedfomo_numbers_the_clients_that_train():
    loop = fit(FedFOMO(), rounds=3, data=data_of(unseen=[0, 2]))
    server = loop.server_module
    assert server.affinity.shape == (3, 3)
    assert server.trained.tolist() == [True, True, True]
    assert (server.affinity != torch.eye(3)).any()
    assert server.candidates(1) == [3, 4]


def test_a_private_rule_counts_those_that_train():
    settings = {"sampling": "poisson", "participation": 0.5}
    rule = DPFedAvg(noise_multiplier=1.0, clip=1.0, delta=0.22)
    loop = fit(FedAvg(), rounds=1, data=data_of(unseen=[4], **settings), aggregator=rule)
    assert loop.aggregator.ledger["num_clients"] == 4
    larger = DPFedAvg(noise_multiplier=1.0, clip=1.0, delta=0.3)
    with pytest.warns(UserWarning, match=r"delta=0\.3 .* 1 / 4 clients"):
        fit(FedAvg(), rounds=1, data=data_of(unseen=[4], **settings), aggregator=larger)


def test_pooled_samples_are_those_of_the_others():
    loops = [
        fit(FedAvg(), rounds=2, data=data)
        for data in (data_of(unseen=[4], pooled=True), data_of(SIZES[:4], pooled=True))
    ]
    assert equal(weights_of(loops[0]), weights_of(loops[1]))
    assert loops[0].data.size(0, round_idx=0) == sum(SIZES[:4])
    middle = fit(FedAvg(), rounds=2, data=data_of(unseen=[2], pooled=True, participation=0.5))
    assert middle.data.size(0, round_idx=0) == sum(SIZES) - SIZES[2]


# --- cohorts ---


def cohorts(rounds=40, **settings):
    data = toy_data((5,) * 10, **settings)
    return data, [data.cohort(round_idx) for round_idx in range(rounds)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"participation": 0.4},
        {"cohort_size": 7},
        {"sampling": "poisson", "participation": 0.5},
        {"availability": 0.7},
        {"availability": [0.3 + 0.07 * place for place in range(10)], "participation": 0.5},
        {"availability": 0.6, "participation": 0.4, "over_selection": 0.5},
        {"availability": 0.6, "participation": 0.4, "sampling": "poisson"},
        {"secret_seed": True, "participation": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("unseen", [3, 0.3, [0, 4, 9], [5, 6, 7]], ids=str)
def test_every_cohort_is_without_them(settings, unseen):
    data, drawn = cohorts(unseen=unseen, **settings)
    assert len(data.unseen_clients) == 3
    assert data.num_clients == 10
    assert list(data.training_clients) == [c for c in range(10) if c not in data.unseen_clients]
    seen = {client_id for cohort in drawn for client_id in cohort}
    assert seen == set(data.training_clients)
    bounds = data.cohort.bounds
    assert all(bounds.least <= len(cohort) <= bounds.most for cohort in drawn)
    assert bounds.most <= 7
    assert all(cohort == sorted(set(cohort)) for cohort in drawn)


def test_a_trace_and_a_schedule(tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0 1 2\n3 4\n5 6 7 8 9\n")
    data, drawn = cohorts(rounds=3, unseen=[3, 4], availability=str(trace))
    assert drawn == [[0, 1, 2], [], [5, 6, 7, 8, 9]]
    assert data.cohort.bounds == (0, 5)
    _, drawn = cohorts(rounds=2, unseen=[3], schedule=[[0, 1], [2, 4]])
    assert drawn == [[0, 1], [2, 4]]
    with pytest.raises(
        ValueError, match=r"a scheduled cohort must leave out .* got \[2, 3\] with client 3; leave it out"
    ):
        cohorts(unseen=[3], schedule=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"at most data\.num_clients, without data\.unseen, got 9 of 8"):
        cohorts(unseen=2, cohort_size=9)


def test_they_are_drawn_once_by_the_seed():
    drawn = [cohorts(rounds=1, unseen=3, seed=seed)[0].unseen_clients for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    assert cohorts(rounds=1, unseen=0.3)[0].unseen_clients == drawn[0]
    assert cohorts(rounds=1, unseen=3, sampling_seed=9)[0].unseen_clients == drawn[0]


@pytest.mark.parametrize(
    ("unseen", "error", "sentence"),
    [
        (0, ValueError, r"data\.unseen must be a share .* or a whole number ≥ 1, got 0"),
        (1.0, ValueError, r"data\.unseen must be a share .* got 1\.0"),
        (-0.1, ValueError, r"data\.unseen must be a share"),
        (10, ValueError, r"data\.unseen must leave a client that trains, got 10 of 10 clients"),
        (True, ValueError, r"data\.unseen must be a share"),
        ([], ValueError, r"data\.unseen must list clients, got \[\]; leave it unset"),
        ([10], ValueError, r"data\.unseen must name ids in \[0, 10\), got 10"),
        ([-1], ValueError, r"data\.unseen must name ids in \[0, 10\), got -1"),
        ([1, 1], ValueError, r"data\.unseen must name each client once"),
        (
            ["north"],
            ValueError,
            r"data\.unseen must list ids .* no column \(data\.by\) names owners, got 'north'",
        ),
        ([1.5], TypeError, r"data\.unseen must list ids and names of clients, got 1\.5"),
        ("north", TypeError, r"data\.unseen must be a number, got 'north'"),
    ],
    ids=str,
)
def test_what_names_no_clients(unseen, error, sentence):
    with pytest.raises(error, match=sentence):
        cohorts(unseen=unseen)


def test_an_attacker_that_never_trains():
    with pytest.raises(
        ValueError, match=r"attackers must be clients that train, got \[1, 2\] with client 2 of data\.unseen"
    ):
        fit(noise(FedAvg(), attackers=[1, 2]), rounds=1, data=data_of(unseen=[2]))


# --- owners ---


OWNERS = ("north", "south", "east", "west", "7")


class Sites(TensorSource):
    """A source whose samples have the column of their owners."""

    def load(self):
        train, test = super().load()
        for split in (train, test):
            size = len(split)
            names = np.array([OWNERS[place % 5] for place in range(size)])
            split.column = lambda name, names=names: names
            split.x[:, 0] = torch.arange(size).float() % 5
        return train, test


def sites(**settings):
    source = Sites(samples(150), samples(40, seed=1), num_classes=3)
    return FederatedDataModule(source, by="site", batch_size=10, **{"num_clients": None, **settings})


def owner_of(split, indices):
    return {OWNERS[int(place)] for place in split.x[indices][:, 0].tolist()}


@pytest.mark.parametrize("unseen", [["south"], ["south", "west"], ["7"], [7], 1, 0.4, [0]], ids=str)
def test_by_the_name_of_the_owner(unseen):
    data = sites(unseen=unseen)
    loop = fit(FedAvg(), rounds=1, data=data, evaluate_clients_every=1)
    names = [data.client_names[client_id] for client_id in data.unseen_clients]
    if isinstance(unseen, list):
        expected = [str(name) for name in unseen]
        assert names == (expected if unseen != [0] else [data.client_names[0]])
    for client_id in data.unseen_clients:
        assert owner_of(data.split("train"), data.client_indices("train", client_id)) == {data.client_names[client_id]}
    assert "unseen/alma" in loop.round_metrics
    assert loop.server.num_clients == 5 - len(names)


def test_an_owner_that_is_not_there():
    with pytest.raises(ValueError, match=r"must name ids in \[0, 5\) or owners \(7, east, .*\), got 'norht'"):
        fit(FedAvg(), rounds=1, data=sites(unseen=["norht"]))
    with pytest.raises(ValueError, match=r"because a client has the samples of several owners"):
        fit(FedAvg(), rounds=1, data=sites(unseen=["north"], num_clients=2))


@pytest.mark.parametrize("num_clients", [None, 5])
@pytest.mark.parametrize("unseen", [["south"], 1, [2, 3]], ids=str)
def test_no_set_of_the_server_has_their_samples(unseen, num_clients):
    held = {"val_fraction": 0.3, "proxy_size": 20, "transfer_size": 15, "shared_per_class": 8}
    data = sites(unseen=unseen, num_clients=num_clients, **held)
    data.prepare_data()
    data.setup("fit")
    never = {data.client_names[client_id] for client_id in data.unseen_clients}
    assert never
    for name in ("val", "proxy", "transfer", "shared"):
        split = data.split(name)
        owners = owner_of(split, torch.arange(len(split)))
        assert owners
        assert not owners & never
    for client_id in data.unseen_clients:
        assert data.size(client_id, 0) == 30
    others = 30 * (5 - len(never))
    assert len(data.split("val")) == round(0.3 * others)
    sizes = sum(data.size(client_id, 0) for client_id in data.training_clients)
    assert sizes == others - len(data.split("val")) - 35


def test_positions_that_are_stored():
    data = toy_data((10, 10, 10), unseen=[1], val_fraction=0.4, proxy_size=4)
    data.prepare_data()
    data.setup("fit")
    assert data.size(1, 0) == 10
    assert data.size(0, 0) + data.size(2, 0) == 20 - 8 - 4


# --- values ---


def test_the_means_and_the_table(tmp_path):
    loop = FederatedLoop(FedAvg(), seed=3, evaluate_clients_every=1, fine_tuning=FineTuning(epochs=2))
    run = Trainer(max_epochs=2, **{**QUIET, "logger": True}, default_root_dir=tmp_path)
    run.fit(loop, datamodule=data_of(unseen=[1, 3]))
    values = loop.recorder.client_values
    for beginning, ids in (("local", (0, 2, 4)), ("unseen", (1, 3))):
        for name in ("alma", "tuned/alma"):
            mean = sum(values[client_id][f"local/{name}"] for client_id in ids) / len(ids)
            assert loop.round_metrics[f"{beginning}/{name}"] == pytest.approx(mean)
    (path,) = tmp_path.rglob("clients.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["unseen"] for row in rows] == ["0", "1", "0", "1", "0"] * 2
    assert list(rows[0]) == ["round", "client", "owner", "unseen", "local/alma", "local/tuned/alma"]
    assert float(rows[6]["local/tuned/alma"]) == values[1]["local/tuned/alma"]


def test_the_table_of_the_callback(tmp_path):
    table = ClientTable(dirpath=tmp_path)
    fit(FedAvg(), rounds=1, data=data_of(unseen=[1]), evaluate_clients_every=1, callbacks=[table])
    with (tmp_path / "clients.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["client"]: row for row in csv.DictReader(file)}
    assert {client_id: row["unseen"] for client_id, row in rows.items()} == {
        "0": "0",
        "1": "1",
        "2": "0",
        "3": "0",
        "4": "0",
    }
    assert rows["1"]["steps"] == "" != rows["0"]["steps"]


@pytest.mark.usefixtures("without_pictures")
def test_the_best_round_by_their_value(tmp_path, monkeypatch):
    """It is logged every second round only."""
    monkeypatch.chdir(tmp_path)
    words = f"{TINY} --model.client FedAvg --data.unseen 1 --model.evaluate_clients_every 2 --best.monitor unseen/alma"
    said = say(f"fit {words} --trainer.max_epochs 2")
    assert said.code == 0, said.err
    (path,) = tmp_path.rglob("best*.ckpt")
    assert torch.load(path, weights_only=False)["epoch"] == 1


def test_without_them_nothing_is_new(tmp_path):
    loop = fit(FedAvg(), rounds=1, data=data_of(), evaluate_clients_every=1)
    assert not [name for name in loop.round_metrics if name.startswith("unseen/")]
    assert loop.data.unseen_clients == ()


def test_a_method_without_a_global_model():
    """Nobody has trained their model, so that they deploy the initial one."""
    loop = fit(Local(), rounds=2, data=data_of(unseen=[1]), fine_tuning=FineTuning(epochs=3))
    values = loop.recorder.client_values[1]
    assert values["local/tuned/alma"] != values["local/alma"]
    initial = fit(Local(), rounds=1, data=data_of(schedule=[[0]]))
    assert initial.recorder.client_values[1]["local/alma"] == values["local/alma"]


def test_without_test_samples_of_theirs():
    data = toy_data((8, 8, 8), unseen=[2])
    data.setup("fit")
    empty = torch.arange(0)
    own = data.client_indices
    data.client_indices = lambda split, client_id: empty if (split, client_id) == ("test", 2) else own(split, client_id)
    with pytest.raises(ValueError, match=r"needs test samples of the clients of data\.unseen, and none"):
        fit(FedAvg(), rounds=1, data=data, evaluate_clients_every=1)


def test_a_run_goes_on_with_the_same_clients_only(tmp_path):
    path = tmp_path / "last.ckpt"
    loop = FederatedLoop(FedAvg(), seed=3)
    run = Trainer(max_epochs=1, **QUIET)
    run.fit(loop, datamodule=data_of(unseen=[4]))
    run.save_checkpoint(path)
    with pytest.raises(ValueError, match=r"data\.unseen"):
        fit(FedAvg(), rounds=2, data=data_of(unseen=[3]), ckpt_path=path)
