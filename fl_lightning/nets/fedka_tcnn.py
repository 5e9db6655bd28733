"""The CNN of FedKA's CIFAR-10 runs."""

from fl_lightning.nets.backbone import Conv, PlainCNN


class FedKATCNN(PlainCNN):
    """Has two 5×5 convolutions without padding (32, 64 channels) with 2×2 pooling, 512 units, head.

    It has 878,538 parameters for ten classes of 32×32 color images.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 16×16.

    Raises:
        ValueError: The net cannot take the shape.

    Note:
        The paper gives no kernel size. 5×5 is that of its author's later code.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        convs = [
            Conv(channels=32, kernel=5, padding=0),
            Conv(channels=64, kernel=5, padding=0),
        ]
        super().__init__(num_classes, input_shape, convs=convs, units=[512])
