"""FedKA: keep the received model's logits on a few anchors of the classes that a client lacks or has few samples of.

Source: FedKA, Algorithm 1 and Eq. 3. Server: FedAvg. γ is not in the paper; 0.5/C is ours.
The shared set, one training sample of each class, is the same for all clients and rounds and stays with its owners.
Note: as printed, nothing holds the dominant classes' logits on the anchors, and on real data FedKA then falls behind
FedAvg. With `columns: all`, as in the shipped files, it is ahead.
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
"""The split of the samples of each source."""


@dataclass(frozen=True)
class Anchor:
    """Names one sample of the shared set or of the client's own, by its position there.

    Args:
        label: The class of the sample.
        source: The set of the sample.
        index: The position of the sample in the set.
    """

    label: int
    source: TransferSource
    index: int


def anchor_plan(
    split: ClassSplit, use_missing: bool = True, use_non_dominant: bool = True
) -> dict[int, TransferSource]:
    """Return the source of each anchor by its class, ascending: `shared` for missing classes, `local` for non-dominant.

    Args:
        split: The classes of the client.
        use_missing: Whether missing classes have anchors.
        use_non_dominant: Whether non-dominant classes have anchors.
    """
    sources: dict[int, TransferSource] = {}
    if use_missing:
        sources |= dict.fromkeys(split.missing.nonzero().flatten().tolist(), "shared")
    if use_non_dominant:
        sources |= dict.fromkeys(split.non_dominant.nonzero().flatten().tolist(), "local")
    return dict(sorted(sources.items()))


def kept_columns(split: ClassSplit, columns: Columns = "dropped") -> Tensor:
    """Return which logits of an anchor are held, (C,) bool: `all`, or all with the dominant classes' `dropped`."""
    return torch.ones_like(split.dominant) if columns == "all" else ~split.dominant


def anchor_loss(received: Tensor, local: Tensor, kept: Tensor, valid: Tensor) -> Tensor:
    """Compute L_KA (Eq. 3): squared logit differences, summed over anchors and kept classes, by the number of anchors.

    Args:
        received: Logits of the received model on the anchors, (A, C), as constants.
        local: Logits of the model in training, (A, C).
        kept: Whether the logit of a class is held, (C,) bool, as `kept_columns` returns it.
        valid: Whether a row is an anchor and no padding, (A,) bool.

    Returns:
        (), ≥ 0. 0 without a valid row or a kept class.

    >>> received, local = torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])
    >>> anchor_loss(received, local, kept=torch.tensor([True, False]), valid=torch.tensor([True]))
    tensor(1.)
    """
    squares = (to_float32(local) - to_float32(received.detach())).square()
    return (squares * (valid.unsqueeze(-1) & kept)).sum() / valid.sum().clamp(min=1)


def pick(  # noqa: PLR0917 - called by position
    labels: Tensor, label: int, strategy: str, losses: Tensor, generator: torch.Generator | None
) -> int:
    """Pick a sample of a class, and return its position. Of equal losses it takes the first.

    Args:
        labels: Class of each sample, (n,).
        label: The class, which must occur.
        strategy: `random`, `hard` (the largest loss) or `proficient` (the smallest loss).
        losses: Cross-entropy of each sample under the received model, (n,). `random` does not read it.
        generator: Generator of `random`.
    """
    positions = (labels == label).nonzero().flatten()
    if strategy == "random":
        chosen = torch.randint(len(positions), (), generator=generator)
    else:
        values = losses[positions]
        chosen = values.argmax() if strategy == "hard" else values.argmin()
    return int(positions[int(chosen)])


class FedKA(ClientModule):
    """Trains with the loss CE + β L_KA.

    Args:
        beta: Weight β of the anchors, >= 0. 0 is FedAvg. The term is quadratic in the logits, so that its curvature
            grows with them over the rounds. If a client ends in NaN after a good start, take less, or clip gradients
            (`model.clip_norm`). On CIFAR-10 at the paper's size 0.01 is still too much.
        gamma: Least share γ of a dominant class, >= 0. None is 0.5 / C.
        max_anchors: Largest number μ of anchors of a client in a round, >= 0. 0 is FedAvg.
        strategy: Anchor of a non-dominant class: a `random` sample, or the sample with the largest (`hard`) or smallest
            (`proficient`) cross-entropy under the received model.
        use_missing: Whether missing classes have anchors.
        use_non_dominant: Whether non-dominant classes have anchors.
        columns: Logits of an anchor that are held: `all`, or all with those of dominant classes `dropped` (Eq. 3).
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits", "shared"})
    fedavg_equivalent = {"beta": 0}
    stackable = False  # some clients have no anchors
    reads = frozenset({"label counts", "labels", "samples"})

    def __init__(  # noqa: PLR0917 - called by position
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

        A study may override the draw.

        Args:
            plan: `shared` or `local` by class, ascending.
            samples: The samples x (n, ...) and y (n,) of the `shared` set, and of the client (`local`) if the plan asks
                for them.
            local: The client's data.
        """
        generator = local.generator("anchors")
        classes = torch.tensor(list(plan), dtype=torch.int64)
        drawn = torch.randperm(len(plan), generator=generator)[: self.max_anchors]
        classes = classes[drawn.sort().values]
        labels = {source: local.labels(SPLITS[source]) for source in samples}
        hardness = torch.empty(0)
        if self.strategy != "random" and "local" in samples:
            x, y = samples["local"]
            hardness = self.losses(x, y).cpu()
        anchors = []
        for label in classes.tolist():
            source = plan[label]
            index = pick(
                labels=labels[source],
                label=label,
                strategy=self.strategy if source == "local" else "random",
                losses=hardness,
                generator=generator,
            )
            anchors.append(Anchor(label=label, source=source, index=index))
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
        # The backward pass reads the statistics, which the batch's forward pass has changed by then: copies stay.
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with evaluating(net), self.forward_context():
            logits: Tensor = functional_call(net, buffers, (x,)) if buffers else net(x)
        return logits

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if not (self.max_anchors and local.size()):
            return
        counts = local.label_counts
        gamma = 0.5 / len(counts) if self.gamma is None else self.gamma
        split = class_split(counts, gamma)
        plan = anchor_plan(split, use_missing=self.use_missing, use_non_dominant=self.use_non_dominant)
        if not plan:
            return
        samples = {source: self.transferred(local.all(SPLITS[source])) for source in {"shared", *plan.values()}}
        _, shared_labels = samples["shared"]
        if not len(shared_labels):
            raise ValueError("FedKA needs a shared set with samples, got an empty one; set data.shared_per_class")
        # A class of which no client has a sample is not in the shared set.
        available = set(local.labels("shared").tolist())
        plan = {label: source for label, source in plan.items() if source == "local" or label in available}
        anchors = self.draw_anchors(plan, samples, local)
        if not anchors:
            return
        rows = torch.stack([samples[anchor.source][0][anchor.index] for anchor in anchors])
        x = self._padded(rows, num_classes=len(counts))
        self.round_buffer("anchors", x)
        self.round_buffer("valid", torch.arange(len(x), device=x.device) < len(rows))
        self.round_buffer("kept", copy_to_device(kept_columns(split, self.columns), x.device))
        self.round_buffer("received", self.anchor_logits(x).detach())

    def _padded(self, rows: Tensor, num_classes: int) -> Tensor:
        """Return the inputs of the anchors with rows of padding, (A, ...)."""
        if mixes_samples(self):
            # Padding would change the anchors' logits, and one row alone has no batch statistics.
            return rows if len(rows) > 1 else torch.cat([rows, rows])
        # All clients have inputs of one shape.
        num_rows = max(len(rows), min(self.max_anchors, num_classes))
        x = rows.new_zeros((num_rows, *rows.shape[1:]))
        x[: len(rows)] = rows
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "anchors" not in self.round:
            return self.local_loss(batch, batch_idx)
        # This pass comes before the batch's, so that at the first step the logits are those of the received model.
        logits = self.anchor_logits(self.round["anchors"])
        ka = anchor_loss(
            received=self.round["received"],
            local=logits,
            kept=self.round["kept"],
            valid=self.round["valid"],
        )
        self.log("train/ka", ka)
        return self.local_loss(batch, batch_idx) + self.beta * ka
