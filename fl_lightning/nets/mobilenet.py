"""MobileNetV2 for small images."""

import torch
from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_images

BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, number of blocks, and stride of the first block, for each stage."""


def conv_bn(before: int, after: int, *, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Make a convolution that keeps the size of the image at stride 1, and BatchNorm."""
    conv = nn.Conv2d(
        before,
        after,
        kernel_size=kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
    )
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class InvertedResidual(nn.Module):
    """Applies a 1×1 expansion, a 3×3 convolution of each channel, a 1×1 projection, and at stride 1 a shortcut.

    If the number of channels changes, the shortcut is a 1×1 convolution.

    Args:
        before: Number of channels of the input.
        after: Number of channels of the output.
        expansion: Factor of the number of channels in between.
        stride: Stride of the 3×3 convolution.
    """

    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = before * expansion
        self.body = nn.Sequential(conv_bn(before, inner), nn.ReLU())
        self.body.append(conv_bn(inner, inner, kernel=3, stride=stride, groups=inner)).append(nn.ReLU())
        self.body.append(conv_bn(inner, after))
        self.residual = stride == 1
        self.shortcut = conv_bn(before, after) if self.residual and before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + self.shortcut(x) if self.residual else out


class CIFARMobileNetV2(Backbone):
    """Implements MobileNetV2 with strides for 32×32 images, and with ReLU in place of ReLU6.

    It has 2,296,922 parameters for ten classes of color images. torchvision's `mobilenet_v2` is another net.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).

    Raises:
        ValueError: The shape is not that of an image.

    Source:
        Sandler et al. 2018, arXiv:1801.04381; the layers: code of Guo et al. 2025 (FedVLS), as described.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, *_ = check_images("CIFARMobileNetV2", num_classes, input_shape)
        self.body = nn.Sequential(conv_bn(channels, 32, kernel=3), nn.ReLU())
        before = 32
        for expansion, width, num_blocks, first_stride in BLOCKS:
            for block_idx in range(num_blocks):
                stride = first_stride if block_idx == 0 else 1
                self.body.append(InvertedResidual(before, width, expansion=expansion, stride=stride))
                before = width
        self.body.append(conv_bn(320, 1280)).append(nn.ReLU())
        self.head = nn.Linear(1280, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.mean(self.body(x), dim=(2, 3))
