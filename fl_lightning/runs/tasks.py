"""The table of a run's tasks: the accuracy on each task after each stage, and the measures of the table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fl_lightning.members.tasks import Tasks, laid_out_rows
from fl_lightning.metrics.keys import TASK_MEASURES, TASK_VALUE_MEASURES
from fl_lightning.metrics.tasks import TaskRows
from fl_lightning.utils.files import write_table
from fl_lightning.utils.round_table import read_cells, reading

TASKS = "tasks.csv"
"""Name of the table."""

Model = Literal["global", "clients"]
"""Whose table it is: the global model's, or the mean over the clients' own tables."""

BEFORE = "before"
FIRST = "first"
LAST = "last"
"""Names of lines in place of a number: accuracies before training, and the first and last row of each task."""

ACCURACY = "acc_task/"
VALUE = "value_task/"
"""Beginnings of the names of the columns of accuracies, and of other values. The name of the task follows them."""

COLUMNS = ("model", "row", "round", "clients", "trained")
"""First columns of the table. The accuracies and the measures follow."""


class TaskLine(NamedTuple):
    """Has one row of a table of tasks.

    Args:
        model: Whose table it is.
        row: Number of the row, from 0, and of the stage in the clients' table. -1 before training.
        round_idx: The round after which the accuracies were measured, the last one of the clients. -1 before training.
        accuracies: Accuracy on each of the K tasks, or another value of a module. NaN without samples.
        trained: Numbers of the tasks that were trained on since the row before.
        measures: Measures of the table up to this row that are defined, by name.
        num_clients: Number of clients that have the row. None in the table of the global model.
    """

    model: Model
    row: int
    round_idx: int
    accuracies: list[float]
    trained: list[int]
    measures: dict[str, float]
    num_clients: int | None = None


class SavedTasks(NamedTuple):
    """Has the tables of tasks of a run.

    Args:
        names: Names of the K tasks.
        lines: The rows of the global model, and then those of the clients.
        has_accuracies: Whether the values are accuracies. A module that logs none is tested by another value.
    """

    names: list[str]
    lines: list[TaskLine]
    has_accuracies: bool = True

    @property
    def beginning(self) -> str:
        """The beginning of the names of the columns of values."""
        return ACCURACY if self.has_accuracies else VALUE

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the measures."""
        return TASK_MEASURES if self.has_accuracies else TASK_VALUE_MEASURES

    def of(self, model: Model) -> list[TaskLine]:
        """Return the rows of one table, the one before training first. Empty: there is no such table."""
        return [line for line in self.lines if line.model == model]


def rows_of(lines: Sequence[TaskLine]) -> TaskRows:
    """Lay out the rows of one table, of which there is one at least."""
    return laid_out_rows([line.accuracies for line in lines], [line.trained for line in lines])


# --- of a run ---


def saved_tasks(tasks: Tasks) -> SavedTasks:
    """Return the tables of tasks as a run keeps them.

    Args:
        tasks: The member that keeps them.
    """
    lines = [*lines_of_global(tasks), *lines_of_clients(tasks)]
    return SavedTasks(tasks.names, lines, has_accuracies=tasks.key("acc_tasks") in TASK_MEASURES)


def lines_of_global(tasks: Tasks) -> list[TaskLine]:
    """Return the rows of the global model. Of the rows before any training the last is left."""
    table = tasks.table
    if not table.rounds:
        return []
    num_before = len(table.rounds) - len(table.rows().table)
    lines: list[TaskLine] = []
    for index in range(max(0, num_before - 1), len(table.rounds)):
        line = TaskLine(
            model="global",
            row=max(-1, index - num_before),
            round_idx=table.rounds[index],
            accuracies=table.accuracies[index],
            trained=table.trained[index],
            measures=tasks.measures(table, index + 1),
        )
        lines.append(line)
    return lines


def lines_of_clients(tasks: Tasks) -> list[TaskLine]:
    """Return the means over the clients of their own rows, a line for each stage of the clients.

    A client has at most one row in each stage, the last evaluation before its next stage begins. Clients may be in one
    stage at different rounds.
    """
    by_stage: dict[int, list[TaskLine]] = {}
    for client_id, table in sorted(tasks.of_clients.items()):
        for index, round_idx in enumerate(table.rounds):
            stage = tasks.stage(client_id, round_idx)
            line = TaskLine(
                model="clients",
                row=stage,
                round_idx=round_idx,
                accuracies=table.accuracies[index],
                trained=table.trained[index],
                measures=tasks.client_measures(client_id, index + 1),
            )
            by_stage.setdefault(stage, []).append(line)
    return [mean_line(lines) for _, lines in sorted(by_stage.items())]


def mean_line(lines: Sequence[TaskLine]) -> TaskLine:
    """Average the rows of several clients in one stage, each value over the clients that have it."""
    trained: set[int] = set()
    for line in lines:
        trained.update(line.trained)
    columns = zip(*[line.accuracies for line in lines], strict=True)
    measures: dict[str, float] = {}
    for name in (*TASK_MEASURES, *TASK_VALUE_MEASURES):
        known = [line.measures[name] for line in lines if name in line.measures]
        if known:
            measures[name] = mean_of(known)
    return TaskLine(
        model="clients",
        row=lines[0].row,
        round_idx=max(line.round_idx for line in lines),
        accuracies=[mean_of(column) for column in columns],
        trained=sorted(trained),
        measures=measures,
        num_clients=len(lines),
    )


def mean_of(values: Sequence[float]) -> float:
    """Average the values that are not NaN. The mean of none is NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return math.fsum(known) / len(known)


# --- files ---


def write_tasks(path: Path, saved: SavedTasks) -> None:
    """Write the tables of tasks: a line for each row, and two with the first and the last row of each task.

    Args:
        path: The file.
        saved: The tables.
    """
    header = [*COLUMNS, *(f"{saved.beginning}{name}" for name in saved.names), *saved.measures]
    written: list[Sequence[Any]] = [header]
    for line in saved.lines:
        written.append(cells_of(line, saved.measures))
    of_global = saved.of("global")
    if of_global:
        rows = rows_of(of_global)
        for name, numbers in ((FIRST, rows.first), (LAST, rows.last)):
            cells = ["" if number < 0 else number for number in numbers.tolist()]
            without_measures = [""] * len(saved.measures)
            written.append(["global", name, "", "", "", *cells, *without_measures])
    write_table(path, written)


def cells_of(line: TaskLine, measures: Sequence[str]) -> list[Any]:
    """Write one row. A cell is empty where there is no value.

    Args:
        line: The row.
        measures: Names of the measures.
    """
    accuracies = ["" if math.isnan(value) else value for value in line.accuracies]
    return [
        line.model,
        BEFORE if line.row < 0 else line.row,
        "" if line.round_idx < 0 else line.round_idx,
        "" if line.num_clients is None else line.num_clients,
        " ".join(str(task) for task in line.trained),
        *accuracies,
        *(line.measures.get(name, "") for name in measures),
    ]


def read_tasks(path: Path) -> SavedTasks | None:
    """Read the tables of tasks. None: there is no file.

    Raises:
        ValueError: The file is no such table.
    """
    if not path.is_file():
        return None
    lines: list[TaskLine] = []
    with reading(path, "a table of tasks, and cannot be read as one"):
        columns = read_cells(path)
        has_accuracies = TASK_MEASURES[0] in columns
        saved = SavedTasks([], lines, has_accuracies=has_accuracies)
        for column in columns:
            if column.startswith(saved.beginning):
                saved.names.append(column.removeprefix(saved.beginning))
        for cells in zip(*columns.values(), strict=True):
            by_column = dict(zip(columns, cells, strict=True))
            if by_column["row"] not in (FIRST, LAST):
                lines.append(read_line(by_column, saved))
    return saved


def read_line(cells: Mapping[str, str], saved: SavedTasks) -> TaskLine:
    """Read one row.

    Args:
        cells: Its texts by column.
        saved: The tables, whose tasks are known.

    Raises:
        ValueError: A cell has another kind of value.
    """
    models: dict[str, Model] = {"global": "global", "clients": "clients"}
    if cells["model"] not in models:
        raise ValueError("no table is of such a model")
    trained = [int(task) for task in cells["trained"].split()]
    if any(not 0 <= task < len(saved.names) for task in trained):
        raise ValueError("there is no such task")
    return TaskLine(
        model=models[cells["model"]],
        row=-1 if cells["row"] == BEFORE else int(cells["row"]),
        round_idx=int(cells["round"] or -1),
        accuracies=[float(cells[f"{saved.beginning}{name}"] or math.nan) for name in saved.names],
        trained=trained,
        measures={name: float(cells[name]) for name in saved.measures if cells.get(name)},
        num_clients=int(cells["clients"]) if cells["clients"] else None,
    )
