"""Callbacks that measure the clients of a run."""

from typing import TYPE_CHECKING

from fl_lightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fl_lightning.monitors.client_table import ClientTable as ClientTable
    from fl_lightning.monitors.cost import CostMonitor as CostMonitor
    from fl_lightning.monitors.drift import DriftMonitor as DriftMonitor
    from fl_lightning.monitors.features import FeatureProbe as FeatureProbe
    from fl_lightning.monitors.forgetting import ForgettingMonitor as ForgettingMonitor
    from fl_lightning.monitors.forgetting import PersonalisedAccuracy as PersonalisedAccuracy
    from fl_lightning.monitors.groups import GroupMetrics as GroupMetrics
    from fl_lightning.monitors.landscape import LossLandscape as LossLandscape
    from fl_lightning.monitors.monitor import Measurements as Measurements
    from fl_lightning.monitors.monitor import Monitor as Monitor
    from fl_lightning.monitors.neurons import NeuronActivations as NeuronActivations
    from fl_lightning.monitors.predicted import PredictedDistribution as PredictedDistribution
    from fl_lightning.monitors.reduction import ClassCount as ClassCount
    from fl_lightning.monitors.reduction import SampleReduction as SampleReduction
else:
    __getattr__, __dir__ = lazy_names(__name__)
