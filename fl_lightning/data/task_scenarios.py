"""Scenarios of tasks that come one after another: by classes, and by domains.

Every client goes through the tasks by itself. A client begins late by its own delay, and may have an order of its own.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np

from fl_lightning.data.domains import Drawn, Noise, Permutation, Rotation
from fl_lightning.data.scenario import Scenario, ScenarioInput, Task
from fl_lightning.data.splits import Array, Transform
from fl_lightning.functional.classes import clean_name, unique_names
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import (
    check_at_least,
    check_at_most,
    check_choice,
    check_count,
    check_not_none,
    check_numbers,
)
from fl_lightning.utils.signatures import checks_arguments

Order = Literal["same", "shuffled"]
"""Orders of the tasks: one for all clients, or one of its own for each."""

EMPTY = "(empty)"
"""Name of the domain whose samples have an empty text in a column."""


class TaskSequence(Scenario):
    """Gives every client one task after another. It is the base of scenarios by classes and by domains.

    A client is at place min(max(0, t − d) // rounds_per_task, K − 1) of its order in round t, where d is its delay.

    Args:
        rounds_per_task: Number of rounds of each task, ≥ 1. The last task lasts to the end.
        order: `same`: all clients meet the tasks in their order. `shuffled`: each client has an order of its own.
        delay: Most rounds by which a client begins late, ≥ 0. Each client has its own delay, uniform in 0 … `delay`.
        cumulative: Whether the samples of earlier tasks stay.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range.
    """

    def __init__(
        self, rounds_per_task: int, order: Order = "same", delay: int = 0, *, cumulative: bool = False
    ) -> None:
        check_not_none(**{"data.scenario.rounds_per_task": rounds_per_task, "data.scenario.delay": delay})
        check_count(1, "the rounds of each task", **{"data.scenario.rounds_per_task": rounds_per_task})
        check_choice(("same", "shuffled"), **{"data.scenario.order": order})
        check_count(0, "0 lets all clients begin together", **{"data.scenario.delay": delay})
        self.rounds_per_task = rounds_per_task
        self.order = order
        self.delay = delay
        self.cumulative = cumulative
        self._delays: list[int] = []
        self._orders: list[list[int]] = []

    def begin(self, data: ScenarioInput) -> None:
        num_tasks = self._num_tasks()
        self._delays = []
        self._orders = []
        for client_id in range(data.num_clients):
            delay = keyed_numpy(data.seed, "scenario/delay", client_id=client_id).integers(self.delay + 1)
            order = list(range(num_tasks))
            if self.order == "shuffled":
                drawn = keyed_numpy(data.seed, "scenario/order", client_id=client_id).permutation(num_tasks)
                order = [int(task) for task in drawn]
            self._delays.append(int(delay))
            self._orders.append(order)

    @abstractmethod
    def _num_tasks(self) -> int:
        """Return the number K of tasks."""

    def stage(self, client_id: int, round_idx: int) -> int:
        since = max(0, round_idx - self._delays[client_id])
        return min(since // self.rounds_per_task, self._num_tasks() - 1)

    def task(self, client_id: int, stage: int) -> int:
        return self._orders[client_id][stage]

    def _present(self, client_id: int, stage: int) -> list[int]:
        """Return the numbers of the tasks whose samples a client has: that of the stage, or all tasks so far."""
        order = self._orders[client_id]
        return order[: stage + 1] if self.cumulative else order[stage : stage + 1]


class ClassIncremental(TaskSequence):
    """Gives every client the samples of some classes after those of others.

    Samples of classes of no task are never there.

    Args:
        tasks: The classes of each task, such as [[0, 1], [2, 3]]. No class is in two tasks.
        rounds_per_task: Number of rounds of each task, ≥ 1. The last task lasts to the end.
        order: `same`: all clients meet the tasks in their order. `shuffled`: each client has an order of its own.
        delay: Most rounds by which a client begins late, ≥ 0. Each client has its own delay, uniform in 0 … `delay`.
        blur: Share of a client's samples that come in another task than their own, drawn among the others, in [0, 1].
        cumulative: Whether the samples of earlier tasks stay.
        knows_task: Whether the task is known in a test. The answer is then the best of the classes of the task
            (task-incremental learning).

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range, a class is in two tasks, or outside [0, C).
    """

    @checks_arguments
    def __init__(
        self,
        tasks: list[list[int]],
        rounds_per_task: int,
        order: Order = "same",
        delay: int = 0,
        *,
        blur: float = 0.0,
        cumulative: bool = False,
        knows_task: bool = False,
    ) -> None:
        super().__init__(rounds_per_task, order, delay, cumulative=cumulative)
        check_at_least(0, "0 lets each sample come in its own task", **{"data.scenario.blur": blur})
        check_at_most(1, "it is a share of the samples", **{"data.scenario.blur": blur})
        check_tasks(tasks)
        self.blur = blur
        self.knows_task = knows_task
        self.tasks = [Task(name=task_name(classes), classes=tuple(classes)) for classes in tasks]
        self._places: list[Array] = []
        """The task of each client's samples, (n,) int64, −1 for a sample of no task."""

    def _num_tasks(self) -> int:
        return len(self.tasks)

    def begin(self, data: ScenarioInput) -> None:
        super().begin(data)
        task_of_class: dict[int, int] = {}
        for index, task in enumerate(self.tasks):
            for class_idx in task.classes or ():
                task_of_class[class_idx] = index
        self._places = []
        for client_id in range(data.num_clients):
            labels = data.classes_of(client_id, "data.scenario ClassIncremental")
            own = np.array([task_of_class.get(int(label), -1) for label in labels], dtype=np.int64)
            self._places.append(self._blurred(own, seed=data.seed, client_id=client_id))

    def _blurred(self, own: Array, seed: int, client_id: int) -> Array:
        """Let some samples come in another task than their own.

        Args:
            own: The task of each sample, (n,) int64.
            seed: Seed of the draw.
            client_id: Id of the client.
        """
        num_tasks = len(self.tasks)
        if not self.blur or num_tasks == 1:
            return own
        draws = keyed_numpy(seed, "scenario/blur", client_id=client_id)
        chances = draws.random(len(own))
        steps = draws.integers(1, num_tasks, len(own))
        moved = np.where(chances < self.blur, (own + steps) % num_tasks, own)
        return np.where(own < 0, own, moved)

    def keeps(self, client_id: int, stage: int) -> Array:
        return np.isin(self._places[client_id], self._present(client_id, stage))


class DomainIncremental(TaskSequence):
    """Gives every client all classes, seen in one way after another, or from one domain after another.

    One of `rotations`, `noises`, `permutations` and `column` says what the domains are.

    Args:
        rounds_per_task: Number of rounds of each domain, ≥ 1. The last one lasts to the end.
        rotations: Angle of each domain in degrees, counterclockwise. Samples are images.
        noises: Standard deviation σ of the Gaussian noise of each domain, ≥ 0.
        permutations: Number of domains, ≥ 1. Each has an order of the pixels of its own, and the first keeps theirs.
        column: Column of the samples that names their domain.
        values: Values of the column in the order of the domains. None: all that there are, sorted.
        order: `same`: all clients meet the domains in their order. `shuffled`: each client has an order of its own.
        delay: Most rounds by which a client begins late, ≥ 0. Each client has its own delay, uniform in 0 … `delay`.
        cumulative: Whether earlier domains stay. With a column their samples do. Else each sample is seen in one of the
            ways so far, drawn anew in each epoch, so that a client makes as many batches as without it.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range, or there is not one way of making domains.
    """

    @checks_arguments
    def __init__(
        self,
        rounds_per_task: int,
        *,
        rotations: list[float] | None = None,
        noises: list[float] | None = None,
        permutations: int | None = None,
        column: str | None = None,
        values: list[str | int | float] | None = None,
        order: Order = "same",
        delay: int = 0,
        cumulative: bool = False,
    ) -> None:
        super().__init__(rounds_per_task, order, delay, cumulative=cumulative)
        ways = {"rotations": rotations, "noises": noises, "permutations": permutations, "column": column}
        given = [name for name, way in ways.items() if way is not None]
        if len(given) != 1:
            raise ValueError(
                f"data.scenario DomainIncremental needs one of {', '.join(ways)}, got {' and '.join(given) or 'none'}; "
                f"give one, such as rotations [0, 45, 90]"
            )
        if values is not None and column is None:
            raise ValueError(f"data.scenario.values belong to a column, got {values} without one; set column")
        lists = {"rotations": rotations, "noises": noises, "values": values}
        check_lists(lists)
        check_count(1, "the number of domains", **{"data.scenario.permutations": permutations})
        for std in noises or ():
            check_at_least(0, "0 adds none", **{"data.scenario.noises": std})
        for name, numbers in {"rotations": rotations, "noises": noises}.items():
            for number in numbers or ():
                check_not_none(**{f"data.scenario.{name}": number})
                check_numbers("give such as [0, 45]", **{f"data.scenario.{name}": number})
                if not math.isfinite(number):
                    raise ValueError(f"data.scenario.{name} must be finite numbers, got {number}; give such as [0, 45]")
        for name, listed in lists.items():
            if listed is not None and (not listed or len(set(listed)) < len(listed)):
                raise ValueError(f"data.scenario.{name} must name different domains, got {listed}; name each once")
        self.rotations = rotations
        self.noises = noises
        self.permutations = permutations
        self.column = column
        self.values = values
        self.tasks = []
        self._domains: list[Array] = []
        """The domain of each client's samples, (n,) int64, −1 for a sample of none. Empty without a column."""
        self._drawn: dict[frozenset[int], Transform] = {}
        """The way of seeing samples in one of several ways, by the numbers of their domains."""

    def _num_tasks(self) -> int:
        return len(self.tasks)

    def begin(self, data: ScenarioInput) -> None:
        self._domains = []
        self._drawn = {}
        if self.column is None:
            self.tasks = self._seen_tasks(data.seed)
            check_seen(self.tasks, data)
        else:
            self._begin_column(self.column, data)
        super().begin(data)

    def _seen_tasks(self, seed: int) -> list[Task]:
        """Return a task for each way of seeing the samples."""
        if self.rotations is not None:
            return [Task(name=f"{degrees:.15g}°", seen=Rotation(degrees)) for degrees in self.rotations]
        if self.noises is not None:
            return [Task(name=f"σ={std:.15g}", seen=Noise(std)) for std in self.noises]
        permutations = range(self.permutations or 0)
        return [Task(name=f"permutation {index}", seen=Permutation(index, seed)) for index in permutations]

    def _begin_column(self, column: str, data: ScenarioInput) -> None:
        """Take a task for each value of the column.

        Raises:
            ValueError: A sample has no number, or no sample has one of the values.
        """
        found = data.column(column).tolist()
        if any(isinstance(value, float) and math.isnan(value) for value in found):
            raise ValueError(
                f"data.scenario.column must have a value for each sample, and {column!r} has NaN; fill it in, or name "
                f"another column"
            )
        known = sorted(set(found), key=lambda value: (str(type(value)), value))
        values = known if self.values is None else self.values
        for value in values:
            if value not in known:
                raise ValueError(
                    f"data.scenario.values must be values of the column {column!r}, got {value!r}; it has "
                    f"{', '.join(map(str, known[:10]))}"
                )
        names = domain_names(values)
        self.tasks = [Task(name, column=column, value=value) for name, value in zip(names, values, strict=True)]
        places = {value: index for index, value in enumerate(values)}
        domains = np.array([places.get(value, -1) for value in found], dtype=np.int64)
        self._domains = [domains[part.numpy()] for part in data.parts]

    def keeps(self, client_id: int, stage: int) -> Array | None:
        if not self._domains:
            return None
        return np.isin(self._domains[client_id], self._present(client_id, stage))

    def seen(self, client_id: int, stage: int) -> Transform | None:
        if self._domains:
            return None
        present = self._present(client_id, stage)
        if len(present) == 1:
            return self.tasks[present[0]].seen
        numbers = frozenset(present)
        if numbers not in self._drawn:
            ways = [task.seen for number, task in enumerate(self.tasks) if number in numbers]
            self._drawn[numbers] = Drawn([way for way in ways if way is not None])
        return self._drawn[numbers]


def domain_names(values: Sequence[Any]) -> list[str]:
    """Name the domains of a column, each in its own way and without characters that log keys do not hold.

    Args:
        values: Different values of the column.

    >>> domain_names(["ann", "a/b", "", 3])
    ['ann', 'a-b', '(empty)', '3']
    """
    return unique_names([clean_name(value) or EMPTY for value in values], num_classes=None)


def task_name(classes: Sequence[int]) -> str:
    """Name a task by its classes. Three or more of them in a row are written by the first and the last.

    >>> task_name([0, 1]), task_name([3]), task_name(range(10, 20)), task_name([4, 5, 6, 0])
    ('0-1', '3', '10..19', '4..6-0')
    """
    parts: list[str] = []
    for first, last in rows_of(classes):
        if last - first < 2:
            parts += [str(class_idx) for class_idx in range(first, last + 1)]
        else:
            parts.append(f"{first}..{last}")
    return "-".join(parts)


def rows_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each row in which every number is one more than that before it.

    >>> rows_of([4, 5, 6, 0, 2])
    [(4, 6), (0, 0), (2, 2)]
    """
    rows: list[tuple[int, int]] = []
    for number in numbers:
        if rows and number == rows[-1][1] + 1:
            rows[-1] = (rows[-1][0], number)
        else:
            rows.append((number, number))
    return rows


def check_tasks(tasks: Any) -> None:
    """Refuse tasks that are no lists of different classes.

    Args:
        tasks: The classes of each task.

    Raises:
        TypeError: A class is no whole number.
        ValueError: A task is empty, or a class is below 0 or in two tasks.
    """
    example = "give such as [[0, 1], [2, 3]]"
    if not isinstance(tasks, list | tuple) or not tasks:
        raise ValueError(f"data.scenario.tasks must list the classes of each task, got {tasks!r}; {example}")
    met: set[int] = set()
    for classes in tasks:
        if not isinstance(classes, list | tuple) or not classes:
            raise ValueError(f"data.scenario.tasks must list the classes of each task, got {classes!r}; {example}")
        for class_idx in classes:
            check_not_none(**{"data.scenario.tasks": class_idx})
            check_count(0, example, **{"data.scenario.tasks": class_idx})
            if class_idx in met:
                raise ValueError(f"data.scenario.tasks must name each class once, got {class_idx} twice; {example}")
            met.add(class_idx)


def check_lists(lists: Mapping[str, Any]) -> None:
    """Refuse settings of `DomainIncremental` that are no lists, and values that no column can have.

    Args:
        lists: The settings by name: `rotations`, `noises` and `values`. None: the setting is not given.

    Raises:
        TypeError: A setting is no list, or a value is neither a text nor a number.
    """
    for name, listed in lists.items():
        if listed is not None and not isinstance(listed, list | tuple):
            raise TypeError(f"data.scenario.{name} must be a list, got {listed!r}; give one entry for each domain")
    for value in lists["values"] or ():
        if not isinstance(value, str | Real):
            raise TypeError(
                f"data.scenario.values must be texts or numbers, got {value!r}; give values of the column, such as "
                f"[north, south]"
            )


def check_seen(tasks: Sequence[Task], data: ScenarioInput) -> None:
    """Refuse samples that cannot be seen in the way of the tasks.

    Args:
        tasks: The tasks.
        data: The samples.

    Raises:
        ValueError: The samples are of another kind.
    """
    first = data.look_at_one()
    if first is not None:
        for task in tasks:
            check = getattr(task.seen, "check", None)
            if check is not None:
                check(first)
