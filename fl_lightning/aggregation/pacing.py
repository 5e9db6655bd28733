"""Pacing: when the server steps: after a cohort, at a deadline, or whenever some clients have come back.

Sources: FedBuff: Nguyen et al., AISTATS 2022, arXiv:2106.06639, Algorithm 1. FedAsync: Xie et al. 2019,
arXiv:1903.03934, Algorithm 1 and Section 5.2 (the forms of s). Deadlines and over-selection: Bonawitz et al., MLSys
2019, arXiv:1902.01046.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.aggregation.timeline import BufferedTimeline, SynchronousTimeline, Timeline
from fl_lightning.aggregation.transforms import UpdateTransform
from fl_lightning.data.clients import CohortBounds, Cohorts
from fl_lightning.data.devices import JobTimes
from fl_lightning.types import Broadcast, ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most, check_choice, check_count

Form = Literal["polynomial", "hinge", "constant"]
"""Forms of the weight of an update by its staleness."""

FORMS: tuple[Form, ...] = ("polynomial", "hinge", "constant")


def staleness_weight(staleness: int, *, form: Form, a: float, b: float) -> float:
    """Return s(τ), the weight of an update that τ server steps have passed by.

    Args:
        staleness: τ ≥ 0.
        form: `constant`: 1. `polynomial`: (1 + τ)^−a. `hinge`: 1 up to τ = b, then 1 / (a(τ − b) + 1).
        a: How fast the weight falls, ≥ 0.
        b: Largest τ of full weight under `hinge`, ≥ 0.

    Source:
        Xie et al. 2019, arXiv:1903.03934, Section 5.2.

    >>> [round(staleness_weight(tau, form="polynomial", a=0.5, b=4), 3) for tau in (0, 3)]
    [1.0, 0.5]
    >>> [round(staleness_weight(tau, form="hinge", a=10, b=4), 3) for tau in (4, 5)]
    [1.0, 0.091]
    """
    if form == "constant":
        return 1.0
    if form == "polynomial":
        return float((1 + staleness) ** -a)
    if staleness <= b:
        return 1.0
    return 1 / (a * (staleness - b) + 1)


class Pacing(ABC):
    """Says when the server steps. It is the base of all pacings.

    Attributes:
        is_asynchronous: Whether clients may come back in a later round than the one they started in.
        deadline: Seconds after which a round leaves out the clients that are not back. None means no deadline.
    """

    is_asynchronous: bool = False
    deadline: float | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the server takes less than the whole move of some update."""
        return False

    @property
    def loses_clients(self) -> bool:
        """Whether a client that was sent a model may come to nothing by these settings alone."""
        return False

    @abstractmethod
    def check_cohorts(self, cohorts: Cohorts, num_clients: int) -> None:
        """Refuse cohorts that the pacing cannot follow.

        Args:
            cohorts: The cohorts of the data.
            num_clients: The number N of clients that train.

        Raises:
            ValueError: The cohorts are drawn in another way, or are too small or too large.
        """

    @abstractmethod
    def bounds(self, bounds: CohortBounds) -> CohortBounds:
        """Return the least and the largest number of clients of a server step.

        Args:
            bounds: The least and the largest number of clients in a cohort of the data.
        """

    @abstractmethod
    def timeline(self, cohorts: Cohorts, times: JobTimes) -> Timeline:
        """Return the timeline of a run.

        Args:
            cohorts: The cohorts of the data.
            times: The times of jobs.
        """

    def stale(self) -> "Stale | None":
        """Return the transform of the updates of late clients, or None if no client is late."""
        return None


class Rounds(Pacing):
    """Waits for the clients of each round, up to a deadline, or for the first of some more clients.

    Args:
        deadline: Seconds after which a round ends, > 0. None means that the server waits for all that are not lost.
        late: What becomes of clients that would come after the deadline. `drop` leaves them out. `cut` lets them make
            as many batches as they have time for, and leaves out those that have time for none.
        over_selection: Share of further clients that are asked, ≥ 0. As many as without it count: the first.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range, or `late` is `cut` without a deadline.
    """

    def __init__(
        self, deadline: float | None = None, late: Literal["drop", "cut"] = "drop", over_selection: float = 0.0
    ) -> None:
        check_above(0, "in seconds", **{"model.pacing.deadline": deadline})
        check_choice(("drop", "cut"), **{"model.pacing.late": late})
        check_at_least(0, "0 asks no more than a cohort", **{"model.pacing.over_selection": over_selection})
        if late == "cut" and deadline is None:
            raise ValueError(
                "model.pacing.late=cut needs model.pacing.deadline, the seconds after which a round ends, got None; "
                "set it, such as to 10"
            )
        self.deadline = deadline
        self.late = late
        self.over_selection = over_selection

    @property
    def loses_clients(self) -> bool:
        return self.deadline is not None or self.over_selection > 0

    def check_cohorts(self, cohorts: Cohorts, num_clients: int) -> None:
        if self.over_selection:
            check_drawn(cohorts, "model.pacing.over_selection asks further clients of a cohort of one size")

    def bounds(self, bounds: CohortBounds) -> CohortBounds:
        if self.loses_clients:
            return CohortBounds(least=bounds.least if self.deadline is None else 0, most=bounds.most)
        return bounds

    def timeline(self, cohorts: Cohorts, times: JobTimes) -> SynchronousTimeline:
        def over_selected(round_idx: int) -> list[int]:
            return cohorts.asked(round_idx, self.over_selection)

        return SynchronousTimeline(
            times,
            asked=over_selected if self.over_selection else cohorts,
            wanted=cohorts.size if self.over_selection else None,
            deadline=self.deadline,
            late=self.late,
        )


class Buffered(Pacing):
    """Steps whenever some clients have come back, whatever versions of the model they started from.

    Args:
        buffer: The number K of clients of a server step, ≥ 1.
        form: Form of the weight s(τ) of an update that τ server steps have passed by.
        a: How fast the weight falls, ≥ 0.
        b: Largest τ of full weight under `hinge`, ≥ 0.
        timeout: Seconds after which the server takes a client for lost, > 0. None waits for all.
        max_staleness: Largest τ of an update that counts, ≥ 0. None takes all.
        alpha: Share of the way to the client's weights that the server takes, in (0, 1]. None takes the client's own
            move.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.
    """

    is_asynchronous = True

    def __init__(
        self,
        *,
        buffer: int,
        form: Form,
        a: float,
        b: float,
        timeout: float | None,
        max_staleness: int | None,
        alpha: float | None,
    ) -> None:
        check_count(1, "the clients of a server step", **{"model.pacing.buffer": buffer})
        check_choice(FORMS, **{"model.pacing.form": form})
        check_at_least(0, "0 weighs all updates alike", **{"model.pacing.a": a})
        check_at_least(0, "server steps", **{"model.pacing.b": b})
        check_above(0, "in seconds", **{"model.pacing.timeout": timeout})
        check_count(0, "server steps", **{"model.pacing.max_staleness": max_staleness})
        check_above(0, "a share of the way", **{"model.pacing.alpha": alpha})
        check_at_most(1, "a share of the way", **{"model.pacing.alpha": alpha})
        self.buffer = buffer
        self.form = form
        self.a = a
        self.b = b
        self.timeout = timeout
        self.max_staleness = max_staleness
        self.alpha = alpha

    @property
    def is_scaled(self) -> bool:
        return self.form != "constant" or self.alpha not in (None, 1)

    @property
    def loses_clients(self) -> bool:
        return True

    def check_cohorts(self, cohorts: Cohorts, num_clients: int) -> None:
        name = type(self).__name__
        check_drawn(cohorts, f"{name} keeps as many clients at work as a drawn cohort has")
        if self.buffer > num_clients:
            raise ValueError(
                f"model.pacing.buffer must be at most the number of clients that train, got {self.buffer} of "
                f"{num_clients} clients; set it to {num_clients} or less"
            )

    def bounds(self, bounds: CohortBounds) -> CohortBounds:
        return CohortBounds(least=self.buffer, most=self.buffer)

    def timeline(self, cohorts: Cohorts, times: JobTimes) -> BufferedTimeline:
        return BufferedTimeline(
            times,
            seed=cohorts.seed,
            clients=cohorts.clients,
            concurrency=cohorts.size,
            buffer=self.buffer,
            timeout=self.timeout,
            max_staleness=self.max_staleness,
        )

    def weight(self, staleness: int) -> float:
        """Return s(τ) of an update that τ server steps have passed by."""
        return staleness_weight(staleness, form=self.form, a=self.a, b=self.b)

    def stale(self) -> "Stale":
        return Stale(self)


class FedBuff(Buffered):
    """Steps by the clients' own moves: x ← x + mean of s(τ) · (y − the weights that the client started from).

    The clients at work are as many as a cohort of the data has (`data.participation`). The paper's mean is that of
    `Aggregator(weighting="uniform")`, and its server lr η_g that of the server optimizer.

    Args:
        buffer: The number K of clients of a server step, ≥ 1.
        form: Form of the weight s(τ) of an update that τ server steps have passed by: `polynomial` (1 + τ)^−a,
            `hinge` 1 up to τ = b and then 1 / (a(τ − b) + 1), or `constant` 1.
        a: How fast the weight falls, ≥ 0.
        b: Largest τ of full weight under `hinge`, ≥ 0.
        timeout: Seconds after which the server takes a client for lost, > 0. None waits for all.
        max_staleness: Largest τ of an update that counts, ≥ 0. None takes all.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.

    Source:
        Nguyen et al., AISTATS 2022, arXiv:2106.06639, Algorithm 1.
    """

    def __init__(
        self,
        buffer: int = 10,
        form: Form = "polynomial",
        *,
        a: float = 0.5,
        b: float = 4,
        timeout: float | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            buffer=buffer,
            form=form,
            a=a,
            b=b,
            timeout=timeout,
            max_staleness=max_staleness,
            alpha=None,
        )


class FedAsync(Buffered):
    """Steps towards the clients' weights: x ← x + mean of alpha · s(τ) · (y − x).

    The clients at work are as many as a cohort of the data has (`data.participation`).

    Args:
        alpha: Share of the way to a client's weights that the server takes, in (0, 1].
        buffer: The number of clients of a server step, ≥ 1.
        form: Form of the weight s(τ) of an update that τ server steps have passed by: `polynomial` (1 + τ)^−a,
            `hinge` 1 up to τ = b and then 1 / (a(τ − b) + 1), or `constant` 1.
        a: How fast the weight falls, ≥ 0.
        b: Largest τ of full weight under `hinge`, ≥ 0.
        timeout: Seconds after which the server takes a client for lost, > 0. None waits for all.
        max_staleness: Largest τ of an update that counts, ≥ 0. None takes all.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.

    Source:
        Xie et al. 2019, arXiv:1903.03934, Algorithm 1. Its 1/(a(τ − b) + 1) is taken, which is continuous at b.
    """

    def __init__(
        self,
        alpha: float = 0.6,
        buffer: int = 1,
        form: Form = "polynomial",
        *,
        a: float = 0.5,
        b: float = 4,
        timeout: float | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            buffer=buffer,
            form=form,
            a=a,
            b=b,
            timeout=timeout,
            max_staleness=max_staleness,
            alpha=alpha,
        )


class Stale(UpdateTransform):
    """Moves the update of a client from the weights that it started from to those of the server step.

    Trained entries become x_t + s(τ)(y − x_{t−τ}), or x_t + alpha · s(τ)(y − x_t) if the pacing has an alpha. Other
    entries of floating point become x_t + alpha · s(τ)(y − x_t), with alpha 1 if there is none, so that a variance
    stays at least 0. Whole numbers are rounded, and flags stay as they come.

    Args:
        pacing: The pacing.
    """

    def __init__(self, pacing: Buffered) -> None:
        super().__init__()
        self.pacing = pacing

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        if update.weights is None:
            return update
        staleness = self.server.round_idx - broadcast.round_idx
        alpha = self.pacing.alpha
        scale = self.pacing.weight(staleness) * (1.0 if alpha is None else alpha)
        if scale == 1 and staleness == 0:
            # What the client sends is the result, to the last bit.
            return update
        present = self.server.weights
        start: State = {**present, **(broadcast.weights or {})}
        own_moves = set(self.server.trainable) if alpha is None else set[str]()
        moved: State = {}
        for name, value in update.weights.items():
            origin = start[name] if name in own_moves else present[name]
            moved[name] = moved_entry(present[name], value=value, origin=origin, scale=scale)
        return replace(update, weights=moved)


def moved_entry(present: Tensor, *, value: Tensor, origin: Tensor, scale: float) -> Tensor:
    """Return present + scale · (value − origin) in the type of the entry.

    Args:
        present: The entry of the server.
        value: The entry of the client.
        origin: The entry from which the move of the client is measured.
        scale: Share of the move that is taken.
    """
    if value.dtype == torch.bool:
        return value
    moved = present.double() + scale * (value.double() - origin.double())
    if value.is_floating_point():
        # An entry of −∞ (a mask) stays where it is.
        moved = torch.where(origin.isfinite(), moved, value.double())
    else:
        moved = moved.round()
    return moved.to(value.dtype)


def check_drawn(cohorts: Cohorts, rule: str) -> None:
    """Refuse cohorts that are not drawn with one size.

    Args:
        cohorts: The cohorts of the data.
        rule: What the setting does, as the beginning of a sentence.

    Raises:
        ValueError: The cohorts are drawn in another way.
    """
    setting = cohorts.not_of_one_size
    if setting:
        raise ValueError(f"{rule}, got {setting}; leave {setting} out, or model.pacing")
