"""MOON's projection head, between any net's features and the classifier."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone
from fl_lightning.nets.perceptron import Perceptron


class Projected(Backbone):
    """Passes the features of a net through Linear–ReLU–Linear before the head. MOON contrasts the result.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of one input.
        net: Factory of the net, whose own head is left out. None is `Perceptron`.
        width: Number of projected features, which the head reads, ≥ 1.
        hidden: Number of units between the linear layers. `full`: as many as the net has features (MOON's code).
            `half`: half as many (FedED's).

    Raises:
        ValueError: The width is below 1, or `hidden` is another name.

    Source:
        Li et al. 2021, arXiv:2103.16257, §4.1, and its code.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        net: Callable[[int, tuple[int, ...]], Backbone] | None = None,
        width: int = 256,
        hidden: Literal["full", "half"] = "full",
    ) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"Projected needs a width of at least 1, got {width}")
        if hidden not in ("full", "half"):
            raise ValueError(f"Projected needs hidden of full or half, got {hidden!r}")
        self.body = (net or Perceptron)(num_classes, input_shape)
        num_features = self.body.head.in_features
        del self.body.head
        units = num_features if hidden == "full" else max(1, num_features // 2)
        self.projection = nn.Sequential(nn.Linear(num_features, units), nn.ReLU(), nn.Linear(units, width))
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Compute the projected features: (B, *input_shape) -> (B, width)."""
        out: Tensor = self.projection(self.body.features(x))
        return out
