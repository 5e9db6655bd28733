"""Messages between client and server, jobs and results of an engine, and the views that each side has of the data."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Tensor]
"""Tensors by name."""

Batch = Any
"""A batch of a dataloader: for our own sources a pair (x, y) of tensors (B, ...) and (B,)."""

CONDITIONS = frozenset({"logits", "exposure", "start"})
"""Names that `needs` may hold besides splits."""

NetFactory = Callable[[int, "tuple[int, ...]"], nn.Module]
"""`(num_classes, input_shape) -> net`, input_shape without the batch dimension."""

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""`params -> optimizer`."""

ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward pass (the Trainer's precision)."""


# --- a user's own classes, recognised by what they can do: they may come from `lightning.pytorch`


@runtime_checkable
class TrainableModule(Protocol):
    """A LightningModule of `pytorch_lightning` or of its twin package; an `nn.Module` besides."""

    def configure_optimizers(self) -> Any:
        """Make optimizers and lr schedulers, in any form that Lightning allows."""

    def configure_callbacks(self) -> Any:
        """Make callbacks of the module's own."""

    def on_train_start(self) -> Any:
        """Begin a fit."""

    def lr_schedulers(self) -> Any:
        """Give the lr schedulers."""


@runtime_checkable
class DataModule(Protocol):
    """A LightningDataModule of `pytorch_lightning` or of its twin package."""

    def prepare_data(self) -> Any:
        """Fetch the data, on one process."""

    def train_dataloader(self) -> Any:
        """Make the loader of the training samples."""

    def val_dataloader(self) -> Any:
        """Make the loader of the validation samples."""

    def test_dataloader(self) -> Any:
        """Make the loader of the test samples."""

    def on_exception(self, exception: Any, /) -> Any:
        """Clean up after an error; a LightningModule, which may have the loaders too, has no such hook."""


# --- messages


@dataclass(frozen=True)
class Broadcast:
    """Message from the server to one client, at the start of an exchange.

    Args:
        round_idx: communication round, from 0.
        exchange: name of the exchange (`"train"` for methods with one).
        weights: shared entries of the model, or None where nothing of the model is sent.
        extras: further contents of the method's; tensors in it count as traffic.
        uploads: whether the client's shared entries come back.
    """

    round_idx: int
    exchange: str
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    uploads: bool = True


@dataclass(frozen=True)
class ClientUpdate:
    """Message from one client to the server, at the end of an exchange.

    Args:
        client_id: 0 ... N-1.
        num_samples: n_i, training samples of the client (0: no weight in any mean). A 0-d tensor where a transform
            may set it to 0 on the device.
        num_steps: K_i, optimizer steps taken in this exchange.
        exposure: E_i, the distance that the local optimizer travels on a scalar whose gradient is always 1
            (lr · K for plain SGD); NaN where it is not defined (Adam, several learning rates).
        weights: the client's shared entries, live: valid until the next result is drawn, so clone what is kept.
        extras: further contents of the method's (`ClientModule.reply`).
        included: False, in a 0-d tensor, where the update is left out and its values are replaced (`nonfinite: skip`).
    """

    client_id: int
    num_samples: int | Tensor
    num_steps: int
    exposure: float
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    included: bool | Tensor = True


# --- local training, and what both sides see of the data


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
        indices: positions (k,) int64 within the client's split: the phase trains on these samples only; None: on all.
        counts: whether the phase's steps are local steps (K_i, E_i, `max_local_steps`); one whose steps are not has
            the batches of the first passes over its split.
    """

    split: str = "train"
    epochs: int | None = None
    batch_size: int | Literal["full"] | None = None
    trains: tuple[str, ...] | None = None
    lr: float | None = None
    with_index: bool = False
    indices: Tensor | None = None
    counts: bool = True


class ClientData(Protocol):
    """The data of one client in one round, as `ClientModule.receive` and `reply` see it."""

    client_id: int
    round_idx: int
    drop_last: bool
    ended: bool
    """True where the batch given last is the last of its stream."""

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""

    @property
    def label_counts(self) -> Tensor:
        """Training samples of each class, (C,) int64."""

    @property
    def batch_size(self) -> int | Literal["full"]:
        """Samples per local step, as the data module says."""

    @property
    def num_samples(self) -> int:
        """Weight n_i of the client: its training samples; of a stream, those trained on in this exchange."""

    def size(self, split: str = "train") -> int:
        """Number of samples of a split; of a stream, those of its longest pass."""

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Samples per batch of a split: those given, else the data module's; `full` is the whole split."""

    def augments(self, split: str = "train") -> bool:
        """True where a sample differs from one local epoch to the next."""

    def all(self, split: str = "train") -> Batch:
        """The whole split as one batch, without augmentation."""

    def labels(self, split: str = "train") -> Tensor:
        """The classes of a split's samples, (n,) int64 on the CPU.

        Raises:
            ValueError: if the samples have no classes.
        """

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        """Batches of a split on the device; `epoch` None: in order and without augmentation, and the last one whole.

        With `with_index` each item is `(batch, positions)`, positions (B,) int64 within the client's split.
        """

    def restricted(self, split: str, positions: Tensor) -> "ClientData":
        """Restrict the client to some samples of a split.

        Args:
            split: name of the split; the others stay as they are.
            positions: of the samples that stay, (k,) int64 within the client's split. They are numbered 0 ... k-1 in
                this order from then on.
        """

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        """A CPU generator keyed by (seed, purpose, round, client); without `per_round` the same in every round."""


class ServerView(Protocol):
    """The server as its parts (server module, rule, transforms) see it; set before their `setup`."""

    module: nn.Module
    round_idx: int
    store: Any

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the shared entries that are trained."""

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""

    @property
    def cohort_size(self) -> int:
        """Clients in the smallest cohort of the run."""

    @property
    def weights(self) -> State:
        """The global model's shared entries, as they were when the exchange began. Not to be edited."""

    def size(self, client_id: int) -> int:
        """Training samples of a client."""

    def data(self, split: str) -> Any:
        """A split that the server owns (proxy, transfer, validation)."""

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator keyed by (seed, purpose, round)."""


# --- engines


class ClientJob(NamedTuple):
    """Job of an engine: one client to be trained in one exchange.

    Args:
        client_id: 0 ... N-1.
        broadcast: what the client was sent.
        data: the client's samples.
        memory: what the client kept, a copy of its own.
        personal: the client's personal entries, or None.
        start: shared entries that training starts from, where they are not just the broadcast's (nothing or a part
            of the model was sent).
    """

    client_id: int
    broadcast: Broadcast
    data: ClientData
    memory: dict[str, Any]
    personal: State | None = None
    start: State | None = None


class ClientResult(NamedTuple):
    """Result of a job: the client's update, and what stays with the client.

    Args:
        update: what is sent up; its weights are valid until the next result is drawn.
        memory: to be kept.
        personal: to be kept, or None.
        logged: the values that the client logged (a `MetricAccumulator`).
    """

    update: ClientUpdate
    memory: dict[str, Any]
    personal: State | None
    logged: Any


class ClientScore(NamedTuple):
    """Score of what a client would deploy, on its own samples.

    Args:
        client_id: 0 ... N-1.
        num_samples: that it was tested on. A 0-d tensor where it lies on the device, as `correct`.
        correct: right answers among them.
        metrics: what further metrics computed, by name, on the CPU.
    """

    client_id: int
    num_samples: float | Tensor
    correct: float | Tensor
    metrics: State


class Engine(Protocol):
    """Interface of what trains and tests clients, here or elsewhere: jobs, results and scores are plain values.

    An engine may draw all jobs before it yields its first result. A generator is closed where nobody wants the rest.
    """

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Train the client of every job and yield its result.

        Raises:
            ClientError: naming a client that failed; the jobs that were not drawn can be run.
        """

    def evaluate(
        self, jobs: Iterable[ClientJob], batch_size: int, metrics: Any = None, channels_last: bool = False
    ) -> Generator[ClientScore, None, None]:
        """Test what the client of every job would deploy, on its own `test` split, and yield its score.

        Args:
            jobs: as of an exchange `deployed`.
            batch_size: samples per batch.
            metrics: a collection of torchmetrics objects that is evaluated besides; or None.
            channels_last: whether batches of images (B, C, H, W) are laid out so for the net.
        """
