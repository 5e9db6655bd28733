"""KnFu: fuse predictions on a transfer set for each client, weighted by the nearness of class distributions.

Source: Seyedmohammadi et al. 2024, arXiv:2403.11892, Alg. 1, Eqs. 5-10. Server: no weights, only predictions.
Note: Eqs. 7-8 divide by zero at m = n and for equal distributions; here m = n is left out of the maximum, distances are
floored at ε, and λ (weight) and T (temperature), one letter in the paper, are two settings.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.federation.codistillation import KnowledgeClient, KnowledgeServer, soft_label_divergence
from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.utils.settings import check_at_least, check_choice


class Fusion(NamedTuple):
    """Values of one round's fusion, float64, with rows in the order of `client_ids`."""

    client_ids: list[int]
    epd: Tensor
    distances: Tensor
    weights: Tensor


def distances(epd: Tensor, floor: float = 1e-12) -> Tensor:
    """Compute d_nm = KL(p_n ‖ p_m) (Eq. 6), p floored and renormalised: (N, C) -> (N, N), 0 on the diagonal."""
    p = epd.double().clamp(min=floor)
    p = p / p.sum(1, keepdim=True)
    return (p[:, None] * (p[:, None] / p[None]).log()).sum(-1)


def fusion_weights(distance: Tensor, beta: float, eps: float = 1e-8) -> Tensor:
    """Compute w_nm = 1/d_nm², w_nn = beta · max over m ≠ n (Eqs. 7-8), rows normalised: (N, N) -> (N, N).

    Every row is first divided by its maximum over m ≠ n, so nothing overflows; w_nn ≥ beta / (beta + N − 1).
    """
    n = len(distance)
    if n == 1:
        return torch.ones_like(distance)
    diagonal = torch.eye(n, dtype=torch.bool, device=distance.device)
    others = distance.clamp(min=eps).masked_fill(diagonal, torch.inf)
    weights = (others.min(1, keepdim=True).values / others).square().masked_fill(diagonal, beta)
    return weights / weights.sum(1, keepdim=True)


def fused_knowledge(weights: Tensor, knowledge: Tensor) -> Tensor:
    """Compute F_n^agg = Σ_m w_nm F_m (Eq. 9): (N, N), (N, K, C) -> (N, K, C)."""
    return torch.einsum("nm,mkc->nkc", weights, knowledge.double())


class KnFuServer(KnowledgeServer):
    """KnFu's server: effective knowledge fusion.

    Attributes:
        fusion: of the last round, or None.
    """

    fusion: Fusion | None = None

    def fuse(self, client_ids: list[int], knowledge: Tensor) -> Tensor:
        beta = self.client_of(KnFu).beta
        epd = estimated_distribution(knowledge)
        distance = distances(epd)
        weights = fusion_weights(distance, beta)
        self.fusion = Fusion(client_ids, epd, distance, weights)
        return fused_knowledge(weights, knowledge)


class KnFu(KnowledgeClient):
    """Fine-tunes with CE + lam² · KL(F_n^agg ‖ softmax) on the transfer set (Eq. 10).

    Args:
        beta: weight of the client's own knowledge relative to its nearest neighbour's, ≥ 0.
        kd_direction: `forward`: KL(fused ‖ own); `reverse`: KL(own ‖ fused), the order in which Eq. 10 is printed.
        base: of `KnowledgeClient` and `ClientModule`.
    """

    server_class = KnFuServer
    stackable = True
    sends = frozenset({"logits"})

    def __init__(
        self, beta: float = 10.0, kd_direction: Literal["forward", "reverse"] = "forward", **base: Any
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 leaves the client's own knowledge out", beta=beta)
        check_choice(("forward", "reverse"), kd_direction=kd_direction)
        self.beta = beta
        self.kd_direction = kd_direction

    def distillation_loss(self, logits: Tensor, knowledge: Tensor) -> Tensor:
        return soft_label_divergence(logits, knowledge, self.temperature, self.kd_direction)
