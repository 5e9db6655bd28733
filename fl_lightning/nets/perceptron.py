"""Fully connected net."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_shape


class Perceptron(Backbone):
    """Linear layers with ReLU between, for inputs of any shape.

    Args:
        num_classes: C ≥ 1.
        input_shape: sizes of one input, flattened on the way in.
        hidden: units of the hidden layers, each ≥ 1; empty: softmax regression.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        shape = check_shape("Perceptron", num_classes, input_shape)
        if any(units < 1 for units in hidden):
            raise ValueError(f"Perceptron needs hidden layers of at least 1 unit, got hidden={tuple(hidden)}")
        widths = (prod(shape), *hidden)
        self.body = nn.Sequential(nn.Flatten())
        for before, after in pairwise(widths):
            self.body.append(nn.Linear(before, after)).append(nn.ReLU())
        self.head = nn.Linear(widths[-1], num_classes)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.body:  # one call less than self.body(x), which counts in so small a net
            x = layer(x)
        return x
