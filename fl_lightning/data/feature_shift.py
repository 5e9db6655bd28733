"""Feature shift: each client sees its samples in its own way, by noise, rotation or colour."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.keyed import keyed_generator
from fl_lightning.utils.settings import check_at_least, check_at_most


@dataclass(frozen=True)
class FeatureShift:
    """Settings of how the clients' training and test samples differ, applied to the net's input on its device.

    Client i of N is rotated and coloured alike in all rounds; noise is drawn anew for each sample and epoch. The
    server's own samples are not shifted.

    Args:
        noise: standard deviation σ of the last client's Gaussian noise, ≥ 0; client i has σ · i / (N − 1).
        rotation: most degrees that a client's images are turned, in [0, 180]: each by its own angle, uniform in
            ±rotation, with zeros where nothing was.
        colour: each client multiplies every channel by a number uniform in 1 ± colour, and adds one uniform in
            ± colour, in [0, 1].

    Raises:
        ValueError: naming the setting, its range and the value.

    Source:
        Noise: Li et al. 2021, arXiv:2102.02079 (NIID-Bench), as its code draws it; the text has the variance σ · i / N.
    """

    noise: float = 0.0
    rotation: float = 0.0
    colour: float = 0.0

    def __post_init__(self) -> None:
        check_at_least(0, "0 has none", noise=self.noise)
        check_at_least(0, "0 turns nothing", rotation=self.rotation)
        check_at_most(180, "in degrees", rotation=self.rotation)
        check_at_least(0, "0 changes nothing", colour=self.colour)
        check_at_most(1, colour=self.colour)

    def of(self, client_id: int, num_clients: int, seed: int) -> "ClientShift":
        """Draw how one client sees its samples, by seed and client only."""
        draws = keyed_generator(seed, "feature_shift", -1, client_id)
        angle = math.radians(self.rotation) * (2 * float(torch.rand((), generator=draws, dtype=torch.float64)) - 1)
        noise = keyed_generator(seed, "feature_shift/noise", -1, client_id)
        return ClientShift(self.noise * client_id / max(1, num_clients - 1), angle, self.colour, draws, noise)


class ClientShift:
    """The way in which one client sees its samples.

    Args:
        noise: standard deviation.
        angle: of the rotation, in radians.
        colour: range of the channels' factors and offsets.
        draws: of these, a pair for each channel at the first batch.
        still: draws the noise of samples that are not trained on.
    """

    def __init__(
        self, noise: float, angle: float, colour: float, draws: torch.Generator, still: torch.Generator
    ) -> None:
        self.noise = noise
        self.angle = angle
        self._colour = colour
        self._draws = draws
        self._still = still
        self._channels: Tensor | None = None

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Shift samples (B, ...) of the net's input.

        Args:
            x: floats; images (B, C, H, W) where they are turned or coloured.
            generator: of the noise in training; None: that of samples that are not trained on.

        Raises:
            ValueError: samples that cannot be shifted so.
        """
        check_shifted(x, bool(self.angle or self._colour))
        if self.angle:
            x = rotated(x, self.angle)
        if self._colour:
            if self._channels is None:
                drawn = 2 * torch.rand((2, x.shape[1], 1, 1), generator=self._draws, dtype=torch.float64) - 1
                self._channels = drawn * self._colour
            factor, offset = copy_to_device(self._channels.to(x.dtype), x.device)
            x = x * (1 + factor) + offset
        if self.noise:
            drawn = torch.randn(x.shape, generator=generator or self._still, dtype=torch.float32)
            x = x + copy_to_device((self.noise * drawn).to(x.dtype), x.device)
        return x


def check_shifted(x: Tensor, as_images: bool) -> None:
    """Refuse samples (B, ...) that cannot be shifted.

    Args:
        x: the net's input.
        as_images: whether they are turned or coloured.

    Raises:
        ValueError: naming their shape and kind.
    """
    if not x.is_floating_point() or (as_images and x.ndim != 4):
        raise ValueError(
            f"data.feature_shift changes numbers, its rotation and colour images (B, C, H, W), got samples "
            f"{tuple(x.shape[1:])} of {x.dtype}; leave it out"
        )


def rotated(x: Tensor, angle: float) -> Tensor:
    """Turn images (B, C, H, W) about their centres, counterclockwise, in radians, bilinear, zeros outside.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
    >>> rotated(x, math.pi / 2).round().flatten().tolist()
    [2.0, 4.0, 1.0, 3.0]
    """
    height, width = x.shape[2:]
    cos = math.cos(angle)
    sin = math.sin(angle)
    rows = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]], dtype=x.dtype)
    grid = F.affine_grid(copy_to_device(rows, x.device).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
