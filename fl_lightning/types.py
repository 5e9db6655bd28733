"""Messages, jobs and results of an engine, members of a round, and the protocols that several rooms share."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.functional import state as S
from fl_lightning.utils.settings import check_above, check_count

State = S.State
"""Tensors by name."""

Batch = Any
"""A batch of a dataloader. The sources of this package give a pair (x, y) of tensors (B, ...) and (B,)."""

CONDITIONS = frozenset({"logits", "accumulated_lr", "start", "clients", "labels"})
"""Names that `needs` may hold, in addition to the names of splits. `labels`: the labels of these splits are read."""

Sent = Literal[
    "weights", "statistics", "control", "importance", "prototypes", "label counts", "logits", "personal means"
]
"""Contents that a method sends up. For `personal means` the server averages personal entries, to evaluate them."""

Read = Literal["label counts", "labels", "samples", "batches"]
"""What a client reads of its training data, in addition to the batches of its training steps."""

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer of parameters or parameter groups."""

ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward pass, which holds the precision of the Trainer."""


# --- a user's own classes ---
#
# They are recognized by their methods, because they may come from `lightning.pytorch`.


@runtime_checkable
class TrainableModule(Protocol):
    """Matches a LightningModule of `pytorch_lightning` or of `lightning.pytorch`."""

    def configure_optimizers(self) -> Any:
        """Make optimizers and learning-rate schedulers, in any form that Lightning allows."""

    def configure_callbacks(self) -> Any:
        """Make the callbacks of the module."""

    def on_train_start(self) -> Any:
        """Act at the start of a fit."""

    def lr_schedulers(self) -> Any:
        """Return the learning-rate schedulers."""


@runtime_checkable
class DataModule(Protocol):
    """Matches a LightningDataModule of `pytorch_lightning` or of `lightning.pytorch`."""

    def prepare_data(self) -> Any:
        """Download and prepare the data, in one process."""

    def train_dataloader(self) -> Any:
        """Make the loader of the training samples."""

    def val_dataloader(self) -> Any:
        """Make the loader of the validation samples."""

    def test_dataloader(self) -> Any:
        """Make the loader of the test samples."""

    def on_exception(self, exception: Any, /) -> Any:
        """Clean up after an error. A LightningModule with loaders does not have this hook."""


@runtime_checkable
class AnyCallback(Protocol):
    """Matches a Callback of `pytorch_lightning` or of `lightning.pytorch`."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any, /) -> Any:
        """Clean up after an error. A data module is given the error only."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any, /) -> Any:
        """Act before gradients are set to zero. A LightningModule is given the optimizer only."""


@runtime_checkable
class AnyLogger(Protocol):
    """Matches a Logger of `pytorch_lightning` or of `lightning.pytorch`."""

    def log_metrics(self, metrics: Any, step: Any = None, /) -> Any:
        """Write values of a step."""

    def finalize(self, status: Any, /) -> Any:
        """Close what is open."""

    def after_save_checkpoint(self, checkpoint_callback: Any, /) -> Any:
        """Act after a checkpoint was written."""


# --- messages ---


@dataclass(frozen=True)
class Broadcast:
    """Holds the message from the server to one client, at the start of an exchange.

    Args:
        round_idx: Index of the round, from 0.
        exchange: Name of the exchange. Methods with one exchange call it `"train"`.
        weights: The shared entries of the model. None if no entry is sent.
        extras: Further contents, by the names that the method gives them. They count as traffic.
        uploads: Whether the client sends its shared entries back.
    """

    round_idx: int
    exchange: str
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    uploads: bool = True


class Message(NamedTuple):
    """Holds what a client was sent at the start of an exchange.

    Args:
        broadcast: The message, as all members of the round have changed it.
        start: The shared entries that the client starts from. None means those of the message.
    """

    broadcast: Broadcast
    start: State | None


@dataclass(frozen=True)
class ClientUpdate:
    """Holds the message from one client to the server, at the end of an exchange.

    Args:
        client_id: Id of the client, from 0.
        num_samples: The number of training samples n_i. A client with 0 has no weight in any mean.
            A 0-d tensor if a transform may set it to 0 on the device.
        num_steps: The number of optimizer steps K_i in this exchange.
        accumulated_lr: The distance E_i that the local optimizer moves a scalar whose gradient is always 1.
            It is lr · K for plain SGD, and NaN if it is not defined (Adam, several learning rates).
        weights: The shared entries of the client, live. They are valid until the next result is drawn,
            so clone what you keep. None if the client sends no entries.
        extras: Further contents, from `ClientModule.reply`.
        included: False, in a 0-d tensor, if the update is left out and its values are replaced
            (`nonfinite: skip`).
        idle_steps: The number of steps among the K_i that trained no shared parameter.
        lr: The learning rate of the last step that counts in E_i and has a learning rate above 0.
            0 if there is no such step.
        uncounted_steps: The number of steps in phases that do not count in K_i.
    """

    client_id: int
    num_samples: int | Tensor
    num_steps: int
    accumulated_lr: float
    weights: State | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    included: bool | Tensor = True
    idle_steps: int = 0
    lr: float = 0.0
    uncounted_steps: int = 0


# --- local training, and what both sides see of the data ---


ClockKind = Literal["run", "round"]
"""What schedules and counts of a client's module cover: all rounds of the run as one fit, or each round by itself."""


@dataclass(frozen=True)
class Phase:
    """Describes one segment of local training.

    Args:
        split: Name of the split that the phase trains on.
        epochs: Number of passes over the split. None means `local_epochs` of the loop.
        batch_size: Samples per step. `full` means the whole split, None the batch size of the data module.
        trains: Names or `fnmatch` patterns of the parameters that are trained. None means all trainable ones.
        lr: Learning rate of the phase, before `lr_decay` of the loop. None means that of the optimizer.
        with_index: Whether `training_step` gets `(batch, positions)`, with positions (B,) int64 within the split.
        indices: Positions (k,) int64 within the split of the client. The phase trains only on these samples.
            None means all samples.
        counts: Whether the steps of the phase are local steps, which count in K_i, E_i and `max_local_steps`.
            A phase that does not count draws the batches of the first passes over its split.
        max_steps: Largest number of optimizer steps of the phase, over all its epochs. None means no limit.
        clock: What the module's schedules and counts cover in the phase. None means `model.clock` of the loop.
    """

    split: str = "train"
    epochs: int | None = None
    batch_size: int | Literal["full"] | None = None
    trains: tuple[str, ...] | None = None
    lr: float | None = None
    with_index: bool = False
    indices: Tensor | None = None
    counts: bool = True
    max_steps: int | None = None
    clock: ClockKind | None = None


@dataclass(frozen=True)
class FineTuning:
    """Says how what a client would deploy is trained on the client's own training samples before it is tested.

    The model is trained by the local loss with a fresh optimizer. Nothing of it is kept.

    Args:
        epochs: Number of passes over the client's training samples, ≥ 1.
        max_steps: Largest number of optimizer steps over all epochs, ≥ 1. None means no limit.
        trains: Names or `fnmatch` patterns of the parameters that are trained. None means all trainable ones.
        lr: Learning rate, > 0. None means that of the optimizer. `lr_decay` does not change it.
        batch_size: Samples per step, ≥ 1. `full` means all of the client, None the batch size of the data module.

    Raises:
        ValueError: A number is out of its range.
        TypeError: A setting is of another kind.

    >>> FineTuning(epochs=2, trains="net.head.*").phase.trains
    ('net.head.*',)
    """

    epochs: int = 1
    max_steps: int | None = None
    trains: str | Sequence[str] | None = None
    lr: float | None = None
    batch_size: int | Literal["full"] | None = None

    def __post_init__(self) -> None:
        names = "model.fine_tuning"
        if self.epochs is None:
            raise TypeError(f"{names}.epochs must be a whole number, got None; leave it out for 1")
        check_count(1, **{f"{names}.epochs": self.epochs, f"{names}.max_steps": self.max_steps})
        check_above(0, **{f"{names}.lr": self.lr})
        if self.batch_size != "full":
            check_count(1, "full takes all samples of a client", **{f"{names}.batch_size": self.batch_size})
        if self.trains is not None and not self.trains:
            raise ValueError(f"{names}.trains must name parameters, got none; leave it unset to train all of them")

    @property
    def phase(self) -> Phase:
        """The phase of training that the settings ask for."""
        trains = self.trains
        if trains is not None:
            trains = (trains,) if isinstance(trains, str) else tuple(trains)
        return Phase(
            epochs=self.epochs,
            batch_size=self.batch_size,
            trains=trains,
            lr=self.lr,
            max_steps=self.max_steps,
        )


class ClientData(Protocol):
    """Gives the data of one client in one round, as `ClientModule.receive` and `reply` see them."""

    client_id: int
    round_idx: int
    drop_last: bool
    ended: bool
    """True if the last batch that was given is the last one of its stream."""

    @property
    def num_clients(self) -> int:
        """The number of all clients. Their ids are below it, also those of clients that never train."""

    @property
    def clients(self) -> Sequence[int]:
        """The ids of the clients that train, ascending. They are 0 … N−1 if all clients train."""

    @property
    def local_work(self) -> float:
        """The share of its local steps that the client makes in this round, in (0, 1]."""

    @property
    def works_whole_epochs(self) -> bool:
        """Whether this share is one of local epochs, rounded up to whole ones, and not of batches."""

    @property
    def label_counts(self) -> Tensor:
        """The number of training samples of each class, (C,) int64."""

    @property
    def batch_size(self) -> int | Literal["full"]:
        """The number of samples per local step, as the data module says."""

    @property
    def num_samples(self) -> int:
        """The weight n_i of the client: its number of training samples.

        For a stream it is the number of samples trained on in this exchange.
        """

    def size(self, split: str = "train") -> int:
        """Count the samples of a split, or those of the longest pass of a stream."""

    @property
    def stage(self) -> int:
        """The stage of the client, from 0: rounds in which its data are the same. It is 0 if they never change."""

    def arrived(self, since: int | None) -> Tensor:
        """Return the samples that the client has now, and did not have in an earlier round, or saw in another way then.

        Args:
            since: The earlier round, from 0. None: all samples have arrived.

        Returns:
            The positions of the samples in the client's training split, (k,) int64, ascending.
        """

    def dealt(self) -> tuple[int, Tensor]:
        """Return what numbers the training samples in all rounds alike, also if some of them are held back.

        Returns:
            The number of samples that the client was dealt, and the positions (n,) int64 among these of the samples
            that it has now.
        """

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Return the number of samples per batch of a split.

        Args:
            split: Name of the split.
            given: The number of samples. `full` means the whole split, None the batch size of the data module.
        """

    def augments(self, split: str = "train") -> bool:
        """Return True if a sample differs from one local epoch to the next."""

    def all(self, split: str = "train") -> Batch:
        """Return the whole split as one batch, without augmentation."""

    def labels(self, split: str = "train") -> Tensor:
        """Return the classes of the samples of a split, (n,) int64 on the CPU.

        Raises:
            ValueError: The samples have no classes.
        """

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batches of a split on the device.

        Args:
            split: Name of the split.
            epoch: Index of the local epoch. None yields all samples in order, without augmentation, and keeps
                the last batch even if it is smaller.
            batch_size: Samples per batch. None means the batch size of the data module.
            shuffle: Whether the samples are shuffled. None means as the data module says.
            with_index: Whether each item is `(batch, positions)`, with positions (B,) int64 within the split of
                the client.
        """

    def for_fine_tuning(self) -> "ClientData":
        """Return a view of the same samples whose draws depend on the client and on no round, with all local work."""

    def restricted(self, split: str, positions: Tensor) -> "ClientData":
        """Return a view with some samples of a split only.

        Args:
            split: Name of the split. The other splits stay as they are.
            positions: The samples that stay, (k,) int64 within the split of the client. The view numbers them
                0 ... k-1 in this order.
        """

    def by_loader(self, split: str) -> Sequence["ClientData"]:
        """Return a view of the samples of each loader that gives samples of a split, in order.

        Args:
            split: Name of the split. Only the test samples of a data module of the user's may have several loaders.
        """

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        """Return a CPU generator keyed by seed, purpose, client and, if `per_round`, round."""

    def noise_generator(self, purpose: str) -> np.random.Generator:
        """Return a generator for noise, keyed by seed, purpose, round and client.

        The seed is the secret one if the data module has one.
        """


class ServerView(Protocol):
    """Gives the server as its parts (server module, aggregator, transforms) see it.

    The parts get it before their `setup`.
    """

    module: nn.Module
    round_idx: int
    store: Any

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of the shared entries that are trained."""

    @property
    def transmitted_entries(self) -> State:
        """The shared entries that are transmitted in this round."""

    @property
    def num_clients(self) -> int:
        """The number of clients that train, N. Clients that are only tested (`data.unseen`) do not count."""

    @property
    def clients(self) -> Sequence[int]:
        """The ids of the N clients that train, ascending. They are 0 … N−1 if all clients train."""

    @property
    def cohort_size(self) -> int:
        """The least number of clients in a round, 0 if a round may have none."""

    @property
    def largest_cohort(self) -> int:
        """The largest number of clients in a round."""

    @property
    def sampling_rate(self) -> float | None:
        """The probability that a client takes part, if each client is drawn independently. None otherwise."""

    @property
    def planned_rounds(self) -> int | None:
        """The maximal number of rounds of the run. None means no limit."""

    @property
    def weights(self) -> State:
        """The shared entries of the global model at the start of the exchange. They must not be edited."""

    @property
    def exact_weights(self) -> State:
        """The shared entries of the global model at the start of the round. They must not be edited.

        `weights` are what clients are sent of them, which the codec of a broadcast makes coarser.
        """

    def size(self, client_id: int) -> int:
        """Return the number of training samples of a client."""

    def data(self, split: str) -> Any:
        """Return a split that the server owns (proxy, transfer, validation)."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return a CPU generator keyed by seed, purpose and round."""

    def noise_generator(self, purpose: str) -> np.random.Generator:
        """Return a generator for noise, keyed by seed, purpose and round.

        The seed is the secret one if the data module has one.
        """


# --- engines ---


class ClientJob(NamedTuple):
    """Holds a job of an engine: the training of one client in one exchange.

    Args:
        client_id: Id of the client, from 0.
        broadcast: The message to the client.
        data: The samples of the client.
        memory: What the client keeps between rounds. The job owns this copy.
        personal: The personal entries of the client, or None.
        start: The shared entries that training starts from. None means those of the broadcast. It is set if the
            broadcast holds no entries or only some.
        arrives: Index of the round that takes the result. None means the round of the broadcast.
    """

    client_id: int
    broadcast: Broadcast
    data: ClientData
    memory: dict[str, Any]
    personal: State | None = None
    start: State | None = None
    arrives: int | None = None

    @property
    def named_round(self) -> str:
        """The round that takes the result, for errors, and the round in which the client started if it is another."""
        started = self.broadcast.round_idx
        if self.arrives in (None, started):
            return f"{started}"
        return f"{self.arrives} (started in round {started})"


class ClientResult(NamedTuple):
    """Holds the result of a job: the update of the client, and what stays with the client.

    Args:
        job: The job. Its `memory` must be kept.
        update: The message to the server. Its weights are valid until the next result is drawn.
        personal: The personal entries that must be kept, or None.
        logged: The values that the client logged, a `MetricAccumulator`.
        trained: The shared entries as they were trained, live, if a transform may send other values instead.
            None if they are not known, or if no entry is sent.
    """

    job: ClientJob
    update: ClientUpdate
    personal: State | None
    logged: Any
    trained: State | None = None

    @property
    def memory(self) -> dict[str, Any]:
        """The memory of the client, which must be kept."""
        return self.job.memory


class Scoring(NamedTuple):
    """Says how clients are tested, the same for all clients of one evaluation.

    Args:
        kind: The step of a user's module that evaluates it: `validation` in a fit, `test` in a test. A module that has
            only one of the two steps is evaluated by that one.
        batch_size: Number of samples in a batch.
        classifies: Whether the right answers of a net are counted.
        metrics: A collection of further torchmetrics objects of predictions and targets, which this process alone
            evaluates. None is no further one.
        channels_last: Whether batches of images (B, C, H, W) get the memory format `channels_last`.
        tuning: How the clients are fine-tuned for a second score. None means that they are not.
        classes: The classes that a net may answer. None means all.
    """

    kind: Literal["validation", "test"]
    batch_size: int
    classifies: bool
    metrics: Any = None
    channels_last: bool = False
    tuning: FineTuning | None = None
    classes: tuple[int, ...] | None = None


class ClientScore(NamedTuple):
    """Holds the score of the model that a client would deploy, on its own samples.

    Args:
        client_id: Id of the client, from 0.
        num_samples: The number of samples tested. A 0-d tensor if it is on the device, as `correct`.
        correct: The number of right answers of a net. None if they are not counted.
        metrics: The results of further metrics, by name, on the CPU.
        is_finite: Whether all predictions of these are finite, except logits of −inf of some of the classes. NaN in a
            metric of finite predictions is a value that is not defined.
        logged: What the module's own steps and hooks have logged, by key.
        directions: Whether such values are better when lower (`min`) or higher (`max`), as metric objects tell, by key.
        tuned: The score after fine-tuning. None if the client was not to be fine-tuned.
    """

    client_id: int
    num_samples: float | Tensor
    correct: float | Tensor | None
    metrics: State
    is_finite: bool | Tensor = True
    logged: Mapping[str, float] = MappingProxyType({})
    directions: Mapping[str, Literal["min", "max"]] = MappingProxyType({})
    tuned: "ClientScore | None" = None


class Engine(Protocol):
    """Trains and tests clients, in this process or elsewhere. Jobs, results and scores are plain values.

    An engine may draw all jobs before it yields its first result. The caller closes the generator if it does not
    need the remaining results.

    An engine whose clients keep their memory and personal entries elsewhere has a true attribute `is_remote`. The
    memory in its results then names what the client keeps, and the personal entries are None.
    """

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Yield the result of every job, and close the generator of jobs if the round ends early.

        Args:
            exchange: Name of the exchange.
            jobs: The jobs. The engine may draw all jobs before it yields the first result.

        Raises:
            ClientError: A client failed. Its job has no result, and the caller may run the jobs without a
                result again.
        """

    def evaluate(self, jobs: Iterable[ClientJob], how: Scoring) -> Generator[ClientScore, None, None]:
        """Yield the score of the model that the client of each job would deploy, on its own `test` split.

        Args:
            jobs: The jobs, whose exchange is called `deployed`.
            how: How the clients are tested.
        """


# --- members of a round ---


class Check(NamedTuple):
    """Holds a value on the device that is judged at the end of the round.

    Args:
        client_id: Id of the client. -1 if the value was made from the updates of all clients.
        kind: `values` (finite if all values of the client are), `norm` (of the update), `samples` (their number),
            `weight` (from the aggregator), or `total` (of all weights).
        value: The value, 0-d. A number once it is on the host.
        least: The smallest value that is allowed.
        most: The largest value that is allowed.
    """

    client_id: int
    kind: Literal["values", "norm", "samples", "weight", "total"]
    value: Any
    least: float = -sys.float_info.max
    most: float = sys.float_info.max


@dataclass
class RoundOutcome:
    """Records the outcome of one attempt at a round, before anything of the round is kept.

    An outcome has one of four states. It moves only to the right, and it may skip states:

    ```text
    open ───────▶ problem ───────▶ repeats ───────▶ aborted

    state    entered by        if it is the last state of the attempt
    open     the constructor   the round is kept: `entries` become the model
    problem  defer_error()     the run ends with this error, and the round is undone
    repeats  request_repeat()  the round is undone, and a new attempt excludes the clients in `failed`
    aborted  abort()           the round is undone, and the federation stays as it was
    ```

    `leave_out` adds clients to `failed` in any state. `set_weights` and `update_entries` collect the new model.

    Args:
        round_idx: Index of the round, from 0.
        cohort: Ids of the clients of the round.
        before: All entries of the model when the round began.
        failed: The reasons why clients are left out, by client id in ascending order.
        aborted: The reason why the round leaves the federation as it was. Empty if the round is not aborted.
        repeats: Whether the round must be undone and run again, because failed clients have left traces.
        problem: The error of the aggregator or the server module. It ends the run unless a client is at fault.
        weights: The new shared entries. None means that they do not change.
        entries: All entries of the model after the round, once they are decided.
    """

    round_idx: int
    cohort: list[int]
    before: State
    failed: dict[int, str] = field(default_factory=dict)
    aborted: str = ""
    repeats: bool = False
    problem: Exception | None = None
    weights: State | None = None
    entries: State = field(default_factory=dict)

    @property
    def asked(self) -> list[int]:
        """The clients of the cohort that have not failed."""
        return [client_id for client_id in self.cohort if client_id not in self.failed]

    @property
    def is_over(self) -> bool:
        """True if the attempt needs no further exchange."""
        return bool(self.aborted or self.repeats or self.problem)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leave out clients, whose results are not kept.

        Args:
            reasons: The reasons, by client id.
        """
        self.failed = dict(sorted({**self.failed, **reasons}.items()))

    def defer_error(self, problem: Exception) -> None:
        """Keep an error of the aggregator or the server module until the clients are judged."""
        self.problem = problem

    def request_repeat(self) -> None:
        """Ask for another attempt, unless the round is aborted."""
        if not self.aborted:
            self.repeats = True

    def abort(self, reason: str) -> None:
        """Leave the federation as it was. The first reason is kept."""
        if not self.aborted:
            self.aborted = reason
        self.repeats = False
        self.weights = None

    def set_weights(self, weights: State | None) -> None:
        """Set the new shared entries, after an exchange or after the checks. None means no change."""
        self.weights = weights

    def update_entries(self, entries: State) -> None:
        """Add entries of the model after the round. Later entries replace earlier ones of the same name."""
        self.entries = self.entries | entries


class Member:
    """Base of the members of a round: each keeps state, changes a message, or must be undone.

    A verb that a member does not override does nothing and is not called. The order of the members in the list
    is the order in which each verb is called.

    Attributes:
        name: Name of what the member shares with other processes, and of its state in a checkpoint.
        gathers: Whether the rows of `partial` go to the root process only.
        at_client: Whether the member goes with the engine, to the machine of the client.
        keeps_clients: Whether a client that was taken in leaves something that a weight of 0 does not remove.
        keeps_cohort: Whether the cohort leaves something before any of its clients has trained.
    """

    name: str = ""
    gathers: bool = False
    at_client: ClassVar[bool] = False
    keeps_clients: bool = False
    keeps_cohort: bool = False

    @property
    def is_used(self) -> bool:
        """True if the member takes part in the next round."""
        return True

    @property
    def partial(self) -> Any:
        """The sums and rows of this process, a `PartialAggregate`. Processes merge them before `aggregated`."""

    # --- at the server, in this order ---

    def prepare(self) -> bool:
        """Prepare the next round, and return True if the members that take part may differ from those before."""
        return False

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        """Begin an attempt at a round.

        Args:
            round_idx: Index of the round, from 0.
            cohort: Ids of the clients of the attempt.
        """

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Return the message to a client, changed or as it is, before the job is made."""
        return broadcast

    def incoming(self, result: ClientResult) -> ClientResult:
        """Return the result of a client, checked, changed or taken in. `result.job` is the job of the client."""
        return result

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        """Return the values that must be judged, and forget them.

        Args:
            outcome: The outcome of the round. None if another exchange follows.
        """
        return []

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        """Return the new shared entries of an exchange.

        Args:
            exchange: Name of the exchange.
            state: The new shared entries that the members before have made. None means no change.
        """
        return state

    def end_exchange(self) -> None:
        """Forget what the exchange has collected."""

    def share(self) -> Any:
        """Return the plain values that all processes get at the end of a round.

        A member that shares must do so in every process.
        """

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Keep the result of a round, and return values of its row.

        An aborted round has no result and is undone afterwards.

        Args:
            outcome: The outcome of the round.
            shared: The values that `share` has returned, by process. Empty for a member without `share`.
        """
        return {}

    # --- where the client is, in an engine ---

    def enter(self, job: ClientJob) -> None:
        """Put what the member keeps for a client into the module, before the client begins."""

    def trained(self, job: ClientJob) -> None:
        """Check and keep what a client has left in the module, after its training and reply."""

    def on_client(self, result: ClientResult) -> ClientResult:
        """Return what leaves the client, changed or as it is."""
        return result

    def leave(self) -> None:
        """Release the last client of an exchange."""

    # --- undoing, and checkpoints ---

    def mark(self) -> Any:
        """Return a mark of the present state.

        The rounds call it when a round begins. An engine calls it before a client that may be undone, so it must
        be fast.
        """

    def undo(self, mark: Any) -> None:
        """Go back to the state of a mark, which may be used again."""

    def entries_at(self, mark: Any) -> Mapping[str, Any]:
        """Return the entries of the loop's state dict as they were at a mark."""
        return {}

    def state_dict(self, mark: Any = None) -> Any:
        """Return the state that is kept between rounds.

        Args:
            mark: The mark of the round, whose state is returned. None outside of rounds.
        """
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Load a state that `state_dict` has returned."""


def does(member: Member, verb: str) -> bool:
    """Return True if the class of a member overrides a verb."""
    return getattr(type(member), verb) is not getattr(Member, verb)


class Members:
    """Holds the members of a round in their order.

    Args:
        members: The members.

    Attributes:
        all: All members.
        used: The members that take part in the present round.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.all = list(members)
        self.used: list[Member] = []
        self._by_verb: dict[str, list[Member]] = {}

    def prepare(self) -> None:
        """Prepare a round, and choose the members that take part."""
        changes = [member.prepare() for member in self.all if does(member, "prepare")]
        if any(changes) or not self.used:
            self.used = [member for member in self.all if member.is_used]
            self._by_verb = {}

    def of(self, verb: str) -> list[Member]:
        """Return the members that take part and override a verb."""
        if verb not in self._by_verb:
            self._by_verb[verb] = [member for member in self.used if does(member, verb)]
        return self._by_verb[verb]

    def undoing(self, at_client: bool = False) -> "Undo":
        """Mark the members that take part.

        Args:
            at_client: Whether only the members that go with the engine are marked.
        """
        return Undo(member for member in self.of("undo") if member.at_client or not at_client)

    def state_dict(self, undo: "Undo | None") -> dict[str, Any]:
        """Return the states of all members by name.

        Args:
            undo: The marks of the current round, whose states are returned. None outside of rounds.
        """
        states: dict[str, Any] = {}
        for member in self.all:
            if does(member, "state_dict"):
                mark = None if undo is None else undo.marks.get(member)
                states[member.name] = member.state_dict(mark)
        return states


class Undo:
    """Marks members, and undoes them if its context ends with an error.

    It serves a round that is aborted or repeated, and a client that is skipped.

    Args:
        members: The members, in the order in which they are undone.

    Attributes:
        marks: The marks, by member.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.marks = {member: member.mark() for member in members}

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Undo the members, back to their marks."""
        for member, mark in self.marks.items():
            member.undo(mark)

    def entries(self) -> dict[str, Any]:
        """Return the entries of the loop's state dict as they were at the marks."""
        entries: dict[str, Any] = {}
        for member, mark in self.marks.items():
            entries.update(member.entries_at(mark))
        return entries
