"""Entries that a user's module adds to a checkpoint in `on_save_checkpoint`, but for objects."""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.types import Member

LEFT_OUT = "left_out"
"""Key of the names of entries that are objects."""

Forward = Callable[..., list[Any]]
"""`(hook, *args)`: calls the hook of the modules that have it, and gives what they returned."""


class UserEntries(Member):
    """Keeps what the hooks of the client's modules add to a checkpoint.

    Args:
        modules: of the client.
        forward: calls a hook of them.
    """

    name = "client"

    def __init__(self, modules: Iterable[LightningModule], forward: Forward) -> None:
        self._modules = list(modules)
        self._forward = forward

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Ask the modules for their entries.

        Empty where none has the hook.

        A checkpoint loads with `weights_only=True`, so that objects (a metric, an encoder of columns) are left out.
        """
        left_out: list[str] = []
        kept = _readable(self._asked(), "", left_out)
        return {**kept, LEFT_OUT: left_out} if left_out else kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand the modules their entries.

        Objects that were left out are those that the module has now, as it was made.
        """
        entries = dict(state)
        if left_out := entries.pop(LEFT_OUT, []):
            entries = _overlaid(self._asked(), entries)
            rank_zero_info(
                f"{', '.join(left_out)} of on_save_checkpoint are objects, which no checkpoint keeps: they are those "
                f"of the module as it was made"
            )
        self._forward("on_load_checkpoint", entries)

    def _asked(self) -> dict[str, Any]:
        hparams = {key: value for module in self._modules for key, value in module.hparams.items()}
        entries: dict[str, Any] = {"hyper_parameters": hparams}  # Lightning's key; hooks expect it
        return entries if self._forward("on_save_checkpoint", entries) else {}


def _readable(entries: Mapping[Any, Any], where: str, left_out: list[str]) -> dict[Any, Any]:
    """Copy the entries that `torch.load(weights_only=True)` reads.

    The names of the others go to `left_out`.
    """
    kept: dict[Any, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            kept[key] = _readable(value, f"{where}{key}.", left_out)
        elif _is_readable(value):
            kept[key] = value
        else:
            left_out.append(f"{where}{key}")
    return kept


def _is_readable(value: Any) -> bool:
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return True
    try:
        written = BytesIO()
        torch.save(value, written)
        torch.load(BytesIO(written.getvalue()), weights_only=True)
    except Exception:  # whatever pickling the object raises
        return False
    return True


def _overlaid(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Join two nested dictionaries.

    Where both have a value it is that of `above`.
    """
    joined = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            joined[key] = _overlaid(below[key], above[key])
    return joined
