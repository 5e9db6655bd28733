"""Base of the nets: features, and a linear head that makes logits of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fl_lightning.utils.settings import check_choice, check_numbers


class Stages(NamedTuple):
    """A net cut around its last block: features(x) = after(last(before(x)))."""

    before: nn.Module
    last: nn.Module
    after: nn.Module


class Backbone(nn.Module, ABC):
    """Base of a classifier: logits = head(features(x)).

    A subclass is built from `(num_classes, input_shape, ...)`, sets `head` and defines `features`.
    """

    head: nn.Linear
    """Last layer: (B, D) -> (B, C); D = `head.in_features`."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Compute the head's input, after the last non-linearity: (B, *input_shape) -> (B, D)."""

    def stages(self) -> Stages:
        """Cut the net around its last block, into parts that share its parameters.

        Raises:
            ValueError: if the net does not define its last block.
        """
        raise ValueError(
            f"{type(self).__name__} does not say what its last block is; define its stages, or take ResNet, "
            f"CIFARResNet or FedAlignResNet"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits: (B, *input_shape) -> (B, C), not normalised."""
        logits: Tensor = self.head(self.features(x))
        return logits


def check_shape(net: str, num_classes: int, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Check that `net` can be built for an input shape, and return it as a tuple.

    Raises:
        ValueError: fewer than one class, no dimension, or a dimension below 1.
    """
    shape = tuple(input_shape)
    if num_classes < 1:
        raise ValueError(f"{net} needs num_classes of at least 1, got {num_classes}")
    if not shape or min(shape) < 1:
        raise ValueError(f"{net} needs an input_shape of sizes of at least 1 without the batch, got {shape}")
    return shape


def check_images(net: str, num_classes: int, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Check that `net` can be built for images, and return (channels, height, width).

    Raises:
        ValueError: what `check_shape` refuses, or not three dimensions.
    """
    shape = check_shape(net, num_classes, input_shape)
    if len(shape) != 3:
        raise ValueError(f"{net} needs images: an input_shape (channels, height, width), got {shape}")
    return shape


class BodyAndHead(Backbone):
    """A net whose features are the output of `body`."""

    body: Any

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Conv(NamedTuple):
    """A convolution and ReLU, then (where `pool` > 0) a max pooling of stride 2."""

    channels: int
    kernel: int
    padding: int
    pool: int = 2
    pool_padding: int = 0


class PlainCNN(BodyAndHead):
    """Convolutions, then linear layers, with ReLU after each, and a head.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        convs: the convolutions in order.
        units: of the linear layers before the head.
        dropout: after each of these linear layers, in [0, 1); 0: none.

    Raises:
        ValueError: not an image shape, an image that the layers reduce to nothing, or a dropout out of range.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        convs: Sequence[Conv],
        units: Sequence[int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        net = type(self).__name__
        channels, *sides = shape = check_images(net, num_classes, input_shape)
        check_numbers(dropout=dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"{net} needs a dropout in [0, 1), got {dropout}; 0 has none")
        if any(left(convs, side) < 1 for side in sides):
            least = next(side for side in range(1, 1000) if left(convs, side) >= 1)
            raise ValueError(f"{net} needs images of at least {least}×{least}, got an input_shape of {shape}")
        self.body = nn.Sequential()
        for before, conv in zip([channels, *(conv.channels for conv in convs)], convs, strict=False):
            self.body.append(nn.Conv2d(before, conv.channels, conv.kernel, padding=conv.padding)).append(nn.ReLU())
            if conv.pool:
                self.body.append(nn.MaxPool2d(conv.pool, 2, conv.pool_padding))
        self.body.append(nn.Flatten())
        flat = convs[-1].channels * left(convs, sides[0]) * left(convs, sides[1])
        for before, after in pairwise([flat, *units]):
            self.body.append(nn.Linear(before, after)).append(nn.ReLU())
            if dropout:
                self.body.append(nn.Dropout(dropout))
        self.head = nn.Linear(units[-1], num_classes)


def start_weights(net: nn.Module, start: Literal["torch", "xavier"]) -> None:
    """Draw the weights of all linear and convolutional layers anew, Xavier-uniform with biases 0, or leave torch's.

    Raises:
        ValueError: another name.
    """
    check_choice(("torch", "xavier"), start=start)
    for layer in net.modules() if start == "xavier" else ():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def left(convs: Sequence[Conv], size: int) -> int:
    """Count the pixels that the convolutions leave along one side, 0 where nothing is left."""
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
