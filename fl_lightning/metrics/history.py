"""History of a run: the values of all its rounds."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

BY_CLASS = "/acc_class/"
"""Part of the log key of one class's accuracy; the class's name follows it."""

EPSILON = "privacy/epsilon"
EPSILON_SAMPLES = "privacy/epsilon_samples"
EPSILON_LOCAL = "privacy/epsilon_local"
"""Log keys of ε, of all rounds so far: of clients as a whole; and, of the client in the round that has spent most, of
its samples, and of all it has against the server."""

PROMISED = "privacy/"
UNPROTECTED = "unprotected/"
"""Beginnings of log keys: of what a guarantee is told by, and of values that it does not cover."""

GUARANTEES = (EPSILON, EPSILON_SAMPLES, EPSILON_LOCAL, "privacy/clip")
"""Log keys of what a guarantee is told by, which tell nothing else of the clients."""

ROWS_AT_ONCE = 256
"""Largest number of rows that wait to be laid out."""


class History:
    """A table that grows by one row a round and by a column with every new key."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._rounds: list[int] = []
        self._table = torch.empty(0, 0, dtype=torch.float64)
        self._new: list[tuple[int, Mapping[str, float]]] = []

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def names(self) -> list[str]:
        """Keys of the columns."""
        self._lay_out()
        return list(self._names)

    @property
    def rounds(self) -> list[int]:
        """The 0-based round of each row, ascending."""
        self._lay_out()
        return self._rounds

    @property
    def table(self) -> Tensor:
        """Table (T, K) float64, not to be edited, NaN where a round has no such value."""
        self._lay_out()
        return self._table

    def record(self, round_idx: int, row: Mapping[str, float]) -> None:
        """Add a row, which may grow until the next round's, in place of rows of the same and of later rounds."""
        while self._new and self._new[-1][0] >= round_idx:
            self._new.pop()
        if self._rounds and self._rounds[-1] >= round_idx:
            self.drop(round_idx)
        if len(self._new) >= ROWS_AT_ONCE:
            self._lay_out()
        self._new.append((round_idx, row))

    def _lay_out(self) -> None:
        """Put the new rows into the table, only when it is read, which most runs never do."""
        if not self._new:
            return
        for _, row in self._new:
            for name in row:
                self._names.setdefault(name, len(self._names))
        rows = [[row.get(name, math.nan) for name in self._names] for _, row in self._new]
        before = pad(self._table, (0, len(self._names) - self._table.shape[1]), value=math.nan)
        self._table = torch.cat([before, torch.tensor(rows, dtype=torch.float64)])
        self._rounds += [round_idx for round_idx, _ in self._new]
        self._new.clear()

    def drop(self, first_round: int) -> None:
        """Forget the rows of `first_round` and of all later rounds."""
        self._lay_out()
        self._rounds = [round_idx for round_idx in self._rounds if round_idx < first_round]
        self._table = self._table[: len(self._rounds)]

    def curve(self, name: str) -> dict[int, float]:
        """Look up a value by round, where it is known: of a private run, what stands there as unprotected, too."""
        if name not in self.names:
            name = f"{UNPROTECTED}{name}"
        if name not in self._names:
            return {}
        column = self.table[:, self._names[name]].tolist()
        return {r: value for r, value in zip(self.rounds, column, strict=True) if not math.isnan(value)}

    def columns(self, part: str) -> tuple[list[int], list[str], Tensor]:
        """Select the columns with `part` in their name, over the rounds that have one of them.

        Returns:
            The rounds, what follows `part` in each name, and the values (T', K').
        """
        chosen = [k for k, name in enumerate(self.names) if part in name]
        values = self.table[:, chosen]
        there = (~values.isnan()).any(1)
        rounds = [r for r, known in zip(self.rounds, there.tolist(), strict=True) if known]
        return rounds, [self.names[k].partition(part)[2] for k in chosen], values[there]
