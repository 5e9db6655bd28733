"""One communication round, which is kept as a whole or leaves the federation as it was."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.federation.setup import FederatedRun
from fl_lightning.functional.state import to_host
from fl_lightning.members.faults import (
    ClientError,
    NonFiniteUpdateError,
    TransformError,
    as_raised,
    client_error,
    judge,
)
from fl_lightning.types import Check, ClientJob, ClientResult, Member, RoundOutcome, State, Undo, does

Shared = list[tuple[Member, list[Any]]]
"""Members that end a round, with what `share` gave by process."""


class Round:
    """Runs the rounds of a fit, whose store is open from then on, with so many threads as it may have.

    Args:
        setup: has members, engines and all else of the run of a Trainer.
        server_step: steps the global model.

    Attributes:
        under_way: undoes the round under way; None outside of rounds.

    Raises:
        ValueError: a transform that does not go with several processes.
        Exception: as the store's start, on whichever process.
    """

    def __init__(self, setup: FederatedRun, server_step: ServerOptimizer) -> None:
        self.parts, self.server, self.members = setup.parts, setup.server, setup.members
        self.communicator, self.records, self.engine = setup.communicator, setup.records, setup.clients_engine
        self._setup, self._server_step = setup, server_step
        self.under_way: Undo | None = None
        setup.begin_fit()
        self._view = setup.data.views()

    def run(self, round_idx: int, cohort: list[int], step: Callable[[], Any], scaler: Any | None) -> dict[str, float]:
        """Run one round with one server step.

        Returns its values by log key.

        Args:
            round_idx: from 0.
            cohort: client ids.
            step: steps the server optimizer.
            scaler: the Trainer's gradient scaler, or None.

        Raises:
            FaultError: naming client and round; the federation is then as it was.
        """
        with self.undone_on_error() as undo:
            outcome = RoundOutcome(round_idx, cohort, self.server.global_weights.before)
            try:
                shared = self._exchanges(outcome)
                while outcome.repeats:
                    outcome, shared = self._repeat(outcome, undo)
            except StopIteration as stop:  # Lightning would take it for the end of the epoch
                raise RuntimeError(f"a StopIteration ended round {round_idx}; end a generator by return") from stop
            new = self.server.refined(outcome.weights)
            stepped = self._server_step.step(self.server.global_weights.start, new, step, scaler)
            if stepped is None:
                outcome.abort(self._overflow(round_idx))
            outcome.take_entries(outcome.before | (stepped or {}))
            ends = [dict(member.end(outcome, parts)) for member, parts in shared]
            if outcome.aborted:
                undo.undo()
        return dict(ChainMap(*ends))

    @contextmanager
    def undone_on_error(self) -> Iterator[Undo]:
        """Context in which a round is under way."""
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

    def _repeat(self, outcome: RoundOutcome, undo: Undo) -> tuple[RoundOutcome, Shared]:
        """Undo a round and run it again, every draw the same, without the clients that have failed."""
        undo.undo()
        for hook in self.parts.hooks["on_round_repeat"]:
            hook()
        again = RoundOutcome(outcome.round_idx, outcome.cohort, self.server.global_weights.before, outcome.failed)
        return again, self._exchanges(again)

    def _exchanges(self, outcome: RoundOutcome) -> Shared:
        """Run all exchanges and judge what came of them.

        Gives what all processes share, by member.
        """
        asked = outcome.asked
        self.server.begin_round(outcome.round_idx)
        if len(asked) < self.parts.min_clients:
            self._abort_if_small(outcome)
        else:
            for member in self.members.of("begin"):
                member.begin(outcome.round_idx, asked)
            seconds = None if self._setup.pace is None else self._setup.pace.estimate()
            ranks = self.communicator.assign_clients(asked, self.server.size, self.server.store.owners, seconds)
            self.records.move(ranks)
            mine = [client_id for client_id in asked if ranks[client_id] == self.communicator.rank]
            for exchange in self.parts.client.exchanges:
                if not outcome.is_over:
                    self._exchange(exchange, mine, outcome)
        return [] if outcome.repeats else self._close(outcome)

    def _exchange(self, exchange: str, mine: list[int], outcome: RoundOutcome) -> None:
        """Run one exchange with all clients, up to the weights that the next one sends."""
        error, skips = None, self.parts.faults.nonfinite == "skip"
        if self.parts.faults.on_error == "skip":
            self._train_tolerantly(exchange, mine, outcome)
        else:
            error = self._train(exchange, mine, set())
        if skips and exchange != self.parts.client.exchanges[-1] and not outcome.is_over:
            self._judge_before_next(error, outcome)
        if goes_on := not outcome.is_over:
            self.communicator.merge(self.members.of("partial"), error)
            try:
                new: State | None = None
                for member in self.members.of("aggregated"):
                    new = member.aggregated(exchange, new)
            except Exception as problem:
                if not skips:
                    raise
                outcome.fail(problem)  # of what may miss a client that is left out: that is judged first
            else:
                if new is not None:
                    outcome.take(self.server.advance(new))
        for member in self.members.of("end_exchange"):
            member.end_exchange()
        for hook in self.parts.hooks["on_exchange_end"] if goes_on else ():
            hook(exchange)

    # --- the clients of an exchange ----------------------------------------------------------------------------

    def _train_tolerantly(self, exchange: str, mine: Sequence[int], outcome: RoundOutcome) -> None:
        """Train clients and leave those out that fail.

        Then all processes learn of them.

        Raises:
            Exception: that is no client's, of this or another process.
        """
        taken, left = set[int](), [client_id for client_id in mine if client_id not in outcome.failed]
        while isinstance(error := self._train(exchange, left, taken), ClientError):
            later = exchange != self.parts.client.exchanges[0]
            kept = error.taken_in or any(member.keeps_cohort for member in self.members.all)
            outcome.leave_out({error.client_id: error.reason})
            # a metric object that the client had, too, is reset with it
            outcome.repeat(later or kept or self.parts.recorder.has_metrics)
            self.parts.recorder.logged.clear()  # of the client that is not taken in
            left = [client_id for client_id in left if client_id not in {*taken, error.client_id}]
        for failed, repeats in self.communicator.all_gather_or_raise((outcome.failed, outcome.repeats), error):
            outcome.leave_out(failed)
            outcome.repeat(repeats)
        self._abort_if_small(outcome)

    def _abort_if_small(self, outcome: RoundOutcome) -> None:
        """Abort a round that has fewer clients than it needs, with the reason why the last one is not among them."""
        left, least = len(outcome.asked), self.parts.min_clients
        if left < least:
            reason = "".join(f"; {reason}" for reason in list(outcome.failed.values())[-1:])
            outcome.abort(f"{left} clients took part, fewer than model.faults.min_clients={least}{reason}")

    def _train(self, exchange: str, clients: Sequence[int], taken: set[int]) -> Exception | None:
        """Train clients up to the first that fails.

        `taken` comes to be all whose results were taken in.
        """
        try:
            with closing(self.engine.run(exchange, self._jobs(exchange, clients))) as results:
                for result in results:
                    self._take(result)
                    taken.add(result.update.client_id)
        except Exception as problem:
            return problem if self.parts.faults.on_error == "skip" else as_raised(problem)
        return None

    def _jobs(self, exchange: str, clients: Sequence[int]) -> Iterator[ClientJob]:
        """Make the job of every client, when the engine draws it."""
        for client_id in clients:
            broadcast = self.parts.server_module.broadcast(exchange, client_id)
            for member in self.members.of("outgoing"):
                broadcast = member.outgoing(broadcast, client_id)
            sent, shared = broadcast.weights, self.server.weights
            start = None if sent is shared else start_from(sent, shared)
            memory, personal = self.records.of(client_id)
            data = self._view(client_id, self.server.round_idx)
            yield ClientJob(client_id, broadcast, data, memory, personal, start)

    def _take(self, result: ClientResult) -> None:
        """Pass one client's result through all members."""
        client_id = result.update.client_id
        try:
            for member in self.members.of("incoming"):
                result = member.incoming(result)
        except TransformError:
            raise
        except Exception as problem:
            raise client_error(client_id, self.server.round_idx, problem, taken_in=True) from problem

    def keys_of_a_client(self) -> set[str]:
        """Train one client for one step, undo it, and list the keys that it logged."""
        exchange, engine = self.parts.client.exchanges[0], self._setup.make_engine(probes=True)
        client_id = max(range(self.server.num_clients), key=self.server.size)
        with torch.enable_grad(), self.undone_on_error() as undo:
            self.server.begin_round(0)
            for member in self.members.of("begin"):
                member.begin(-1, [client_id])
            with closing(engine.run(exchange, self._jobs(exchange, [client_id]))) as results:
                keys = {name for result in results for name in result.logged.names}
            undo.undo()
        return keys

    # --- judging -----------------------------------------------------------------------------------------------

    def _close(self, outcome: RoundOutcome) -> Shared:
        """Check that everything is finite, in the round's one transfer to the host.

        Gives what all processes share.

        Raises:
            NonFiniteUpdateError: naming client or rule, and round.
        """
        violations = self._violations(outcome, self.parts.recorder.read)
        shares = {member.name: member.share() for member in self.members.of("share")}
        everywhere = self.communicator.gather((violations, shares))
        if everyone := [violation for judged, _ in everywhere for violation in judged]:
            counted = any(parts[self.parts.recorder.name][1] for _, parts in everywhere)
            self._judge(everyone, outcome, counted)
        if outcome.problem and not (outcome.aborted or outcome.repeats):
            raise outcome.problem
        # a round that nobody took part in ends for those, too, who took none
        ending = [m for m in self.members.all if does(m, "end")] if outcome.aborted else self.members.of("end")
        return [(m, [parts[m.name] for _, parts in everywhere] if m.name in shares else []) for m in ending]

    def _violations(self, outcome: RoundOutcome | None, read: Callable[[list[Tensor]], list[float]]) -> list[Check]:
        """List the values that are not what they may be, once they are read on the host."""
        checks = [check for member in self.members.of("take_checks") for check in member.take_checks(outcome)]
        values = read([check.value for check in checks])
        return [c._replace(value=v) for c, v in zip(checks, values, strict=True) if not c.least <= v <= c.most]

    def _judge_before_next(self, error: Exception | None, outcome: RoundOutcome) -> None:
        """Leave out the clients at fault before others fail in the next exchange by what was made of theirs."""
        violations = self._violations(None, to_host)
        everywhere = self.communicator.all_gather_or_raise(violations, error)
        self._judge([violation for part in everywhere for violation in part], outcome, counted=True)

    def _judge(self, violations: Sequence[Check], outcome: RoundOutcome, counted: bool) -> None:
        """Leave out the clients, or the round, that are at fault for values that must not become the model.

        Args:
            violations: of all processes.
            outcome: of the round.
            counted: whether metric objects have counted clients.

        Raises:
            NonFiniteUpdateError: naming client and round, or the rule; unless they are skipped.
        """
        if any(violation.kind == "total" for violation in violations):  # nobody has a weight
            outcome.take(None)
            violations = [violation for violation in violations if violation.client_id >= 0]
        if not violations:
            return
        names = type(self.parts.aggregator).__name__, type(self.parts.server_module).__name__
        broken, misweighed, aggregate = judge(violations, outcome.round_idx, names, self.parts.faults.max_update_norm)
        if self.parts.faults.nonfinite != "skip":
            if broken and not misweighed:
                client_id = min(broken)
                raise NonFiniteUpdateError(
                    f"every client update must be finite and within its bounds, but client {client_id} "
                    f"{broken[client_id]}; {self.parts.client.nonfinite_hint()}"
                )
            raise NonFiniteUpdateError(misweighed or aggregate)
        outcome.leave_out(broken)
        # a client that was taken in may leave more than what it added to the weighted mean
        kept = len(self.parts.client.exchanges) > 1 or any(member.keeps_clients for member in self.members.all)
        self._abort_if_small(outcome)
        if broken and (counted or kept or outcome.problem):
            outcome.repeat()
        elif fault := misweighed or aggregate:
            outcome.abort(fault)

    def _overflow(self, round_idx: int) -> str:
        """Report that the server optimizer made values that cannot become the model.

        Raises:
            NonFiniteUpdateError: unless such a round is skipped.
        """
        kind = type(self._server_step.optimizer).__name__
        sentence = f"the server_optimizer {kind} made NaN or infinite values of a finite aggregate in round {round_idx}"
        if not self._server_step.undoes:
            raise NonFiniteUpdateError(f"{sentence}; lower its learning rate, or set model.faults.nonfinite to skip")
        return sentence


def start_from(sent: State | None, shared: State) -> State | None:
    """Choose the shared entries that a client starts from, where not all were sent.

    None: all were.

    Args:
        sent: entries in the message, or None.
        shared: the global ones.
    """
    if sent is not None and len(sent) == len(shared):
        return None
    if all(shared.get(name) is value for name, value in (sent or {}).items()):
        return shared  # the same object for all such clients
    return {**shared, **(sent or {})}
