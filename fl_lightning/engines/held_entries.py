"""Copies of the client module's entries, to be put back after an evaluation."""

from typing import Any

import torch
from torch import Tensor

from fl_lightning.members.weights import GlobalWeights


class HeldEntries:
    """Holds copies of all entries of the client module, and puts them back after an evaluation.

    The entries include buffers with `persistent=False`, extra states and `requires_grad`.

    Args:
        global_weights: The entries of the client module.
    """

    def __init__(self, global_weights: GlobalWeights) -> None:
        self._global_weights = global_weights
        self._client = global_weights.client
        self._extra = global_weights.extra.mark()
        self._places = {**global_weights.entries, **global_weights.non_persistent.places}
        self._tensors: dict[str, Tensor | None] = {}
        for name, (owner, attribute) in self._places.items():
            self._tensors[name] = getattr(owner, attribute, None)
        self._parameters = dict(self._client.named_parameters())
        self._buffers = frozenset(name for name, _ in self._client.named_buffers())
        self._copies: dict[str, tuple[Tensor, Tensor, bool]] = {}
        """By name the tensor, a copy of its values, and its `requires_grad`."""
        # An evaluation may begin within Lightning's inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            for name, value in self._tensors.items():
                if value is not None:
                    self._copies[name] = (value, value.detach().clone(), value.requires_grad)

    def put_back(self) -> None:
        """Let every name stand for the same tensor again, with its shape and `requires_grad`.

        Values may differ. Buffers that the evaluation has added become None.

        Raises:
            ValueError: A parameter was added or removed, or it belongs to a module that was
                replaced.
        """
        self._check_none_added()
        for name, (owner, attribute) in self._places.items():
            value = self._tensors[name]
            if getattr(owner, attribute, None) is not value:
                setattr(owner, attribute, value)
        self._check_none_replaced()
        self._remove_new_buffers()
        for value, copy, requires_grad in self._copies.values():
            if value.shape != copy.shape or value.dtype != copy.dtype:
                value.data = copy.clone()
            if value.requires_grad != requires_grad:
                value.requires_grad_(requires_grad)

    def _check_none_added(self) -> None:
        """Refuse a parameter that did not exist before.

        Raises:
            ValueError: A parameter was added.
        """
        for name, _ in self._client.named_parameters():
            if name not in self._parameters:
                raise changed_parameter(name)

    def _check_none_replaced(self) -> None:
        """Refuse a parameter that is another object than before.

        Raises:
            ValueError: A parameter was removed or replaced.
        """
        parameters = dict(self._client.named_parameters())
        for name, value in self._parameters.items():
            if parameters.get(name) is not value:
                raise changed_parameter(name)

    def _remove_new_buffers(self) -> None:
        """Set the buffers to None that did not exist before."""
        names = {name for name, _ in self._client.named_buffers()}
        for name in names - self._buffers:
            path, _, attribute = name.rpartition(".")
            setattr(self._client.get_submodule(path), attribute, None)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, values too."""
        self.put_back()
        for value, copy, _ in self._copies.values():
            value.copy_(copy)
        self._global_weights.extra.undo(self._extra)

    def state_dict(self) -> dict[str, Any]:
        """Return the held entries of the state dict, by their names in the loop's state dict."""
        entries: dict[str, Any] = {}
        for name in self._global_weights.entries:
            if name in self._copies:
                _, copy, _ = self._copies[name]
                entries[name] = copy
        return self._global_weights.saved({**entries, **self._extra})


def changed_parameter(name: str) -> ValueError:
    """Return the error for a parameter that an evaluation has added, removed or replaced."""
    return ValueError(
        f"an evaluation must leave the client's parameters as they are, but {name!r} was added, removed or replaced "
        f"in it; do it in __init__ or configure_model"
    )
