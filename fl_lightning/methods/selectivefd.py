"""Selective-FD: clients answer only for transfer samples like their own, and the server keeps only clear answers.

Source: Shao et al., Nature Communications 2024, arXiv:2304.01731; the density ratio by KuLSIF, Kanamori et al. 2012.
Note: the authors' code multiplies by the matrix of KuLSIF where its inverse is meant. Here the system is solved. The
server's statistic is not in their code. It is the entropy here, as in the paper's text.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client import check_features
from fl_lightning.federation.checkpoint import client_state
from fl_lightning.federation.codistillation import KnowledgeClient, KnowledgeServer
from fl_lightning.functional.density import DensityRatio
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, Phase, State
from fl_lightning.utils.settings import check_above, check_at_least, check_below, check_choice

KNOWN = 0.05
"""Share of a client's samples to which the density ratio is fitted. The others set the threshold."""


def ambiguity_of(probabilities: Tensor, kind: Literal["entropy", "l1"] = "entropy") -> Tensor:
    """Compute the entropy in nats, or the l1 distance 2 (1 − max p) to the nearest one-hot vector: (K, C) -> (K,).

    >>> ambiguity_of(torch.tensor([[0.5, 0.5], [1.0, 0.0]])), ambiguity_of(torch.tensor([[0.75, 0.25]]), "l1")
    (tensor([0.6931, -0.0000]), tensor([0.5000]))
    """
    if kind == "l1":
        return 2 * (1 - probabilities.max(1).values)
    return -torch.xlogy(probabilities, probabilities).sum(1)


class Ensemble(NamedTuple):
    """Holds the samples that the server keeps: their rows (k,), mean predictions (k, C) and ambiguities (k,)."""

    rows: Tensor
    mean: Tensor
    ambiguity: Tensor


def kept_ensemble(total: Tensor, counts: Tensor, tau: float, kind: Literal["entropy", "l1"] = "entropy") -> Ensemble:
    """Keep the samples with an answer and an ambiguity of at most tau.

    Args:
        total: Sums of the answers, (K, C) float64.
        counts: Numbers of answers, (K,) float64.
        tau: Largest ambiguity of a kept sample.
        kind: Form of the ambiguity.
    """
    mean = total / counts.clamp(min=1)[:, None]
    ambiguity = ambiguity_of(mean, kind)
    rows = ((counts > 0) & (ambiguity <= tau)).nonzero().flatten()
    return Ensemble(rows=rows, mean=mean[rows], ambiguity=ambiguity[rows])


class SelectiveFDServer(KnowledgeServer):
    """Sends every participant the mean answers to the samples on which they are clear.

    Attributes:
        ensemble: The kept samples of the last round. None before.
    """

    ensemble: Ensemble | None = None

    def setup(self) -> None:
        super().setup()
        self.client_of(SelectiveFD)

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        extras: dict[str, Any] = {}
        if exchange == "distill" and self.ensemble is not None:
            extras = {"knowledge": self.ensemble.mean, "rows": self.ensemble.rows}
        return Broadcast(
            round_idx=self.server.round_idx,
            exchange=exchange,
            weights=None,
            extras=extras,
            uploads=False,
        )

    def add(self, update: ClientUpdate) -> None:
        if "rows" in update.extras:
            rows = update.extras["rows"]
            answers = update.extras["knowledge"].double()
            size = len(self.server.data("transfer"))
            total = answers.new_zeros(size, answers.shape[1]).index_copy_(0, rows, answers)
            counts = answers.new_zeros(size).index_fill_(0, rows, 1.0)
            self.sum("answers", {"total": total, "counts": counts}, 1.0 * update.included)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        if exchange == "train":
            client = self.client_of(SelectiveFD)
            answers = self.summed("answers")
            self.ensemble = kept_ensemble(
                total=answers["total"],
                counts=answers["counts"],
                tau=client.tau_server,
                kind=client.ambiguity,
            )
        return aggregate


class SelectiveFD(KnowledgeClient):
    """Answers for transfer samples whose density ratio exceeds a quantile of its own, and learns from the kept answers.

    A client chooses these samples at its first participation, and again when its own samples have changed.

    Args:
        quantile: Quantile of the density ratio on the client's own samples that is the threshold, in [0, 1).
        tau_server: Largest ambiguity of a kept sample, > 0. inf keeps all.
        ambiguity: Form of the ambiguity: `entropy` in nats, or `l1`.
        selector: Vectors whose density ratio is taken: `features`, or the `inputs` themselves.
        selector_weights: File with a state dict or checkpoint of the net whose features are taken. None takes the
            client's own net as it is then, which at its first participation is the initial one.
        width: Width σ of the Gaussian kernel, > 0.
        num_reference: Number n of points that are drawn uniformly between the least and the greatest value of the
            client's data, >= 1.
        ce_on: Samples of the cross-entropy, as in `KnowledgeClient`. `none` is the distillation alone, without labels.
        base: Arguments of `KnowledgeClient` and `ClientModule`.
    """

    server_class = SelectiveFDServer
    stackable = False  # clients may have different nets, and fine-tune on different samples
    sends = frozenset({"logits", "statistics"})
    reads = frozenset({"batches"})

    def __init__(  # noqa: PLR0917 - called by position
        self,
        quantile: float = 0.25,
        tau_server: float = math.inf,
        ambiguity: Literal["entropy", "l1"] = "entropy",
        selector: Literal["features", "inputs"] = "features",
        selector_weights: str | Path | None = None,
        width: float = 5.0,
        num_reference: int = 250,
        ce_on: Literal["transfer", "local", "none"] = "none",
        **base: Any,
    ) -> None:
        # The base builds the net at once if it knows the data, and `build` asks for the selector.
        self.selector = selector
        super().__init__(ce_on=ce_on, **base)
        check_at_least(0, "0 answers for whatever is nearer than the farthest own sample", quantile=quantile)
        check_below(1, quantile=quantile)
        check_above(0, tau_server=tau_server, width=width)
        check_choice(("entropy", "l1"), ambiguity=ambiguity)
        check_choice(("features", "inputs"), selector=selector)
        check_at_least(1, num_reference=num_reference)
        if selector_weights is not None and (selector == "inputs" or not Path(selector_weights).is_file()):
            raise ValueError(
                f"selector_weights must be a file, for selector='features', got {selector_weights} with "
                f"selector={selector!r}; leave it unset to take the initial net's features"
            )
        self.quantile = quantile
        self.tau_server = tau_server
        self.ambiguity = ambiguity
        self.selector_weights = selector_weights
        self.width = width
        self.num_reference = num_reference

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        if self.selector == "features":
            check_features(self, type(self).__name__)

    def distillation_loss(self, logits: Tensor, knowledge: Tensor) -> Tensor:
        log_q = (to_float32(logits) / self.temperature).log_softmax(-1)
        return -(knowledge.to(log_q.dtype) * log_q).sum(-1).mean()

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if broadcast.exchange == "train":
            self.renew_selection(local)
        elif broadcast.exchange == "distill":
            super().receive(broadcast, local)
            self.round["rows"] = broadcast.extras["rows"]

    def renew_selection(self, local: ClientData) -> None:
        """Choose the transfer samples anew if the client has other samples than at the last choice.

        The memory holds the samples of a choice unless these are all that the client was dealt.
        """
        n, present = local.dealt()
        some = present if len(present) < n else None
        chosen_of = self.memory.get("selected_of")
        same_stage = self.memory.get("stage", 0) == local.stage
        if "selected" in self.memory and same_stage and is_same(chosen_of, some):
            return
        self.memory["selected"] = self.select(local)
        self.memory.pop("selected_of", None)
        if some is not None:
            self.memory["selected_of"] = some
        if local.stage:
            # Samples may be seen in another way than at the last choice.
            self.memory["stage"] = local.stage

    @torch.no_grad()
    def select(self, local: ClientData) -> Tensor:
        """Choose the transfer samples that this client answers for, ascending: (k,) int64."""
        n = local.size()
        device = next(self.parameters()).device
        if not n:
            return torch.zeros(0, dtype=torch.int64, device=device)
        train = self.represented(local, "train")
        transfer = self.represented(local, "transfer")
        generator = local.generator("selector", per_round=False)
        order = torch.randperm(n, generator=generator).to(device)
        num_known = max(1, int(KNOWN * n + 1e-9))
        uniform = torch.rand(self.num_reference, train.shape[1], generator=generator, dtype=torch.float64).to(device)
        reference = train.min() + uniform * (train.max() - train.min())
        ratio = DensityRatio.fit(train[order[:num_known]], reference, width=self.width)
        others = train[order[num_known:]] if n > num_known else train
        threshold = ratio(others).quantile(self.quantile)
        return (ratio(transfer) > threshold).nonzero().flatten()

    def represented(self, local: ClientData, split: str) -> Tensor:
        """Return the vectors of all samples of a split whose density ratio is taken, (n, d) float64."""
        net: Any = self
        if self.selector_weights is not None:
            self.load_teacher("selector", client_state(Path(self.selector_weights), self))
            net = self.teacher("selector")
        represent = net.features if self.selector == "features" else nn.Identity()
        return self.rows_over(local, lambda batch: represent(batch[0]).flatten(1).double(), split)

    def phases(self, exchange: str) -> Iterable[Phase]:
        (phase,) = super().phases(exchange)
        if exchange != "train":
            phase = replace(phase, indices=self.round["rows"])
        return (phase,)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if exchange != "train":
            return {}
        rows = self.memory["selected"]
        if not len(rows):
            return {"knowledge": torch.zeros(0, self.num_classes or 0, device=rows.device), "rows": rows}
        return {**super().reply(exchange, local.restricted("transfer", rows)), "rows": rows}


def is_same(first: Tensor | None, second: Tensor | None) -> bool:
    """Return True if two sets of samples are the same. None is all samples."""
    if first is None or second is None:
        return first is second
    return torch.equal(first.cpu(), second)
