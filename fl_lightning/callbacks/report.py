"""Callback that writes class-wise accuracies every round, and prints them at the end, or all values without classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score, multiclass_precision, multiclass_recall

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.accuracy import class_accuracy, class_counts
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
    last global model, with the round of this model. Where the client is a user's module, or the samples have no
    classes, the values that it logs are printed by round in place of all. After the fit of a module without a
    federation its last values are.

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
            self._prefix = pl_module.data.evaluated_prefix

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
        """Print the table of the evaluated model, or all values where the samples have no classes.

        Args:
            trainer: of the run.
            loop: with the model.
            accuracy: class accuracies of the last evaluation; None: there are none.
        """
        if not trainer.is_global_zero:
            return
        fits = trainer.state.fn == "fit"
        splits = {} if accuracy is None else loop.evaluation.samples()
        has_labels = all(loop.data.split(name).labels is not None for name in splits)
        if not splits or not has_labels:
            if fits:
                directions = loop.recorder.directions
                print_rounds(loop.recorder.history, loop.final_key, self.max_rows, directions)
            metrics = loop.round_metrics if fits else trainer.callback_metrics
            print_metrics({name: float(value) for name, value in metrics.items()})
            return
        table = ClassTable(loop, splits)
        peak = loop.recorder.known_peak
        if fits:
            # The last round need not have been evaluated.
            best = loop.recorder.peak
            peak = table.accuracy if best is None else torch.fmax(best, table.accuracy)
        rounds = loop.recorder.trained_rounds
        if fits and self._file is not None:
            write_table(self._file.with_name(CLASSIFICATION), table.rows(rounds - 1))
        title = "Class-wise accuracy of the global model"
        if rounds:
            title += f" after {rounds} round{'' if rounds == 1 else 's'}"
        print_classes(
            title=f"{title} ({split_text(list(splits))})",
            names=table.names,
            samples=table.samples,
            accuracy=table.accuracy,
            peak=peak,
            scores=table.scores,
            max_rows=self.max_rows,
        )


class ClassTable:
    """Evaluates the global model class by class, on the samples of a pass, all values of one model and its samples.

    Args:
        loop: with the model.
        splits: by split how many of its first samples a pass evaluates.

    Attributes:
        names: of the C classes.
        samples: of each class, (C,).
        accuracy: of each class, (C,) float64, NaN without samples.
        scores: torchmetrics' precision, recall and F1 by name, for each class and as macro and weighted mean, (C + 2,).
    """

    def __init__(self, loop: FederatedLoop, splits: Mapping[str, int]) -> None:
        self.names = loop.evaluation.class_names
        preds, labels = predicted(loop, splits)
        counts = class_counts(preds, labels, len(self.names)).cpu()
        self.samples = counts[1].long()
        self.accuracy = class_accuracy(counts)
        score = partial(with_averages, preds=preds, labels=labels, num_classes=len(self.names))
        self.scores = {
            "precision": score(multiclass_precision),
            "recall": score(multiclass_recall),
            "F1": score(multiclass_f1_score),
        }

    def rows(self, round_idx: int) -> list[list[Any]]:
        """Give the lines of `classification.csv`.

        Args:
            round_idx: round after which the model is evaluated, from 0.
        """
        total = int(self.samples.sum())
        names = [*self.names, *AVERAGES]
        samples = [*self.samples.tolist(), *(total for _ in AVERAGES)]
        lines: list[list[Any]] = [["class", "samples", *self.scores, "round"]]
        for row, (name, count) in enumerate(zip(names, samples, strict=True)):
            lines.append([name, count, *(float(values[row]) for values in self.scores.values()), round_idx])
        return lines


def split_text(splits: Sequence[str]) -> str:
    """Name the splits whose samples a table is about.

    >>> split_text(["test"]), split_text(["val", "val/dataloader_idx_1", "val/dataloader_idx_2"])
    ('test split', 'val, val/dataloader_idx_1 and val/dataloader_idx_2 splits')
    """
    *others, last = splits
    if not others:
        return f"{last} split"
    return f"{', '.join(others)} and {last} splits"


def predicted(loop: FederatedLoop, splits: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Predict the classes of the first samples of some splits by the evaluated model.

    Args:
        loop: with the model.
        splits: by split the number of samples.

    Returns:
        The predictions and the labels, (n,) on the CPU.
    """
    inspection = loop.evaluation.inspection
    preds: list[Tensor] = []
    labels: list[Tensor] = []
    with loop.evaluation.evaluated_model():
        for name, size in splits.items():
            split = loop.data.split(name)
            positions = torch.split(torch.arange(size), loop.data.eval_batch_size)
            batches = split.batches(positions, None)
            preds += inspection.over(batches, lambda batch: loop.client(batch[0]).argmax(1).cpu())
            known: Any = split.labels
            labels.append(known[:size].cpu())
    return torch.cat(preds), torch.cat(labels)


def with_averages(compute: Callable[..., Tensor], preds: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Compute a score of each class, then its averages over the classes, (C + 2,)."""
    averages = ("none", *AVERAGES)
    return torch.cat([compute(preds, labels, num_classes, average=average).reshape(-1) for average in averages])


def csv_row(round_idx: int, accuracy: Tensor) -> list[Any]:
    """Give the cells of a line of `classwise.csv`, where NaN is left empty."""
    return [round_idx, *("" if math.isnan(value) else value for value in accuracy.tolist())]
