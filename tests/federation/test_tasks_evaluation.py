"""The test of a net on each task: by classes that are known, and by the samples of a domain."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.data import ClassIncremental, DomainIncremental, FederatedDataModule, Source, TensorSplit
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.toys import fit, samples, sgd, toy_data

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


def test_test_samples_without_the_column_are_named_before_any_client_trains():
    class Never(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            pytest.fail("a client was trained")

    data = FederatedDataModule(SitesOfTraining(), 3, seed=0, scenario=DomainIncremental(1, column="site"))
    with pytest.raises(ValueError, match=r"a column of the test samples as well, and the samples have no column"):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 2, data, callbacks=[Never()])
