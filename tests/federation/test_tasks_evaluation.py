"""The test of a net on each task: by classes that are known, and by the samples of a domain."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import RunPlots
from fl_lightning.data import ClassIncremental, DomainIncremental, FederatedDataModule, Source, Task, TensorSplit
from fl_lightning.methods import FedAvg, Local
from fl_lightning.nets import Perceptron
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.runs.tasks import read_tasks
from tests.toys import fit, samples, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Watch(pl.Callback):
    """The rows of a run, and the logits of the evaluated net on the test samples."""

    def __init__(self):
        self.rows = []
        self.logits = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))
        with torch.no_grad():
            self.logits.append(loop.client(loop.data.split("test").x))


def share(right):
    return right.float().mean().item()


@pytest.mark.parametrize("knows_task", [True, False])
def test_a_known_task_is_answered_among_its_classes(knows_task):
    tasks = [[0, 1], [2]]
    data = toy_data((14, 9, 12), scenario=ClassIncremental(tasks, 1, knows_task=knows_task))
    watch = Watch()
    client = FedAvg(net=Perceptron, optimizer=sgd(0.2))
    fit(client, 2, data, callbacks=[watch], local_epochs=3, evaluate_clients_every=1)
    y = data.split("test").y
    own = [data.client_indices("test", client) for client in range(3)]
    for row, logits in zip(watch.rows, watch.logits, strict=True):
        for classes, name in zip(tasks, ("0-1", "2"), strict=True):
            answers = logits.argmax(1)
            if knows_task:
                answers = torch.tensor(classes)[logits[:, classes].argmax(1)]
            right = answers == y
            of_task = torch.isin(y, torch.tensor(classes))
            assert row[f"global/acc_task/{name}"] == pytest.approx(share(right[of_task]))
            of_clients = [share(right[mine][of_task[mine]]) for mine in own if of_task[mine].any()]
            assert row[f"local/acc_task/{name}"] == pytest.approx(sum(of_clients) / len(of_clients))
    assert not watch.logits[1][:, [0, 1]].argmax(1).equal(watch.logits[1].argmax(1))


class Sites(Source):
    """Samples of three sites, one of which only the test samples have."""

    num_classes = 3

    def load(self):
        found = []
        for num, seed, names in ((40, 0, "ab"), (18, 1, "abc")):
            x, y = samples(num, seed)
            columns = {"site": np.array([names[index % len(names)] for index in range(num)])}
            found.append(TensorSplit(x, y, columns=columns))
        return tuple(found)


def test_a_domain_is_tested_on_the_samples_that_have_its_value():
    data = FederatedDataModule(Sites(), 3, seed=0, scenario=DomainIncremental(1, column="site"))
    watch = Watch()
    fit(FedAvg(net=Perceptron, optimizer=sgd()), 2, data, callbacks=[watch], evaluate_clients_every=1)
    sites = data.split("test").column("site")
    y = data.split("test").y
    for row, logits in zip(watch.rows, watch.logits, strict=True):
        right = logits.argmax(1) == y
        for site in "ab":
            of_site = torch.from_numpy(sites == site)
            assert row[f"global/acc_task/{site}"] == pytest.approx(share(right[of_site]))
        assert "global/acc_task/c" not in row


class SitesOfTraining(Sites):
    """The test samples have no column."""

    def load(self):
        train, test = super().load()
        return train, TensorSplit(test.x, test.y)


@pytest.mark.parametrize("kind", [FedAvg, Local])
def test_test_samples_without_the_column_are_named_before_any_client_trains(kind):
    class Never(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            pytest.fail("a client was trained")

    data = FederatedDataModule(SitesOfTraining(), 3, seed=0, scenario=DomainIncremental(1, column="site"))
    with pytest.raises(ValueError, match=r"a column of the test samples as well, and the samples have no column"):
        fit(kind(net=Perceptron, optimizer=sgd()), 2, data, callbacks=[Never()])


def test_clients_that_never_train_are_no_part_of_the_means():
    data = toy_data((14, 9, 12), scenario=ClassIncremental([[0, 1], [2]], 1), unseen=[2])
    watch = Watch()
    fit(FedAvg(net=Perceptron, optimizer=sgd(0.01)), 1, data, callbacks=[watch], evaluate_clients_every=1)
    y = data.split("test").y
    right = watch.logits[0].argmax(1) == y
    of_clients = []
    for client in range(3):
        own = data.client_indices("test", client)
        of_clients.append(share(right[own[y[own] != 2]]))
    assert watch.rows[0]["local/acc_task/0-1"] == pytest.approx(sum(of_clients[:2]) / 2)
    assert sum(of_clients[:2]) / 2 != pytest.approx(sum(of_clients) / 3)
    assert "unseen/alma" in watch.rows[0]


class Named(ClassIncremental):
    """A user's scenario, whose two tasks have these names."""

    def __init__(self, *names):
        super().__init__([[0, 1], [2]], rounds_per_task=1)
        self.tasks = [replace(task, name=name) for task, name in zip(self.tasks, names, strict=True)]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("task", "task"), "have tasks of different names, got 'task' twice; name each of its tasks"),
        (("task", ""), "without slashes and line breaks, got ''; name it such as 'first'"),
        (("task", 2), "by texts without slashes and line breaks, got 2; name it such as '2'"),
        (("a/b", "c"), "without slashes and line breaks, got 'a/b'; name it such as 'a-b'"),
        (("a", "b\n"), r"got 'b\\n'; name it such as 'b'"),
    ],
)
def test_tasks_have_names_of_their_own_that_are_parts_of_keys(names, error):
    with pytest.raises(ValueError, match=rf"data\.scenario must .*{error}"):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, toy_data((14, 9), scenario=Named(*names)))


class OddSites(Sites):
    """Samples of sites with odd names."""

    NAMES = ("", "a/b", "a-b", "c, d")

    def load(self):
        splits = super().load()
        for split in splits:
            split.columns["site"] = np.array([self.NAMES[index % 4] for index in range(len(split))])
        return splits


def test_domains_of_any_name_have_keys_that_can_be_watched_and_read(tmp_path):
    data = FederatedDataModule(OddSites(), 3, seed=0, scenario=DomainIncremental(1, column="site"))
    best = ModelCheckpoint(tmp_path, monitor="global/acc_task/(empty)", mode="max")
    loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()))
    logged = RoundCSVLogger(tmp_path)
    trainer(2, callbacks=[best, RunPlots(format="none")], logger=logged, enable_checkpointing=True).fit(loop, data)
    assert best.best_model_score is not None
    names = ["(empty)", "a-b (1)", "a-b (2)", "c, d"]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        keys = [key for key in next(csv.reader(file)) if "acc_task/" in key]
    assert sorted(keys) == sorted(f"global/acc_task/{name}" for name in names)
    assert sorted(read_tasks(tmp_path / "tasks.csv").names) == names


@pytest.mark.parametrize(
    ("tasks", "error", "sentence"),
    [
        (["first"], TypeError, r"data\.scenario\.tasks must be a list of Task, got 'first'; give such as \[Task\("),
        ([Task("first", classes=(0, 3))], ValueError, r"data\.scenario\.tasks must name classes in \[0, 3\), got 3"),
        ([Task("first", classes=(-1,))], ValueError, r"data\.scenario\.tasks must name classes in \[0, 3\), got -1"),
    ],
)
def test_tasks_of_a_scenario_of_ones_own_are_tasks_of_classes_that_there_are(tasks, error, sentence):
    scenario = Answers()
    scenario.tasks = tasks
    scenario.begin = lambda data: None
    with pytest.raises(error, match=sentence):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, toy_data((14, 9), scenario=scenario))


class Answers(ClassIncremental):
    """A user's scenario, one of whose answers is wrong."""

    def __init__(self, task=None, stages=(0, 1), seen=None):
        super().__init__([[0, 1], [2]], rounds_per_task=1)
        self.wrong = task
        self.stages = stages
        self.makes = seen

    def stage(self, client_id, round_idx):
        return self.stages[min(round_idx, 1)]

    def task(self, client_id, stage):
        return stage if self.wrong is None else self.wrong

    def seen(self, client_id, stage):
        return self.makes and self.makes()


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        (
            Answers(task=-1),
            r"Answers\.task must return a number in \[0, 2\), the tasks, got -1 for client 0 in stage 0",
        ),
        (Answers(task=2), r"Answers\.task must return a number in \[0, 2\), the tasks, got 2"),
        (Answers(task=1.0), r"Answers\.task must return a number in \[0, 2\), the tasks, got 1.0"),
        (
            Answers(stages=(None, 1)),
            r"Answers\.stage must return a whole number, got None for client 0 in round 0; number the stages from 0",
        ),
        (Answers(stages=(0, 0.5)), r"Answers\.stage must return a whole number, got 0.5 for client 0 in round 1"),
        (
            Answers(seen=lambda: lambda x, generator=None: -x),
            r"Answers\.seen must return the same object .* for client 0 in stage 0; make the transform once",
        ),
        (Answers(stages=(1, 0)), r"Answers\.stage must begin at 0 or above and never fall, got 0 after 1 for client 0"),
    ],
)
def test_a_wrong_answer_of_a_scenario_of_ones_own_is_named_before_any_client_trains(scenario, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, toy_data((14, 9), scenario=scenario))


@pytest.mark.parametrize("knows_task", [True, False])
def test_all_rows_are_of_the_samples_that_a_limited_validation_evaluates(knows_task):
    """The model stays as it is, so that all rows are equal, the one before training among them."""
    data = toy_data((14, 9), scenario=ClassIncremental([[0, 1], [2]], 1, knows_task=knows_task), eval_batch_size=5)
    loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd(0.0)), seed=3)
    trainer(2, limit_val_batches=2).fit(loop, datamodule=data)
    x, y = data.split("test").x[:10], data.split("test").y[:10]
    with torch.no_grad():
        logits = loop.client(x)
    if knows_task:
        logits[y != 2, 2] = -torch.inf
    right = logits.argmax(1) == y
    last = 1.0 if knows_task else share(right[y == 2])
    assert loop.tasks.table.accuracies == [pytest.approx([share(right[y != 2]), last])] * 3
    unmeasured = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd(0.0)), seed=3)
    trainer(1, limit_val_batches=0).fit(unmeasured, datamodule=data)
    assert not unmeasured.tasks.table.rounds
