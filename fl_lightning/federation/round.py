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
from fl_lightning.aggregation.guard import Finding, replace_nonfinite
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import Rows
from fl_lightning.client.store import ClientStore
from fl_lightning.distributed import Communicator
from fl_lightning.federation.faults import (
    ClientError,
    Fault,
    FaultSettings,
    NonFiniteUpdateError,
    as_raised,
    check_tensors,
    check_update,
    client_error,
    skipped_of,
)
from fl_lightning.federation.recorder import Recorder, TrafficCounter, per_exchange
from fl_lightning.federation.server import GlobalWeights, Server
from fl_lightning.functional.state import StateSum
from fl_lightning.types import Broadcast, ClientData, ClientJob, ClientResult, Engine, State

Record = tuple[dict[str, Any], State | None]
"""Record of a client: memory and personal entries."""


@dataclass
class RoundResult:
    """Outcome of a round, before anything of it is kept.

    Args:
        weights: the new shared weights, or None: unchanged.
        personal: mean of the participants' personal entries, or None where there is none: no client had data, or
            nothing is shared, so that there is no global model.
        records: memory and personal entries by client id.
        metrics: logged values by log key.
        failed: why a client was left out, by client id.
        lost: why the round leaves the federation as it was; empty where it does not.
        skipped: the clients left out: all of them where the round is lost.
    """

    weights: State | None = None
    personal: State | None = None
    records: dict[int, Record] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    lost: str = ""
    skipped: list[Fault] = field(default_factory=list)


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
        faults: what happens on faults.
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
    faults: FaultSettings
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
            FaultError: naming client and round.
        """
        server, result = self.server, RoundResult()
        server.begin_round(round_idx, self.weights.snapshot(self.weights.shared) if weights is None else weights)
        self._check_enough(cohort, result)
        if not result.lost:
            self.server_module.begin_round(cohort)
            self.aggregator.begin_round(cohort)
            mine = self.communicator.assign_clients(cohort, server.size, self.store.owners)
            for exchange in self.client.exchanges:
                self._exchange(exchange, cohort, mine, result)
                if result.lost:
                    break
        return self._close(cohort, result)

    def probe(self, engine: Engine, client_id: int) -> set[str]:
        """Train a client by `engine` and list the keys that it logs; the caller undoes it."""
        exchange = self.client.exchanges[0]
        self.server.begin_round(0, self.weights.snapshot(self.weights.shared))
        self.server_module.begin_round([client_id])
        with closing(engine.run(exchange, self._jobs(exchange, [client_id], {}, RoundResult()))) as trained:
            keys = {name for one in trained for name in one.logged.names}
        self.abandon()
        return keys

    def _exchange(self, exchange: str, cohort: list[int], mine: list[int], result: RoundResult) -> None:
        """Run one exchange with all clients that have not failed, up to the weights that the next one sends."""
        server_module, rule, communicator = self.server_module, self.aggregator, self.communicator
        gathers, personal = isinstance(rule, GatheringAggregator), PartialAggregate()
        partials = {"rule": rule.partial, "server": server_module.partial, "personal": personal}
        error: Exception | None = None
        try:
            self._train(exchange, [c for c in mine if c not in result.failed], partials, result)
        except ClientError as problem:
            error = as_raised(problem)
        except Exception as problem:
            error = problem
        if self.faults.on_error == "skip":
            for failed in communicator.all_gather_or_raise(result.failed, error):
                result.failed = dict(sorted((result.failed | failed).items()))
            self._check_enough(cohort, result)
            if result.lost:
                rule.end_exchange()
                server_module.end_exchange()
                return
        communicator.merge(partials, error, to_root="rule" if gathers else "")
        aggregate = communicator.from_root(rule.finish, rule.buffers) if gathers else rule.finish()
        new = server_module.finish(exchange, aggregate)
        if new is not None:
            result.weights = self.server.advance(new)
        if personal.sums:
            result.personal = personal.mean("entries")
        rule.end_exchange()
        server_module.end_exchange()
        for hook in self.hooks["on_exchange_end"]:
            hook(exchange)

    def _check_enough(self, cohort: list[int], result: RoundResult) -> None:
        """Give the round up where fewer clients are left than it needs."""
        left, least = len(cohort) - len(result.failed), self.faults.min_clients
        if left < least:
            reasons = "".join(f"; {reason}" for reason in list(result.failed.values())[-1:])
            result.lost = f"{left} clients took part, fewer than model.min_clients={least}{reasons}"

    def _train(
        self, exchange: str, clients: list[int], partials: dict[str, PartialAggregate], result: RoundResult
    ) -> None:
        """Train clients and take their results in; where clients are skipped, one that fails leaves no trace.

        Raises:
            ClientError: for a client that failed and may not be skipped.
        """
        sent, skips = dict[int, Broadcast](), self.faults.on_error == "skip"
        jobs = self._jobs(exchange, clients, sent, result)
        while True:
            before: dict[str, PartialAggregate] = {}
            mark = self.guard.mark if skips else 0
            try:
                with closing(self.engine.run(exchange, jobs)) as trained:
                    for one in trained:
                        if skips:
                            before = {name: partial.copied() for name, partial in partials.items()}
                            mark = self.guard.mark
                        self._take_or_raise(one, sent[one.update.client_id], partials["personal"], result)
                        before = {}
                return
            except ClientError as error:
                if not skips:
                    raise
                result.failed[error.client_id] = error.reason
                result.records.pop(error.client_id, None)
                for name, partial in before.items():
                    partials[name].become(partial.sums, partial.rows)
                self.guard.forget_since(mark)
                self.aggregator.take_unchecked()

    def _take_or_raise(
        self, one: ClientResult, broadcast: Broadcast, personal_sum: PartialAggregate, result: RoundResult
    ) -> None:
        """Take a result in.

        Raises:
            ClientError: naming its client, whatever went wrong.
        """
        try:
            self._take(one, broadcast, personal_sum, result)
        except Exception as error:
            raise client_error(one.update.client_id, broadcast.round_idx, error) from error

    def _jobs(
        self, exchange: str, clients: Iterable[int], sent: dict[int, Broadcast], result: RoundResult
    ) -> Iterator[ClientJob]:
        """Make the job of every client, when the engine draws it."""
        for client_id in clients:
            made = self.server_module.broadcast(exchange, client_id)
            first = exchange == self.client.exchanges[0]
            broadcast = sent[client_id] = self.weights.frozen.outgoing(made, client_id, first)
            self.traffic.count("comm/bytes_down", exchange, broadcast)
            memory, personal = result.records.get(client_id, ({}, None))
            if client_id in self.store.clients and client_id not in result.records:
                memory, personal = self.store.record(client_id)
            if personal is None and self.initial_personal is not None:
                personal = self.initial_personal(client_id)
            start = None
            if made.weights is None or len(made.weights) < len(self.weights.shared):
                start = {**self.server.weights, **(made.weights or {})}
            elif made is not broadcast:
                start = made.weights
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
        if self.transforms:
            check_tensors(update)
        update = self.guard.with_personal(update, personal_state or {}, broadcast)
        if self.transforms and update.weights is not None:
            update = replace(update, weights=dict(update.weights))  # what the guard has laid out may change now
        for transform in self.transforms:
            update = transform.on_server(update, broadcast)
        check_update(update, self.server.travelling)
        if personal_state is not None and self.weights.shared and self.initial_personal is not None:
            if isinstance(update.included, Tensor):
                personal_state = replace_nonfinite(
                    personal_state, update.included, self.initial_personal(update.client_id) or personal_state
                )
            personal_sum.sums.setdefault("entries", StateSum()).add(personal_state, update.num_samples)
        self.aggregator.add(update)
        self.guard.weighed(update.client_id, self.aggregator.take_unchecked())
        self.server_module.add(update)
        if one.memory or personal_state is not None or update.client_id in self.store.clients:
            result.records[update.client_id] = (one.memory, one.personal)
        self.recorder.logged.absorb(one.logged)
        for hook in self.hooks["on_client_end"]:
            hook(update)

    def _close(self, cohort: list[int], result: RoundResult) -> RoundResult:
        """Check that everything is finite and reduce the logged values, in the round's one transfer to the host.

        Raises:
            NonFiniteUpdateError: naming client or rule, and round.
        """
        logged = self.recorder.logged
        new, idle = None if result.lost else result.weights, self.weights.frozen.idle
        findings = self.guard.take_findings({n: v for n, v in new.items() if n not in idle} if new and idle else new)
        host, rows = logged.drain([finding.value for finding in findings])
        broken, faults = self._judge(findings, host)
        here = (broken, faults, rows, logged.metric_paths(self.client), self.traffic.take(), list(result.records))
        everywhere = self.communicator.all_gather_or_raise(here, None)
        for rank, there in enumerate(everywhere):
            broken |= there[0]
            if self.communicator.world > 1:
                self.store.own(dict.fromkeys(there[5], rank))
        faults = [fault for there in everywhere for fault in there[1]]
        found = [there[2] for there in everywhere]
        if broken or faults:
            self._refuse(broken, faults)
            found = [finite_rows(part) for part in found]
            result.failed |= dict(sorted(broken.items()))
            result.lost = result.lost or "".join(faults[:1])
            self._check_enough(cohort, result)
        result.metrics = logged.reduce(found, [there[3] for there in everywhere], self.client)
        for client_id in result.records.keys() & result.failed:
            del result.records[client_id]
        self.give_up(cohort, result, result.lost)
        result.metrics |= per_exchange([there[4] for there in everywhere], self.client.exchanges)
        return result

    def give_up(self, cohort: list[int], result: RoundResult, lost: str) -> None:
        """Note which clients are skipped: all of the cohort where the round is lost, of which nothing is kept then."""
        result.lost, result.skipped = lost, skipped_of(self.server.round_idx, result.failed, cohort, lost)
        if lost:
            result.weights, result.personal, result.records = None, None, {}
        if self.faults.skips or lost:
            result.metrics["train/skipped"] = float(len(result.skipped))

    def abandon(self) -> None:
        """Drop everything that a failed round has collected."""
        self.guard.take_findings()
        self.aggregator.take_unchecked()
        self.traffic.take()
        self.recorder.discard_round()
        self.aggregator.end_exchange()
        self.server_module.end_exchange()

    def _judge(self, findings: Sequence[Finding], values: Sequence[float]) -> tuple[dict[int, str], list[str]]:
        """Say which clients are at fault, by client id, and what is wrong with the rule's weights and the aggregate."""
        broken: dict[int, str] = {}
        faults: list[str] = []
        rule, server_module = type(self.aggregator).__name__, type(self.server_module).__name__
        round_idx, most = self.server.round_idx, self.guard.max_norm
        for (client_id, kind, _), value in zip(findings, values, strict=False):
            if kind == "weight" and not 0 <= value < math.inf:
                faults.append(
                    f"{rule} must give finite weights, but the weight of client {client_id} must be at least 0, got "
                    f"{value} in round {round_idx}; mend its weight()"
                )
            elif kind == "norm" and most is not None and not value <= most:
                said = (
                    f"returned an update of norm {value:.4g} in round {round_idx}, above model.max_update_norm={most}"
                )
                broken.setdefault(client_id, said)
            elif kind == "values" and not math.isfinite(value):
                if client_id >= 0:
                    broken[client_id] = f"returned NaN or infinite values in round {round_idx}"
                elif not faults:
                    faults.append(
                        f"the new global weights must be finite, but {rule} and {server_module} made NaN or infinite "
                        f"values of finite updates in round {round_idx}; lower the rule's step, or take another "
                        f"aggregator"
                    )
        return broken, faults

    def _refuse(self, broken: Mapping[int, str], faults: Sequence[str]) -> None:
        """End the round, unless what is not finite is skipped.

        Raises:
            NonFiniteUpdateError: naming client and round, or the rule.
        """
        if self.guard.skips:
            return
        if broken and (not faults or " made NaN " in faults[0]):
            client_id = min(broken)
            raise NonFiniteUpdateError(
                f"every client update must be finite and within its bounds, but client {client_id} "
                f"{broken[client_id]}; {self.client.nonfinite_hint()}"
            )
        raise NonFiniteUpdateError(faults[0])


def finite_rows(rows: Rows) -> Rows:
    """Drop NaN and infinite values from what was logged: those of clients that are left out."""
    finite = {name: (kind, [row for row in pairs if math.isfinite(row[0])]) for name, (kind, pairs) in rows.items()}
    return {name: (kind, pairs) for name, (kind, pairs) in finite.items() if pairs}
