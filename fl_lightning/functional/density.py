"""Ratios of two densities, estimated from samples of both."""

from typing import NamedTuple

import torch
from torch import Tensor


def gaussian(x: Tensor, y: Tensor, width: float) -> Tensor:
    """k(x, y) = exp(−‖x − y‖² / 2σ²): (a, d), (b, d) -> (a, b)."""
    distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return (-distance.square() / (2 * width**2)).exp()


class DensityRatio(NamedTuple):
    """KuLSIF: the density of known samples over that of reference points.

    Args:
        alpha: weights of the reference points, (n,).
        reference: (n, d).
        known: (m, d).
        lam: λ of the fit.
        width: σ of the kernel.

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
        """Solve (K₁₁/n + λI) α = −K₁₂1 / (nmλ), by default with λ = n^(−1/2)."""
        n, m = len(reference), len(known)
        lam = n**-0.5 if lam is None else lam
        system = gaussian(reference, reference, width) / n
        system.diagonal().add_(lam)
        right = gaussian(reference, known, width).sum(1) / (-n * m * lam)
        return cls(torch.linalg.solve(system, right), reference, known, lam, width)

    def __call__(self, x: Tensor) -> Tensor:
        """r̂(x) = Σ_j α_j k(x, u_j) + Σ_i k(x, x_i) / (mλ): (a, d) -> (a,)."""
        near = gaussian(x, self.known, self.width).sum(1) / (len(self.known) * self.lam)
        return gaussian(x, self.reference, self.width) @ self.alpha + near
