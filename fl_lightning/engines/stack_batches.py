"""Batches of one epoch for the rows of a stack, gathered for all rows of a step at once where samples allow it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client.services import BatchTransfer
from fl_lightning.data.clients import ClientView
from fl_lightning.data.splits import TensorSplit
from fl_lightning.engines.pytrees import Stacked, stack_pytrees
from fl_lightning.types import ClientData
from fl_lightning.utils.devices import to_device


class StackBatches:
    """The batches that the clients of a stack have in one epoch, in the order of each.

    Args:
        views: the clients' data, by row.
        split: that is trained on.
        epochs: number of the epoch, by row.
        batch_sizes: samples in a full batch, by row.
        with_index: whether the step gets `(batch, positions)`.
        transfer: puts batches where they belong.
        device: where they belong.
    """

    def __init__(
        self,
        views: Sequence[ClientData],
        split: str,
        epochs: Sequence[int],
        batch_sizes: Sequence[int],
        with_index: bool,
        transfer: BatchTransfer,
        device: torch.device,
    ) -> None:
        self._batch_sizes = batch_sizes
        self._with_index = with_index
        self._transfer = transfer
        self._device = device
        self._source: TensorSplit | None = None
        self._indices: Sequence[Tensor] = ()
        self._positions: Sequence[Tensor] = ()
        self._draws: Sequence[torch.Generator | None] = ()
        plain = [view for view in views if isinstance(view, ClientView)]
        source = plain[0].source(split) if len(plain) == len(views) else None
        if any(view.source(split) is not source for view in plain):  # each sees its samples in its own way
            source = None
        if isinstance(source, TensorSplit) and not transfer.hooked:
            self._source = source
            self._order(source, plain, split, epochs)
            return
        self._batches = [
            view.batches(split, epoch, size, with_index=with_index)
            for view, epoch, size in zip(views, epochs, batch_sizes, strict=True)
        ]

    def _order(self, source: TensorSplit, views: Sequence[ClientView], split: str, epochs: Sequence[int]) -> None:
        """Put the order of all clients' samples on the device, in one copy."""
        orders = [view.order(split, epoch) for view, epoch in zip(views, epochs, strict=True)]
        sizes = [len(indices) for indices, _ in orders]
        self._indices = torch.split(source.placed(torch.cat([indices for indices, _ in orders])), sizes)
        self._draws = [view.draws(split, epoch) for view, epoch in zip(views, epochs, strict=True)]
        if self._with_index:
            places = [torch.arange(size) if at is None else at for size, (_, at) in zip(sizes, orders, strict=True)]
            self._positions = torch.split(source.placed(torch.cat(places)), sizes)

    def take(self, rows: slice, index: int, num_samples: int) -> Stacked:
        """Make the batches of some rows, of the same number of samples.

        Args:
            rows: of the stack; each takes its batches in order.
            index: of the batch in the epoch.
            num_samples: in the batch of each row.
        """
        if self._source is None:
            return stack_pytrees([self._next(row) for row in range(rows.start, rows.stop)])
        first = index * self._batch_sizes[rows.start]
        batch: Any = self._source.together(self._cut(self._indices, rows, first, num_samples), self._draws[rows])
        batch = self._transfer(batch)
        if not self._with_index:
            return batch, (0,) * len(batch)
        positions = to_device(self._cut(self._positions, rows, first, num_samples), self._device)
        return (batch, positions), ((0,) * len(batch), 0)

    @staticmethod
    def _cut(of: Sequence[Tensor], rows: slice, first: int, num_samples: int) -> Tensor:
        """Entries of the rows, (k, B)."""
        return torch.stack([row[first : first + num_samples] for row in of[rows]])

    def _next(self, row: int) -> Any:
        """The next batch of one row, as its step gets it."""
        item = next(self._batches[row])
        return (self._transfer(item[0]), to_device(item[1], self._device)) if self._with_index else self._transfer(item)
