"""The table of tasks: how well the model answers each task of a scenario after each stage."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fl_lightning.data.scenario import Scenario
from fl_lightning.functional.continual import (
    backward_transfer,
    forward_transfer,
    learning_accuracy,
    tasks_accuracy,
    tasks_forgetting,
)
from fl_lightning.metrics.keys import Direction, is_accuracy
from fl_lightning.metrics.tasks import TaskRows, task_rows
from fl_lightning.types import ClientResult, Member, RoundOutcome

OF_VALUES = {
    "acc_task": "value_task",
    "acc_tasks": "value_tasks",
    "forgetting_tasks": "value_forgetting_tasks",
    "backward_transfer": "value_backward_transfer",
    "forward_transfer": "value_forward_transfer",
    "learning_accuracy": "value_learned",
}
"""Names of the measures of values that are no accuracies, by those of accuracies."""

MEANS = ("acc_tasks", "learning_accuracy")
"""Names of the measures that are means of values. The others are differences, signed by the direction of the value."""


class TaskValue(NamedTuple):
    """Names the value by which a user's module is tested on a task.

    Args:
        key: The key under which the module logs the value, or the name of one of `model.metrics`.
        direction: Whether the value is better when lower or higher. None if nobody tells.
    """

    key: str
    direction: Direction | None


class TaskTable:
    """Keeps accuracies on K tasks: a row for the last evaluation before a stage begins, and one for the last of all.

    Attributes:
        accuracies: The accuracies of each row, K in each. A row before any training comes first, if it was measured.
        trained: The tasks that were trained on since the row before, for each row.
        rounds: The round after which each row was measured, −1 before training.
        pending: The tasks that were trained on since the last row.
    """

    def __init__(self) -> None:
        self.accuracies: list[list[float]] = []
        self.trained: list[list[int]] = []
        self.rounds: list[int] = []
        self.pending: set[int] = set()

    @property
    def last_round(self) -> int | None:
        """The round of the last row. None: there is none."""
        return self.rounds[-1] if self.rounds else None

    def take(self, accuracies: Sequence[float], round_idx: int, *, begins_row: bool) -> None:
        """Take the accuracies of an evaluation.

        Args:
            accuracies: The accuracies, K.
            round_idx: Round after which they were measured, −1 before training.
            begins_row: Whether a stage has begun since the last row, which then stays.
        """
        if self.last_round is None or begins_row:
            self.accuracies.append([])
            self.trained.append([])
            self.rounds.append(round_idx)
        self.accuracies[-1] = [float(value) for value in accuracies]
        self.trained[-1] = sorted(self.pending.union(self.trained[-1]))
        self.rounds[-1] = round_idx
        self.pending = set()

    def rows(self, end: int | None = None) -> TaskRows:
        """Lay out what was measured.

        Args:
            end: Number of rows, the first ones. None: all.
        """
        return laid_out_rows(self.accuracies[:end], self.trained[:end])

    def measures(self, end: int | None = None) -> dict[str, float]:
        """Return the measures that are defined, by name.

        Args:
            end: Number of rows that are known, the first ones. None: all.
        """
        return measures_of(self.rows(end)) if self.accuracies[:end] else {}

    def state(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "accuracies": [list(row) for row in self.accuracies],
            "trained": [list(tasks) for tasks in self.trained],
            "rounds": list(self.rounds),
            "pending": sorted(self.pending),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "TaskTable":
        """Make a table of its plain values."""
        table = cls()
        table.accuracies = [list(row) for row in state["accuracies"]]
        table.trained = [list(tasks) for tasks in state["trained"]]
        table.rounds = list(state["rounds"])
        table.pending = set(state["pending"])
        return table


def laid_out_rows(accuracies: Sequence[Sequence[float]], trained: Sequence[Sequence[int]]) -> TaskRows:
    """Lay out the rows of a table of tasks.

    Args:
        accuracies: The accuracies of each row, K in each, at least one row.
        trained: The numbers of the tasks that were trained on since the row before, for each row.
    """
    table = torch.tensor(accuracies, dtype=torch.float64)
    flags = torch.zeros(table.shape, dtype=torch.bool)
    for index, tasks in enumerate(trained):
        flags[index, list(tasks)] = True
    return task_rows(table, flags)


def measures_of(rows: TaskRows) -> dict[str, float]:
    """Return the measures of a table of tasks that are defined, by name."""
    if not len(rows.table):
        return {}
    found = {
        "acc_tasks": tasks_accuracy(rows.table, rows.first),
        "forgetting_tasks": tasks_forgetting(rows.table, rows.first),
        "backward_transfer": backward_transfer(rows.table, rows.last),
        "forward_transfer": forward_transfer(rows.table, rows.initial, rows.first),
        "learning_accuracy": learning_accuracy(rows.table, rows.first),
    }
    return {name: float(value) for name, value in found.items() if not math.isnan(value)}


class Tasks(Member):
    """Keeps the tables of tasks: of the global model, and of each client's own.

    Args:
        scenario: The scenario, which has tasks.
        clients: Ids of the clients that train.
    """

    name = "tasks"

    def __init__(self, scenario: Scenario, clients: Iterable[int]) -> None:
        self._scenario = scenario
        self._clients = list(clients)
        self._in_round: dict[int, int] = {}
        """The task of each client of the present round that trains on one."""
        self.table = TaskTable()
        self.of_clients: dict[int, TaskTable] = {}
        self.value: TaskValue | None = None
        """The value by which a module is tested. None is the accuracy of a net, or a value that is not known yet."""

    @property
    def names(self) -> list[str]:
        """The names of the tasks."""
        return [task.name for task in self._scenario.tasks]

    def stage(self, client_id: int, round_idx: int) -> int:
        """Return the stage of a client in a round."""
        return self._scenario.stage(client_id, round_idx)

    # --- in a round ---

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._in_round = {}

    def incoming(self, result: ClientResult) -> ClientResult:
        data = result.job.data
        task = self._scenario.task(data.client_id, data.stage)
        if task is not None and data.size():
            self._in_round[data.client_id] = task
        return result

    def share(self) -> dict[int, int]:
        return self._in_round

    def end(self, outcome: RoundOutcome, shared: Sequence[dict[int, int]]) -> Mapping[str, float]:
        if not outcome.aborted:
            for of_process in shared:
                for client_id, task in of_process.items():
                    if client_id not in outcome.failed:
                        self.table.pending.add(task)
                        self.of_clients.setdefault(client_id, TaskTable()).pending.add(task)
        self._in_round = {}
        return {}

    def undo(self, mark: None) -> None:
        self._in_round = {}

    # --- after evaluations ---

    def take(self, accuracies: Sequence[float], round_idx: int) -> dict[str, float]:
        """Take the accuracies of the global model on all tasks, and return the measures that are defined by name.

        Args:
            accuracies: The accuracies, K.
            round_idx: Round after which they were measured, −1 before training.
        """
        before = self.table.last_round
        begins_row = before is not None and any(self._changed(client, before, round_idx) for client in self._clients)
        self.table.take(accuracies, round_idx, begins_row=begins_row)
        return self.measures(self.table)

    def take_clients(self, accuracies: Mapping[int, Sequence[float]], round_idx: int) -> dict[str, float]:
        """Take the accuracies of the clients' own models, and return the means of the measures by name.

        Args:
            accuracies: The accuracies on all tasks by client id, NaN for a task of which a client has no samples.
            round_idx: Round after which they were measured.
        """
        columns: dict[str, list[float]] = {}
        for client_id, of_client in accuracies.items():
            table = self.of_clients.setdefault(client_id, TaskTable())
            before = table.last_round
            begins_row = before is not None and self._changed(client_id, before, round_idx)
            table.take(of_client, round_idx, begins_row=begins_row)
            for name, value in self.client_measures(client_id).items():
                columns.setdefault(name, []).append(value)
        return {name: math.fsum(values) / len(values) for name, values in columns.items()}

    def key(self, name: str) -> str:
        """Return the name under which a value is logged, which tells whether the value is an accuracy.

        Args:
            name: The name of the accuracy, `acc_task` or that of a measure.
        """
        is_other = self.value is not None and not is_accuracy(self.value.key)
        return OF_VALUES[name] if is_other else name

    def measures(self, table: TaskTable, end: int | None = None) -> dict[str, float]:
        """Return the measures of a table that are defined, by the name under which they are logged.

        Forgetting is what has become worse and transfer what has become better, whatever the direction of the value.

        Args:
            table: The table.
            end: Number of its rows that are known, the first ones. None: all.
        """
        found = table.measures(end)
        direction = "max" if self.value is None else self.value.direction
        if direction != "max":
            means = {name: value for name, value in found.items() if name in MEANS}
            found = means if direction is None else turned(table).measures(end) | means
        return {self.key(name): value for name, value in found.items()}

    def client_measures(self, client_id: int, end: int | None = None) -> dict[str, float]:
        """Return the measures of a client's own table, as `measures` does, without forward transfer.

        A client is first tested after others have trained, so that nobody knows its accuracies before any training.

        Args:
            client_id: Id of the client, which was tested.
            end: Number of the rows that are known, the first ones. None: all.
        """
        found = self.measures(self.of_clients[client_id], end)
        found.pop(self.key("forward_transfer"), None)
        return found

    def _changed(self, client_id: int, before: int, after: int) -> bool:
        """Return True if a stage of a client has begun after the first round, up to the second one. −1: no round."""
        if before < 0:
            return True
        stage = self._scenario.stage
        return stage(client_id, before) != stage(client_id, after)

    # --- checkpoints ---

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        of_clients = {client_id: table.state() for client_id, table in sorted(self.of_clients.items())}
        value = None if self.value is None else list(self.value)
        return {"global": self.table.state(), "clients": of_clients, "value": value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table = TaskTable.of(state["global"])
        self.of_clients = {client_id: TaskTable.of(table) for client_id, table in state["clients"].items()}
        value = state["value"]
        self.value = None if value is None else TaskValue(key=value[0], direction=value[1])


def turned(table: TaskTable) -> TaskTable:
    """Return a table of the negative values, which are better when higher if those of the table are when lower."""
    negative = TaskTable.of(table.state())
    negative.accuracies = [[-value for value in row] for row in table.accuracies]
    return negative
