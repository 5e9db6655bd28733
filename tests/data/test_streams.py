"""Clients whose samples are streams: FedAvg is the loop by hand, and what needs a length or an index is refused."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import DirichletPartition
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedNTD
from fl_lightning.monitors import ClientTable
from tests.commands import refusal, say, working_in
from tests.toys import equal, fit, sgd, trainer, weights_of
from tests.user_data import Sensor, Sensors, points
from tests.user_modules import Plain


class Sgd(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def federated(**settings):
    return FederatedDataModule.from_datamodule(Sensors(), **{"num_clients": 4, **settings})


def by_hand(module, rounds, steps, epochs, drop_last=False, every=1):
    """Stock Trainers over the same loaders, and the mean weighted by the samples of the steps that were taken."""
    for _ in range(rounds):
        states = []
        seen = []
        for loader in Sensors(drop_last=drop_last).train_dataloader().values():
            client = copy.deepcopy(module)
            sizes = []

            class Counts(pl.Callback):
                def __init__(self, sizes):
                    self.sizes = sizes

                def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                    self.sizes.append(len(batch[1]))

            run = trainer(epochs, max_steps=steps, callbacks=[Counts(sizes)], accumulate_grad_batches=every)
            run.fit(client, train_dataloaders=loader)
            states.append(client.state_dict())
            seen.append(sum(sizes))
        module.load_state_dict(weighted_mean(states, seen))
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("steps", "epochs", "settings"),
    [(2, 1, {}), (7, 1, {}), (5, 2, {}), (7, 1, {"drop_last": True}), (2, 1, {"every": 2})],
    ids=["cut", "whole", "two passes", "drop_last", "accumulated"],
)
def test_fedavg_is_the_loop_by_hand(steps, epochs, settings):
    pl.seed_everything(3, verbose=False)
    module = Sgd()
    hand = by_hand(copy.deepcopy(module), 2, steps, epochs, **settings)
    every = settings.pop("every", 1)
    data = FederatedDataModule.from_datamodule(Sensors(**settings), num_clients=4)
    loop = fit(module, 2, data, max_local_steps=steps, local_epochs=epochs, accumulate_grad_batches=every)
    assert equal(dict(loop.client.module.state_dict()), hand)


def test_datasets_are_taken_as_their_loaders_are():
    def run(data):
        pl.seed_everything(3, verbose=False)
        return weights_of(fit(Sgd(), 2, data, max_local_steps=3))

    val = TensorDataset(*points(30, 9))
    streams = {place: Sensor(place, n) for place, n in enumerate(Sensors().lengths)}
    own = FederatedDataModule.from_datasets(streams, val=val, batch_size=4)
    assert own.num_clients == 4
    assert equal(run(own), run(federated()))
    assert equal(run(federated(schedule=[[3, 0, 1], [2, 1]])), run(federated(schedule=[[0, 1, 3], [1, 2]])))


def test_resume_is_exact(tmp_path):
    def run(rounds, **more):
        pl.seed_everything(3, verbose=False)
        loop = FederatedLoop(Plain(), max_local_steps=3, seed=1)
        best = trainer(rounds, tmp_path, **more)
        return loop, best

    loop, whole = run(3)
    whole.fit(loop, datamodule=federated())
    first, one = run(1, enable_checkpointing=True, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path, "one")])
    one.fit(first, datamodule=federated())
    resumed, rest = run(3)
    rest.fit(resumed, datamodule=federated(), ckpt_path=tmp_path / "one.ckpt")
    assert equal(weights_of(resumed), weights_of(loop))


class Told(Sensor):
    """Begins each round where the round before has ended, since it is told which it is."""

    def set_epoch(self, epoch):
        self.place = 100 + epoch


def test_a_stream_is_told_the_round():
    seen = []

    class Sees(Sgd):
        def training_step(self, batch, batch_idx):
            seen.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    data = FederatedDataModule.from_datasets({0: Told(0)}, batch_size=4)
    fit(Sees(), 2, data, max_local_steps=1)
    wanted = [next(iter(DataLoader(Sensor(100 + round_idx), 4)))[1].tolist() for round_idx in range(2)]
    assert seen == wanted


def test_workers_read_streams():
    data = FederatedDataModule.from_datamodule(Sensors(num_workers=1), num_clients=4)
    pl.seed_everything(3, verbose=False)
    one = fit(Sgd(), 1, data, max_local_steps=2)
    pl.seed_everything(3, verbose=False)
    assert equal(weights_of(one), weights_of(fit(Sgd(), 1, federated(), max_local_steps=2)))


def test_a_net_and_a_method_of_logits_take_streams_whose_shape_is_given():
    source = {place: Sensor(place) for place in range(3)}
    test = TensorDataset(*points(30, 9))
    data = FederatedDataModule.from_datasets(source, test, num_classes=3, input_shape=(4,), batch_size=4)
    loop = fit(FedNTD(optimizer=sgd(0.05)), 3, data, max_local_steps=5, local_epochs=2, evaluate_clients_every=3)
    assert loop.round_metrics["global/acc"] > 0.5
    assert loop.round_metrics["local/alma"] > 0.5  # on samples drawn for each client


def test_a_pass_of_a_method_s_own_ends_where_training_does():
    data = federated()
    data.setup("fit")
    data.limit_streams(3)
    views = data.view(0, 0), data.view(1, 0)
    assert [len(view.all()[1]) for view in views] == [12, 10]
    assert [len(y) for _, y in views[0].batches("train")] == [4, 4, 4]
    assert [len(y) for _, y in views[1].batches("train")] == [4, 4, 2]
    assert views[1].num_samples == 0
    positions = [index.tolist() for _, index in views[1].batches("train", epoch=0, with_index=True)]
    assert positions == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert views[1].num_samples == 10
    assert data.size(1, 0) == 12


def test_sizes_of_the_callbacks_are_those_of_a_pass(tmp_path):
    fit(Sgd(), 1, federated(), max_local_steps=2, callbacks=[ClientTable(dirpath=tmp_path)])
    header, *rows = (tmp_path / "clients.csv").read_text().splitlines()
    column = header.split(",").index("samples")
    assert {row.split(",")[column] for row in rows} == {"8"}


MIXED = {0: Sensor(0), 1: TensorDataset(*points(8, 0))}


@pytest.mark.parametrize(
    ("settings", "loop", "words"),
    [
        ({}, {"max_local_steps": None}, "streams, of which a pass may have no end: model.max_local_steps must be set"),
        ({}, {"chunk": 2}, "model.chunk must be 1, got 2"),
        ({"num_clients": 3}, {}, "data.num_clients must be 4; got 3"),
        ({"partition": DirichletPartition(1.0)}, {}, "data.partition must stay unset; got DirichletPartition"),
        ({"batch_size": "full"}, {}, "data.batch_size must be a number; got full"),
        ({"proxy_size": 4}, {}, r"no share can be held back: .* data.extra_splits, in place; got \['proxy'\]"),
    ],
)
def test_what_needs_a_length_is_refused(settings, loop, words):
    with pytest.raises(ValueError, match=words):
        fit(Sgd(), 1, federated(**settings), **{"max_local_steps": 2, **loop})


@pytest.mark.parametrize(
    ("streams", "error", "words"),
    [
        ({1: Sensor(0), 2: Sensor(1)}, ValueError, r"the client ids 0 ... N-1, got \[1, 2\]; number the clients from"),
        (MIXED, TypeError, "must hold an IterableDataset for each, got Sensor, TensorDataset; join map-style"),
        (Sensor(0), TypeError, r"or a stream for each client \({client_id: dataset}\)"),
    ],
)
def test_what_is_no_stream_for_each_client_is_refused(streams, error, words):
    with pytest.raises(error, match=words):
        FederatedDataModule.from_datasets(streams, num_clients=2).setup("fit")


class Uneven(Sensors):
    def train_dataloader(self):
        return {place: DataLoader(Sensor(place), batch_size=2 + place) for place in range(2)}


class Unbatched(Sensors):
    def train_dataloader(self):
        return {0: DataLoader(Sensor(0), batch_size=None)}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Uneven, r"the same batch_size and drop_last, got \(2, False\), \(3, False\)"),
        (Unbatched, "the DataLoader of a stream must have a batch_size"),
    ],
)
def test_loaders_of_streams_that_cannot_be_read_are_refused(module, words):
    with pytest.raises(ValueError, match=words):
        FederatedDataModule.from_datamodule(module(), num_clients=2).setup("fit")


def test_labels_of_streams_are_not_known():
    data = federated()
    with pytest.raises(ValueError, match=r"label_counts needs .* those of a stream are not known"):
        _ = data.view(0, 0).label_counts if data.setup("fit") or data.limit_streams(1) is None else None
    with pytest.raises(ValueError, match="set_class_count needs samples with integer labels"):
        data.set_class_count(0, 0, 1)
    with pytest.raises(ValueError, match="takes by= or a stream for each client, got both"):
        FederatedDataModule.from_datasets({0: Sensor(0)}, by="place")


OWN = """
from tests.user_data import Sensors
from tests.user_modules import Classifier

class Mine(Classifier):
    pass

class Places(Sensors):
    def __init__(self):
        super().__init__()
"""
LINE = (
    "fit --trainer.accelerator cpu --trainer.max_epochs 2 --model.client own.Mine --data.source own.Places "
    "--data.num_clients 4"
)


@pytest.mark.usefixtures("without_pictures")
def test_from_the_command_line(tmp_path):
    with working_in(tmp_path, OWN):
        said = say(f"{LINE} --model.max_local_steps 3")
        assert said.code == 0, said
        assert "model.max_local_steps must be set, got None" in refusal(LINE, 1)
