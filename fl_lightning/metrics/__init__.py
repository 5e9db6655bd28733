"""torchmetrics classes of what the papers measure, usable in any Lightning project."""

from typing import TYPE_CHECKING

from fl_lightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fl_lightning.metrics.base import FederatedMetric as FederatedMetric
    from fl_lightning.metrics.classwise import ClassGroupAccuracy as ClassGroupAccuracy
    from fl_lightning.metrics.classwise import ClassifierScores as ClassifierScores
    from fl_lightning.metrics.classwise import ClasswiseAccuracy as ClasswiseAccuracy
    from fl_lightning.metrics.classwise import DistributionDistance as DistributionDistance
    from fl_lightning.metrics.classwise import InLocalAccuracy as InLocalAccuracy
    from fl_lightning.metrics.classwise import NormalisedClassAccuracy as NormalisedClassAccuracy
    from fl_lightning.metrics.classwise import OutLocalAccuracy as OutLocalAccuracy
    from fl_lightning.metrics.clients import ALMA as ALMA
    from fl_lightning.metrics.clients import ClientAccuracy as ClientAccuracy
    from fl_lightning.metrics.clients import ClientFairness as ClientFairness
    from fl_lightning.metrics.clients import ForgettingDegree as ForgettingDegree
    from fl_lightning.metrics.clients import InitialAccuracy as InitialAccuracy
    from fl_lightning.metrics.clients import PersonalisedAccuracy as PersonalisedAccuracy
    from fl_lightning.metrics.drift import DriftDiversity as DriftDiversity
    from fl_lightning.metrics.drift import GradientDiversity as GradientDiversity
    from fl_lightning.metrics.drift import WeightAlignment as WeightAlignment
    from fl_lightning.metrics.drift import WeightDivergence as WeightDivergence
    from fl_lightning.metrics.messages import CommunicationCost as CommunicationCost
    from fl_lightning.metrics.messages import EstimatedDistribution as EstimatedDistribution
    from fl_lightning.metrics.rounds import Forgetting as Forgetting
    from fl_lightning.metrics.rounds import PredictionConsistency as PredictionConsistency
    from fl_lightning.metrics.rounds import RoundsToTarget as RoundsToTarget
    from fl_lightning.metrics.rounds import SpeedUp as SpeedUp
    from fl_lightning.metrics.tasks import BackwardTransfer as BackwardTransfer
    from fl_lightning.metrics.tasks import ForwardTransfer as ForwardTransfer
    from fl_lightning.metrics.tasks import Intransigence as Intransigence
    from fl_lightning.metrics.tasks import LearningAccuracy as LearningAccuracy
    from fl_lightning.metrics.tasks import TasksAccuracy as TasksAccuracy
    from fl_lightning.metrics.tasks import TasksForgetting as TasksForgetting
else:
    __getattr__, __dir__ = lazy_names(__name__)
