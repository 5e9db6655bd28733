"""Callback that saves predictions to a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.distributed import current_communicator
from fl_lightning.utils.files import save_with_digest


class SavePredictions(BasePredictionWriter):
    """Writes `predictions.pt`: the outputs in the order of the samples, as one tensor if they are tensors.

    Args:
        dirpath: Folder of the file.
        filename: Name of the file, which `torch.load` reads.
    """

    def __init__(self, dirpath: str | Path, filename: str = "predictions.pt") -> None:
        super().__init__("epoch")
        self.path = Path(dirpath) / filename

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        ranks = current_communicator(pl_module.device)
        parts = ranks.gather_to_root(list(predictions))
        if not trainer.is_global_zero:
            return
        # The processes got the batches in turn.
        outputs: list[Any] = []
        for batch_idx in range(sum(map(len, parts))):
            output = parts[batch_idx % ranks.world][batch_idx // ranks.world]
            if output is not None:
                outputs.append(output)
        are_tensors = all(isinstance(output, Tensor) and output.ndim for output in outputs)
        saved: Any = outputs
        if outputs and are_tensors:
            saved = torch.cat([output.cpu() for output in outputs])
        save_with_digest(saved, self.path)
        rank_zero_info(f"Predictions: {self.path}")
