"""Callback that draws a run: its partition, accuracy and class-wise accuracy over the rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.callbacks.report import split_text
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.metric_files import FOLDER, stem_of
from fl_lightning.metrics.history import BY_CLASS, History, plain_key
from fl_lightning.metrics.keys import TIME, is_accuracy, is_loss, is_value, unit_of
from fl_lightning.reports.figures import (
    plot_accuracy,
    plot_classwise,
    plot_confusion,
    plot_metric,
    plot_partition,
    plot_sizes,
    plot_values,
    save,
)
from fl_lightning.reports.task_figures import plot_stages, plot_task_curves, plot_tasks
from fl_lightning.reports.tasks import matrices_of, share_factor, spans_of, task_keys_in
from fl_lightning.reports.time_figures import plot_timeline
from fl_lightning.runs.logged_figures import figure_writer, log_figures
from fl_lightning.runs.partition import PARTITION, write_partition
from fl_lightning.runs.plain_fit import epoch_values
from fl_lightning.runs.stages import presence_of
from fl_lightning.runs.tasks import TASKS, SavedTasks, saved_tasks, write_tasks
from fl_lightning.runs.timeline import TIMELINE, jobs_of, write_timeline
from fl_lightning.utils.run_folder import run_folder
from fl_lightning.utils.settings import check_at_least, check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["png", "pdf", "svg", "metrics", "none"]

LARGEST_SHARE = 0.02
"""Share of the run's time that drawing during the run may take."""

MOST_ROUNDS = 100
"""Number of rounds in the picture of data that change, if the rounds of the run are not planned."""

TASK_TABLE = "Each task after each stage"
TASK_CURVES = "Each task over the rounds"
"""Titles of the pictures of tasks."""


class RunPlots(Callback):
    """Writes `partition`, also as csv, when fit starts, `accuracy` and `classwise` during it and at its end.

    The callback writes no picture without content (no accuracy, no classes). These runs have other pictures:

    - A LightningModule's further values are in `values.png`.
    - If the samples have no classes, `partition.png` shows the sizes of the clients.
    - Under differential privacy there is no partition, because it tells what the clients have.
    - The fit of a module without a federation has the pictures of the values that it logs, by epoch.

    At the end of fit `confusion` shows as which class the samples of each class are taken, for up to 50 classes.

    At the end of fit `timeline`, also as csv, shows which client works when in simulated time, comes back, is lost or
    is stale, if the clients have `data.devices`.

    If the data change over the rounds (`data.scenario`), or clients join and leave (`data.stays`), `stages` shows which
    classes each client has when. If the scenario has tasks, `tasks`, also as csv, is the table of the accuracies on
    each task after each stage, and `task_curves` shows them over the rounds.

    A metric of `model.metrics` whose value is a matrix or a curve draws its last value itself, as `metrics/NAME-ROUND`.

    At the end of fit every logger that takes pictures gets `local/partition`, `local/stages`, `local/timeline`,
    `global/classwise`, `global/confusion`, `global/tasks` and `global/task_curves` (`val/…`, if the accuracies are
    those of the validation split).

    Args:
        dirpath: Folder of the pictures. None is the folder of the Trainer's first logger, and no folder without a
            logger.
        every: Least number of seconds between two drawings during fit, ≥ 0. It is more if drawing would take over 2 %
            of the time.
        format: Format of the files: png, pdf or svg. `metrics` writes only the pictures of `model.metrics`, as png,
            which a report cannot draw itself. `none` writes no pictures. The last two write `partition.csv`,
            `timeline.csv` and `tasks.csv`, too.
    """

    def __init__(self, dirpath: str | Path | None = None, every: float = 60.0, format: Format = "png") -> None:
        check_at_least(0, "it is in seconds", every=every)
        check_choice(get_args(Format), format=format)
        self.dirpath = dirpath
        self.every = every
        self.format = format
        self._history = History()
        self._folder: Path | None = None
        self._due = 0.0
        self._active = False
        self._stale = False
        self._any_module = False
        self._by_epoch = False
        self._logged: dict[str, Figure] = {}

    @property
    def _draws_all(self) -> bool:
        """Whether there are other pictures than those of `model.metrics`."""
        return self.format not in ("metrics", "none")

    # --- during fit -------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, self.dirpath)
        self._folder = folder
        self._due = monotonic() + self.every
        self._active = False
        self._logged.clear()
        if not trainer.is_global_zero:
            return
        self._by_epoch = not isinstance(pl_module, FederatedLoop)
        if not isinstance(pl_module, FederatedLoop):
            self._active = folder is not None and self._draws_all
            self._any_module = self._active
            self._history = History()
            return
        if folder is None and not any(map(figure_writer, trainer.loggers)):
            return
        # A private run tells nobody what the clients have.
        if not pl_module.parts.is_private:
            self._keep_partition(pl_module)
        if self._draws_all:
            self._keep_stages(pl_module)
            self._active = True
            self._history = pl_module.recorder.history
            self._any_module = pl_module.client.module is not None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale = True
        if self._by_epoch:
            self._history.record(trainer.current_epoch, epoch_values(trainer))
        now = monotonic()
        if now >= self._due:
            self._draw()
            self._keep_tasks(trainer, pl_module)
            end = monotonic()
            self._due = end + max(self.every, (end - now) / LARGEST_SHARE)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw()
        self._keep_tasks(trainer, pl_module)
        if isinstance(pl_module, FederatedLoop) and trainer.is_global_zero:
            if self._active:
                self._draw_confusion(pl_module)
            if self._active or self.format == "metrics":
                self._draw_metrics(pl_module)
            self._keep_timeline(pl_module)
        if self._active and self._history.rounds:
            log_figures(trainer.loggers, self._logged, self._history.rounds[-1])
        self._logged.clear()

    def _keep_timeline(self, loop: FederatedLoop) -> None:
        """Write what each client did in simulated time as csv and as a picture, if the clients have devices."""
        if loop.timeline is None or loop.parts.is_private or not loop.recorder.trained_rounds:
            return
        pacing = loop.parts.pacing
        deadline = None if pacing is None else pacing.deadline
        jobs = jobs_of(loop.timeline, loop.recorder.trained_rounds, loop.data.client_names, deadline=deadline)
        if self._folder is not None:
            write_timeline(self._folder / TIMELINE, jobs)
        if self._active:
            self._keep(plot_timeline(jobs), name="timeline", logged="local/timeline")

    def _draw_metrics(self, loop: FederatedLoop) -> None:
        """Draw the last values of the metrics that are matrices or curves, each by the metric object itself."""
        for name, figure in metric_figures(loop):
            if self._folder is not None:
                (self._folder / FOLDER).mkdir(parents=True, exist_ok=True)
            stem = stem_of(name, loop.recorder.evaluated_rounds - 1)
            self._keep(figure, name=f"{FOLDER}/{stem}", logged=f"{loop.data.evaluated_prefix}/{name}")

    def _draw_confusion(self, loop: FederatedLoop) -> None:
        """Draw as which class the samples of each class are taken, in the best and in the last evaluated round."""
        confusions = loop.recorder.confusions
        if not confusions:
            return
        panels = {}
        for name in ("best", "last"):
            of_round = confusions[name]
            panels[f"{name} round: {of_round.round_idx}"] = of_round.counts.numpy()
        if confusions["best"].round_idx == confusions["last"].round_idx:
            panels = {f"round {confusions['last'].round_idx}, the best and the last": confusions["last"].counts.numpy()}
        title = f"Confusion matrix of the global model ({split_text(list(loop.evaluation.samples()))})"
        figure = plot_confusion(panels, loop.evaluation.class_names, title)
        self._keep(figure, name="confusion", logged=f"{loop.data.evaluated_prefix}/confusion")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An error of the plots must not hide the error under way.
        with suppress(Exception):
            self._draw()
            self._keep_tasks(trainer, pl_module)

    def _keep_partition(self, loop: FederatedLoop) -> None:
        """Write the partition as csv and as a picture, or the sizes of the clients as a picture without classes."""
        clients = loop.data.client_names
        unseen = loop.data.unseen_clients
        counts = label_counts_of(loop)
        if self._folder is not None and counts is not None:
            table, class_names = counts
            write_partition(self._folder / PARTITION, table.tolist(), names=class_names, clients=clients, unseen=unseen)
        if not self._draws_all:
            return
        if counts is None:
            sizes = [num_samples_of(loop.data, client_id) for client_id in range(loop.data.num_clients)]
            figure = plot_sizes(sizes, client_names=clients, unseen=unseen)
        else:
            table, class_names = counts
            figure = plot_partition(table, class_names, client_names=clients, unseen=unseen)
        self._keep(figure, name="partition", logged="local/partition")

    def _keep_stages(self, loop: FederatedLoop) -> None:
        """Draw which samples the clients have in which rounds, if their data change, or if they join and leave."""
        if loop.parts.is_private or (loop.data.scenario is None and loop.data.stays is None):
            return
        counts = label_counts_of(loop)
        planned = loop.parts.horizon.planned or MOST_ROUNDS
        found = presence_of(loop.data, planned, None if counts is None else loop.evaluation.class_names)
        if found is None:
            return
        clients = [loop.data.client_names[client_id] for client_id in found.clients]
        title = None
        if len(clients) < loop.data.num_clients:
            title = f"Training samples of the first {len(clients)} of {loop.data.num_clients} clients"
        figure = plot_stages(
            found.counts,
            found.names,
            rounds=found.rounds,
            client_names=clients,
            kind=found.kind,
            there=found.there,
            title=title,
        )
        self._keep(figure, name="stages", logged="local/stages")

    def _keep_tasks(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the tables of tasks as csv, and draw them and the curves of the tasks, if there are any."""
        if not isinstance(pl_module, FederatedLoop) or not trainer.is_global_zero or pl_module.tasks is None:
            return
        saved = saved_tasks(pl_module.tasks)
        if not saved.lines:
            return
        if self._folder is not None:
            write_tasks(self._folder / TASKS, saved)
        if self._active:
            self._draw_tasks(saved, scope=pl_module.data.evaluated_prefix)

    def _draw_tasks(self, saved: SavedTasks, scope: str) -> None:
        """Draw the tables of tasks, and the curves of the tasks.

        Args:
            saved: The tables.
            scope: Beginning of the log keys of the global model.
        """
        matrices = matrices_of([saved])
        if matrices:
            self._keep(plot_tasks(matrices, title=TASK_TABLE), name="tasks", logged=f"{scope}/tasks")
        keys = task_keys_in(self._history.keys)
        if keys is None:
            return
        rounds, names, table = self._history.columns(keys.beginning)
        factor = share_factor(table.numpy()) if keys.are_accuracies else 1.0
        curves = {name: factor * table[:, place].numpy()[np.newaxis] for place, name in enumerate(names)}
        averages = self._history.curve(keys.mean)
        mean = factor * np.array([[averages.get(round_idx, math.nan) for round_idx in rounds]])
        figure = plot_task_curves(
            rounds, curves, mean=mean, spans=spans_of(saved), are_shares=keys.are_accuracies, title=TASK_CURVES
        )
        self._keep(figure, name="task_curves", logged=f"{scope}/task_curves")

    def _draw(self) -> None:
        """Draw the pictures, if anything has happened since they were drawn."""
        if not self._active or not self._stale:
            return
        self._stale = False
        history = self._history
        rounds = list(history.rounds)
        curves = {name: values_by_round(history, name) for name in history.names}
        accuracies = {name: as_shares(name, values) for name, values in curves.items() if is_accuracy(name)}
        losses = {name: values for name, values in curves.items() if is_loss(name)}
        if accuracies or losses:
            self._keep(plot_accuracy(rounds, accuracies, losses), name="accuracy")
        drawn = accuracies.keys() | losses.keys()
        untimed = [name for name in curves if not plain_key(name).startswith(TIME)]
        others = {name: curves[name] for name in untimed if name not in drawn and is_value(name)}
        if self._any_module and others:
            self._keep(plot_values(rounds, others), name="values")
        evaluated, class_names, table = history.columns(BY_CLASS)
        if evaluated:
            figure = plot_classwise(table.numpy(), class_names, evaluated)
            first_key = next(name for name in curves if BY_CLASS in name)
            scope, _, _ = first_key.partition(BY_CLASS)
            self._keep(figure, name="classwise", logged=f"{scope}/classwise")

    def _keep(self, figure: Figure, name: str, logged: str | None = None) -> None:
        """Write a figure to the folder, and hold it for the loggers.

        Args:
            figure: The figure.
            name: Name of the file, without suffix.
            logged: Name of the figure at the loggers. None is not for them.
        """
        if self._by_epoch:
            name_epochs(figure)
        if self._folder is not None:
            save(figure, self._folder / f"{name}.{ending_of(self.format)}")
        if logged is not None:
            self._logged[logged] = figure


def metric_figures(loop: FederatedLoop) -> Iterator[tuple[str, Figure]]:
    """Yield the last values of the metrics that are matrices or curves, each as the metric object draws it.

    Args:
        loop: The federation, which has been evaluated.

    Yields:
        The name of the metric, and its figure. An object that cannot draw its value is left out.
    """
    by_name = {} if loop.metrics is None else dict(loop.metrics.items())
    for name, value in loop.evaluation.arrays.items():
        # A metric whose value is a dictionary has its parts' names.
        metric = by_name.get(name)
        figure = None if metric is None else plot_metric(metric, value, loop.evaluation.class_names)
        if figure is not None:
            yield name, figure


def ending_of(form: Format) -> str:
    """Return the ending of pictures in a format that has some, without the dot.

    >>> ending_of("metrics"), ending_of("svg")
    ('png', 'svg')
    """
    return "png" if form == "metrics" else form


def values_by_round(history: History, name: str) -> list[float]:
    """Return the values of the rounds up to the last one that has a value, NaN for a round before without one."""
    curve = history.curve(name)
    last = max(curve, default=-1)
    return [curve.get(round_idx, math.nan) for round_idx in history.rounds if round_idx <= last]


def as_shares(key: str, values: list[float]) -> list[float]:
    """Return accuracies as shares in [0, 1], if their values tell that they were logged in percent."""
    if unit_of(key, values) != "percent":
        return values
    return [value / 100 for value in values]


def name_epochs(figure: Figure) -> None:
    """Write "epoch" in place of "round" in a figure's axes and legends."""
    from matplotlib.text import Text  # noqa: PLC0415 - slow to import

    renamed = {"round": "epoch", "last round": "last epoch"}
    for text in figure.findobj(Text):
        words = text.get_text()
        text.set_text(renamed.get(words, words))


def num_samples_of(data: FederatedDataModule, client_id: int) -> int:
    """Return the number of training samples of a client, in all rounds together if its data change."""
    if data.scenario is None:
        return data.size(client_id, round_idx=0)
    return len(data.client_indices("train", client_id))


def label_counts_of(loop: FederatedLoop) -> tuple[Tensor, list[str]] | None:
    """Return the samples by client and class, (N, C), and the names of the classes, or None without classes."""
    if loop.client.module is not None and loop.data.split("train").known_labels is None:
        return None
    # Samples without classes raise an error.
    with suppress(ValueError):
        return loop.data.label_counts, loop.evaluation.class_names
    return None
