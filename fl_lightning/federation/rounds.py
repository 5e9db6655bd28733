"""The communication rounds of one fit. A round is kept as a whole, or leaves the federation as it was."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation.timeline import Job
from fl_lightning.federation.run import FederatedRun
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.functional.state import to_host
from fl_lightning.members.faults import (
    ClientError,
    NonFiniteUpdateError,
    as_raised,
    client_error,
    judge,
)
from fl_lightning.types import Check, ClientJob, ClientResult, Member, Message, RoundOutcome, State, Undo, does
from fl_lightning.utils.settings import SettingError

Shares = list[dict[str, Any]]
"""What each process shares at the end of a round, by name of the member."""


class Rounds:
    """Runs the rounds of one fit.

    The constructor opens the store of the clients and limits the threads of this process.

    Args:
        run: The objects of the Trainer's run.
        server_step: Steps the global model.
        tells_empty: Whether a warning tells of the first round that no client with samples takes part in.

    Attributes:
        under_way: Undoes the current round. None between rounds.

    Raises:
        ValueError: A transform does not work with several processes.
        Exception: The store could not be opened, in this or another process.
    """

    def __init__(self, run: FederatedRun, server_step: ServerOptimizer, *, tells_empty: bool) -> None:
        self.parts = run.parts
        self.server = run.server
        self.members = run.members
        self.communicator = run.communicator
        self.records = run.records
        self.engine = run.clients_engine
        self.under_way: Undo | None = None
        self._exchanges: tuple[str, ...] = ()
        """The names of the exchanges of the present round, in order."""
        self._run = run
        self._server_step = server_step
        self._tells_empty = tells_empty
        run.begin_fit()
        self._view = run.data.views()
        self.pace = run.pace
        self._messages = run.messages

    def run(self, round_idx: int, cohort: list[int], step: Callable[[], Any], scaler: Any | None) -> dict[str, float]:
        """Run one round, with one step of the server optimizer.

        Args:
            round_idx: Index of the round, from 0.
            cohort: Ids of the clients of the round.
            step: Steps the server optimizer.
            scaler: The Trainer's gradient scaler, or None.

        Returns:
            The values of the round by log key.

        Raises:
            FaultError: A client or the server has failed. The federation is as it was before the round.
            RuntimeError: The user's code has raised StopIteration.
        """
        recorder = self.parts.recorder
        with self.undone_on_error() as undo:
            outcome = RoundOutcome(round_idx, cohort, before=self.server.global_weights.before)
            try:
                shares = self._attempt(outcome)
                while outcome.repeats:
                    outcome = self._undo_attempt(outcome, undo)
                    shares = self._attempt(outcome)
                self._tell_empty(outcome)
                logged = recorder.reduce(outcome, shared=[part[recorder.name] for part in shares])
            except StopIteration as stop:  # Lightning would take it for the end of the epoch.
                raise RuntimeError(f"a StopIteration ended round {round_idx}; end a generator by return") from stop
            stepped = self._server_step.step(
                start=self.server.global_weights.start,
                new=self.server.refined(outcome.weights),
                run=step,
                scaler=scaler,
            )
            if stepped is None:
                outcome.abort(self._overflow(round_idx))
            outcome.update_entries(outcome.before | (stepped or {}))
            values = {**logged, **self._end_members(outcome, shares)}
            if outcome.aborted:
                undo.undo()
        return values

    def _tell_empty(self, outcome: RoundOutcome) -> None:
        """Warn once of a round that leaves the model as it is because no client has samples."""
        if not self._tells_empty or outcome.weights is not None or outcome.is_over:
            return
        clients = outcome.asked
        sizes = [self._run.data.size(client_id, self._version(client_id, outcome.round_idx)) for client_id in clients]
        if clients and not any(sizes):
            self._tells_empty = False
            rank_zero_warn(
                f"no client of round {outcome.round_idx} has samples: this round, and any like it, leaves the model as "
                f"it is"
            )

    def _end_members(self, outcome: RoundOutcome, shares: Shares) -> dict[str, float]:
        """End the round for its members, and return their values by log key."""
        members: Iterable[Member] = self.members.of("end")
        if outcome.aborted:
            # A round without any client also ends for the members that took no part.
            members = [member for member in self.members.all if does(member, "end")]
        values: dict[str, float] = {}
        for member in members:
            shared = [part[member.name] for part in shares if member.name in part]
            new_values = member.end(outcome, shared)
            values = {**new_values, **values}  # The member that comes first in the order wins.
        return values

    @contextmanager
    def undone_on_error(self) -> Iterator[Undo]:
        """Make the context of a round, which undoes the round if it ends with an error."""
        self.members.prepare()
        self.under_way = self.members.undoing()
        try:
            with self.under_way as undo:
                yield undo
        except BaseException:
            self.parts.recorder.discard_round()
            raise
        finally:
            self.under_way = None
            self.server.end_round()

    def _undo_attempt(self, outcome: RoundOutcome, undo: Undo) -> RoundOutcome:
        """Undo a round that must be repeated, and return the outcome of the next attempt.

        The next attempt excludes the clients that have failed. All its draws stay the same.
        """
        undo.undo()
        for hook in self.parts.hooks["on_round_repeat"]:
            hook()
        return RoundOutcome(
            outcome.round_idx,
            outcome.cohort,
            before=self.server.global_weights.before,
            failed=outcome.failed,
        )

    def _attempt(self, outcome: RoundOutcome) -> Shares:
        """Run all exchanges with the clients that have not failed, and judge the result.

        Returns:
            What the members of each process share. Empty if the round must be repeated.
        """
        clients = outcome.asked
        self.server.begin_round(outcome.round_idx)
        own = self.parts.client.exchanges
        self._exchanges = self.parts.server_module.exchanges_of(outcome.round_idx, own)
        if len(clients) < self.parts.min_clients:
            self._abort_if_small(outcome)
            self._send_ahead(outcome.round_idx)
        else:
            for member in self.members.of("begin"):
                member.begin(outcome.round_idx, clients)
            self._send_ahead(outcome.round_idx)
            ranks = self.communicator.assign_clients(
                clients, cost=self._run.client_cost, owners=self.server.store.owners
            )
            local_clients = [client_id for client_id in clients if ranks[client_id] == self.communicator.rank]
            for exchange in self._exchanges:
                if not outcome.is_over:
                    self._exchange(exchange, local_clients, outcome)
        if outcome.repeats:
            return []
        return self._close(outcome)

    def _exchange(self, exchange: str, clients: list[int], outcome: RoundOutcome) -> None:
        """Train the clients of one exchange, and make the weights for the next exchange.

        Args:
            exchange: Name of the exchange.
            clients: Ids of the clients of this process.
            outcome: The outcome of the round.
        """
        is_last = exchange == self._exchanges[-1]
        error: Exception | None = None
        if self.parts.faults.on_error == "skip":
            self._train_tolerantly(exchange, clients, outcome)
        else:
            error = self._train(exchange, clients, taken=set())
        if self.parts.faults.nonfinite == "skip" and not is_last and not outcome.is_over:
            self._judge_before_next(error, outcome)
        goes_on = not outcome.is_over
        if goes_on:
            self.communicator.merge(self.members.of("partial"), error)
            self._aggregate(exchange, outcome)
        for member in self.members.of("end_exchange"):
            member.end_exchange()
        if goes_on:
            for hook in self.parts.hooks["on_exchange_end"]:
                hook(exchange)

    def _aggregate(self, exchange: str, outcome: RoundOutcome) -> None:
        """Make the new shared entries from the updates of an exchange."""
        new: State | None = None
        try:
            for member in self.members.of("aggregated"):
                new = member.aggregated(exchange, new)
        except Exception as problem:
            if self.parts.faults.nonfinite != "skip":
                raise
            # The cause may be a client that will be left out, so the checks are judged first.
            outcome.defer_error(problem)
            return
        if new is not None:
            outcome.set_weights(self.server.advance(new))

    # --- the clients of an exchange ---

    def _train_tolerantly(self, exchange: str, clients: Sequence[int], outcome: RoundOutcome) -> None:
        """Train the clients of this process, and leave out failed clients in agreement with all processes.

        Raises:
            Exception: The error is not a client's, or another process has failed.
        """
        taken = set[int]()
        remaining = [client_id for client_id in clients if client_id not in outcome.failed]
        error = self._train(exchange, remaining, taken)
        while isinstance(error, ClientError):
            self._leave_out(error, exchange, outcome)
            done = {*taken, error.client_id}
            remaining = [client_id for client_id in remaining if client_id not in done]
            error = self._train(exchange, remaining, taken)
        everywhere = self.communicator.all_gather_or_raise((outcome.failed, outcome.repeats), error)
        for failed, repeats in everywhere:
            outcome.leave_out(failed)
            if repeats:
                outcome.request_repeat()
        self._abort_if_small(outcome)

    def _leave_out(self, error: ClientError, exchange: str, outcome: RoundOutcome) -> None:
        """Leave out a client that has failed, and ask for a repetition if the client has left traces."""
        outcome.leave_out({error.client_id: error.reason})
        is_first_exchange = exchange == self._exchanges[0]
        keeps_cohort = any(member.keeps_cohort for member in self.members.all)
        # A metric object of a callback that counts all clients is reset with the round.
        has_metrics = self.parts.recorder.has_metrics
        if not is_first_exchange or error.taken_in or keeps_cohort or has_metrics:
            outcome.request_repeat()
        self.parts.recorder.logged.clear()

    def _abort_if_small(self, outcome: RoundOutcome) -> None:
        """Abort a round with fewer clients than `model.faults.min_clients`.

        The reason names the fault of the failed client with the highest id.
        """
        remaining = len(outcome.asked)
        required = self.parts.min_clients
        if remaining >= required:
            return
        reason = f"{remaining} clients took part, fewer than model.faults.min_clients={required}"
        if outcome.failed:
            last_fault = list(outcome.failed.values())[-1]
            reason = f"{reason}; {last_fault}"
        outcome.abort(reason)

    def _train(self, exchange: str, clients: Sequence[int], taken: set[int]) -> Exception | None:
        """Train clients up to the first client that fails, and return its error.

        Args:
            exchange: Name of the exchange.
            clients: Ids of the clients.
            taken: Ids of the clients whose results were taken in. This call adds to them.

        Returns:
            The error, or None if no client has failed.
        """
        try:
            with closing(self.engine.run(exchange, self._jobs(exchange, clients))) as results:
                for result in results:
                    self._take(result)
                    taken.add(result.update.client_id)
        except Exception as problem:
            if self.parts.faults.on_error == "skip":
                return problem
            return as_raised(problem)
        return None

    def _jobs(self, exchange: str, clients: Sequence[int]) -> Iterator[ClientJob]:
        """Yield the job of each client, made when the engine draws it."""
        for client_id in clients:
            if self.pace is None:
                yield self._job(client_id, self._message(exchange, client_id))
            else:
                yield self._timed_job(exchange, client_id, self.pace.job(client_id, self.server.round_idx))

    def _timed_job(self, exchange: str, client_id: int, timed: Job) -> ClientJob:
        """Return the job of a client that may have started in an earlier round, or have time for some batches only."""
        round_idx = self.server.round_idx
        if self._messages is None or timed.version == round_idx:
            job = self._job(client_id, self._message(exchange, client_id), timed.share)
        else:
            job = self._job(client_id, self._messages.of(client_id, timed.version))
        return job._replace(arrives=round_idx)

    def _job(self, client_id: int, message: Message, share: float = 1.0) -> ClientJob:
        """Return the job of a client.

        Args:
            client_id: Id of the client.
            message: What the client was sent.
            share: The share of its batches that the client has time for, in (0, 1].
        """
        memory, personal = self.records.of(client_id)
        data = self._view(client_id, message.broadcast.round_idx)
        if share != 1:
            data.share = share
        return ClientJob(
            client_id=client_id,
            broadcast=message.broadcast,
            data=data,
            memory=memory,
            personal=personal,
            start=message.start,
        )

    def _message(self, exchange: str, client_id: int) -> Message:
        """Make the message to a client from the present weights and the present state of the server."""
        broadcast = self.parts.server_module.broadcast(exchange, client_id)
        for member in self.members.of("outgoing"):
            broadcast = member.outgoing(broadcast, client_id)
        shared = self.server.weights
        start = None if broadcast.weights is shared else start_from(broadcast.weights, shared)
        return Message(broadcast, start)

    def _send_ahead(self, round_idx: int) -> None:
        """Make the messages to clients that start in a round and do not come back in it, and keep those that will do.

        Args:
            round_idx: Index of the round.
        """
        if self.pace is None:
            return
        traffic = self.parts.recorder.traffic
        with traffic.ahead(round_idx, is_root=self.communicator.rank == 0):
            for job, comes_back in self.pace.sent_ahead(round_idx):
                message = self._message(self._exchanges[0], job.client_id)
                if comes_back and self._messages is not None:
                    self._messages.keep(job.client_id, message.broadcast, message.start)

    def _take(self, result: ClientResult) -> None:
        """Pass the result of one client through all members."""
        client_id = result.update.client_id
        try:
            for member in self.members.of("incoming"):
                result = member.incoming(result)
        except SettingError:
            raise
        except Exception as problem:
            raise client_error(client_id, result.job.named_round, problem, taken_in=True) from problem

    # --- judging ---

    def _close(self, outcome: RoundOutcome) -> Shares:
        """Judge the values of the round, with its one transfer to the host, and return what the processes share.

        Raises:
            NonFiniteUpdateError: A value is not allowed. The sentence names the round and the client or aggregator.
        """
        recorder = self.parts.recorder
        violations = self._violations(outcome, recorder.read)
        shares = {member.name: member.share() for member in self.members.of("share")}
        everywhere = self.communicator.gather((violations, shares))
        all_violations = list(chain.from_iterable(part for part, _ in everywhere))
        all_shares = [part for _, part in everywhere]
        if all_violations:
            counted = any(part[recorder.name][1] for part in all_shares)
            self._judge(all_violations, outcome, counted)
        if outcome.problem and not outcome.aborted and not outcome.repeats:
            raise outcome.problem
        return all_shares

    def _violations(self, outcome: RoundOutcome | None, read: Callable[[list[Tensor]], list[float]]) -> list[Check]:
        """Return the checks of this process that fail, with their values on the host.

        Args:
            outcome: The outcome of the round. None if another exchange follows.
            read: Reads values from the device as numbers.
        """
        checks = list(chain.from_iterable(member.take_checks(outcome) for member in self.members.of("take_checks")))
        values = read([check.value for check in checks])
        violations: list[Check] = []
        for check, value in zip(checks, values, strict=True):
            if not check.least <= value <= check.most:  # NaN fails as well.
                violations.append(check._replace(value=value))
        return violations

    def _judge_before_next(self, error: Exception | None, outcome: RoundOutcome) -> None:
        """Leave out the clients at fault, before their values make other clients fail in the next exchange.

        Args:
            error: The error of this process that ends the run, or None.
            outcome: The outcome of the round.
        """
        violations = self._violations(None, to_host)
        everywhere = self.communicator.all_gather_or_raise(violations, error)
        self._judge(list(chain.from_iterable(everywhere)), outcome, counted=True)

    def _judge(self, violations: Sequence[Check], outcome: RoundOutcome, counted: bool) -> None:
        """Leave out the clients at fault for values that must not become the model, or abort the round.

        Args:
            violations: The failed checks of all processes.
            outcome: The outcome of the round.
            counted: Whether metric objects have counted clients.

        Raises:
            NonFiniteUpdateError: A value is not allowed, and `model.faults.nonfinite` is not `skip`. The sentence
                names the round and the client or aggregator.
        """
        if any(violation.kind == "total" for violation in violations):
            # The weights of all clients sum to 0, so the model stays as it is.
            outcome.set_weights(None)
            violations = [violation for violation in violations if violation.client_id >= 0]
        if not violations:
            return
        broken, misweighed, aggregate = judge(
            violations,
            round_idx=outcome.round_idx,
            names=(type(self.parts.aggregator).__name__, type(self.parts.server_module).__name__),
            max_norm=self.parts.faults.max_update_norm,
        )
        if self.parts.faults.nonfinite != "skip":
            if misweighed or not broken:
                raise NonFiniteUpdateError(misweighed or aggregate)
            client_id = min(broken)
            raise NonFiniteUpdateError(
                f"every client update must be finite and within its bounds, but client {client_id} "
                f"{broken[client_id]}{self._started(client_id, outcome.round_idx)}; "
                f"{self.parts.client.nonfinite_hint()}"
            )
        outcome.leave_out(broken)
        self._abort_if_small(outcome)
        # A client that was taken in may leave more than its part of the weighted mean.
        has_several_exchanges = len(self._exchanges) > 1
        leaves_traces = has_several_exchanges or any(member.keeps_clients for member in self.members.all)
        if broken and (counted or leaves_traces or outcome.problem):
            outcome.request_repeat()
        elif misweighed or aggregate:
            outcome.abort(misweighed or aggregate)

    def _started(self, client_id: int, round_idx: int) -> str:
        """Return words for the round in which a client started, or an empty text if it is the present one."""
        version = self._version(client_id, round_idx)
        return "" if version == round_idx else f" (started in round {version})"

    def _version(self, client_id: int, round_idx: int) -> int:
        """Return the round in which a client of a round has started."""
        return round_idx if self.pace is None else self.pace.job(client_id, round_idx).version

    def _overflow(self, round_idx: int) -> str:
        """Return the sentence about a server step with NaN or infinite values.

        Raises:
            NonFiniteUpdateError: `model.faults.nonfinite` is not `skip`.
        """
        kind = type(self._server_step.optimizer).__name__
        sentence = f"the server_optimizer {kind} made NaN or infinite values of a finite aggregate in round {round_idx}"
        if not self._server_step.undoes:
            raise NonFiniteUpdateError(f"{sentence}; lower its learning rate, or set model.faults.nonfinite to skip")
        return sentence


def start_from(sent: State | None, shared: State) -> State | None:
    """Return the shared entries that a client starts from, or None if it was sent all of them.

    Args:
        sent: The entries in the message, or None.
        shared: The global entries.
    """
    if sent is not None and len(sent) == len(shared):
        return None
    sent = sent or {}
    if all(shared.get(name) is value for name, value in sent.items()):
        return shared  # The same object for all such clients.
    return {**shared, **sent}
