"""FedED: calibrated cross-entropy, distillation on the client's empty classes, suppression of wrong logits.

Source: FedED, Eqs. 2-6; its successor FedVLS, AAAI 2025, for the other form of Eq. 5 and for ω.
Server: FedAvg. The paper's empty classes are those without a local sample, its prior p_c = n_c / n.
Note: Eq. 3 is printed as −KL. The sign is repaired here. Eqs. 4-6 as printed (ω = 1) diverge at every ω > 0, given
enough steps: L_cal does not change when all observed logits fall together, and L_logit falls with them without bound.
The default is the form of the authors' code with its ω.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.classes import in_local
from fl_lightning.functional.losses import calibrated_cross_entropy, cross_entropy, kl_divergence, true_class
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_at_least, check_choice

OMEGA = 0.005
"""Weight of the authors' form of L_logit in their code."""

RUNAWAY = -1000.0
"""Value of L_logit below which a run has diverged. In a run that does not diverge it stays above -10."""


def calibrated_softmax(logits: Tensor, target: Tensor, prior: Tensor, prior_eps: float = 0.0) -> Tensor:
    """Compute L_cal (Eq. 2), the cross-entropy of logits + log(p + ε): (B, C), (B,), (C,) -> ().

    Args:
        logits: Logits of the model in training.
        target: Class of each sample.
        prior: The client's prior p.
        prior_eps: ε ≥ 0. 0 leaves empty classes out.
    """
    return calibrated_cross_entropy(logits, target, (prior + prior_eps).log())


def empty_class_distillation(local: Tensor, teacher: Tensor, prior: Tensor) -> Tensor:
    """Compute L_dis (Eq. 3), KL(teacher || local) over the empty classes: (B, C), (B, C), (C,) -> ().

    It is 0 for fewer than two empty classes.

    Args:
        local: Logits of the model in training.
        teacher: Logits of the received model, as constants.
        prior: The client's prior p, which is 0 for an empty class.
    """
    return kl_divergence(local, teacher, exclude=prior > 0)


def logit_suppression(
    logits: Tensor, target: Tensor, prior: Tensor, form: Literal["paper", "official"] = "paper"
) -> Tensor:
    """Compute L_logit (Eqs. 4-5), Σ_c p_c log mean_b exp(z_bc) over other classes' samples: (B, C), (B,), (C,) -> ().

    A class that all samples of the batch have is skipped.

    Args:
        logits: Logits of the model in training.
        target: Class of each sample.
        prior: The client's prior p.
        form: `paper`: as printed. `official`: the authors' code, whose indicator multiplies z_bc − log p_c − log C. A
            sample of class c itself then adds e⁰, which bounds the term of a class that the batch has from below.
    """
    z = to_float32(logits)
    is_true = true_class(target, logits.shape[1])
    is_observed = prior > 0
    if form == "official":
        offset = prior.masked_fill(~is_observed, 1.0).log() + math.log(len(prior))
        z = (z - offset).masked_fill(is_true, 0.0)
        is_skipped = ~is_observed
    else:
        # A logsumexp over no sample has no gradient, so that the term of such a class is masked below instead.
        has_no_other = is_true.all(0)
        z = z.masked_fill(is_true & ~has_no_other, -math.inf)
        is_skipped = has_no_other | ~is_observed
    terms = z.logsumexp(0) - math.log(len(z))
    return (prior * terms.masked_fill(is_skipped, 0.0)).sum()


class FedED(ClientModule):
    """Trains with the loss L_cal + λ L_dis + ω L_logit (Eq. 6).

    Args:
        lam: Weight λ of the empty-class distillation, >= 0. 0 leaves it out.
        omega: Weight ω of the logit suppression, >= 0. 0 leaves it out. None is 0.005, as in the authors' code, and not
            possible with `paper`.
        logit_form: Form of L_logit. `official`: the authors' code, bounded below for the classes of a batch. `paper`:
            Eqs. 4-5 as printed, which diverge at every ω > 0: at 1 in the first rounds, at 0.005 within one round of
            MNIST.
        calibrated: Whether cross-entropy is calibrated by the prior (Eq. 2). False with lam = omega = 0 is FedAvg.
        prior_eps: Number that is added to the prior in L_cal, >= 0. 0 leaves empty classes out. 1e-9 is the authors'
            code.
        teacher_mode: Mode of the teacher. With `train` its BatchNorm uses batch statistics.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"calibrated": False, "lam": 0, "omega": 0}
    stackable = True
    reads = frozenset({"label counts"})

    def __init__(  # noqa: PLR0917 - called by position
        self,
        lam: float = 0.1,
        omega: float | None = None,
        logit_form: Literal["paper", "official"] = "official",
        calibrated: bool = True,
        prior_eps: float = 0.0,
        teacher_mode: Literal["eval", "train"] = "eval",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_choice(("paper", "official"), logit_form=logit_form)
        if omega is None and logit_form == "paper":
            raise ValueError(
                "FedED with logit_form=paper needs omega, got None: Eq. 6 prints 1, and training diverges at every "
                "omega above 0; leave logit_form at official for one that does not, or set omega"
            )
        omega = OMEGA if omega is None else omega
        check_at_least(0, "0 leaves its part out", lam=lam, omega=omega, prior_eps=prior_eps)
        check_choice(("eval", "train"), teacher_mode=teacher_mode)
        self.lam = lam
        self.omega = omega
        self.logit_form = logit_form
        self.calibrated = calibrated
        self.prior_eps = prior_eps
        self.teacher_mode = teacher_mode

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        # A client without samples takes no step. Its prior of NaN becomes 0.
        prior = in_local(local.label_counts).nan_to_num()
        self.round_buffer("prior", prior)
        if self.lam:
            self.load_teacher("global", mode=self.teacher_mode)
            if local.size():
                # The number is |𝕆|. A single empty class has no other to be distinguished from.
                self.log("train/empty_classes", (prior == 0).sum(), batch_size=1)

    def nonfinite_hint(self) -> str:
        if not self.omega or self.logit_form == "official":
            return super().nonfinite_hint()
        return (
            f"FedED's logit suppression as printed has no lower bound, and training runs away along it at every omega "
            f"above 0, here {self.omega}: set logit_form to official; else {super().nonfinite_hint()}"
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        prior = self.round["prior"]
        if self.calibrated:
            loss = calibrated_softmax(logits, y, prior=prior, prior_eps=self.prior_eps)
        else:
            loss = cross_entropy(logits, y)
        self.log("train/ce", loss)
        if self.lam:
            distillation = empty_class_distillation(logits, self.teacher("global")(x), prior)
            self.log("train/distillation", distillation)
            loss = loss + self.lam * distillation
        if self.omega:
            suppression = logit_suppression(logits, y, prior=prior, form=self.logit_form)
            if self.logit_form == "paper":
                # NaN lets the loop stop, before rounds of nonsense end in an overflow.
                suppression = suppression * torch.where(suppression.detach() < RUNAWAY, math.nan, 1.0)
            self.log("train/suppression", suppression)
            loss = loss + self.omega * suppression
        return loss
