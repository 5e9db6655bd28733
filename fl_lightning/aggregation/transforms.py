"""Transforms of updates on their way from client to sum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from fl_lightning.aggregation.server_parts import NotSetUp
from fl_lightning.types import Broadcast, ClientUpdate, ServerView
from fl_lightning.utils.settings import check_above, check_choice
from fl_lightning.utils.signatures import check_overrides


class UpdateTransform:
    """Base of the transforms of updates between client and sum, which by default changes nothing.

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
        """Take the server, and allocate state, once, before a checkpoint is restored."""
        self.server = server

    def on_client(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update before it leaves the client and its bytes are counted."""
        return update

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Change an update at the server, before the rule and the server module take it in."""
        return update

    def state_dict(self) -> dict[str, Any]:
        """Give the state kept between rounds: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class NormClip(UpdateTransform):
    """Scales an update down where it moved too far: Δ_i · min(1, τ / ‖Δ_i‖), one norm over every shared float entry.

    Args:
        max_norm: τ > 0, the greatest norm of a client's update.
        buffers: `clip`: those of floats (BatchNorm's running statistics) are entries like others; `keep`: they are
            left to the rule as they come, and the norm is that of the parameters.

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
        kept = {name for name, _ in self.server.module.named_buffers()} if self.buffers == "keep" else set()
        weights = {n: value for n, value in update.weights.items() if value.is_floating_point() and n not in kept}
        if not weights:
            return update
        start = {**self.server.weights, **(broadcast.weights or {})}
        delta = {  # a mask of −∞ stays where it is
            name: torch.where(start[name].isfinite(), value.double() - start[name].double(), 0.0)
            for name, value in weights.items()
        }
        norm = torch.stack([value.square().sum() for value in delta.values()]).sum().sqrt()
        factor = (self.max_norm / norm).clamp(max=1.0)  # ∞ where the client did not move: it stays unclipped
        new = {
            name: torch.where(factor < 1, start[name].double() + factor * delta[name], value.double()).to(value.dtype)
            for name, value in weights.items()
        }
        return replace(update, weights={**update.weights, **new})
