"""Variants of the benchmark: the floor's work as a federated fit, and a fit whose rounds are empty."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from bench.workloads import LAM, Reading, Result, Workload, now, transformer
from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import RoundProgressBar
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.data.loaders import evaluation_batch_size
from fl_lightning.engines.cohort import ignores_module
from fl_lightning.methods import Ditto, FedAvg, FedRep
from fl_lightning.nets import Backbone, FedNTDCNN, Perceptron, ResNet
from fl_lightning.nets.backbone import BodyAndHead
from fl_lightning.runs.loggers import RoundCSVLogger, RunTensorBoard

BARE: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
"""Settings of a Trainer that does nothing besides the fit."""


class Transformer(BodyAndHead):
    """Is the bare net of `text`, cut before its last layer."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        *body, head = transformer()
        assert isinstance(head, nn.Linear)
        self.body = nn.Sequential(*body)
        self.head = head


NETS: dict[str, Callable[..., Backbone]] = {
    "tiny": Perceptron,
    "cnn": FedNTDCNN,
    "resnet": partial(ResNet, stem="cifar"),
    "text": Transformer,
    "personal": FedNTDCNN,
    "ditto": FedNTDCNN,
    "adam": Perceptron,
}
"""Nets of the package by workload."""


@ignores_module
class Clock(Callback):
    """Reads the clocks at the start of every round, so that a round lasts until all that follows on it is done."""

    def __init__(self) -> None:
        self.read: list[Reading] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.read.append(now())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.read.append(now())


@ignores_module
class Pause(Callback):
    """Pauses before every round and after the last, as the workload says.

    Args:
        pause: Function that is called with the accuracy so far.
    """

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause_after(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause_after(trainer)

    def _pause_after(self, trainer: Trainer) -> None:
        accuracy = trainer.callback_metrics.get("global/acc", 0.0)
        self._pause(float(accuracy))


def train(work: Workload) -> Result:
    """Run the variant `train`: FedAvg with one evaluation of the global model a round and nothing else."""
    return federate(work, **BARE)


def train_cohort(work: Workload) -> Result:
    """Run the variant `train-cohort`: `train` with all clients of a round trained at once."""
    return federate(work, chunk=work.cohort_size, **BARE)


def everything_cohort(work: Workload) -> Result:
    """Run the variant `all-cohort`: `all` with all clients of a round trained at once."""
    return everything(work, chunk=work.cohort_size)


def everything(work: Workload, chunk: int = 1) -> Result:
    """Run the variant `all`: `train` with bar, CSV and TensorBoard every round, and a checkpoint every tenth."""
    with TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(os.path.join(folder, "checkpoints"), every_n_epochs=10)
        loggers = [RoundCSVLogger(folder), RunTensorBoard(folder)]
        callbacks = [RoundProgressBar(), checkpoint]
        return federate(work, callbacks=callbacks, chunk=chunk, logger=loggers, log_every_n_steps=1)


def federate(work: Workload, callbacks: Sequence[Callback] = (), *, chunk: int = 1, **settings: Any) -> Result:
    """Fit a workload as a federation.

    Args:
        work: The workload.
        callbacks: Callbacks of the Trainer.
        chunk: Number of clients that are trained at once.
        settings: Further settings of the Trainer.
    """
    loop, data = federation(work, chunk)
    pauses = [] if work.pause is None else [Pause(work.pause)]
    readings, trainer = fit(loop, data, work.rounds, callbacks=[*pauses, *callbacks], **settings)
    return readings, float(trainer.callback_metrics["global/acc"])


def federation(work: Workload, chunk: int = 1) -> tuple[FederatedLoop, FederatedDataModule]:
    """Make the loop of a workload's method from its first weights, and the data of its clients.

    Args:
        work: The workload.
        chunk: Number of clients that are trained at once.
    """
    bare = work.first_net()

    def net(num_classes: int, input_shape: tuple[int, ...]) -> Backbone:
        made = NETS[work.name](num_classes, input_shape)
        # The bare net has the same entries in the same order, with other names.
        entries = zip(made.state_dict(), bare.state_dict().values(), strict=True)
        made.load_state_dict(dict(entries))
        return made

    methods: dict[str, Callable[..., ClientModule]] = {
        "FedAvg": FedAvg,
        "FedRep": partial(FedRep, head_epochs=work.local_epochs),
        "Ditto": partial(Ditto, lam=LAM, personal_epochs=work.local_epochs),
    }
    client = methods[work.method](net=net, optimizer=work.optimizer)
    loop = FederatedLoop(client, local_epochs=work.local_epochs, chunk=chunk)
    return loop, clients_data(work)


def clients_data(work: Workload, **extra_splits: TensorSource) -> FederatedDataModule:
    """Make the data of a workload's clients, each with its own samples in their order.

    Args:
        work: The workload.
        extra_splits: Further splits that a method needs, by name.
    """
    samples, test = work.samples()
    owned = [list(work.owned(client_id)) for client_id in range(work.num_clients)]
    return FederatedDataModule(
        TensorSource(samples, test, num_classes=work.num_classes),
        num_clients=work.num_clients,
        partition=FixedPartition(owned),
        batch_size=work.batch_size,
        shuffle=False,
        schedule=work.cohorts(work.rounds),
        extra_splits=dict(extra_splits),
    )


class EmptyRound(LightningModule):
    """Has a training step that only steps an optimizer, because Lightning counts steps by that."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is evaluated."""

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=1.0)


class Batches(LightningDataModule):
    """Has one batch for training, and as many for evaluation as the package makes of the test samples.

    Args:
        inputs: Inputs of the test samples.
    """

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        batch_size = evaluation_batch_size(torch.device("cpu"), inputs.shape[1:])
        self.evaluated = math.ceil(len(inputs) / batch_size)

    def train_dataloader(self) -> list[int]:
        return [0]

    def val_dataloader(self) -> list[int]:
        return [0] * self.evaluated


def empty(work: Workload) -> Result:
    """Run the variant `empty`: the rounds of `train` without any client or evaluation. The accuracy is NaN."""
    _, (inputs, _) = work.samples()
    readings, _ = fit(EmptyRound(), Batches(inputs), work.rounds, **BARE)
    return readings, float("nan")


def fit(
    module: LightningModule,
    data: LightningDataModule | DataLoader[Any],
    rounds: int,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> tuple[list[Reading], Trainer]:
    """Fit a module on a CPU.

    Args:
        module: The module.
        data: Its data, or its training batches.
        rounds: Number of rounds, or of epochs of a plain module.
        callbacks: Callbacks of the Trainer.
        settings: Further settings of the Trainer.

    Returns:
        Readings of the clocks at the start of every round and at the end of the last, and the Trainer.
    """
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[clock, *callbacks],
        **settings,
    )
    # `fit` takes a data module as its train_dataloaders, too.
    trainer.fit(module, data)
    return clock.read, trainer


VARIANTS: dict[str, Callable[[Workload], Result]] = {
    "train": train,
    "train-cohort": train_cohort,
    "all": everything,
    "all-cohort": everything_cohort,
    "empty": empty,
}
