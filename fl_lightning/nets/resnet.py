"""Residual nets: torchvision's, also with a stem for small images, and thin ones for CIFAR."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.backbone import BodyAndHead, Stages, check_images


class ResNet(BodyAndHead):
    """torchvision's ResNet of depth 18, 34 or 50, or 10 (one block per stage).

    For ten classes depth 18 has 11,181,642 parameters with the ImageNet stem and 11,173,962 with that for CIFAR;
    depth 10 with the latter 4,903,242. Depth 50 has 23,712,932 for 100 classes.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        depth: 10, 18, 34 or 50.
        stem: `imagenet` = 7×7 convolution of stride 2 and max pooling; `cifar` = 3×3 of stride 1, no pooling.
        running_stats: whether BatchNorm keeps running statistics; False: batch statistics in evaluation too.

    Raises:
        ValueError: not an image shape, or a depth or stem that does not exist.

    Source:
        He et al. 2016, arXiv:1512.03385; depth 10 without running statistics: code of arXiv:2106.03097.
    """

    def __init__(
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
        return Stages(nn.Sequential(*before), body.layer4, nn.Sequential(body.avgpool, nn.Flatten()))


class ThinBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut.

    Where the width grows, the shortcut drops every second pixel and adds zero channels.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.added = width - before

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return torch.relu(out + shortcut[:, : out.shape[1]])  # all channels, but where the block is made narrower


class CIFARResNet(BodyAndHead):
    """He's thin ResNet for small images: widths 16, 32, 64, n blocks each, shortcuts without parameters.

    464,154 parameters for ten classes of colour images at depth 32.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        depth: 6n + 2: 20, 32, 44, 56, 110.

    Raises:
        ValueError: not an image shape, or a depth of another form.

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
                self.body.append(ThinBlock(before, width, 1 if before == width else 2))
                before = width
        self.body.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
        self.blocks = depth // 6
        self.head = nn.Linear(64, num_classes)
        for layer in self.body.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)

    def stages(self) -> Stages:
        end = len(self.body) - 2
        return Stages(self.body[: end - self.blocks], self.body[end - self.blocks : end], self.body[end:])


class FedAlignResNet(BodyAndHead):
    """Bottleneck ResNet for small images: widths 64, 128, 256, n blocks each, a 3×3 stem of 16 channels.

    At depth 56 FedAlign's ResNet-56, with 591,322 parameters for ten classes of colour images.

    Args:
        num_classes: C ≥ 1.
        input_shape: (channels, height, width).
        depth: 9n + 2: 11, 20, 56.

    Raises:
        ValueError: not an image shape, or a depth of another form.

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
            shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            rest = [Bottleneck(width, planes) for _ in range(depth // 9 - 1)]
            self.body.append(nn.Sequential(Bottleneck(before, planes, stride, shortcut), *rest))
            before = width
        self.body.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
        self.head = nn.Linear(before, num_classes)
        for layer in self.body.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def stages(self) -> Stages:
        return Stages(self.body[:5], self.body[5], self.body[6:])
