"""Runs a method for two rounds on toy data, to see what it sends and keeps, and with what it runs."""

from collections.abc import Callable, Iterable, Mapping
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
from tools.quiet import quiet_trainer

CLIENTS = 5
"""Number of clients, which all take part in every round."""

PER_CLIENT = 8
"""Samples of each client."""

CLASSES = 3
INPUTS = 64
"""Numbers in a sample."""

LOCAL_SGD = partial(SGD, lr=0.01, momentum=0.9)


class ToyNet(Backbone):
    """Has a linear layer, BatchNorm, ReLU and a head."""

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
    """Is a regression with the body of `ToyNet`: a task without logits.

    Args:
        optimizer: Factory of its optimizer.
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
    """Holds random samples for every client, and every further split that a method may need.

    Args:
        regression: Whether the targets are real numbers.

    Attributes:
        asked: Names of the splits that were asked for, besides those of every method.
    """

    def __init__(self, *, regression: bool = False) -> None:
        n = CLIENTS * PER_CLIENT
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, INPUTS, generator=generator)
        if regression:
            samples = (x, x[:, :1].clone())
            source = TensorSource(train=samples, test=samples)
        else:
            samples = (x, torch.arange(n) % CLASSES)
            source = TensorSource(train=samples, test=samples, num_classes=CLASSES)
        extra_splits: dict[str, Any] = {"proxy": source, "transfer": source, "shared": source}
        super().__init__(source, CLIENTS, batch_size="full", extra_splits=extra_splits)
        self.asked: set[str] = set()

    def split(self, name: str) -> Split:
        self.asked |= {name} - {"train", "test", "val"}
        return super().split(name)


class Contents(UpdateTransform):
    """Notes the contents of the last round's messages, by name, in order.

    Attributes:
        down: Contents from server to client.
        up: Contents from client to server.
        round_idx: Index of that round, or None before the first one.
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
    """Name the contents of a message, in order."""
    names: dict[str, None] = {"weights": None} if message.weights else {}
    return names | dict.fromkeys(message.extras)


class Started(Callback):
    """Notes whether the first round has begun, since an error before it is a refusal, and what the clients send.

    Args:
        contents: Takes the names in every update as it is added, with the rule's statistics.
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
    """Holds the parts of a federation. A part that is None is FedAvg's.

    Args:
        client: Class of the clients.
        optimizer: Factory of the local optimizer.
        personal: Patterns of entries that stay with each client.
        transform: Factory of a transform of the updates.
        rule: Factory of the aggregator.
        server_module: Factory of the server module.
        server_optimizer: Factory of the server optimizer.
        module_settings: Settings that the client needs around a module.
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
        """Build the loop around a classifier, with further settings of the loop."""
        client = self.client(net=net, optimizer=self.optimizer)
        return self._loop(client, list(self.personal), settings)

    def around_module(self, **settings: Any) -> FederatedLoop:
        """Build the loop around a regression, with further settings of the loop."""
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
    """Holds what two rounds have shown.

    Args:
        down: Bytes sent to a client in the second round.
        up: Bytes sent by a client in the second round.
        down_contents: Names of the contents of `down`.
        up_contents: Names of the contents of `up`.
        client_state: Floats kept for a client between rounds, in the mean.
        server_state: Floats kept by rule, server module and server optimizer besides the model.
        data: Splits besides the clients' own.
        refused: The sentence with which the federation was refused at the start. None means that it ran.
    """

    down: float = 0
    up: float = 0
    down_contents: tuple[str, ...] = ()
    up_contents: tuple[str, ...] = ()
    client_state: float = 0
    server_state: float = 0
    data: tuple[str, ...] = ()
    refused: str | None = None


def measurement_run(federation: Federation, *, around_module: bool = False, rounds: int = 2) -> Outcome:
    """Run a federation on toy data.

    Args:
        federation: The parts of the federation.
        around_module: Whether the client is one around a regression instead of a classifier.
        rounds: Number of rounds.

    Raises:
        ValueError: A round failed. Before the first round it is a refusal, which the outcome holds.
    """
    contents = Contents()
    data = ToyData(regression=around_module)
    first = Started(contents)
    try:
        build = federation.around_module if around_module else federation.around_net
        loop = build(transforms=[contents])
        trainer = quiet_trainer(rounds, devices=1, limit_val_batches=0, callbacks=[first])
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

    def count(value: Tensor) -> None:
        if value.is_floating_point():
            counts.append(value.numel())

    apply_to_collection(tree, Tensor, count)
    apply_to_collection(tree, float, lambda _: counts.append(1))
    return float(sum(counts))
