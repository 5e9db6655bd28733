"""The guard against values that must not become the model, and the checks of what clients send."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.aggregation.server_parts import NotSetUp
from fl_lightning.functional.state import FlatState, choose, extremes, flatten
from fl_lightning.types import Check, ClientResult, ClientUpdate, Member, RoundOutcome, ServerView, State


class NonFiniteGuard(Member):
    """Finds values that must not become the model.

    What it looks at stays on the device until the round ends.

    Args:
        skips: leave out an update that is not finite or too long (its weights become the round's, its extras 0); else
            it stays and the round ends in an error.
        max_norm: greatest norm of an update over the trainable entries; None: any.
    """

    def __init__(self, skips: bool = False, max_norm: float | None = None) -> None:
        self.skips = skips
        self.max_norm = max_norm
        self.server = cast(ServerView, NotSetUp(type(self).__name__))
        self._nonfinite_constants: frozenset[str] = frozenset()
        self._checks: list[Check] = []

    def setup(self, server: ServerView) -> None:
        """Exclude untrained entries that are not finite from the check (a transformer's mask): they are constants."""
        self.server = server
        fixed = {name: value for name, value in server.weights.items() if name not in set(server.trainable)}
        self._nonfinite_constants = frozenset(n for n, value in fixed.items() if not bool(value.isfinite().all()))

    def incoming(self, result: ClientResult) -> ClientResult:
        """Check the update, the entries that stay with the client, and what was trained where no weights are sent."""
        update = result.update
        weights = result.update.weights or result.trained
        values = self._extremes(weights) if weights else []
        if result.personal:
            values += self._extremes(result.personal)
        if update.extras:
            values += extremes_in(update.extras)
        self._checks += [Check(update.client_id, "values", value) for value in values]
        is_short = None if self.max_norm is None else self._is_short(result, self.max_norm)
        if not values or not self.skips:
            return result
        allowed = all_finite(values) if is_short is None else all_finite(values) & is_short
        return result._replace(update=self._skipped(update, allowed))

    def _is_short(self, result: ClientResult, max_norm: float) -> Tensor | None:
        """Check the norm of what the trainable entries moved, 0-d on their device, or None where none are sent."""
        update = result.update
        trainable = self.server.trainable
        if not update.weights or not trainable:
            return None
        start = {**self.server.weights, **(result.job.broadcast.weights or {})}
        pairs = [(update.weights[name], start[name]) for name in trainable]
        norm = torch.stack([(new.double() - old.double()).square().sum() for new, old in pairs]).sum().sqrt()
        self._checks.append(Check(update.client_id, "norm", norm, 0.0, max_norm))
        return norm <= max_norm

    def counted(self, update: ClientUpdate, known: int) -> ClientUpdate:
        """Check a number of samples that lies on the device, of a client that has `known` ones."""
        n = torch.as_tensor(update.num_samples)
        self._checks.append(Check(update.client_id, "samples", n, 0.0, known))
        return self._skipped(update, (n >= 0) & (n <= known) & update.included) if self.skips else update

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        checks = self._checks
        self._checks = []
        if outcome is not None and outcome.weights:  # of which the server has those that are transmitted
            checks += [Check(-1, "values", value) for value in self._extremes(self.server.transmitted_entries)]
        return checks

    def undo(self, mark: None) -> None:
        self._checks = []

    def _extremes(self, state: State) -> list[Tensor]:
        """Least and greatest number of each floating type, or what else tells that all are finite.

        No constants.
        """
        if self._nonfinite_constants:
            state = {name: value for name, value in state.items() if name not in self._nonfinite_constants}
        elif isinstance(state, FlatState) and state.greatest and state.is_as_laid:
            return [*state.greatest]
        return extremes(flatten(state).values())

    def _skipped(self, update: ClientUpdate, allowed: Tensor) -> ClientUpdate:
        """Replace an update that is not allowed by one without samples and without a change, on the device."""
        known = self.server.weights  # a transform may have sent something else in the place of the shared entries
        alike = {n: n in known and known[n].shape == value.shape for n, value in (update.weights or {}).items()}
        instead = {n: known[n].to(v) if alike[n] else torch.zeros_like(v) for n, v in (update.weights or {}).items()}
        weights = update.weights and choose(allowed, update.weights, instead)
        extras = apply_to_collection(
            dict(update.extras),
            Tensor,
            lambda value: torch.where(allowed, value, torch.zeros_like(value)) if value.is_floating_point() else value,
        )
        num_samples = allowed.to(torch.int64) * update.num_samples
        return replace(update, num_samples=num_samples, weights=weights, extras=extras, included=allowed)


def extremes_in(value: Any) -> list[Tensor]:
    """Find the `extremes` of the tensors in a pytree of dicts, lists and tuples."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return extremes(tensor.detach().reshape(-1) for tensor in tensors)


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Return True where all of some 0-d tensors are finite, 0-d on their device."""
    return torch.stack([value.double() for value in values]).isfinite().all()
