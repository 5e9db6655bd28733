"""History of a run: the values of all its rounds."""

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

Value = TypeVar("Value")

BY_CLASS = "/acc_class/"
"""Part of the log key of one class's accuracy; the class's name follows it."""

BY_TASK = "/acc_task/"
"""Part of the log key of the accuracy on one task of a scenario. The name of the task follows it."""

BY_TASK_VALUE = "/value_task/"
"""Likewise, of another value of a module on one task."""

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


def plain_key(key: str) -> str:
    """Return a log key without the mark of values that no guarantee covers.

    >>> plain_key("unprotected/local/alma"), plain_key("local/alma")
    ('local/alma', 'local/alma')
    """
    return key.removeprefix(UNPROTECTED)


def by_all_names(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return values by the keys under which they are logged, and unprotected ones without the mark too.

    Who watches a value, such as EarlyStopping, names it as in a run without a guarantee.

    >>> by_all_names({"unprotected/local/alma": 0.5, "global/acc": 0.25})
    {'local/alma': 0.5, 'global/acc': 0.25, 'unprotected/local/alma': 0.5}
    """
    plain = {plain_key(key): value for key, value in values.items()}
    return {**plain, **values}


ROWS_AT_ONCE = 256
"""Largest number of rows that wait to be laid out."""


class History:
    """A table that grows by one row a round and by a column with every new key.

    A value that is not finite is a value: NaN in a row differs from a row without the key.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._rounds: list[int] = []
        self._table = torch.empty(0, 0, dtype=torch.float64)
        self._known = torch.empty(0, 0, dtype=torch.bool)
        """Whether a round has a value of a key, (T, K)."""
        self._new: list[tuple[int, Mapping[str, float]]] = []

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def names(self) -> list[str]:
        """Keys of the columns, as they were logged."""
        self._lay_out()
        return list(self._names)

    @property
    def keys(self) -> list[str]:
        """Keys of the columns without the mark of unprotected values, each once. `curve` takes them."""
        return list(dict.fromkeys(plain_key(name) for name in self.names))

    @property
    def rounds(self) -> list[int]:
        """The 0-based round of each row, ascending."""
        self._lay_out()
        return self._rounds

    @property
    def table(self) -> Tensor:
        """Table (T, K) float64, not to be edited. NaN stands where a round has no such value, too."""
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
        known = [[name in row for name in self._names] for _, row in self._new]
        added = len(self._names) - self._table.shape[1]
        before = pad(self._table, (0, added), value=math.nan)
        known_before = pad(self._known, (0, added), value=False)
        self._table = torch.cat([before, torch.tensor(rows, dtype=torch.float64)])
        self._known = torch.cat([known_before, torch.tensor(known, dtype=torch.bool)])
        self._rounds += [round_idx for round_idx, _ in self._new]
        self._new.clear()

    def drop(self, first_round: int) -> None:
        """Forget the rows of `first_round` and of all later rounds."""
        self._lay_out()
        self._rounds = [round_idx for round_idx in self._rounds if round_idx < first_round]
        self._table = self._table[: len(self._rounds)]
        self._known = self._known[: len(self._rounds)]

    def name_of(self, key: str) -> str | None:
        """Return the name of a key's column, or None without one.

        The column of a private run has the mark of unprotected values, which readers leave out.
        """
        self._lay_out()
        for name in (key, f"{UNPROTECTED}{plain_key(key)}"):
            if name in self._names:
                return name
        return None

    def curve(self, key: str) -> dict[int, float]:
        """Return the values of a key by round, NaN and infinite ones too, without the rounds that have no value.

        Args:
            key: The log key, with or without the mark of unprotected values.
        """
        name = self.name_of(key)
        if name is None:
            return {}
        column = self._names[name]
        values = self._table[:, column].tolist()
        known = self._known[:, column].tolist()
        curve = {}
        for round_idx, value, is_known in zip(self._rounds, values, known, strict=True):
            if is_known:
                curve[round_idx] = value
        return curve

    def columns(self, part: str) -> tuple[list[int], list[str], Tensor]:
        """Select the columns with `part` in their name, over the rounds that have one of them.

        Returns:
            The rounds, what follows `part` in each name, and the values (T', K').
        """
        chosen = [k for k, name in enumerate(self.names) if part in name]
        there = self._known[:, chosen].any(1)
        rounds = [r for r, known in zip(self._rounds, there.tolist(), strict=True) if known]
        return rounds, [list(self._names)[k].partition(part)[2] for k in chosen], self._table[:, chosen][there]
