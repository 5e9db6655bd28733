"""Residual nets: torchvision's, also with a stem for small images, and thin ones for CIFAR."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.backbone import BodyAndHead, Stages, check_images


class ResNet(BodyAndHead):
    """Wraps torchvision's ResNet of depth 18, 34 or 50, or of depth 10 with one block in each stage.

    Parameters for ten classes of color images: 11,181,642 at depth 18, or 11,173,962 with the stem `cifar`, and
    4,903,242 at depth 10 with that stem. For 100 classes depth 50 has 23,712,932.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).
        depth: Number of layers: 10, 18, 34 or 50.
        stem: First layers. `imagenet`: a 7×7 convolution of stride 2 and max pooling. `cifar`: a 3×3 convolution of
            stride 1.
        running_stats: Whether BatchNorm keeps running statistics. False takes batch statistics in evaluation, too.

    Raises:
        ValueError: The shape is not that of an image, or there is no such depth or stem.

    Source:
        He et al. 2016, arXiv:1512.03385; depth 10 without running statistics: code of arXiv:2106.03097.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        depth: int = 18,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        running_stats: bool = True,
    ) -> None:
        from torchvision.models import resnet  # noqa: PLC0415 - slow to import

        super().__init__()
        channels, *_ = check_images("ResNet", num_classes, input_shape)
        stages = {10: [1, 1, 1, 1], 18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3]}
        if depth not in stages:
            raise ValueError(f"ResNet needs a depth of {', '.join(map(str, stages))}, got {depth}")
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"ResNet needs a stem of imagenet or cifar, got {stem!r}")
        block: Any = resnet.Bottleneck if depth >= 50 else resnet.BasicBlock
        norm = partial(nn.BatchNorm2d, track_running_stats=running_stats)
        self.body = resnet.ResNet(block, stages[depth], num_classes=1, norm_layer=norm)
        width = self.body.fc.in_features
        self.body.fc = nn.Identity()
        if stem == "cifar":
            self.body.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            self.body.maxpool = nn.Identity()
        elif channels != 3:
            self.body.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.head = nn.Linear(width, num_classes)

    def stages(self) -> Stages:
        body = self.body
        before = (body.conv1, body.bn1, body.relu, body.maxpool, body.layer1, body.layer2, body.layer3)
        return Stages(
            before=nn.Sequential(*before),
            last=body.layer4,
            after=nn.Sequential(body.avgpool, nn.Flatten()),
        )


class ThinBlock(nn.Module):
    """Applies two 3×3 convolutions and adds a shortcut.

    If the width grows, the shortcut drops every second pixel and adds zero channels.

    Args:
        before: Number of channels of the input.
        width: Number of channels of the output.
        stride: Stride of the first convolution.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.added = width - before

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            before = self.added // 2
            shortcut = F.pad(shortcut, (0, 0, 0, 0, before, self.added - before))
        # FedAlign runs the block with fewer channels. Otherwise these are all of the shortcut's.
        return torch.relu(out + shortcut[:, : out.shape[1]])


class CIFARResNet(BodyAndHead):
    """Implements He's thin ResNet for small images: widths 16, 32, 64, n blocks each, shortcuts without parameters.

    It has 464,154 parameters for ten classes of color images at depth 32.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).
        depth: Number of layers 6n + 2, such as 20, 32, 44, 56 or 110.

    Raises:
        ValueError: The shape is not that of an image, or the depth is not 6n + 2.

    Source:
        He et al. 2016, arXiv:1512.03385, §4.2, option A.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], depth: int = 32) -> None:
        super().__init__()
        channels, *_ = check_images("CIFARResNet", num_classes, input_shape)
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"CIFARResNet needs a depth of 6n + 2 (20, 32, 44, 56, 110), got {depth}")
        self.body = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        before = 16
        for width in (16, 32, 64):
            for _ in range(depth // 6):
                self.body.append(ThinBlock(before, width, stride=1 if before == width else 2))
                before = width
        self.body.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
        self.blocks = depth // 6
        self.head = nn.Linear(64, num_classes)
        for layer in self.body.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)

    def stages(self) -> Stages:
        end = len(self.body) - 2
        start = end - self.blocks
        return Stages(before=self.body[:start], last=self.body[start:end], after=self.body[end:])


class FedAlignResNet(BodyAndHead):
    """Implements a bottleneck ResNet for small images: widths 64, 128, 256, n blocks each, a 3×3 stem of 16 channels.

    At depth 56 it is FedAlign's ResNet-56, with 591,322 parameters for ten classes of color images.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Shape of an image, (channels, height, width).
        depth: Number of layers 9n + 2, such as 11, 20 or 56.

    Raises:
        ValueError: The shape is not that of an image, or the depth is not 9n + 2.

    Source:
        Code of arXiv:2111.14213; blocks of He et al. 2016, arXiv:1512.03385, with 1×1 convolutions as shortcuts.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], depth: int = 56) -> None:
        from torchvision.models.resnet import Bottleneck  # noqa: PLC0415 - slow to import

        super().__init__()
        channels, *_ = check_images("FedAlignResNet", num_classes, input_shape)
        if depth < 11 or depth % 9 != 2:
            raise ValueError(f"FedAlignResNet needs a depth of 9n + 2 (11, 20, 56), got {depth}")
        self.body = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        before = 16
        for planes, stride in ((16, 1), (32, 2), (64, 2)):
            width = planes * Bottleneck.expansion
            convolution = nn.Conv2d(before, width, kernel_size=1, stride=stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width))
            # The order of the draws: those of the first block come last.
            rest = [Bottleneck(width, planes) for _ in range(depth // 9 - 1)]
            first = Bottleneck(before, planes, stride=stride, downsample=shortcut)
            blocks = [first, *rest]
            self.body.append(nn.Sequential(*blocks))
            before = width
        self.body.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
        self.head = nn.Linear(before, num_classes)
        for layer in self.body.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def stages(self) -> Stages:
        return Stages(before=self.body[:5], last=self.body[5], after=self.body[6:])
