"""FedDecorr: keep the features of a local model from collapsing onto few dimensions.

Source: Shi et al., ICLR 2023, arXiv:2210.00226. Server: FedAvg.
Note: the paper prints the squared Frobenius norm of the correlation matrix over d² (`form: paper`). The released code,
to which the published coefficient 0.1 belongs, leaves the diagonal out and does not divide the matrix by the number of
samples (`form: code`): with 64 samples a batch its gradient is about 63 times as long.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch
from fl_lightning.utils.settings import check_at_least, check_choice

Form = Literal["code", "paper"]
EPS = 1e-8
"""Added to the variance of a feature."""


def decorrelation(features: Tensor, form: Form = "code") -> Tensor:
    """Average the squared correlations between the features of a batch: (B, d) -> (), >= 0.

    A feature that is constant in the batch is correlated with none, itself included, so that one sample gives 0.

    Args:
        features: Features that the head reads.
        form: `code`: over the pairs c ≠ c', of zᵀz with the unbiased variance, divided by B. 0 for d = 1.
            `paper`: over all pairs, of zᵀz / B with the biased variance.

    Returns:
        (), in float32 or better.

    >>> alike = torch.tensor([[0.0, 3.0], [1.0, 5.0]])
    >>> decorrelation(alike, "paper"), decorrelation(alike, "code")
    (tensor(1.), tensor(0.5000))
    """
    z = to_float32(features)
    size, width = z.shape
    z = z - z.mean(0)
    freedom = max(size - 1, 1) if form == "code" else size
    variance = z.square().sum(0) / freedom
    z = z / (variance + EPS).sqrt()
    products = z.T @ z
    squares = products.square()
    if form == "paper":
        return squares.mean() / size**2
    itself = torch.eye(width, dtype=torch.bool, device=z.device)
    pairs = max(width * (width - 1), 1)
    return squares.masked_fill(itself, 0.0).sum() / (pairs * size)


class FedDecorr(ClientModule):
    """Trains with the loss CE + beta · decorrelation of the features that the head reads.

    Args:
        beta: Weight of the penalty, >= 0. 0 is FedAvg.
        form: Scale of the penalty. `code`: the released code's, to which the published 0.1 belongs. `paper`: as
            printed.
        base: Arguments of `ClientModule`, which must include `net` unless beta is 0.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"beta": 0}
    stackable = True

    def __init__(self, beta: float = 0.1, form: Form = "code", **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", beta=beta)
        check_choice(("code", "paper"), form=form)
        self.beta = beta
        self.form = form

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        with self.forward_context():
            logits = self.built_net.head(features)
        ce = cross_entropy(logits, y)
        penalty = decorrelation(features, self.form)
        self.log_dict({"train/ce": ce, "train/decorr": penalty})
        return ce + self.beta * penalty
