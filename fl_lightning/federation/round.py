"""One communication round: its exchanges with the clients of the cohort, and its aggregation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from torch import Tensor

from fl_lightning.aggregation import (
    Aggregator,
    GatheringAggregator,
    NonFiniteGuard,
    PartialAggregate,
    ServerModule,
    UpdateTransform,
)
from fl_lightning.aggregation.guard import Wrong, wrong_of
from fl_lightning.aggregation.server_parts import ServerPart
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.store import ClientStore
from fl_lightning.distributed import Communicator
from fl_lightning.engines.cohort import looked_at
from fl_lightning.federation.recorder import Recorder, TrafficCounter, per_exchange
from fl_lightning.federation.result import NOBODY, RoundResult, Sizes, without
from fl_lightning.federation.server import Server
from fl_lightning.functional.state import StateSum, choose, to_host
from fl_lightning.members.faults import (
    NonFiniteUpdateError,
    TransformError,
    as_raised,
    check_measured,
    check_num_samples,
    check_tensors,
    check_update,
    client_error,
    encodes,
    has_layout,
    judge,
    too_few,
)
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import ClientData, ClientJob, ClientResult, ClientUpdate, Engine, State


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
        min_clients: a round with fewer leaves the federation as it was.
        counts_skipped: whether the number of clients left out is logged in every round.
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
    min_clients: int
    counts_skipped: bool
    transforms: Sequence[UpdateTransform]
    communicator: Communicator
    store: ClientStore
    recorder: Recorder
    traffic: TrafficCounter
    initial_personal: Callable[[int], State | None] | None
    view: Callable[[int, int], ClientData]
    hooks: Mapping[str, Sequence[Callable[..., None]]]

    def run(
        self, round_idx: int, cohort: list[int], start: State, before: State, failed: Mapping[int, str] = NOBODY
    ) -> RoundResult:
        """Run all exchanges of a round.

        Args:
            round_idx: from 0.
            cohort: client ids.
            start: a snapshot of the shared entries.
            before: a snapshot of all entries, personal ones included.
            failed: why clients of the cohort are left out that failed when the round was run before, by client id.

        Raises:
            FaultError: naming client and round.
        """
        server, result = self.server, RoundResult(cohort, failed=dict(failed), mark=self.sizes)
        server.begin_round(round_idx, start)
        asked = result.asked
        if len(asked) < self.min_clients:
            result.lose(too_few(len(asked), self.min_clients, *list(failed.values())[-1:]))
            return self._close(result)
        self.server_module.begin_round(asked)
        self.aggregator.begin_round(asked)
        mine = self.communicator.assign_clients(asked, server.size, self.store.owners)
        for exchange in self.client.exchanges:
            self._exchange(exchange, mine, before, result)
            if result.lost or result.repeats or result.problem:
                break
        return self._close(result) if result.lost or not result.repeats else result

    def probe(self, engine: Engine, client_id: int) -> set[str]:
        """Train a client by `engine` and list the keys that it logs; the caller undoes it."""
        exchange = self.client.exchanges[0]
        self.server.begin_round(0, self.weights.snapshot(self.weights.shared))
        self.server_module.begin_round([client_id])
        with closing(engine.run(exchange, self._jobs(exchange, [client_id], {}, RoundResult([client_id])))) as trained:
            keys = {name for one in trained for name in one.logged.names}
        self.abandon()
        return keys

    def _exchange(self, exchange: str, mine: list[int], before: State, result: RoundResult) -> None:
        """Run one exchange with all clients, up to the weights that the next one sends."""
        server_module, rule, communicator = self.server_module, self.aggregator, self.communicator
        gathers, personal = isinstance(rule, GatheringAggregator), PartialAggregate()
        partials = {"rule": rule.partial, "server": server_module.partial, "personal": personal}
        error = self._train(exchange, mine, partials, result)
        if self.guard.skips and exchange != self.client.exchanges[-1] and not (result.lost or result.repeats):
            self._judge_before_next(error, result)
        goes_on = not (result.lost or result.repeats)
        if goes_on:
            communicator.merge(partials, error and as_raised(error), to_root="rule" if gathers else "")
            try:
                aggregate = communicator.from_root(rule.finish, rule.buffers) if gathers else rule.finish()
                new = server_module.finish(exchange, aggregate)
            except Exception as problem:
                if not self.guard.skips:
                    raise
                result.problem = problem  # of what may miss a client that is left out: that is judged first
            else:
                new = None if new is None else self.server.advance(new)
                result.take(new, personal.mean("entries", lambda: before), rule.total_weight("weights"))
        rule.end_exchange()
        server_module.end_exchange()
        for hook in self.hooks["on_exchange_end"] if goes_on else ():
            hook(exchange)

    def _train(
        self, exchange: str, clients: Iterable[int], partials: dict[str, PartialAggregate], result: RoundResult
    ) -> Exception | None:
        """Train clients and take their results in; returns the error of the first that failed."""
        sent = dict[int, ClientJob]()
        try:
            with closing(self.engine.run(exchange, self._jobs(exchange, clients, sent, result))) as trained:
                for one in trained:
                    client_id = one.update.client_id
                    try:
                        self._take(one, sent[client_id], partials, result)
                        if self.counts_skipped:
                            result.took(client_id, self.sizes)
                    except TransformError:
                        raise
                    except Exception as problem:
                        raise client_error(client_id, self.server.round_idx, problem) from problem
        except Exception as problem:
            return problem
        return None

    def _jobs(
        self, exchange: str, clients: Iterable[int], sent: dict[int, ClientJob], result: RoundResult
    ) -> Iterator[ClientJob]:
        """Make the job of every client, when the engine draws it."""
        for client_id in clients:
            made = broadcast = self.server_module.broadcast(exchange, client_id)
            if self.weights.freezes:
                broadcast = self.weights.frozen.outgoing(made, client_id, exchange == self.client.exchanges[0])
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
            sent[client_id] = ClientJob(client_id, broadcast, data, memory, personal, start)
            yield sent[client_id]

    def _take(
        self, one: ClientResult, job: ClientJob, partials: dict[str, PartialAggregate], result: RoundResult
    ) -> None:
        """Pass one client's result through the transforms into the sums, the store's records and the recorder."""
        update, personal_state = self._received(one, job), one.personal
        if statistics := self.aggregator.client_statistics(update):
            self.traffic.count(
                "comm/bytes_up", job.broadcast.exchange, replace(update, weights=None, extras=statistics)
            )
            update = replace(update, extras={**update.extras, **statistics})
        if personal_state is not None and self.weights.shared and self.initial_personal is not None:
            if isinstance(update.included, Tensor):
                initial = self.initial_personal(update.client_id) or personal_state
                personal_state = choose(update.included, personal_state, initial)
            partials["personal"].sums.setdefault("entries", StateSum()).add(personal_state, update.num_samples)
        self.aggregator.add(update)
        if self.aggregator.unchecked:
            self.guard.weighed(update.client_id, self.aggregator.take_unchecked())
        self.server_module.add(update)
        if one.memory or personal_state is not None or update.client_id in self.store.clients:
            result.records[update.client_id] = (one.memory, one.personal)
        self.recorder.logged.absorb(one.logged)
        for hook in self.hooks["on_client_end"]:
            hook(update)

    def _received(self, one: ClientResult, job: ClientJob) -> ClientUpdate:
        """Pass an update through the client's transforms, the attack, the guard and the server's transforms.

        Raises:
            ValueError: the update does not hold what it should.
            TransformError: transforms that do not go together.
        """
        update, broadcast, known = one.update, job.broadcast, job.data.num_samples
        codec = next((i for i, transform in enumerate(self.transforms) if encodes(transform)), len(self.transforms))
        for transform in self.transforms[:codec]:
            update = transform.on_client(update, broadcast)
        update = self.client.transmitted(update, broadcast, job.data)
        for transform in self.transforms[codec:]:
            update = transform.on_client(update, broadcast)
        self.traffic.count("comm/bytes_up", broadcast.exchange, update)
        check_num_samples(update, known)
        shared = self.server.travelling
        altered = one.update.weights is not None and bool(self.transforms) and not has_layout(update.weights, shared)
        if altered:
            check_tensors(update)
        update = self.guard.with_personal(update, one.personal or {}, broadcast, one.update.weights)
        if self.transforms and update.weights is not None:
            update = replace(update, weights=dict(update.weights))  # what the guard has laid out may change now
        for transform in self.transforms:
            update = transform.on_server(update, broadcast)
        if self.transforms:
            check_num_samples(update, known)
            check_tensors(update)
            if isinstance(update.num_samples, Tensor):
                update = self.guard.counted(update, known)
        check_update(update, shared)
        if altered:
            check_measured(self.transforms, self.guard.max_norm)
        return update

    def _close(self, result: RoundResult) -> RoundResult:
        """Check that everything is finite and reduce the logged values, in the round's one transfer to the host.

        Raises:
            NonFiniteUpdateError: naming client or rule, and round.
        """
        logged = self.recorder.logged
        new, idle = None if result.lost else result.weights, self.weights.frozen.idle
        findings = self.guard.take_findings({n: v for n, v in new.items() if n not in idle} if new and idle else new)
        total = [result.total] if isinstance(result.total, Tensor) else []
        values, rows = logged.drain([finding.value for finding in findings] + total)
        if weightless := bool(total) and not values.pop():
            result.weights = None
        wrong = [one for one in wrong_of(findings, values) if one.client_id >= 0 or not weightless]
        broken = {one.client_id for one in wrong if one.client_id >= 0 and one.kind != "weight"}
        rows = without(rows, [span for client_id in broken for span in result.logged.get(client_id, ())])
        here = (wrong, rows, logged.metric_paths(self.client), self.traffic.counted, list(result.records))
        everywhere = self.communicator.all_gather_or_raise(here, None)
        wrongs, found, paths, moved, kept = zip(*everywhere, strict=True)
        if any(wrongs):
            self._judge([one for part in wrongs for one in part], result, any(paths))
        if result.problem and not (result.lost or result.repeats):
            raise result.problem
        if result.repeats and not result.lost:
            return result
        if self.communicator.world > 1:
            for rank, clients in enumerate(kept):
                self.store.own(dict.fromkeys(clients, rank))
        result.metrics.update(logged.reduce(found, paths, self.client))
        if self.counts_skipped or result.failed or result.lost:
            result.give_up(self.server.round_idx, result.lost)
        result.metrics.update(per_exchange(moved, self.client.exchanges))
        self.traffic.clear()
        return result

    def _judge_before_next(self, error: Exception | None, result: RoundResult) -> None:
        """Leave out the clients at fault before others fail in the next exchange by what was made of theirs."""
        findings = self.guard.take_findings()
        wrong = wrong_of(findings, to_host([finding.value for finding in findings]))
        everywhere = self.communicator.all_gather_or_raise(wrong, error and as_raised(error))
        if wrongs := [one for part in everywhere for one in part]:
            self._judge(wrongs, result, counted=True)

    def _judge(self, wrong: Sequence[Wrong], result: RoundResult, counted: bool) -> None:
        """Leave out the clients, or the round, that are at fault for values that must not become the model.

        Args:
            wrong: the values.
            result: of the round.
            counted: whether metric objects have counted clients.

        Raises:
            NonFiniteUpdateError: naming client and round, or the rule; unless they are skipped.
        """
        names = type(self.aggregator).__name__, type(self.server_module).__name__
        broken, faults = judge(wrong, self.server.round_idx, names, self.guard.max_norm)
        if not self.guard.skips:
            if broken and (not faults or " made NaN " in faults[0]):
                client_id = min(broken)
                raise NonFiniteUpdateError(
                    f"every client update must be finite and within its bounds, but client {client_id} "
                    f"{broken[client_id]}; {self.client.nonfinite_hint()}"
                )
            raise NonFiniteUpdateError(faults[0])
        result.leave_out(broken)
        if (left := len(result.asked)) < self.min_clients:
            result.lose(too_few(left, self.min_clients, "".join(list(result.failed.values())[-1:])))
        elif broken and (counted or self._keeps_clients or result.problem):
            result.repeat()
            return
        result.lose("".join(faults[:1]))

    @property
    def _parts(self) -> tuple[ServerPart, ServerPart]:
        return self.aggregator, self.server_module

    @property
    def _keeps_cohort(self) -> bool:
        """True where rule or server module may keep who is asked in a round."""
        return any(overridden(part, "begin_round", ServerPart) for part in self._parts)

    @property
    def _keeps_clients(self) -> bool:
        """True where a client that was taken in may leave more than what it added to the weighted mean."""
        return (
            len(self.client.exchanges) > 1
            or type(self.aggregator) is not Aggregator
            or type(self.server_module) is not ServerModule
            or any(overridden(transform, "state_dict", UpdateTransform) for transform in self.transforms)
            or looked_at(self.hooks["on_round_repeat"])
        )

    @property
    def sizes(self) -> Sizes:
        """Numbers of the values logged so far, where clients may be left out."""
        return self.recorder.logged.sizes if self.counts_skipped else {}

    def forget(self, logged: Sizes) -> None:
        """Drop what all exchanges of the round have left, what was logged since there were so many values included."""
        self.guard.take_findings()
        self.aggregator.take_unchecked()
        self.recorder.logged.cut(logged)

    def abandon(self) -> None:
        """Drop everything that a failed round has collected."""
        self.forget({})
        self.traffic.clear()
        self.recorder.discard_round()
        for part in self._parts:
            part.end_exchange()
