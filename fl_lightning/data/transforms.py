"""Transforms of stored samples into the net's input: scaling, normalization, random crop and flip, Cutout.

Each transform takes a whole batch on its device. Random numbers are drawn from the CPU generator that is passed, so
they are the same on a GPU. Without a generator the random transforms do nothing.
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
    """Divides samples by a number. Integers become float32, and floats keep their type.

    Args:
        divisor: Stored value that becomes 1, > 0.

    Raises:
        ValueError: `divisor` is not positive.
    """

    divisor: float = 255.0

    def __post_init__(self) -> None:
        if not self.divisor > 0:
            raise ValueError(f"the divisor of Scale must be > 0, got {self.divisor}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        floats = x if x.is_floating_point() else x.to(torch.float32)
        return floats / self.divisor


@dataclass(frozen=True)
class AsLong:
    """Turns stored numbers of characters or words into the int64 that an embedding looks up."""

    augments: ClassVar[bool] = False

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x.long()


@dataclass(frozen=True)
class Normalize:
    """Makes (x / divisor − mean) / std of each channel of x (B, C, ...), in one multiplication and one addition.

    Args:
        mean: Mean of x / divisor for each channel, or one for all.
        std: Standard deviation of x / divisor for each channel, or one for all, > 0.
        divisor: Stored value that counts as 1, > 0.

    Raises:
        ValueError: `mean` and `std` differ in length, or a number is out of its range.
    """

    mean: Sequence[float]
    std: Sequence[float]
    divisor: float = 255.0

    def __post_init__(self) -> None:
        if not self.mean:
            raise ValueError("Normalize needs one mean for each channel, or one for all, got none; give such as (0.5,)")
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"Normalize needs one mean and one std per channel, got {len(self.mean)} and {len(self.std)}"
            )
        if not min(self.std) > 0 or not self.divisor > 0:
            raise ValueError(f"std and divisor of Normalize must be > 0, got std {self.std}, divisor {self.divisor}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if len(self.mean) not in {1, x.shape[1]}:
            raise ValueError(f"Normalize has {len(self.mean)} means for samples with {x.shape[1]} channels")
        slopes = tuple(1 / (self.divisor * std) for std in self.std)
        offsets = tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))
        dtype = x.dtype if x.is_floating_point() else torch.float32
        slope = _per_channel(slopes, num_others=x.ndim - 2, dtype=dtype, device=x.device)
        offset = _per_channel(offsets, num_others=x.ndim - 2, dtype=dtype, device=x.device)
        return torch.mul(x, slope).add_(offset)


@dataclass(frozen=True)
class CropFlip:
    """Pads each image, cuts a window of the old size at a random place, and mirrors it half of the time.

    Before `Normalize`, padding with zeros is black, as with torchvision's `RandomCrop` before `ToTensor`.

    Args:
        padding: Number of pixels on every side, ≥ 0. 0 only mirrors.
        reflect: Whether the padding is the image reflected at its outermost pixels, which are not repeated. Otherwise
            it is zeros.

    Raises:
        ValueError: `padding` is negative.
    """

    padding: int = 4
    reflect: bool = False

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"the padding of CropFlip must be >= 0, got {self.padding}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images to as many of the same size.

        Args:
            x: Images (B, C, H, W) of any type.
            generator: Generator of the draws, on the CPU. None returns the images as they are.

        Raises:
            ValueError: Images are reflected that are not larger than the padding.
        """
        if generator is None:
            return x
        batch, channels, height, width = x.shape
        num_places = 2 * self.padding + 1
        draw = torch.rand((3, batch, 1), generator=generator)
        top, left = (draw[:2] * num_places).long()
        is_mirrored = draw[2] < 0.5
        forwards = torch.arange(width)
        rows = top + torch.arange(height)
        columns = left + torch.where(is_mirrored, forwards.flip(0), forwards)
        # Rows and columns number the pixels of the padded image, from which all windows are gathered at once.
        padded = x
        if self.reflect:
            rows = self._reflected(rows, height)
            columns = self._reflected(columns, width)
        elif self.padding:
            padded = F.pad(x, [self.padding] * 4)
        rows = copy_to_device(rows, x.device)
        columns = copy_to_device(columns, x.device)
        index = (rows * padded.shape[3])[:, None, :, None] + columns[:, None, None, :]
        index = index.flatten(2).expand(-1, channels, -1)
        return padded.flatten(2).gather(2, index).view(x.shape)

    def _reflected(self, place: Tensor, length: int) -> Tensor:
        """Return the places in the image of places in the padded image, both int64.

        Args:
            place: Places along one side of the padded image.
            length: Number of pixels of this side in the image.

        Raises:
            ValueError: The image is not larger than the padding.
        """
        if self.padding >= length:
            raise ValueError(
                f"the padding of CropFlip must be smaller than the image to be reflected, got {self.padding} for "
                f"{length} pixels"
            )
        last = length - 1
        after_first = (place - self.padding).abs()
        return last - (last - after_first).abs()


@dataclass(frozen=True)
class ResizedCropFlip:
    """Crops a random rectangle, resizes it to the size of the image, and mirrors it half of the time.

    It does the work of torchvision's RandomResizedCrop and RandomHorizontalFlip in one step for a batch, bilinear
    without antialiasing. A side that would be longer than the image is as long as the image, where torchvision draws
    again.

    Args:
        scale: Least share of the area that is kept, in (0, 1].
        ratio: Largest ratio of the sides, ≥ 1.

    Raises:
        ValueError: A setting is out of its range.
    """

    scale: float = 0.08
    ratio: float = 4 / 3

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1 or not self.ratio >= 1:
            raise ValueError(
                f"ResizedCropFlip needs a scale in (0, 1] and a ratio of at least 1, got {self.scale} and {self.ratio}"
            )

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images to as many of the same size.

        Args:
            x: Images (B, C, H, W), floats, or integers in [0, 255].
            generator: Generator of the draws, on the CPU. None returns the images as they are.
        """
        if generator is None:
            return x
        matrices = copy_to_device(self._drawn_matrices(len(x), generator), x.device)
        images = x if x.is_floating_point() else x.float()
        grid = F.affine_grid(matrices.to(images.dtype), list(images.shape), align_corners=False)
        resized = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        if x.is_floating_point():
            return resized
        return resized.round().clamp(0, 255).to(x.dtype)

    def _drawn_matrices(self, batch: int, generator: torch.Generator) -> Tensor:
        """Draw the maps from places in the new images to places in the old ones, (B, 2, 3). A side is [-1, 1].

        Args:
            batch: Number B of images.
            generator: Generator of the draws.
        """
        draw = torch.rand((5, batch), generator=generator)
        area = self.scale + (1 - self.scale) * draw[0]
        root_of_ratio = torch.exp((draw[1] - 0.5) * math.log(self.ratio))
        width = (area.sqrt() * root_of_ratio).clamp(max=1)
        height = (area.sqrt() * (1 / root_of_ratio)).clamp(max=1)
        center_x = (1 - width) * (2 * draw[2] - 1)
        center_y = (1 - height) * (2 * draw[3] - 1)
        mirror = torch.where(draw[4] < 0.5, -1.0, 1.0)
        zero = torch.zeros(batch)
        to_x = torch.stack([width * mirror, zero, center_x], dim=1)
        to_y = torch.stack([zero, height, center_y], dim=1)
        return torch.stack([to_x, to_y], dim=1)


@dataclass(frozen=True)
class Cutout:
    """Sets a square around a random pixel of each image to 0, cut off at the border.

    After `Normalize`, 0 is the mean color.

    Args:
        size: Side of the square in pixels, ≥ 1.

    Raises:
        ValueError: `size` is below 1.

    Source:
        DeVries and Taylor, arXiv:1708.04552, §3.2.
    """

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of Cutout must be >= 1, got {self.size}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images to as many of the same size.

        Args:
            x: Images (B, C, H, W).
            generator: Generator of the draws, on the CPU. None returns the images as they are.
        """
        if generator is None:
            return x
        batch, _, height, width = x.shape
        draw = torch.rand((2, batch, 1), generator=generator)
        rows = self._covers((draw[0] * height).long(), height)
        columns = self._covers((draw[1] * width).long(), width)
        rows = copy_to_device(rows, x.device)
        columns = copy_to_device(columns, x.device)
        is_cut = rows[:, None, :, None] & columns[:, None, None, :]
        return x * ~is_cut

    def _covers(self, center: Tensor, length: int) -> Tensor:
        """Return which pixels along a side the square covers, (B, length) bool.

        Args:
            center: Pixel of each square's center, (B, 1) int64.
            length: Number of pixels of the side.
        """
        first = center - self.size // 2
        place = torch.arange(length)
        return (place >= first) & (place < first + self.size)


class Compose:
    """Applies one transform after the other, all with the same generator.

    Args:
        transforms: The transforms, in order.
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        for transform in self.transforms:
            x = transform(x, generator)
        return x

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


@cache
def _per_channel(values: tuple[float, ...], *, num_others: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one value per channel, (C, 1, ...). It is copied to the device once, so nobody may edit it.

    Args:
        values: The values, C of them.
        num_others: Number of dimensions behind that of the channels.
        dtype: Type of the values.
        device: Device of the values.
    """
    ones = [1] * num_others
    # A tensor that is made in inference mode could not be used in training afterwards.
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype).view([-1, *ones]).to(device)
