"""Quadratic programmes over the probability simplex."""

import torch
from torch import Tensor

TOLERANCE = 1e-12


def simplex_minimum(matrix: Tensor) -> Tensor | None:
    """Minimise αᵀ A α over α ≥ 0, Σα = 1, exactly: an active-set method that ends after finitely many steps.

    Args:
        matrix: A, symmetric and positive semi-definite, (m, m).

    Returns:
        α, (m,) float64; None where rounding keeps the method from an end, or an entry is not finite.

    Source:
        Wolfe 1976, Mathematical Programming 11, "Finding the nearest point in a polytope".

    >>> simplex_minimum(torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1e9]]).double())[:2]
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    if not bool(matrix.isfinite().all()):
        return None
    m, diagonal = len(matrix), matrix.diagonal().double()
    scaled = matrix.double() / diagonal.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    active = [int(diagonal.argmin())]
    point = torch.zeros(m, dtype=torch.float64, device=matrix.device)
    point[active] = 1
    for _ in range(10 * m):
        slope = scaled @ point
        entering = int(slope.argmin())
        if entering in active or slope[entering] >= point @ slope - TOLERANCE:
            return point
        active.append(entering)
        while True:
            target = affine_minimum(scaled[active][:, active])
            if target is None:
                return None
            leaving = target <= TOLERANCE
            now = point[active]
            if not leaving.any():
                point = torch.zeros_like(point)
                point[active] = target
                break
            way = (now[leaving] / (now - target)[leaving]).min()
            now = now + way * (target - now)
            now[now <= TOLERANCE] = 0
            point = torch.zeros_like(point)
            point[active] = now
            active = [k for k in active if point[k] > 0]
            if not active:
                return None
            point = point / point.sum()
    return None


def affine_minimum(matrix: Tensor) -> Tensor | None:
    """Minimise αᵀ A α over Σα = 1: (m, m) float64 -> (m,), or None where it is not unique."""
    m = len(matrix)
    system = torch.ones(m + 1, m + 1, dtype=matrix.dtype, device=matrix.device)
    system[:m, :m], system[m, m] = matrix, 0
    right = torch.zeros(m + 1, dtype=matrix.dtype, device=matrix.device)
    right[m] = 1
    solution, info = torch.linalg.solve_ex(system, right)
    return None if bool(info) or not bool(solution.isfinite().all()) else solution[:m]


def semidefinite(matrix: Tensor, least: float) -> Tensor:
    """Set eigenvalues below `least` to 0 in a symmetric matrix that has negative ones.

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
    return torch.einsum("ik,k,jk->ij", vectors, kept, vectors)
