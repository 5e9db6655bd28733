"""Transforms of updates on their way from the client to the sum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fl_lightning.aggregation.server_parts import NotSetUp
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State
from fl_lightning.utils.settings import check_above, check_choice
from fl_lightning.utils.signatures import check_overrides


class UpdateTransform:
    """Transforms updates between client and sum, by default into themselves.

    It is the base of all transforms. To leave an update out, return it with `num_samples` 0. Use a tensor on the device
    if the number depends on values there, because nothing is read inside a round.

    Attributes:
        server: The server, with the round's weights and the names of the trainable entries.
    """

    def __init__(self) -> None:
        self.server = cast(ServerView, NotSetUp(type(self).__name__))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def setup(self, server: ServerView) -> None:
        """Take the server, and allocate state, once, before a checkpoint is restored."""
        self.server = server

    def on_client(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update before it leaves the client and its bytes are counted."""
        return update

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update at the server, before the rule and the server module take it in."""
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return the state kept between rounds: tensors, numbers, strings, lists and dicts of these."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""


class NormClip(UpdateTransform):
    """Scales an update down if it moved too far: Δ_i · min(1, τ / ‖Δ_i‖).

    The norm is one over every shared float entry.

    Args:
        max_norm: Greatest norm of a client's update, τ > 0.
        buffers: Treatment of float buffers (BatchNorm's running statistics). `clip` treats them as the other entries.
            `keep` leaves them to the rule as they come, and takes the norm of the parameters only.

    Source:
        Sun et al. 2019, arXiv:1911.07963, Section 4; without its optional noise.
    """

    def __init__(self, max_norm: float, buffers: Literal["clip", "keep"] = "clip") -> None:
        super().__init__()
        check_above(0, "it is the greatest norm of an update", max_norm=max_norm)
        check_choice(("clip", "keep"), buffers=buffers)
        self.max_norm = max_norm
        self.buffers = buffers

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        if update.weights is None:
            return update
        weights = self._clipped_entries(update.weights)
        if not weights:
            return update
        start = {**self.server.weights, **(broadcast.weights or {})}
        delta: dict[str, Tensor] = {}
        for name, value in weights.items():
            # An entry of −∞ (a mask) stays where it is.
            delta[name] = torch.where(start[name].isfinite(), value.double() - start[name].double(), 0.0)
        norm = torch.stack([value.square().sum() for value in delta.values()]).sum().sqrt()
        # The factor is ∞ if the client did not move. It then stays unclipped.
        factor = (self.max_norm / norm).clamp(max=1.0)
        new: State = {}
        for name, value in weights.items():
            clipped = start[name].double() + factor * delta[name]
            new[name] = torch.where(factor < 1, clipped, value.double()).to(value.dtype)
        return replace(update, weights={**update.weights, **new})

    def _clipped_entries(self, weights: State) -> State:
        """Return the entries over which the norm is taken."""
        untouched = set[str]()
        if self.buffers == "keep":
            untouched = {name for name, _ in self.server.module.named_buffers()}
        floats = {name: value for name, value in weights.items() if value.is_floating_point()}
        return {name: value for name, value in floats.items() if name not in untouched}
