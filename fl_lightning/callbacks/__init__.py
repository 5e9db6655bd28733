"""Callbacks that show a run: progress bar, class-wise report, pictures, files of results."""

from fl_lightning.callbacks.bar import RoundProgressBar
from fl_lightning.callbacks.client_checkpoint import ClientCheckpoint
from fl_lightning.callbacks.figures import plot_accuracy, plot_classwise, plot_partition
from fl_lightning.callbacks.plots import RunPlots
from fl_lightning.callbacks.predictions import SavePredictions
from fl_lightning.callbacks.report import ClasswiseReport

__all__ = [
    "ClasswiseReport",
    "ClientCheckpoint",
    "RoundProgressBar",
    "RunPlots",
    "SavePredictions",
    "plot_accuracy",
    "plot_classwise",
    "plot_partition",
]
