"""Batches of a client in the epochs of a phase, and the rows of a stack that take a step together."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class Passes(NamedTuple):
    """Holds the numbers of the batches of one client in one phase.

    Each epoch has its full batches first, then at most one smaller batch: the tail. A stack has its clients in
    ascending order of these tuples: of clients with one batch size, the client with the most full batches comes first.

    Args:
        batch_size: The number of samples in a full batch.
        negative_full: The number of full batches of an epoch, times −1.
        tail: The number of samples in the tail. 0 means that there is no tail.
        epochs: The number of passes over the samples.
    """

    batch_size: int
    negative_full: int
    tail: int
    epochs: int

    @classmethod
    def over(cls, size: int, batch_size: int, epochs: int, *, drops_single: bool, drops_tail: bool = False) -> "Passes":
        """Divide the samples of a client into batches.

        Args:
            size: The number of samples.
            batch_size: The number of samples in a full batch.
            epochs: The number of passes over the samples.
            drops_single: Whether a tail of one sample is left out.
            drops_tail: Whether every tail is left out.

        >>> Passes.over(7, 3, 1, drops_single=True)
        Passes(batch_size=3, negative_full=-2, tail=0, epochs=1)
        """
        full, tail = divmod(size, batch_size)
        if drops_tail or (drops_single and tail == 1):
            tail = 0
        return cls(batch_size=batch_size, negative_full=-full, tail=tail, epochs=epochs)

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch."""
        return self.full * self.batch_size + self.tail

    @property
    def full(self) -> int:
        """Number of full batches of an epoch."""
        return -self.negative_full

    @property
    def steps(self) -> int:
        """Number of batches of an epoch."""
        if self.tail:
            return self.full + 1
        return self.full

    def of_epoch(self, epoch: int, limit: int | None) -> "Passes":
        """Return the batches of one epoch, if the whole phase has a limit.

        Args:
            epoch: Index of the epoch in the phase, from 0. After the last epoch there are no batches.
            limit: The largest number of batches of the phase. None sets no limit.

        >>> Passes.over(7, 3, 2, drops_single=False).of_epoch(1, limit=5)
        Passes(batch_size=3, negative_full=-2, tail=0, epochs=1)
        """
        steps = self.steps if epoch < self.epochs else 0
        if limit is not None:
            remaining = limit - epoch * self.steps
            steps = max(0, min(steps, remaining))
        return Passes(
            batch_size=self.batch_size,
            negative_full=-min(steps, self.full),
            tail=self.tail if steps > self.full else 0,
            epochs=1,
        )


def equal_neighbors(keys: Sequence[Hashable]) -> Iterator[slice]:
    """Yield the rows of every group of neighbors with equal keys.

    Args:
        keys: The key of each row. A row whose key is None is in no group.

    >>> list(equal_neighbors(["a", "a", None, "b"]))
    [slice(0, 2, None), slice(3, 4, None)]
    """
    start = 0
    for key, group in groupby(keys):
        stop = start + len(list(group))
        if key is not None:
            yield slice(start, stop)
        start = stop


def lockstep(passes: Sequence[Passes]) -> Iterator[tuple[slice, int]]:
    """Yield the rows that take each step of one epoch together, and the index of their batch.

    Rows step together if their batches of that index have equal sizes. The tails come after all full batches.

    Args:
        passes: The batches of the epoch, in ascending order, one for each row.

    >>> passes = [Passes.over(size, 2, 1, drops_single=False) for size in (5, 4, 3)]
    >>> [(rows.start, rows.stop, index) for rows, index in lockstep(passes)]
    [(0, 3, 0), (0, 2, 1), (0, 1, 2), (2, 3, 1)]
    """
    max_full = max((one.full for one in passes), default=0)
    for index in range(max_full):
        sizes = [one.batch_size if one.full > index else None for one in passes]
        for rows in equal_neighbors(sizes):
            yield rows, index
    tails = [(one.full, one.tail) if one.tail else None for one in passes]
    for rows in equal_neighbors(tails):
        yield rows, passes[rows.start].full
