"""MOON's projection head, between any net's features and the classifier."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone
from fl_lightning.nets.perceptron import Perceptron


class Projected(Backbone):
    """A net whose features pass Linear–ReLU–Linear before the head: they are what MOON contrasts.

    Args:
        num_classes: C ≥ 1.
        input_shape: sizes of one input.
        net: factory of the net, whose own head is left out; None: `Perceptron`.
        width: of the projected features, which the head reads.
        hidden: units in between: `full`: as many as the net's features (MOON's code), or `half` as many (FedED's).

    Raises:
        ValueError: a width below 1, or another `hidden`.

    Source:
        Li et al. 2021, arXiv:2103.16257, §4.1, and its code.
    """

    def __init__(
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
        d = self.body.head.in_features
        del self.body.head
        units = d if hidden == "full" else max(1, d // 2)
        self.projection = nn.Sequential(nn.Linear(d, units), nn.ReLU(), nn.Linear(units, width))
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Compute the projected features: (B, *input_shape) -> (B, width)."""
        out: Tensor = self.projection(self.body.features(x))
        return out
