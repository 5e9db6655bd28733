"""Callback that saves predictions: the outputs as they are, and a table that a person reads."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import current_communicator
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.utils.files import save_with_digest, write_table
from fl_lightning.utils.round_table import read_cells
from fl_lightning.utils.text import of_cell

Columns = dict[str, Sequence[Any]]
"""The columns of a table, by name, in order."""


LOADER = "dataloader_idx"
"""Name of the column of the index of the loader, if there are several."""

OF_THE_TABLE = ("client", LOADER, "row", "file")
"""Names of the columns that say whose row it is. Outputs have none of them."""


class Answer(NamedTuple):
    """Says what a model's outputs are.

    Args:
        num_classes: Number of classes. None: numbers are predicted, or nothing tells.
        class_names: Names of the classes, in the order of their numbers. None: classes are numbers.
        are_logits: Whether the outputs are the logits, or the numbers, of a `net=`.
    """

    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    are_logits: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the classes, numbers where they have none."""
        if self.class_names is not None:
            return [str(name) for name in self.class_names]
        return [str(number) for number in range(self.num_classes or 0)]


class SavePredictions(BasePredictionWriter):
    """Writes `predictions.pt` and `predictions.csv`, in the order of the samples.

    The first file has the outputs, as one tensor if they are tensors. The second one has a row for each sample: `row`,
    its number from 0, and of new samples the `row` or the `file` that the source names. A `net=` adds `predicted`, the
    class or the number in the units of the target, and `p_<class>`, the probability of each class.

    The outputs of a module's own `predict_step` are written as they are. Numbers (n,) or (n, 1) are `predicted`, and
    whole ones are written by the names of the classes if there are such. Numbers (n, k) are `output_0`, `output_1` and
    so on. A dict of them has columns by its keys, `output_row` of a key `row` (`client` and `file` likewise). There is
    no table of any other output, and a line says so.

    If several loaders are predicted, the outputs are a list with those of each, and the table has a first column
    `dataloader_idx`.

    Args:
        dirpath: Folder of the files.
        filename: Name of the file of the outputs, which `torch.load` reads. The table has the same name with `.csv`.
        by_client: Whether passes by models of several clients follow each other (`loop.deploy`). The files then have
            those of all passes: the outputs by the name of the client, and a first column `client` with that name.
    """

    def __init__(self, dirpath: str | Path, filename: str = "predictions.pt", *, by_client: bool = False) -> None:
        super().__init__("epoch")
        self.by_client = by_client
        self._outputs: dict[str, Any] = {}
        self._tables: dict[str, Columns] = {}
        self._process = os.getpid()
        self._begun = time.time_ns()
        """When the callback was made. Files of its passes are not older."""
        self.path = Path(dirpath) / filename
        self.table = self.path.with_suffix(".csv")
        if self.table == self.path:
            raise ValueError(f"filename must not end with .csv, got {filename}; write predictions.pt")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        num_loaders = len(trainer.num_predict_batches)
        by_loader = list(predictions) if num_loaders > 1 else [predictions]
        outputs: list[Any] = []
        tables: list[Columns | None] = []
        for of_loader in by_loader:
            batches = self._of_all_processes(of_loader, pl_module)
            saved = joined(batches)
            outputs.append(batches if saved is None or isinstance(saved, dict) else saved)
            if trainer.is_global_zero:
                tables.append(self._columns(trainer, pl_module, saved))
        if not trainer.is_global_zero:
            return
        whole = outputs if num_loaders > 1 else outputs[0]
        columns = of_several_loaders(tables) if num_loaders > 1 else tables[0]
        if self.by_client and isinstance(pl_module, FederatedLoop):
            whole, columns = self._of_all_clients(pl_module, whole, columns)
        save_with_digest(whole, self.path)
        if columns is None:
            # A table of an earlier pass has other answers than the new outputs.
            self.table.unlink(missing_ok=True)
            rank_zero_info(
                f"Predictions: {self.path}; they are no numbers (n,) or (n, k) for the n samples, so that there is no "
                f"{self.table.name}"
            )
            return
        write_table(self.table, [list(columns), *zip(*columns.values(), strict=True)])
        if len(self._outputs) <= 1:
            # Further passes write the same files.
            rank_zero_info(f"Predictions: {self.table}; outputs: {self.path}")

    def _of_all_processes(self, predictions: Sequence[Any], pl_module: LightningModule) -> list[Any]:
        """Return the outputs of the batches of a loader in order, at the first process. Others have parts of them."""
        ranks = current_communicator(pl_module.device)
        parts = ranks.gather_to_root(list(predictions))
        outputs: list[Any] = []
        # The processes got the batches in turn.
        for batch_idx in range(sum(map(len, parts))):
            output = parts[batch_idx % ranks.world][batch_idx // ranks.world]
            if output is not None:
                outputs.append(output)
        return outputs

    def _of_all_clients(
        self, loop: FederatedLoop, outputs: Any, columns: Columns | None
    ) -> tuple[dict[str, Any], Columns | None]:
        """Return the outputs and the columns of all passes up to this one, those of a client by its name.

        Args:
            loop: The federation, which has predicted by the model of a client.
            outputs: The outputs of this pass.
            columns: The columns of this pass. None has no table.
        """
        self._read_earlier()
        client_id = loop.data.tested_client
        name = "global" if client_id is None else loop.data.client_names[client_id]
        self._outputs[name] = outputs
        if columns is not None:
            self._tables[name] = columns
        headers = {tuple(table) for table in self._tables.values()}
        if len(self._tables) < len(self._outputs) or len(headers) > 1:
            return self._outputs, None
        rows: dict[str, list[Any]] = {"client": []}
        for client, table in self._tables.items():
            num_rows = len(next(iter(table.values())))
            rows["client"] += [client] * num_rows
            for column, cells in table.items():
                rows.setdefault(column, []).extend(cells)
        return self._outputs, dict(rows)

    def _read_earlier(self) -> None:
        """Read the passes before this one from their files, if each pass has processes of its own, such as forked ones.

        Such a process ends with its pass, and what the callback knew ends with it.
        """
        is_of_own_process = os.getpid() != self._process
        if not is_of_own_process or not self.path.is_file() or self.path.stat().st_mtime_ns < self._begun:
            return
        self._outputs = torch.load(self.path, weights_only=False)
        self._tables = tables_by_client(self.table) if self.table.is_file() else {}

    def _columns(self, trainer: Trainer, pl_module: LightningModule, saved: Any) -> Columns | None:
        """Return the columns of the table. None: the outputs are no rows of the samples.

        Args:
            trainer: The Trainer.
            pl_module: The module that has predicted.
            saved: The outputs of all batches, joined.
        """
        columns = columns_of(saved, answer_of(trainer, pl_module))
        if columns is None:
            return None
        num_rows = len(next(iter(columns.values()), ()))
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        new = data.new if isinstance(data, FederatedDataModule) else None
        if new is None:
            return {"row": range(num_rows), **columns}
        # As a whole number, 1 is one batch. As a float it is all batches.
        limit = trainer.limit_predict_batches
        is_limited = isinstance(limit, int) or limit < 1
        if num_rows > len(new.names) or (num_rows < len(new.names) and not is_limited):
            return None
        return {new.column: new.names[:num_rows], **columns}


def of_several_loaders(tables: Sequence[Columns | None]) -> Columns | None:
    """Return one table of those of several loaders, with the index of the loader in front.

    Returns:
        The columns. None: a loader has no table, or another one than the first.

    >>> of_several_loaders([{"row": [0, 1]}, {"row": [0]}])
    {'dataloader_idx': [0, 0, 1], 'row': [0, 1, 0]}
    """
    whole: dict[str, list[Any]] = {}
    for index, table in enumerate(tables):
        if table is None or (whole and list(whole)[1:] != list(table)):
            return None
        num_rows = len(next(iter(table.values())))
        whole.setdefault(LOADER, []).extend([index] * num_rows)
        for column, cells in table.items():
            whole.setdefault(column, []).extend(cells)
    return dict(whole)


def tables_by_client(path: Path) -> dict[str, Columns]:
    """Read a table of several clients: the columns of each by its name."""
    cells = read_cells(path)
    names = [of_cell(name) for name in cells.pop("client")]
    tables: dict[str, dict[str, list[str]]] = defaultdict(lambda: {column: [] for column in cells})
    for column, values in cells.items():
        for name, value in zip(names, values, strict=True):
            tables[name][column].append(of_cell(value))
    return {name: dict(columns) for name, columns in tables.items()}


def answer_of(trainer: Trainer, pl_module: LightningModule) -> Answer:
    """Return what the outputs of a module are, as far as the data and the module tell."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, FederatedDataModule) or not isinstance(pl_module, FederatedLoop):
        return Answer()
    has_own_step = pl_module.client.module is not None
    # Counting the classes of a user's own data may take a pass over the samples.
    num_classes = data.source.num_classes if has_own_step else data.num_classes
    names = data.source.class_names if data.new is None else data.new.class_names
    return Answer(
        num_classes=num_classes,
        class_names=None if names is None else tuple(names),
        are_logits=not has_own_step,
    )


def joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of all batches: tensors, or dicts of tensors, along the samples. None: they are others.

    >>> joined([torch.zeros(2, 3), torch.zeros(1, 3)]).shape
    torch.Size([3, 3])
    """
    if outputs and all(isinstance(output, Tensor) and output.ndim for output in outputs):
        return torch.cat([output.cpu() for output in outputs])
    if not outputs or not all(isinstance(output, Mapping) for output in outputs):
        return None
    keys = list(outputs[0])
    if any(list(output) != keys for output in outputs):
        return None
    columns = {str(key): joined([output[key] for output in outputs]) for key in keys}
    return None if any(not isinstance(column, Tensor) for column in columns.values()) else columns


def columns_of(saved: Any, answer: Answer) -> Columns | None:
    """Return the columns of a table of outputs. None: they are no numbers (n,) or (n, k) of the samples.

    Args:
        saved: Outputs (n,) or (n, k), or a dict of them by name.
        answer: What they are.

    >>> columns_of(torch.tensor([[0.0, 0.0]]), Answer(2, ("no", "yes"), are_logits=True))
    {'predicted': ['no'], 'p_no': ['0.5'], 'p_yes': ['0.5']}
    >>> columns_of(torch.tensor([[1.5], [2.0]]), Answer(are_logits=True)), columns_of(torch.tensor([1]), Answer(2))
    ({'predicted': ['1.5', '2.0']}, {'predicted': [1]})
    """
    if isinstance(saved, dict):
        return columns_by_key(saved)
    if not isinstance(saved, Tensor) or saved.ndim not in (1, 2) or saved.is_complex():
        return None
    if answer.are_logits and answer.num_classes is not None:
        return columns_of_logits(saved, answer.names)
    values = saved[:, 0] if saved.ndim == 2 and saved.shape[1] == 1 else saved
    if values.ndim == 2:
        return numbered_columns("predicted" if answer.are_logits else "output", values)
    return {"predicted": named(values, answer)}


def columns_of_logits(logits: Tensor, names: Sequence[str]) -> Columns | None:
    """Return the most probable class, and the probability of each class. None: the outputs are no logits (n, C)."""
    if logits.ndim != 2 or logits.shape[1] != len(names):
        return None
    probabilities = logits.double().softmax(1)
    # The largest logit: two probabilities may be equal after rounding.
    columns: Columns = {"predicted": [names[number] for number in logits.argmax(1).tolist()]}
    for name, column in zip(names, probabilities.T, strict=True):
        columns[f"p_{name}"] = [f"{probability:.6g}" for probability in column.tolist()]
    return columns


def columns_by_key(saved: Mapping[str, Tensor]) -> Columns | None:
    """Return the columns of a dict of outputs, by its keys.

    >>> columns_by_key({"mean": torch.tensor([2]), "row": torch.tensor([7])})
    {'mean': [2], 'output_row': [7]}
    """
    columns: Columns = {}
    sizes = {len(value) for value in saved.values()}
    if len(sizes) != 1 or any(value.ndim > 2 or value.is_complex() for value in saved.values()):
        return None
    for key, value in saved.items():
        values = value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value
        name = f"output_{key}" if key in OF_THE_TABLE else key
        columns |= {name: written(values)} if values.ndim == 1 else numbered_columns(key, values)
    return columns


def numbered_columns(name: str, values: Tensor) -> Columns:
    """Return a column for each of the k numbers of a sample, (n, k)."""
    return {f"{name}_{index}": written(column) for index, column in enumerate(values.T)}


def named(values: Tensor, answer: Answer) -> Sequence[Any]:
    """Return values (n,), whole ones by the names of the classes if all are numbers of such."""
    names = answer.names if answer.class_names is not None else []
    is_whole = not values.is_floating_point() and values.dtype != torch.bool
    if names and is_whole and all(0 <= number < len(names) for number in values.tolist()):
        return [names[number] for number in values.tolist()]
    return written(values)


def written(values: Tensor) -> Sequence[Any]:
    """Return the numbers of a column as a table has them, floats with the digits that tell them apart.

    >>> written(torch.tensor([0.1, 2.0])), written(torch.tensor([3]))
    (['0.1', '2.0'], [3])
    """
    if not values.is_floating_point():
        return list(values.tolist())
    exact = values if values.dtype == torch.float64 else values.float()
    return [str(number) for number in exact.numpy()]
