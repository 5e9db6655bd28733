"""FedLC: calibrate the logit of each class by the client's number of samples of the class.

Source: Zhang et al., ICML 2022, arXiv:2209.00189. Server: FedAvg. Only the client's own training counts enter.
Note: the paper's denominator leaves the true class out (`form: paper`), which has no lower bound: the gradient on the
true logit is always −1. Codes that compare with it keep the true class (`form: softmax`). FedED (its Eq. 2) attributes
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
    """Compute the terms that are added to the logits: −τ n_c^(−1/4), or log(n_c/n) for `prior`.

    A class without samples has −∞.

    Args:
        counts: Numbers of samples n_c, (C,).
        tau: τ.
        form: Form of the loss.

    >>> margins(torch.tensor([16, 0, 1]), tau=1.0)
    tensor([-0.5000,    -inf, -1.0000], dtype=torch.float64)
    """
    if form == "prior":
        return in_local(counts).log()
    return -tau * counts.double().pow(-0.25)


def calibrated_margin_loss(logits: Tensor, target: Tensor, shift: Tensor) -> Tensor:
    """Average log Σ_{c ≠ y} e^(z_c + s_c) − (z_y + s_y), the paper's form: (B, C), (B,), (C,) -> ().

    Classes with s_c = −∞ are left out. A sample without another class left contributes 0.

    Args:
        logits: Logits z.
        target: Class y of each sample.
        shift: Terms s.

    >>> calibrated_margin_loss(torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([0]), torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(-1.)
    """
    absent = shift == -torch.inf
    z = to_float32(logits) + shift.masked_fill(absent, 0.0)
    is_true = true_class(target, logits.shape[1])
    others = ~(is_true | absent)
    has_none = ~others.any(-1)
    # A sample without another class takes all classes here, and is set to 0 below.
    rest = z.masked_fill(~(others | has_none.unsqueeze(-1)), -torch.inf).logsumexp(-1)
    return (rest - (z * is_true).sum(-1)).masked_fill(has_none, 0.0).mean()


class FedLC(ClientModule):
    """Trains on calibrated logits z_c − τ n_c^(−1/4), and evaluates the plain ones.

    Args:
        tau: τ > 0. `prior` does not read it.
        form: Form of the loss. `softmax`: cross-entropy. `paper`: the true class is not in the denominator. `prior`:
            cross-entropy of z + log(n_c/n).
        base: Arguments of `ClientModule`, which must include `net`.
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
