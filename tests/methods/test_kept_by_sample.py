"""What is kept of a client's samples is kept by sample: it stays right when the client has fewer or more samples."""

import inspect
import sys

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import ClientModule, FederatedDataModule, methods
from fl_lightning.data import Partition, TensorSource
from fl_lightning.data.clients import ClientView
from fl_lightning.methods import FedFOMO, SelectiveFD
from fl_lightning.monitors import SampleReduction
from tests.toys import BatchNormNet, fit, samples, sgd, toy_data

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
            indices = loop.data.client_samples().indices(0, trainer.current_epoch)
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


# --- every method, found by its class

DEALT = 73
COUNTS = [{2: 20}, {0: 3}, {2: 15}, {0: None, 2: None, 1: 2}, {1: None}]
"""Changes of client 0 before each round: samples left by class, None gives all of them back."""
METHODS = sorted(
    (kind for kind in vars(methods).values() if inspect.isclass(kind) and issubclass(kind, ClientModule)),
    key=lambda kind: kind.__name__,
)
DRAWS_FOR_THE_RUN = {FedFOMO, SelectiveFD}
"""Methods that draw once for all rounds, whose laws are above."""


class Unequal(Partition):
    stores_positions = False

    def __call__(self, samples, num_clients, generator):
        return np.split(np.arange(samples.size), [DEALT, DEALT + 9])


def sizes_in(tree):
    """The lengths of all tensors, lists and tables that a record holds."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return set(tree.shape)
    if isinstance(tree, dict):
        return {len(tree)}.union(*map(sizes_in, tree.values()))
    if isinstance(tree, list | tuple | set):
        return {len(tree)}.union(*map(sizes_in, tree))
    return set()


class Changes(pl.Callback):
    """Takes samples from client 0 and gives them back, and looks at what it keeps after each round."""

    def __init__(self):
        self.sizes = []
        self.kept = []
        self.trained = {}
        self.read = {}

    def on_train_epoch_start(self, trainer, loop):
        for class_idx, count in COUNTS[trainer.current_epoch].items():
            loop.data.set_class_count(0, class_idx, count)
        self.sizes.append(loop.data.size(0, trainer.current_epoch))

    def watch(self, monkeypatch):
        """Note which samples client 0 trains on by a phase of its own choice, and which it reads besides."""
        restricted = ClientView.restricted

        def noted(view, split, positions):
            if split == "train" and view.client_id == 0:
                trains = sys._getframe(1).f_globals["__name__"].startswith("fl_lightning.engines")
                ids = set(view._look_up("train")[positions].tolist())
                noted_ids = self.trained if trains else self.read
                noted_ids.setdefault(view.round_idx, set()).update(ids)
            return restricted(view, split, positions)

        monkeypatch.setattr(ClientView, "restricted", noted)

    def on_train_epoch_end(self, trainer, loop):
        record = {"memory": loop.store.memory(0), "personal": loop.store.personal(0)}
        self.kept.append(sizes_in(record))


def made(kind):
    """A client of a class, or the sentence by which it is refused."""
    try:
        return kind(net=BatchNormNet, optimizer=sgd())
    except (TypeError, ValueError) as refused:
        pytest.skip(f"{kind.__name__} needs further arguments: {refused}")


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_no_method_keeps_an_entry_for_each_sample_that_it_had_before(kind, monkeypatch):
    """Nothing that a client keeps has as many entries as it had samples earlier; nor is anything judged by samples
    that were trained on, if its first such round parts them."""
    watch = Changes()
    watch.watch(monkeypatch)
    source = TensorSource(samples(DEALT + 20 + 38), samples(30, seed=1), num_classes=3)
    settings = {"transfer_size": 20, "proxy_size": 20, "num_clients": 3, "partition": Unequal(), "batch_size": 5}
    client = made(kind)
    try:
        fit(client, len(COUNTS), FederatedDataModule(source, **settings), callbacks=[watch])
    except (TypeError, ValueError) as refused:
        if watch.sizes:
            raise
        pytest.skip(f"{kind.__name__} refuses these data at the start: {refused}")
    assert len(watch.sizes) == len(COUNTS)
    assert len(set(watch.sizes)) >= 4
    assert min(watch.sizes) > 20  # no dimension of the net
    for round_idx, kept in enumerate(watch.kept):
        earlier = set(watch.sizes[:round_idx]) - {watch.sizes[round_idx], DEALT}
        assert not kept & earlier, (round_idx, kept, watch.sizes)
    both = sorted(watch.trained.keys() & watch.read.keys())
    if both and not watch.trained[both[0]] & watch.read[both[0]]:
        assert not set().union(*watch.trained.values()) & set().union(*watch.read.values())


def test_a_method_that_draws_once_for_all_rounds_has_a_law():
    """`generator(..., per_round=False)` parts a client's samples for the run: its caller parts them by sample."""
    callers = {kind for kind in METHODS if "per_round=False" in inspect.getsource(inspect.getmodule(kind))}
    assert callers == DRAWS_FOR_THE_RUN
