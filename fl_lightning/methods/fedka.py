"""FedKA: keep the received model's logits on a few anchors of the classes that a client lacks or has few samples of.

Source: FedKA, Algorithm 1 and Eq. 3. Server: FedAvg. γ is not in the paper; 0.5/C is ours.
The shared set, one training sample of each class, is the same for all clients and rounds and stays with its owners.
Note: as printed, nothing holds the dominant classes' logits on the anchors, and on real data FedKA then falls behind
FedAvg; with `columns: all`, as in the shipped files, it is ahead.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.client import ClientModule
from fl_lightning.client.modes import evaluating, mixes_samples
from fl_lightning.functional.classes import ClassSplit, class_split
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.settings import check_at_least, check_choice

TransferSource = Literal["shared", "local"]
Columns = Literal["dropped", "all"]
SPLITS: dict[TransferSource, str] = {"shared": "shared", "local": "train"}


@dataclass(frozen=True)
class Anchor:
    """One sample of the shared set or of the client's own, by its position there."""

    label: int
    source: TransferSource
    index: int


def anchor_plan(
    split: ClassSplit, use_missing: bool = True, use_non_dominant: bool = True
) -> dict[int, TransferSource]:
    """Choose the source of each class's anchor: missing classes `shared`, non-dominant ones `local`."""
    sources: dict[int, TransferSource] = {
        k: "shared" for k in split.missing.nonzero().flatten().tolist() if use_missing
    }
    sources |= {k: "local" for k in split.non_dominant.nonzero().flatten().tolist() if use_non_dominant}
    return dict(sorted(sources.items()))


def kept_columns(split: ClassSplit, columns: Columns = "dropped") -> Tensor:
    """Choose which logits of an anchor are held, (C,) bool, with the dominant classes' `dropped`, or with `all`."""
    return torch.ones_like(split.dominant) if columns == "all" else ~split.dominant


def anchor_loss(received: Tensor, local: Tensor, kept: Tensor, valid: Tensor) -> Tensor:
    """Compute L_KA (Eq. 3): squared logit differences, summed over anchors and kept classes, by the number of anchors.

    Args:
        received: logits of the received model on the anchors, (A, C); taken as constants.
        local: logits of the model in training, (A, C).
        kept: classes whose logits are held, (C,) bool: `kept_columns`.
        valid: False where a row is padding, (A,) bool.

    Returns:
        (), >= 0; 0 without a valid row or a kept class.
    """
    squares = (to_float32(local) - to_float32(received.detach())).square()
    return (squares * (valid.unsqueeze(-1) & kept)).sum() / valid.sum().clamp(min=1)


def pick(labels: Tensor, label: int, strategy: str, losses: Tensor, generator: torch.Generator | None) -> int:
    """Pick a sample of a class by its position: at random, or by the largest or smallest loss (the first on ties).

    Args:
        labels: class of each sample, (n,).
        label: the class, which must occur.
        strategy: `random`, `hard` (largest loss) or `proficient` (smallest).
        losses: cross-entropy of each sample under the received model, (n,); `random` reads none.
        generator: of `random`.
    """
    positions = (labels == label).nonzero().flatten()
    if strategy == "random":
        chosen = torch.randint(len(positions), (), generator=generator)
    else:
        values = losses[positions]
        chosen = values.argmax() if strategy == "hard" else values.argmin()
    return int(positions[int(chosen)])


class FedKA(ClientModule):
    """Local loss CE + β L_KA.

    Args:
        beta: β, weight of the anchors, >= 0; 0 is FedAvg. The term is quadratic in the logits, so that its curvature
            grows with them over the rounds: where a client ends in NaN after a good start, take less, or clip gradients
            (`model.clip_norm`); on CIFAR-10 at the paper's size 0.01 is still too much.
        gamma: γ, least share of a dominant class, >= 0; None: 0.5 / C.
        max_anchors: μ, most anchors of a client and round, >= 0; 0 is FedAvg.
        strategy: anchor of a non-dominant class: a `random` sample, or the one with the largest (`hard`) or smallest
            (`proficient`) cross-entropy under the received model.
        use_missing: whether missing classes have anchors.
        use_non_dominant: whether non-dominant classes have anchors.
        columns: logits of an anchor that are held: those of dominant classes are `dropped` (Eq. 3), or `all`.
        base: of `ClientModule`; needs `net`.
    """

    needs = frozenset({"logits", "shared"})
    fedavg_equivalent = {"beta": 0}
    stackable = False  # some clients have no anchors
    reads = frozenset({"label counts", "labels", "samples"})

    def __init__(
        self,
        beta: float = 0.1,
        gamma: float | None = None,
        max_anchors: int = 10,
        strategy: Literal["random", "hard", "proficient"] = "random",
        use_missing: bool = True,
        use_non_dominant: bool = True,
        columns: Columns = "dropped",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, beta=beta, gamma=gamma, max_anchors=max_anchors)
        check_choice(("random", "hard", "proficient"), strategy=strategy)
        check_choice(("dropped", "all"), columns=columns)
        self.beta = beta
        self.gamma = gamma
        self.max_anchors = max_anchors
        self.strategy = strategy
        self.use_missing = use_missing
        self.use_non_dominant = use_non_dominant
        self.columns = columns

    def draw_anchors(
        self, plan: dict[int, TransferSource], samples: dict[TransferSource, Batch], local: ClientData
    ) -> list[Anchor]:
        """Draw this round's anchors of a client, at most `max_anchors`.

        A study may override it.

        Args:
            plan: `shared` or `local` by class, ascending.
            samples: x (n, ...) and y (n,) of the `shared` set, and of the client (`local`) where the plan asks for it.
            local: the client's data.
        """
        generator = local.generator("anchors")
        classes = torch.tensor(list(plan), dtype=torch.int64)
        classes = classes[torch.randperm(len(plan), generator=generator)[: self.max_anchors].sort().values]
        labels = {source: local.labels(SPLITS[source]) for source in samples}
        hardness = torch.empty(0)
        if self.strategy != "random" and "local" in samples:
            hardness = self.losses(*samples["local"]).cpu()
        anchors = []
        for k in classes.tolist():
            strategy = self.strategy if plan[k] == "local" else "random"
            anchors.append(Anchor(k, plan[k], pick(labels[plan[k]], k, strategy, hardness, generator)))
        return anchors

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute each sample's cross-entropy under the net with its present weights: (n, ...), (n,) -> (n,)."""
        with self.evaluation_mode():
            logits = torch.cat([to_float32(self(part)) for part in torch.split(x, 1000)])
        return F.cross_entropy(logits, y, reduction="none")

    def anchor_logits(self, x: Tensor) -> Tensor:
        """Compute the logits of anchors without dropout, on fixed running statistics: (A, ...) -> (A, C)."""
        net = self.built_net
        # copies: the backward pass reads the statistics, which the batch's forward has changed by then
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with evaluating(net), self.forward_context():
            logits: Tensor = functional_call(net, buffers, (x,)) if buffers else net(x)
        return logits

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if not (self.max_anchors and local.size()):
            return
        counts = local.label_counts
        split = class_split(counts, 0.5 / len(counts) if self.gamma is None else self.gamma)
        plan = anchor_plan(split, self.use_missing, self.use_non_dominant)
        if not plan:
            return
        samples = {source: self.transferred(local.all(SPLITS[source])) for source in {"shared", *plan.values()}}
        if not len(samples["shared"][1]):
            raise ValueError("FedKA needs a shared set with samples, got an empty one; set data.shared_per_class")
        held = set(local.labels("shared").tolist())  # a class without samples is not in the shared set
        plan = {k: source for k, source in plan.items() if source == "local" or k in held}
        anchors = self.draw_anchors(plan, samples, local)
        if not anchors:
            return
        rows = torch.stack([samples[anchor.source][0][anchor.index] for anchor in anchors])
        if mixes_samples(self):  # padding would change the anchors' logits; one row has no statistics
            x = rows if len(rows) > 1 else torch.cat([rows, rows])
        else:  # of one shape for all clients
            x = rows.new_zeros(max(len(rows), min(self.max_anchors, len(counts))), *rows.shape[1:])
            x[: len(rows)] = rows
        self.round_buffer("anchors", x)
        self.round_buffer("valid", torch.arange(len(x), device=x.device) < len(rows))
        self.round_buffer("kept", copy_to_device(kept_columns(split, self.columns), x.device))
        self.round_buffer("received", self.anchor_logits(x).detach())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "anchors" not in self.round:
            return self.local_loss(batch, batch_idx)
        logits = self.anchor_logits(self.round["anchors"])  # before the batch's forward: at first those received
        ka = anchor_loss(self.round["received"], logits, self.round["kept"], self.round["valid"])
        self.log("train/ka", ka)
        return self.local_loss(batch, batch_idx) + self.beta * ka
