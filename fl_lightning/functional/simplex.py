"""Quadratic programs over the probability simplex."""

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-12
"""Share of the largest eigenvalue up to which a negative one is a rounding error."""


def simplex_minimum(matrix: Tensor) -> Tensor | None:
    """Minimize αᵀ A α over α ≥ 0, Σα = 1, by scipy's non-negative least squares.

    With A = LᵀL the least squares of [L; 1ᵀ] x = (0, …, 0, 1) over x = s α ≥ 0 are q / (1 + q) at the best s, for
    q = αᵀ A α. This grows with q, so that the minimum is the same. The unknowns are y = D x in place of x. D has the
    lengths diag(A)^½ of L's columns over the smallest length, so that a row of a large A_ii costs the others no digits.

    Args:
        matrix: Symmetric and positive semi-definite matrix A, (m, m).

    Returns:
        α, (m,) float64. None if the method does not end, or an entry is not finite.

    >>> simplex_minimum(torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1e9]]).double())[:2]
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - slow to import

    if not bool(matrix.isfinite().all()):
        return None
    matrix = matrix.double()
    lengths = matrix.diagonal().clamp(min=0).sqrt()
    shortest = int(lengths.argmin())
    if lengths[shortest] == 0:
        # The minimum of 0 is at this corner of the simplex.
        return torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)[shortest]
    values, vectors = torch.linalg.eigh(matrix / lengths / lengths[:, None])
    root = (vectors * values.clamp(min=0).sqrt()).T
    scales = lengths[shortest] / lengths
    system = torch.cat([root, scales[None]]).cpu().numpy()
    try:
        solution, _ = nnls(system, np.eye(len(system))[-1])
    except RuntimeError:
        # The method has not ended within its iterations.
        return None
    weights = torch.from_numpy(solution).to(matrix.device) * scales
    return weights / weights.sum()


def semidefinite(matrix: Tensor, least: float) -> Tensor:
    """Set the eigenvalues below `least` to 0 in a symmetric matrix that has negative ones.

    Args:
        matrix: Symmetric matrix, (m, m). A matrix without negative eigenvalues, or with entries that are not finite,
            stays as it is.
        least: Smallest eigenvalue that stays.

    >>> semidefinite(torch.tensor([[-1.0, 0.0], [0.0, 2.0]]).double(), 0.01)
    tensor([[0., 0.],
            [0., 2.]], dtype=torch.float64)
    """
    if not bool(matrix.isfinite().all()):
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    if values[0] >= -TOLERANCE * values[-1].abs():
        return matrix
    kept = torch.where(values < least, torch.zeros_like(values), values)
    return torch.einsum("ik,k,jk->ij", vectors, kept, vectors)  # style: ok, einsum takes operands one by one
