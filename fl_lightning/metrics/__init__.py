"""torchmetrics classes of what the papers measure, usable in any Lightning project."""

from fl_lightning.metrics.base import FederatedMetric
from fl_lightning.metrics.classwise import (
    ClassGroupAccuracy,
    ClassifierScores,
    ClasswiseAccuracy,
    DistributionDistance,
    InLocalAccuracy,
    NormalisedClassAccuracy,
    OutLocalAccuracy,
)
from fl_lightning.metrics.clients import (
    ALMA,
    ClientAccuracy,
    ClientFairness,
    ForgettingDegree,
    InitialAccuracy,
    PersonalisedAccuracy,
)
from fl_lightning.metrics.drift import DriftDiversity, GradientDiversity, WeightAlignment, WeightDivergence
from fl_lightning.metrics.messages import CommunicationCost, EstimatedDistribution
from fl_lightning.metrics.rounds import Forgetting, PredictionConsistency, RoundsToTarget, SpeedUp

__all__ = [
    "ALMA",
    "ClassGroupAccuracy",
    "ClassifierScores",
    "ClasswiseAccuracy",
    "ClientAccuracy",
    "ClientFairness",
    "CommunicationCost",
    "DistributionDistance",
    "DriftDiversity",
    "EstimatedDistribution",
    "FederatedMetric",
    "Forgetting",
    "ForgettingDegree",
    "GradientDiversity",
    "InLocalAccuracy",
    "InitialAccuracy",
    "NormalisedClassAccuracy",
    "OutLocalAccuracy",
    "PersonalisedAccuracy",
    "PredictionConsistency",
    "RoundsToTarget",
    "SpeedUp",
    "WeightAlignment",
    "WeightDivergence",
]
