"""torchmetrics classes for reports by class and by client."""

from fl_lightning.metrics.classwise import ClasswiseAccuracy, class_accuracies, count_classes

__all__ = ["ClasswiseAccuracy", "class_accuracies", "count_classes"]
