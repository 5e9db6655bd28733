"""Table of values by round that a callback keeps, and the folder of the run."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor


class History:
    """A table that grows by one row a round.

    Attributes:
        names: of the columns.
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
        """(T, C) float64, a view."""
        return self._rows[: len(self.rounds)]

    def record(self, round_idx: int, row: Tensor, names: list[str]) -> None:
        """Add a row (C,); rows of the same and of later rounds are replaced by it."""
        self.drop(round_idx)
        if not self.rounds:
            self.names, self._rows = list(names), torch.empty(0, len(names), dtype=torch.float64)
        length = len(self.rounds)
        if length == len(self._rows):
            self._rows = torch.cat([self.table, self.table.new_empty(max(16, length), len(self.names))])
        self._rows[length] = row
        self.rounds.append(round_idx)

    def drop(self, first_round: int) -> None:
        """Forget the rows of `first_round` and of all later rounds."""
        while self.rounds and self.rounds[-1] >= first_round:
            self.rounds.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "rounds": list(self.rounds), "table": self.table.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names, self.rounds, self._rows = list(state["names"]), list(state["rounds"]), state["table"]


def run_folder(trainer: Trainer, dirpath: str | Path | None) -> Path | None:
    """Folder that a callback writes to: `dirpath`, else that of the Trainer's first logger; None: nowhere.

    To be called on all ranks.
    """
    if dirpath is not None:
        return Path(dirpath)
    folder = trainer.log_dir
    if not trainer.loggers or folder is None:
        return None
    logger = trainer.loggers[0]
    if getattr(logger, "log_dir", None) is not None:
        return Path(folder)
    # a logger without one shares its folder among its runs
    return Path(folder, *(str(part) for part in (logger.name, logger.version) if part is not None))
