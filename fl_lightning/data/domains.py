"""Ways of seeing samples, as transforms of the net's input: turned, noisy, with pixels in another order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.feature_shift import rotated
from fl_lightning.data.splits import Transform
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.keyed import keyed_numpy


@dataclass(frozen=True)
class Rotation:
    """Turns images (B, C, H, W) about their centres, bilinear, with zeros where nothing was.

    Args:
        degrees: Angle, counterclockwise.
    """

    degrees: float
    augments: ClassVar[bool] = False

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return rotated(x, math.radians(self.degrees))

    def check(self, x: Tensor) -> None:
        """Refuse samples that are no images.

        Args:
            x: The net's input of some samples, (B, ...).

        Raises:
            ValueError: The samples are no images.
        """
        if not x.is_floating_point() or x.ndim != 4:
            raise ValueError(
                f"data.scenario.rotations turn images (C, H, W), got samples {tuple(x.shape[1:])} of {x.dtype}; take "
                f"noises, permutations or a column"
            )


@dataclass(frozen=True)
class Noise:
    """Adds Gaussian noise, anew for each sample and epoch of a training, and the same to a sample in all tests.

    Args:
        std: Standard deviation σ of the noise, ≥ 0.
    """

    std: float
    augments: ClassVar[bool] = True

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if generator is None:
            noise = noise_of_samples(x)
        else:
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
        return x + copy_to_device((self.std * noise).to(x.dtype), x.device)

    def check(self, x: Tensor) -> None:
        """Refuse samples that are no numbers.

        Args:
            x: The net's input of some samples, (B, ...).

        Raises:
            ValueError: The samples are whole numbers.
        """
        if not x.is_floating_point():
            raise ValueError(
                f"data.scenario.noises are added to floats, got samples of {x.dtype}; take permutations or a column"
            )


def seeds_of_samples(x: Tensor) -> list[int]:
    """Return a seed for each sample of a batch by its values, so that no draw depends on the other samples.

    Args:
        x: Samples, (B, ...).
    """
    rows = x.detach().to(device="cpu", dtype=torch.float32).numpy()
    return [int.from_bytes(blake2b(row.tobytes(), digest_size=7).digest(), "big") for row in rows]


def noise_of_samples(x: Tensor) -> Tensor:
    """Draw standard Gaussian noise for each sample by its values, of the shape of the batch, float32 on the CPU.

    Args:
        x: Samples, (B, ...).
    """
    draws = torch.Generator()
    noise = torch.empty(x.shape, dtype=torch.float32)
    for place, seed in enumerate(seeds_of_samples(x)):
        torch.randn(x.shape[1:], generator=draws.manual_seed(seed), out=noise[place])
    return noise


class Drawn:
    """Sees each sample in one of several ways, drawn anew for each sample and epoch of a training.

    Outside of a training a sample is always seen in the same one.

    Args:
        ways: The ways, at least one.
    """

    augments = True

    def __init__(self, ways: Sequence[Transform]) -> None:
        self._ways = list(ways)

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if generator is None:
            numbers = torch.tensor(seeds_of_samples(x)) % len(self._ways)
        else:
            numbers = torch.randint(len(self._ways), (len(x),), generator=generator)
        seen = torch.empty_like(x)
        for number, way in enumerate(self._ways):
            places = (numbers == number).nonzero().flatten()
            if len(places):
                chosen = copy_to_device(places, x.device)
                seen[chosen] = way(x[chosen], generator)
        return seen


class Permutation:
    """Puts the places of a sample into another order, the same for all channels of an image.

    Args:
        index: Number of the permutation, from 0. Permutation 0 leaves all places as they are.
        seed: Seed of the draw.
    """

    augments = False

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self._seed = seed
        self._orders: dict[int, Tensor] = {}
        """The drawn order by the number of places, which the first sample tells."""

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if not self.index:
            return x
        first = 2 if x.ndim > 3 else 1
        flat = x.flatten(first)
        order = copy_to_device(self._order(flat.shape[-1]), x.device)
        return flat.index_select(-1, order).view(x.shape)

    def _order(self, num_places: int) -> Tensor:
        """Return the order of so many places."""
        if num_places not in self._orders:
            draws = keyed_numpy(self._seed, f"scenario/permutation/{self.index}")
            self._orders[num_places] = torch.from_numpy(draws.permutation(num_places).astype(np.int64))
        return self._orders[num_places]

    def check(self, x: Tensor) -> None:
        """Take all samples that have places.

        Args:
            x: The net's input of some samples, (B, ...).

        Raises:
            ValueError: A sample is a single number.
        """
        if x.ndim < 2:
            raise ValueError(
                "data.scenario.permutations reorder the places of a sample, got single numbers; leave them out"
            )
