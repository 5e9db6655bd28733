"""The guard against NaN and infinite values: the first transform between client and sum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.aggregation.transforms import UpdateTransform
from fl_lightning.functional.state import flatten
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State
from fl_lightning.utils.settings import check_choice


class NonFiniteGuard(UpdateTransform):
    """Finds clients with NaN or infinite values in update or personal entries; one flag each, on the device.

    Args:
        skips: leave such an update out (its weights become the round's, its extras 0); else it stays and the round
            ends in an error.
    """

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self._nonfinite_constants: frozenset[str] = frozenset()
        self._clients: list[int] = []
        self._totals: list[Tensor] = []

    @classmethod
    def for_setting(cls, nonfinite: str) -> "NonFiniteGuard":
        """The guard for `model.nonfinite`: `error` or `skip`."""
        check_choice(("error", "skip"), nonfinite=nonfinite)
        return cls(skips=nonfinite == "skip")

    def setup(self, server: ServerView) -> None:
        """Exclude untrained entries that are not finite from the check (a transformer's mask): they are constants."""
        super().setup(server)
        fixed = {name: value for name, value in server.weights.items() if name not in set(server.trainable)}
        self._nonfinite_constants = frozenset(n for n, value in fixed.items() if not bool(value.isfinite().all()))

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        return self.with_personal(update, {})

    def with_personal(self, update: ClientUpdate, personal: State) -> ClientUpdate:
        """Check the entries that stay with the client, too."""
        parts = self._sums(update.weights) if update.weights else []
        if personal:
            parts += self._sums(personal)
        if update.extras:
            parts += sums_of_nest(update.extras)
        if not parts:
            return update
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        self._clients.append(update.client_id)
        self._totals.append(total)
        return self._skipped(update, torch.isfinite(total)) if self.skips else update

    def _sums(self, state: State) -> list[Tensor]:
        """Sum the floating entries but for constants, one 0-d float64 for each type: finite where all entries are."""
        if self._nonfinite_constants:
            state = {name: value for name, value in state.items() if name not in self._nonfinite_constants}
        found = []
        for vector in flatten(state).values():
            if vector.is_floating_point():
                found.append(vector.sum(dtype=torch.float64))
        return found

    def _skipped(self, update: ClientUpdate, finite: Tensor) -> ClientUpdate:
        """Replace an update that is not finite by one without samples and without a change, on the device."""
        weights = update.weights and replace_nonfinite(update.weights, finite, self.server.weights)
        extras = apply_to_collection(
            dict(update.extras),
            Tensor,
            lambda value: torch.where(finite, value, torch.zeros_like(value)) if value.is_floating_point() else value,
        )
        num_samples = finite.to(torch.int64) * update.num_samples
        return replace(update, num_samples=num_samples, weights=weights, extras=extras, included=finite)

    def take_totals(self, aggregate: State | None = None) -> tuple[list[int], list[Tensor]]:
        """Hand over the clients checked since the last call, and 0-d float64 values that are finite where all is.

        Args:
            aggregate: the round's new weights, checked as well.

        Returns:
            Client ids, and the values: one for each client, then those of the aggregate.
        """
        found = self._clients, self._totals + (self._sums(aggregate) if aggregate else [])
        self._clients, self._totals = [], []
        return found


def sums_of_nest(value: Any) -> list[Tensor]:
    """Sum each floating tensor in a nest of dicts, lists and tuples: 0-d float64, finite where the tensor is."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return [tensor.detach().sum(dtype=torch.float64) for tensor in found if tensor.is_floating_point()]


def replace_nonfinite(state: State, finite: Tensor, fallback: Mapping[str, Tensor]) -> State:
    """Choose `state` where `finite`, else `fallback`, on the device."""
    return {name: torch.where(finite, tensor, fallback[name]) for name, tensor in state.items()}
