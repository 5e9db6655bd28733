"""The number of rounds that a run is planned for, for everything that depends on it."""

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

    def begin_run(self, limit: int | None) -> None:
        """Take the number of rounds to which the Trainer limits the run.

        Args:
            limit: Number of rounds, from `round_limit`. None means no limit.
        """
        self.was_read = False
        self.planned = limit if self.given is None else self.given

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
        """Return what the Trainer of a module answers in place of its own limits, by the names of attributes."""
        if self.given is None:
            return {}
        return dict.fromkeys(LENGTHS, self.given)

    def state(self) -> int | None:
        """Return the planned rounds if something depends on them, else None."""
        return self.planned if self.was_read else None

    def changed(self, was: int | None) -> tuple[int, int | None] | None:
        """Compare the plan with that of a checkpoint, on which the run then depends.

        Args:
            was: The planned rounds of the checkpoint, from `state`.

        Returns:
            The two numbers of rounds. None if they are equal, or if nothing depends on them.
        """
        if was is None:
            return None
        self.was_read = True
        if was == self.planned:
            return None
        return was, self.planned
