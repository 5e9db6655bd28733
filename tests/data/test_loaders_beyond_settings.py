"""Loaders that do more than their settings say are refused by name; a batch of None is skipped, as in Lightning."""

import inspect
import math
from functools import partial
from typing import NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop, methods, monitors
from fl_lightning.attacks import label_flip, noise, sign_flip
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.data import FixedPartition
from fl_lightning.methods import FedAvg, FedProx, dp_sgd, local_dp
from tests.toys import equal, samples, toy_data, trainer, weights_of

DATASET = TensorDataset(*samples(20))


class Repeats(DataLoader):
    """Reads its samples twice."""

    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()


class Longer(DataLoader):
    def __len__(self):
        return 3


class Indexed(DataLoader):
    @property
    def _index_sampler(self):
        return super()._index_sampler


class Iterates(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


class Inherits(Repeats):
    """The method is its base's."""


class Settings(DataLoader):
    """Only chooses settings, as the loader of torch_geometric does."""

    def __init__(self, dataset, **settings):
        super().__init__(dataset, collate_fn=default_collate, **settings)


class Backwards(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATASET)


REFUSED = {
    "own iter": (lambda: Repeats(DATASET, batch_size=4), r"Repeats overrides DataLoader\.__iter__"),
    "own length": (lambda: Longer(DATASET, batch_size=4), r"Longer overrides DataLoader\.__len__"),
    "own indices": (lambda: Indexed(DATASET, batch_size=4), r"Indexed overrides DataLoader\._index_sampler"),
    "own iterator": (lambda: Iterates(DATASET, batch_size=4), r"Iterates overrides DataLoader\._get_iterator"),
    "inherited": (lambda: Inherits(DATASET, batch_size=4), r"Inherits overrides DataLoader\.__iter__"),
    "replacement": (
        lambda: with_sampler(RandomSampler(DATASET, replacement=True)),
        r"RandomSampler\(replacement=True\)",
    ),
    "fewer samples": (
        lambda: with_sampler(RandomSampler(DATASET, num_samples=5)),
        "a RandomSampler that draws 5 of 20",
    ),
    "more samples": (lambda: with_sampler(RandomSampler(DATASET, num_samples=50)), "that draws 50 of 20"),
    "of others": (lambda: with_sampler(SequentialSampler(range(7))), "a SequentialSampler that draws 7 of 20"),
    "own order": (lambda: with_sampler(Backwards(DATASET)), "sequential or shuffled, got Backwards"),
    "a part": (lambda: with_sampler(SubsetRandomSampler([1, 2])), "sequential or shuffled, got SubsetRandomSampler"),
    "a list": (lambda: with_sampler([3, 1, 2]), "sequential or shuffled, got list"),
    "weights": (lambda: with_sampler(WeightedRandomSampler([1.0] * 20, 20)), "a WeightedRandomSampler draws"),
    "batch sampler": (lambda: DataLoader(DATASET, batch_sampler=BatchSampler(range(20), 4, False)), "batch_sampler"),
    "no batches": (lambda: DataLoader(DATASET, batch_size=None), "a batch_sampler of its own or without batching"),
    "weights in batches": (
        lambda: in_batches(WeightedRandomSampler([1.0] * 20, 20)),
        "a WeightedRandomSampler draws",
    ),
    "fewer samples in batches": (lambda: in_batches(range(7)), "sequential or shuffled, got range"),
    "own batches": (
        lambda: DataLoader(TABLE, batch_size=None, sampler=Growing(SequentialSampler(TABLE), 4, False)),
        "a batch_sampler of its own or without batching",
    ),
    "stream": (lambda: DataLoader(Stream(), batch_size=4), "which a stream does not have"),
}
"""Loaders whose batches are not those of a DataLoader with their settings, and what the sentence says."""


def with_sampler(sampler):
    return DataLoader(DATASET, batch_size=4, sampler=sampler)


class Growing(BatchSampler):
    def __iter__(self):
        yield from ([0], [1, 2], [3, 4, 5])


class Table(Dataset):
    """Reads the samples of a batch at once, as the datasets of scvi-tools and of Hugging Face do."""

    def __init__(self):
        self.targets = DATASET.tensors[1]

    def __len__(self):
        return len(DATASET)

    def __getitem__(self, index):
        assert isinstance(index, list)
        return DATASET[index]


TABLE = Table()


def in_batches(sampler, **settings):
    return DataLoader(TABLE, batch_size=None, sampler=BatchSampler(sampler, 4, drop_last=False), **settings)


class Data(pl.LightningDataModule):
    """Makes one of its loaders by a function."""

    def __init__(self, name, make):
        super().__init__()
        self.name = name
        self.make = make

    def loader(self, name):
        return self.make() if name == self.name else DataLoader(DATASET, batch_size=4)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")

    def test_dataloader(self):
        return self.loader("test")

    def predict_dataloader(self):
        return self.loader("predict")


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_what_cannot_be_kept_is_refused_by_name(name, kind):
    make, sentence = REFUSED[kind]
    data = FederatedDataModule.from_datamodule(Data(name, make), num_clients=2)
    loop = FederatedLoop(FedAvg(), seed=1)
    run = trainer(1)
    verb = run.test if name == "test" else run.fit
    with pytest.raises(ValueError, match=sentence):
        verb(loop, datamodule=data)


def test_a_loader_of_a_stream_is_refused_by_its_class():
    streams = {0: Repeats(Stream(), batch_size=4), 1: DataLoader(Stream(), batch_size=4)}
    data = FederatedDataModule.from_datamodule(Data("train", lambda: streams), num_clients=2)
    with pytest.raises(ValueError, match=r"Repeats overrides DataLoader\.__iter__"):
        data.setup("fit")


ACCEPTED = {
    "settings": lambda: Settings(DATASET, batch_size=4),
    "shuffled": lambda: DataLoader(DATASET, batch_size=4, shuffle=True),
    "all in order": lambda: with_sampler(SequentialSampler(DATASET)),
    "all at random": lambda: with_sampler(RandomSampler(DATASET)),
    "of a part": lambda: DataLoader(Subset(DATASET, range(9)), batch_size=4, shuffle=True),
    "batches at once": lambda: in_batches(SequentialSampler(TABLE)),
    "batches at once, shuffled": lambda: in_batches(RandomSampler(TABLE)),
    "workers": lambda: DataLoader(DATASET, batch_size=4, timeout=0, pin_memory=False, in_order=True),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_settings_alone_are_kept(kind):
    loader = ACCEPTED[kind]()
    data = FederatedDataModule.from_datamodule(Data("train", ACCEPTED[kind]), num_clients=2)
    data.setup("fit")
    assert data.batch_size == 4
    order = loader.sampler.sampler if loader.batch_size is None else loader.sampler
    assert data.shuffle == isinstance(order, RandomSampler)
    assert len(data.split("train")) == len(loader.dataset)


# --- datasets that read a batch at once ---


class Everywhere(Data):
    """Makes all its loaders by a function."""

    def loader(self, name):
        return self.make()


def fitted(make, **settings):
    """Fit, test and predict, and evaluate the clients; returns weights, values and predictions."""
    module = Net()
    data = FederatedDataModule.from_datamodule(Everywhere("all", make), num_clients=3, client_test_size=5, **settings)
    run = trainer(2)
    loop = FederatedLoop(module, seed=1, evaluate_clients_every=1)
    run.fit(loop, datamodule=data)
    values = dict(run.callback_metrics)
    values |= run.test(loop, datamodule=data, verbose=False)[0]
    return weights_of(module), values, run.predict(loop, datamodule=data)


@pytest.mark.parametrize(
    ("shuffle", "num_workers"),
    [
        (False, 0),
        (True, 1),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_dataset_that_reads_a_batch_at_once_gives_the_same_as_one_that_reads_items(shuffle, num_workers):
    order = RandomSampler if shuffle else SequentialSampler
    weights, values, predictions = fitted(lambda: in_batches(order(TABLE), num_workers=num_workers))
    same_weights, same_values, same_predictions = fitted(
        lambda: DataLoader(DATASET, batch_size=4, shuffle=shuffle, num_workers=num_workers, collate_fn=default_collated)
    )
    assert equal(weights, same_weights)
    assert values == same_values
    assert {"val_loss", "local/val_loss", "test_loss"} <= values.keys()
    assert all(map(torch.equal, predictions, same_predictions))


def default_collated(items):
    return default_collate(items)


def test_the_classes_of_a_dataset_that_reads_a_batch_at_once_are_those_of_its_attribute():
    unlabelled = Table()
    del unlabelled.targets
    for dataset in (TABLE, unlabelled):
        sampler = BatchSampler(SequentialSampler(dataset), 4, drop_last=False)
        make = partial(DataLoader, dataset, batch_size=None, sampler=sampler)
        data = FederatedDataModule.from_datamodule(Data("train", make), num_clients=2)
        data.setup("fit")
        assert (data.split("train").labels is None) == (dataset is unlabelled)


# --- batches of None ---


def skipping(items):
    """Leave out a batch whose first number is above 0."""
    x, y = default_collate(items)
    return None if x[0, 0] > 0 else (x, y)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.called = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.called.append(("step", batch_idx))
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.called.append(("val", batch_idx))
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_train_batch_start(self, batch, batch_idx):
        self.called.append(("start", batch_idx))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.called.append(("end", batch_idx, batch is None, outputs is None))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(collate_fn=skipping, num_workers=0):
    return DataLoader(DATASET, batch_size=4, collate_fn=collate_fn, num_workers=num_workers)


def data_of(clients=1, **settings):
    made = Data("none", None)
    made.loader = lambda name: loader()
    return FederatedDataModule.from_datamodule(made, num_clients=clients, eval_batch_size=4, **settings)


def of_training(called):
    return [call for call in called if call[0] != "val"]


@pytest.mark.filterwarnings("ignore:.*yielded None:UserWarning")
def test_a_batch_of_none_is_skipped_as_in_lightning(tmp_path):
    kept = [batch is not None for batch in loader()]
    assert {True, False} == set(kept)
    plain = Net()
    trainer(1, tmp_path, limit_val_batches=0).fit(plain, loader())
    federated = Net()
    fitted = trainer(1, tmp_path, callbacks=[ClientCheckpoint(tmp_path)])
    loop = FederatedLoop(federated, seed=1)
    with pytest.warns(UserWarning, match="a training batch is None and is skipped"):
        fitted.fit(loop, datamodule=data_of(shuffle=False, partition=FixedPartition([list(range(20))])))
    assert of_training(federated.called) == of_training(plain.called)
    assert len([call for call in federated.called if call[0] == "val"]) == sum(kept)
    assert equal(dict(plain.state_dict()), dict(federated.state_dict()))
    fitted.test(loop, datamodule=data_of())
    assert "test_loss" in fitted.callback_metrics
    predicted = [part for part in fitted.predict(loop, datamodule=data_of()) if part is not None]
    assert len(predicted) == sum(kept)


@pytest.mark.filterwarnings("ignore:a training batch is None")
@pytest.mark.parametrize("settings", [{"evaluate_clients_every": 1}, {"chunk": 2}, {"local_epochs": 2}])
def test_a_batch_of_none_of_a_net_is_skipped(settings):
    found = []
    for chunk in {1, settings.get("chunk", 1)}:
        loop = FederatedLoop(FedAvg(num_classes=3, input_shape=(4,)), seed=1, **{**settings, "chunk": chunk})
        trainer(2).fit(loop, datamodule=data_of(clients=3))
        found.append(weights_of(loop))
        assert 0 <= loop.round_metrics["global/acc" if "global/acc" in loop.round_metrics else "val/acc"] <= 1
    assert equal(found[0], found[-1])


class Skips(Net):
    """A transfer hook skips the batches that `skipping` leaves out."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return None if batch[0][0, 0] > 0 else batch


METHODS = {
    name: kind
    for name in dir(methods)
    if inspect.isclass(kind := getattr(methods, name)) and issubclass(kind, ClientModule) and not kind.needs
}


class OfBias(methods.FedBABU):
    """FedBABU around a module, of which it must be told a part."""

    def __init__(self, **base):
        super().__init__(head="module.net.bias", **base)


METHODS["FedBABU"] = OfBias
MONITORS = [
    name
    for name in monitors.__all__
    if inspect.isclass(kind := getattr(monitors, name)) and issubclass(kind, monitors.Monitor)
    if kind is not monitors.Monitor
]
MONITORS_WITH = {
    "ClassCount": {"class_idx": 0},
    "SampleReduction": {"class_idx": 0},
    "FeatureProbe": {"layer": "module.net"},
    "GroupMetrics": {"groups": {"all": [0, 1]}, "metrics": MulticlassAccuracy(3)},
    "NeuronActivations": {"layer": "module.net"},
}
"""Arguments of monitors that need some."""


def skipped_by(hook, method=FedAvg, callbacks=(), **settings):
    """Fit for two rounds. A hook or a `collate_fn` skips the same batches."""
    made = Data("none", None)
    made.loader = lambda name: loader(collate_fn=default_collate if hook else skipping)
    data = FederatedDataModule.from_datamodule(made, num_clients=2, eval_batch_size=4, proxy_size=0.5)
    loop = FederatedLoop(method(module=Skips() if hook else Net()), seed=1, **settings)
    trainer(2, callbacks=list(callbacks)).fit(loop, datamodule=data)
    return loop


@pytest.mark.filterwarnings("ignore:a training batch is None")
@pytest.mark.parametrize("name", METHODS)
def test_a_batch_that_a_hook_skips_is_skipped_in_every_pass_of_a_method(name):
    """FedALA and others pass over the samples besides their training."""
    if "proxy" in METHODS[name].server_class.needs:
        pytest.skip("the proxy samples are one batch, which is skipped, and the method refuses to go without")
    by_hook, by_collate = (skipped_by(hook, METHODS[name]) for hook in (True, False))
    assert equal(weights_of(by_hook), weights_of(by_collate))
    assert by_hook.round_metrics == by_collate.round_metrics


@pytest.mark.filterwarnings("ignore:a training batch is None")
@pytest.mark.parametrize("name", [*MONITORS, "evaluate_clients_every"])
def test_a_batch_that_a_hook_skips_is_skipped_wherever_samples_are_measured(name, tmp_path):
    if name == "PredictedDistribution":
        pytest.skip("it reads transfer samples by their positions, of which none may be skipped")
    found = []
    for hook in (True, False):
        if name in MONITORS:
            monitor = getattr(monitors, name)(**MONITORS_WITH.get(name, {}))
            loop = skipped_by(hook, callbacks=[monitor])
        else:
            loop = skipped_by(hook, evaluate_clients_every=1)
        row = {key: value for key, value in loop.round_metrics.items() if not math.isnan(value)}
        # Seconds and memory are of the machine.
        found.append({key: value for key, value in row.items() if key not in ("cost/seconds", "cost/memory")})
    assert found[0] == found[1]


# --- the type of a batch ---


def as_it_is(items):
    """Collate to tuples, which Lightning keeps."""
    return tuple(default_collate(items))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Rewrites(Net):
    """Replaces the inputs within the batch, and remembers the type of each batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if isinstance(batch, list):
            batch[0] = batch[0] * 2
        return batch

    def seen(self, name, batch):
        self.called.append((name, type(batch)))

    def training_step(self, batch, batch_idx):
        self.seen("train", batch)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.seen("val", batch)

    def test_step(self, batch, batch_idx):
        self.seen("test", batch)

    def predict_step(self, batch, batch_idx):
        self.seen("predict", batch)
        return self(batch[0])


BATCHES = {
    "pair of tensors": (DATASET, None),
    "a part of it": (Subset(DATASET, range(20)), None),
    "three tensors": (TensorDataset(*DATASET.tensors, DATASET.tensors[1]), None),
    "a list of pairs": (list(DATASET), None),
    "named tuples": ([Pair(*item) for item in DATASET], None),
    "tuples of a collate_fn": (DATASET, as_it_is),
}
"""Datasets and their `collate_fn`."""


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_has_the_type_that_lightning_gives_it(kind, tmp_path):
    dataset, collate_fn = BATCHES[kind]
    found = []
    for is_federated in (False, True):
        made = Data("none", None)
        made.loader = lambda name: DataLoader(dataset, batch_size=4, collate_fn=collate_fn)
        module = Rewrites()
        fitted = module
        if is_federated:
            made = FederatedDataModule.from_datamodule(
                made, num_clients=1, eval_batch_size=4, shuffle=False, partition=FixedPartition([list(range(20))])
            )
            fitted = FederatedLoop(module, seed=1)
        run = trainer(1, tmp_path)
        run.fit(fitted, datamodule=made)
        run.test(fitted, datamodule=made)
        run.predict(fitted, datamodule=made)
        found.append((module.called, dict(module.state_dict())))
    assert sorted(found[0][0], key=str) == sorted(found[1][0], key=str)
    assert equal(found[0][1], found[1][1])


class Typed(pl.LightningModule):
    """Remembers the types of its batches. It has no hooks, so that it is stacked."""

    types = set()

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        self.types.add(type(batch))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_batch_of_several_clients_is_a_list_for_each(chunk):
    module = Typed()
    module.types.clear()
    made = Data("none", None)
    made.loader = lambda name: DataLoader(DATASET, batch_size=5)
    data = FederatedDataModule.from_datamodule(made, num_clients=4)
    loop = FederatedLoop(module, seed=1, chunk=chunk)
    trainer(1, limit_val_batches=0).fit(loop, datamodule=data)
    assert chunk == 1 or loop.engine.why_not() is None
    assert module.types == {list}


# --- steps that are set on the object ---


def step_of(module):
    def step(batch):
        module.called.append("mine")
        x, y = batch
        return nn.functional.cross_entropy(module(x), y)

    return step


@pytest.mark.filterwarnings("ignore:a training batch is None")
@pytest.mark.parametrize("late", [False, True])
def test_a_training_step_that_is_set_on_the_object_counts(late):
    """Before or after the client is made, with another number of arguments."""
    plain = Net()
    FederatedLoop(plain, seed=1)
    module = Net()
    if not late:
        module.training_step = step_of(module)
    loop = FederatedLoop(module, seed=1)
    if late:
        module.training_step = step_of(module)
    trainer(1).fit(loop, datamodule=data_of())
    assert "mine" in module.called
    assert "step" not in {call[0] for call in module.called}


@pytest.mark.filterwarnings("ignore:a training batch is None")
def test_a_step_that_is_set_between_two_fits_is_given_its_own_arguments():
    module = Net()
    loop = FederatedLoop(module, seed=1)
    trainer(1).fit(loop, datamodule=data_of())
    module.training_step = step_of(module)
    module.called.clear()
    trainer(1).fit(loop, datamodule=data_of())
    assert "mine" in module.called


def test_a_step_that_only_the_object_has_is_enough():
    class Bare(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)
            self.called = []

        def forward(self, x):
            return self.net(x)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(TypeError, match="a client needs a training_step, and Bare has none"):
        FederatedLoop(Bare())
    module = Bare()
    module.training_step = step_of(module)
    module.validation_step = lambda batch, batch_idx: module.log("mine", float(len(batch[1])))
    loop = FederatedLoop(module, seed=1)
    trainer(1).fit(loop, datamodule=data_of())
    assert "mine" in module.called
    assert loop.round_metrics["mine"] == 4.0
    wrong = Bare()
    wrong.training_step = lambda dataloader_iter: None
    with pytest.raises(TypeError, match="takes dataloader_iter"):
        FederatedLoop(wrong)


def test_a_step_set_on_a_client_counts_where_the_coefficients_make_it_fedavg():
    calls = []

    def step(batch, batch_idx):
        calls.append(batch_idx)
        return client.local_loss(batch, batch_idx)

    client = FedProx(mu=0.0)
    assert client.is_fedavg_equivalent
    client.training_step = step
    assert not client.is_fedavg_equivalent
    trainer(1).fit(FederatedLoop(client, seed=1), datamodule=toy_data())
    assert calls


PARTS = {
    "dp_sgd": lambda: dp_sgd(FedAvg(), noise_multiplier=1.0),
    "local_dp": lambda: local_dp(FedAvg(), noise_multiplier=1.0),
    "sign_flip": lambda: sign_flip(FedAvg(), [0]),
    "noise": lambda: noise(FedAvg(), [0]),
    "label_flip": lambda: label_flip(FedAvg(), [0]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_method_set_on_the_object_cannot_bypass_a_part(name):
    """Neither privacy nor an attack may be lost without a word."""
    kind = type(PARTS[name]()).__mro__[1]
    methods = [part for part in dir(FedAvg) if getattr(kind, part) is not getattr(FedAvg, part)]
    methods = [part for part in methods if not part.startswith("_") and callable(getattr(FedAvg, part))]
    assert methods
    for part in methods:
        client = PARTS[name]()
        setattr(client, part, getattr(FedAvg(), part))
        with pytest.raises(ValueError, match=f"does its work in {part}, and {part} set on the FedAvg itself"):
            trainer(1).fit(FederatedLoop(client, seed=1), datamodule=toy_data())


def test_a_step_set_on_the_module_is_made_private():
    module = Net()
    module.training_step = step_of(module)
    client = dp_sgd(module, noise_multiplier=1.0)
    trainer(1).fit(FederatedLoop(client, seed=1), datamodule=toy_data())
    assert "mine" in module.called
