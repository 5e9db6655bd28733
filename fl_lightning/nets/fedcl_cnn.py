"""The CNNs of FedCL's runs."""

from typing import Literal

from fl_lightning.nets.backbone import Conv, PlainCNN, start_weights
from fl_lightning.utils.settings import check_choice

Start = Literal["torch", "xavier"]


class FedCLMNISTCNN(PlainCNN):
    """Has two padded convolutions (32, 64 channels) with pooling, 512 units, dropout, head.

    It has 1,663,370 parameters for ten classes of 28×28 gray images, and 1,630,602 with `layers: code`.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 4×4.
        dropout: Dropout of the 512 units, in [0, 1).
        layers: `paper`: two 5×5 convolutions with 2×2 pooling. `code`: the second convolution is 3×3, and the pooling
            is 3×3 with stride 2.
        start: Weights before training: torch's, or `xavier` as in the code.

    Raises:
        ValueError: The net cannot take the shape, or `layers` is another name.

    Source:
        Yao and Sun 2020, arXiv:2005.12657, §3.1, and its code.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        dropout: float = 0.2,
        layers: Literal["paper", "code"] = "paper",
        start: Start = "torch",
    ) -> None:
        choices = {
            "paper": [
                Conv(channels=32, kernel=5, padding=2),
                Conv(channels=64, kernel=5, padding=2),
            ],
            "code": [
                Conv(channels=32, kernel=5, padding=2, pool=3, pool_padding=1),
                Conv(channels=64, kernel=3, padding=1, pool=3, pool_padding=1),
            ],
        }
        check_choice(choices, layers=layers)
        super().__init__(num_classes, input_shape, convs=choices[layers], units=[512], dropout=dropout)
        start_weights(self, start)


class FedCLCIFARCNN(PlainCNN):
    """Has two padded 5×5 convolutions (64 channels each) with 3×3 pooling of stride 2, 384 and 192 units, and a head.

    It has 1,756,426 parameters for ten classes of 32×32 color images.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).
        dropout: Dropout after both linear layers, in [0, 1).
        start: Weights before training: torch's, or `xavier` as in the code.

    Raises:
        ValueError: The net cannot take the shape.

    Source:
        Yao and Sun 2020, arXiv:2005.12657, §3.1, and its code.
    """

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], dropout: float = 0.2, start: Start = "torch"
    ) -> None:
        conv = Conv(channels=64, kernel=5, padding=2, pool=3, pool_padding=1)
        super().__init__(num_classes, input_shape, convs=[conv, conv], units=[384, 192], dropout=dropout)
        start_weights(self, start)
