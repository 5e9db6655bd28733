"""Callback that draws a run: its partition, accuracy and class-wise accuracy over the rounds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal, get_args

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.callbacks.tables import is_value
from fl_lightning.federation.history import BY_CLASS, History
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.figures import (
    is_accuracy,
    is_loss,
    plot_accuracy,
    plot_classwise,
    plot_partition,
    plot_sizes,
    plot_values,
)
from fl_lightning.runs.folder import run_folder
from fl_lightning.runs.saved import PARTITION, write_partition
from fl_lightning.utils.files import write_atomically
from fl_lightning.utils.settings import check_at_least, check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["png", "pdf", "svg"]

LARGEST_SHARE = 0.02
"""Share of the run's time that drawing during the run may take."""


class RunPlots(Callback):
    """Writes `partition`, also as csv, when fit starts, `accuracy` and `classwise` during it and at its end.

    A picture without content (no accuracy, no classes) is not written. Of a LightningModule's further values there is
    `values.png`; where the samples have no classes `partition.png` has the clients' sizes.

    Args:
        dirpath: folder of the pictures; None: that of the Trainer's first logger (no logger: none).
        every: least seconds between two drawings during fit; more where drawing would take over 2 % of them.
        format: of the files: png, pdf or svg.
    """

    def __init__(self, dirpath: str | Path | None = None, every: float = 60.0, format: Format = "png") -> None:
        check_at_least(0, "it is in seconds", every=every)
        check_choice(get_args(Format), format=format)
        self.dirpath, self.every, self.format = dirpath, every, format
        self._history = History()
        self._folder: Path | None = None
        self._due = 0.0
        self._stale, self._any_module = False, False

    # --- during fit -------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, self.dirpath)
        self._folder, self._due = None, monotonic() + self.every
        if isinstance(pl_module, FederatedLoop) and trainer.is_global_zero and folder is not None:
            self._folder, self._history = folder, pl_module.recorder.history
            self._any_module = pl_module.client.module is not None
            save(partition_of(pl_module, folder), folder / f"partition.{self.format}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale = True
        now = monotonic()
        if now >= self._due:
            self._draw()
            end = monotonic()
            self._due = end + max(self.every, (end - now) / LARGEST_SHARE)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # the error under way must not be hidden by one of the plots
            self._draw()

    def _draw(self) -> None:
        """Write the pictures, if anything has happened since they were written."""
        if self._folder is None or not self._stale:
            return
        self._stale = False
        curves = dict(zip(self._history.names, self._history.table.T.tolist(), strict=True))
        accuracies = {name: values for name, values in curves.items() if is_accuracy(name)}
        losses = {name: values for name, values in curves.items() if is_loss(name)}
        if accuracies or losses:
            name = f"accuracy.{self.format}"
            save(plot_accuracy(list(self._history.rounds), accuracies, losses), self._folder / name)
        drawn = accuracies.keys() | losses.keys()
        others = {name: values for name, values in curves.items() if name not in drawn and is_value(name)}
        if self._any_module and others:
            save(plot_values(list(self._history.rounds), others), self._folder / f"values.{self.format}")
        evaluated, names, table = self._history.columns(BY_CLASS)
        if evaluated:
            save(plot_classwise(table.numpy(), names, evaluated), self._folder / f"classwise.{self.format}")


def partition_of(loop: FederatedLoop, folder: Path) -> Figure:
    """Draw the clients' samples by class, and write their table; without known classes, draw their numbers."""
    data = loop.data
    if loop.client.module is None or data.split("train").known_labels is not None:
        with suppress(ValueError):  # the samples have no classes
            counts, names = data.label_counts, loop.evaluation.class_names
            write_partition(folder / PARTITION, counts.tolist(), names)
            return plot_partition(counts, names)
    return plot_sizes([data.size(client_id) for client_id in range(data.num_clients)])


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix: a viewer finds the old picture or the new one."""
    write_atomically(path, lambda part: figure.savefig(part, format=path.suffix[1:]))
