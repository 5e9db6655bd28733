"""Passes over the samples of a client, and which clients of a stack take a step of theirs together."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple


class Passes(NamedTuple):
    """The batches of one client: in each epoch `full` ones of `batch_size` samples, then one of `tail` samples.

    Clients are stacked in ascending order of these values.

    Args:
        batch_size: samples in a full batch.
        short: minus the number of full batches.
        tail: samples of the last batch; 0: there is none.
        epochs: passes over the samples.
    """

    batch_size: int
    short: int
    tail: int
    epochs: int

    @classmethod
    def over(cls, size: int, batch_size: int, epochs: int, drops_single: bool, drops_tail: bool = False) -> "Passes":
        """Cut `size` samples into batches.

        `drops_single`: a tail of one sample is left out; `drops_tail`: any.

        >>> Passes.over(7, 3, 1, drops_single=True)
        Passes(batch_size=3, short=-2, tail=0, epochs=1)
        """
        full, tail = divmod(size, batch_size)
        return cls(batch_size, -full, 0 if drops_tail or (drops_single and tail == 1) else tail, epochs)

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch."""
        return self.full * self.batch_size + self.tail

    @property
    def full(self) -> int:
        """Number of full batches of an epoch."""
        return -self.short

    @property
    def steps(self) -> int:
        """Number of batches of an epoch."""
        return self.full + (self.tail > 0)

    def of_epoch(self, epoch: int, limit: int | None) -> "Passes":
        """The batches of one epoch, after which there are at most `limit` steps in all.

        None: no limit.

        >>> Passes.over(7, 3, 2, drops_single=False).of_epoch(1, limit=5)
        Passes(batch_size=3, short=-2, tail=0, epochs=1)
        """
        left = self.steps if epoch < self.epochs else 0
        if limit is not None:
            left = max(0, min(left, limit - epoch * self.steps))
        return Passes(self.batch_size, -min(left, self.full), self.tail if left > self.full else 0, 1)


def runs(rows: Sequence[Any], key: Callable[[Any], Any]) -> Iterator[slice]:
    """Runs of neighbouring rows with the same key.

    Rows whose key is None are in no run.
    """
    first = 0
    for value, group in groupby(rows, key):
        last = first + sum(1 for _ in group)
        if value is not None:
            yield slice(first, last)
        first = last


def lockstep(passes: Sequence[Passes]) -> Iterator[tuple[slice, int]]:
    """Yield the rows that take each step of one epoch together, and the index of their batch.

    Rows with as many samples in their batch of that index step together; tails come after all full batches.

    >>> of = [Passes.over(n, 2, 1, drops_single=False) for n in (5, 4, 3)]
    >>> [(rows.start, rows.stop, index) for rows, index in lockstep(of)]
    [(0, 3, 0), (0, 2, 1), (0, 1, 2), (2, 3, 1)]
    """
    for index in range(max((cut.full for cut in passes), default=0)):
        for rows in runs(passes, lambda cut: cut.batch_size if cut.full > index else None):  # noqa: B023
            yield rows, index
    for rows in runs(passes, lambda cut: (cut.full, cut.tail) if cut.tail else None):
        yield rows, passes[rows.start].full
