"""The list of a round's members, and the members without a file."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import (
    Aggregator,
    GatheringAggregator,
    NonFiniteGuard,
    PartialAggregate,
    ServerModule,
    UpdateTransform,
)
from fl_lightning.aggregation.server_parts import ServerPart
from fl_lightning.client.checks import runs_foreign_code
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.store import ClientStore
from fl_lightning.data.scenario import Scenario
from fl_lightning.distributed import Communicator, to_device
from fl_lightning.engines.cohort import need_module
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.server import Server
from fl_lightning.functional.state import StateSum, choose
from fl_lightning.members.codec import CodedBroadcast, Coding, Decoder, DownCoding, Encoder
from fl_lightning.members.faults import (
    check_measured,
    check_num_samples,
    check_tensors,
    check_update,
    encodes,
    has_layout,
)
from fl_lightning.members.messages import Messages
from fl_lightning.members.structure import Structure
from fl_lightning.members.tasks import Tasks
from fl_lightning.members.traces import Traces
from fl_lightning.members.user_entries import UserEntries
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Check, ClientResult, Member, Members, RoundOutcome, State

SMALLEST_FLOAT = 5e-324
"""The smallest float above 0."""


class ClientRecords(Member):
    """Holds the memory and personal entries of the round's clients, and stores them once the round is over.

    Args:
        store: The store of the records of all clients.
        communicator: The communicator of the processes of the run.
        global_weights: The global weights, which know the personal entries.
        initial: The personal entries before any training, by name.
        cost: Returns the cost of a client, by which the clients of a checkpoint are spread over processes.
    """

    name = "store"

    def __init__(
        self,
        *,
        store: ClientStore,
        communicator: Communicator,
        global_weights: GlobalWeights,
        initial: State,
        cost: Callable[[int], int],
    ) -> None:
        self._store = store
        self._communicator = communicator
        self._global_weights = global_weights
        self._initial = initial
        self._cost = cost
        self._records: dict[int, tuple[dict[str, Any], State | None]] = {}

    def of(self, client_id: int) -> tuple[dict[str, Any], State | None]:
        """Return the memory and the personal entries of a client, as its last exchange has left them."""
        memory: dict[str, Any] = {}
        personal: State | None = None
        if client_id in self._records:
            memory, personal = self._records[client_id]
        elif client_id in self._store.clients:
            memory, personal = self._store.record(client_id)
        if personal is None and self._global_weights.personal:
            personal = {name: self._initial[name] for name in self._global_weights.personal_of(client_id)}
        return memory, personal

    def incoming(self, result: ClientResult) -> ClientResult:
        client_id = result.update.client_id
        memory = result.job.memory
        personal = result.personal
        if memory or personal is not None or client_id in self._store.clients:
            self._records[client_id] = memory, personal
        return result

    def share(self) -> list[int]:
        return list(self._records)

    def end(self, outcome: RoundOutcome, shared: Sequence[list[int]]) -> Mapping[str, float]:
        """Store the records of a round, and which process holds the record of which client."""
        if self._communicator.world > 1:
            for rank, clients in enumerate(shared):
                self._store.own(dict.fromkeys(clients, rank))
        if not outcome.aborted:
            records = {c: record for c, record in self._records.items() if c not in outcome.failed}
            if records:
                self._store.put(records, outcome.round_idx)
        self._records = {}
        return {}

    def mark(self) -> bool:
        """Return True, which tells `state_dict` that a round is under way."""
        return True

    def undo(self, mark: bool) -> None:
        """Forget the records of the round. The store has none of them before the round ends."""
        self._records = {}

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Return the records of all processes, gathered on the root process.

        Args:
            mark: True inside a round. None outside of rounds.

        Raises:
            RuntimeError: Several processes are inside a round, each at another client.
        """
        store = self._store
        communicator = self._communicator
        if communicator.world == 1 or not store.owners:
            return store.state_dict()
        if mark is not None:
            raise RuntimeError(
                f"a checkpoint cannot be saved inside a round of {communicator.world} processes, which are at "
                f"different clients; save it in on_train_batch_end or later"
            )
        states = communicator.gather_to_root(to_device(store.state_dict(), torch.device("cpu")))
        records: dict[int, Any] = {}
        for state in states:
            records.update(state["records"])
        files = torch.empty(0, 5, dtype=torch.int64)
        if states:
            files = torch.cat([state["files"] for state in states])
        return {"records": dict(sorted(records.items())), "files": files[files[:, 0].argsort()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assign: Callable[[Sequence[int]], dict[int, int]] | None = None
        if self._communicator.world > 1:
            assign = partial(self._communicator.assign_clients, cost=self._cost, owners={})
        self._store.load_state_dict(state, rank=self._communicator.rank, assign=assign)


class Transforms(Member):
    """Base of the members that transform updates.

    Args:
        transforms: The transforms, in the order in which they are applied.
    """

    def __init__(self, transforms: Iterable[UpdateTransform]) -> None:
        self._transforms = list(transforms)

    @property
    def is_used(self) -> bool:
        return bool(self._transforms)

    def mark(self) -> list[dict[str, Any]]:
        return copy.deepcopy([transform.state_dict() for transform in self._transforms])

    def undo(self, mark: Sequence[dict[str, Any]]) -> None:
        for transform, state in zip(self._transforms, mark, strict=True):
            # The mark may be needed again.
            transform.load_state_dict(copy.deepcopy(state))


class ClientTransforms(Transforms):
    """Transforms an update before it leaves the client.

    Args:
        transforms: The transforms, in the order in which they are applied. A transform without an `on_client` of
            its own is left out.
    """

    at_client = True

    def __init__(self, transforms: Iterable[UpdateTransform]) -> None:
        super().__init__(transform for transform in transforms if overridden(transform, "on_client", UpdateTransform))

    def on_client(self, result: ClientResult) -> ClientResult:
        update = result.update
        trained = update.weights if result.trained is None else result.trained
        for transform in self._transforms:
            update = transform.on_client(update, result.job.broadcast)
        return result._replace(update=update, trained=trained)


class Transmitted(Member):
    """Replaces what leaves the client by `ClientModule.transmitted`, which attacks override.

    Args:
        client: The client module.
    """

    at_client = True

    def __init__(self, client: ClientModule) -> None:
        self._client = client

    def on_client(self, result: ClientResult) -> ClientResult:
        job = result.job
        return result._replace(update=self._client.transmitted(result.update, job.broadcast, job.data))


class Arrivals(Member):
    """Checks an update when it arrives at the server.

    `ServerTransforms` checks an update again after the transforms.

    Args:
        server: The server, which knows the shared entries.
        transforms: The transforms of updates.
    """

    def __init__(self, server: Server, transforms: Sequence[UpdateTransform]) -> None:
        self._server = server
        self._transforms = transforms

    def incoming(self, result: ClientResult) -> ClientResult:
        """Refuse an update with a wrong number of samples or with other entries than the shared ones.

        Raises:
            ValueError: The number of samples is not the client's, or an entry is not a shared one.
            TypeError: The number of samples or an entry has a wrong type.
        """
        update = result.update
        shared = self._server.transmitted_entries
        known_samples = result.job.data.num_samples
        # These conditions are fast. The checks are slow, and name the fault of an update that does not meet them.
        if type(update.num_samples) is not int or not 0 <= update.num_samples <= known_samples:
            check_num_samples(update, known_samples)
        if self._transforms:
            check_tensors(update)
        elif update.weights is not None and not has_layout(update.weights, shared):
            check_update(update, shared)
        return result


class ServerTransforms(Transforms):
    """Transforms an update at the server, after the guard, and checks the result.

    Args:
        transforms: The transforms, in the order in which they are applied.
        server: The server, which knows the shared entries.
        guard: The guard, which checks values on the device.
    """

    name = "transforms"

    def __init__(self, transforms: Sequence[UpdateTransform], server: Server, guard: NonFiniteGuard) -> None:
        super().__init__(transforms)
        self._server = server
        self._guard = guard
        self.keeps_clients = any(overridden(transform, "state_dict", UpdateTransform) for transform in transforms)

    def incoming(self, result: ClientResult) -> ClientResult:
        """Transform an update.

        Raises:
            ValueError: The transformed update has a wrong number of samples, or an entry is not a shared one.
            TypeError: The number of samples or an entry has a wrong type.
            SettingError: The transforms cannot be combined.
        """
        update = result.update
        shared = self._server.transmitted_entries
        known_samples = result.job.data.num_samples
        is_encoded = result.trained is not None and not has_layout(update.weights, shared)
        if update.weights is not None:
            # A transform may edit its dict. The original may be a FlatState, whose vectors must match its entries.
            update = replace(update, weights=dict(update.weights))
        for transform in self._transforms:
            update = transform.on_server(update, result.job.broadcast)
        check_num_samples(update, known_samples)
        check_update(update, shared)
        if isinstance(update.num_samples, Tensor):
            update = self._guard.counted(update, known_samples)
        if is_encoded:
            check_measured(self._transforms, self._guard.max_norm)
        return result._replace(update=update)

    def state_dict(self, mark: Any = None) -> list[dict[str, Any]]:
        return self.mark() if mark is None else mark

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Load the states of the transforms.

        Raises:
            ValueError: The state holds another number of transforms.
        """
        if len(state) != len(self._transforms):
            raise ValueError(
                f"the checkpoint must be of the same model.transforms, but has {len(state)} and there are "
                f"{len(self._transforms)} here; give the configuration it was made with"
            )
        self.undo(state)


class PersonalEntries(Member):
    """Keeps the initial personal entries, and their mean over a round's clients, with which the model is evaluated.

    Args:
        global_weights: The global weights, which know the personal entries.
        initial: The personal entries before any training, by name.
        averages: Whether means are taken. A private run takes none, because a mean hides no client.
    """

    name = "initial_personal"

    def __init__(self, global_weights: GlobalWeights, initial: State, averages: bool = True) -> None:
        self._global_weights = global_weights
        self._initial = initial
        self._averages = averages
        self._partial = PartialAggregate()
        self._mean = State()

    @property
    def is_used(self) -> bool:
        return bool(self._averages and self._global_weights.personal and self._global_weights.shared)

    @property
    def partial(self) -> PartialAggregate:
        return self._partial

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._mean = State()

    def incoming(self, result: ClientResult) -> ClientResult:
        update = result.update
        personal = result.personal
        if personal is not None:
            if isinstance(update.included, Tensor):
                personal = choose(update.included, personal, self._initial)
            entries = self._partial.sums.setdefault("entries", StateSum())
            entries.add(personal, update.num_samples, sent=self._initial)
        return result

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        mean = self._partial.mean("entries", lambda: self._global_weights.before, sent=self._initial)
        if mean:
            self._mean = mean
        return state

    def end_exchange(self) -> None:
        self._partial = PartialAggregate()

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        outcome.update_entries(self._mean)
        return {}

    def undo(self, mark: None) -> None:
        self.end_exchange()

    def state_dict(self, mark: Any = None) -> State:
        return dict(self._initial)

    def load_state_dict(self, state: State) -> None:
        self._initial.clear()
        self._initial.update(to_device(state, self._global_weights.client.device))


class ServerPartMember(Member):
    """Base of the members that represent the aggregator and the server module.

    A server part is a module and cannot be a member too: `nn.Module.state_dict` and `Member.state_dict` differ.

    Args:
        part: The aggregator or the server module.
        name: Name of the attribute of the loop that holds `part`.
    """

    def __init__(self, part: ServerPart, name: str) -> None:
        self.name = name
        self.keeps_cohort = overridden(part, "begin_round", ServerPart)
        self._part = part

    @property
    def partial(self) -> PartialAggregate:
        return self._part.partial

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._part.begin_round(cohort)

    def end_exchange(self) -> None:
        self._part.end_exchange()

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        return {} if outcome.aborted else self._part.row_values()

    def mark(self) -> dict[str, Any]:
        return self._part.snapshot()

    def undo(self, mark: Mapping[str, Any]) -> None:
        self._part.load_state_dict(mark)
        was_interrupted = self.partial.sums or self.partial.rows
        if was_interrupted:
            self._part.end_exchange()

    def entries_at(self, mark: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"{self.name}.{key}": value for key, value in mark.items()}


class AggregatorMember(ServerPartMember):
    """Represents the aggregator, which makes the new weights from the weights of the clients.

    Args:
        aggregator: The aggregator.
        communicator: The communicator of the processes of the run.
    """

    def __init__(self, aggregator: Aggregator, communicator: Communicator) -> None:
        super().__init__(aggregator, "aggregator")
        self.gathers = isinstance(aggregator, GatheringAggregator)
        self.keeps_clients = type(aggregator) is not Aggregator
        self._aggregator = aggregator
        self._communicator = communicator
        self._checks: list[Check] = []
        self._total: float | Tensor = 0
        """The sum of the weights of all clients and exchanges. If it is 0, the shared entries stay as they are."""

    def incoming(self, result: ClientResult) -> ClientResult:
        """Add an update to the aggregator, as the members before have left it."""
        update = result.update
        statistics = self._aggregator.client_statistics(update)
        if statistics:
            update = replace(update, extras={**update.extras, **statistics})
            result = result._replace(update=update)
        self._aggregator.add(update)
        for weight in self._aggregator.take_unchecked():
            value = torch.as_tensor(weight).detach()
            self._checks.append(Check(update.client_id, "weight", value, least=0.0))
        return result

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        checks = self._checks
        self._checks = []
        if outcome is None:
            return checks
        if isinstance(self._total, Tensor):
            checks.append(Check(-1, "total", self._total, least=SMALLEST_FLOAT))
        self._total = 0
        return checks

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        if self.gathers:
            new = self._communicator.from_root(self._aggregator.finish, self._aggregator.buffers)
        else:
            new = self._aggregator.finish()
        self._total = self._total + self._aggregator.total_weight("weights")
        return new

    def undo(self, mark: Mapping[str, Any]) -> None:
        super().undo(mark)
        self._checks = []
        self._total = 0
        self._aggregator.take_unchecked()


class ServerModuleMember(ServerPartMember):
    """Represents the server module of the method, which receives updates after the aggregator.

    Args:
        module: The server module.
    """

    def __init__(self, module: ServerModule) -> None:
        super().__init__(module, "server_module")
        self.keeps_clients = True
        self._module = module

    def incoming(self, result: ClientResult) -> ClientResult:
        self._module.add(result.update)
        return result

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        return self._module.finish(exchange, state)


class ClientEnds(Member):
    """Calls `on_client_end` of the callbacks for every client that was taken in.

    Args:
        hooks: The client hooks of the callbacks, by name.
    """

    def __init__(self, hooks: Mapping[str, Sequence[Callable[..., None]]]) -> None:
        self._hooks = hooks
        self.keeps_clients = need_module(hooks["on_round_repeat"])

    @property
    def is_used(self) -> bool:
        return bool(self._hooks["on_client_end"])

    def incoming(self, result: ClientResult) -> ClientResult:
        for hook in self._hooks["on_client_end"]:
            hook(result.update)
        return result


def members_at_client(parts: FederationParts, global_weights: GlobalWeights) -> list[Member]:
    """Return the members that act where the client is trained, in order.

    Args:
        parts: The parts of the federation.
        global_weights: The global weights in the client module.
    """
    client = parts.client
    # The server decodes what a transform encodes, so an attack comes before the first such transform.
    encoding = [index for index, transform in enumerate(parts.transforms) if encodes(transform)]
    first_encoding = encoding[0] if encoding else len(parts.transforms)

    members: list[Member] = []
    # The user's own code may change the module while a client is trained.
    hooks = chain(*parts.hooks.values(), *parts.batch_hooks.values())
    if runs_foreign_code(client) or need_module(hooks):
        members.append(Structure(client, global_weights))
    members.extend(global_weights.features)
    members.append(ClientTransforms(parts.transforms[:first_encoding]))
    if overridden(client, "transmitted", ClientModule):
        members.append(Transmitted(client))
    members.append(ClientTransforms(parts.transforms[first_encoding:]))
    if parts.codec:
        members.append(Encoder(Coding(parts.codec, global_weights), global_weights, client.changes))
    return members


def members_of(
    *,
    parts: FederationParts,
    server: Server,
    communicator: Communicator,
    records: ClientRecords,
    entries: UserEntries,
    scenario: Scenario | None = None,
) -> Members:
    """Return all members of a round, in the order in which a message passes them.

    Args:
        parts: The parts of the federation.
        server: The server.
        communicator: The communicator of the processes of the run.
        records: The member that holds the records of the round's clients.
        entries: The member that holds what the user's modules add to a checkpoint.
        scenario: How the clients' data change over the rounds. None: they do not.
    """
    global_weights = server.global_weights
    codec = parts.codec
    members: list[Member] = []

    # These members act on what a client receives, keeps and sends.
    if parts.faults.on_error == "skip":
        members.append(Traces(parts.client))
    members.extend(members_at_client(parts, global_weights))
    if codec and codec.down:
        members.append(CodedBroadcast(DownCoding(codec, global_weights), server, server.send))
    members.append(parts.recorder.traffic)
    members.append(parts.skipped)
    if codec:
        members.append(Decoder(Coding(codec, global_weights)))

    # These members act on what the server receives.
    members.append(Arrivals(server, parts.transforms))
    members.append(parts.guard)
    members.append(ServerTransforms(parts.transforms, server, parts.guard))
    members.append(PersonalEntries(global_weights, parts.initial_personal, averages=not parts.is_private))
    members.append(AggregatorMember(parts.aggregator, communicator))
    if type(parts.server_module) is not ServerModule:
        members.append(ServerModuleMember(parts.server_module))
    members.append(global_weights)
    if parts.pacing is not None and parts.pacing.is_asynchronous:
        members.append(Messages(global_weights))
    if scenario is not None and scenario.tasks:
        members.append(Tasks(scenario, server.clients))
    members.append(records)
    members.append(ClientEnds(parts.hooks))
    members.append(parts.recorder)
    members.append(parts.plateau)
    members.append(entries)
    return Members(members)
