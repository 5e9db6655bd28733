"""Messages between client and server, jobs and results of an engine, and the views that each side has of the data."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Tensor]
"""Tensors by name."""

Batch = Any
"""A batch of a dataloader: for our own sources a pair (x, y) of tensors (B, ...) and (B,)."""

CONDITIONS = frozenset({"logits", "accumulated_lr", "start", "clients"})
"""Names that `needs` may hold besides splits."""

Sent = Literal[
    "weights", "statistics", "control", "importance", "prototypes", "label counts", "logits", "personal means"
]
"""Kinds of what a method sends up; `personal means`: the server averages the clients' personal entries to evaluate."""

Read = Literal["label counts", "labels", "samples", "batches"]
"""Kinds of what a method's client reads of its training data besides the batches of its training steps."""

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""`params -> optimizer`."""

ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward pass (the Trainer's precision)."""


# --- a user's own classes, recognised by what they can do: they may come from `lightning.pytorch`


@runtime_checkable
class TrainableModule(Protocol):
    """A LightningModule of `pytorch_lightning` or of its twin package, which is an `nn.Module` besides."""

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
        """Clean up after an error (a hook of data modules, which LightningModules with loaders do not have)."""


# --- messages


@dataclass(frozen=True)
class Broadcast:
    """Message from the server to one client, at the start of an exchange.

    Args:
        round_idx: communication round, from 0.
        exchange: name of the exchange (`"train"` for methods with one).
        weights: shared entries of the model, or None where nothing of the model is sent.
        extras: further contents of the method's; what they hold counts as traffic.
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
        accumulated_lr: E_i, the distance that the local optimizer travels on a scalar whose gradient is always 1
            (lr · K for plain SGD); NaN where it is not defined (Adam, several learning rates).
        weights: the client's shared entries, live: valid until the next result is drawn, so clone what is kept.
        extras: further contents of the method's (`ClientModule.reply`).
        included: False, in a 0-d tensor, where the update is left out and its values are replaced (`nonfinite: skip`).
        idle_steps: those of the K_i steps that trained no shared parameter.
        lr: learning rate of the last step that counts in E_i and had one above 0; 0: there is none.
        uncounted_steps: steps of phases that are not among the K_i.
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


# --- local training, and what both sides see of the data


@dataclass(frozen=True)
class Phase:
    """One segment of local training.

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
    def local_work(self) -> float:
        """Share of its local steps that the client makes in this round, in (0, 1]."""

    @property
    def label_counts(self) -> Tensor:
        """Training samples of each class, (C,) int64."""

    @property
    def batch_size(self) -> int | Literal["full"]:
        """Samples per local step, as the data module says."""

    @property
    def num_samples(self) -> int:
        """Weight n_i of the client: its training samples, for a stream those trained on in this exchange."""

    def size(self, split: str = "train") -> int:
        """Count the samples of a split, for a stream those of its longest pass."""

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Choose the samples per batch of a split: those given or the data module's, for `full` the whole split."""

    def augments(self, split: str = "train") -> bool:
        """Tell whether a sample differs from one local epoch to the next."""

    def all(self, split: str = "train") -> Batch:
        """Read the whole split as one batch, without augmentation."""

    def labels(self, split: str = "train") -> Tensor:
        """Read the classes of a split's samples, (n,) int64 on the CPU.

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
        """Yield batches of a split on the device, in order, unaugmented and the last one whole where `epoch` is None.

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
        """Make a CPU generator keyed by (seed, purpose, round, client), the round only where `per_round`."""

    def noise_generator(self, purpose: str) -> np.random.Generator:
        """Make a generator for noise, keyed so, by the data module's secret seed where it has one."""


class ServerView(Protocol):
    """The server as its parts (server module, rule, transforms) see it, set before their `setup`."""

    module: nn.Module
    round_idx: int
    store: Any

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the shared entries that are trained."""

    @property
    def transmitted_entries(self) -> State:
        """The shared entries that are transmitted in this round."""

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""

    @property
    def cohort_size(self) -> int:
        """Clients in the smallest cohort of the run."""

    @property
    def sampling_rate(self) -> float | None:
        """Probability with which every client takes part by itself, or None where cohorts are drawn otherwise."""

    @property
    def planned_rounds(self) -> int | None:
        """Rounds that the run has at most, or None without a limit."""

    @property
    def weights(self) -> State:
        """The global model's shared entries, as they were when the exchange began. Not to be edited."""

    def size(self, client_id: int) -> int:
        """Count the training samples of a client."""

    def data(self, split: str) -> Any:
        """Get a split that the server owns (proxy, transfer, validation)."""

    def generator(self, purpose: str) -> torch.Generator:
        """Make a CPU generator keyed by (seed, purpose, round)."""

    def noise_generator(self, purpose: str) -> np.random.Generator:
        """Make a generator for noise, keyed so, by the data module's secret seed where it has one."""


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
        job: that was run; its `memory` is to be kept.
        update: what is sent up; its weights are valid until the next result is drawn.
        personal: to be kept, or None.
        logged: the values that the client logged (a `MetricAccumulator`).
        trained: the shared entries as they were trained, live, where a transform may send something else in their
            place; None: not known, or nothing of the model is sent.
    """

    job: ClientJob
    update: ClientUpdate
    personal: State | None
    logged: Any
    trained: State | None = None

    @property
    def memory(self) -> dict[str, Any]:
        """The client's memory, to be kept."""
        return self.job.memory


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

    An engine may draw all jobs before it yields its first result. Its generator is closed if the rest is not needed.
    One whose clients keep memory and personal entries where they are has a true attribute `is_remote`; the memory in
    its results names what is there, and their personal entries are None.
    """

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Yield the result of every job, and close the generator of jobs if the round ends early.

        Jobs may all be drawn before the first result is given.

        Raises:
            ClientError: of one job; it has no result, and those that have none yet may be asked for again.
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


# --- members of a round


class Check(NamedTuple):
    """A value on the device that is judged at the end of the round.

    Args:
        client_id: of the client; -1: of what was made of all clients'.
        kind: `values` (finite where all are), `norm` of the update, its number of `samples`, the `weight` that the rule
            gave, or the `total` of all weights.
        value: 0-d; a number once it is on the host.
        least: that it may be.
        most: that it may be.
    """

    client_id: int
    kind: Literal["values", "norm", "samples", "weight", "total"]
    value: Any
    least: float = -sys.float_info.max
    most: float = sys.float_info.max


@dataclass
class RoundOutcome:
    """Outcome of a round as it comes to be, before anything of it is kept.

    Args:
        round_idx: from 0.
        cohort: ids of the clients that were asked.
        before: all entries of the model as the round began.
        failed: why a client is left out, by client id; ascending.
        aborted: why the round leaves the federation as it was; empty where it does not.
        repeats: whether it is to be undone and run again without the failed clients, which have left traces.
        problem: error of the rule or the server module, which ends the run unless a client is at fault.
        weights: the new shared entries; None: they stay.
        entries: all entries of the model after the round, once it is decided.
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
        """The clients that have not failed."""
        return [client_id for client_id in self.cohort if client_id not in self.failed]

    @property
    def is_over(self) -> bool:
        """Tell whether no further exchange is needed."""
        return bool(self.aborted or self.repeats or self.problem)

    def leave_out(self, failed: Mapping[int, str]) -> None:
        """Leave out clients, with the reasons, and keep nothing of them."""
        self.failed = dict(sorted({**self.failed, **failed}.items()))

    def repeat(self, needed: bool = True) -> None:
        """Ask for the round to be run again, unless it is aborted."""
        self.repeats = (self.repeats or needed) and not self.aborted

    def abort(self, reason: str) -> None:
        """Leave the federation as it was, for the first such reason."""
        self.aborted = self.aborted or reason
        if self.aborted:
            self.repeats = False
            self.weights = None

    def take(self, weights: State | None) -> None:
        """Take the shared entries after an exchange, or after all, or with None those before the round."""
        self.weights = weights

    def fail(self, problem: Exception) -> None:
        """Keep an error of what all clients share."""
        self.problem = problem

    def take_entries(self, entries: State) -> None:
        """Take entries of the model as they are after the round, the later ones in place of earlier."""
        self.entries = self.entries | entries


class Member:
    """Base of what takes part in a round: keeps state over it, changes a message, or must be undone.

    By default every verb does nothing, and one that does nothing is not called. The order of the members in their one
    list is the order in which each verb is called.

    Attributes:
        name: of what it shares with other processes, and of its state in a checkpoint.
        gathers: whether the rows of `partial` go to the root process only.
        at_client: whether it goes with the engine, to where the client is.
        keeps_clients: whether a client that was taken in leaves more than what a weight of 0 takes out again.
        keeps_cohort: whether the clients that are asked leave something, before any of them has trained.
    """

    name: str = ""
    gathers: bool = False
    at_client: ClassVar[bool] = False
    keeps_clients: bool = False
    keeps_cohort: bool = False

    @property
    def is_used(self) -> bool:
        """Tell whether it takes part in the round to come."""
        return True

    @property
    def partial(self) -> Any:
        """Its sums and rows (a `PartialAggregate`), which are added up over processes before `aggregated`."""

    # --- at the server, in this order ---

    def prepare(self) -> bool:
        """Find out what the round to come is about, and return whether other members may take part than before."""
        return False

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        """Begin a round with these clients, once more where it is run again without some of them."""

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Change a message to a client, before its job is made."""
        return broadcast

    def incoming(self, result: ClientResult) -> ClientResult:
        """Check, change or take in the result of a client, to which `result.job` was sent."""
        return result

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        """Hand over the values to be judged, and where the exchanges are over those of their `outcome`."""
        return []

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        """Make the new shared entries of those that the members before have made, or None for no change."""
        return state

    def end_exchange(self) -> None:
        """Forget what an exchange has collected."""

    def share(self) -> Any:
        """Hand over what all processes are told at the end of a round, plain values, in all of them or in none."""

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Keep what a round has brought and give values of its row.

        An aborted one brings nothing and is then undone.

        Args:
            outcome: of the round.
            shared: what `share` gave, by process; empty without a `share`.
        """
        return {}

    # --- where the client is, in an engine ---

    def enter(self, job: ClientJob) -> None:
        """Put what it keeps of a client into the module, before the client begins."""

    def trained(self, job: ClientJob) -> None:
        """Check and keep what a client has left in the module, once it has trained and replied."""

    def on_client(self, result: ClientResult) -> ClientResult:
        """Change what leaves the client."""
        return result

    def leave(self) -> None:
        """Let go of the last client of an exchange."""

    # --- undoing, and checkpoints ---

    def mark(self) -> Any:
        """Record the present state, in little time: when a round begins, and in an engine before what may be undone."""

    def undo(self, mark: Any) -> None:
        """Go back to a state that `mark` noted, maybe not for the last time."""

    def entries_at(self, mark: Any) -> Mapping[str, Any]:
        """Give the entries of the loop's state dict as they were at a mark."""
        return {}

    def state_dict(self, mark: Any = None) -> Any:
        """Give the state kept between rounds, inside a round as it was at the round's `mark`."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` gave."""


def does(member: Member, verb: str) -> bool:
    """Tell whether the class of a member defines an action for a verb."""
    return getattr(type(member), verb) is not getattr(Member, verb)


class Members:
    """The ordered list of members.

    Args:
        members: in their order.

    Attributes:
        used: those that take part in the present round.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.all = list(members)
        self.used: list[Member] = []
        self._by_verb: dict[str, list[Member]] = {}

    def prepare(self) -> None:
        """Prepare a round, and choose who takes part in it."""
        changes = [member.prepare() for member in self.all if does(member, "prepare")]
        if any(changes) or not self.used:
            self.used = [member for member in self.all if member.is_used]
            self._by_verb = {}

    def of(self, verb: str) -> list[Member]:
        """List those who take part and do something at a verb."""
        if verb not in self._by_verb:
            self._by_verb[verb] = [member for member in self.used if does(member, verb)]
        return self._by_verb[verb]

    def undoing(self, at_client: bool = False) -> "Undo":
        """Mark all who take part, or those of them who go with the engine."""
        return Undo(member for member in self.of("undo") if member.at_client or not at_client)

    def state_dict(self, undo: "Undo | None") -> dict[str, Any]:
        """Give the states of all by name, inside a round, which `undo` would undo, those before it."""
        keeping = [member for member in self.all if does(member, "state_dict")]
        return {m.name: m.state_dict(undo and undo.marks.get(m)) for m in keeping}


class Undo:
    """Context in which members are undone if it fails, with marks made when it is made.

    One serves a round that is aborted or run again, and a client that is skipped.

    Args:
        members: in the order in which they are undone.

    Attributes:
        marks: of the members.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.marks = {member: member.mark() for member in members}

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Go back to the marks."""
        for member, mark in self.marks.items():
            member.undo(mark)

    def entries(self) -> dict[str, Any]:
        """Give the entries of the loop's state dict as they were at the marks."""
        return {name: value for member, mark in self.marks.items() for name, value in member.entries_at(mark).items()}
