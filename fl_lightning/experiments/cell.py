"""A cell of an experiment: one run, the settings that make it what it is, and the limits that end it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from fl_lightning.experiments.naming import limits_in, settings_of
from fl_lightning.experiments.overrides import SettingPairs
from fl_lightning.federation.values import Settings
from fl_lightning.metrics.keys import Direction, parse_directions
from fl_lightning.reports.saved import MAX_SECONDS

ROUND_LIMITS = ("max_epochs", "max_steps")
"""Limits that count rounds."""


@dataclass(frozen=True)
class Cell:
    """Holds one run of an experiment.

    Attributes:
        method: Name of its row.
        case: Name of its column.
        seed: Seed of the run.
        name: Name of its files. A run with the same identity has the same name.
        config: Whole configuration of the run.
        tuned: Settings that were chosen on the validation split.
        all_rounds: Number of rounds once the first rounds are continued, -1 without a limit.
        own_rounds: Number of rounds that the experiment's file asks for, -1 without a limit.
        core_hours: Hours of one core that `own_rounds` take, 0 if the file does not tell.
        start: Identity and limits of the cell whose last weights it begins with. Empty without one.
    """

    method: str
    case: str
    seed: int
    name: str
    config: Mapping[str, Any]
    tuned: SettingPairs = ()
    all_rounds: int = -1
    own_rounds: int = -1
    core_hours: float = 0.0
    start: str = ""

    @property
    def settings(self) -> Settings:
        """The settings in which another cell must be equal to be the same run."""
        return settings_of(self.config, self.start)

    @property
    def limits(self) -> dict[str, Any]:
        """The settings that end the run, by the names in `ALL_LIMITS`."""
        return limits_in(self.config)

    @property
    def directions(self) -> dict[str, Direction]:
        """The directions that the configuration gives to log keys: whether lower or higher values are better."""
        return parse_directions(self.config.get("direction") or [])

    @property
    def max_rounds(self) -> int:
        """The largest number of rounds of the run, -1 without a limit."""
        return most_rounds(self.limits)

    @property
    def max_seconds(self) -> float | None:
        """The limit of the run's simulated seconds, None without a limit."""
        return self.limits.get(MAX_SECONDS)

    @property
    def has_open_end(self) -> bool:
        """Whether the number of rounds is known only at the end of the run, as under a budget of seconds."""
        return self.max_rounds <= 0 or self.max_seconds is not None

    @property
    def length(self) -> tuple[float, float]:
        """The limits of rounds and simulated seconds, infinite without a limit. The longer of two runs is greater."""
        rounds = self.max_rounds if self.max_rounds >= 0 else inf
        seconds = inf if self.max_seconds is None else self.max_seconds
        return rounds, seconds


def most_rounds(limits: Mapping[str, Any]) -> int:
    """Return the largest number of rounds that limits allow, -1 if they do not limit the rounds.

    >>> most_rounds({"max_epochs": 9, "max_steps": 5}), most_rounds({"max_time": "00:00:10:00"})
    (5, -1)
    """
    return min((int(value) for name, value in limits.items() if name in ROUND_LIMITS), default=-1)
