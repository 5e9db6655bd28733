"""History of a run: the values of all its rounds."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class History:
    """A table that grows by one row a round and by a column with every new key.

    Attributes:
        names: keys of the columns.
        rounds: the 0-based round of each row, ascending.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rounds: list[int] = []
        self._rows = torch.empty(0, 0, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def table(self) -> Tensor:
        """(T, K) float64, a view; NaN where a round has no such value."""
        return self._rows[: len(self.rounds), : len(self.names)]

    def record(self, round_idx: int, row: Mapping[str, float]) -> None:
        """Add a row; rows of the same and of later rounds are replaced by it."""
        self.drop(round_idx)
        known = set(self.names)
        self.names += [name for name in row if name not in known]
        length, width = len(self.rounds), len(self.names)
        if length == len(self._rows) or width > self._rows.shape[1]:
            grown = torch.full((2 * length + 16, width + 16), math.nan, dtype=torch.float64)
            grown[:length, : self._rows.shape[1]] = self._rows[:length]
            self._rows = grown
        self._rows[length, :width] = torch.tensor([row.get(n, math.nan) for n in self.names], dtype=torch.float64)
        self.rounds.append(round_idx)

    def drop(self, first_round: int) -> None:
        """Forget the rows of `first_round` and of all later rounds."""
        while self.rounds and self.rounds[-1] >= first_round:
            self._rows[len(self.rounds) - 1] = math.nan
            self.rounds.pop()

    def curve(self, name: str) -> dict[int, float]:
        """Look up a value by round, where it is known."""
        if name not in self.names:
            return {}
        column = self.table[:, self.names.index(name)].tolist()
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

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "rounds": list(self.rounds), "table": self.table.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.names, self.rounds, self._rows = list(state["names"]), list(state["rounds"]), state["table"].clone()
