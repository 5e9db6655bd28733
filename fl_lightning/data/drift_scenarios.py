"""Scenarios of data that change by and by: classes that drift, samples that arrive, leave or are taken away."""

import math
from bisect import bisect_left, bisect_right
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fl_lightning.data.partitioning import counts_for_shares
from fl_lightning.data.reduction import kept_of_classes
from fl_lightning.data.scenario import Scenario, ScenarioInput
from fl_lightning.data.spans import read_spans
from fl_lightning.data.splits import Array
from fl_lightning.utils.files import content_digest
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import (
    check_above,
    check_at_least,
    check_at_most,
    check_below,
    check_count,
    check_not_none,
)
from fl_lightning.utils.signatures import checks_arguments

MOST_STEPS = 10**9
"""A number of steps that no run makes."""


class DriftDraws(NamedTuple):
    """Holds what is drawn for a client whose classes drift.

    Args:
        first: Shares of the classes at the beginning, (C,).
        last: Shares of the classes at the end, (C,).
        labels: Class of each sample, (n,) int64.
        ranks: Place of each sample in the order of its class, (n,) int64.
    """

    first: Array
    last: Array
    labels: Array
    ranks: Array


class LabelDrift(Scenario):
    """Lets the shares of the classes at each client drift from one draw to another.

    Client shares p_0 and p_1 are drawn from Dir(alpha). At step k of `steps` a client has the shares
    p_0 + (p_1 − p_0) · k / steps, as far as it has samples. A class that gains keeps the samples that it has.

    Args:
        alpha: Concentration of the draws, > 0 and finite. Small: few classes at a time.
        rounds: Number of rounds of the drift, ≥ 1. The data then stay.
        samples: Share of its samples that a client has at a time, in (0, 1].
        steps: Number of steps of the drift, ≥ 1. 1: one change after `rounds`. None: a step in every round.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.
    """

    @checks_arguments
    def __init__(self, alpha: float, rounds: int, samples: float = 0.5, *, steps: int | None = None) -> None:
        numbers = {"data.scenario.alpha": alpha, "data.scenario.rounds": rounds, "data.scenario.samples": samples}
        check_not_none(**numbers)
        check_above(0, "small: few classes at a time", **{"data.scenario.alpha": alpha})
        check_below(math.inf, "1000 gives nearly equal shares", **{"data.scenario.alpha": alpha})
        check_count(1, "the rounds of the drift", **{"data.scenario.rounds": rounds})
        check_above(0, "a share of a client's samples", **{"data.scenario.samples": samples})
        check_at_most(1, "a share of a client's samples", **{"data.scenario.samples": samples})
        check_count(1, "1 is one change", **{"data.scenario.steps": steps})
        self.alpha = alpha
        self.rounds = rounds
        self.samples = samples
        self.steps = steps
        self._data: ScenarioInput | None = None
        self._draws: dict[int, DriftDraws] = {}
        """The draws of the clients that were asked for, which are the same in all stages."""

    @property
    def num_steps(self) -> int:
        """The number of steps of the drift."""
        return self.rounds if self.steps is None else self.steps

    def begin(self, data: ScenarioInput) -> None:
        if data.num_clients:
            data.classes_of(0, "data.scenario LabelDrift")
        self._data = data
        self._draws = {}

    def stage(self, client_id: int, round_idx: int) -> int:
        return min(round_idx * self.num_steps // self.rounds, self.num_steps)

    def keeps(self, client_id: int, stage: int) -> Array:
        if client_id not in self._draws:
            self._draws[client_id] = self._drawn(client_id)
        draws = self._draws[client_id]
        shares = draws.first + (draws.last - draws.first) * stage / self.num_steps
        available = np.bincount(draws.labels, minlength=len(shares))
        num_samples = rounded_up(self.samples * len(draws.labels))
        wanted = counts_for_shares(shares, size=num_samples, available=available)
        mask: Array = draws.ranks < wanted[draws.labels]
        return mask

    def _drawn(self, client_id: int) -> DriftDraws:
        """Draw the shares of the classes at a client, and the order in which it gets the samples of each class."""
        data = begun(self._data)
        labels = data.classes_of(client_id)
        num_classes = data.num_classes or 0
        shares = keyed_numpy(data.seed, "scenario/label_drift", client_id=client_id)
        first, last = shares.dirichlet(np.full(num_classes, self.alpha), size=2)
        ranks = np.zeros(len(labels), dtype=np.int64)
        for class_idx in range(num_classes):
            places = np.flatnonzero(labels == class_idx)
            generator = keyed_numpy(data.seed, f"scenario/class/{class_idx}", client_id=client_id)
            order = generator.permutation(len(places))
            ranks[places[order]] = np.arange(len(places))
        return DriftDraws(first=first, last=last, labels=labels, ranks=ranks)


class Window(Scenario):
    """Lets samples arrive in every round, and leave after some rounds.

    Args:
        per_round: Share of a client's samples that arrive in a round, in (0, 1].
        keep: Number of rounds for which a sample stays, ≥ 1. None: to the end.
        first: Share of the samples that are there in round 0 besides, in [0, 1].
        by: Column of the samples in whose order they arrive. None: an order is drawn.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.
    """

    @checks_arguments
    def __init__(self, per_round: float, keep: int | None = None, first: float = 0.0, by: str | None = None) -> None:
        check_not_none(**{"data.scenario.per_round": per_round, "data.scenario.first": first})
        check_above(0, "a share of a client's samples", **{"data.scenario.per_round": per_round})
        check_at_most(1, "a share of a client's samples", **{"data.scenario.per_round": per_round})
        check_count(1, "rounds for which a sample stays", **{"data.scenario.keep": keep})
        check_at_least(0, "0 begins with those of one round", **{"data.scenario.first": first})
        check_at_most(1, "a share of a client's samples", **{"data.scenario.first": first})
        self.per_round = per_round
        self.keep = keep
        self.first = first
        self.by = by
        self._orders: list[Array] = []
        """The order in which each client's samples arrive, (n,) int64 positions."""

    def begin(self, data: ScenarioInput) -> None:
        column = None if self.by is None else data.column(self.by)
        self._orders = []
        for client_id, part in enumerate(data.parts):
            if column is None:
                order = keyed_numpy(data.seed, "scenario/arrival", client_id=client_id).permutation(len(part))
            else:
                order = np.argsort(column[part.numpy()], kind="stable")
            self._orders.append(order)

    def stage(self, client_id: int, round_idx: int) -> int:
        last = rounded_up((1 - self.first) / self.per_round) - 1
        return min(round_idx, max(0, last) + (self.keep or 0))

    def keeps(self, client_id: int, stage: int) -> Array:
        order = self._orders[client_id]
        end = self._arrived(len(order), stage)
        begin = 0
        if self.keep is not None:
            begin = self._arrived(len(order), stage - self.keep)
        mask = np.zeros(len(order), dtype=bool)
        mask[order[begin:end]] = True
        return mask

    def _arrived(self, num_samples: int, round_idx: int) -> int:
        """Return how many of a client's samples have arrived up to a round. Before round 0 there are none."""
        if round_idx < 0:
            return 0
        share = self.first + (round_idx + 1) * self.per_round
        return min(num_samples, rounded_up(num_samples * share))


class ListedSamples(Scenario):
    """Takes the rounds in which each sample is there from a csv file with the columns `sample`, `first` and `last`.

    `sample` is the index of a training sample as its source gives them, from 0. The sample is there from round `first`
    to round `last`, both included. An empty `last` means to the end. A sample in no line is never there, and a sample
    in several lines is there in all of their rounds.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is wrong.
    """

    stores_positions = True

    @checks_arguments
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines = read_spans(self.path, setting="data.scenario.path", column="sample")
        self._digest = content_digest(self.path) or ""
        begins = {0}
        for line in self._lines:
            begins.add(line.first)
            if line.last is not None:
                begins.add(line.last + 1)
        self._begins = sorted(begins)
        """The rounds in which stages begin, ascending."""
        self._samples = np.array([bounded(line.number) for line in self._lines], dtype=np.int64)
        self._firsts = np.array([bounded(line.first) for line in self._lines], dtype=np.int64)
        self._lasts = np.array([bounded(line.last) for line in self._lines], dtype=np.int64)
        """The sample, the first and the last round of each line, (L,)."""
        self._data: ScenarioInput | None = None

    def begin(self, data: ScenarioInput) -> None:
        outside = [line.number for line in self._lines if line.number >= data.num_samples]
        if outside:
            raise ValueError(
                f"{self.path} must name samples in [0, {data.num_samples}), the training samples, got {outside[0]}; "
                f"leave its line out"
            )
        self._data = data

    def stage(self, client_id: int, round_idx: int) -> int:
        return bisect_right(self._begins, round_idx) - 1

    def keeps(self, client_id: int, stage: int) -> Array:
        data = begun(self._data)
        round_idx = self._begins[stage]
        holds = (self._firsts <= round_idx) & (round_idx <= self._lasts)
        there = np.zeros(data.num_samples, dtype=bool)
        there[self._samples[holds]] = True
        mask: Array = there[data.parts[client_id].numpy()]
        return mask

    def content(self) -> str:
        return self._digest


class RemoveSamples(Scenario):
    """Takes samples of one class from one client, from a round on, step by step.

    Source: FedKA, Fig. 3. A dominant class loses 1 % of the client's samples every 10 rounds, until its share is about
    1 %. A non-dominant class is cut to 10, 5 and 0 samples (`counts`).

    Args:
        class_idx: Index of the class, from 0.
        client: Id of the client, from 0.
        start: Round, from 0, in which the first samples are gone.
        every: Number of rounds between two steps, ≥ 1.
        step: Number of samples that a step takes, as a share in (0, 1] of all samples that the client was dealt.
        until: Least number of samples of the class that stay, as a share in [0, 1] of all samples that the client was
            dealt.
        counts: Number of samples of the class that stay after each step, in place of `step` and `until`.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.
    """

    @checks_arguments
    def __init__(
        self,
        class_idx: int,
        client: int = 0,
        start: int = 50,
        *,
        every: int = 10,
        step: float = 0.01,
        until: float = 0.01,
        counts: list[int] | None = None,
    ) -> None:
        numbers = {"class_idx": class_idx, "client": client, "start": start, "every": every, "step": step}
        for name, number in (numbers | {"until": until}).items():
            check_not_none(**{f"data.scenario.{name}": number})
        check_count(0, "the class that loses samples", **{"data.scenario.class_idx": class_idx})
        check_count(0, "the client that loses samples", **{"data.scenario.client": client})
        check_count(0, "a round", **{"data.scenario.start": start})
        check_count(1, "rounds between two steps", **{"data.scenario.every": every})
        check_above(0, "a share of the client's samples", **{"data.scenario.step": step})
        check_at_most(1, "a share of the client's samples", **{"data.scenario.step": step})
        check_at_least(0, "a share of the client's samples", **{"data.scenario.until": until})
        check_at_most(1, "a share of the client's samples", **{"data.scenario.until": until})
        for count in counts or ():
            check_not_none(**{"data.scenario.counts": count})
            check_count(0, "samples that stay", **{"data.scenario.counts": count})
        self.class_idx = class_idx
        self.client = client
        self.start = start
        self.every = every
        self.step = step
        self.until = until
        self.counts = counts
        self._data: ScenarioInput | None = None
        self._num_steps = 0

    def begin(self, data: ScenarioInput) -> None:
        if self.client >= data.num_clients:
            raise ValueError(f"data.scenario.client must lie in [0, {data.num_clients}), got {self.client}; choose one")
        labels = data.classes_of(self.client, "data.scenario RemoveSamples")
        if self.class_idx >= (data.num_classes or 0):
            raise ValueError(
                f"data.scenario.class_idx must lie in [0, {data.num_classes}), got {self.class_idx}; choose one"
            )
        self._data = data
        if self.counts is not None:
            self._num_steps = len(self.counts)
            return
        of_class = int((labels == self.class_idx).sum())
        count_after = partial(self.count_after, dealt=len(labels), of_class=of_class)
        least = count_after(MOST_STEPS)
        self._num_steps = bisect_left(range(MOST_STEPS), -least, key=lambda num_steps: -count_after(num_steps))

    def count_after(self, num_steps: int, *, dealt: int, of_class: int) -> int:
        """Return the number of samples of the class that the client has after some steps.

        Args:
            num_steps: Number of steps.
            dealt: Number of samples that the client was dealt.
            of_class: Number of samples of the class among them.

        >>> study = RemoveSamples(class_idx=3)
        >>> [study.count_after(steps, dealt=5000, of_class=1000) for steps in (0, 1, 2, 19, 46)]
        [1000, 950, 900, 50, 50]
        """
        if self.counts is None:
            remaining = of_class - round(num_steps * self.step * dealt)
            return min(of_class, max(remaining, round(self.until * dealt)))
        if num_steps == 0 or not self.counts:
            return of_class
        steps_done = min(num_steps, len(self.counts))
        return min(of_class, self.counts[steps_done - 1])

    def stage(self, client_id: int, round_idx: int) -> int:
        if client_id != self.client:
            return 0
        return min(max(0, (round_idx - self.start) // self.every + 1), self._num_steps)

    def keeps(self, client_id: int, stage: int) -> Array | None:
        if client_id != self.client or stage == 0:
            return None
        data = begun(self._data)
        labels = data.classes_of(client_id)
        count = self.count_after(stage, dealt=len(labels), of_class=int((labels == self.class_idx).sum()))
        counts = {self.class_idx: count}
        kept = kept_of_classes(torch.from_numpy(labels), counts=counts, seed=data.seed, client_id=client_id)
        return np.asarray(kept)


def begun(data: ScenarioInput | None) -> ScenarioInput:
    """Return the samples of a scenario that has begun.

    Raises:
        RuntimeError: The scenario has not begun.
    """
    if data is None:
        raise RuntimeError("a scenario must be given the samples first; call begin(data)")
    return data


def rounded_up(value: float) -> int:
    """Round a number up, as if it were smaller by 1e-9, so that 0.1 · 30 is 3.

    >>> rounded_up(0.1 * 3 * 10), rounded_up(3.01)
    (3, 4)
    """
    return math.ceil(value - 1e-9)


def bounded(value: int | None) -> int:
    """Return a number that int64 can hold: its largest one for larger ones, and for None, which has no end."""
    largest = int(np.iinfo(np.int64).max)
    return largest if value is None else min(value, largest)
