"""What every net offers: features, and a linear head that makes logits of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from torch import Tensor, nn


class Backbone(nn.Module, ABC):
    """logits = head(features(x)).

    A subclass is built from `(num_classes, input_shape, ...)`, sets `head` and defines `features`.
    """

    head: nn.Linear
    """Last layer: (B, D) -> (B, C); D = `head.in_features`."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """What the head reads, after the last non-linearity: (B, *input_shape) -> (B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits: (B, *input_shape) -> (B, C), not normalised."""
        logits: Tensor = self.head(self.features(x))
        return logits


def check_shape(net: str, num_classes: int, input_shape: Sequence[int]) -> tuple[int, ...]:
    """The input shape as a tuple, if `net` can be built for it.

    Raises:
        ValueError: fewer than one class, no dimension, or a dimension below 1.
    """
    shape = tuple(input_shape)
    if num_classes < 1:
        raise ValueError(f"{net} needs num_classes of at least 1, got {num_classes}")
    if not shape or min(shape) < 1:
        raise ValueError(f"{net} needs an input_shape of sizes of at least 1 without the batch, got {shape}")
    return shape


def two_conv_layers(net: str, num_classes: int, input_shape: Sequence[int], padding: int) -> nn.Sequential:
    """Two 5×5 convolutions (32, 64 channels), each with ReLU and 2×2 pooling, then 512 units with ReLU.

    Args:
        net: name for errors.
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        padding: of both convolutions, pixels on each side.

    Returns:
        A module (B, *input_shape) -> (B, 512).

    Raises:
        ValueError: not an image shape, or an image that the layers reduce to nothing.
    """
    shape = check_shape(net, num_classes, input_shape)
    if len(shape) != 3:
        raise ValueError(f"{net} needs images: an input_shape (channels, height, width), got {shape}")
    shrink = 4 - 2 * padding  # pixels that a convolution takes off
    height, width = (((size - shrink) // 2 - shrink) // 2 for size in shape[1:])
    if height < 1 or width < 1:
        least = 2 * (2 + shrink) + shrink
        raise ValueError(f"{net} needs images of at least {least}×{least}, got an input_shape of {shape}")
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * prod((height, width)), 512),
        nn.ReLU(),
    )
