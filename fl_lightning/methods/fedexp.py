"""FedEXP: a rule that takes a larger server step where the clients' updates are large but disagree.

Source: Jhunjhunwala et al., ICLR 2023, arXiv:2301.09604, Algorithm 1 and Eq. 8. Clients: any.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, StateBuffers
from fl_lightning.functional import state as S
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_choice


def step_size(mean_square: Tensor, square_of_mean: Tensor, eps: float | Tensor) -> Tensor:
    """Compute η_g = max(1, Σ p_i‖Δ_i‖² / (2(‖Σ p_i Δ_i‖² + ε))): (), () -> ().

    Args:
        mean_square: Σ p_i‖Δ_i‖².
        square_of_mean: ‖Σ p_i Δ_i‖².
        eps: ε.

    >>> step_size(torch.tensor(6.0), torch.tensor(1.0), eps=0.5)
    tensor(2.)
    """
    return (mean_square / (2 * (square_of_mean + eps))).clamp(min=1)


class FedEXPAggregator(Aggregator):
    """Takes w ← w + η_g Σ p_i Δ_i over the trainable weights, and the mean for the rest.

    Args:
        eps: ε of the step size, > 0. It should shrink with the square of the local lr.
        eps_scale: Scale of ε. `paper`: ε as it is. `code`: times the number of clients with data, as in the authors'
            code.
        average_last: Whether the mean of the weights of this round and the last is evaluated, as in the paper. False
            evaluates the weights of this round.
        base: Arguments of `Aggregator`.
    """

    needs = frozenset({"start"})

    def __init__(
        self, eps: float = 1e-3, eps_scale: Literal["paper", "code"] = "paper", average_last: bool = True, **base: Any
    ) -> None:
        super().__init__(**base)
        check_above(0, "the paper takes 0.001 for images", eps=eps)
        check_choice(("paper", "code"), eps_scale=eps_scale)
        self.eps = eps
        self.eps_scale = eps_scale
        self.average_last = average_last
        self.eta_g = nn.Buffer(torch.ones((), dtype=torch.float64))
        self.num_rounds = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.previous = StateBuffers({})

    def setup(self) -> None:
        self.previous = StateBuffers(S.clone(self.server.weights))

    def begin_round(self, cohort: list[int]) -> None:
        # Clients may have been sent coarser weights (`codec.down`). What is evaluated are the server's own.
        for name, value in self.server.exact_weights.items():
            self.previous[name].copy_(value)
        self.num_rounds.add_(1)

    def client_statistics(self, update: ClientUpdate) -> dict[str, Any]:
        if update.weights is None:
            return {}
        moved = [(update.weights[name] - self.server.weights[name]).double() for name in self.server.trainable]
        return {"square": torch.stack([delta.square().sum() for delta in moved]).sum()}

    def add(self, update: ClientUpdate) -> None:
        super().add(update)
        if update.weights is not None:
            square = update.extras["square"]
            weight = self.weight(update)
            self.sum("squares", {"square": square}, weight)
            is_counted = weight > 0
            count = is_counted.double() if isinstance(is_counted, Tensor) else float(is_counted)
            self.sum("clients", {"count": torch.ones_like(square)}, count)

    def finish(self) -> State | None:
        mean = super().finish()
        if mean is None:
            return None
        n = self.total_weight("weights")
        means = self._exact_means(mean, n)
        start = self.server.weights
        delta = S.sub(means, {name: start[name].double() for name in means})
        eps: float | Tensor = self.eps
        if self.eps_scale == "code":
            eps = self.eps * self.summed("clients")["count"]
        eta_g = step_size(self.summed("squares")["square"] / n, square_of_mean=S.inner(delta, delta), eps=eps)
        if isinstance(n, Tensor):
            # Without a client with data the step size stays.
            eta_g = torch.where(n == 0, self.eta_g, eta_g)
        self.eta_g.copy_(eta_g)
        # This is m + (η − 1) Δ, not w + η Δ, because with η = 1 it is the mean, bit for bit.
        return self.moved(mean, {name: means[name] + (self.eta_g - 1) * delta[name] for name in means})

    def _exact_means(self, mean: State, n: float | Tensor) -> State:
        """Return the means of the trainable weights, float64.

        Args:
            mean: The means in the weights' own types. Those of float64 keep what no client has changed.
            n: The sum of the clients' weights.
        """
        total = self.summed("weights")
        means: State = {}
        for name in self.server.trainable:
            means[name] = mean[name] if mean[name].dtype == torch.float64 else total[name] / n
        return means

    @property
    def averages(self) -> bool:
        return self.average_last

    def evaluation_weights(self, weights: State) -> State:
        if not self.average_last or self.num_rounds < 2:
            return weights
        return S.weighted_mean([weights, self.previous], [1, 1])
