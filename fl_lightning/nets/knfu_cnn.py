"""The CNNs of KnFu's runs."""

from fl_lightning.nets.backbone import Conv, PlainCNN


class KnFuM1(PlainCNN):
    """Has two padded 3×3 convolutions (32, 64 channels) with 2×2 pooling, 64 and 32 units, head.

    It has 221,994 parameters for ten classes of 28×28 gray images.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 4×4.

    Raises:
        ValueError: The net cannot take the shape.

    Note:
        The paper gives no kernel and no pooling. These are ours.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        convs = [
            Conv(channels=32, kernel=3, padding=1),
            Conv(channels=64, kernel=3, padding=1),
        ]
        super().__init__(num_classes, input_shape, convs=convs, units=[64, 32])


class KnFuM2(PlainCNN):
    """Has two pairs of padded 3×3 convolutions (16, 32 channels) with 2×2 pooling after each pair, 128 units, head.

    It has 280,218 parameters for ten classes of 32×32 color images.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 4×4.

    Raises:
        ValueError: The net cannot take the shape.

    Note:
        The paper gives no kernel and no pooling. These are ours.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        convs = [
            Conv(channels=16, kernel=3, padding=1, pool=0),
            Conv(channels=16, kernel=3, padding=1),
            Conv(channels=32, kernel=3, padding=1, pool=0),
            Conv(channels=32, kernel=3, padding=1),
        ]
        super().__init__(num_classes, input_shape, convs=convs, units=[128])
