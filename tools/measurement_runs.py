"""Runs a method for two rounds on toy data, to see what it sends and keeps, and with what it runs."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.aggregation import Aggregator, ServerModule, UpdateTransform
from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule, TensorSource
from fl_lightning.data.splits import Split
from fl_lightning.federation.checkpoint import SERVER_PARTS
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.metrics.history import plain_key
from fl_lightning.nets import Backbone
from fl_lightning.nets.backbone import Stages
from fl_lightning.types import Broadcast, ClientUpdate

CLIENTS = 5
PER_CLIENT = 8
CLASSES = 3
INPUTS = 64
"""Size of the toy: clients, all in every round; samples of each; classes; numbers in a sample."""


LOCAL_SGD = partial(SGD, lr=0.01, momentum=0.9)


class ToyNet(Backbone):
    """Linear, BatchNorm, ReLU and a head."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(prod(input_shape), 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def stages(self) -> Stages:
        return Stages(nn.Identity(), self.body, nn.Identity())


class ToyRegression(LightningModule):
    """A regression with the body of `ToyNet`: a task without logits.

    Args:
        optimizer: factory of its optimizer.
    """

    def __init__(self, optimizer: Callable[[Iterable[Any]], Optimizer]) -> None:
        super().__init__()
        self.net = ToyNet(1, (INPUTS,))
        self.optimizer_factory = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer_factory(self.parameters())


class ToyData(FederatedDataModule):
    """Random samples for every client, and every further split that a method may need.

    Args:
        regression: whether the targets are real numbers.

    Attributes:
        asked: names of the splits, besides those of every method, that were asked for.
    """

    def __init__(self, regression: bool = False) -> None:
        n = CLIENTS * PER_CLIENT
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, INPUTS, generator=generator)
        y = torch.arange(n) % CLASSES
        samples = (x, x[:, :1].clone() if regression else y)
        source = TensorSource(samples, samples, None if regression else CLASSES)
        extra: dict[str, Any] = dict.fromkeys(("proxy", "transfer", "shared"), source)
        super().__init__(source, CLIENTS, batch_size="full", extra_splits=extra)
        self.asked: set[str] = set()

    def split(self, name: str) -> Split:
        self.asked |= {name} - {"train", "test", "val"}
        return super().split(name)


class Contents(UpdateTransform):
    """Notes what the messages of the last round consist of, by name, in order.

    Attributes:
        down: from server to client.
        up: from client to server.
        round_idx: of that round; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down: dict[str, None] = {}
        self.up: dict[str, None] = {}
        self.round_idx: int | None = None

    def on_client(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        if self.round_idx != self.server.round_idx:
            self.down = {}
            self.up = {}
            self.round_idx = self.server.round_idx
        self.down.update(names_in(broadcast))
        return update


def names_in(message: Broadcast | ClientUpdate) -> dict[str, None]:
    """Name what a message consists of, in order."""
    return dict.fromkeys([*(["weights"] if message.weights else []), *message.extras])


class Started(Callback):
    """Notes whether the first round was begun, since an error before it is a refusal; and what clients send.

    Args:
        contents: counts every update as it is added, with the rule's statistics.
    """

    def __init__(self, contents: Contents) -> None:
        self.started = False
        self._contents = contents

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = True

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        """Note what an update holds."""
        self._contents.up.update(names_in(update))


@dataclass(frozen=True)
class Federation:
    """Parts of a federation; those that are None are FedAvg's.

    Args:
        client: class of the clients.
        optimizer: factory of the local optimizer.
        personal: patterns of entries that stay with each client.
        transform: factory of a transform of the updates.
        rule: factory of the aggregator.
        server_module: factory of the server module.
        server_optimizer: factory of the server optimizer.
        module_settings: settings that the client needs around a module.
    """

    client: type[ClientModule] = FedAvg
    optimizer: Callable[[Iterable[Any]], Optimizer] = LOCAL_SGD
    personal: tuple[str, ...] = ()
    transform: Callable[[], UpdateTransform] | None = None
    rule: Callable[[], Aggregator] | None = None
    server_module: Callable[[], ServerModule] | None = None
    server_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None
    module_settings: Mapping[str, Any] = field(default_factory=dict)

    def around_net(self, net: Callable[[int, tuple[int, ...]], Backbone] = ToyNet, **settings: Any) -> FederatedLoop:
        """Build the loop around a classifier, with further settings of it."""
        return self._loop(self.client(net=net, optimizer=self.optimizer), list(self.personal), settings)

    def around_module(self, **settings: Any) -> FederatedLoop:
        """Build the loop around a regression, with further settings of it."""
        personal = [pattern.replace("net.", "module.net.") for pattern in self.personal]
        client = self.client(module=ToyRegression(self.optimizer), **self.module_settings)
        return self._loop(client, personal, settings)

    def _loop(self, client: ClientModule, personal: list[str], settings: dict[str, Any]) -> FederatedLoop:
        own = [self.transform()] if self.transform else []
        return FederatedLoop(
            client,
            self.rule and self.rule(),
            server_module=self.server_module and self.server_module(),
            server_optimizer=self.server_optimizer,
            personal=personal,
            transforms=own + settings.pop("transforms", []),
            seed=0,
            **settings,
        )


@dataclass(frozen=True)
class Outcome:
    """Outcome of two rounds: bytes of messages, floats of states.

    Args:
        down: sent to a client in the second round.
        up: sent by a client in the second round.
        down_contents: the names of what is in `down`.
        up_contents: the names of what is in `up`.
        client_state: kept for a client between rounds, in the mean.
        server_state: kept by rule, server module and server optimizer besides the model.
        data: splits besides the clients' own.
        refused: the sentence with which the federation was refused at start; None: it was not.
    """

    down: float = 0
    up: float = 0
    down_contents: tuple[str, ...] = ()
    up_contents: tuple[str, ...] = ()
    client_state: float = 0
    server_state: float = 0
    data: tuple[str, ...] = ()
    refused: str | None = None


def measurement_run(federation: Federation, around_module: bool = False, rounds: int = 2) -> Outcome:
    """Run two rounds, or so many, around a classifier or around a regression.

    Raises:
        ValueError: after the start; before it, it is a refusal.
    """
    contents = Contents()
    data = ToyData(regression=around_module)
    first = Started(contents)
    try:
        build = federation.around_module if around_module else federation.around_net
        loop = build(transforms=[contents])
        trainer = Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            devices=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[first],
        )
        trainer.fit(loop, datamodule=data)
    except ValueError as error:
        if first.started:
            raise
        return Outcome(refused=str(error))
    kept = {name: value for name, value in loop.state_dict().items() if name.startswith(SERVER_PARTS)}
    moved = {plain_key(key): value for key, value in loop.round_metrics.items()}
    steps = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    return Outcome(
        down=moved["comm/bytes_down"] / CLIENTS,
        up=moved["comm/bytes_up"] / CLIENTS,
        down_contents=tuple(contents.down),
        up_contents=tuple(contents.up),
        client_state=num_floats(loop.store.state_dict()) / CLIENTS,
        server_state=num_floats([kept, steps]),
        data=tuple(sorted(data.asked)),
    )


def num_floats(tree: Any) -> float:
    """Count the floats in nested dicts and lists of tensors and numbers."""
    counts: list[int] = []
    apply_to_collection(tree, Tensor, lambda value: counts.append(value.numel() if value.is_floating_point() else 0))
    apply_to_collection(tree, float, lambda _: counts.append(1))
    return float(sum(counts))


@contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings and log messages within the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
