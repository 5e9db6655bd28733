"""Sharpest directions of a loss: leading eigenvectors of its Hessian, by Lanczos' method."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.functional.state import State, StateLike, to_float32


def hessian_product(
    loss: Callable[[State, Any], Tensor], params: StateLike, batches: Iterable[tuple[Any, int]], vector: StateLike
) -> State:
    """Multiply the Hessian H of a mean loss with a vector v, one batch at a time.

    Args:
        loss: Function `(params, batch) -> ()`, the mean loss of a batch, twice differentiable in the parameters.
        params: Point w, by name.
        batches: Batches, each with its number of samples.
        vector: Vector v, shaped as the parameters.

    Returns:
        H v, shaped as the parameters.

    >>> def loss(p, scale):
    ...     return scale * p["w"].pow(3).sum()
    >>> hessian_product(loss, {"w": torch.tensor([1.0, 2.0])}, [(1.0, 4)], {"w": torch.tensor([1.0, 1.0])})
    {'w': tensor([ 6., 12.])}
    """
    point = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    values = list(point.values())
    total = {name: torch.zeros_like(value) for name, value in vector.items()}
    num_samples = 0
    with torch.enable_grad():
        for batch, size in batches:
            value = to_float32(loss(point, batch))
            gradients = torch.autograd.grad(value, values, create_graph=True, materialize_grads=True)
            # The gradient of ⟨∇f(w), v⟩ in w is H v.
            terms = [(gradient * vector[name]).sum() for name, gradient in zip(point, gradients, strict=True)]
            slope = torch.stack(terms).sum()
            products = torch.autograd.grad(slope, values, materialize_grads=True)
            for name, product in zip(point, products, strict=True):
                total[name] += size * product
            num_samples += size
    return {name: value / num_samples for name, value in total.items()}


def leading_eigenvectors(  # noqa: PLR0917 - called by position
    product: Callable[[Tensor], Tensor],
    size: int,
    count: int = 2,
    iterations: int = 50,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the eigenvalues of largest magnitude of a symmetric matrix and their eigenvectors, by scipy's Lanczos.

    Args:
        product: Function v (D,) -> A v (D,), float64 on the CPU.
        size: Number of rows of the matrix, D > count.
        count: Number of eigenvalues.
        iterations: Largest number of restarts.
        tolerance: Relative error of the eigenvalues.
        generator: Generator of the vector at which the method begins. None is torch's own.

    Returns:
        The eigenvalues (count,) float64, by falling magnitude, and orthonormal eigenvectors (count, D). NaN if a
        product is not finite.

    Raises:
        RuntimeError: An eigenvalue needs more than `iterations` restarts.

    >>> matrix = torch.diag(torch.tensor([1.0, -5.0, 3.0], dtype=torch.float64))
    >>> values, _ = leading_eigenvectors(lambda v: matrix @ v, 3, generator=torch.Generator().manual_seed(0))
    >>> [round(value, 2) for value in values.tolist()]
    [-5.0, 3.0]
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # noqa: PLC0415 - slow to import

    def multiply(vector: Any) -> Any:
        return product(torch.tensor(vector, dtype=torch.float64).flatten()).numpy()

    start = torch.randn(size, generator=generator, dtype=torch.float64)
    first = product(start)
    if not bool(first.isfinite().all()):
        return first.new_full((count,), math.nan), first.new_full((count, size), math.nan)
    if not bool(first.any()):
        # The loss is flat, and all directions are alike.
        return first.new_zeros(count), torch.eye(count, size, dtype=torch.float64)
    matrix = LinearOperator((size, size), matvec=multiply, dtype=float)
    try:
        values, vectors = eigsh(matrix, k=count, v0=start.numpy(), maxiter=iterations, tol=tolerance)
    except ArpackNoConvergence as error:
        raise RuntimeError(f"the Hessian's eigenvalues need more than {iterations} restarts; set iterations") from error
    order = np.argsort(-np.abs(values))
    return torch.from_numpy(values[order]), torch.from_numpy(vectors.T[order].copy())
