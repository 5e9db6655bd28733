"""Batches of one epoch for the rows of a stack, gathered for all rows of a step at once if the samples allow it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client.services import BatchTransfer
from fl_lightning.data.clients import ClientView
from fl_lightning.data.splits import Split, TensorSplit
from fl_lightning.engines.pytrees import Stacked, StackingError, stack_pytrees
from fl_lightning.types import ClientData
from fl_lightning.utils.devices import copy_to_device


class StackBatches:
    """Makes the batches of one epoch of a stack, in the order of each client.

    Args:
        views: The data of the clients, by row.
        split: The name of the split that is trained on.
        epochs: The index of the epoch, by row.
        batch_sizes: The number of samples in a full batch, by row.
        with_index: Whether the step gets `(batch, positions)`.
        transfer: Moves and converts batches.
        device: The device of the batches.
    """

    def __init__(
        self,
        views: Sequence[ClientData],
        split: str,
        *,
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
        self._generators: Sequence[torch.Generator | None] = ()
        known_views = [view for view in views if isinstance(view, ClientView)]
        source: Split | None = None
        if len(known_views) == len(views):
            check_own_generators(known_views, split)
            source = common_source(known_views, split)
        # A transfer hook of the user gets the batch of one client at a time.
        if isinstance(source, TensorSplit) and not transfer.hooked:
            self._source = source
            self._draw_orders(source, views=known_views, split=split, epochs=epochs)
            return
        self._batches = [
            view.batches(split, epoch, batch_size, with_index=with_index)
            for view, epoch, batch_size in zip(views, epochs, batch_sizes, strict=True)
        ]

    def _draw_orders(self, source: TensorSplit, views: Sequence[ClientView], split: str, epochs: Sequence[int]) -> None:
        """Draw the order of every client's samples, and put all orders on the device of the samples in one copy."""
        indices: list[Tensor] = []
        positions: list[Tensor] = []
        generators: list[torch.Generator | None] = []
        for view, epoch in zip(views, epochs, strict=True):
            client_indices, client_positions = view.order(split, epoch)
            indices.append(client_indices)
            generators.append(view.draws(split, epoch))
            if self._with_index:
                if client_positions is None:
                    client_positions = torch.arange(len(client_indices))
                positions.append(client_positions)
        sizes = [len(client_indices) for client_indices in indices]
        self._indices = torch.split(source.placed(torch.cat(indices)), sizes)
        self._generators = generators
        if self._with_index:
            self._positions = torch.split(source.placed(torch.cat(positions)), sizes)

    def take(self, rows: slice, index: int, num_samples: int) -> Stacked:
        """Make the batches of one step, which have equal sizes.

        Args:
            rows: The rows of the step. Each row takes its batches in order.
            index: The index of the batch in the epoch.
            num_samples: The number of samples in the batch of each row.
        """
        if self._source is None:
            return stack_pytrees([self._next(row) for row in range(rows.start, rows.stop)])
        start = index * self._batch_sizes[rows.start]
        samples = slice(start, start + num_samples)
        indices = torch.stack([order[samples] for order in self._indices[rows]])
        batch: Any = self._source.together(indices, self._generators[rows])
        batch = self._transfer(batch)
        batch_dims = type(batch)([0] * len(batch))
        if not self._with_index:
            return batch, batch_dims
        positions = torch.stack([order[samples] for order in self._positions[rows]])
        return (batch, copy_to_device(positions, self._device)), (batch_dims, 0)

    def _next(self, row: int) -> Any:
        """Return the next batch of one row, as its step gets it.

        Raises:
            StackingError: The batch is None.
        """
        item = next(self._batches[row])
        samples, positions = item if self._with_index else (item, None)
        batch = self._transfer(samples)
        if batch is None:
            raise StackingError("a batch is None, which the other clients cannot skip")
        if positions is None:
            return batch
        return batch, copy_to_device(positions, self._device)


def check_own_generators(views: Sequence[ClientView], split: str) -> None:
    """Check that samples are read without random generators of the user's own.

    Args:
        views: The data of the clients.
        split: The name of the split.

    Raises:
        StackingError: They are not.
    """
    if any(view.source(split).own_generators for view in views):
        raise StackingError("its samples draw random numbers, which are keyed for one client at a time")


def common_source(views: Sequence[ClientView], split: str) -> Split | None:
    """Return the split in which all clients index their samples.

    Args:
        views: The data of the clients, at least one.
        split: The name of the split.

    Returns:
        The split, or None if a client has another one, such as a client that sees its samples in its own way.
    """
    source = views[0].source(split)
    if any(view.source(split) is not source for view in views):
        return None
    return source
