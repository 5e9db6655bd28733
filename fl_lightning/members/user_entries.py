"""Entries that a user's module adds to a checkpoint in `on_save_checkpoint`, without objects."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.hooks import own_hook
from fl_lightning.types import Member
from fl_lightning.utils.plain import is_readable, plain_value, without_refused

LEFT_OUT = "left_out"
"""Key of the names of the entries that were left out, because they are objects."""

REMOVED = "removed"
"""Key of the names of the weights that a hook has removed from the state dict that it was given."""

FEDERATED = "federated"
"""Key of the federation's own part of a checkpoint, which hooks of modules are not given."""

WEIGHTS = "state_dict"
"""Lightning's key of the weights in a checkpoint."""

HPARAMS = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
"""Lightning's key of the hyper-parameters in a checkpoint."""

Forward = Callable[..., bool]
"""Called with `(module, hook, *args)`. It calls a hook of the module, and returns whether the module overrides it."""


class UserEntries(Member):
    """Keeps what the hooks of the client's modules add to a checkpoint.

    A hook is given a checkpoint as Lightning would give it for the module alone: its weights under its own names, its
    hyper-parameters, and Lightning's other entries. What a hook adds or changes is kept, and given to
    `on_load_checkpoint`. The weights of the run stay whole, whatever a hook does to the state dict.

    Args:
        modules: The client's modules, by their prefix in the state dict of the loop.
        forward: Calls a hook of a module.

    Attributes:
        checkpoint: The checkpoint of Lightning that is saved or loaded now, or an empty mapping.
    """

    name = "client"

    def __init__(self, modules: Mapping[str, LightningModule], forward: Forward) -> None:
        self._modules = dict(modules)
        self._forward = forward
        self.checkpoint: Mapping[str, Any] = {}

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Return the modules' entries, or an empty dict if no module has a hook of checkpoints.

        A checkpoint must load with `weights_only=True`, so objects (a metric, an encoder of columns)
        are left out.
        """
        if not self._has_hook("on_save_checkpoint") and not self._has_hook("on_load_checkpoint"):
            return {}
        left_out: list[str] = []
        readable = without_refused(plain_value(self._entries()), keeps=is_readable, left_out=left_out)
        if left_out:
            readable[LEFT_OUT] = left_out
        return readable

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the modules their entries.

        An object that was left out is replaced by the object that the module has now.
        """
        if not self._has_hook("on_load_checkpoint"):
            return
        entries = dict(state)
        left_out = entries.pop(LEFT_OUT, [])
        if left_out:
            entries = _overlaid(self._entries(), entries)
            rank_zero_info(
                f"{', '.join(left_out)} of on_save_checkpoint are objects, which no checkpoint keeps: they are those "
                f"of the module as it was made"
            )
        changed = entries.pop(WEIGHTS, {})
        removed = entries.pop(REMOVED, [])
        for prefix, module in self._modules.items():
            view = {**self._lightning_part(), HPARAMS: self._hparams(), **entries}
            whole = self._weights(prefix)
            view[WEIGHTS] = {name: value for name, value in whole.items() if prefix + name not in removed}
            view[WEIGHTS] |= _below(prefix, changed)
            self._forward(module, "on_load_checkpoint", view)
            _say_unused(module, view.get(WEIGHTS, {}), whole)

    def _has_hook(self, name: str) -> bool:
        """Return True if a module overrides a hook."""
        return any(own_hook(module, name) is not None for module in self._modules.values())

    def _entries(self) -> dict[str, Any]:
        """Return what the hooks of the modules add to a checkpoint or change in it, objects too."""
        frame = self._lightning_part()
        checkpoint: dict[str, Any] = {**_copied(frame), HPARAMS: self._hparams()}
        changed: dict[str, Any] = {}
        removed: list[str] = []
        for prefix, module in self._modules.items():
            whole = self._weights(prefix)
            # A hook may write into the weights, which are those of the run.
            checkpoint[WEIGHTS] = {name: deepcopy(value) for name, value in whole.items()}
            self._forward(module, "on_save_checkpoint", checkpoint)
            edited = checkpoint.get(WEIGHTS, {})
            removed += [prefix + name for name in whole.keys() - edited.keys()]
            changed |= {prefix + name: value for name, value in edited.items() if not _is_same(value, whole.get(name))}
        entries = {name: value for name, value in checkpoint.items() if not _is_same(value, frame.get(name))}
        entries.pop(WEIGHTS, None)
        if changed:
            entries[WEIGHTS] = changed
        if removed:
            entries[REMOVED] = sorted(removed)
        return entries

    def _lightning_part(self) -> dict[str, Any]:
        """Return the entries of Lightning's in the checkpoint, without the weights."""
        hidden = (FEDERATED, WEIGHTS)
        return {name: value for name, value in self.checkpoint.items() if name not in hidden}

    def _weights(self, prefix: str) -> dict[str, Any]:
        """Return the weights of a module in the checkpoint, by the module's own names."""
        return _below(prefix, self.checkpoint.get(WEIGHTS, {}))

    def _hparams(self) -> dict[str, Any]:
        """Return the hyper-parameters of the modules."""
        hparams: dict[str, Any] = {}
        for module in self._modules.values():
            hparams.update(module.hparams)
        return hparams


def _below(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def _copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists, which a hook may change. Tensors and objects are the same."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def _is_same(value: Any, other: Any) -> bool:
    """Return True if two values are equal, at any depth. Tensors of different types are not."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in value.items())
    if isinstance(value, list | tuple):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(_is_same(item, old) for item, old in pairs)
    return isinstance(value, bool | int | float | str) and value == other


def _say_unused(module: LightningModule, edited: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
    """Report the weights that a module's hook gives to the model, where the run goes on with those that it had.

    Args:
        module: The module.
        edited: The state dict, as the hook leaves it.
        whole: The weights of the run.
    """
    others = sorted(name for name, value in edited.items() if name in whole and not _is_same(value, whole[name]))
    if others:
        rank_zero_info(
            f"on_load_checkpoint of {type(module).__name__} leaves other weights in the state dict ({others[0]} ...): "
            f"a federation goes on with the weights that it had; change them in on_fit_start"
        )


def _overlaid(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return two nested dictionaries joined. The values of `above` replace those of `below`."""
    joined = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            joined[key] = _overlaid(below[key], above[key])
    return joined
