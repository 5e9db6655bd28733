"""A round is kept as a whole or undone: the state at its start, and what is done with its result."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fl_lightning.aggregation import UpdateTransform
from fl_lightning.aggregation.server_parts import ServerPart
from fl_lightning.federation.result import RoundResult
from fl_lightning.federation.round import Round
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.members.faults import Fault, FaultSettings, NonFiniteUpdateError
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import State


class RoundStart:
    """The federation's state when a round begins: restored if the round fails, saved by a checkpoint within it.

    Args:
        weights: of the global model, in the client module.
        parts: rule and server module, by the names that they have in the loop.
        transforms: the transforms between client and sum.

    Attributes:
        entries: of the client module.
        transform_states: state dicts of the transforms.
    """

    def __init__(
        self, weights: GlobalWeights, parts: Mapping[str, ServerPart], transforms: Sequence[UpdateTransform]
    ) -> None:
        self._weights, self._parts, self._transforms = weights, parts, transforms
        self.entries = weights.snapshot(weights.entries, weights.frozen.idle)
        self._extra = {} if weights.extra is None else weights.extra.snapshot()
        self._part_states = {name: part.snapshot() for name, part in parts.items()}
        self.transform_states = copy.deepcopy([transform.state_dict() for transform in transforms])

    def restore(self) -> None:
        """Undo the round."""
        self._weights.load(self.entries)
        if self._weights.extra is not None:
            self._weights.extra.load(self._extra)
        for name, part in self._parts.items():
            part.load_state_dict(self._part_states[name])
        for transform, state in zip(self._transforms, self.transform_states, strict=True):
            transform.load_state_dict(copy.deepcopy(state))  # a round may be undone again

    def state_dict(self) -> dict[str, Any]:
        """Give module, rule and server module by their names in the loop's state dict."""
        states = {f"{name}.{key}": value for name, state in self._part_states.items() for key, value in state.items()}
        return self._weights.saved({**self.entries, **self._extra}) | states


class Transactions:
    """Runs rounds, each of which is kept as a whole or leaves the federation as it was.

    Args:
        round_: runs them.
        server_step: steps the global model.
        faults: what happens on faults.
        stateful: says who keeps a state of the trained entries, empty: nobody.

    Attributes:
        round: runs the rounds.
        begun: the federation when the round under way began; None outside of rounds.
        skipped: clients that the last round left out, and why.
    """

    def __init__(
        self, round_: Round, server_step: ServerOptimizer, faults: FaultSettings, stateful: Callable[[], str]
    ) -> None:
        self.begun: RoundStart | None = None
        self.round, self.skipped = round_, list[Fault]()
        self._server_step, self._faults, self._stateful = server_step, faults, stateful
        self._fruitless = 0

    def run(self, round_idx: int, cohort: list[int], step: Callable[[], Any], scaler: Any | None) -> dict[str, float]:
        """Run one round with one server step; returns its values by log key.

        Args:
            round_idx: from 0.
            cohort: client ids.
            step: steps the server optimizer.
            scaler: the Trainer's gradient scaler, or None.

        Raises:
            FaultError: naming client and round; the federation is then as it was.
        """
        weights = self.round.weights
        weights.begin_round(self._stateful)
        with self.transaction() as begun:
            before = begun.entries
            start = {name: before[name] for name in weights.shared} if weights.personal else before
            try:
                result = self._run(round_idx, cohort, start, begun)
            except StopIteration as stop:  # Lightning would take it for the end of the epoch
                raise RuntimeError(f"a StopIteration ended round {round_idx}; end a generator by return") from stop
            if result.lost:
                begun.restore()
            stepped = self._server_step.step(start, result.weights, step, scaler)
            if stepped is None:
                result.give_up(round_idx, self._overflow(round_idx))
                begun.restore()
            self.skipped, everyone = result.skipped, len(result.skipped) >= len(cohort)
            self._fruitless = self._fruitless + 1 if everyone else 0
            if everyone:
                reason = result.skipped[-1].reason if result.skipped else result.lost
                self._faults.check_patience(self._fruitless, round_idx, reason)
            new = before | (result.personal or {}) | (stepped or {})
            if idle := weights.frozen.idle:
                new = {name: value for name, value in new.items() if name not in idle}
            weights.load(new)
            if result.records:
                self.round.store.put(result.records, round_idx)
            if weights.freezes and not result.lost:
                weights.frozen.end_round(round_idx, result.asked, before, weights.trainable)
        return result.metrics

    def _run(self, round_idx: int, cohort: list[int], start: State, begun: RoundStart) -> RoundResult:
        """Run a round, and again without the clients that failed where they have left traces: every draw is keyed."""
        round_, failed, logged = self.round, dict[int, str](), self.round.sizes
        while (result := round_.run(round_idx, cohort, start, begun.entries, failed)).repeats and not result.lost:
            failed = result.failed
            begun.restore()
            round_.forget(logged)
            for hook in round_.hooks["on_round_repeat"]:
                hook()
        return result

    @contextmanager
    def transaction(self) -> Iterator[RoundStart]:
        """Undo a round that fails; yields the federation at its start."""
        parts = {"aggregator": self.round.aggregator, "server_module": self.round.server_module}
        start = self.begun = RoundStart(self.round.weights, parts, self.round.transforms)
        try:
            yield start
        except BaseException:
            start.restore()
            self.round.abandon()
            raise
        finally:
            self.begun = None
            self.round.server.end_round()

    def _overflow(self, round_idx: int) -> str:
        """Say that the server optimizer made values that cannot become the model.

        Raises:
            NonFiniteUpdateError: unless such a round is skipped.
        """
        kind = type(self._server_step.optimizer).__name__
        said = f"the server_optimizer {kind} made NaN or infinite values of a finite aggregate in round {round_idx}"
        if not self._server_step.undoes:
            raise NonFiniteUpdateError(f"{said}; lower its learning rate, or set model.nonfinite to skip")
        return said
