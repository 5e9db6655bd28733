"""The one list of a round's members, and those of them that other rooms have the parts of."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from fl_lightning.members.pace import Pace
from fl_lightning.members.structure import Structure
from fl_lightning.members.traces import Traces
from fl_lightning.members.user_entries import UserEntries
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Check, ClientResult, Member, Members, RoundOutcome, State

LEAST = 5e-324
"""The smallest number above 0."""


class ClientRecords(Member):
    """Memory and personal entries of the round's clients, which the store keeps once the round is over.

    Args:
        store: of all clients'.
        communicator: joins the processes of the run.
        weights: know which entries are personal.
        initial: personal entries before any training, by name.
    """

    name = "store"

    def __init__(self, store: ClientStore, communicator: Communicator, weights: GlobalWeights, initial: State) -> None:
        self._store, self._communicator, self._weights, self._initial = store, communicator, weights, initial
        self._records: dict[int, tuple[dict[str, Any], State | None]] = {}

    def of(self, client_id: int) -> tuple[dict[str, Any], State | None]:
        """Look up memory and personal entries, as the exchange before or the round before has left them."""
        memory, personal = self._records.get(client_id, ({}, None))
        if client_id in self._store.clients and client_id not in self._records:
            memory, personal = self._store.record(client_id)
        if personal is None and self._weights.personal:
            personal = {name: self._initial[name] for name in self._weights.personal_of(client_id)}
        return memory, personal

    def incoming(self, result: ClientResult) -> ClientResult:
        client_id, memory, personal = result.update.client_id, result.job.memory, result.personal
        if memory or personal is not None or client_id in self._store.clients:
            self._records[client_id] = memory, personal
        return result

    def share(self) -> list[int]:
        return list(self._records)

    def end(self, outcome: RoundOutcome, shared: Sequence[list[int]]) -> Mapping[str, float]:
        """Store the records, and learn which process has whose."""
        if self._communicator.world > 1:
            for rank, clients in enumerate(shared):
                self._store.own(dict.fromkeys(clients, rank))
        records = {c: record for c, record in self._records.items() if c not in outcome.failed and not outcome.aborted}
        if records:
            self._store.put(records, outcome.round_idx)
        self._records = {}
        return {}

    def move(self, ranks: Mapping[int, int]) -> None:
        """Hand the records of clients over to the ranks that train them, by client id."""
        store, here = self._store, self._communicator.rank
        moved = {client_id: rank for client_id, rank in ranks.items() if store.owners.get(client_id, rank) != rank}
        if not moved:
            return
        leaving = {client_id: store.leaving(client_id) for client_id in store.clients & moved.keys()}
        for part in self._communicator.gather(leaving):
            for client_id, record in part.items():
                if moved[client_id] == here:
                    store.take(client_id, record)
        for client_id in leaving:
            store.release(client_id)
        store.own(moved)

    def mark(self) -> bool:
        """Record that a round is under way: no record is stored before it is over."""
        return True

    def undo(self, mark: bool) -> None:
        self._records = {}

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Gather the records of all processes on the root process.

        Raises:
            RuntimeError: inside a round of several processes, which are not at the same client.
        """
        store, communicator = self._store, self._communicator
        if communicator.world == 1 or not store.owners:
            return store.state_dict()
        if mark is not None:
            raise RuntimeError(
                f"a checkpoint cannot be saved inside a round of {communicator.world} processes, which are at "
                f"different clients; save it in on_train_batch_end or later"
            )
        parts = communicator.gather_to_root(to_device(store.state_dict(), torch.device("cpu")))
        records = {client_id: content for part in parts for client_id, content in part["records"].items()}
        files = torch.cat([part["files"] for part in parts]) if parts else torch.empty(0, 5, dtype=torch.int64)
        return {"records": dict(sorted(records.items())), "files": files[files[:, 0].argsort()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._store.load_state_dict(state, self._communicator.rank, self._communicator.world)


class Transforms(Member):
    """Base of the transforms of updates, on either side.

    Args:
        transforms: in order.
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
            transform.load_state_dict(copy.deepcopy(state))  # which may be needed again


class ClientTransforms(Transforms):
    """Transforms of an update before it leaves the client.

    Args:
        transforms: in order.
    """

    at_client = True

    def __init__(self, transforms: Iterable[UpdateTransform]) -> None:
        super().__init__(t for t in transforms if overridden(t, "on_client", UpdateTransform))

    def on_client(self, result: ClientResult) -> ClientResult:
        update, trained = result.update, result.update.weights if result.trained is None else result.trained
        for transform in self._transforms:
            update = transform.on_client(update, result.job.broadcast)
        return result._replace(update=update, trained=trained)


class Transmitted(Member):
    """Replaces what leaves the client, where the client's class does so: an attack's place.

    Args:
        client: the module.
    """

    at_client = True

    def __init__(self, client: ClientModule) -> None:
        self._client = client

    def on_client(self, result: ClientResult) -> ClientResult:
        job = result.job
        return result._replace(update=self._client.transmitted(result.update, job.broadcast, job.data))


class Arrivals(Member):
    """Checks an update when it arrives.

    One that transforms of the server read is checked again behind them.

    Args:
        server: knows the shared entries.
        transforms: of updates.
    """

    def __init__(self, server: Server, transforms: Sequence[UpdateTransform]) -> None:
        self._server, self._transforms = server, transforms

    def incoming(self, result: ClientResult) -> ClientResult:
        """Refuse a number of samples that the client cannot have, and entries that are not the shared ones.

        Raises:
            ValueError: naming entry or number.
            TypeError: something of another type.
        """
        update, shared, known = result.update, self._server.transmitted_entries, result.job.data.num_samples
        if type(update.num_samples) is not int or not 0 <= update.num_samples <= known:
            check_num_samples(update, known)
        if self._transforms:
            check_tensors(update)
        elif update.weights is not None and not has_layout(update.weights, shared):
            check_update(update, shared)
        return result


class ServerTransforms(Transforms):
    """Transforms of an update at the server, behind the guard.

    What they make is checked.

    Args:
        transforms: in order.
        server: knows the shared entries.
        guard: judges what lies on the device.
    """

    name = "transforms"

    def __init__(self, transforms: Sequence[UpdateTransform], server: Server, guard: NonFiniteGuard) -> None:
        super().__init__(transforms)
        self._server, self._guard = server, guard
        self.keeps_clients = any(overridden(transform, "state_dict", UpdateTransform) for transform in transforms)

    def incoming(self, result: ClientResult) -> ClientResult:
        """Transform an update.

        Raises:
            ValueError: what they make is not the update of a client.
            TransformError: transforms that do not go together.
        """
        update, known, shared = result.update, result.job.data.num_samples, self._server.transmitted_entries
        altered = result.trained is not None and not has_layout(update.weights, shared)
        if update.weights is not None:
            update = replace(update, weights=dict(update.weights))  # what the guard has laid out may change now
        for transform in self._transforms:
            update = transform.on_server(update, result.job.broadcast)
        check_num_samples(update, known)
        check_update(update, shared)
        if isinstance(update.num_samples, Tensor):
            update = self._guard.counted(update, known)
        if altered:
            check_measured(self._transforms, self._guard.max_norm)
        return result._replace(update=update)

    def state_dict(self, mark: Any = None) -> list[dict[str, Any]]:
        return self.mark() if mark is None else mark

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Take the states.

        Raises:
            ValueError: of another number of transforms.
        """
        if len(state) != len(self._transforms):
            raise ValueError(
                f"the checkpoint must be of the same model.transforms, but has {len(state)} and there are "
                f"{len(self._transforms)} here; give the configuration it was made with"
            )
        self.undo(state)


class PersonalEntries(Member):
    """Personal entries before any training, and the means of the participants', with which the model is evaluated.

    Args:
        weights: know which entries are personal.
        initial: those before any training, by name.
        averages: whether means are taken; under privacy they are not: nothing hides a client in them.
    """

    name = "initial_personal"

    def __init__(self, weights: GlobalWeights, initial: State, averages: bool = True) -> None:
        self._weights, self._initial, self._partial = weights, initial, PartialAggregate()
        self._mean, self._averages = State(), averages

    @property
    def is_used(self) -> bool:
        return bool(self._averages and self._weights.personal and self._weights.shared)

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._mean = State()

    def incoming(self, result: ClientResult) -> ClientResult:
        update, personal = result.update, result.personal
        if personal is not None:
            if isinstance(update.included, Tensor):
                personal = choose(update.included, personal, self._initial)
            self._partial.sums.setdefault("entries", StateSum()).add(personal, update.num_samples)
        return result

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        self._mean = self._partial.mean("entries", lambda: self._weights.before) or self._mean
        return state

    @property
    def partial(self) -> PartialAggregate:
        return self._partial

    def end_exchange(self) -> None:
        self._partial = PartialAggregate()

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        outcome.take_entries(self._mean)
        return {}

    def undo(self, mark: None) -> None:
        self.end_exchange()

    def state_dict(self, mark: Any = None) -> State:
        return dict(self._initial)

    def load_state_dict(self, state: State) -> None:
        self._initial.clear()
        self._initial.update(to_device(state, self._weights.client.device))


class PartOfServer(Member):
    """Base of rule and server module as members.

    Args:
        part: of the server.
        name: that it has in the loop.
    """

    def __init__(self, part: ServerPart, name: str) -> None:
        self._part, self.name = part, name
        self.keeps_cohort = overridden(part, "begin_round", ServerPart)

    @property
    def partial(self) -> PartialAggregate:
        return self._part.partial

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._part.begin_round(cohort)

    def end_exchange(self) -> None:
        self._part.end_exchange()

    def mark(self) -> dict[str, Any]:
        return self._part.snapshot()

    def undo(self, mark: Mapping[str, Any]) -> None:
        self._part.load_state_dict(mark)
        if self.partial.sums or self.partial.rows:  # of an exchange that was broken off
            self._part.end_exchange()

    def entries_at(self, mark: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"{self.name}.{key}": value for key, value in mark.items()}


class Rule(PartOfServer):
    """The rule that makes one set of weights of the clients'.

    Args:
        rule: the rule.
        communicator: joins the processes of the run.
    """

    def __init__(self, rule: Aggregator, communicator: Communicator) -> None:
        super().__init__(rule, "aggregator")
        self._rule, self._communicator = rule, communicator
        self.gathers, self.keeps_clients = isinstance(rule, GatheringAggregator), type(rule) is not Aggregator
        self._checks: list[Check] = []
        self._total: float | Tensor = 0
        """Σ of the weights over all clients and exchanges; 0: the shared entries stay as they are."""

    def incoming(self, result: ClientResult) -> ClientResult:
        """Add an update, as every member before has left it."""
        update, rule = result.update, self._rule
        if statistics := rule.client_statistics(update):
            update = replace(update, extras={**update.extras, **statistics})
            result = result._replace(update=update)
        rule.add(update)
        weights = [torch.as_tensor(weight).detach() for weight in rule.take_unchecked()]
        self._checks += [Check(update.client_id, "weight", weight, 0.0) for weight in weights]
        return result

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        checks, self._checks = self._checks, []
        if outcome is not None:
            total, self._total = self._total, 0
            checks += [Check(-1, "total", total, LEAST)] if isinstance(total, Tensor) else []
        return checks

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        rule = self._rule
        new = self._communicator.from_root(rule.finish, rule.buffers) if self.gathers else rule.finish()
        self._total = self._total + rule.total_weight("weights")
        return new

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        return {} if outcome.aborted else self._rule.row_values()

    def undo(self, mark: Mapping[str, Any]) -> None:
        super().undo(mark)
        self._checks, self._total = [], 0
        self._rule.take_unchecked()


class MethodAtServer(PartOfServer):
    """The method's server side, which takes in updates behind the rule.

    Args:
        module: the server side.
    """

    def __init__(self, module: ServerModule) -> None:
        super().__init__(module, "server_module")
        self._module, self.keeps_clients = module, True

    def incoming(self, result: ClientResult) -> ClientResult:
        self._module.add(result.update)
        return result

    def aggregated(self, exchange: str, state: State | None) -> State | None:
        return self._module.finish(exchange, state)


class ClientEnds(Member):
    """Tells callbacks of every client that was taken in.

    Args:
        hooks: what is told of clients, by name.
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


def members_at_client(parts: FederationParts, weights: GlobalWeights) -> list[Member]:
    """List what goes with an engine, wherever it is: what a client is sent and keeps, and what leaves it.

    Args:
        parts: of the federation.
        weights: in the client's module.
    """
    client, transforms = parts.client, parts.transforms
    two_sided = next((i for i, transform in enumerate(transforms) if encodes(transform)), len(transforms))
    # somebody's own code that runs while a client is trained may change its modules
    foreign = runs_foreign_code(client) or need_module(chain(*parts.hooks.values(), *parts.batch_hooks.values()))
    return [
        *([Structure(client, weights)] if foreign else []),
        *weights.features,
        ClientTransforms(transforms[:two_sided]),
        *([Transmitted(client)] if overridden(client, "transmitted", ClientModule) else []),
        ClientTransforms(transforms[two_sided:]),
        *([Encoder(Coding(parts.codec, weights), weights, client.changes)] if parts.codec else []),
    ]


def members_of(
    parts: FederationParts,
    server: Server,
    communicator: Communicator,
    records: ClientRecords,
    entries: UserEntries,
    pace: Pace | None,
) -> Members:
    """List all that takes part in a round or keeps state over it, in the order of a message's way.

    Args:
        parts: of the federation.
        server: of the federation.
        communicator: joins the processes of the run.
        records: of the round's clients.
        entries: of the user's modules in a checkpoint.
        pace: measures clients, or None.
    """
    weights, transforms, guard, codec = server.global_weights, parts.transforms, parts.guard, parts.codec
    coded_down = [CodedBroadcast(DownCoding(codec, weights), server, server.send)] if codec and codec.down else []
    return Members(
        [
            *([Traces(parts.client)] if parts.faults.on_error == "skip" else []),
            *members_at_client(parts, weights),
            *coded_down,
            parts.recorder.traffic,
            parts.skipped,
            *([Decoder(Coding(codec, weights))] if codec else []),
            # what the server takes in
            Arrivals(server, transforms),
            guard,
            ServerTransforms(transforms, server, guard),
            PersonalEntries(weights, parts.initial_personal, averages=not parts.is_private),
            Rule(parts.aggregator, communicator),
            *([] if type(parts.server_module) is ServerModule else [MethodAtServer(parts.server_module)]),
            weights,
            records,
            ClientEnds(parts.hooks),
            *([] if pace is None else [pace]),
            parts.recorder,
            parts.plateau,
            entries,
        ]
    )
