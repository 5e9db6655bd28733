"""Base classes of the package's torchmetrics classes."""

from typing import Any

from torchmetrics import Metric

from fl_lightning.utils.settings import check_at_least


class FederatedMetric(Metric):
    """Merges processes and parts of the data exactly, because its states are sums or rows. It is a base of metrics."""

    is_differentiable = False
    full_state_update = False
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw one value, or several values as a curve.

        Args:
            val: What `compute` gave, or a list of such values. None: `compute` is called.
            ax: The matplotlib axes. None: new ones.

        Returns:
            The matplotlib figure and its axes.
        """
        return self._plot(val, ax)


class ClassMetric(FederatedMetric):
    """Keeps the number of classes. It is the base of metrics of classes.

    Args:
        num_classes: Number C of classes, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.
    """

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, num_classes=num_classes)
        self.num_classes = num_classes
