"""The CNN of FedKA's CIFAR-10 runs."""

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, two_conv_layers


class FedKATCNN(Backbone):
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
        super().__init__()
        self.body = two_conv_layers("FedKATCNN", num_classes, input_shape, padding=0)
        self.head = nn.Linear(512, num_classes)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out
