"""Callback that writes class-wise accuracies every round, and prints them at the end, or all values without classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score, multiclass_precision, multiclass_recall

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.accuracy import class_accuracy, class_counts
from fl_lightning.metrics.history import BY_CLASS, History
from fl_lightning.metrics.keys import plain_name, split_of
from fl_lightning.reports.saved import CLASSIFICATION
from fl_lightning.reports.task_figures import measure_texts, task_texts
from fl_lightning.reports.tasks import last_rows
from fl_lightning.reports.terminal import AVERAGES, print_classes, print_metrics, print_note, print_rounds, print_texts
from fl_lightning.runs.confusion import CONFUSION, write_confusion
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.runs.plain_fit import epoch_values
from fl_lightning.utils.batches import joined_rows
from fl_lightning.utils.files import write_table
from fl_lightning.utils.run_folder import run_folder
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.text import write_cells

MOST_TASKS = 10
"""Largest number of tasks whose values are printed one by one."""


class ClasswiseReport(Callback):
    """Prints a class-wise table after fit, validate and test, and writes `classwise.csv` during fit.

    `classwise.csv` has a row per evaluated round and a column per class: A_c in [0, 1], empty without samples. At the
    end of fit `classification.csv` gets precision, recall and F1 of each class, and their macro and weighted means. The
    scores belong to the last global model, and the file has the round of this model. `confusion.csv` tells as which
    class the samples of each class are taken, by the model of the last evaluated round and by that of the round with
    the highest accuracy. It is written for up to 50 classes.

    After the fit of a scenario with tasks it also prints the last accuracy on each of up to ten tasks, and the measures
    of the tasks.

    Two kinds of runs have no classes, and the callback prints other values:

    - If the client is a user's module, or the samples have no classes, the logged values of each round.
    - After the fit of a module without a federation, its last values.

    Args:
        dirpath: Folder of the csv files. None is the folder of the Trainer's first logger, and no folder without a
            logger.
        max_rows: Largest number of rows of a printed table, ≥ 1. Of more classes the table shows the worst, and of more
            rounds the last.
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
        self._file = None
        if folder is not None and trainer.is_global_zero:
            self._file = folder / "classwise.csv"
        # The rows of an earlier run stay until there is a row to take their place.
        self._begun = False
        if isinstance(pl_module, FederatedLoop):
            self._prefix = pl_module.data.evaluated_prefix

    def rows_on_disk(self) -> dict[int, dict[str, float]]:
        """Return the rows of `classwise.csv` by round, each by log key."""
        if self._file is None:
            return {}
        table = RoundCSVLogger(self._file.parent, self._file.name)
        prefix = f"{self._prefix}{BY_CLASS}"
        rows = {}
        for round_idx, row in table.rows_on_disk().items():
            rows[round_idx] = {f"{prefix}{name}": accuracy for name, accuracy in row.items()}
        return rows

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
            # No round was left to train.
            if not self._begun:
                self._rewrite(pl_module.recorder.history)
            _, _, table = pl_module.recorder.history.columns(BY_CLASS)
            accuracy = table[-1] if len(table) else None
            self._print(trainer, pl_module, accuracy)
        elif trainer.is_global_zero:
            print_metrics(epoch_values(trainer))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop):
            self._print(trainer, pl_module, pl_module.recorder.class_accuracy)

    def _rewrite(self, history: History) -> None:
        """Write all rows anew. A reader finds the old file or the new one."""
        rounds, names, table = history.columns(BY_CLASS)
        if self._file is not None and rounds:
            header = ["round", *names]
            rows = map(csv_row, rounds, table)
            write_table(self._file, [header, *rows])
            self._begun = True

    # --- printing ---------------------------------------------------------------------------------

    def _print(self, trainer: Trainer, loop: FederatedLoop, accuracy: Tensor | None) -> None:
        """Print the table of the evaluated model, or all values if the samples have no classes.

        Args:
            trainer: The Trainer of the run.
            loop: The federation with the model.
            accuracy: Class accuracies of the last evaluation, (C,). None means that there are none.
        """
        if not trainer.is_global_zero:
            return
        is_global = loop.data.tested_client is None
        splits = {} if accuracy is None or not is_global else loop.evaluation.samples()
        has_labels = all(loop.data.split(name).labels is not None for name in splits)
        if splits and has_labels:
            self._print_classes(trainer, loop, splits)
            self._print_clients(trainer)
        else:
            self._print_values(trainer, loop)
        if trainer.state.fn == "fit":
            print_tasks(loop)
        if loop.evaluation.note:
            print_note(loop.evaluation.note)

    def _print_clients(self, trainer: Trainer) -> None:
        """Print the values of the clients, if an evaluation outside of a fit has made some."""
        if trainer.state.fn == "fit":
            return
        values: dict[str, float] = {}
        for name, value in trainer.callback_metrics.items():
            if split_of(plain_name(name)) == "clients":
                values[name] = float(value)
        if values:
            print_metrics(values)

    def _print_values(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Print the last values, and after fit the values by round."""
        metrics: Mapping[str, Any] = trainer.callback_metrics
        if trainer.state.fn == "fit":
            metrics = loop.round_metrics
            print_rounds(
                loop.recorder.history,
                best=loop.final_key,
                max_rows=self.max_rows,
                directions=loop.recorder.directions,
            )
        print_metrics({name: float(value) for name, value in metrics.items()})

    def _print_classes(self, trainer: Trainer, loop: FederatedLoop, splits: Mapping[str, int]) -> None:
        """Print the class-wise table of the evaluated model, and after fit write `classification.csv`.

        Args:
            trainer: The Trainer of the run.
            loop: The federation with the model.
            splits: Number of samples of each split that a pass evaluates.
        """
        fits = trainer.state.fn == "fit"
        table = ClassTable(loop, splits)
        peak = loop.recorder.known_peak
        if fits:
            # The last round need not have been evaluated.
            best = loop.recorder.peak
            peak = table.accuracy if best is None else torch.fmax(best, table.accuracy)
        num_rounds = loop.recorder.trained_rounds
        if fits and self._file is not None:
            write_table(self._file.with_name(CLASSIFICATION), table.rows(num_rounds - 1))
            if loop.recorder.confusions:
                write_confusion(self._file.with_name(CONFUSION), loop.recorder.confusions, table.names)
        title = "Class-wise accuracy of the global model"
        if num_rounds:
            title += f" {after_rounds(num_rounds)}"
        print_classes(
            title=f"{title} ({split_text(list(splits))})",
            names=table.names,
            samples=table.samples,
            accuracy=table.accuracy,
            peak=peak,
            scores=table.scores,
            max_rows=self.max_rows,
        )


def print_tasks(loop: FederatedLoop) -> None:
    """Print the last values on the tasks of a scenario, if there are few tasks, and the measures of the tasks.

    Args:
        loop: The federation, after its fit.
    """
    if loop.tasks is None:
        return
    for model, matrix in last_rows(loop.recorder.history, loop.tasks.names).items():
        tasks = task_texts(matrix) if len(matrix.names) <= MOST_TASKS else []
        value = "Accuracy" if matrix.are_shares else "Value"
        title = f"{value} on the tasks {after_rounds(matrix.rounds[-1] + 1)} ({model})"
        print_texts(title, paragraphs=[tasks, measure_texts(matrix)])


def after_rounds(num_rounds: int) -> str:
    """Write after how many rounds a model is tested.

    >>> after_rounds(1), after_rounds(10)
    ('after 1 round', 'after 10 rounds')
    """
    plural = "" if num_rounds == 1 else "s"
    return f"after {num_rounds} round{plural}"


class ClassTable:
    """Evaluates the global model class by class, on the samples of a pass. All values belong to one model.

    Args:
        loop: The federation with the model.
        splits: Number of first samples that a pass evaluates, by split.

    Attributes:
        names: Names of the C classes.
        samples: Number of samples of each class, (C,) int64.
        accuracy: Accuracy of each class, (C,) float64, NaN without samples.
        scores: torchmetrics' precision, recall and F1 by name, for each class and as macro and weighted mean, (C + 2,).
    """

    def __init__(self, loop: FederatedLoop, splits: Mapping[str, int]) -> None:
        self.names = loop.evaluation.class_names
        preds, labels = predicted(loop, splits)
        counts = class_counts(preds, labels, len(self.names)).cpu()
        self.samples = counts[1].long()
        self.accuracy = class_accuracy(counts)
        known_scores = {"precision": multiclass_precision, "recall": multiclass_recall, "F1": multiclass_f1_score}
        self.scores: dict[str, Tensor] = {}
        for name, compute in known_scores.items():
            self.scores[name] = with_averages(compute, preds=preds, labels=labels, num_classes=len(self.names))

    def rows(self, round_idx: int) -> list[list[Any]]:
        """Return the lines of `classification.csv`.

        Args:
            round_idx: Number of the round after which the model is evaluated, from 0.
        """
        total = int(self.samples.sum())
        names = [*self.names, *AVERAGES]
        samples = self.samples.tolist() + [total] * len(AVERAGES)
        lines: list[list[Any]] = [["class", "samples", *self.scores, "round"]]
        for row, (name, count) in enumerate(zip(names, samples, strict=True)):
            scores = [float(values[row]) for values in self.scores.values()]
            lines.append([name, count, *scores, round_idx])
        return lines


def split_text(splits: Sequence[str]) -> str:
    """Name the splits whose samples a table is about, at least one.

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
        loop: The federation with the model.
        splits: Number of first samples, by split.

    Returns:
        The predictions and the labels, both (n,) int64 on the CPU.
    """
    inspection = loop.evaluation.inspection
    preds: list[Tensor] = []
    labels: list[Tensor] = []
    with loop.evaluation.evaluated_model():
        for name, size in splits.items():
            split = loop.data.split(name)
            positions = torch.split(torch.arange(size), loop.data.eval_batch_size)
            batches = split.batches(positions, generator=None)
            parts = inspection.over(batches, lambda batch: loop.client(batch[0]).argmax(1).cpu())
            preds.append(joined_rows(parts, num_samples=size, split=name, reader="ClasswiseReport"))
            known: Any = split.labels
            labels.append(known[:size].cpu())
    return torch.cat(preds), torch.cat(labels)


def with_averages(compute: Callable[..., Tensor], preds: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Compute a score of each class, then its averages over the classes, (C + 2,).

    Args:
        compute: Function of torchmetrics that computes the score.
        preds: Predicted classes, (n,).
        labels: Labels, (n,).
        num_classes: Number C of classes.
    """
    parts = []
    for average in ("none", *AVERAGES):
        score = compute(preds, labels, num_classes=num_classes, average=average)
        parts.append(score.reshape(-1))
    return torch.cat(parts)


def csv_row(round_idx: int, accuracy: Tensor) -> list[Any]:
    """Return the cells of a line of `classwise.csv`. The cell of NaN is empty.

    Args:
        round_idx: Number of the round, from 0.
        accuracy: Accuracy of each class, (C,).
    """
    cells = ["" if math.isnan(value) else value for value in accuracy.tolist()]
    return [round_idx, *cells]
