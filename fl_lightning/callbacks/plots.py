"""Callback that draws a run: its partition, accuracy and class-wise accuracy over the rounds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.federation.history import BY_CLASS, History
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.figures import is_accuracy, is_loss, plot_accuracy, plot_classwise, plot_partition
from fl_lightning.runs.folder import run_folder
from fl_lightning.runs.saved import PARTITION, write_partition
from fl_lightning.utils.files import write_atomically
from fl_lightning.utils.settings import check_at_least

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_SHARE = 0.02
"""Share of the run's time that drawing during the run may take."""


class RunPlots(Callback):
    """Writes `partition.png` and `.csv` when fit starts, `accuracy.png` and `classwise.png` during it and at its end.

    A picture without content (no labels, no accuracy) is not written.

    Args:
        dirpath: folder of the pictures; None: that of the Trainer's first logger (no logger: none).
        every: least seconds between two drawings during fit; more where drawing would take over 2 % of them.
    """

    def __init__(self, dirpath: str | Path | None = None, every: float = 60.0) -> None:
        check_at_least(0, "it is in seconds", every=every)
        self.dirpath, self.every = dirpath, every
        self._history = History()
        self._folder: Path | None = None
        self._due = 0.0
        self._stale = False

    # --- during fit -------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, self.dirpath)
        self._folder, self._due = None, monotonic() + self.every
        if isinstance(pl_module, FederatedLoop) and trainer.is_global_zero and folder is not None:
            self._folder, self._history = folder, pl_module.recorder.history
            with suppress(ValueError):  # the samples have no classes
                counts = pl_module.data.label_counts
                names = pl_module.evaluation.class_names
                write_partition(folder / PARTITION, counts.tolist(), names)
                save(plot_partition(counts, names), folder / "partition.png")

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
            save(plot_accuracy(list(self._history.rounds), accuracies, losses), self._folder / "accuracy.png")
        evaluated, names, table = self._history.columns(BY_CLASS)
        if evaluated:
            save(plot_classwise(table.numpy(), names, evaluated), self._folder / "classwise.png")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG: a viewer finds the old picture or the new one."""
    write_atomically(path, lambda part: figure.savefig(part, format="png"))
