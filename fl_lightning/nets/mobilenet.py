"""MobileNetV2 for small images."""

import torch
from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_images

BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, number of blocks, stride of the first."""


def conv_bn(before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Make a convolution that keeps the size at stride 1, and BatchNorm."""
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class InvertedResidual(nn.Module):
    """1×1 expansion, 3×3 per channel, 1×1 projection, and at stride 1 a shortcut.

    To a new width the shortcut is a 1×1 convolution.
    """

    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = before * expansion
        self.body = nn.Sequential(
            *(conv_bn(before, inner), nn.ReLU()),
            *(conv_bn(inner, inner, 3, stride, groups=inner), nn.ReLU()),
            conv_bn(inner, after),
        )
        self.residual = stride == 1
        self.shortcut = conv_bn(before, after) if self.residual and before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + self.shortcut(x) if self.residual else out


class CIFARMobileNetV2(Backbone):
    """MobileNetV2 with strides for 32×32 images, ReLU in place of ReLU6.

    2,296,922 parameters for ten classes of colour images (torchvision's `mobilenet_v2` is another net).

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).

    Raises:
        ValueError: not an image shape.

    Source:
        Sandler et al. 2018, arXiv:1801.04381; the layers: code of Guo et al. 2025 (FedVLS), as described.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, *_ = check_images("CIFARMobileNetV2", num_classes, input_shape)
        self.body = nn.Sequential(conv_bn(channels, 32, 3), nn.ReLU())
        before = 32
        for expansion, width, blocks, stride in BLOCKS:
            for k in range(blocks):
                self.body.append(InvertedResidual(before, width, expansion, stride if k == 0 else 1))
                before = width
        self.body.append(conv_bn(320, 1280)).append(nn.ReLU())
        self.head = nn.Linear(1280, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.mean(self.body(x), dim=(2, 3))
