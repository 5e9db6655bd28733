"""Rules that compare the clients, and bound what a few malicious or broken ones do to the model.

A row holds the trainable weights of a client with data. The entries that are not trained take the weighted mean, which
nothing protects.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation.server_parts import Aggregator
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_at_least, check_numbers


def coordinate_median(rows: Tensor) -> Tensor:
    """Return the median of every coordinate, for even m the mean of the two middle values: (m, P) -> (P,).

    >>> coordinate_median(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    tensor([2.5000])
    """
    m = len(rows)
    ordered = rows.sort(0).values
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of every coordinate without its `trim` smallest and largest values: (m, P) -> (P,).

    There must be m > 2 trim rows.

    >>> trimmed_mean(torch.tensor([[0.0], [1.0], [3.0], [99.0]]), trim=1)
    tensor([2.])
    """
    m = len(rows)
    ordered = rows.sort(0).values
    return ordered[trim : m - trim].mean(0)


def krum_scores(rows: Tensor, f: int) -> Tensor:
    """Return the sum of each row's m − f − 2 smallest squared distances to other rows: (m, P) -> (m,).

    There must be m ≥ f + 3 rows.

    >>> krum_scores(torch.tensor([[0.0], [1.0], [3.0], [99.0]]), f=1)
    tensor([1.0000e+00, 1.0000e+00, 4.0000e+00, 9.2160e+03])
    """
    distances = torch.stack([(rows - row).square().sum(1) for row in rows])
    distances.fill_diagonal_(torch.inf)
    num_neighbors = len(rows) - f - 2
    return distances.sort(1).values[:, :num_neighbors].sum(1)


def geometric_median(rows: Tensor, weights: Tensor, iters: int, nu: float) -> Tensor:
    """Return the z that minimizes Σ w_i ‖z − v_i‖, by smoothed Weiszfeld steps from the mean.

    A step is the mean with weights w_i / max(ν, ‖z − v_i‖).

    Args:
        rows: The rows v_i, (m, P).
        weights: The weights w_i, (m,).
        iters: Number of steps, ≥ 0.
        nu: Smallest distance ν by which a step divides.

    >>> geometric_median(torch.tensor([[0.0], [1.0], [99.0]]), torch.ones(3), iters=50, nu=1e-6)
    tensor([1.])
    """
    z = weights @ rows / weights.sum()
    for _ in range(iters):
        distances = (rows - z).norm(dim=1).clamp(min=nu)
        step_weights = weights / distances
        z = step_weights @ rows / step_weights.sum()
    return z


class GatheringAggregator(Aggregator, ABC):
    """Compares the clients with each other (median, Krum).

    It is the base of rules that see every update at once. The updates are gathered on the root process only, and the
    result goes to the other processes.
    """

    @abstractmethod
    def reduce(self, updates: Mapping[int, ClientUpdate]) -> Mapping[str, Tensor]:
        """Return the new trainable shared entries, by name.

        Args:
            updates: The updates of the clients with samples, by client id, ascending. There is at least one.
        """

    def add(self, update: ClientUpdate) -> None:
        """Keep the update, and add its entries that are not trained to their weighted mean."""
        if update.weights is None:
            return
        trainable = set(self.server.trainable)
        rest = {name: value for name, value in update.weights.items() if name not in trainable}
        self.sum("weights", rest, self.weight(update), sent=self._sent)
        self.gather(update)

    def finish(self) -> State | None:
        mean = super().finish()
        if mean is None:
            return None
        counted = self.rows_with("num_samples")
        if not counted:
            return None
        new = {**mean, **self.reduce(counted)}
        missing = [name for name in self.server.trainable if name not in new]
        if missing:
            raise ValueError(
                f"{type(self).__name__}.reduce must return every trainable shared entry, but {missing[0]!r} is "
                f"missing; return it as it is where the rule does not touch it"
            )
        return {name: new[name].to(value.dtype) for name, value in self.server.weights.items() if name in new}


REMEDY = "let it expect fewer malicious clients, or raise data.participation"
"""What to do if there are too few clients for a rule."""


class RobustAggregator(GatheringAggregator):
    """Makes one row of many, whose number is checked at start and in every round.

    It is the base of robust rules.
    """

    needs = frozenset({"clients"})

    @abstractmethod
    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the new weights, (P,) float64.

        Args:
            rows: The rows of the clients, (m, P) float64.
            weights: The weights of the clients in a mean, (m,) float64.
        """

    def too_few(self, m: int) -> str | None:
        """Return how many rows the rule needs as words of a sentence, or None if m rows are enough."""
        return None

    @property
    def least_rows(self) -> int:
        """The least number of rows in a round, as far as it is known at the start."""
        # A round without clients does not ask the rule, and every other round checks again.
        return self.server.cohort_size or self.server.largest_cohort

    def setup(self) -> None:
        m = self.least_rows
        problem = self.too_few(m)
        if problem:
            raise ValueError(f"{type(self).__name__} needs {problem}, got cohorts of {m} clients; {REMEDY}")

    def reduce(self, updates: Mapping[int, ClientUpdate]) -> State:
        problem = self.too_few(len(updates))
        if problem:
            raise ValueError(
                f"{type(self).__name__} needs {problem}, got {len(updates)} clients with data in round "
                f"{self.server.round_idx}; {REMEDY}"
            )
        old = {name: self.server.weights[name] for name in self.server.trainable}
        rows = [row_of(update.weights, old) for update in updates.values() if update.weights]
        weights = [float(self.weight(update)) for update in updates.values()]
        stacked = torch.stack(rows)
        start = row_of(old, old)
        # A mean of equal numbers may be another number in the last bit.
        is_unchanged = (stacked == start).all(0)
        center = torch.where(is_unchanged, start, self.center(stacked, rows[0].new_tensor(weights)))
        parts = torch.split(center, [value.numel() for value in old.values()])
        return {name: part.view_as(old[name]) for name, part in zip(old, parts, strict=True)}


def row_of(weights: State, names: Iterable[str]) -> Tensor:
    """Return the named entries of a client end to end, (P,) float64."""
    return torch.cat([weights[name].reshape(-1).double() for name in names])


class MedianAggregator(RobustAggregator):
    """Takes the median of every coordinate. The weights of the clients do not count.

    Source:
        Yin et al., ICML 2018, arXiv:1803.01498.
    """

    is_by_coordinate = True

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        return coordinate_median(rows)


class TrimmedMeanAggregator(RobustAggregator):
    """Takes the mean of every coordinate without its k = ⌊β m⌋ smallest and largest values.

    The weights of the clients do not count.

    Args:
        beta: Largest share of malicious clients, β in [0, 0.5). 0 is the plain mean.
        base: Arguments of `Aggregator`.

    Source:
        Yin et al., ICML 2018, arXiv:1803.01498.
    """

    is_by_coordinate = True

    def __init__(self, beta: float = 0.2, **base: Any) -> None:
        super().__init__(**base)
        check_numbers(beta=beta)
        if not 0 <= beta < 0.5:
            raise ValueError(f"beta must lie in [0, 0.5), got {beta}; it is the share cut off at each end")
        self.beta = beta

    def too_few(self, m: int) -> str | None:
        if m > 2 * self.trim(m):
            return None
        return f"m > 2 ⌊beta m⌋ clients (beta={self.beta})"

    def setup(self) -> None:
        super().setup()
        m = self.least_rows
        if self.beta and not self.trim(m):
            rank_zero_warn(f"TrimmedMeanAggregator with beta={self.beta} trims nothing of {m} clients; raise beta")

    def trim(self, m: int) -> int:
        """Return how many of m values are cut off at each end."""
        return int(self.beta * m + 1e-9)

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        return trimmed_mean(rows, self.trim(len(rows)))


class KrumAggregator(RobustAggregator):
    """Takes the client nearest to its m − f − 2 nearest others, or the mean of several such clients.

    With several clients, the rule is multi-Krum.

    Args:
        f: Largest number of malicious clients in a cohort, ≥ 0.
        num_selected: Number of clients that are averaged, those of the lowest scores, ≥ 1. 1 is Krum.
        base: Arguments of `Aggregator`.

    Source:
        Blanchard et al., NeurIPS 2017, arXiv:1703.02757.
    """

    def __init__(self, f: int = 1, num_selected: int = 1, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, f=f)
        check_at_least(1, "1 is Krum, more are multi-Krum", num_selected=num_selected)
        self.f = f
        self.num_selected = num_selected

    def too_few(self, m: int) -> str | None:
        if m < 2 * self.f + 3:
            return f"m ≥ 2f + 3 = {2 * self.f + 3} clients (f={self.f})"
        if m < self.num_selected:
            return f"m ≥ num_selected = {self.num_selected} clients"
        return None

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        scores = krum_scores(rows, self.f)
        selected = scores.argsort(stable=True)[: self.num_selected]
        return rows[selected].mean(0)


class GeometricMedianAggregator(RobustAggregator):
    """Takes the geometric median of the clients, weighted as in a mean.

    Args:
        iters: Number of Weiszfeld steps, ≥ 0. 0 is the mean. The paper finds 3 enough, without attacks.
        nu: Smallest distance by which a step divides, ν > 0.
        base: Arguments of `Aggregator`.

    Source:
        Pillutla et al. 2022, arXiv:1912.13445.
    """

    def __init__(self, iters: int = 20, nu: float = 1e-6, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is the mean", iters=iters)
        check_above(0, nu=nu)
        self.iters = iters
        self.nu = nu

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        return geometric_median(rows, weights, iters=self.iters, nu=self.nu)
