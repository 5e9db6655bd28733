"""The CNN of FedKA's CIFAR-10 runs."""

from fl_lightning.nets.backbone import Conv, PlainCNN


class FedKATCNN(PlainCNN):
    """Two 5×5 convolutions without padding (32, 64 channels) with 2×2 pooling, 512 units, head.

    878,538 parameters for ten classes of 32×32 colour images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width), at least 16×16.

    Raises:
        ValueError: a shape that the net cannot take.

    Note:
        The paper gives no kernel size; 5×5 is that of its author's later code.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape, [Conv(32, 5, 0), Conv(64, 5, 0)], [512])
