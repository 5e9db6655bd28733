"""Densities estimated from samples, and ratios of two of them."""

from math import pi
from typing import NamedTuple

import torch
from torch import Tensor


def gaussian(x: Tensor, y: Tensor, width: float) -> Tensor:
    """Compute k(x, y) = exp(−‖x − y‖² / 2σ²): (a, d), (b, d) -> (a, b)."""
    distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return (-distance.square() / (2 * width**2)).exp()


class DensityRatio(NamedTuple):
    """Estimates the density of known samples over that of reference points, by KuLSIF.

    Args:
        alpha: Weights α of the reference points, (n,).
        reference: Reference points u_j, (n, d).
        known: Known samples x_i, (m, d).
        lam: Regularization λ of the fit.
        width: Width σ of the kernel.

    Source:
        Kanamori et al. 2012, Machine Learning 86, "Statistical analysis of kernel-based least-squares density-ratio
        estimation".
    """

    alpha: Tensor
    reference: Tensor
    known: Tensor
    lam: float
    width: float

    @classmethod
    def fit(cls, known: Tensor, reference: Tensor, width: float, lam: float | None = None) -> "DensityRatio":
        """Solve (K₁₁/n + λI) α = −K₁₂1 / (nmλ).

        Args:
            known: Known samples, (m, d).
            reference: Reference points, (n, d).
            width: Width σ of the kernel, > 0.
            lam: Regularization λ > 0. None is n^(−1/2).
        """
        n = len(reference)
        m = len(known)
        lam = n**-0.5 if lam is None else lam
        system = gaussian(reference, reference, width) / n
        system.diagonal().add_(lam)
        right = gaussian(reference, known, width).sum(1) / (-n * m * lam)
        return cls(
            alpha=torch.linalg.solve(system, right),
            reference=reference,
            known=known,
            lam=lam,
            width=width,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Compute r̂(x) = Σ_j α_j k(x, u_j) + Σ_i k(x, x_i) / (mλ): (a, d) -> (a,)."""
        near = gaussian(x, self.known, self.width).sum(1) / (len(self.known) * self.lam)
        return gaussian(x, self.reference, self.width) @ self.alpha + near


def kernel_density(x: Tensor, known: Tensor, width: float) -> Tensor:
    """Estimate a density with Gaussian kernels.

    Args:
        x: Points at which the density is estimated, (a, d).
        known: Samples, (n, d), n ≥ 1.
        width: Width σ > 0 of the kernel.

    Returns:
        (a,). The density integrates to 1.

    >>> kernel_density(torch.tensor([[0.0]]), torch.tensor([[0.0]]), width=1.0)
    tensor([0.3989])
    """
    area: float = (2 * pi * width**2) ** (x.shape[1] / 2)
    return gaussian(x, known, width).mean(1) / area


def angle_density(angles: Tensor, known: Tensor, width: float) -> Tensor:
    """Estimate a density on the circle with Gaussian kernels that continue beyond ±π.

    Args:
        angles: Angles at which the density is estimated, (a,) in radians.
        known: Samples, (n,) in radians, n ≥ 1.
        width: Width σ of the kernel in radians, in (0, 1].

    Returns:
        (a,). The density integrates to 1 over the circle.

    >>> there, behind = angle_density(torch.tensor([3.1, -3.1]), torch.tensor([3.1416]), width=0.1)
    >>> bool((there - behind).abs() < 1e-3)
    True
    """
    apart = (angles[:, None] - known[None] + pi).remainder(2 * pi) - pi
    turns = 2 * pi * torch.arange(-1, 2, dtype=angles.dtype, device=angles.device)
    kernel = (-(apart[..., None] + turns).square() / (2 * width**2)).exp().sum(-1)
    length: float = (2 * pi * width**2) ** 0.5
    return kernel.mean(1) / length
