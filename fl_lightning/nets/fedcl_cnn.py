"""The CNNs of FedCL's runs."""

from typing import Literal

from fl_lightning.nets.backbone import Conv, PlainCNN, start_weights
from fl_lightning.utils.settings import check_choice

Start = Literal["torch", "xavier"]


class FedCLMNISTCNN(PlainCNN):
    """Two padded convolutions (32, 64 channels) with pooling, 512 units, dropout, head.

    1,663,370 parameters for ten classes of 28×28 grey images (`code`: 1,630,602).

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width), at least 4×4.
        dropout: of the 512 units, in [0, 1).
        layers: `paper` = two 5×5 convolutions with 2×2 pooling; `code` = the second one 3×3, 3×3 pooling of stride 2.
        start: weights before training: torch's, or `xavier` as in the code.

    Raises:
        ValueError: a shape that the net cannot take, or an unknown name of layers.

    Source:
        Yao and Sun 2020, arXiv:2005.12657, §3.1, and its code.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        dropout: float = 0.2,
        layers: Literal["paper", "code"] = "paper",
        start: Start = "torch",
    ) -> None:
        choices = {
            "paper": [Conv(32, 5, 2), Conv(64, 5, 2)],
            "code": [Conv(32, 5, 2, pool=3, pool_padding=1), Conv(64, 3, 1, pool=3, pool_padding=1)],
        }
        check_choice(choices, layers=layers)
        super().__init__(num_classes, input_shape, choices[layers], [512], dropout)
        start_weights(self, start)


class FedCLCIFARCNN(PlainCNN):
    """Two padded 5×5 convolutions (64 channels each) with 3×3 pooling of stride 2, 384 and 192 units, dropout, head.

    1,756,426 parameters for ten classes of 32×32 colour images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        dropout: after both linear layers, in [0, 1).
        start: weights before training: torch's, or `xavier` as in the code.

    Raises:
        ValueError: a shape that the net cannot take.

    Source:
        Yao and Sun 2020, arXiv:2005.12657, §3.1, and its code.
    """

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], dropout: float = 0.2, start: Start = "torch"
    ) -> None:
        conv = Conv(64, 5, 2, pool=3, pool_padding=1)
        super().__init__(num_classes, input_shape, [conv, conv], [384, 192], dropout)
        start_weights(self, start)
