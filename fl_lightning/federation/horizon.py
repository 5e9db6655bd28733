"""The number of rounds that a run is planned for, for everything that depends on it."""

from collections.abc import Callable, Mapping

from fl_lightning.utils.settings import check_count

PLANNED = "planned_rounds"
"""Name of the planned rounds among the settings of a run, if something depends on them."""

LENGTHS = ("max_epochs", "max_steps", "estimated_stepping_batches")
"""Attributes of a Trainer that tell how many rounds a run has."""


def round_limit(*limits: object) -> int | None:
    """Return the smallest limit of rounds, or None without one.

    Args:
        limits: `max_epochs` and `max_steps` of a Trainer. None and -1 mean no limit.

    >>> round_limit(30, -1), round_limit(30, 8), round_limit(None, -1)
    (30, 8, None)
    """
    known = [limit for limit in limits if isinstance(limit, int) and limit >= 0]
    return min(known, default=None)


class Horizon:
    """Answers how many rounds a run is planned for, and remembers whether anything has asked.

    A run on which something depends that has asked can only be continued with the same plan: the cosine of a learning
    rate, or the noise of a privacy budget.

    Args:
        given: Number of rounds that the user plans, ≥ 1. None means the limits of the Trainer.

    Attributes:
        planned: Number of rounds that are planned. None means that there is no limit.
        was_read: Whether something of the run depends on the planned rounds.

    Raises:
        TypeError: `given` is no whole number.
        ValueError: `given` is below 1.
    """

    def __init__(self, given: int | None = None) -> None:
        check_count(1, planned_rounds=given)
        self.given = given
        self.was_read = False
        self.planned = given
        self._limits: dict[str, int | None] = {}
        """What the Trainer answers to modules and data, by the names of attributes."""
        self._asked: set[str] = set()
        """Names of the attributes that modules and data have asked for."""

    def begin_run(self, max_epochs: int | None, max_steps: int | None = None) -> None:
        """Take the limits of a Trainer.

        Args:
            max_epochs: Number of rounds. None and -1 mean no limit.
            max_steps: Number of steps, one for each round. None and -1 mean no limit.
        """
        self.planned = round_limit(max_epochs, max_steps) if self.given is None else self.given
        self._limits = {"max_epochs": max_epochs, "max_steps": max_steps, **self.answers()}

    def forget(self) -> None:
        """Forget what was asked in an earlier run."""
        self.was_read = False
        self._asked = set()

    def check(self, limit: int | None) -> None:
        """Refuse a fit of more rounds than the user plans.

        Raises:
            ValueError: The Trainer allows more rounds than are planned.
        """
        if self.given is not None and limit is not None and limit > self.given:
            raise ValueError(
                f"model.planned_rounds must be at least the rounds of the Trainer ({limit}), got {self.given}; set it "
                f"to {limit} or more, or leave it unset"
            )

    def rounds(self) -> int | None:
        """Return the planned rounds, on which the run depends from now on. None means that there is no limit."""
        self.was_read = True
        return self.planned

    def answers(self) -> dict[str, int]:
        """Return what the Trainer of a module or of data answers in place of its own limits, by attribute."""
        if self.given is None:
            return {}
        return dict.fromkeys(LENGTHS, self.given)

    def readers(self) -> dict[str, Callable[[str], None]]:
        """Return the functions that are told when a module or data read one of `LENGTHS`, by its name."""
        return dict.fromkeys(LENGTHS, self.asked)

    def asked(self, name: str) -> None:
        """Remember that a module or data have asked their Trainer for one of `LENGTHS`."""
        if name in ("max_epochs", "max_steps"):
            self._asked.add(name)
        else:
            self.was_read = True

    def state(self) -> dict[str, int | None]:
        """Return the numbers on which something depends, by the names of settings."""
        numbers = {f"trainer.{name}": self._limits[name] for name in sorted(self._asked)}
        if self.was_read:
            numbers[PLANNED] = self.planned
        return numbers

    def changed(self, was: Mapping[str, int | None]) -> dict[str, tuple[int | None, int | None]]:
        """Compare the numbers with those of a checkpoint, on which the run then depends.

        Args:
            was: The numbers of the checkpoint, from `state`.

        Returns:
            The number before and the number now, by the names of the settings that differ.
        """
        found: dict[str, tuple[int | None, int | None]] = {}
        for name, number in was.items():
            attribute = name.removeprefix("trainer.")
            if attribute in self._limits:
                self._asked.add(attribute)
                now = self._limits[attribute]
            else:
                self.was_read = True
                now = self.planned
            if number != now:
                found[name] = (number, now)
        return found
