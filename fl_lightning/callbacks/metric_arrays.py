"""Callback that writes and draws the matrices and curves of an evaluation outside of a fit."""

from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.callbacks.plots import Format, ending_of, metric_figures
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.metric_files import FOLDER, write_arrays
from fl_lightning.reports.figures import save
from fl_lightning.utils.text import slug


class MetricArrays(Callback):
    """Writes the values of `model.metrics` that are matrices or curves after `test` and `validate`, and draws them.

    The files are `metrics/test/NAME.npz` and a picture, as the metric object draws its value, or those of
    `metrics/validate`. After `loop.deploy(3)`, which takes the model and the test samples of a client, they are in
    `metrics/test-client-3`. A later evaluation of the same kind replaces them. A fit writes such files itself.

    Args:
        dirpath: Folder of the run.
        format: Format of the pictures: png, pdf or svg. `metrics` is png. `none` writes no pictures.
    """

    def __init__(self, dirpath: str | Path, format: Format = "png") -> None:
        self.dirpath = Path(dirpath)
        self.format = format

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer, pl_module, "validate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "test")

    def _write(self, trainer: Trainer, pl_module: LightningModule, verb: str) -> None:
        """Write and draw the values, if there are any."""
        if not isinstance(pl_module, FederatedLoop) or not trainer.is_global_zero:
            return
        arrays = pl_module.evaluation.arrays
        if not arrays:
            return
        client_id = pl_module.data.tested_client
        kind = verb if client_id is None else f"{verb}-client-{client_id}"
        folder = self.dirpath / FOLDER / kind
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in arrays.items():
            write_arrays(folder / f"{slug(name)}.npz", value)
        if self.format != "none":
            for name, figure in metric_figures(pl_module):
                save(figure, folder / f"{slug(name)}.{ending_of(self.format)}")
        rank_zero_info(f"Matrices and curves: {folder}")
