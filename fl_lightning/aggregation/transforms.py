"""What happens to an update between client and sum: a list of transforms, the guard against NaN first."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.functional.state import flatten
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State
from fl_lightning.utils.settings import check_above, check_choice


class UpdateTransform:
    """Changes updates on their way into the sum; as it stands, not at all.

    To leave an update out, return it with `num_samples` 0 (a tensor on the device: nothing is read inside a round).
    """

    def __init__(self) -> None:
        self._server: ServerView | None = None

    @property
    def server(self) -> ServerView:
        """The server, with the round's weights and the names of the trainable ones."""
        if self._server is None:
            raise RuntimeError(f"{type(self).__name__} sees the server once a FederatedLoop has set it up")
        return self._server

    def setup(self, server: ServerView) -> None:
        """Called once, before a checkpoint is restored."""
        self._server = server

    def on_client(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """What leaves the client; bytes are counted after it."""
        return update

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """What the rule and the server module take in."""
        return update

    def state_dict(self) -> dict[str, Any]:
        """What the transform keeps between rounds: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class NonFiniteGuard(UpdateTransform):
    """Finds the clients whose update, or what they keep, holds NaN or infinite values: one flag each on the device.

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
        parts = self.finite_sums(update.weights) if update.weights else []
        if personal:
            parts += sums(personal)
        if update.extras:
            parts += sums_of_nest(update.extras)
        if not parts:
            return update
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        self._clients.append(update.client_id)
        self._totals.append(total)
        return self._skipped(update, torch.isfinite(total)) if self.skips else update

    def finite_sums(self, weights: State) -> list[Tensor]:
        """`sums` of shared entries without those that are no one's fault."""
        if self._nonfinite_constants:
            weights = {name: value for name, value in weights.items() if name not in self._nonfinite_constants}
        return sums(weights)

    def _skipped(self, update: ClientUpdate, finite: Tensor) -> ClientUpdate:
        """The update, or on the device one without samples and without a change where it is not finite."""
        weights = update.weights and replace_nonfinite(update.weights, finite, self.server.weights)
        extras = apply_to_collection(
            dict(update.extras),
            Tensor,
            lambda value: torch.where(finite, value, torch.zeros_like(value)) if value.is_floating_point() else value,
        )
        num_samples = finite.to(torch.int64) * update.num_samples
        return replace(update, num_samples=num_samples, weights=weights, extras=extras, included=finite)

    def take_totals(self) -> tuple[list[int], list[Tensor]]:
        """Of every update since the last call its client, and a 0-d float64 that is finite where all of it is."""
        found = self._clients, self._totals
        self._clients, self._totals = [], []
        return found


class NormClip(UpdateTransform):
    """Scales an update down where it moved too far: Δ_i · min(1, τ / ‖Δ_i‖) over the trainable entries.

    Args:
        max_norm: τ > 0, the greatest norm of a client's update.

    Source:
        Sun et al. 2019, arXiv:1911.07963, Section 4; without its optional noise.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        check_above(0, "it is the greatest norm of an update", max_norm=max_norm)
        self.max_norm = max_norm

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        if update.weights is None:
            return update
        start = {**self.server.weights, **(broadcast.weights or {})}
        weights = {name: update.weights[name] for name in self.server.trainable}
        delta = {name: value.double() - start[name].double() for name, value in weights.items()}
        norm = torch.stack([value.square().sum() for value in delta.values()]).sum().sqrt()
        factor = (self.max_norm / norm).clamp(max=1.0)  # ∞ where the client did not move: it counts as it is
        clipped = {
            name: torch.where(factor < 1, start[name].double() + factor * delta[name], weights[name].double())
            for name in weights
        }
        new = {name: value.to(weights[name].dtype) for name, value in clipped.items()}
        return replace(update, weights={**update.weights, **new})


def sums(state: State) -> list[Tensor]:
    """0-d float64 sums over the floating entries, one for each type: finite where all entries are."""
    found = []
    for dtype, vector in flatten(state).items():
        if dtype.is_floating_point:
            found.append(vector.sum(dtype=torch.float64))
    return found


def sums_of_nest(value: Any) -> list[Tensor]:
    """The same for each floating tensor in a nest of dicts, lists and tuples."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return [tensor.detach().sum(dtype=torch.float64) for tensor in found if tensor.is_floating_point()]


def replace_nonfinite(state: State, finite: Tensor, fallback: Mapping[str, Tensor]) -> State:
    """`state` where `finite`, else `fallback`, chosen on the device."""
    return {name: torch.where(finite, tensor, fallback[name]) for name, tensor in state.items()}
