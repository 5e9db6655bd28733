"""The CNNs of FedNTD's runs."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.backbone import Conv, PlainCNN


class FedNTDCNN(PlainCNN):
    """Has two padded 5×5 convolutions (32, 64 channels) with 2×2 pooling, 512 units, head.

    It has 2,156,490 parameters for ten classes of 32×32 color images. With units=(512, 128) it has 2,218,314, and is
    the net whose hidden layers the paper's Table 2 compares.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 4×4.
        units: Numbers of units of the hidden linear layers.

    Raises:
        ValueError: The net cannot take the shape.

    Source:
        Lee et al. 2022, arXiv:2106.03097, App. B, and its code.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], units: Sequence[int] = (512,)) -> None:
        convs = [
            Conv(channels=32, kernel=5, padding=2),
            Conv(channels=64, kernel=5, padding=2),
        ]
        super().__init__(num_classes, input_shape, convs=convs, units=units)


class FedNTDHypersphere(FedNTDCNN):
    """Places the features of FedNTD's CNN on the unit circle, where they can be drawn.

    Linear(512, 2) and a normalization stand before the head.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width), at least 4×4.

    Source:
        Lee et al. 2022, arXiv:2106.03097, App. N.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.body.append(nn.Linear(512, 2))
        self.head = nn.Linear(2, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Compute points on the unit circle: (B, *input_shape) -> (B, 2)."""
        return F.normalize(self.body(x), dim=1)
