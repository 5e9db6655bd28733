"""The tables of tasks of saved runs: their pictures, and intransigence against a cumulative run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fl_lightning.functional.continual import at_rows, intransigence
from fl_lightning.metrics.history import BY_TASK, BY_TASK_VALUE, History
from fl_lightning.metrics.keys import LEARNING_ACCURACY, TASK_MEASURES, TASK_VALUE_MEASURES
from fl_lightning.reports.figures import Numbers
from fl_lightning.reports.page import Picture
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.reports.task_figures import TaskMatrix, TrainedSpan, plot_task_curves, plot_tasks
from fl_lightning.runs.tasks import TASKS, Model, SavedTasks, TaskLine, read_tasks, rows_of

MODELS: Mapping[Model, str] = {"global": "global model", "clients": "mean of the clients' own models"}
"""Names of models in pictures."""


def tasks_of_run(run: SavedRun) -> SavedTasks | None:
    """Read the tables of tasks of a run. None if it has none, or if later rounds of the run are left out."""
    return read_tasks(run.folder / TASKS) if run.is_whole else None


class TaskKeys(NamedTuple):
    """Names the values of a model on tasks.

    Args:
        beginning: Beginning of the log keys of single tasks. The name of the task follows it.
        mean: Log key of the mean over the tasks that were met.
        are_accuracies: Whether the values are accuracies.
    """

    beginning: str
    mean: str
    are_accuracies: bool


def task_keys_in(keys: Iterable[str], model: Model = "global") -> TaskKeys | None:
    """Return the names of the values of a model on tasks. None if there are none among some log keys.

    Args:
        keys: The log keys.
        model: Whose values they are: the global model's, or the mean over the clients' own models.

    >>> task_keys_in(["local/acc_task/0", "val/acc_task/0"])
    TaskKeys(beginning='val/acc_task/', mean='val/acc_tasks', are_accuracies=True)
    """
    means = {BY_TASK: TASK_MEASURES[0], BY_TASK_VALUE: TASK_VALUE_MEASURES[0]}
    for key in keys:
        for part, mean in means.items():
            scope, found, _ = key.partition(part)
            model_of_key = "clients" if scope == "local" else "global"
            if found and model_of_key == model:
                return TaskKeys(f"{scope}{part}", mean=f"{scope}/{mean}", are_accuracies=part == BY_TASK)
    return None


def share_factor(values: Numbers) -> float:
    """Return the factor that makes accuracies shares in [0, 1]. A module may log them in percent."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    return 0.01 if largest > 1 else 1.0


# --- pictures ---


def matrices_of(tables: Sequence[SavedTasks]) -> dict[str, TaskMatrix]:
    """Return the tables of tasks to be drawn, the mean over runs that have rows after the same rounds.

    Args:
        tables: The tables of each run, of one run at least.

    Returns:
        The tables by the name of the model.
    """
    matrices: dict[str, TaskMatrix] = {}
    for model, shown in MODELS.items():
        if any(line.row >= 0 for line in tables[0].of(model)):
            matrices[shown] = mean_matrix(tables[0], tables_alike(tables, model))
    return matrices


def tables_alike(tables: Sequence[SavedTasks], model: Model) -> list[list[TaskLine]]:
    """Return the rows of the runs whose table has the tasks of the first one, and rows after the same rounds.

    Args:
        tables: The tables of each run, of one run at least.
        model: Whose table it is.
    """
    first = tables[0]
    alike: list[list[TaskLine]] = []
    for saved in tables:
        lines = saved.of(model)
        if saved.names == first.names and rounds_in(lines) == rounds_in(first.of(model)):
            alike.append(lines)
    return alike


def words_for_seeds(tables: Sequence[SavedTasks]) -> str:
    """Tell over how many seeds tables are averaged, after a comma. With delays a seed may have rows of its own."""
    if len(tables) == 1:
        return ""
    counts = {len(tables_alike(tables, model)) for model in MODELS if tables[0].of(model)}
    if counts == {len(tables)}:
        return f", mean over {len(tables)} seeds"
    return ", of the first seed and of the others with rows after the same rounds"


def rounds_in(lines: Sequence[TaskLine]) -> list[tuple[int, int]]:
    """Return the number and the round of each row."""
    return [(line.row, line.round_idx) for line in lines]


def mean_matrix(saved: SavedTasks, runs: Sequence[Sequence[TaskLine]]) -> TaskMatrix:
    """Average the tables of tasks of some runs that have rows after the same rounds.

    Args:
        saved: Tables of one of the runs.
        runs: The rows of each run.
    """
    tables = [[line.accuracies for line in lines] for lines in runs]
    values = np.mean(tables, axis=0)
    factor = share_factor(values) if saved.has_accuracies else 1.0
    lines = runs[0]
    after = [index for index, line in enumerate(lines) if line.row >= 0]
    before = [index for index, line in enumerate(lines) if line.row < 0]
    trained = np.zeros((len(after), len(saved.names)), dtype=bool)
    for row, index in enumerate(after):
        for of_run in runs:
            trained[row, of_run[index].trained] = True
    return TaskMatrix(
        names=saved.names,
        table=factor * values[after],
        trained=trained,
        rounds=[lines[index].round_idx for index in after],
        initial=factor * values[before[-1]] if before else None,
        measures=mean_measures(saved.measures, runs, factor=factor),
        are_shares=saved.has_accuracies,
    )


def mean_measures(names: Iterable[str], runs: Sequence[Sequence[TaskLine]], *, factor: float) -> dict[str, float]:
    """Average the measures after the last row over the runs that have them.

    Args:
        names: Names of the measures.
        runs: The rows of each run.
        factor: Factor of the values, as of `share_factor`.

    Returns:
        The means by name. It is empty if the last row of a run is not of all clients.
    """
    if not all(ends_with_all_clients(lines) for lines in runs):
        return {}
    last_lines = [lines[-1] for lines in runs]
    measures: dict[str, float] = {}
    for name in names:
        known = [line.measures[name] for line in last_lines if name in line.measures]
        if known:
            measures[name] = factor * math.fsum(known) / len(known)
    return measures


def ends_with_all_clients(lines: Sequence[TaskLine]) -> bool:
    """Return True if the last row is the mean over as many clients as any row, so that its measures are of all clients.

    With delays the last row may have few clients. The rows of the global model have no clients.

    Args:
        lines: The rows of a table, at least one.
    """
    most = max(line.num_clients or 0 for line in lines)
    return (lines[-1].num_clients or 0) == most


def last_rows(history: History, names: Sequence[str]) -> dict[str, TaskMatrix]:
    """Return the last logged values on tasks and their measures, as tables of one row.

    The values of the clients' own models are means over all clients that were tested. A row of `tasks.csv` has only the
    clients of one stage.

    Args:
        history: The logged values.
        names: Names of the tasks.

    Returns:
        The tables by the name of the model.
    """
    matrices: dict[str, TaskMatrix] = {}
    for model, shown in MODELS.items():
        keys = task_keys_in(history.keys, model)
        if keys is None:
            continue
        rounds = list(history.curve(keys.mean))
        if rounds:
            matrices[shown] = logged_row(history, keys, names=names, round_idx=rounds[-1])
    return matrices


def logged_row(history: History, keys: TaskKeys, *, names: Sequence[str], round_idx: int) -> TaskMatrix:
    """Return the logged values on tasks and their measures after a round, as a table of one row.

    Args:
        history: The logged values.
        keys: Names of the values.
        names: Names of the tasks.
        round_idx: The round.
    """
    row = [history.curve(f"{keys.beginning}{name}").get(round_idx, math.nan) for name in names]
    values = np.array([row])
    factor = share_factor(values) if keys.are_accuracies else 1.0
    scope, _, _ = keys.mean.rpartition("/")
    known = TASK_MEASURES if keys.are_accuracies else TASK_VALUE_MEASURES
    measures: dict[str, float] = {}
    for name in known:
        curve = history.curve(f"{scope}/{name}")
        if round_idx in curve:
            measures[name] = factor * curve[round_idx]
    return TaskMatrix(
        names=names,
        table=factor * values,
        trained=np.zeros(values.shape, dtype=np.bool_),
        rounds=[round_idx],
        measures=measures,
        are_shares=keys.are_accuracies,
    )


def spans_of(saved: SavedTasks) -> list[TrainedSpan]:
    """Return the rounds of each row of the global model's table, and the tasks that are trained on in them."""
    spans: list[TrainedSpan] = []
    begin = 0
    for line in saved.of("global"):
        if line.row >= 0:
            spans.append(TrainedSpan(begin, last=line.round_idx, tasks=line.trained))
        begin = line.round_idx + 1
    return spans


def tasks_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw the tables of tasks of each group, and the accuracy on each task over the rounds."""
    pictures: list[Picture] = []
    for number, group in enumerate(groups):
        tables: list[SavedTasks] = []
        for run in group.runs:
            saved = tasks_of_run(run)
            if saved is not None and saved.lines:
                tables.append(saved)
        if tables:
            pictures += tables_of_group(group, tables, number)
        pictures += curves_of_group(group, tables, number)
    return pictures


def tables_of_group(group: Group, tables: Sequence[SavedTasks], number: int) -> list[Picture]:
    """Draw the tables of tasks of a group.

    Args:
        group: The runs.
        tables: The tables of tasks of the runs that have some, at least one.
        number: Number of the group on the page.
    """
    matrices = matrices_of(tables)
    if not matrices:
        return []
    name = value_name(tables[0].has_accuracies)
    caption = (
        f"{name} on each task after each stage: {group.label}{words_for_seeds(tables)}. A frame marks the tasks that "
        f"some client trained on in the stage."
    )
    figure = plot_tasks(matrices, title=f"{group.label}: each task after each stage")
    return [Picture(f"tasks-{number}", figure, caption, wide=True)]


def curves_of_group(group: Group, tables: Sequence[SavedTasks], number: int) -> list[Picture]:
    """Draw the accuracy on each task over the rounds for a group.

    Args:
        group: The runs.
        tables: The tables of tasks of the runs that have some.
        number: Number of the group on the page.
    """
    keys = task_keys_in(group.runs[0].history.keys)
    if keys is None:
        return []
    _, names, table = group.runs[0].history.columns(keys.beginning)
    factor = share_factor(table.numpy()) if keys.are_accuracies else 1.0
    rounds: list[int] = []
    curves: dict[str, Numbers] = {}
    for name in names:
        rounds, values = group.curves(f"{keys.beginning}{name}")
        curves[name] = factor * values
    _, averages = group.curves(keys.mean)
    is_known = all(values.shape == averages.shape for values in curves.values())
    over = ""
    of_first = ""
    if len(group.runs) > 1:
        over = ", mean and one standard deviation over the seeds"
        of_first = ", of the first seed"
    caption = (
        f"{value_name(keys.are_accuracies)} of the global model on each task after each round: {group.label}{over}. "
        f"Above: the rounds in which some client trains on a task{of_first}."
    )
    figure = plot_task_curves(
        rounds,
        curves,
        mean=factor * averages if is_known else None,
        spans=spans_of(tables[0]) if tables else (),
        are_shares=keys.are_accuracies,
        title=f"{group.label}: each task over the rounds",
    )
    return [Picture(f"task-curves-{number}", figure, caption, wide=True)]


def value_name(are_accuracies: bool) -> str:
    """Name values at the beginning of a sentence."""
    return "Accuracy in percent" if are_accuracies else "Value by which the module is tested"


# --- intransigence ---


def intransigence_of(run: SavedRun, reference: SavedRun, model: Model) -> float | None:
    """Return the intransigence of a run against one that keeps the samples of earlier tasks.

    Args:
        run: The run.
        reference: The run whose accuracies on new tasks are a*.
        model: Whose intransigence it is: the global model's, or the mean over the clients' own models.

    Returns:
        The value, in [-1, 1]. None if one of the runs has no table of the tasks of both.
    """
    own = tasks_of_run(run)
    other = tasks_of_run(reference)
    if own is None or other is None or own.names != other.names:
        return None
    if model == "global":
        value = intransigence_of_global(own.of("global"), other.of("global"))
    elif have_met_alike(own.of("clients"), other.of("clients")):
        value = learned_by_clients(reference) - learned_by_clients(run)
    else:
        value = math.nan
    return None if math.isnan(value) else value


def intransigence_of_global(lines: Sequence[TaskLine], of_reference: Sequence[TaskLine]) -> float:
    """Compute the intransigence of the global model over the tasks that were met in both runs.

    Args:
        lines: The rows of the run.
        of_reference: The rows of the reference.

    Returns:
        The value, in [-1, 1]. NaN if no task was met in both runs.
    """
    if not lines or not of_reference:
        return math.nan
    rows = rows_of(lines)
    rows_of_reference = rows_of(of_reference)
    if not len(rows.table) or not len(rows_of_reference.table):
        return math.nan
    best = at_rows(rows_of_reference.table, rows_of_reference.first)
    best = torch.where(rows_of_reference.first >= 0, best, torch.nan)
    return float(intransigence(rows.table, best, rows.first))


def have_met_alike(lines: Sequence[TaskLine], of_reference: Sequence[TaskLine]) -> bool:
    """Return True if the clients of two runs were in the same stages, and trained on the same tasks in each of them.

    A file has the tasks of all clients in a stage together. With the same cohorts each client has met the same tasks.

    Args:
        lines: The rows of the clients of the run.
        of_reference: The rows of the clients of the reference.
    """
    met = [(line.row, line.num_clients, line.trained) for line in lines]
    return met == [(line.row, line.num_clients, line.trained) for line in of_reference]


def learned_by_clients(run: SavedRun) -> float:
    """Return the last learning accuracy of a run's clients, the mean over their own tables. NaN: the run has none.

    Each client's intransigence is the reference's learning accuracy minus its own, because both met the same tasks.
    A row of `tasks.csv` is a mean over the clients of one stage. The value in `metrics.csv` is over all clients.
    """
    values = list(run.history.curve(f"local/{LEARNING_ACCURACY}").values())
    return values[-1] if values else math.nan
