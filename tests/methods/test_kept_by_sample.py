"""What is kept of a client's samples is kept by sample: it stays right when the client has fewer or more samples."""

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.methods import FedFOMO, SelectiveFD
from fl_lightning.monitors import SampleReduction
from tests.toys import BatchNormNet, fit, sgd, toy_data

pytestmark = pytest.mark.filterwarnings("ignore")
REMOVALS = [{0: 3}, {0: 0}, {0: 2, 1: 1}, {0: 1, 1: 0, 2: 4}]


def data_of(size=60):
    data = toy_data((size, 9))
    data.setup("fit")
    return data


def parts_by_sample(client, data):
    indices = data.client_indices("train", 0)
    return [set(indices[part].tolist()) for part in client.parts(data.view(0, 0))]


@pytest.mark.parametrize("counts", REMOVALS)
def test_no_validation_sample_was_trained_on(counts):
    data = data_of()
    client = FedFOMO(net=BatchNormNet, optimizer=sgd())
    trained, held = parts_by_sample(client, data)
    for class_idx, count in counts.items():
        data.set_class_count(0, class_idx, count)
    fewer_trained, fewer_held = parts_by_sample(client, data)
    assert fewer_trained <= trained
    assert fewer_held <= held
    assert fewer_trained | fewer_held == set(data.client_indices("train", 0).tolist())
    for class_idx in counts:
        data.set_class_count(0, class_idx, None)
    assert parts_by_sample(client, data) == [trained, held]


class Watch(pl.Callback):
    """The samples that client 0 trains on and judges by, in every round."""

    def __init__(self):
        self.trained = set()
        self.held = set()

    def on_client_end(self, trainer, loop, update):
        if update.client_id == 0:
            indices = loop.data.client_indices("train", 0)
            trained, held = loop.client.parts(loop.data.view(0, trainer.current_epoch))
            self.trained |= set(indices[trained].tolist())
            self.held |= set(indices[held].tolist())


def test_nor_in_a_run_that_takes_samples_away():
    watch = Watch()
    study = SampleReduction(class_idx=0, client=0, start=1, every=1, step=0.05)
    fit(FedFOMO(net=BatchNormNet, optimizer=sgd()), 4, toy_data((60, 9)), callbacks=[study, watch])
    assert watch.trained
    assert watch.held
    assert not watch.trained & watch.held


def test_a_client_left_with_samples_of_one_part_trains_and_judges_by_all():
    data = data_of(3)
    client = FedFOMO(net=BatchNormNet, optimizer=sgd())
    labels = data.label_counts[0].tolist()
    for class_idx, count in enumerate(labels):
        data.set_class_count(0, class_idx, min(count, 1) if class_idx == labels.index(max(labels)) else 0)
    assert [part.tolist() for part in client.parts(data.view(0, 0))] == [[0], [0]]


class Selections(pl.Callback):
    """How often client 0 chooses the samples that it answers for, and of how many samples."""

    def __init__(self):
        self.sizes = []

    def on_fit_start(self, trainer, loop):
        inner = loop.client.select

        def select(local):
            if local.client_id == 0:
                self.sizes.append(local.size())
            return inner(local)

        loop.client.select = select


@pytest.mark.parametrize("selector", ["inputs", "features"])
def test_the_density_ratio_is_that_of_the_present_samples(selector):
    watch = Selections()
    study = SampleReduction(class_idx=0, client=0, start=1, every=2, step=0.1)
    data = toy_data((60, 9), transfer_size=20, partition=None)
    client = SelectiveFD(net=BatchNormNet, optimizer=sgd(), selector=selector)
    fit(client, 4, data, callbacks=[study, watch])
    sizes = len(set(watch.sizes))
    assert len(watch.sizes) == sizes == 3  # before, after round 0 and after round 2
    plain = Selections()
    data = toy_data((60, 9), transfer_size=20, partition=None)
    fit(SelectiveFD(net=BatchNormNet, optimizer=sgd(), selector=selector), 3, data, callbacks=[plain])
    assert len(plain.sizes) == 1


def test_positions_among_the_dealt_samples_are_those_of_the_present_ones():
    data = data_of()
    dealt = data.client_indices("train", 0)
    assert [data.view(0, 0).dealt()[0], data.view(0, 0).dealt()[1].tolist()] == [60, list(range(60))]
    data.set_class_count(0, 1, 2)
    count, present = data.view(0, 3).dealt()
    assert count == 60
    assert torch.equal(dealt[present], data.client_indices("train", 0))
    some = data.view(0, 3).restricted("train", torch.tensor([4, 1]))
    assert torch.equal(dealt[some.dealt()[1]], data.client_indices("train", 0)[[4, 1]])
