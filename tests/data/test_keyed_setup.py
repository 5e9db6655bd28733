"""Code of users that draws while data are set up: the same draws, whoever asks, and nobody else notices."""

import inspect
import json
import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split

from fl_lightning import FederatedDataModule, FederatedLoop, methods
from fl_lightning.client.module import ClientModule
from fl_lightning.data import DirichletPartition, NewSamples, Partition, Source, TensorSplit
from fl_lightning.data.schema import Schema
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.commands import say, working_in
from tests.processes.forked import run_script
from tests.toys import samples, trainer

HOOKS = [
    name for name in dir(pl.LightningDataModule) if name in ("prepare_data", "setup") or name.endswith("_dataloader")
]
NOT_HOOKS = ("attach", "teardown", "read", "keyed", "follow", "described", "limited_rows")
"""Methods in which a source neither reads nor draws."""

SOURCE_HOOKS = [
    name
    for name, member in vars(Source).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in NOT_HOOKS
]
PARTITION_HOOKS = [
    name
    for name, member in vars(Partition).items()
    if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
]
METHODS = [kind for kind in vars(methods).values() if isinstance(kind, type) and issubclass(kind, ClientModule)]


def draw():
    """A number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


class Hospital(pl.LightningDataModule):
    """Splits its samples at random where most users do, and draws in every other hook, too."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def note(self, hook):
        before = self.drawn.setdefault(hook, draw())
        assert before == self.drawn[hook]

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note("setup")
        x, y = samples(60)
        whole = TensorDataset(torch.cat([x, torch.arange(60.0)[:, None]], 1), y)
        self.train, self.val, self.held = random_split(whole, [30, 20, 10])

    def train_dataloader(self):
        self.note("train_dataloader")
        return DataLoader(self.train, 5)

    def val_dataloader(self):
        self.note("val_dataloader")
        return DataLoader(self.val, 5)

    def test_dataloader(self):
        self.note("test_dataloader")
        return DataLoader(self.held, 5)

    def predict_dataloader(self):
        self.note("predict_dataloader")
        return DataLoader(self.held, 5)


def numbers(split):
    return split.all()[0][:, -1].long().tolist()


def found(data):
    """The samples of every split and client, in order."""
    if not data._splits:
        data.prepare_data()
    data.setup("fit")
    every = numbers(data.split("train"))
    clients = [[every[i] for i in data.client_indices("train", k).tolist()] for k in range(data.num_clients)]
    return {**{name: numbers(data.split(name)) for name in ("train", "val", "test")}, "clients": clients}


def federated(seed=0, **settings):
    return FederatedDataModule(Hospital(), **{"num_clients": 3, "seed": seed, **settings})


def expected(seed=0):
    return found(federated(seed))


def test_every_hook_of_a_data_module_is_among_them():
    assert set(HOOKS) == {
        "prepare_data",
        "setup",
        *(f"{name}_dataloader" for name in ("train", "val", "test", "predict")),
    }
    assert set(HOOKS) <= set(vars(Hospital))


def drawn_from(state):
    """What the hooks drew, where the generators were in this state; they are afterwards, too."""
    pl.seed_everything(state)
    data = federated(seed=5)
    before = states()
    samples = found(data)
    data.predict_dataloader()
    assert states() == before
    return data.source.datamodule.drawn, samples


def test_hooks_draw_by_the_seed_of_the_data_and_leave_the_generators_alone():
    drawn, samples = drawn_from(1)
    assert set(drawn) == set(HOOKS)
    assert drawn_from(2) == (drawn, samples)
    assert len(set(drawn.values())) == len(drawn)  # the loaders do not repeat each other
    assert samples == expected(5) != expected(6)


def test_no_sample_is_in_two_splits_though_setup_is_called_for_every_stage():
    samples = expected()
    assert sorted([*samples["train"], *samples["val"], *samples["test"]]) == list(range(60))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_the_samples_are_the_same_for_every_method(kind, tmp_path):
    pl.seed_everything(len(kind.__name__))
    data = federated()
    client = kind(net=Perceptron)
    with torch.random.fork_rng():
        with suppress(TypeError, ValueError):  # it refuses what it is given, after the samples are set up
            trainer(0, tmp_path).fit(FederatedLoop(client), datamodule=data)
    assert data._splits
    assert found(data) == expected()


@pytest.mark.parametrize("kind", [partial(FedAvg, net=partial(Perceptron, hidden=hidden)) for hidden in ((), (9, 4))])
def test_the_samples_are_the_same_for_every_net_and_call(kind, tmp_path):
    loop = FederatedLoop(kind())
    data = federated()
    run = trainer(2, tmp_path, enable_checkpointing=True)
    run.fit(loop, datamodule=data)
    assert found(data) == expected()
    run.save_checkpoint(tmp_path / "a.ckpt")
    for verb in ("fit", "validate", "test", "predict"):
        torch.rand(3)
        again = federated()
        run = trainer(3, tmp_path)
        getattr(run, verb)(FederatedLoop(kind()), datamodule=again, ckpt_path=tmp_path / "a.ckpt")
        assert found(again) == expected()


def test_a_setup_that_fails_leaves_the_generators_alone():
    class Broken(Hospital):
        def test_dataloader(self):
            draw()
            raise NotImplementedError("there are none")

    data = FederatedDataModule(Broken(), num_clients=3)
    before = states()
    data.setup("fit")
    with pytest.raises(ValueError, match="no split 'test'"):
        data.split("test")
    assert states() == before


# --- sources and partitions of users


class Drawing(Source):
    """Draws in every hook."""

    def __init__(self):
        self.drawn = {}

    def prepare(self):
        self.drawn["prepare"] = draw()

    def load(self):
        self.drawn["load"] = draw()
        return TensorSplit(*samples(40)), None

    def tested(self, counted=False):
        self.drawn["tested"] = draw()
        return TensorSplit(*samples(10))

    def predicted(self):
        self.drawn["predicted"] = draw()
        return TensorSplit(*samples(10))

    def read_new(self, path, schema):
        self.drawn["read_new"] = draw()
        return NewSamples(TensorSplit(*samples(10)), names=range(10), column="row", class_names=None)

    def state_dict(self):
        self.drawn["state_dict"] = draw()
        return {"drawn": 1}

    def load_state_dict(self, state_dict):
        self.drawn["load_state_dict"] = draw()


class Dealing(Partition):
    """Draws in every method from the global generators in place of the one that it is given."""

    counts_owners = True

    def __init__(self):
        self.drawn = {}

    def count_owners(self, samples):
        self.drawn["count_owners"] = draw()
        return 3

    def __call__(self, samples, num_clients, generator):
        self.drawn["__call__"] = draw()
        return np.array_split(np.random.permutation(samples.size), num_clients)

    def partition_test(self, dealt, test, size=None):
        self.drawn["partition_test"] = draw()
        return np.array_split(np.random.permutation(test.size), len(dealt.parts))


@pytest.mark.parametrize("lazily", [False, True])
def test_hooks_of_sources_and_partitions_draw_by_the_seed_of_the_data(lazily):
    drawn = []
    for state, seed in ((1, 5), (2, 5), (2, 6)):
        pl.seed_everything(state)
        source = Drawing()
        partition = Dealing()
        extra = {"proxy": Drawing()}
        data = FederatedDataModule(
            source, num_clients=None, partition=partition, seed=seed, val_fraction=0.2 * lazily, extra_splits=extra
        )
        before = states()
        data.predict_new(__file__, Schema())
        data.prepare_data()
        data.setup("fit")
        data.client_indices("test", 0)
        data.predict_new(None)
        data.predict_dataloader()
        data.load_state_dict(data.state_dict())
        assert states() == before
        assert set(source.drawn) == set(SOURCE_HOOKS)
        assert set(partition.drawn) == set(PARTITION_HOOKS)
        drawn.append((source.drawn, partition.drawn, extra["proxy"].drawn, data.client_indices("train", 1).tolist()))
    first, same, other = drawn
    assert first == same
    for one, another in zip(first[:3], other[:3], strict=True):
        assert all(one[hook] != another[hook] for hook in one)


class Noisy(torch.utils.data.Dataset):
    """Labels that are drawn whenever a sample is read."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.zeros(2), int(np.random.randint(3))


def test_labels_that_are_drawn_are_read_as_one_and_the_same():
    counts = []
    for state in (1, 2):
        np.random.seed(state)
        data = FederatedDataModule.from_datasets(Noisy(), num_clients=2)
        data.setup("fit")
        counts.append(data.label_counts.tolist())
    assert counts[0] == counts[1]


class Restless(torch.utils.data.Dataset):
    """Draws whenever anything is asked of it."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        draw()
        return self.size

    def __getitem__(self, index):
        drawn = sum(draw())
        return {"x": torch.tensor([float(index), drawn]), "label": random.randrange(3), "patient": index // 3}


class RestlessModule(pl.LightningDataModule):
    @property
    def num_classes(self):
        draw()
        return 3

    @property
    def class_names(self):
        draw()
        return ("a", "b", "c")

    def train_dataloader(self):
        return DataLoader(Restless(60), 5, shuffle=True)

    def test_dataloader(self):
        return DataLoader(Restless(9), 5)

    def teardown(self, stage):
        draw()


ANSWERS = {
    "client": "1",
    "setting": "client",
    "stage": "fit",
    "name": "test",
    "split": "test",
    "client_id": 0,
    "round_idx": 0,
    "class_idx": 0,
    "count": 0,
    "asked": "test",
    "parts": [torch.arange(3)],
    "batches": 3,
    "device": torch.device("cpu"),
    "early": False,
    "state_dict": {"class_counts": {}},
}
"""Arguments of the data module's methods, by name."""
GIVEN = {
    "module": lambda: FederatedDataModule(RestlessModule(), num_clients=3, seed=5),
    "held back": lambda: FederatedDataModule(
        RestlessModule(), num_clients=3, seed=5, val_fraction=0.2, val_by="patient", proxy_size=4, by="patient"
    ),
    "datasets": lambda: FederatedDataModule.from_datasets(
        ConcatDataset([Restless(30), Restless(30)]), Restless(9), Restless(9), num_clients=3, seed=5
    ),
    "by class": lambda: FederatedDataModule.from_datasets(
        Restless(60), Restless(9), num_clients=3, seed=5, partition=DirichletPartition(0.5, min_samples=1)
    ),
    "further": lambda: FederatedDataModule(
        RestlessModule(), num_clients=None, by="patient", seed=5, extra_splits={"proxy": RestlessModule()}
    ),
}


@pytest.mark.filterwarnings("ignore:data.val_fraction holds back")
@pytest.mark.parametrize("name", GIVEN)
def test_nothing_that_is_asked_of_the_data_moves_the_generators(name):
    """Whatever the data module can be asked: none of its methods and properties is left out."""
    counts = []
    for state in (1, 2):
        pl.seed_everything(state, verbose=False)
        data = GIVEN[name]()
        for attribute, member in vars(FederatedDataModule).items():
            if attribute.startswith("_") or isinstance(member, classmethod):
                continue
            before = states()
            if inspect.isfunction(member):
                names = list(inspect.signature(member).parameters)[1:]
                getattr(data, attribute)(*map(ANSWERS.get, names))
            else:
                getattr(data, attribute)
            assert states() == before, attribute
        data.split("shared")
        assert states() == before
        counts.append((data.label_counts.tolist(), data.client_indices("test", 1).tolist()))
    assert counts[0] == counts[1]


# --- the command line, and several processes

OWN = """
import random
import numpy as np
import torch
from fl_lightning.data import IIDPartition, TensorSource
from fl_lightning.data.splits import TensorSplit
from fl_lightning.nets import Perceptron
from tests.data.test_keyed_setup import Hospital, draw
from tests.toys import samples

class Constructed(TensorSource):
    def __init__(self):
        drawn = torch.tensor(draw(), dtype=torch.float64)
        x, y = samples(40)
        x[:, :3] = drawn
        super().__init__((x, y), (x[:10], y[:10]))

class ConstructedModule(Hospital):
    def __init__(self):
        super().__init__()
        self.constructed = draw()

    def setup(self, stage):
        super().setup(stage)
        self.train.dataset.tensors[0][:, :3] = torch.tensor(self.constructed)

class ConstructedPartition(IIDPartition):
    def __init__(self):
        self.order = np.random.permutation(30)

    def __call__(self, samples, num_clients, generator):
        return np.array_split(self.order, num_clients)

"""
FIT = "fit -c method/{} --model.client.net fl_lightning.nets.Perceptron --data.num_clients 3 --trainer.max_epochs {}"


def of_command(line):
    """The data of a command line, as it sets them up."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        setup = FederatedDataModule.setup

        def noted(data, stage=None):
            setup(data, stage)
            kept.append(data)

        patch.setattr(FederatedDataModule, "setup", noted)
        said = say(line)
    assert said.code == 0, said
    return kept[-1]


def values(data):
    return [data.split(name).all()[0].tolist() for name in ("train", "test")]


@pytest.mark.parametrize("source", ["tests.data.test_keyed_setup.Hospital", "own.ConstructedModule", "own.Constructed"])
def test_the_samples_are_the_same_from_the_command_line(source, tmp_path, without_pictures):
    seen = []
    with working_in(tmp_path, OWN):
        for method, seed in (("fedavg", 0), ("fedntd", 7)):
            words = f"--data.source {source} --seed_everything {seed} --trainer.accelerator cpu"
            fit = f"{FIT.format(method, 2)} {words}"
            for line in (
                FIT.format(method, 1) + f" {words}",
                f"{fit} --ckpt_path last",
                f"test{fit[3:]} --ckpt_path last",
            ):
                seen.append(values(of_command(line)))
        line = f"partition --model.client FedAvg --data.num_clients 3 --data.source {source}"
        seen.append(values(of_command(line)))
        other = values(of_command(f"{line} --data.seed 4"))
    assert all(one == seen[0] for one in seen)
    assert other != seen[0]
    if "Hospital" in source:
        assert [int(row[-1]) for row in seen[0][0]] == expected()["train"]


def test_a_partition_that_draws_while_it_is_constructed_deals_the_same_samples(tmp_path, without_pictures):
    with working_in(tmp_path, OWN):
        words = "--data.partition own.ConstructedPartition --data.source tests.data.test_keyed_setup.Hospital"
        dealt = [
            of_command(f"{FIT.format(method, 1)} {words} --seed_everything {k}").client_indices("train", 0).tolist()
            for k, method in enumerate(("fedavg", "fedntd"))
        ]
    assert dealt[0] == dealt[1]


def test_the_samples_are_the_same_in_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    done = run_script(Path(__file__), str(tmp_path), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert seen == [expected()] * 2


class Note(pl.Callback):
    """Writes what each process has; the generators of both were in different states."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(found(trainer.datamodule)))


if __name__ == "__main__":
    import os
    import sys

    from fl_lightning.distributed import ClientParallelStrategy

    (folder,) = sys.argv[1:]
    torch.rand(11 * (1 + int(os.environ.get("LOCAL_RANK", "0"))))
    random.seed(os.getpid())
    run = trainer(1, folder, callbacks=[Note(folder)], strategy=ClientParallelStrategy(), devices=2)
    run.fit(FederatedLoop(FedAvg(net=Perceptron)), datamodule=federated())
