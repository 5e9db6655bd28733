"""The least and the largest number of clients of a round, which everybody who says it asks."""

from itertools import product

import pytest

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import Aggregator
from fl_lightning.data import Digits, Stragglers
from fl_lightning.data.availability import AvailableCohorts
from fl_lightning.data.clients import Cohorts
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.commands import refusal, say
from tests.toys import toy_data, trainer

CLIENTS = 5
ROUNDS = 600
SIZES = [{}, {"participation": 0.5}, {"cohort_size": 3}, {"participation": 0.01}]
COHORTS = [{}, {"schedule": [[0, 1], [2, 3, 4], [1]] * (ROUNDS // 3)}, {"sampling": "poisson"}]
AVAILABLE = [
    {},
    *({"availability": given} for given in (1.0, 0.6, 0.0, [0.0, 1.0, 1.0, 0.5, 1.0], "trace")),
    {"availability": 0.6, "over_selection": 0.5},
    {"availability": [0.0, 1.0, 1.0, 1.0, 1.0], "over_selection": 0.4},
    {"availability": "trace", "over_selection": 1.0},
    {"local_work": Stragglers(0.4, "drop")},
    {"availability": 0.6, "local_work": Stragglers(0.4, "drop")},
]


def made(tmp_path, **settings):
    if settings.get("availability") == "trace":
        (tmp_path / "trace.txt").write_text("0 1 2 3 4\n1 2 3\n4 0\n")
        settings["availability"] = str(tmp_path / "trace.txt")
    return toy_data((4,) * CLIENTS, **settings)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("available", AVAILABLE, ids=str)
def test_bounds_are_those_of_the_rounds(available, pooled, tmp_path):
    """Of all settings that go together: no round is outside, and some round has the least and the largest number."""
    checked = 0
    for size, cohort in product(SIZES, COHORTS):
        try:
            data = made(tmp_path, **size, **cohort, **available, pooled=pooled)
        except ValueError:
            continue  # these settings contradict each other
        seen = [len(data.cohort(t)) for t in range(ROUNDS)]
        least, most = data.cohort.bounds
        assert least <= min(seen) <= max(seen) <= most, (size, cohort)
        if "sampling" not in cohort or size.get("participation") != 0.01:  # then many clients are too rare to be seen
            assert (least, most) == (min(seen), max(seen)), (size, cohort)
        checked += 1
    assert checked >= 3


def test_every_kind_of_cohorts_is_among_them():
    kinds = set()
    todo = [Cohorts]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        kinds.add(kind.__name__)
    assert kinds == {"Cohorts", "AvailableCohorts", "PooledCohorts", "PunctualCohorts"}


class Asks(Aggregator):
    def setup(self):
        super().setup()
        self.seen = (self.server.cohort_size, self.server.largest_cohort)


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({"schedule": [[0, 1], [2, 3, 4]]}, (2, 3)),
        ({"participation": 0.8, "availability": 0.5}, (0, 4)),
        ({"participation": 0.5, "sampling": "poisson"}, (0, 5)),
        ({"cohort_size": 3}, (3, 3)),
    ],
    ids=str,
)
def test_the_server_says_the_same(settings, bounds, tmp_path):
    rule = Asks()
    data = made(tmp_path, **settings)
    trainer(1).fit(FederatedLoop(FedAvg(net=Perceptron), rule), datamodule=data)
    assert rule.seen == bounds == tuple(data.cohort.bounds)
    assert data.cohort_size == bounds[1]
    assert list(data.train_dataloader()) == [bounds[1]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("--data.schedule '[[0, 1], [2, 3, 4]]'", "2 to 3 in a round"),
        ("--data.participation 0.8 --data.availability 0.5", "0 to 4 in a round"),
        ("--data.cohort_size 3", "3 in a round"),
    ],
)
def test_the_partition_command_says_the_same(settings, said):
    words = f"--model.client FedAvg --data.source Digits --data.source.limit 60 --data.num_clients 5 {settings}"
    assert f"5 clients, {said}," in say(f"partition {words}").out


def test_ten_clients_a_round_are_ten():
    data = FederatedDataModule(Digits(), num_clients=30, cohort_size=10)
    assert {len(data.cohort(t)) for t in range(9)} == {10}
    one_third = FederatedDataModule(Digits(), num_clients=30, participation=0.3334)
    assert [data.cohort(t) for t in range(9)] == [one_third.cohort(t) for t in range(9)]
    assert len(FederatedDataModule(Digits(), num_clients=30, cohort_size=30).cohort(0)) == 30


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cohort_size": 6}, "data.cohort_size must be at most data.num_clients, got 6 of 5 clients; set it to 5"),
        ({"cohort_size": 0}, "cohort_size must be at least 1, got 0"),
        (
            {"cohort_size": 3, "participation": 0.5},
            r"both say how many .* got 3 and 0.5; set data.participation to 1.0",
        ),
        ({"cohort_size": 3, "sampling": "poisson"}, "leave out data.cohort_size"),
        ({"cohort_size": 2, "schedule": [[0, 1]]}, "leave out data.cohort_size"),
        ({"cohort_size": -1}, "cohort_size must be at least 1, got -1"),
        ({"cohort_size": 6, "availability": 0.5}, "data.cohort_size must be at most data.num_clients"),
        ({"cohort_size": 6, "pooled": True}, "data.cohort_size must be at most data.num_clients"),
        ({"schedule": [[0, 5]]}, "must name different clients"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_refused(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        made(tmp_path, **settings)


@pytest.mark.parametrize("settings", [{"cohort_size": 2.5}, {"schedule": [[0.5]]}, {"schedule": [["1", 2]]}], ids=str)
def test_a_number_that_is_none_is_refused(settings, tmp_path):
    with pytest.raises(TypeError, match="must be a whole number"):
        made(tmp_path, **settings)


def test_so_it_is_in_a_comparison(tmp_path, without_pictures):
    (tmp_path / "base.yaml").write_text(
        "data: {source: {class_path: Digits, init_args: {limit: 60}}, num_clients: 5}\n"
        "model: {client: {class_path: FedAvg, init_args: {net: Perceptron}}}\n"
        "trainer: {max_epochs: 1, accelerator: cpu}\n"
    )
    words = f"compare -c {tmp_path / 'base.yaml'} --methods fedavg --seeds 0"
    refused = say(f"{words} --set data.cohort_size=2,6 --output {tmp_path / 'more'}")
    assert refused.code
    assert "data.cohort_size must be at most data.num_clients, got 6 of 5" in refused.err + refused.out


def test_so_it_is_on_the_command_line():
    words = "partition --model.client FedAvg --data.source Digits --data.num_clients 5 --data.cohort_size 6"
    assert "data.cohort_size must be at most data.num_clients" in refusal(words, 1)


def test_the_bounds_of_all_rounds_are_counted_once(monkeypatch, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0 1\n1 2\n0\n", encoding="utf-8")
    counted = []
    count = AvailableCohorts._bounds_of

    def counting(self, round_idx):
        counted.append(round_idx)
        return count(self, round_idx)

    monkeypatch.setattr(AvailableCohorts, "_bounds_of", counting)
    data = toy_data((5, 6, 7), availability=str(trace))
    data.setup("fit")
    first = data.cohort.bounds
    assert counted == [0, 1, 2]
    assert data.cohort.bounds is first
    assert counted == [0, 1, 2]
