"""The CNNs of KnFu's runs."""

from fl_lightning.nets.backbone import Conv, PlainCNN


class KnFuM1(PlainCNN):
    """Two padded 3×3 convolutions (32, 64 channels) with 2×2 pooling, 64 and 32 units, head.

    221,994 parameters for ten classes of 28×28 grey images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width), at least 4×4.

    Raises:
        ValueError: a shape that the net cannot take.

    Note:
        The paper gives no kernel and no pooling; these are ours.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape, [Conv(32, 3, 1), Conv(64, 3, 1)], [64, 32])


class KnFuM2(PlainCNN):
    """Two pairs of padded 3×3 convolutions (16, 32 channels) with 2×2 pooling after each pair, 128 units, head.

    280,218 parameters for ten classes of 32×32 colour images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width), at least 4×4.

    Raises:
        ValueError: a shape that the net cannot take.

    Note:
        The paper gives no kernel and no pooling; these are ours.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        convs = [Conv(16, 3, 1, pool=0), Conv(16, 3, 1), Conv(32, 3, 1, pool=0), Conv(32, 3, 1)]
        super().__init__(num_classes, input_shape, convs, [128])
