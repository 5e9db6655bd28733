"""The server's side of a round: rules, server modules, and transforms of updates on their way to them."""

from fl_lightning.aggregation.guard import NonFiniteGuard
from fl_lightning.aggregation.server_parts import (
    Aggregator,
    GatheringAggregator,
    PartialAggregate,
    ServerModule,
    StateBuffers,
)
from fl_lightning.aggregation.transforms import NormClip, UpdateTransform

__all__ = [
    "Aggregator",
    "GatheringAggregator",
    "NonFiniteGuard",
    "NormClip",
    "PartialAggregate",
    "ServerModule",
    "StateBuffers",
    "UpdateTransform",
]
