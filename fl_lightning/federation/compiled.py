"""`vmap` of a stack's step, compiled: the same function for every step, so that it is compiled once for each shape."""

import time
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.func import vmap

Tensors = tuple[Tensor, ...]


class Vmapped:
    """Calls a function of single rows for all rows of a stack at once.

    Args:
        compiles: whether by `torch.compile`. Where that fails, a line says so, and nothing is compiled from then on.
    """

    def __init__(self, compiles: bool = False) -> None:
        self._function: Callable[..., Tensors] = tuple
        self._compiled: Callable[..., Any] | None = (
            torch.compile(self._plain, fullgraph=True, dynamic=False) if compiles else None
        )
        self._told = False

    def _plain(self, *tensors: Tensor) -> Any:
        return vmap(self._function)(*tensors)

    def __call__(self, function: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
        """Apply `function` to each row of the tensors, each (k, ...)."""
        self._function = function
        found: Tensors
        if self._compiled is not None:
            began = time.perf_counter()
            try:
                found = self._compiled(*tensors)
            except Exception as error:
                self._compiled = None
                rank_zero_info(f"model.compile: the step of a stack is not compiled: {first_line(error)}")
            else:
                if not self._told:
                    self._told = True
                    rank_zero_info(f"model.compile: the first step took {time.perf_counter() - began:.1f} s to compile")
                return found
        found = self._plain(*tensors)
        return found


def first_line(error: Exception) -> str:
    """Type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
