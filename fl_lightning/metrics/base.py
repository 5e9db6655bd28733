"""Base class of the package's torchmetrics classes."""

from typing import Any

from torchmetrics import Metric

from fl_lightning.utils.settings import check_at_least


class FederatedMetric(Metric):
    """A metric whose states are sums or rows, so that processes and parts of the data are merged exactly."""

    is_differentiable = False
    full_state_update = False
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw one value, or several as a curve.

        Args:
            val: what `compute` gave, or a list of such values; None: `compute` is called.
            ax: matplotlib axes to draw on; None: new ones.

        Returns:
            The matplotlib figure and its axes.
        """
        return self._plot(val, ax)


class ClassMetric(FederatedMetric):
    """A metric of classes.

    Args:
        num_classes: C ≥ 1.
        kwargs: of `torchmetrics.Metric`.
    """

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, num_classes=num_classes)
        self.num_classes = num_classes
