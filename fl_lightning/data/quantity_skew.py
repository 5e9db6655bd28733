"""Quantity skew: clients with very different numbers of samples."""

import numpy as np

from fl_lightning.data.partitioning import MAX_DRAWS, Indices, check_clients, client_proportions, cut
from fl_lightning.data.partitions import DirichletSkew, PartitionInput
from fl_lightning.data.splits import Array


class QuantityDirichletPartition(DirichletSkew):
    """Cuts the shuffled samples into parts whose shares are one draw from Dir(α · 1_N), without labels.

    The shares are drawn until every client gets `min_samples`, at most `partitioning.MAX_DRAWS` times.

    Args:
        alpha: Concentration, > 0. At 0.5 few clients have most samples, and at inf (`.inf` in YAML) all have equal
            shares.
        min_samples: Least number of samples of a client. 0 allows empty clients.

    Source:
        Li et al. 2021, arXiv:2102.02079 (NIID-Bench, `q ~ Dir(β)`), and its code.

    >>> parts = QuantityDirichletPartition(alpha=1.0)(PartitionInput(200), 4, np.random.default_rng(0))
    >>> min(map(len, parts)) >= 10, sum(map(len, parts)), len(set(map(len, parts))) > 1
    (True, 200, True)
    """

    needs_labels = False

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        check_clients(samples.size, num_clients)
        order = generator.permutation(samples.size).astype(np.int64, copy=False)
        sizes = draw_quantities(
            samples.size,
            num_clients=num_clients,
            alpha=self.alpha,
            min_samples=self.min_samples,
            generator=generator,
        )
        return cut(order, sizes)


def draw_quantities(
    size: int, *, num_clients: int, alpha: float, min_samples: int, generator: np.random.Generator
) -> Indices:
    """Draw the clients' numbers of samples by shares from Dir(α · 1_N), until all have `min_samples`.

    Args:
        size: Number of samples of all clients.
        num_clients: Number N of clients.
        alpha: Concentration α, > 0.
        min_samples: Least number of samples of a client.
        generator: Generator of the draws.

    Returns:
        The numbers, (N,) int64. They sum to `size`.

    Raises:
        ValueError: None of `MAX_DRAWS` draws fits.

    >>> draws = np.random.default_rng(0)
    >>> draw_quantities(10, num_clients=5, alpha=float("inf"), min_samples=2, generator=draws).tolist()
    [2, 2, 2, 2, 2]
    """
    best = -1
    for _ in range(MAX_DRAWS):
        # One row of proportions over the clients.
        (shares,) = client_proportions(1, num_classes=num_clients, alpha=alpha, generator=generator)
        # A part ends at the floor of the running sum. Without the small number a sum such as 2.9999… would lose one.
        ends = (np.cumsum(shares) * size + 1e-9).astype(np.int64)[:-1]
        sizes = np.diff(ends, prepend=0, append=size)
        if sizes.min() >= min_samples:
            return sizes
        best = max(best, int(sizes.min()))
    raise ValueError(
        f"no Dirichlet split in {MAX_DRAWS} draws gave every client min_samples={min_samples} (alpha={alpha}, "
        f"num_clients={num_clients}, {size} samples), the smallest share reached was {best}: lower min_samples (0 "
        f"allows empty clients) or num_clients, or raise alpha"
    )
