"""AutoAugment with the policy that was found on CIFAR-10, for whole batches on their device.

The file imports torchvision, which is slow, so others import it where they use it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import AutoAugment as LibraryPolicies
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms import functional as tv
from torchvision.transforms.v2.functional import equalize

from fl_lightning.utils.devices import copy_to_device

STEPS = 9
"""Largest level of a magnitude. Levels are -STEPS ... STEPS, and stand at level + STEPS in a table."""

Operation = Callable[[Tensor, Tensor], Tensor]
"""Function that changes images (k, C, H, W) uint8, given their levels (k,) int64 on their device."""


class Policy(NamedTuple):
    """Holds the 25 sub-policies, each with two operations.

    Args:
        operations: Numbers of the operations in `OPERATIONS`, (25, 2) int64.
        probabilities: Probability with which each operation is applied, (25, 2).
        levels: Level of the magnitude of each operation, (25, 2) int64. 0 for an operation without a magnitude.
    """

    operations: Tensor
    probabilities: Tensor
    levels: Tensor


@dataclass(frozen=True)
class AutoAugment:
    """Changes each image by the two operations of a sub-policy, which is drawn among 25.

    The results have the distribution of torchvision's `AutoAugment(AutoAugmentPolicy.CIFAR10)`: its sub-policies, each
    operation with its probability and magnitude, either sign of a magnitude that has one, and torchvision's result for
    a uint8 tensor, pixel by pixel. Every image of a batch draws for itself.

    Source:
        Cubuk et al., CVPR 2019, arXiv:1805.09501.
    """

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images to as many of the same size.

        Args:
            x: Images (B, C, H, W) uint8, grey or RGB.
            generator: Generator of the draws, on the CPU. None returns the images as they are.

        Raises:
            ValueError: The images have another type or number of channels.
        """
        if generator is None:
            return x
        if x.dtype != torch.uint8 or x.shape[1] not in {1, 3}:
            raise ValueError(
                f"AutoAugment needs uint8 images with 1 or 3 channels, got {x.dtype} with {x.shape[1]}; put it before "
                f"Scale and Normalize"
            )
        known = policy()
        number = torch.randint(len(known.operations), (len(x),), generator=generator)
        chance, sign = torch.rand((2, len(x), 2), generator=generator)
        # Operation 0 does nothing.
        operations = torch.where(chance <= known.probabilities[number], known.operations[number], 0)
        levels = torch.where(sign < 0.5, -1, 1) * known.levels[number]
        for step in range(2):
            x = apply_operations(x, operation=operations[:, step], level=levels[:, step])
        return x


@cache
def policy() -> Policy:
    """Tabulate torchvision's sub-policies."""
    names = list(OPERATIONS)
    operations: list[int] = []
    probabilities: list[float] = []
    levels: list[int] = []
    for sub_policy in LibraryPolicies(AutoAugmentPolicy.CIFAR10).policies:
        for name, probability, level in sub_policy:
            operations.append(names.index(name))
            probabilities.append(probability)
            levels.append(level or 0)
    return Policy(
        operations=torch.tensor(operations).view(-1, 2),
        probabilities=torch.tensor(probabilities).view(-1, 2),
        levels=torch.tensor(levels).view(-1, 2),
    )


def apply_operations(x: Tensor, operation: Tensor, level: Tensor) -> Tensor:
    """Apply to each image an operation of its own.

    Args:
        x: Images (B, C, H, W) uint8.
        operation: Number in `OPERATIONS` for each image, (B,) int64 on the CPU.
        level: Level of the magnitude for each image, (B,) int64 on the CPU. It is negative for the other direction.
    """
    # Images of one operation are changed together.
    order = operation.argsort(stable=True)
    counts = operation.bincount(minlength=len(OPERATIONS)).tolist()
    order, level = copy_to_device(torch.stack([order, level[order]]), x.device)
    images_by_operation = torch.split(x[order], counts)
    levels_by_operation = torch.split(level, counts)
    changed: list[Tensor] = []
    for apply, images, levels in zip(OPERATIONS.values(), images_by_operation, levels_by_operation, strict=True):
        changed.append(apply(images, levels) if len(images) else images)
    return torch.empty_like(x).index_copy_(0, order, torch.cat(changed))


def _signed(end: float) -> Tensor:
    """Return the magnitudes of all levels, (2·STEPS + 1,). That of the largest level is `end`."""
    magnitudes = torch.linspace(0, end, STEPS + 1)
    return torch.cat([-magnitudes[1:].flip(0), magnitudes])


# --- what a pixel is taken from ------------------------------------------------------------------------------------


@cache
def _origins(name: str, height: int, width: int, device: torch.device) -> Tensor:
    """Return which pixel each pixel is taken from at each level, by torchvision.

    Args:
        name: Name of the operation.
        height: Height H of the images.
        width: Width W of the images.
        device: Device of the images.

    Returns:
        (2·STEPS + 1, H·W) int64. Pixels are numbered from 1. 0 is black.
    """
    pixels = torch.arange(1.0, height * width + 1).view(1, height, width)
    if name == "ShearY":
        moved = [_sheared(pixels, slope) for slope in _signed(0.3).tolist()]
    elif name == "TranslateX":
        moved = [_translated(pixels, right=int(step)) for step in _signed(150 / 331 * width).tolist()]
    elif name == "TranslateY":
        moved = [_translated(pixels, down=int(step)) for step in _signed(150 / 331 * height).tolist()]
    else:
        moved = [tv.rotate(pixels, degrees) for degrees in _signed(30.0).tolist()]
    rows = [image.flatten(1) for image in moved]
    return torch.cat(rows).long().to(device)


def _sheared(image: Tensor, slope: float) -> Tensor:
    """Shear an image (1, H, W) vertically, about its corner."""
    degrees = math.degrees(math.atan(slope))
    sheared: Tensor = tv.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=[0.0, degrees], center=[0, 0])
    return sheared


def _translated(image: Tensor, *, right: int = 0, down: int = 0) -> Tensor:
    """Move an image (1, H, W) by so many pixels."""
    moved: Tensor = tv.affine(image, angle=0.0, translate=[right, down], scale=1.0, shear=[0.0, 0.0])
    return moved


def _move(x: Tensor, level: Tensor, name: str) -> Tensor:
    of_level = _origins(name=name, height=x.shape[2], width=x.shape[3], device=x.device)
    origins = of_level[level + STEPS]
    index = origins[:, None].expand(-1, x.shape[1], -1)
    # A black pixel is put before the others, which are numbered from 1.
    with_black = F.pad(x.flatten(2), (1, 0))
    return with_black.gather(2, index).view_as(x)


# --- what a value becomes ------------------------------------------------------------------------------------------


def _blend(x: Tensor, other: Tensor | float, level: Tensor) -> Tensor:
    """Mix images with what they are at strength 0, at the strength 1 + magnitude."""
    strength = 1 + _values_by_level("blend", x.device)[level + STEPS][:, None, None, None]
    mixed = strength.float() * x + (1 - strength).float() * other
    return mixed.clamp(0, 255).to(torch.uint8)


def _brightness(x: Tensor, level: Tensor) -> Tensor:
    return _blend(x, other=0.0, level=level)


def _color(x: Tensor, level: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x
    return _blend(x, other=tv.rgb_to_grayscale(x), level=level)


def _contrast(x: Tensor, level: Tensor) -> Tensor:
    mean_grey = tv.rgb_to_grayscale(x).float().mean((1, 2, 3), keepdim=True)
    return _blend(x, other=mean_grey, level=level)


def _sharpness(x: Tensor, level: Tensor) -> Tensor:
    if min(x.shape[2:]) <= 2:
        return x
    return _blend(x, other=tv.adjust_sharpness(x, 0.0), level=level)


def _solarize(x: Tensor, level: Tensor) -> Tensor:
    threshold = _values_by_level("solarize", x.device)[level.abs()][:, None, None, None]
    return torch.where(x >= threshold, 255 - x, x)


def _posterize(x: Tensor, level: Tensor) -> Tensor:
    return x & _values_by_level("posterize", x.device)[level.abs()][:, None, None, None]


@cache
def _values_by_level(name: str, device: torch.device) -> Tensor:
    """Return a value for each level: a magnitude of `blend`, a threshold of `solarize`, or a mask of `posterize`."""
    if name == "blend":
        values = _signed(0.9).double()
    elif name == "solarize":
        values = torch.linspace(255, 0, STEPS + 1)
    else:
        # The masks leave 8 ... 4 bits.
        lost_bits = (torch.arange(STEPS + 1) / (STEPS / 4)).round()
        values = (256 - 2**lost_bits).to(torch.uint8)
    return values.to(device)


OPERATIONS: dict[str, Operation] = {
    "Identity": lambda x, _: x,
    "ShearY": partial(_move, name="ShearY"),
    "TranslateX": partial(_move, name="TranslateX"),
    "TranslateY": partial(_move, name="TranslateY"),
    "Rotate": partial(_move, name="Rotate"),
    "Brightness": _brightness,
    "Color": _color,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": lambda x, _: tv.autocontrast(x),
    "Equalize": lambda x, _: equalize(x),
    "Invert": lambda x, _: 255 - x,
}
"""Operations on a whole batch by torchvision's names. The first one does nothing."""
