"""The guard against values that must not become the model: the first transform between client and sum."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.aggregation.transforms import UpdateTransform
from fl_lightning.functional.state import FlatState, choose, extremes, flatten
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State

Kind = Literal["values", "norm", "weight", "samples"]
MOST = sys.float_info.max


class Finding(NamedTuple):
    """A value that is judged at the end of the round.

    Args:
        client_id: of the client; -1: the aggregate.
        kind: `values` (finite where all are), `norm` of the update, or `weight` that the rule gave.
        value: 0-d, on the device.
        least: that it may be.
        most: that it may be.
    """

    client_id: int
    kind: Kind
    value: Tensor
    least: float = -MOST
    most: float = MOST


class Wrong(NamedTuple):
    """A finding whose value, now on the host, is not what it may be."""

    client_id: int
    kind: Kind
    value: float


def wrong_of(findings: Iterable[Finding], values: Iterable[float]) -> list[Wrong]:
    """List the findings whose values, now on the host, are not what they may be."""
    pairs = zip(findings, values, strict=True)
    return [Wrong(f.client_id, f.kind, value) for f, value in pairs if not f.least <= value <= f.most]


class NonFiniteGuard(UpdateTransform):
    """Finds values that must not become the model; what it looks at stays on the device until the round ends.

    Args:
        skips: leave out an update that is not finite or too long (its weights become the round's, its extras 0); else
            it stays and the round ends in an error.
        max_norm: greatest norm of an update over the trainable entries; None: any.
    """

    def __init__(self, skips: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.skips, self.max_norm = skips, max_norm
        self._nonfinite_constants: frozenset[str] = frozenset()
        self._findings: list[Finding] = []

    def setup(self, server: ServerView) -> None:
        """Exclude untrained entries that are not finite from the check (a transformer's mask): they are constants."""
        super().setup(server)
        fixed = {name: value for name, value in server.weights.items() if name not in set(server.trainable)}
        self._nonfinite_constants = frozenset(n for n, value in fixed.items() if not bool(value.isfinite().all()))

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        return self.with_personal(update, {}, broadcast)

    def with_personal(
        self, update: ClientUpdate, personal: State, broadcast: Broadcast, trained: State | None = None
    ) -> ClientUpdate:
        """Check the entries that stay with the client, too, and where a transform sends no weights those `trained`."""
        weights = update.weights or trained
        found = self._extremes(weights) if weights else []
        if personal:
            found += self._extremes(personal)
        if update.extras:
            found += extremes_of_nest(update.extras)
        if not found:
            return update
        for value in found:
            self._findings.append(Finding(update.client_id, "values", value))
        allowed = all_finite(found) if self.skips else None
        if self.max_norm is not None and update.weights and self.server.trainable:
            norm = update_norm(
                update.weights, {**self.server.weights, **(broadcast.weights or {})}, self.server.trainable
            )
            self._findings.append(Finding(update.client_id, "norm", norm, 0.0, self.max_norm))
            allowed = None if allowed is None else allowed & (norm <= self.max_norm)
        return update if allowed is None else self._skipped(update, allowed)

    def weighed(self, client_id: int, weights: Iterable[float | Tensor]) -> None:
        """Note the weights that the rule gave a client."""
        self._findings += [Finding(client_id, "weight", torch.as_tensor(weight).detach(), 0.0) for weight in weights]

    def counted(self, update: ClientUpdate, known: int) -> ClientUpdate:
        """Check a number of samples that lies on the device, of a client that has `known` ones."""
        n = torch.as_tensor(update.num_samples)
        self._findings.append(Finding(update.client_id, "samples", n, 0.0, known))
        return self._skipped(update, (n >= 0) & (n <= known) & update.included) if self.skips else update

    def _extremes(self, state: State) -> list[Tensor]:
        """Least and greatest number of each floating type, or what else tells that all are finite; no constants."""
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

    def take_findings(self, aggregate: State | None = None) -> list[Finding]:
        """Hand over the findings since the last call, and those of the aggregate, the round's new weights."""
        found, self._findings = self._findings, []
        if aggregate is not None:
            found += [Finding(-1, "values", value) for value in self._extremes(aggregate)]
        return found


def update_norm(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Norm of an update over the named entries, 0-d float64."""
    return torch.stack([(weights[n].double() - start[n].double()).square().sum() for n in names]).sum().sqrt()


def extremes_of_nest(value: Any) -> list[Tensor]:
    """`extremes` of the tensors in a nest of dicts, lists and tuples."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return extremes(tensor.detach().reshape(-1) for tensor in found)


def all_finite(found: Iterable[Tensor]) -> Tensor:
    """True where all of some 0-d tensors are finite, 0-d on their device."""
    return torch.stack([value.double() for value in found]).isfinite().all()
