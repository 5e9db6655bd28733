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

    The values that it looks at stay on the device until the round ends.

    Args:
        skips: Whether an update that is not finite or too long is left out: its weights become the round's, and its
            extras 0. If not, the update stays and the round ends in an error.
        max_norm: Greatest norm of an update over the trainable entries. None sets no limit.
    """

    def __init__(self, skips: bool = False, max_norm: float | None = None) -> None:
        self.skips = skips
        self.max_norm = max_norm
        self.server = cast(ServerView, NotSetUp(type(self).__name__))
        self._nonfinite_constants: frozenset[str] = frozenset()
        self._checks: list[Check] = []

    def attach(self, server: ServerView) -> None:
        """Take the server, and exclude constants from the check.

        The constants are the untrained entries that are not finite, as a transformer's mask.
        """
        self.server = server
        trainable = set(server.trainable)
        constants = {name: value for name, value in server.weights.items() if name not in trainable}
        self._nonfinite_constants = frozenset(n for n, value in constants.items() if not bool(value.isfinite().all()))

    def incoming(self, result: ClientResult) -> ClientResult:
        """Check an update and the entries that stay with the client.

        If no weights are sent, what was trained is checked in their place.
        """
        update = result.update
        weights = update.weights or result.trained
        values = self._extremes(weights) if weights else []
        if result.personal:
            values += self._extremes(result.personal)
        if update.extras:
            values += extremes_in(update.extras)
        self._checks += [Check(update.client_id, "values", value) for value in values]
        is_short = None if self.max_norm is None else self._is_short(result, self.max_norm)
        if not values or not self.skips:
            return result
        allowed = all_finite(values)
        if is_short is not None:
            allowed = allowed & is_short
        return result._replace(update=self._skipped(update, allowed))

    def _is_short(self, result: ClientResult, max_norm: float) -> Tensor | None:
        """Check the norm of what the trainable entries moved.

        Returns:
            Whether the norm is at most `max_norm`, 0-d on the device. None if no weights are sent.
        """
        update = result.update
        trainable = self.server.trainable
        if not update.weights or not trainable:
            return None
        start = {**self.server.weights, **(result.job.broadcast.weights or {})}
        squares = []
        for name in trainable:
            moved = update.weights[name].double() - start[name].double()
            squares.append(moved.square().sum())
        norm = torch.stack(squares).sum().sqrt()
        self._checks.append(Check(update.client_id, "norm", norm, least=0.0, most=max_norm))
        return norm <= max_norm

    def counted(self, update: ClientUpdate, known: int) -> ClientUpdate:
        """Check a number of samples that lies on the device.

        Args:
            update: The update with this number.
            known: Number of samples that the client has.
        """
        num_samples = torch.as_tensor(update.num_samples)
        self._checks.append(Check(update.client_id, "samples", num_samples, least=0.0, most=known))
        if not self.skips:
            return update
        allowed = (num_samples >= 0) & (num_samples <= known) & update.included
        return self._skipped(update, allowed)

    def take_checks(self, outcome: RoundOutcome | None) -> list[Check]:
        checks = self._checks
        self._checks = []
        if outcome is not None and outcome.weights:
            # The server has the new weights that are transmitted.
            checks += [Check(-1, "values", value) for value in self._extremes(self.server.transmitted_entries)]
        return checks

    def undo(self, mark: None) -> None:
        self._checks = []

    def _extremes(self, state: State) -> list[Tensor]:
        """Return values of a state that are all finite if the entries are, without its constants.

        They are the least and the greatest number of each floating type, or the greatest magnitudes if these are known.
        """
        if self._nonfinite_constants:
            state = {name: value for name, value in state.items() if name not in self._nonfinite_constants}
        elif isinstance(state, FlatState) and state.greatest and state.is_as_laid:
            return [*state.greatest]
        return extremes(flatten(state).values())

    def _skipped(self, update: ClientUpdate, allowed: Tensor) -> ClientUpdate:
        """Return an update that is left out if it is not allowed, without a transfer to the host.

        It then has no samples, the round's weights, and zeros in its extras.

        Args:
            update: The update.
            allowed: Whether the update is allowed, 0-d on the device.
        """
        weights = update.weights
        if weights:
            weights = choose(allowed, weights, self._unmoved(weights))

        def zero_unless_allowed(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            return torch.where(allowed, value, torch.zeros_like(value))

        return replace(
            update,
            num_samples=allowed.to(torch.int64) * update.num_samples,
            weights=weights,
            extras=apply_to_collection(dict(update.extras), Tensor, zero_unless_allowed),
            included=allowed,
        )

    def _unmoved(self, weights: State) -> State:
        """Return the round's entries in the place of a client's.

        A transform may have sent something else in their place. It becomes 0.
        """
        known = self.server.weights
        unmoved: State = {}
        for name, value in weights.items():
            if name in known and known[name].shape == value.shape:
                unmoved[name] = known[name].to(value)
            else:
                unmoved[name] = torch.zeros_like(value)
        return unmoved


def extremes_in(value: Any) -> list[Tensor]:
    """Return the `extremes` of the tensors in a pytree of dicts, lists and tuples."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return extremes(tensor.detach().reshape(-1) for tensor in tensors)


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Return whether all of some 0-d tensors are finite, 0-d on their device."""
    return torch.stack([value.double() for value in values]).isfinite().all()
