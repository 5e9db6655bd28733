"""Copies of the client module's entries, which an evaluation puts back."""

from collections.abc import Iterable
from typing import Any

import torch

from fl_lightning.members.weights import GlobalWeights


class HeldEntries:
    """Copies of all entries of the client module, which are put back whatever an evaluation did to them.

    Buffers with `persistent=False`, extra states and `requires_grad` are among them; a buffer that came to be is gone.

    Args:
        weights: of the module.
    """

    def __init__(self, weights: GlobalWeights) -> None:
        self._weights = weights
        self._extra = weights.extra.mark()
        places = {**weights.entries, **weights.non_persistent.places}
        self._there = {name: (place, getattr(*place, None)) for name, place in places.items()}
        self._parameters = dict(weights.client.named_parameters())
        self._buffers = frozenset(name for name, _ in weights.client.named_buffers())
        with torch.inference_mode(False), torch.no_grad():  # an evaluation may begin within Lightning's
            self._copies = {
                name: (value, value.detach().clone(), value.requires_grad)
                for name, (_, value) in self._there.items()
                if value is not None
            }

    def put_back(self) -> None:
        """Let every name stand for the same tensor again, with its shape and `requires_grad`.

        Values may differ.

        Raises:
            ValueError: naming a parameter that came to be, went, or stands in a module that was replaced.
        """
        self._check(name for name, _ in self._weights.client.named_parameters() if name not in self._parameters)
        for (owner, attribute), value in self._there.values():
            if getattr(owner, attribute, None) is not value:
                setattr(owner, attribute, value)
        parameters = dict(self._weights.client.named_parameters())
        self._check(name for name, value in self._parameters.items() if parameters.get(name) is not value)
        for name in {name for name, _ in self._weights.client.named_buffers()} - self._buffers:
            path, _, attribute = name.rpartition(".")
            setattr(self._weights.client.get_submodule(path), attribute, None)
        for value, copy, flag in self._copies.values():
            if value.shape != copy.shape or value.dtype != copy.dtype:
                value.data = copy.clone()
            if value.requires_grad != flag:
                value.requires_grad_(flag)

    def _check(self, changed: Iterable[str]) -> None:
        """Refuse parameters that are others than before."""
        for name in changed:
            raise ValueError(
                f"an evaluation must leave the client's parameters as they are, but {name!r} was added, removed or "
                f"replaced in it; do it in __init__ or configure_model"
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, values too."""
        self.put_back()
        for value, copy, _ in self._copies.values():
            value.copy_(copy)
        self._weights.extra.undo(self._extra)

    def state_dict(self) -> dict[str, Any]:
        """Give the entries of the state dict, by their names in the loop's."""
        entries = {name: self._copies[name][1] for name in self._weights.entries if name in self._copies}
        return self._weights.saved({**entries, **self._extra})
