"""Rules that compare the clients with each other, and bound what a few malicious or broken ones can do to the model.

A row is the trainable weights of a client with data; all that is not trained takes the weighted mean, which nothing
protects.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation.server_parts import Aggregator
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_at_least, check_numbers


def coordinate_median(rows: Tensor) -> Tensor:
    """Take the median of every coordinate, for even m the mean of the two middle values: (m, P) -> (P,).

    >>> coordinate_median(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    tensor([2.5000])
    """
    ordered = rows.sort(0).values
    m = len(rows)
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Average every coordinate without its `trim` smallest and largest values, m > 2 trim: (m, P) -> (P,).

    >>> trimmed_mean(torch.tensor([[0.0], [1.0], [3.0], [99.0]]), trim=1)
    tensor([2.])
    """
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


def krum_scores(rows: Tensor, f: int) -> Tensor:
    """Sum each row's m − f − 2 smallest squared distances to others, m ≥ f + 3: (m, P) -> (m,).

    >>> krum_scores(torch.tensor([[0.0], [1.0], [3.0], [99.0]]), f=1)
    tensor([1.0000e+00, 1.0000e+00, 4.0000e+00, 9.2160e+03])
    """
    distances = torch.stack([(rows - row).square().sum(1) for row in rows])
    distances.fill_diagonal_(torch.inf)
    return distances.sort(1).values[:, : len(rows) - f - 2].sum(1)


def geometric_median(rows: Tensor, weights: Tensor, iters: int, nu: float) -> Tensor:
    """Find z of least Σ w_i ‖z − v_i‖ by smoothed Weiszfeld steps from the mean: (m, P), (m,) -> (P,).

    A step is the mean with weights w_i / max(ν, ‖z − v_i‖).

    >>> geometric_median(torch.tensor([[0.0], [1.0], [99.0]]), torch.ones(3), iters=50, nu=1e-6)
    tensor([1.])
    """
    z = weights @ rows / weights.sum()
    for _ in range(iters):
        w = weights / (rows - z).norm(dim=1).clamp(min=nu)
        z = w @ rows / w.sum()
    return z


class GatheringAggregator(Aggregator, ABC):
    """A rule that compares the clients with each other (median, Krum): it sees every update at once.

    The updates are gathered on the root process only, and what it returns goes to the others.
    """

    @abstractmethod
    def reduce(self, updates: Mapping[int, ClientUpdate]) -> Mapping[str, Tensor]:
        """Make the new trainable shared entries, by name.

        Args:
            updates: of the clients with samples, by client id, ascending; at least one.
        """

    def add(self, update: ClientUpdate) -> None:
        """Keep the update, and take the weighted mean of the entries that are not trained."""
        if update.weights is None:
            return
        trainable = set(self.server.trainable)
        rest = {name: value for name, value in update.weights.items() if name not in trainable}
        self.sum("weights", rest, self.weight(update))
        self.gather(update)

    def finish(self) -> State | None:
        mean = super().finish()
        counted = {} if mean is None else self.rows_with("num_samples")
        if mean is None or not counted:
            return None
        new = {**mean, **self.reduce(counted)}
        if missing := [name for name in self.server.trainable if name not in new]:
            raise ValueError(
                f"{type(self).__name__}.reduce must return every trainable shared entry, but {missing[0]!r} is "
                f"missing; return it as it is where the rule does not touch it"
            )
        return {name: new[name].to(value.dtype) for name, value in self.server.weights.items() if name in new}


REMEDY = "let it expect fewer malicious clients, or raise data.participation"


class RobustAggregator(GatheringAggregator):
    """Base of the robust rules: one vector of many rows, whose number is checked at start and in every round."""

    needs = frozenset({"clients"})

    @abstractmethod
    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Make the new weights of the clients' rows and their weights in a mean: (m, P), (m,) -> (P,), float64."""

    def too_few(self, m: int) -> str | None:
        """Report how many rows the rule needs, where m are too few.

        None where they are not.
        """
        return None

    def setup(self) -> None:
        m = self.server.cohort_size
        if problem := self.too_few(m):
            raise ValueError(f"{type(self).__name__} needs {problem}, got cohorts of {m} clients; {REMEDY}")

    def reduce(self, updates: Mapping[int, ClientUpdate]) -> State:
        if problem := self.too_few(len(updates)):
            raise ValueError(
                f"{type(self).__name__} needs {problem}, got {len(updates)} clients with data in round "
                f"{self.server.round_idx}; {REMEDY}"
            )
        like = {name: self.server.weights[name] for name in self.server.trainable}
        flat = [torch.cat([u.weights[n].reshape(-1).double() for n in like]) for u in updates.values() if u.weights]
        weights = [float(self.weight(update)) for update in updates.values()]
        center = self.center(torch.stack(flat), flat[0].new_tensor(weights))
        parts = torch.split(center, [value.numel() for value in like.values()])
        return {name: part.view_as(value) for (name, value), part in zip(like.items(), parts, strict=True)}


class MedianAggregator(RobustAggregator):
    """Median of every coordinate, in which client weights do not count.

    Source:
        Yin et al., ICML 2018, arXiv:1803.01498.
    """

    is_by_coordinate = True

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        return coordinate_median(rows)


class TrimmedMeanAggregator(RobustAggregator):
    """Mean of every coordinate without its k = ⌊β m⌋ smallest and largest values, where client weights do not count.

    Args:
        beta: β in [0, 0.5), the largest share of malicious clients; 0 is the plain mean.
        base: of `Aggregator`.

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
        return f"m > 2 ⌊beta m⌋ clients (beta={self.beta})" if m <= 2 * self.trim(m) else None

    def setup(self) -> None:
        super().setup()
        m = self.server.cohort_size
        if self.beta and not self.trim(m):
            rank_zero_warn(f"TrimmedMeanAggregator with beta={self.beta} trims nothing of {m} clients; raise beta")

    def trim(self, m: int) -> int:
        """Count the values cut off at each end, of m."""
        return int(self.beta * m + 1e-9)

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        return trimmed_mean(rows, self.trim(len(rows)))


class KrumAggregator(RobustAggregator):
    """The client nearest to its m − f − 2 nearest others, or the plain mean of several such (multi-Krum).

    Args:
        f: malicious clients in a cohort at most, ≥ 0.
        num_selected: clients that are averaged, those of the lowest scores; 1 is Krum.
        base: of `Aggregator`.

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
        return f"m ≥ num_selected = {self.num_selected} clients" if m < self.num_selected else None

    def center(self, rows: Tensor, weights: Tensor) -> Tensor:
        nearest = krum_scores(rows, self.f).argsort(stable=True)[: self.num_selected]
        return rows[nearest].mean(0)


class GeometricMedianAggregator(RobustAggregator):
    """Geometric median of the clients, weighted as in a mean.

    Args:
        iters: Weiszfeld steps, ≥ 0; 0 is the mean. The paper finds 3 enough, without attacks.
        nu: ν > 0, smallest distance that a step divides by.
        base: of `Aggregator`.

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
        return geometric_median(rows, weights, self.iters, self.nu)
