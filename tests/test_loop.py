"""What the loop refuses before it starts: its own arguments, Trainer settings, and what does not fit together."""

import copy
import pickle
from datetime import timedelta
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAvg, FedProx
from tests.toys import equal, fit, folded, samples, sgd, toy_data, trainer


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"local_epochs": -1}, "local_epochs must be at least 0, got -1"),
        ({"local_epochs": [1, -2]}, "local_epochs must be at least 0, got -2"),
        ({"max_local_steps": 0}, "max_local_steps must be at least 1, got 0"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be at least 1, got 0"),
        ({"evaluate_clients_every": 0}, "evaluate_clients_every must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"lr_decay": 0.0}, "lr_decay must be above 0, got 0.0"),
        ({"lr_decay": float("nan")}, "lr_decay must be above 0, got nan"),
        ({"clip_norm": -1.0}, "clip_norm must be above 0, got -1.0"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of error, skip, got 'ignore'"),
        (
            {"server_lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
            "server_lr_scheduler needs a server_optimizer, got none; set model.server_optimizer",
        ),
    ],
)
def test_an_argument_out_of_its_range_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FederatedLoop(FedAvg(), **folded(settings))


@pytest.mark.parametrize("settings", [{"local_epochs": 0}, {"local_epochs": [0, 1, 0, 2, 1]}])
def test_clients_may_train_for_no_epoch(settings):
    assert fit(FedAvg(), 1, **settings).trainer.global_step == 1


def test_a_list_of_local_epochs_needs_one_for_each_client():
    with pytest.raises(ValueError, match=r"needs one number per client \(5\), got 2"):
        fit(FedAvg(), 1, local_epochs=[1, 2])


class Mute(pl.LightningModule):
    """Without a training_step."""


class Hooked(FedAvg):
    def on_validation_model_zero_grad(self):
        return None


class Own(ServerModule):
    """Another method's."""


class NeedsOwn(FedAvg):
    server_class = Own


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            lambda: FederatedLoop(torch.nn.Linear(1, 1)),
            TypeError,
            "must be a LightningModule, of pytorch_lightning or lightning.pytorch, got Linear",
        ),
        (lambda: FederatedLoop(Mute()), TypeError, "a client needs a training_step, and Mute has none; define"),
        (
            lambda: FederatedLoop(Hooked()),
            TypeError,
            "Hooked overrides on_validation_model_zero_grad.*gradients are None",
        ),
        (
            lambda: FederatedLoop(NeedsOwn(), server_module=ServerModule()),
            ValueError,
            "NeedsOwn needs a Own, got ServerModule; leave",
        ),
        (lambda: FedAvg(num_classes=3, input_shape=(4,), module=Mute()), TypeError, "Mute has none"),
        (
            lambda: fit(FedAvg(num_classes=7), 1),
            ValueError,
            r"num_classes of the client .* the data \(3\)",
        ),
        (lambda: fit(FedAvg(input_shape=(5,)), 1), ValueError, r"input_shape of the client .* \(\(4,\)\), got \(5,\)"),
        (lambda: fit(FedAvg(), 1, initial_weights="nowhere.pt"), FileNotFoundError, "must be a file, got nowhere.pt"),
        (
            lambda: trainer(1).fit(FederatedLoop(FedAvg()), torch.utils.data.DataLoader(range(3))),
            TypeError,
            r"a FederatedLoop needs datamodule=FederatedDataModule\(...\), got NoneType",
        ),
        (
            lambda: fit(FedAvg(), 1, server_optimizer=torch.optim.LBFGS),
            ValueError,
            "one gradient a round, and LBFGS asks",
        ),
        (
            lambda: fit(
                FedAvg(), 1, server_optimizer=sgd(), server_lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
            ),
            ValueError,
            "without a metric, got ReduceLROnPlateau; take one that counts rounds",
        ),
        (lambda: fit(FedAvg(), 3, toy_data(schedule=[[0], [1]])), ValueError, "schedule names the cohorts of 2 rounds"),
    ],
)
def test_what_does_not_fit_together_is_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


CALLBACKS = [
    (ModelCheckpoint(every_n_train_steps=1), "counts batches.*use every_n_epochs"),
    (ModelCheckpoint(train_time_interval=timedelta(seconds=10)), "never writes in a federation; use every_n_epochs"),
    (StochasticWeightAveraging(0.1), "adds an epoch for BatchNorm, which would be a round; leave it out"),
    (LearningRateFinder(), "leave it out, and compare short runs with several model.client.opti"),
    (BatchSizeFinder(), "the Trainer's batch, which is a round; leave it out, and set data.batch_size"),
    (GradientAccumulationScheduler({0: 2}), "of which a round has one; leave it out, and set model.accumulate_grad_b"),
    (BackboneFinetuning(), "which is the server's; freeze and unfreeze loop.client by requires_grad_ in "),
    (ModelPruning("l1_unstructured"), "not those that the clients share; prune the trained client.ckpt"),
    (SpikeDetection(), "a step of the Trainer is a round; leave it out, and set model.faults.max_update_"),
]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val=1.0; set model.clip_norm"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2; set the model's"),
        ({"limit_train_batches": 0.5}, "limit_train_batches must stay unset, got 0.5; use data.participation"),
        ({"val_check_interval": 0.5}, "val_check_interval must be 1.0, got 0.5; use trainer.check_val_every_n_epoch"),
        ({"overfit_batches": 1}, "overfit_batches=1.* has no meaning in a federation; use a source with"),
        ({"precision": "bf16-true"}, "trainer.precision=bf16-true is refused; use bf16-mixed"),
        ({"precision": "16-true"}, "trainer.precision=16-true is refused; use bf16-mixed"),
        (
            {"strategy": "ddp", "devices": 2},
            "trainer.strategy must be client_parallel, got DDPStrategy with 2 devices; set that strategy or",
        ),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval must be 1.0, got a time; use trainer."),
        *(({"callbacks": [callback]}, sentence) for callback, sentence in CALLBACKS),
    ],
)
def test_a_trainer_setting_without_a_meaning_is_refused(settings, sentence):
    run = trainer(1, enable_checkpointing=True, **settings)
    loop = FederatedLoop(FedAvg(), seed=0)
    loop.trainer = run
    with pytest.raises(ValueError, match=sentence):
        loop.configure_callbacks()


@pytest.mark.parametrize("setting", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_the_refusal_comes_before_lightnings_own(setting):
    with pytest.raises(ValueError, match=r"set (model.clip_norm|the model's)"):
        trainer(1, **setting).fit(FederatedLoop(FedAvg(), seed=0), datamodule=toy_data())


@pytest.mark.parametrize("part", ["client", "aggregator", "server_module", "metrics", "store"])
def test_a_part_that_was_replaced_is_refused(part):
    loop = FederatedLoop(FedAvg())
    setattr(loop, part, FedAvg())
    with pytest.raises(ValueError, match=f"its {part} was replaced"):
        fit(None, 1, loop=loop)


def test_fast_dev_run_is_one_round():
    loop = FederatedLoop(FedAvg(), seed=0)
    run = trainer(5, fast_dev_run=True)
    run.fit(loop, datamodule=toy_data())
    assert run.global_step == 1


def test_fast_dev_run_of_several_batches_is_one_round_too():
    run = trainer(5, fast_dev_run=3)
    run.fit(FederatedLoop(FedAvg(), seed=0), datamodule=toy_data())
    assert run.global_step == 1


def test_a_second_fit_refuses_data_of_another_kind():
    loop = fit(FedAvg(), 1)
    x = torch.zeros(20, 4)
    y = torch.arange(20) % 5
    for source, sentence in (
        (
            TensorSource((x, y), (x, y), num_classes=5),
            r"num_classes of the client must be that of the data \(5\), got 3",
        ),
        (TensorSource((x[:, :2], y % 3), (x[:, :2], y % 3)), r"input_shape of the client .* \(\(2,\)\), got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit(FedAvg(), 1, FederatedDataModule(source, num_clients=2), loop=loop)


class Plain(pl.LightningModule):
    """Knows nothing of federations."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_initial_weights_of_a_module_are_those_it_has_outside_of_a_federation(tmp_path):
    alone = Plain()
    run = trainer(1)
    run.fit(alone, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(8)), batch_size=4))
    run.save_checkpoint(tmp_path / "alone.ckpt")
    for client in (Plain(), FedProx(module=Plain())):
        loop = fit(client, 0, initial_weights=tmp_path / "alone.ckpt")
        assert equal(loop.client.module.state_dict(), alone.state_dict())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"net.head.weight": torch.zeros(2, 2)}, "must be of the same client .* entry 'net.*' has shape"),
        ([1, 2], r"start.pt cannot be read as a checkpoint \(list\)"),
        (None, r"start.pt cannot be read as a checkpoint \(\w+\): it is damaged, or holds more than"),
    ],
)
def test_initial_weights_of_something_else_are_refused(tmp_path, content, sentence):
    path = tmp_path / "start.pt"
    path.write_text("trainer: {}\n") if content is None else torch.save(content, path)
    with pytest.raises(ValueError, match=sentence):
        fit(FedAvg(), 1, initial_weights=path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))])
def test_a_loop_can_be_copied_before_it_is_fitted(copied):
    loop = FederatedLoop(FedAvg(), seed=3)
    assert equal(fit(None, 1, loop=copied(loop)).state_dict(), fit(None, 1, loop=loop).state_dict())


def test_a_fitted_loop_can_be_copied():
    loop = fit(FedAvg(), 1)
    other = fit(FedAvg(), 1, loop=copy.deepcopy(loop))
    assert not equal(other.state_dict(), loop.state_dict())
    assert equal(other.state_dict(), fit(FedAvg(), 1, loop=loop).state_dict())
