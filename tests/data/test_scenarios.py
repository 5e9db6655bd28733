"""Scenarios: which samples a client has in a round, and how it sees them."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fl_lightning import data as D
from fl_lightning.data.changing import SeveralWays, samples_of_tasks
from fl_lightning.utils.keyed import keyed_numpy

SEED = 3
NUM_CLIENTS = 4
NUM_CLASSES = 5


def samples(num=120, seed=0, columns=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 1, 6, 6, generator=generator)
    y = torch.randint(NUM_CLASSES, (num,), generator=generator)
    return D.TensorSplit(x, y, columns=columns)


class Given(D.Source):
    """A source of a training and a test split."""

    num_classes = NUM_CLASSES

    def __init__(self, columns=None, test_columns=None):
        super().__init__()
        self.columns = columns
        self.test_columns = test_columns

    def load(self):
        return samples(columns=self.columns), samples(num=40, seed=1, columns=self.test_columns)


def data_with(scenario, source=None, **settings):
    data = D.FederatedDataModule(
        source or Given(),
        num_clients=NUM_CLIENTS,
        partition=D.DirichletPartition(alpha=1.0, min_samples=5),
        seed=SEED,
        scenario=scenario,
        **settings,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def dealt(data, client_id):
    return data.client_samples().dealt[client_id]


def labels_in(data, client_id, round_idx):
    return sorted(set(data.view(client_id, round_idx).labels().tolist()))


TASKS = [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("order", ["same", "shuffled"])
def test_classes_come_task_by_task(order, delay):
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=2, order=order, delay=delay))
    labels = data.split("train").labels
    for client_id in range(NUM_CLIENTS):
        late = int(keyed_numpy(SEED, "scenario/delay", -1, client_id).integers(delay + 1))
        tasks = keyed_numpy(SEED, "scenario/order", -1, client_id).permutation(3).tolist()
        for round_idx in range(10):
            place = min(max(0, round_idx - late) // 2, 2)
            classes = TASKS[tasks[place] if order == "shuffled" else place]
            part = dealt(data, client_id)
            expected = part[torch.isin(labels[part], torch.tensor(classes))]
            view = data.view(client_id, round_idx)
            assert data.client_samples().indices(client_id, round_idx).equal(expected)
            assert view.stage == place
            assert view.size() == data.size(client_id, round_idx) == len(expected)
            assert view.label_counts.sum() == len(expected)
            assert set(view.labels().tolist()) <= set(classes)


def test_cumulative_tasks_keep_what_came_before():
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=1, cumulative=True))
    for client_id in range(NUM_CLIENTS):
        sizes = [data.size(client_id, round_idx) for round_idx in range(4)]
        assert sizes == sorted(sizes)
        assert sizes[2] == sizes[3] == len(dealt(data, client_id))
        assert labels_in(data, client_id, 1) == [c for c in labels_in(data, client_id, 2) if c < 3]


def test_blurred_samples_come_in_another_task_and_each_in_one():
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=1, blur=0.4))
    labels = data.split("train").labels
    own_task = torch.tensor([0, 0, 1, 2, 2])
    moved = 0
    for client_id in range(NUM_CLIENTS):
        part = dealt(data, client_id)
        draws = keyed_numpy(SEED, "scenario/blur", -1, client_id)
        chances = draws.random(len(part))
        steps = draws.integers(1, 3, len(part))
        own = own_task[labels[part]].numpy()
        comes = np.where(chances < 0.4, (own + steps) % 3, own)
        moved += int((comes != own).sum())
        found = [data.client_samples().indices(client_id, round_idx) for round_idx in range(3)]
        for task in range(3):
            assert found[task].equal(part[torch.from_numpy(comes == task)])
        assert torch.cat(found).sort().values.equal(part.sort().values)
    assert moved > 20


def test_samples_of_no_task_are_never_there():
    data = data_with(D.ClassIncremental([[0], [2]], rounds_per_task=1, blur=0.5))
    for client_id in range(NUM_CLIENTS):
        assert {label for t in range(3) for label in labels_in(data, client_id, t)} <= {0, 2}


def test_a_column_gives_domains_of_training_and_test_samples():
    sites = np.array(["b", "a", "c"])[np.arange(120) % 3]
    tested = np.array(["a", "b"])[np.arange(40) % 2]
    scenario = D.DomainIncremental(2, column="site")
    data = data_with(scenario, Given({"site": sites}, {"site": tested}))
    assert [task.name for task in scenario.tasks] == ["a", "b", "c"]
    for client_id in range(NUM_CLIENTS):
        for round_idx, site in ((0, "a"), (2, "b"), (5, "c")):
            found = data.client_samples().indices(client_id, round_idx)
            assert set(sites[found.numpy()]) <= {site}
            part = dealt(data, client_id).numpy()
            assert len(found) == (sites[part] == site).sum()
        own = data.client_indices("test", client_id)
        met = [data.view(client_id, round_idx).size("test") for round_idx in (0, 2, 4)]
        assert met[0] == (tested[own.numpy()] == "a").sum()
        assert met[1] == met[2] == len(own)


def test_rotated_domains_are_one_split_each_and_turn_training_and_test_samples():
    data = data_with(D.DomainIncremental(1, rotations=[0.0, 90.0, 180.0]))
    views = [data.view(client_id, 1) for client_id in range(NUM_CLIENTS)]
    assert len({id(view.source("train")) for view in views}) == 1
    view = data.view(0, 2)
    assert not view.augments()
    plain = data.split("train").x[data.client_samples().indices(0, 2)]
    torch.testing.assert_close(view.all()[0], plain.rot90(2, (2, 3)), atol=1e-5, rtol=0)
    x, y = view.all("test")
    own = data.client_indices("test", 0)
    images = data.split("test").x[own]
    expected = torch.cat([images.rot90(turns, (2, 3)) for turns in range(3)])
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=0)
    assert y.equal(data.split("test").labels[own].repeat(3))
    assert view.labels("test").equal(y)
    batches = list(view.batches("test", batch_size=7))
    assert torch.cat([batch[0] for batch in batches]).equal(x)


def test_two_splits_seen_in_the_same_way_stay_two():
    """A run evaluates its tasks on the validation split, and its clients on the test split."""
    data = data_with(D.DomainIncremental(1, rotations=[0.0, 90.0]), val_fraction=0.25)
    scenario = data.scenario
    task = scenario.tasks[1]
    for name in ("val", "test"):
        split = data.split(name)
        seen, indices = samples_of_tasks(data.client_samples(), split, among=torch.arange(len(split)), tasks=[task])
        assert len(seen) == len(split)
        (batch,) = seen.batches([indices], None)
        (plain,) = split.batches([indices], None)
        assert torch.equal(batch[1], plain[1])
        assert torch.equal(batch[0], task.seen(plain[0]))


def test_a_sample_has_its_loader_in_each_way_of_seeing():
    split = samples(num=6)
    split.loader_sizes = (2, 4)
    several = SeveralWays(split, [None, torch.neg])
    chosen = torch.tensor([0, 5, 7, 8, 11])
    assert [part.tolist() for part in several.by_loader(chosen)] == [[0, 7], [5, 8, 11]]
    assert several.by_loader(chosen)[0].tolist() == [0, 6 + 1]


def test_samples_of_several_tasks_are_there_once_and_in_their_order():
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=2))
    test = data.split("test")
    tasks = [D.Task("second", classes=(1,)), D.Task("first", classes=(0,)), D.Task("both", classes=(0, 1))]
    split, found = samples_of_tasks(data.client_samples(), test, among=torch.arange(len(test)), tasks=tasks)
    assert split is test
    assert found.equal((test.labels < 2).nonzero().flatten())


def test_a_batch_of_samples_in_several_ways_is_in_its_order():
    split = samples(num=6)
    several = SeveralWays(split, [None, lambda x, generator: -x])
    ((x, y),) = several.batches([torch.tensor([6 + 2, 0, 6 + 1, 5])], None)
    assert x.equal(torch.stack([-split.x[2], split.x[0], -split.x[1], split.x[5]]))
    assert y.equal(split.labels[[2, 0, 1, 5]])


def test_what_is_seen_follows_samples_that_are_moved():
    """On a GPU the samples are moved when a fit begins. Here they get other values."""
    data = data_with(D.DomainIncremental(1, permutations=2))
    before = data.view(0, 1).source("train")
    assert data.view(1, 1).source("train") is before
    split = data.split("train")
    split.x = split.x + 1
    assert torch.equal(data.view(0, 1).source("train").x, split.x)


def test_a_scenario_that_two_data_modules_are_given_has_the_draws_of_each():
    scenario = D.ClassIncremental(TASKS, rounds_per_task=2, order="shuffled")
    first = data_with(scenario)
    other = D.FederatedDataModule(Given(), num_clients=2, seed=SEED + 1, scenario=scenario)
    other.setup("fit")
    alone = data_with(D.ClassIncremental(TASKS, rounds_per_task=2, order="shuffled"))
    for client_id in range(NUM_CLIENTS):
        assert labels_in(first, client_id, 3) == labels_in(alone, client_id, 3)


def test_cumulative_rotations_are_drawn_for_each_sample_among_those_so_far():
    data = data_with(D.DomainIncremental(1, rotations=[0.0, 90.0, 180.0], cumulative=True))
    plain = data.split("train").x[dealt(data, 0)]
    torch.testing.assert_close(data.view(0, 0).all()[0], plain, atol=1e-5, rtol=0)
    turned = torch.stack([plain.rot90(turns, (2, 3)) for turns in range(3)])
    for round_idx in (1, 2):
        view = data.view(0, round_idx)
        epochs = []
        for epoch in (0, 1):
            batches = view.batches("train", batch_size=7, epoch=epoch, shuffle=False)
            epochs.append(torch.cat([batch[0] for batch in batches]))
        for x in epochs:
            assert len(x) == len(plain)
            found = torch.stack([torch.isclose(x, way, atol=1e-5).flatten(1).all(1) for way in turned])
            assert found.any(0).all()
            assert found.any(1).tolist() == [True, True, round_idx == 2]
        assert not epochs[0].equal(epochs[1])
        assert view.source("train") is data.view(1, round_idx).source("train")
    x, _ = data.view(0, 2).all("test")
    assert len(x) == 3 * len(data.client_indices("test", 0))


@pytest.mark.parametrize("settings", [{"noises": [0.0, 0.5]}, {"rotations": [0.0, 90.0], "cumulative": True}])
def test_what_is_drawn_in_a_test_does_not_depend_on_the_batch(settings):
    data = data_with(D.DomainIncremental(1, **settings))
    view = data.view(0, 1)
    x, _ = view.all()
    for batch_size in (1, 7):
        batches = view.batches(batch_size=batch_size)
        assert torch.cat([batch[0] for batch in batches]).allclose(x, atol=1e-6)
    plain = data.split("train").x[dealt(data, 0)]
    is_same = torch.isclose(x, plain, atol=1e-5).flatten(1).all(1)
    assert not is_same.all()
    assert is_same.any() == ("rotations" in settings)


def test_cumulative_domains_of_a_column_keep_what_came_before():
    sites = np.array(list("abc"))[np.arange(120) % 3]
    data = data_with(
        D.DomainIncremental(1, column="site", cumulative=True), source=Given({"site": sites}, {"site": sites[:40]})
    )
    for round_idx in range(3):
        found = data.view(0, round_idx).size()
        assert found == np.isin(sites[dealt(data, 0)], list("abc")[: round_idx + 1]).sum()


def test_permutations_differ_and_the_first_is_none():
    data = data_with(D.DomainIncremental(1, permutations=3))
    plain = data.split("train").x[dealt(data, 1)]
    seen = [data.view(1, round_idx).all()[0] for round_idx in range(3)]
    assert seen[0].equal(plain)
    for x in seen[1:]:
        assert not x.equal(plain)
        assert x.flatten(1).sort(1).values.equal(plain.flatten(1).sort(1).values)
    assert not seen[1].equal(seen[2])


def test_noise_is_drawn_in_training_and_the_same_in_all_tests():
    data = data_with(D.DomainIncremental(1, noises=[0.0, 0.5]))
    view = data.view(0, 1)
    first, second = (next(iter(view.batches("train", epoch=epoch, shuffle=False)))[0] for epoch in (0, 1))
    assert not first.equal(second)
    assert next(iter(data.view(0, 1).batches("train", epoch=0, shuffle=False)))[0].equal(first)
    assert view.all("test")[0].equal(data.view(0, 1).all("test")[0])
    noise = view.all()[0] - data.split("train").x[dealt(data, 0)]
    assert noise.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_labels_drift_from_one_draw_to_another(steps):
    scenario = D.LabelDrift(alpha=0.5, rounds=6, samples=0.3, steps=steps)
    data = data_with(scenario)
    for client_id in range(NUM_CLIENTS):
        part = dealt(data, client_id)
        labels = data.split("train").labels[part]
        size = math.ceil(0.3 * len(part) - 1e-9)
        draws = keyed_numpy(SEED, "scenario/label_drift", -1, client_id)
        first, last = draws.dirichlet([0.5] * NUM_CLASSES, size=2)
        for round_idx in range(9):
            num_steps = steps or 6
            step = min(round_idx * num_steps // 6, num_steps)
            view = data.view(client_id, round_idx)
            assert (view.stage, view.size()) == (step, size)
            shares = first + (last - first) * step / num_steps
            if all(shares * size <= np.bincount(labels, minlength=NUM_CLASSES) - 1):
                assert (view.label_counts.numpy() - shares * size).max() < 1
        for class_idx in range(NUM_CLASSES):
            counts = {}
            for round_idx in range(7):
                found = data.client_samples().indices(client_id, round_idx)
                counts[round_idx] = set(found[data.split("train").labels[found] == class_idx].tolist())
            for fewer, more in zip(
                sorted(counts.values(), key=len), sorted(counts.values(), key=len)[1:], strict=False
            ):
                assert fewer <= more


@pytest.mark.parametrize("keep", [None, 1, 3])
@pytest.mark.parametrize("first", [0.0, 0.35])
def test_samples_arrive_and_leave(first, keep):
    data = data_with(D.Window(per_round=0.1, keep=keep, first=first))
    for client_id in range(NUM_CLIENTS):
        part = dealt(data, client_id)
        n = len(part)
        order = keyed_numpy(SEED, "scenario/arrival", -1, client_id).permutation(n)

        def arrived(round_idx, n=n):
            return 0 if round_idx < 0 else min(n, math.ceil(n * (first + (round_idx + 1) * 0.1) - 1e-9))

        for round_idx in range(16):
            begin = 0 if keep is None else arrived(round_idx - keep)
            chosen = np.sort(order[begin : arrived(round_idx)])
            view = data.view(client_id, round_idx)
            assert data.client_samples().indices(client_id, round_idx).equal(part[torch.from_numpy(chosen)])
            if round_idx:
                before = set(data.client_samples().indices(client_id, round_idx - 1).tolist())
                new = [i for i, sample in enumerate(part[torch.from_numpy(chosen)].tolist()) if sample not in before]
                assert view.arrived(round_idx - 1).tolist() == new
        last = data.view(client_id, 100)
        assert last.size() == (n if keep is None else 0)


def test_the_window_of_the_configurations_lasts_for_their_rounds():
    configs = Path(__file__).parents[2] / "configs"
    rounds = yaml.safe_load((configs / "experiment/digits_fedavg.yaml").read_text())["trainer"]["max_epochs"]
    given = yaml.safe_load((configs / "scenario/window.yaml").read_text())["data"]["scenario"]["init_args"]
    data = data_with(D.Window(**given))
    assert all(data.size(0, round_idx) for round_idx in range(rounds))


def test_samples_arrive_in_the_order_of_a_column():
    times = np.random.default_rng(0).permutation(120)
    data = data_with(D.Window(per_round=0.25, by="time"), Given({"time": times}))
    for client_id in range(NUM_CLIENTS):
        part = dealt(data, client_id).numpy()
        for round_idx in range(4):
            found = data.client_samples().indices(client_id, round_idx).numpy()
            expected = np.sort(times[part])[: math.ceil(len(part) * (round_idx + 1) * 0.25 - 1e-9)]
            assert np.sort(times[found]).tolist() == expected.tolist()


def write(path, lines, head="sample,first,last"):
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_listed_samples_are_there_in_their_rounds(tmp_path):
    generator = np.random.default_rng(1)
    lines = []
    for sample in range(110):
        first = int(generator.integers(5))
        last = "" if generator.random() < 0.3 else str(first + int(generator.integers(4)))
        lines.append((sample, first, last))
    lines.append((7, 9, "9"))
    lines.append((8, 11, str(10**30)))
    file = write(tmp_path / "rounds.csv", [f"{sample},{first},{last}" for sample, first, last in lines])
    data = data_with(D.ListedSamples(file))
    for round_idx in range(12):
        there = {s for s, first, last in lines if first <= round_idx and (last == "" or round_idx <= int(last))}
        for client_id in range(NUM_CLIENTS):
            found = data.client_samples().indices(client_id, round_idx).tolist()
            assert found == [sample for sample in dealt(data, client_id).tolist() if sample in there]


def test_a_file_may_have_spaces_after_commas_a_byte_order_mark_and_further_columns(tmp_path):
    text = "\ufefffirst, note, sample, last\r\n0, x, 3, 1\r\n2, , 5,\r\n"
    (tmp_path / "rounds.csv").write_text(text, encoding="utf-8", newline="")
    data = data_with(D.ListedSamples(tmp_path / "rounds.csv"))
    for round_idx, there in enumerate([{3}, {3}, {5}]):
        found = [data.client_samples().indices(client_id, round_idx) for client_id in range(NUM_CLIENTS)]
        assert set(torch.cat(found).tolist()) == there


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "no line below its columns"),
        (["1,2"], "as many cells.* and line 2 of"),
        (["1,0,", "x,0,1"], "whole numbers.* and line 3 of"),
        (["1,3,2"], r"the first not after the last, got \[3, 2\] for line 2 of"),
        (["-1,0,2"], "a sample of at least 0, and line 2 of"),
        (["1,0,2,5"], "as many cells.* and line 2 of"),
        (["1,0," + "9" * 140_000], "cannot be read as one .field larger than"),
    ],
)
def test_a_wrong_line_is_named(lines, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        D.ListedSamples(write(tmp_path / "rounds.csv", lines))


def test_a_missing_column_file_or_sample_is_named(tmp_path):
    with pytest.raises(ValueError, match="no first and no last"):
        D.ListedSamples(write(tmp_path / "rounds.csv", ["1"], head="sample"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        D.ListedSamples(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError, match="which is no file"):
        D.ListedSamples(tmp_path)
    (tmp_path / "latin.csv").write_bytes("sample,first,last,né\n1,0,\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"path must be a csv file in UTF-8, got byte 0xe9 in .*; save it as UTF-8"):
        D.ListedSamples(tmp_path / "latin.csv")
    with pytest.raises(ValueError, match=r"samples in \[0, 120\), the training samples, got 120"):
        data_with(D.ListedSamples(write(tmp_path / "rounds.csv", ["120,0,"])))
    with pytest.raises(ValueError, match=r"ListedSamples numbers all .* data\.source\.limit leaves \d+ of \d+ out"):
        data_with(D.ListedSamples(write(tmp_path / "rounds.csv", ["1,0,"])), D.Digits(limit=200))


def test_samples_are_removed_as_set_class_count_holds_them_back():
    plain = data_with(None)
    largest = int(plain.label_counts[2].argmax())
    data = data_with(D.RemoveSamples(class_idx=largest, client=2, start=3, every=2, step=0.1, until=0.05))
    part = dealt(data, 2)
    of_class = int((data.split("train").labels[part] == largest).sum())
    seen = set()
    for round_idx in range(16):
        steps = max(0, (round_idx - 3) // 2 + 1)
        left = min(of_class, max(of_class - round(steps * 0.1 * len(part)), round(0.05 * len(part))))
        plain.set_class_count(2, largest, left)
        for client_id in range(NUM_CLIENTS):
            found = data.client_samples().indices(client_id, round_idx)
            assert found.equal(plain.client_samples().indices(client_id, round_idx))
        seen.add(left)
    assert len(seen) >= 3
    assert data.view(2, 100).stage == data.view(2, 50).stage
    counted = data_with(D.RemoveSamples(class_idx=1, client=2, start=0, every=1, counts=[2, 0]))
    assert [int(counted.view(2, t).label_counts[1]) for t in range(4)] == [2, 0, 0, 0]


def test_positions_stay_those_of_what_was_dealt():
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=1))
    part = dealt(data, 0)
    for round_idx in range(3):
        view = data.view(0, round_idx)
        num_dealt, positions = view.dealt()
        assert num_dealt == len(part)
        assert part[positions].equal(data.client_samples().indices(0, round_idx))


def test_a_restricted_view_and_one_for_fine_tuning_keep_stage_and_tests():
    data = data_with(D.ClassIncremental(TASKS, rounds_per_task=1))
    view = data.view(0, 1)
    few = view.restricted("train", torch.arange(view.size())[::2])
    assert few.stage == 1
    assert len(few.arrived(0)) == few.size()
    assert few.restricted("train", torch.tensor([0])).arrived(0).tolist() == [0]
    assert few.size("test") == view.for_fine_tuning().size("test") == view.size("test")
    own = data.split("test").labels[data.client_indices("test", 0)]
    assert view.labels("test").tolist() == [label for label in own.tolist() if label in {0, 1, 2}]


def test_seen_in_another_way_is_arrived():
    data = data_with(D.DomainIncremental(2, permutations=2))
    view = data.view(0, 2)
    assert len(view.arrived(1)) == view.size() == len(view.arrived(None))
    assert len(view.arrived(2)) == len(data.view(0, 3).arrived(2)) == 0


def test_without_a_scenario_nothing_arrives():
    view = data_with(None).view(0, 3)
    assert view.stage == 0
    assert (len(view.arrived(None)), len(view.arrived(0))) == (view.size(), 0)


def test_samples_are_chosen_once_for_each_stage():
    calls = []

    class Counted(D.ClassIncremental):
        def keeps(self, client_id, stage):
            calls.append((client_id, stage))
            return super().keeps(client_id, stage)

    data = data_with(Counted(TASKS, rounds_per_task=2))
    for round_idx in range(8):
        for client_id in range(NUM_CLIENTS):
            view = data.view(client_id, round_idx)
            view.size(), view.labels(), view.arrived(max(0, round_idx - 1)), data.size(client_id, round_idx)
    assert len(calls) == len(set(calls)) == 3 * NUM_CLIENTS


@pytest.mark.parametrize("answer", [lambda num: np.ones(num - 1, dtype=bool), lambda num: np.ones(num, dtype=int)])
def test_an_answer_of_another_kind_is_refused(answer):
    class Wrong(D.Scenario):
        def begin(self, data):
            self.num = len(data.parts[0])

        def stage(self, client_id, round_idx):
            return 0

        def keeps(self, client_id, stage):
            return answer(self.num)

    with pytest.raises(ValueError, match=r"Wrong\.keeps must return \(\d+,\) truth values"):
        data_with(Wrong()).view(0, 0)


REFUSED = [
    (lambda: D.ClassIncremental([[0, 1], [1]], 2), "must name each class once, got 1 twice"),
    (lambda: D.ClassIncremental([], 2), "must list the classes of each task"),
    (lambda: D.ClassIncremental([[0], []], 2), "must list the classes of each task"),
    (lambda: D.ClassIncremental([[0]], 0), "rounds_per_task must be at least 1, got 0"),
    (lambda: D.ClassIncremental([[0]], 1, blur=1.5), "blur must be at most 1, got 1.5"),
    (lambda: D.ClassIncremental([[0]], 1, "random"), "order must be one of same, shuffled"),
    (lambda: D.ClassIncremental([[0]], 1, delay=-1), "delay must be at least 0"),
    (lambda: D.DomainIncremental(1), "needs one of rotations, noises, permutations, column, got none"),
    (lambda: D.DomainIncremental(1, rotations=[0.0], noises=[0.1]), "got rotations and noises"),
    (lambda: D.DomainIncremental(1, rotations=[0.0, 0.0]), "must name different domains"),
    (lambda: D.DomainIncremental(1, noises=[-0.1]), "noises must be at least 0"),
    (lambda: D.DomainIncremental(1, rotations=[0.0, float("nan")]), "rotations must be finite numbers, got nan"),
    (lambda: D.DomainIncremental(1, noises=[float("inf")]), "noises must be finite numbers, got inf"),
    (lambda: D.DomainIncremental(1, permutations=2, values=["a"]), "belong to a column"),
    (lambda: D.LabelDrift(alpha=0.0, rounds=3), "alpha must be above 0"),
    (lambda: D.LabelDrift(alpha=float("inf"), rounds=3), "alpha must be below inf, got inf; 1000 gives nearly equal"),
    (lambda: D.LabelDrift(alpha=0.1, rounds=3, samples=1.5), "samples must be at most 1"),
    (lambda: D.Window(per_round=0.0), "per_round must be above 0"),
    (lambda: D.Window(per_round=0.1, keep=0), "keep must be at least 1"),
    (lambda: D.RemoveSamples(class_idx=-1), "class_idx must be at least 0"),
    (lambda: D.RemoveSamples(class_idx=0, step=float("inf")), "step must be at most 1, got inf"),
    (lambda: D.RemoveSamples(class_idx=0, until=1.5), "until must be at most 1, got 1.5"),
]


@pytest.mark.parametrize(("make", "error"), REFUSED, ids=[error for _, error in REFUSED])
def test_wrong_settings_are_refused(make, error):
    with pytest.raises(ValueError, match=error):
        make()


@pytest.mark.parametrize("setting", ["rotations", "noises"])
@pytest.mark.parametrize("wrong", [None, "a"])
def test_a_domain_that_is_no_number_is_refused_by_name(setting, wrong):
    with pytest.raises(TypeError, match=rf"data\.scenario\.{setting} must be a number, got {wrong!r}; "):
        D.DomainIncremental(1, **{setting: [0.0, wrong]})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rotations": 90.0}, "rotations must be a list, got 90.0; give one entry for each domain"),
        ({"column": "site", "values": "ab"}, "values must be a list, got 'ab'"),
        ({"column": "site", "values": [["a"]]}, r"values must be texts or numbers, got \['a'\]; give values"),
    ],
)
def test_domains_are_lists_of_numbers_or_texts(settings, error):
    with pytest.raises(TypeError, match=rf"data\.scenario\.{error}"):
        D.DomainIncremental(1, **settings)


UNSET = [
    (lambda **settings: D.ClassIncremental([[0]], **{"rounds_per_task": 1, **settings}), ("rounds_per_task", "delay")),
    (lambda **settings: D.LabelDrift(**{"alpha": 1.0, "rounds": 2, **settings}), ("alpha", "rounds", "samples")),
    (lambda **settings: D.Window(**{"per_round": 0.1, **settings}), ("per_round", "first")),
    (D.RemoveSamples, ("class_idx",)),
    (partial(D.RemoveSamples, 0), ("client", "start", "every", "step", "until")),
    (lambda tasks: D.ClassIncremental([[0, tasks]], 1), ("tasks",)),
    (lambda counts: D.RemoveSamples(0, counts=[2, counts]), ("counts",)),
]


@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in UNSET for name in names])
def test_a_number_without_a_value_is_refused(make, name):
    with pytest.raises(TypeError, match=rf"data\.scenario\.{name} must be a number, got None; give one, or leave it"):
        make(**{name: None})


def test_tiny_steps_are_counted_at_once():
    """A step takes far less than a sample, so that a sample is gone after millions of steps."""
    data = data_with(D.RemoveSamples(class_idx=1, client=2, start=0, every=1, step=1e-8))
    of_class = int(data.label_counts[2, 1])
    gone = math.ceil(0.5 / 1e-8 / len(dealt(data, 2)))
    found = [int(data.view(2, t).label_counts[1]) for t in (0, gone // 2, 2 * gone, 10**8)]
    assert found == [of_class, of_class, of_class - 1, round(0.01 * len(dealt(data, 2)))]


def test_samples_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must name classes in \[0, 5\), got 7"):
        data_with(D.ClassIncremental([[0, 7]], 1))
    with pytest.raises(ValueError, match=r"class_idx must lie in \[0, 5\), got 5"):
        data_with(D.RemoveSamples(class_idx=5))
    with pytest.raises(ValueError, match=r"client must lie in \[0, 4\), got 4"):
        data_with(D.RemoveSamples(class_idx=0, client=4))
    sites = np.array(["b", "a", "c"])[np.arange(120) % 3]
    with pytest.raises(ValueError, match="values must be values of the column 'site', got 'd'; it has a, b, c"):
        data_with(D.DomainIncremental(1, column="site", values=["d"]), Given({"site": sites}))
    with pytest.raises(ValueError, match="must have a value for each sample, and 'site' has NaN; fill it in"):
        data_with(D.DomainIncremental(1, column="site"), Given({"site": np.where(sites == "a", np.nan, 1.0)}))
    table = D.TensorSource((torch.rand(40, 3), torch.arange(40) % 5), (torch.rand(9, 3), torch.arange(9) % 5))
    with pytest.raises(ValueError, match=r"rotations turn images \(C, H, W\), got samples \(3,\)"):
        data_with(D.DomainIncremental(1, rotations=[0.0, 10.0]), table)
    regression = D.TensorSource((torch.rand(40, 3), torch.rand(40)), (torch.rand(9, 3), torch.rand(9)))
    with pytest.raises(ValueError, match="ClassIncremental needs samples with classes"):
        D.FederatedDataModule(regression, scenario=D.ClassIncremental([[0]], 1)).setup("fit")


class Stream(torch.utils.data.IterableDataset):
    """Samples of which nobody knows the number."""

    def __iter__(self):
        return iter(())


def test_what_a_scenario_contradicts_is_refused():
    with pytest.raises(ValueError, match=r"data\.pooled puts the samples of all rounds"):
        data_with(D.Window(per_round=0.1), pooled=True)
    streams = {client_id: Stream() for client_id in range(2)}
    with pytest.raises(ValueError, match=r"data\.scenario chooses among samples that are dealt .* these are streams"):
        D.FederatedDataModule.from_datasets(streams, num_classes=2, scenario=D.Window(per_round=0.1)).setup("fit")
    with pytest.raises(ValueError, match=r"data\.feature_shift lets each client"):
        data_with(D.Window(per_round=0.1), feature_shift=D.FeatureShift(noise=0.1))
    with pytest.raises(ValueError, match="set_class_count takes samples from a client"):
        data_with(D.Window(per_round=0.1)).set_class_count(0, 1, 2)
    with pytest.raises(TypeError, match=r"scenario must be a scenario of fl_lightning\.data"):
        D.FederatedDataModule(Given(), scenario="window")


def test_a_permutation_is_one_for_all_samples_and_channels():
    seen = D.DomainIncremental(1, permutations=2)
    data_with(seen)
    x = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    order = keyed_numpy(SEED, "scenario/permutation/1").permutation(36)
    assert seen.seen(0, 1)(x).equal(x.flatten(2)[:, :, order].view(x.shape))
