"""One communication round: its exchanges with the clients of the cohort, and its aggregation."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fl_lightning.aggregation import (
    Aggregator,
    GatheringAggregator,
    NonFiniteGuard,
    PartialAggregate,
    ServerModule,
    UpdateTransform,
)
from fl_lightning.aggregation.guard import replace_nonfinite
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import Rows
from fl_lightning.client.store import ClientStore
from fl_lightning.distributed import Communicator
from fl_lightning.federation.recorder import Recorder, TrafficCounter, per_exchange
from fl_lightning.federation.server import GlobalWeights, Server
from fl_lightning.functional.state import StateSum
from fl_lightning.types import Broadcast, ClientData, ClientJob, ClientResult, Engine, State

Record = tuple[dict[str, Any], State | None]
"""Record of a client: memory and personal entries."""


class NonFiniteUpdateError(RuntimeError):
    """Error for NaN or infinite weights of a client or the rule; the global model is that of the round before."""


@dataclass
class RoundResult:
    """Outcome of a round, before anything of it is kept.

    Args:
        weights: the new shared weights, or None: unchanged.
        personal: mean of the participants' personal entries, or None where there is none: no client had data, or
            nothing is shared, so that there is no global model.
        records: memory and personal entries by client id.
        metrics: logged values by log key.
    """

    weights: State | None = None
    personal: State | None = None
    records: dict[int, Record] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Runs rounds; the caller decides whether to keep the result.

    Args:
        client: the module whose exchanges these are.
        engine: trains clients.
        server: the server as its parts see it.
        weights: the global model's entries in the client module.
        server_module: the method's server side.
        aggregator: the rule.
        guard: the first transform between client and sum.
        transforms: the further ones, in order.
        communicator: joins the processes of the run.
        store: of the clients' memory and personal entries.
        recorder: of logged values.
        traffic: counts bytes.
        initial_personal: `client_id -> ` its personal entries before its first training; None: there are none.
        view: `(client_id, round_idx) -> ` the client's data.
        hooks: what callbacks are told of clients and exchanges, by name.
    """

    client: ClientModule
    engine: Engine
    server: Server
    weights: GlobalWeights
    server_module: ServerModule
    aggregator: Aggregator
    guard: NonFiniteGuard
    transforms: Sequence[UpdateTransform]
    communicator: Communicator
    store: ClientStore
    recorder: Recorder
    traffic: TrafficCounter
    initial_personal: Callable[[int], State | None] | None
    view: Callable[[int, int], ClientData]
    hooks: Mapping[str, Sequence[Callable[..., None]]]

    def run(self, round_idx: int, cohort: list[int], weights: State | None = None) -> RoundResult:
        """Run all exchanges of a round.

        Args:
            round_idx: from 0.
            cohort: client ids.
            weights: a snapshot of the shared entries; None: it is taken here.

        Raises:
            NonFiniteUpdateError: naming client and round.
        """
        server, server_module, rule, communicator = self.server, self.server_module, self.aggregator, self.communicator
        gathers, result = isinstance(rule, GatheringAggregator), RoundResult()
        server.begin_round(round_idx, self.weights.snapshot(self.weights.shared) if weights is None else weights)
        server_module.begin_round(cohort)
        rule.begin_round(cohort)
        mine = communicator.assign_clients(cohort, server.size, self.store.owners)
        for exchange in self.client.exchanges:
            personal, sent = PartialAggregate(), dict[int, Broadcast]()
            partials = {"rule": rule.partial, "server": server_module.partial, "personal": personal}
            error: Exception | None = None
            try:
                with closing(self.engine.run(exchange, self._jobs(exchange, mine, sent, result))) as trained:
                    for one in trained:
                        self._take(one, sent[one.update.client_id], personal, result)
            except Exception as problem:
                error = problem
            communicator.merge(partials, error, to_root="rule" if gathers else "")
            aggregate = communicator.from_root(rule.finish, rule.buffers) if gathers else rule.finish()
            new = server_module.finish(exchange, aggregate)
            if new is not None:
                result.weights = server.advance(new)
            if personal.sums:
                result.personal = personal.mean("entries")
            rule.end_exchange()
            server_module.end_exchange()
            for hook in self.hooks["on_exchange_end"]:
                hook(exchange)
        return self._close(result)

    def _jobs(
        self, exchange: str, clients: Iterable[int], sent: dict[int, Broadcast], result: RoundResult
    ) -> Iterator[ClientJob]:
        """Make the job of every client, when the engine draws it."""
        for client_id in clients:
            broadcast = sent[client_id] = self.server_module.broadcast(exchange, client_id)
            self.traffic.count("comm/bytes_down", exchange, broadcast)
            memory, personal = result.records.get(client_id, ({}, None))
            if client_id in self.store.clients and client_id not in result.records:
                memory, personal = self.store.record(client_id)
            if personal is None and self.initial_personal is not None:
                personal = self.initial_personal(client_id)
            start = None
            if broadcast.weights is None or len(broadcast.weights) < len(self.weights.shared):
                start = {**self.server.weights, **(broadcast.weights or {})}
            data = self.view(client_id, self.server.round_idx)
            yield ClientJob(client_id, broadcast, data, memory, personal, start)

    def _take(
        self, one: ClientResult, broadcast: Broadcast, personal_sum: PartialAggregate, result: RoundResult
    ) -> None:
        """Pass one client's result through the transforms into the sums, the store's records and the recorder."""
        update, personal_state = one.update, one.personal
        if statistics := self.aggregator.client_statistics(update):
            update = replace(update, extras={**update.extras, **statistics})
        for transform in self.transforms:
            update = transform.on_client(update, broadcast)
        self.traffic.count("comm/bytes_up", broadcast.exchange, update)
        update = self.guard.with_personal(update, personal_state or {})
        if self.transforms and update.weights is not None:
            update = replace(update, weights=dict(update.weights))  # what the guard has laid out may change now
        for transform in self.transforms:
            update = transform.on_server(update, broadcast)
        if personal_state is not None and self.weights.shared and self.initial_personal is not None:
            if isinstance(update.included, Tensor):
                personal_state = replace_nonfinite(
                    personal_state, update.included, self.initial_personal(update.client_id) or personal_state
                )
            personal_sum.sums.setdefault("entries", StateSum()).add(personal_state, update.num_samples)
        self.aggregator.add(update)
        self.server_module.add(update)
        if one.memory or personal_state is not None or update.client_id in self.store.clients:
            result.records[update.client_id] = (one.memory, one.personal)
        self.recorder.logged.absorb(one.logged)
        for hook in self.hooks["on_client_end"]:
            hook(update)

    def _close(self, result: RoundResult) -> RoundResult:
        """Check that everything is finite and reduce the logged values, in the round's one transfer to the host.

        Raises:
            NonFiniteUpdateError: naming client and round.
        """
        logged = self.recorder.logged
        clients, totals = self.guard.take_totals(result.weights)
        host, rows = logged.drain(totals)
        broken = set()
        for client_id, total in zip(clients, host, strict=False):
            if not math.isfinite(total):
                broken.add(client_id)
        here = (broken, rows, logged.metric_paths(self.client), self.traffic.take(), list(result.records))
        found, paths, counted = [], [], []
        for rank, there in enumerate(self.communicator.all_gather_or_raise(here, None)):
            broken |= there[0]
            found.append(there[1])
            paths.append(there[2])
            counted.append(there[3])
            if self.communicator.world > 1:
                self.store.own(dict.fromkeys(there[4], rank))
        aggregate_is_finite = all(map(math.isfinite, host[len(clients) :]))
        if broken or not aggregate_is_finite:
            self._refuse(broken, aggregate_is_finite)
            found = [finite_rows(part) for part in found]
            for client_id in broken & result.records.keys():
                del result.records[client_id]
        result.metrics = logged.reduce(found, paths, self.client)
        if self.guard.skips:
            result.metrics["train/skipped"] = float(len(broken))
        result.metrics |= per_exchange(counted, self.client.exchanges)
        return result

    def abandon(self) -> None:
        """Drop everything that a failed round has collected."""
        self.guard.take_totals()
        self.traffic.take()
        self.recorder.discard_round()
        self.aggregator.end_exchange()
        self.server_module.end_exchange()

    def _refuse(self, broken: set[int], aggregate_is_finite: bool) -> None:
        """End the round, unless the clients that are not finite were left out and the others' aggregate is finite.

        Raises:
            NonFiniteUpdateError: naming client and round, or the rule.
        """
        if broken and not self.guard.skips:
            raise NonFiniteUpdateError(
                f"every client update must be finite, but client {min(broken)} returned NaN or infinite values in "
                f"round {self.server.round_idx}; {self.client.nonfinite_hint()}"
            )
        if not aggregate_is_finite:
            raise NonFiniteUpdateError(
                f"the new global weights must be finite, but {type(self.aggregator).__name__} and "
                f"{type(self.server_module).__name__} made NaN or infinite values of finite updates in round "
                f"{self.server.round_idx}; lower the rule's step, or take another aggregator"
            )


def finite_rows(rows: Rows) -> Rows:
    """Drop NaN and infinite values from what was logged: those of clients that are left out."""
    finite = {name: (kind, [row for row in pairs if math.isfinite(row[0])]) for name, (kind, pairs) in rows.items()}
    return {name: (kind, pairs) for name, (kind, pairs) in finite.items() if pairs}
