"""The CNN of FedNTD's runs."""

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, two_conv_layers


class FedNTDCNN(Backbone):
    """Two padded 5×5 convolutions (32, 64 channels) with 2×2 pooling, 512 units, head.

    2,156,490 parameters for ten classes of 32×32 colour images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width), at least 4×4.

    Raises:
        ValueError: a shape that the net cannot take.

    Source:
        Lee et al. 2022, arXiv:2106.03097, App. B, and its code.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = two_conv_layers("FedNTDCNN", num_classes, input_shape, padding=2)
        self.head = nn.Linear(512, num_classes)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out
