"""The words that client, server and data share: what travels, and what each side is handed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Broadcast", "ClientData", "ClientUpdate", "NetFactory", "Phase", "ServerView", "State"]

State = dict[str, Tensor]
"""Entries of a model, or of anything kept like one, by name."""

Batch = Any
"""What a dataloader yields: for our own sources a pair (x, y) of tensors (B, ...) and (B,)."""


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to one client at the start of an exchange.

    Args:
        round_idx: communication round, from 0.
        exchange: name of the exchange (`"train"` for methods with one).
        weights: shared entries of the model, or None where nothing of the model is sent.
        extras: whatever else the method sends; tensors in it count as traffic.
    """

    round_idx: int
    exchange: str
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """What one client returns at the end of an exchange.

    Args:
        client_id: 0 ... N-1.
        num_samples: n_i, training samples of the client (0: no weight in any mean). A 0-d tensor where
            `nonfinite: skip` may set it to 0 on the device.
        num_steps: K_i, optimizer steps taken in this exchange.
        exposure: E_i, the distance that the local optimizer travels on a scalar whose gradient is always 1
            (lr · K for plain SGD); NaN where it is not defined (Adam, several learning rates).
        weights: the client's shared entries, live: valid until the next client is loaded, so clone what is kept.
        extras: whatever else the method sends up (`ClientModule.reply`).
        finite: False, in a 0-d tensor, where `nonfinite: skip` has put zeros in place of what was not finite.
    """

    client_id: int
    num_samples: int | Tensor
    num_steps: int
    exposure: float
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    finite: bool | Tensor = True


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Args:
        split: name of the split trained on.
        epochs: passes over it; None: the loop's `local_epochs`.
        batch_size: samples per step, `full` for all; None: the data module's.
        trains: names (or `fnmatch` patterns) of the parameters that are trained; None: all trainable ones.
        lr: learning rate of the phase before the loop's `lr_decay`; None: the optimizer's own.
        with_index: `training_step` gets `(batch, positions)`, positions (B,) int64 within the split.
    """

    split: str = "train"
    epochs: int | None = None
    batch_size: int | Literal["full"] | None = None
    trains: tuple[str, ...] | None = None
    lr: float | None = None
    with_index: bool = False


class ClientData(Protocol):
    """The data of one client in one round, as `ClientModule.receive` and `reply` see it."""

    client_id: int
    round_idx: int

    @property
    def num_clients(self) -> int:
        """N."""

    @property
    def batch_size(self) -> int | Literal["full"]:
        """Samples per local step, as the data module says; `full`: all of a client's."""

    @property
    def label_counts(self) -> Tensor:
        """Training samples of each class, (C,) int64."""

    def size(self, split: str = "train") -> int:
        """Number of samples of a split."""

    def all(self, split: str = "train") -> Batch:
        """The whole split as one batch, without augmentation."""

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        """Batches of a split on the device; `epoch` None: in order and without augmentation.

        With `with_index` each item is `(batch, positions)`, positions (B,) int64 within the client's split.
        """

    def restricted(self, split: str, positions: Tensor) -> "ClientData":
        """The same client with only some samples of a split.

        Args:
            split: name of the split; the others stay as they are.
            positions: of the samples that stay, (k,) int64 within the client's split. They are numbered 0 ... k-1 in
                this order from then on.
        """

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        """A CPU generator keyed by (seed, purpose, round, client); not `per_round`: the same one in every round."""


class ServerView(Protocol):
    """What an aggregator sees of the server; set before `Aggregator.setup`."""

    module: nn.Module
    trainable: tuple[str, ...]
    round_idx: int
    store: Any

    @property
    def num_clients(self) -> int:
        """N."""

    @property
    def weights(self) -> State:
        """The global model's shared entries, as they were when the exchange began. Not to be edited."""

    def data(self, split: str) -> Any:
        """A split that the server owns (proxy, transfer, validation)."""

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator keyed by (seed, purpose, round)."""


NetFactory = Callable[[int, "tuple[int, ...]"], nn.Module]
"""`(num_classes, input_shape) -> net`, input_shape without the batch dimension."""
