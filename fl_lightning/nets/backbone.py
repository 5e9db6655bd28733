"""Base of the nets: features, and a linear head that makes logits of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fl_lightning.utils.settings import check_choice, check_numbers


class Stages(NamedTuple):
    """Holds a net that is cut around its last block: features(x) = after(last(before(x)))."""

    before: nn.Module
    last: nn.Module
    after: nn.Module


class Backbone(nn.Module, ABC):
    """Computes the logits of a classifier as head(features(x)).

    A subclass is built from `(num_classes, input_shape, ...)`, sets `head` and defines `features`.

    Attributes:
        head: The last layer, (B, D) -> (B, C), where D is `head.in_features`.
    """

    head: nn.Linear

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Compute the head's input, after the last non-linearity: (B, *input_shape) -> (B, D)."""

    def stages(self) -> Stages:
        """Cut the net around its last block, into parts that share its parameters.

        Raises:
            ValueError: The net does not define its last block.
        """
        raise ValueError(
            f"{type(self).__name__} does not say what its last block is; define its stages, or take ResNet, "
            f"CIFARResNet or FedAlignResNet"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits, without a softmax: (B, *input_shape) -> (B, C)."""
        logits: Tensor = self.head(self.features(x))
        return logits


def check_shape(net: str, num_classes: int, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Check that a net can be built for an input shape, and return the shape as a tuple.

    Args:
        net: Name of the net, for the error.
        num_classes: Number of classes.
        input_shape: Shape of a sample.

    Raises:
        ValueError: There is no class, no dimension, or a dimension is below 1.
    """
    shape = tuple(input_shape)
    if num_classes < 1:
        raise ValueError(f"{net} needs num_classes of at least 1, got {num_classes}")
    if not shape or min(shape) < 1:
        raise ValueError(f"{net} needs an input_shape of sizes of at least 1 without the batch, got {shape}")
    return shape


def check_images(net: str, num_classes: int, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Check that a net can be built for images, and return (channels, height, width).

    Args:
        net: Name of the net, for the error.
        num_classes: Number of classes.
        input_shape: Shape of a sample.

    Raises:
        ValueError: The shape has not three dimensions, or `check_shape` refuses it.
    """
    shape = check_shape(net, num_classes, input_shape)
    if len(shape) != 3:
        raise ValueError(f"{net} needs images: an input_shape (channels, height, width), got {shape}")
    return shape


class BodyAndHead(Backbone):
    """Takes the output of `body` as its features."""

    body: Any

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Conv(NamedTuple):
    """Describes a convolution and ReLU, and a max pooling of stride 2 if `pool` > 0."""

    channels: int
    kernel: int
    padding: int
    pool: int = 2
    pool_padding: int = 0


class PlainCNN(BodyAndHead):
    """Stacks convolutions, then linear layers, with ReLU after each, and a head.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).
        convs: The convolutions in order.
        units: Numbers of units of the linear layers before the head.
        dropout: Dropout after each of these linear layers, in [0, 1). 0 has none.

    Raises:
        ValueError: The shape is not that of an image, the layers leave no pixel of it, or the dropout is out of range.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        convs: Sequence[Conv],
        units: Sequence[int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        net = type(self).__name__
        shape = check_images(net, num_classes, input_shape)
        channels, height, width = shape
        check_numbers(dropout=dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"{net} needs a dropout in [0, 1), got {dropout}; 0 has none")
        flat = convs[-1].channels * pixels_after(convs, height) * pixels_after(convs, width)
        if not flat:
            least = next(side for side in range(1, 1000) if pixels_after(convs, side))
            raise ValueError(f"{net} needs images of at least {least}×{least}, got an input_shape of {shape}")
        self.body = nn.Sequential()
        for conv in convs:
            self.body.append(nn.Conv2d(channels, conv.channels, conv.kernel, padding=conv.padding)).append(nn.ReLU())
            if conv.pool:
                self.body.append(nn.MaxPool2d(conv.pool, stride=2, padding=conv.pool_padding))
            channels = conv.channels
        self.body.append(nn.Flatten())
        for before, after in pairwise([flat, *units]):
            self.body.append(nn.Linear(before, after)).append(nn.ReLU())
            if dropout:
                self.body.append(nn.Dropout(dropout))
        self.head = nn.Linear(units[-1], num_classes)


def start_weights(net: nn.Module, start: Literal["torch", "xavier"]) -> None:
    """Draw the weights of all linear and convolutional layers anew, or leave them as torch has drawn them.

    Args:
        net: The net, whose weights are changed in place.
        start: `xavier`: Xavier-uniform weights, with biases 0. `torch` leaves the net as it is.

    Raises:
        ValueError: `start` is another name.
    """
    check_choice(("torch", "xavier"), start=start)
    if start == "torch":
        return
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def pixels_after(convs: Sequence[Conv], size: int) -> int:
    """Return how many pixels of `size` along one side remain after convolutions. 0: the image is too small."""
    for conv in convs:
        size += 2 * conv.padding - conv.kernel + 1
        if conv.pool:
            size = (size + 2 * conv.pool_padding - conv.pool) // 2 + 1
        if size < 1:
            return 0
    return size


NetFactory = Callable[[int, tuple[int, ...]], Backbone] | Callable[[int, tuple[int, ...]], nn.Module]
"""Makes a net, given the number of classes and the shape of a sample.

The net may be any module. A configuration file names a `Backbone` by its class alone, and another module by its import
path: a short name is looked up among the subclasses of the first kind only, since many packages have a `ResNet`.
"""
