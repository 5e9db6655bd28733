"""Transforms of updates on their way from client to sum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from fl_lightning.aggregation.server_parts import NotSetUp
from fl_lightning.types import Broadcast, ClientUpdate, ServerView
from fl_lightning.utils.settings import check_above
from fl_lightning.utils.signatures import check_overrides


class UpdateTransform:
    """Base of the transforms of updates between client and sum; as it stands, it changes nothing.

    To leave an update out, return it with `num_samples` 0 (a tensor on the device: nothing is read inside a round).

    Attributes:
        server: the server, with the round's weights and the names of the trainable ones.
    """

    def __init__(self) -> None:
        self.server = cast(ServerView, NotSetUp(type(self).__name__))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def setup(self, server: ServerView) -> None:
        """Take the server, and allocate state; called once, before a checkpoint is restored."""
        self.server = server

    def on_client(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update before it leaves the client; bytes are counted after it."""
        return update

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update at the server, before the rule and the server module take it in."""
        return update

    def state_dict(self) -> dict[str, Any]:
        """State kept between rounds: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


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
        if update.weights is None or not self.server.trainable:
            return update
        start = {**self.server.weights, **(broadcast.weights or {})}
        weights = {name: update.weights[name] for name in self.server.trainable}
        delta = {name: value.double() - start[name].double() for name, value in weights.items()}
        norm = torch.stack([value.square().sum() for value in delta.values()]).sum().sqrt()
        factor = (self.max_norm / norm).clamp(max=1.0)  # ∞ where the client did not move: it stays unclipped
        clipped = {
            name: torch.where(factor < 1, start[name].double() + factor * delta[name], weights[name].double())
            for name in weights
        }
        new = {name: value.to(weights[name].dtype) for name, value in clipped.items()}
        return replace(update, weights={**update.weights, **new})
