"""Callback that draws a run: its partition, accuracy and class-wise accuracy over the rounds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.callbacks.figures import plot_accuracy, plot_classwise, plot_partition
from fl_lightning.callbacks.history import History, run_folder
from fl_lightning.callbacks.report import ClasswiseReport
from fl_lightning.utils.settings import check_at_least
from fl_lightning.loop import FederatedLoop
from fl_lightning.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_SHARE = 0.02
"""Of the run's time that drawing during it may take."""


class RunPlots(Callback):
    """Writes `partition.png` when fit starts, `accuracy.png` and `classwise.png` during it and at its end.

    A picture without content (no labels, no accuracy) is not written.

    Args:
        dirpath: folder of the pictures; None: that of the Trainer's first logger (no logger: none).
        every: least seconds between two drawings during fit; more where drawing would take over 2 % of them.
    """

    def __init__(self, dirpath: str | Path | None = None, every: float = 60.0) -> None:
        check_at_least(0, "it is in seconds", every=every)
        self.dirpath, self.every = dirpath, every
        self.curves: dict[str, dict[int, float]] = {}
        self.history = History()
        self._shared: History | None = None
        self._folder: Path | None = None
        self._due = 0.0
        self._stale = False

    @property
    def classwise(self) -> History:
        """Class accuracies by round: those of the run's ClasswiseReport, where there is one."""
        return self.history if self._shared is None else self._shared

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        reports = [callback for callback in callbacks if isinstance(callback, ClasswiseReport)]
        self._shared = reports[0].history if reports else None

    # --- during fit -------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = trainer.current_epoch
        self.history.drop(first)
        self.curves = {
            name: {r: value for r, value in curve.items() if r < first} for name, curve in self.curves.items()
        }
        folder = run_folder(trainer, self.dirpath)
        self._folder = folder if trainer.is_global_zero and isinstance(pl_module, FederatedLoop) else None
        self._due = monotonic() + self.every
        if self._folder is not None and isinstance(pl_module, FederatedLoop):
            with suppress(ValueError):  # the samples have no classes
                counts = pl_module.data.label_counts
                save(plot_partition(counts, pl_module.evaluation.class_names), self._folder / "partition.png")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not isinstance(pl_module, FederatedLoop):
            return
        evaluation = pl_module.evaluation
        if self._shared is None and evaluation.class_accuracy is not None:
            self.history.record(trainer.current_epoch, evaluation.class_accuracy, evaluation.class_names)
        self._record(trainer.current_epoch, pl_module.row)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            return
        self._record(trainer.current_epoch, pl_module.row)
        now = monotonic()
        if now >= self._due:
            self._draw()
            end = monotonic()
            self._due = end + max(self.every, (end - now) / LARGEST_SHARE)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # the one under way is to be seen
            self._draw()

    def _record(self, round_idx: int, row: dict[str, float]) -> None:
        self._stale = True
        for name, value in row.items():
            if is_accuracy(name) or is_loss(name):
                self.curves.setdefault(name, {})[round_idx] = value

    def _draw(self) -> None:
        """Write the pictures, if anything has happened since they were written."""
        if self._folder is None or not self._stale:
            return
        self._stale = False
        rounds = sorted({round_idx for curve in self.curves.values() for round_idx in curve})
        nan = float("nan")
        values = {name: [curve.get(r, nan) for r in rounds] for name, curve in self.curves.items()}
        accuracies = {name: curve for name, curve in values.items() if is_accuracy(name)}
        losses = {name: curve for name, curve in values.items() if is_loss(name)}
        if accuracies or losses:
            save(plot_accuracy(rounds, accuracies, losses), self._folder / "accuracy.png")
        history = self.classwise
        if len(history):
            figure = plot_classwise(history.table.numpy(), history.names, history.rounds)
            save(figure, self._folder / "classwise.png")

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": {name: dict(curve) for name, curve in self.curves.items()},
            "history": None if self._shared is not None else self.history.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curves = state_dict["curves"]
        if state_dict["history"] is not None:
            self.history.load_state_dict(state_dict["history"])


def is_accuracy(name: str) -> bool:
    """Whether a key's values are accuracies in [0, 1], as `global/acc` or a user's `val_acc`."""
    return name.endswith(("acc", "accuracy", "alma", "local/initial", "local/personalised"))


def is_loss(name: str) -> bool:
    """Whether a key's values are losses."""
    return name.endswith("loss")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG: a viewer finds the old picture or the new one."""
    write_atomically(path, lambda part: figure.savefig(part, format="png"))
