"""Entries that a user's module adds to a checkpoint in `on_save_checkpoint`, without objects."""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.types import Member

LEFT_OUT = "left_out"
"""Key of the names of the entries that were left out, because they are objects."""

Forward = Callable[..., list[Any]]
"""Called with `(hook, *args)`. It calls a hook of every module that has it, and returns the results."""


class UserEntries(Member):
    """Keeps what the hooks of the client's modules add to a checkpoint.

    Args:
        modules: The client's modules.
        forward: Calls a hook of the modules.
    """

    name = "client"

    def __init__(self, modules: Iterable[LightningModule], forward: Forward) -> None:
        self._modules = list(modules)
        self._forward = forward

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Return the modules' entries, or an empty dict if no module has the hook.

        A checkpoint must load with `weights_only=True`, so objects (a metric, an encoder of columns)
        are left out.
        """
        left_out: list[str] = []
        readable = _readable(self._entries(), prefix="", left_out=left_out)
        if left_out:
            readable[LEFT_OUT] = left_out
        return readable

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the modules their entries.

        An object that was left out is replaced by the object that the module has now.
        """
        entries = dict(state)
        left_out = entries.pop(LEFT_OUT, [])
        if left_out:
            entries = _overlaid(self._entries(), entries)
            rank_zero_info(
                f"{', '.join(left_out)} of on_save_checkpoint are objects, which no checkpoint keeps: they are those "
                f"of the module as it was made"
            )
        self._forward("on_load_checkpoint", entries)

    def _entries(self) -> dict[str, Any]:
        """Return what the hooks of the modules add to a checkpoint, objects too."""
        hparams: dict[str, Any] = {}
        for module in self._modules:
            hparams.update(module.hparams)
        # Hooks expect this key of Lightning in a checkpoint.
        entries: dict[str, Any] = {"hyper_parameters": hparams}
        if not self._forward("on_save_checkpoint", entries):
            return {}
        return entries


def _readable(entries: Mapping[Any, Any], prefix: str, left_out: list[str]) -> dict[Any, Any]:
    """Return a copy of the entries, without entries that `torch.load(weights_only=True)` does not read.

    Args:
        entries: Entries by name, nested.
        prefix: Beginning of the names in `left_out`.
        left_out: Receives the names of the entries that the copy lacks.
    """
    readable: dict[Any, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            readable[key] = _readable(value, prefix=f"{prefix}{key}.", left_out=left_out)
        elif _is_readable(value):
            readable[key] = value
        else:
            left_out.append(f"{prefix}{key}")
    return readable


def _is_readable(value: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` reads a value."""
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return True
    try:
        written = BytesIO()
        torch.save(value, written)
        torch.load(BytesIO(written.getvalue()), weights_only=True)
    except Exception:
        # Pickling an object may raise anything.
        return False
    return True


def _overlaid(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return two nested dictionaries joined. The values of `above` replace those of `below`."""
    joined = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            joined[key] = _overlaid(below[key], above[key])
    return joined
