"""FedLC: calibrate the logits of each class by how many samples of it the client has.

Source: Zhang et al., ICML 2022, arXiv:2209.00189. Server: FedAvg. Only the client's own training counts enter.
Note: the paper's denominator leaves the true class out (`form: paper`), which has no lower bound: the gradient on the
true logit is always −1. Codes that compare with it keep the true class (`form: softmax`); FedED (its Eq. 2) attributes
`form: prior` to it.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.classes import in_local
from fl_lightning.functional.losses import calibrated_cross_entropy, true_class
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_above, check_choice

Form = Literal["softmax", "paper", "prior"]


def margins(counts: Tensor, tau: float, form: Form = "softmax") -> Tensor:
    """Compute the terms added to the logits: −τ n_c^(−1/4), or log(n_c/n) for `prior`, −∞ for a class without samples.

    >>> margins(torch.tensor([16, 0, 1]), tau=1.0)
    tensor([-0.5000,    -inf, -1.0000], dtype=torch.float64)
    """
    return in_local(counts).log() if form == "prior" else -tau * counts.double().pow(-0.25)


def calibrated_margin_loss(logits: Tensor, target: Tensor, shift: Tensor) -> Tensor:
    """Average log Σ_{c ≠ y} e^(z_c + s_c) − (z_y + s_y), the paper's form: (B, C), (B,), (C,) -> ().

    Classes with s_c = −∞ are left out; a sample without another class left contributes 0.
    """
    absent = shift == -torch.inf
    z = to_float32(logits) + shift.masked_fill(absent, 0.0)
    true = true_class(target, logits.shape[1])
    others = ~(true | absent)
    few = ~others.any(-1)
    rest = z.masked_fill(~(others | few.unsqueeze(-1)), -torch.inf).logsumexp(-1)  # over all where none is left
    return (rest - (z * true).sum(-1)).masked_fill(few, 0.0).mean()


class FedLC(ClientModule):
    """Local loss of calibrated logits z_c − τ n_c^(−1/4), with plain logits in evaluation.

    Args:
        tau: τ > 0; not read by `prior`.
        form: `softmax`: cross-entropy; `paper`: the true class is not in the denominator; `prior`: cross-entropy of
            z + log(n_c/n).
        base: of `ClientModule`; needs `net`.
    """

    needs = frozenset({"logits"})
    stackable = True
    reads = frozenset({"label counts"})

    def __init__(self, tau: float = 0.1, form: Form = "softmax", **base: Any) -> None:
        super().__init__(**base)
        check_above(0, "FedAvg is the method without margins", tau=tau)
        check_choice(("softmax", "paper", "prior"), form=form)
        self.tau = tau
        self.form = form

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round_buffer("margins", margins(local.label_counts, self.tau, self.form))

    def nonfinite_hint(self) -> str:
        hint = super().nonfinite_hint()
        if self.form != "paper":
            return hint
        return f"FedLC's loss as printed has no lower bound: set form to softmax; else {hint}"

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss_of = calibrated_margin_loss if self.form == "paper" else calibrated_cross_entropy
        loss = loss_of(self(x), y, self.round["margins"])
        self.log("train/ce", loss)
        return loss
