"""The teachers' logits of a stack's samples, kept from the first epoch of a phase for the others."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fl_lightning.client.teacher import LogitCache


class StackLogits:
    """Teachers' logits of the samples of every client of a stack, where these come back unchanged in every epoch.

    Args:
        sizes: samples of each row.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._kept: dict[str, Tensor] = {}

    def of(self, rows: slice, positions: Tensor) -> dict[str, Tensor]:
        """Kept logits of a batch by teacher, each (k, B, ...).

        Positions (k, B) of its samples in their splits.
        """
        return {name: kept[rows][self._rows(positions), positions] for name, kept in self._kept.items()}

    def keep(self, rows: slice, positions: Tensor, computed: Mapping[str, Tensor]) -> None:
        """Keep the logits (k, B, ...) of a batch of the first epoch, by teacher."""
        for name, logits in computed.items():
            if name not in self._kept:
                self._kept[name] = logits.new_empty(len(self._sizes), max(self._sizes), *logits.shape[2:])
            self._kept[name][rows][self._rows(positions), positions] = logits.detach()

    @staticmethod
    def _rows(positions: Tensor) -> Tensor:
        return torch.arange(len(positions), device=positions.device).unsqueeze(1)


class RowLogits(LogitCache):
    """The teachers' logits of one row's batch: those at hand, and those that are computed.

    Args:
        x: inputs of the batch.
        known: by teacher, (B, ...).

    Attributes:
        computed: by teacher, (B, ...).
    """

    def __init__(self, x: Tensor, known: Mapping[str, Tensor]) -> None:
        super().__init__(0)
        self._x = x
        self._known = known
        self.computed: dict[str, Tensor] = {}

    def logits(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if name in self._known:
            return self._known[name]
        if name not in self.computed:
            self.computed[name] = compute(x)
        return self.computed[name]
