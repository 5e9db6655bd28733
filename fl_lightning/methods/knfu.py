"""KnFu: fuse predictions on a transfer set for each client, weighted by the nearness of class distributions.

Source: Seyedmohammadi et al. 2024, arXiv:2403.11892, Alg. 1, Eqs. 5-10. Server: no weights, only predictions.
Note: Eqs. 7-8 divide by zero at m = n and for equal distributions. Here m = n is left out of the maximum, and distances
are floored at ε. λ (weight) and T (temperature) are one letter in the paper and two settings here.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.federation.codistillation import KnowledgeClient, KnowledgeServer, soft_label_divergence
from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.utils.settings import check_at_least, check_choice


class Fusion(NamedTuple):
    """Holds the values of one round's fusion, float64, with rows in the order of `client_ids`.

    Args:
        client_ids: The ids of the participants.
        epd: Estimated class distributions p_n, (N, C).
        distances: Distances d_nm, (N, N).
        weights: Weights of the fusion w_nm, (N, N).
    """

    client_ids: list[int]
    epd: Tensor
    distances: Tensor
    weights: Tensor


def distances(epd: Tensor, floor: float = 1e-12) -> Tensor:
    """Compute d_nm = KL(p_n ‖ p_m) (Eq. 6), with p floored and renormalized: (N, C) -> (N, N), 0 on the diagonal."""
    p = epd.double().clamp(min=floor)
    p = p / p.sum(1, keepdim=True)
    return (p[:, None] * (p[:, None] / p[None]).log()).sum(-1)


def fusion_weights(distance: Tensor, beta: float, eps: float = 1e-8) -> Tensor:
    """Compute w_nm = 1/d_nm², w_nn = beta · max over m ≠ n (Eqs. 7-8), with rows of sum 1: (N, N) -> (N, N).

    Every row is first divided by its maximum over m ≠ n, so that nothing overflows. Hence w_nn ≥ beta / (beta + N − 1).

    Args:
        distance: Distances d_nm.
        beta: Weight of the client's own knowledge.
        eps: Floor ε of the distances.

    >>> fusion_weights(torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]), beta=3.0)[1]
    tensor([0.2000, 0.6000, 0.2000])
    """
    n = len(distance)
    if n == 1:
        return torch.ones_like(distance)
    diagonal = torch.eye(n, dtype=torch.bool, device=distance.device)
    others = distance.clamp(min=eps).masked_fill(diagonal, torch.inf)
    nearest = others.min(1, keepdim=True).values
    weights = (nearest / others).square().masked_fill(diagonal, beta)
    return weights / weights.sum(1, keepdim=True)


def fused_knowledge(weights: Tensor, knowledge: Tensor) -> Tensor:
    """Compute F_n^agg = Σ_m w_nm F_m (Eq. 9): (N, N), (N, K, C) -> (N, K, C)."""
    return torch.einsum("nm,mkc->nkc", weights, knowledge.double())


class KnFuServer(KnowledgeServer):
    """Fuses the participants' knowledge for each of them.

    Attributes:
        fusion: The fusion of the last round. None before.
    """

    fusion: Fusion | None = None

    def fuse(self, client_ids: list[int], knowledge: Tensor) -> Tensor:
        beta = self.client_of(KnFu).beta
        epd = estimated_distribution(knowledge)
        distance = distances(epd)
        weights = fusion_weights(distance, beta)
        self.fusion = Fusion(client_ids=client_ids, epd=epd, distances=distance, weights=weights)
        return fused_knowledge(weights, knowledge)


class KnFu(KnowledgeClient):
    """Fine-tunes with CE + lam² · KL(F_n^agg ‖ softmax) on the transfer set (Eq. 10).

    Args:
        beta: Weight of the client's own knowledge relative to its nearest neighbor's, ≥ 0.
        kd_direction: Direction of the divergence. `forward`: KL(fused ‖ own). `reverse`: KL(own ‖ fused), the order in
            which Eq. 10 is printed.
        base: Arguments of `KnowledgeClient` and `ClientModule`.
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
        return soft_label_divergence(logits, knowledge, temperature=self.temperature, direction=self.kd_direction)
