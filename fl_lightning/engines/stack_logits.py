"""Teachers' logits of the samples of a stack, kept from the first epoch of a phase for its other epochs."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fl_lightning.client.teacher import LogitCache


class StackLogits:
    """Keeps teachers' logits for every client of a stack, if every epoch has the same unchanged samples.

    Args:
        sizes: The number of samples of each row.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._num_rows = len(sizes)
        self._max_samples = max(sizes)
        self._logits: dict[str, Tensor] = {}

    def of(self, rows: slice, positions: Tensor) -> dict[str, Tensor]:
        """Return the kept logits of a batch by teacher, each (k, B, ...).

        Args:
            rows: The rows of the batch.
            positions: The positions of the samples in the split of their client, (k, B) int64.
        """
        places = row_numbers(positions)
        return {name: logits[rows][places, positions] for name, logits in self._logits.items()}

    def keep(self, rows: slice, positions: Tensor, computed: Mapping[str, Tensor]) -> None:
        """Keep the logits of a batch of the first epoch.

        Args:
            rows: The rows of the batch.
            positions: The positions of the samples in the split of their client, (k, B) int64.
            computed: The logits by teacher, each (k, B, ...).
        """
        for name, logits in computed.items():
            if name not in self._logits:
                shape = (self._num_rows, self._max_samples, *logits.shape[2:])
                self._logits[name] = logits.new_empty(shape)
            self._logits[name][rows][row_numbers(positions), positions] = logits.detach()


def row_numbers(positions: Tensor) -> Tensor:
    """Return the numbers of the rows of positions (k, B), as (k, 1) int64, to index with both.

    >>> row_numbers(torch.tensor([[4, 5], [6, 7]]))
    tensor([[0],
            [1]])
    """
    return torch.arange(len(positions), device=positions.device).unsqueeze(1)


class RowLogits(LogitCache):
    """Gives the teachers' logits of one row's batch, and keeps the logits that it computes.

    Args:
        x: The inputs of the batch.
        known: The known logits by teacher, each (B, ...).

    Attributes:
        computed: The computed logits by teacher, each (B, ...).
    """

    def __init__(self, x: Tensor, known: Mapping[str, Tensor]) -> None:
        super().__init__(0)
        self._inputs = x
        self._known = known
        self.computed: dict[str, Tensor] = {}

    def holds(self, x: Tensor) -> bool:
        return self._inputs is x

    def logits(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if name in self._known:
            return self._known[name]
        if name not in self.computed:
            self.computed[name] = compute(x)
        return self.computed[name]
