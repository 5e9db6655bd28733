"""Callbacks that show a run: progress bar, class-wise report, pictures, files of results; monitors of clients."""

from fl_lightning.callbacks.bar import RoundProgressBar as RoundProgressBar
from fl_lightning.callbacks.client_checkpoint import ClientCheckpoint as ClientCheckpoint
from fl_lightning.callbacks.client_table import ClientTable as ClientTable
from fl_lightning.callbacks.drift import DriftMonitor as DriftMonitor
from fl_lightning.callbacks.features import FeatureProbe as FeatureProbe
from fl_lightning.callbacks.forgetting import ForgettingMonitor as ForgettingMonitor
from fl_lightning.callbacks.forgetting import PersonalisedAccuracy as PersonalisedAccuracy
from fl_lightning.callbacks.groups import GroupMetrics as GroupMetrics
from fl_lightning.callbacks.landscape import LossLandscape as LossLandscape
from fl_lightning.callbacks.monitor import Monitor as Monitor
from fl_lightning.callbacks.neurons import NeuronActivations as NeuronActivations
from fl_lightning.callbacks.plots import RunPlots as RunPlots
from fl_lightning.callbacks.predicted import PredictedDistribution as PredictedDistribution
from fl_lightning.callbacks.predictions import SavePredictions as SavePredictions
from fl_lightning.callbacks.reduction import SampleReduction as SampleReduction
from fl_lightning.callbacks.report import ClasswiseReport as ClasswiseReport
from fl_lightning.callbacks.skipped import SkippedClients as SkippedClients
from fl_lightning.reports.figures import plot_accuracy as plot_accuracy
from fl_lightning.reports.figures import plot_classwise as plot_classwise
from fl_lightning.reports.figures import plot_partition as plot_partition
