"""Callback that writes class-wise accuracies every round, and prints them at the end, or all values without classes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score, multiclass_precision, multiclass_recall

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.history import BY_CLASS, History
from fl_lightning.reports.saved import CLASSIFICATION
from fl_lightning.reports.terminal import AVERAGES, print_classes, print_metrics, print_rounds
from fl_lightning.runs.folder import run_folder
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.runs.plain_fit import epoch_values
from fl_lightning.utils.files import write_table
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.text import write_cells


class ClasswiseReport(Callback):
    """Prints a class-wise table after fit, validate and test, and writes `classwise.csv` during fit.

    The csv has a row per evaluated round and a column per class: A_c in [0, 1], empty without samples. At the end of
    fit `classification.csv` gets precision, recall and F1 of each class, and their macro and weighted means, of the
    last global model. Where the client is a user's module, or the samples have no classes, the values that it logs are
    printed by round in place of all. After the fit of a module without a federation its last values are.

    Args:
        dirpath: folder of the csv; None: that of the Trainer's first logger (no logger: none).
        max_rows: a table of more classes shows so many, the worst; one of more rounds the last ones.
    """

    def __init__(self, dirpath: str | Path | None = None, max_rows: int = 40) -> None:
        check_at_least(1, max_rows=max_rows)
        self.dirpath = dirpath
        self.max_rows = max_rows
        self._file: Path | None = None
        self._begun = False
        self._prefix = "global"

    # --- during fit -------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, self.dirpath)
        self._file = folder / "classwise.csv" if folder is not None and trainer.is_global_zero else None
        self._begun = False  # the rows of an earlier run stay until there is one to take their place
        if isinstance(pl_module, FederatedLoop):
            self._prefix = "val" if pl_module.data.evaluated == "val" else "global"

    def rows_on_disk(self) -> dict[int, dict[str, float]]:
        """Rows of the csv file by round, by log key."""
        if self._file is None:
            return {}
        rows = RoundCSVLogger(self._file.parent, self._file.name).rows_on_disk()
        prefix = f"{self._prefix}{BY_CLASS}"
        return {round_idx: {f"{prefix}{name}": a for name, a in row.items()} for round_idx, row in rows.items()}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._begun and isinstance(pl_module, FederatedLoop):
            self._rewrite(pl_module.recorder.history)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, FederatedLoop):
            return
        accuracy = pl_module.recorder.class_accuracy
        if trainer.state.fn != "fit":
            self._print(trainer, pl_module, accuracy)
        elif self._file is not None and accuracy is not None:
            if not self._begun:
                self._rewrite(pl_module.recorder.history)
                return
            with self._file.open("a", newline="", encoding="utf-8") as file:
                write_cells(file, [csv_row(trainer.current_epoch, accuracy)])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop):
            if not self._begun:  # nothing was left to do
                self._rewrite(pl_module.recorder.history)
            _, _, table = pl_module.recorder.history.columns(BY_CLASS)
            self._print(trainer, pl_module, table[-1] if len(table) else None)
        elif trainer.is_global_zero:
            print_metrics(epoch_values(trainer))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop):
            self._print(trainer, pl_module, pl_module.recorder.class_accuracy)

    def _rewrite(self, history: History) -> None:
        """Write all rows anew: a reader finds the old file or the new one."""
        rounds, names, table = history.columns(BY_CLASS)
        if self._file is not None and rounds:
            write_table(self._file, [["round", *names], *map(csv_row, rounds, table)])
            self._begun = True

    # --- printing ---------------------------------------------------------------------------------

    def _print(self, trainer: Trainer, loop: FederatedLoop, accuracy: Tensor | None) -> None:
        if not trainer.is_global_zero:
            return
        trained_on = loop.data.evaluated
        split = "val" if trained_on == "val" and trainer.state.fn != "test" else "test"
        labels = None if accuracy is None else loop.data.split(split).labels
        if accuracy is None or labels is None:
            if trainer.state.fn == "fit":
                directions = loop.recorder.directions
                print_rounds(loop.recorder.history, loop.final_key, self.max_rows, directions)
            metrics = loop.round_metrics if trainer.state.fn == "fit" else trainer.callback_metrics
            print_metrics({name: float(value) for name, value in metrics.items()})
            return
        peak = loop.recorder.peak if split == trained_on else None
        title = "Class-wise accuracy of the global model"
        if rounds := loop.recorder.evaluated_rounds:
            title += f" after {rounds} round{'s' * (rounds != 1)}"
        labels = labels[: evaluated_samples(trainer, loop)].cpu()
        samples = torch.bincount(labels, minlength=len(accuracy))
        names = loop.evaluation.inspection.class_names
        scores = class_scores(loop, split, labels)
        if self._file is not None and trainer.state.fn == "fit":
            columns = [*names, *AVERAGES], [*samples.tolist(), *[len(labels)] * 2], *map(Tensor.tolist, scores.values())
            write_table(
                self._file.with_name(CLASSIFICATION), [["class", "samples", *scores], *zip(*columns, strict=True)]
            )
        print_classes(f"{title} ({split} split)", names, samples, accuracy, peak, scores, self.max_rows)


def class_scores(loop: FederatedLoop, split: str, labels: Tensor) -> dict[str, Tensor]:
    """Compute torchmetrics' precision, recall and F1 of the global model on the first samples of a split.

    Args:
        loop: with the model.
        split: name of the split.
        labels: of these samples, (n,).

    Returns:
        By name, for each class and as macro and weighted mean, (C + 2,).
    """
    inspection = loop.evaluation.inspection
    positions = torch.split(torch.arange(len(labels)), loop.data.eval_batch_size)
    with loop.evaluation.evaluated_model():
        batches = loop.data.split(split).batches(positions, None)
        preds = torch.cat(inspection.over(batches, lambda batch: loop.client(batch[0]).argmax(1).cpu()))
    num_classes = len(inspection.class_names)

    def score(compute: Callable[..., Tensor]) -> Tensor:
        averages = ("none", *AVERAGES)
        return torch.cat([compute(preds, labels, num_classes, average=average).reshape(-1) for average in averages])

    return {
        "precision": score(multiclass_precision),
        "recall": score(multiclass_recall),
        "F1": score(multiclass_f1_score),
    }


def csv_row(round_idx: int, accuracy: Tensor) -> list[Any]:
    """Give the cells of a line of `classwise.csv`, where NaN is left empty."""
    return [round_idx, *("" if math.isnan(value) else value for value in accuracy.tolist())]


def evaluated_samples(trainer: Trainer, loop: FederatedLoop) -> int | None:
    """Count the samples in the batches that the Trainer's limits leave, None for all."""
    batches = trainer.num_test_batches if trainer.state.fn == "test" else trainer.num_val_batches
    seen = sum(batches or [math.inf]) * loop.data.eval_batch_size * trainer.world_size
    return None if math.isinf(seen) else int(seen)
