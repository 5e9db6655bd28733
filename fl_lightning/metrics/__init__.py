"""torchmetrics classes for reports by class and by client."""

from fl_lightning.metrics.classwise import ClasswiseAccuracy

__all__ = ["ClasswiseAccuracy"]
