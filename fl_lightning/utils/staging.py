"""Copies of batches to a GPU: from pinned memory, on a stream of their own, while the GPU works on others."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

Begun = Callable[[], Any]
"""A copy that was begun. It is called when the batch is used, and returns the batch on the device."""

LARGEST_SHARE = 0.5
"""Share of a GPU's free memory that samples may take. The rest is for nets, activations and the other samples."""


class Staging:
    """Copies batches to a device without making the host wait.

    Args:
        device: The device on which batches are used.
        begin: Begins the copy of a batch, its first argument, to a device. None copies on a stream of its own.
    """

    def __init__(self, device: torch.device, begin: Callable[[Any, torch.device], Begun] | None = None) -> None:
        self.device = device
        self._begin = begin or begin_copy

    def begin(self, batch: Any) -> Begun:
        """Begin the copy of a batch. A batch with values that are not copied here stays as it is."""
        if not holds_host_tensors(batch):
            return lambda: batch
        return self._begin(batch, self.device)

    def __call__(self, batch: Any) -> Any:
        """Copy a batch that is used at once."""
        return self.begin(batch)()

    def one_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches on the device, each once the copy of the next one has begun.

        Reads one batch ahead, so `batches` must not draw from a generator that others share. An error in reading a
        batch is raised when this batch is requested.
        """
        begun = self._begun(batches)
        current = next(begun, None)
        while current is not None:
            following = next(begun, None)
            yield current()
            current = following

    def _begun(self, batches: Iterable[Any]) -> Iterator[Begun]:
        """Begin the copies of batches, each when it is asked for.

        A batch that cannot be read becomes a function that raises the error.
        """
        try:
            yield from map(self.begin, batches)
        except Exception as error:
            yield partial(raise_error, error)


def raise_error(error: Exception) -> None:
    """Raise an error that came earlier."""
    raise error


def staging_for(device: torch.device) -> Staging | None:
    """Choose the object that copies batches to a device. None means that copies are not needed or gain nothing."""
    return Staging(device) if device.type == "cuda" else None


def fits(num_bytes: int, device: torch.device) -> bool:
    """Return True if samples of so many bytes may lie on the device."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= LARGEST_SHARE * free


def holds_host_tensors(pytree: Any) -> bool:
    """Return True for a batch of dense tensors of the host, numbers and texts, in lists, tuples and dicts.

    Other types are moved by their own code, since they may hold tensors that cannot be found from outside.

    >>> holds_host_tensors([torch.zeros(2), {"y": torch.zeros(2), "name": "a"}])
    True
    >>> holds_host_tensors(torch.eye(2).to_sparse())
    False
    """
    if type(pytree) is Tensor:
        return pytree.layout is torch.strided and pytree.device.type == "cpu"
    if type(pytree) is dict:
        return all(map(holds_host_tensors, pytree.values()))
    if type(pytree) in (list, tuple):
        return all(map(holds_host_tensors, pytree))
    return pytree is None or isinstance(pytree, str | bytes | int | float)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a GPU. There is only one, because torch keeps memory apart by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def begin_copy(batch: Any, device: torch.device) -> Begun:
    """Begin the copy of a batch to a GPU, and return a function that makes the present stream wait for it."""
    side = side_stream(device)
    with torch.cuda.stream(side):
        there = apply_to_collection(batch, Tensor, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    copied = side.record_event()

    def finish() -> Any:
        present = torch.cuda.current_stream(device)
        present.wait_event(copied)
        # Without this, a later copy might take its memory too early.
        apply_to_collection(there, Tensor, lambda tensor: tensor.record_stream(present))
        return there

    return finish
