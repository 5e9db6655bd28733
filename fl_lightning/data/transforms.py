"""Transforms of stored samples into the net's input: scaling, normalisation, random crop and flip, Cutout.

Each transform takes a whole batch on its device. Random numbers are drawn from the CPU generator that is passed, so
they are the same on a GPU; without a generator the random transforms do nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.data.splits import Transform
from fl_lightning.utils.devices import copy_to_device


@dataclass(frozen=True)
class Scale:
    """x / divisor, with integers as float32 and floats in their own type.

    Args:
        divisor: the stored value that becomes 1, > 0.
    """

    divisor: float = 255.0

    def __post_init__(self) -> None:
        if not self.divisor > 0:
            raise ValueError(f"the divisor of Scale must be > 0, got {self.divisor}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return (x if x.is_floating_point() else x.to(torch.float32)) / self.divisor


@dataclass(frozen=True)
class AsLong:
    """Stored numbers of characters or words as the int64 that an embedding looks up."""

    augments: ClassVar[bool] = False

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x.long()


@dataclass(frozen=True)
class Normalize:
    """(x / divisor − mean) / std for each channel of x (B, C, ...), in one multiplication and one addition.

    Args:
        mean: of x / divisor, one per channel (or one for all).
        std: of x / divisor, as many, each > 0.
        divisor: the stored value that counts as 1, > 0.
    """

    mean: Sequence[float]
    std: Sequence[float]
    divisor: float = 255.0

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"Normalize needs one mean and one std per channel, got {len(self.mean)} and {len(self.std)}"
            )
        if not (min(self.std) > 0 and self.divisor > 0):
            raise ValueError(f"std and divisor of Normalize must be > 0, got std {self.std}, divisor {self.divisor}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if len(self.mean) not in {1, x.shape[1]}:
            raise ValueError(f"Normalize has {len(self.mean)} means for samples with {x.shape[1]} channels")
        slope = tuple(1 / (self.divisor * std) for std in self.std)
        offset = tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))
        dtype = x.dtype if x.is_floating_point() else torch.float32
        a = _per_channel(slope, x.ndim - 2, dtype, x.device)
        b = _per_channel(offset, x.ndim - 2, dtype, x.device)
        return torch.mul(x, a).add_(b)


@dataclass(frozen=True)
class CropFlip:
    """Pad each image, cut a window of the old size at a random place, mirror it half of the time.

    Put before `Normalize`, padding with zeros is black, as with torchvision's `RandomCrop` before `ToTensor`.

    Args:
        padding: pixels on every side, >= 0; 0: only the mirroring.
        reflect: pad with the image reflected at its outermost pixels, which are not repeated, in place of zeros.
    """

    padding: int = 4
    reflect: bool = False

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"the padding of CropFlip must be >= 0, got {self.padding}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images (B, C, H, W), any type, to as many of the same size."""
        if generator is None:
            return x
        batch, channels, height, width = x.shape
        places = 2 * self.padding + 1
        draw = torch.rand((3, batch, 1), generator=generator)
        top, left = (draw[:2] * places).long()
        rows = top + torch.arange(height)
        columns = left + torch.where(draw[2] < 0.5, torch.arange(width - 1, -1, -1), torch.arange(width))
        padded = x
        if self.reflect:
            rows = self._reflected(rows, height)
            columns = self._reflected(columns, width)
        elif self.padding:
            padded = F.pad(x, (self.padding,) * 4)
        rows, columns = (copy_to_device(place, x.device) for place in (rows, columns))
        index = (rows * padded.shape[3])[:, None, :, None] + columns[:, None, None, :]
        index = index.flatten(2).expand(-1, channels, -1)
        return padded.flatten(2).gather(2, index).view(batch, channels, height, width)

    def _reflected(self, place: Tensor, length: int) -> Tensor:
        """Turn places in the padded image into places in the image."""
        if self.padding >= length:
            raise ValueError(
                f"the padding of CropFlip must be smaller than the image to be reflected, got {self.padding} for "
                f"{length} pixels"
            )
        return length - 1 - (length - 1 - (place - self.padding).abs()).abs()


@dataclass(frozen=True)
class ResizedCropFlip:
    """Crop a random rectangle, resize it to the size of the image, and mirror it half of the time.

    torchvision's RandomResizedCrop and RandomHorizontalFlip in one step for a batch, bilinear without antialiasing. A
    side that would be longer than the image is as long as the image; torchvision draws again.

    Args:
        scale: least share of the area that is kept, in (0, 1].
        ratio: largest ratio of the sides, ≥ 1.
    """

    scale: float = 0.08
    ratio: float = 4 / 3

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1 or not self.ratio >= 1:
            raise ValueError(
                f"ResizedCropFlip needs a scale in (0, 1] and a ratio of at least 1, got {self.scale} and {self.ratio}"
            )

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images (B, C, H, W), any type, to as many of the same size."""
        if generator is None:
            return x
        draw = torch.rand((5, len(x)), generator=generator)
        area = self.scale + (1 - self.scale) * draw[0]
        root = torch.exp((draw[1] - 0.5) * math.log(self.ratio))
        width, height = ((area.sqrt() * side).clamp(max=1) for side in (root, 1 / root))
        left = (1 - width) * (2 * draw[2] - 1)
        top = (1 - height) * (2 * draw[3] - 1)
        mirror = torch.where(draw[4] < 0.5, -1.0, 1.0)
        zero = torch.zeros(len(x))
        rows = torch.stack([torch.stack([width * mirror, zero, left], 1), torch.stack([zero, height, top], 1)], 1)
        images = x if x.is_floating_point() else x.float()
        grid = F.affine_grid(copy_to_device(rows, x.device).to(images.dtype), list(images.shape), align_corners=False)
        resized = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        return resized if x.is_floating_point() else resized.round().clamp(0, 255).to(x.dtype)


@dataclass(frozen=True)
class Cutout:
    """Set a square around a random pixel of each image to 0, cut off at the border.

    Put after `Normalize`, 0 is the mean colour.

    Args:
        size: side of the square in pixels, >= 1.

    Source:
        DeVries and Taylor, arXiv:1708.04552, §3.2.
    """

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of Cutout must be >= 1, got {self.size}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images (B, C, H, W) to as many of the same size."""
        if generator is None:
            return x
        batch, _, height, width = x.shape
        draw = torch.rand((2, batch, 1), generator=generator)
        rows = self._covers((draw[0] * height).long(), height)
        columns = self._covers((draw[1] * width).long(), width)
        rows, columns = (copy_to_device(place, x.device) for place in (rows, columns))
        return x * ~(rows[:, None, :, None] & columns[:, None, None, :])

    def _covers(self, centre: Tensor, length: int) -> Tensor:
        first = centre - self.size // 2
        place = torch.arange(length)
        return (place >= first) & (place < first + self.size)


class Compose:
    """One transform after the other, all on the same generator."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        for transform in self.transforms:
            x = transform(x, generator)
        return x

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


@cache
def _per_channel(values: tuple[float, ...], trailing: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Get the values as (C, 1, ...), copied to the device once and not to be edited."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype).view(-1, *[1] * trailing).to(device)
