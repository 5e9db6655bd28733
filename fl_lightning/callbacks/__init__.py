"""Callbacks that show a run: progress bar, class-wise report, pictures, files of results."""

from fl_lightning.callbacks.bar import RoundProgressBar as RoundProgressBar
from fl_lightning.callbacks.client_checkpoint import ClientCheckpoint as ClientCheckpoint
from fl_lightning.callbacks.clients_report import ClientsReport as ClientsReport
from fl_lightning.callbacks.metric_arrays import MetricArrays as MetricArrays
from fl_lightning.callbacks.plots import RunPlots as RunPlots
from fl_lightning.callbacks.predictions import SavePredictions as SavePredictions
from fl_lightning.callbacks.report import ClasswiseReport as ClasswiseReport
from fl_lightning.callbacks.skipped import SkippedClients as SkippedClients
from fl_lightning.reports.figures import plot_accuracy as plot_accuracy
from fl_lightning.reports.figures import plot_classwise as plot_classwise
from fl_lightning.reports.figures import plot_partition as plot_partition
