"""Fully connected net."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_shape


class Perceptron(Backbone):
    """Stacks linear layers with ReLU between, for inputs of any shape, which it flattens.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of one input.
        hidden: Numbers of units of the hidden layers, each ≥ 1. Without a layer it is softmax regression.

    Raises:
        ValueError: A size is below 1.
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
        # This takes one call less than self.body(x), which counts in such a small net.
        for layer in self.body:
            x = layer(x)
        return x
