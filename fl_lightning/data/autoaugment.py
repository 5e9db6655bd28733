"""AutoAugment with the policy that was found on CIFAR-10, for whole batches on their device.

Imports torchvision, so it is imported where it is used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import AutoAugment as LibraryPolicies
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms import functional as tv
from torchvision.transforms.v2.functional import equalize  # of a whole batch at once

from fl_lightning.utils.devices import copy_to_device

STEPS = 9
"""Levels of a magnitude are -STEPS ... STEPS, and stand at level + STEPS in a table."""

Operation = Callable[[Tensor, Tensor], Tensor]
"""Changes images (k, C, H, W) uint8, given the levels (k,) on their device."""


@dataclass(frozen=True)
class AutoAugment:
    """Change each image by two operations in a row, those of one of 25 sub-policies that is drawn at random.

    torchvision's `AutoAugment(AutoAugmentPolicy.CIFAR10)` in distribution: its sub-policies, each operation with its
    probability and magnitude, the magnitude of either sign where it has one, and its results for uint8 tensors,
    pixel by pixel. Every image of a batch draws for itself.

    Source:
        Cubuk et al., CVPR 2019, arXiv:1805.09501.
    """

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform images (B, C, H, W) uint8, grey or RGB, to as many of the same size.

        Raises:
            ValueError: images of another type or number of channels.
        """
        if generator is None:
            return x
        if x.dtype != torch.uint8 or x.shape[1] not in {1, 3}:
            raise ValueError(
                f"AutoAugment needs uint8 images with 1 or 3 channels, got {x.dtype} with {x.shape[1]}; put it before "
                f"Scale and Normalize"
            )
        operations, probabilities, levels = policy()
        number = torch.randint(len(operations), (len(x),), generator=generator)
        chance, sign = torch.rand((2, len(x), 2), generator=generator)
        applied = torch.where(chance <= probabilities[number], operations[number], 0)
        signed = torch.where(sign < 0.5, -1, 1) * levels[number]
        for step in range(2):
            x = apply_operations(x, applied[:, step], signed[:, step])
        return x


@cache
def policy() -> tuple[Tensor, Tensor, Tensor]:
    """Tabulate the sub-policies: numbers in `OPERATIONS` int64, probabilities and levels int64, (25, 2) each."""
    rows = LibraryPolicies(AutoAugmentPolicy.CIFAR10).policies
    names = list(OPERATIONS)
    operations = torch.tensor([[names.index(name) for name, _, _ in row] for row in rows])
    probabilities = torch.tensor([[probability for _, probability, _ in row] for row in rows])
    return operations, probabilities, torch.tensor([[level or 0 for _, _, level in row] for row in rows])


def apply_operations(x: Tensor, operation: Tensor, level: Tensor) -> Tensor:
    """Apply to each image an operation of its own.

    Args:
        x: images (B, C, H, W) uint8.
        operation: (B,) int64 on the CPU, numbers in `OPERATIONS`.
        level: (B,) int64 on the CPU, of the magnitude, negative for the other direction.
    """
    order = operation.argsort(stable=True)
    counts = operation.bincount(minlength=len(OPERATIONS)).tolist()
    order, level = copy_to_device(torch.stack([order, level[order]]), x.device)
    groups = zip(OPERATIONS.values(), torch.split(x[order], counts), torch.split(level, counts), strict=True)
    changed = [apply(images, levels) if len(images) else images for apply, images, levels in groups]
    return torch.empty_like(x).index_copy_(0, order, torch.cat(changed))


def _signed(end: float) -> Tensor:
    """Tabulate the magnitudes of all levels, whose highest one has the magnitude `end`."""
    magnitudes = torch.linspace(0, end, STEPS + 1)
    return torch.cat([-magnitudes[1:].flip(0), magnitudes])


# --- what a pixel is taken from ------------------------------------------------------------------------------------


@cache
def _origins(name: str, height: int, width: int, device: torch.device) -> Tensor:
    """Ask torchvision which pixel each pixel is taken from at each level, (levels, H·W) int64, 0 for black."""
    pixels = torch.arange(1.0, height * width + 1).view(1, height, width)
    affine = partial(tv.affine, pixels, angle=0.0, scale=1.0)
    moved: Callable[[float], Tensor]
    if name == "ShearY":
        end, moved = 0.3, lambda m: affine(translate=[0, 0], shear=[0.0, math.degrees(math.atan(m))], center=[0, 0])
    elif name == "TranslateX":
        end, moved = 150 / 331 * width, lambda m: affine(translate=[int(m), 0], shear=[0.0, 0.0])
    elif name == "TranslateY":
        end, moved = 150 / 331 * height, lambda m: affine(translate=[0, int(m)], shear=[0.0, 0.0])
    else:
        end, moved = 30.0, lambda m: tv.rotate(pixels, m)
    return torch.cat([moved(m).flatten(1) for m in _signed(end).tolist()]).long().to(device)


def _move(x: Tensor, level: Tensor, name: str) -> Tensor:
    origins = _origins(name, x.shape[2], x.shape[3], x.device)[level + STEPS]
    index = origins[:, None].expand(-1, x.shape[1], -1)
    return F.pad(x.flatten(2), (1, 0)).gather(2, index).view_as(x)


# --- what a value becomes ------------------------------------------------------------------------------------------


def _blend(x: Tensor, other: Tensor | float, level: Tensor) -> Tensor:
    """Mix images with what they are at strength 0, at the strength 1 + magnitude."""
    strength = 1 + _table("blend", x.device)[level + STEPS].view(-1, 1, 1, 1)
    return (strength.float() * x + (1 - strength).float() * other).clamp(0, 255).to(torch.uint8)


def _brightness(x: Tensor, level: Tensor) -> Tensor:
    return _blend(x, 0.0, level)


def _color(x: Tensor, level: Tensor) -> Tensor:
    return x if x.shape[1] == 1 else _blend(x, tv.rgb_to_grayscale(x), level)


def _contrast(x: Tensor, level: Tensor) -> Tensor:
    return _blend(x, tv.rgb_to_grayscale(x).float().mean((1, 2, 3), keepdim=True), level)


def _sharpness(x: Tensor, level: Tensor) -> Tensor:
    return x if min(x.shape[2:]) <= 2 else _blend(x, tv.adjust_sharpness(x, 0.0), level)


def _solarize(x: Tensor, level: Tensor) -> Tensor:
    threshold = _table("solarize", x.device)[level.abs()].view(-1, 1, 1, 1)
    return torch.where(x >= threshold, 255 - x, x)


def _posterize(x: Tensor, level: Tensor) -> Tensor:
    return x & _table("posterize", x.device)[level.abs()].view(-1, 1, 1, 1)


@cache
def _table(name: str, device: torch.device) -> Tensor:
    if name == "blend":
        values = _signed(0.9).double()
    elif name == "solarize":
        values = torch.linspace(255, 0, STEPS + 1)
    else:  # masks that leave 8 ... 4 bits
        values = (256 - 2 ** (torch.arange(STEPS + 1) / (STEPS / 4)).round()).to(torch.uint8)
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
"""By torchvision's names; the first one does nothing."""
