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
    """Sets how the clients' training and test samples differ. It changes the net's input on its device.

    The images of a client are rotated and coloured alike in all rounds. Noise is drawn anew for each sample and epoch.
    The server's own samples are not shifted.

    Args:
        noise: Standard deviation σ of the last client's Gaussian noise, ≥ 0. Client i of N has σ · i / (N − 1).
        rotation: Most degrees by which a client's images are turned, in [0, 180]. Each client has its own angle,
            uniform in ±rotation. There are zeros where nothing was.
        colour: Range of the changes of colour, in [0, 1]. Each client multiplies every channel by a number uniform in
            1 ± colour, and adds a number uniform in ± colour.

    Raises:
        ValueError: A setting is out of its range.

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
        """Draw how one client sees its samples, by seed and client only.

        Args:
            client_id: Id of the client, from 0.
            num_clients: Number N of clients.
            seed: Seed of the draws.
        """
        draws = keyed_generator(seed, "feature_shift", client_id=client_id)
        share = float(torch.rand((), generator=draws, dtype=torch.float64))
        return ClientShift(
            noise=self.noise * client_id / max(1, num_clients - 1),
            angle=math.radians(self.rotation) * (2 * share - 1),
            colour=self.colour,
            draws=draws,
            still=keyed_generator(seed, "feature_shift/noise", client_id=client_id),
        )


class ClientShift:
    """Shifts the samples of one client.

    Args:
        noise: Standard deviation of the Gaussian noise, ≥ 0.
        angle: Angle of the rotation in radians, counterclockwise.
        colour: Range of the channels' factors and offsets, in [0, 1].
        draws: Generator of the factors and offsets, a pair for each channel, which are drawn at the first batch.
        still: Generator of the noise of samples that are not trained on.
    """

    def __init__(
        self, *, noise: float, angle: float, colour: float, draws: torch.Generator, still: torch.Generator
    ) -> None:
        self.noise = noise
        self.angle = angle
        self._colour = colour
        self._draws = draws
        self._still = still
        self._channels: Tensor | None = None
        """Factors and offsets of the C channels, less 1 for the factors, (2, C, 1, 1)."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Shift samples (B, ...) of the net's input.

        Args:
            x: Floats: images (B, C, H, W) if they are turned or coloured, else of any shape.
            generator: Generator of the noise in training. None: the samples are not trained on.

        Raises:
            ValueError: The samples cannot be shifted in this way.
        """
        check_shifted(x, as_images=bool(self.angle or self._colour))
        if self.angle:
            x = rotated(x, self.angle)
        if self._colour:
            x = self._coloured(x)
        if self.noise:
            deviates = torch.randn(x.shape, generator=generator or self._still, dtype=torch.float32)
            x = x + copy_to_device((self.noise * deviates).to(x.dtype), x.device)
        return x

    def _coloured(self, x: Tensor) -> Tensor:
        """Multiply each channel of images (B, C, H, W) by the client's factor, and add the client's offset."""
        if self._channels is None:
            drawn = torch.rand((2, x.shape[1], 1, 1), generator=self._draws, dtype=torch.float64)
            self._channels = (2 * drawn - 1) * self._colour
        factor, offset = copy_to_device(self._channels.to(x.dtype), x.device)
        coloured: Tensor = x * (1 + factor) + offset
        return coloured


def check_shifted(x: Tensor, as_images: bool) -> None:
    """Refuse samples (B, ...) that cannot be shifted.

    Args:
        x: The net's input.
        as_images: Whether the samples are turned or coloured.

    Raises:
        ValueError: The samples are no numbers, or must be images and are none.
    """
    if not x.is_floating_point() or (as_images and x.ndim != 4):
        raise ValueError(
            f"data.feature_shift changes numbers, its rotation and colour images (B, C, H, W), got samples "
            f"{tuple(x.shape[1:])} of {x.dtype}; leave it out"
        )


def rotated(x: Tensor, angle: float) -> Tensor:
    """Turn images about their centers, bilinear, with zeros where nothing was.

    Args:
        x: Images (B, C, H, W), floats.
        angle: Angle in radians, counterclockwise.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
    >>> rotated(x, math.pi / 2).round().flatten().tolist()
    [2.0, 4.0, 1.0, 3.0]
    """
    height, width = x.shape[2:]
    cos = math.cos(angle)
    sin = math.sin(angle)
    matrix = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]], dtype=x.dtype)
    matrices = copy_to_device(matrix, x.device).expand(len(x), 2, 3)
    grid = F.affine_grid(matrices, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
