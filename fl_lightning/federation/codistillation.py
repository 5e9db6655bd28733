"""Co-distillation: clients share no weights, but predictions on a common, labelled transfer set.

A round has two exchanges: every client trains its own model on its own data and sends up its predictions, the
*knowledge* (K, C); the server fuses them, and every client fine-tunes on the transfer set towards what it gets back.
A method says how knowledge is fused and how a client learns from it.
"""

from abc import abstractmethod
from collections.abc import Iterable
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32, to_host
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, Phase, State
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

ROWS_AT_ONCE = 1000
"""Transfer samples per forward pass when knowledge is made."""


class KnowledgeServer(ServerModule):
    """Server side of co-distillation: fuses the participants' knowledge.

    There are no shared weights.

    Attributes:
        fused: knowledge that each participant is sent, by client id.
    """

    needs = frozenset({"logits", "transfer", "clients"})

    def __init__(self) -> None:
        super().__init__()
        self.fused: dict[int, Tensor] = {}

    def setup(self) -> None:
        client = self.server.module
        if not isinstance(client, KnowledgeClient):
            raise ValueError(
                f"a {type(self).__name__} needs a client that sends knowledge, such as KnFu, got "
                f"{type(client).__name__}; leave model.server_module unset"
            )
        if not len(self.server.data("transfer")):
            raise ValueError(
                f"{type(client).__name__} needs a transfer set with samples, got an empty one; raise data.transfer_size"
            )

    @abstractmethod
    def fuse(self, client_ids: list[int], knowledge: Tensor) -> Tensor:
        """Fuse the knowledge of N participants into what each is sent: (N, K, C) -> (N, K, C), float64."""

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        extras = {"knowledge": self.fused[client_id]} if exchange == "distill" else {}
        return Broadcast(self.server.round_idx, exchange, None, extras, uploads=False)

    def add(self, update: ClientUpdate) -> None:
        self.gather(update, weights=False)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        if exchange == "train":
            self.fused = {client_id: row.extras["knowledge"] for client_id, row in sorted(self.rows.items())}
            # knowledge that is not finite is reported by the guard, and must not spread; a skipped client's is zeros
            finite = [k.isfinite().all() & self.rows[c].included for c, k in self.fused.items()]
            valid = dict(compress(self.fused.items(), to_host(finite)))
            if valid:
                fused = self.fuse(list(valid), torch.stack(list(valid.values())).double())
                self.fused |= {c: new.to(valid[c].dtype) for c, new in zip(valid, fused, strict=True)}
        return aggregate


class KnowledgeClient(ClientModule):
    """Trains a model of its own, exchanges knowledge, fine-tunes: CE + lam² · `distillation_loss` on the transfer set.

    Models may differ in architecture (`fl_lightning.nets.HeterogeneousNets`). A client without data skips the training
    only.

    Args:
        finetune_epochs: passes over the transfer set in a round, ≥ 0.
        finetune_batch: samples per fine-tuning step, `full` for all; None: the data module's batch size.
        lam: λ ≥ 0, whose square weighs the distillation; 0 fine-tunes with cross-entropy alone.
        temperature: T > 0 of the softmaxes in the distillation, not of the cross-entropy; without a factor T².
        ce_on: samples of the fine-tuning's cross-entropy: `transfer`; `local`: as many of the client's own, drawn
            anew every round; `none`: no cross-entropy.
        base: of `ClientModule`; needs `net`.
    """

    exchanges = ("train", "distill")
    needs = frozenset({"logits", "transfer", "clients"})
    server_class = KnowledgeServer

    def __init__(
        self,
        finetune_epochs: int = 1,
        finetune_batch: int | Literal["full"] | None = None,
        lam: float = 1.0,
        temperature: float = 1.0,
        ce_on: Literal["transfer", "local", "none"] = "transfer",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 only exchanges", finetune_epochs=finetune_epochs)
        if finetune_batch != "full":
            check_at_least(1, "'full' is the whole split", finetune_batch=finetune_batch)
        check_at_least(0, "0 leaves the distillation out", lam=lam)
        check_above(0, temperature=temperature)
        check_choice(("transfer", "local", "none"), ce_on=ce_on)
        self.finetune_epochs = finetune_epochs
        self.finetune_batch = finetune_batch
        self.lam = lam
        self.temperature = temperature
        self.ce_on = ce_on

    def predictions(self, logits: Tensor) -> Tensor:
        """Make the knowledge that is sent up, here soft labels: logits (K, C) -> (K, C), float32 or better."""
        return soft_labels(logits, self.temperature)

    @abstractmethod
    def distillation_loss(self, logits: Tensor, knowledge: Tensor) -> Tensor:
        """Distance of the client's logits from the fused knowledge, both (B, C): ()."""

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return True

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if broadcast.exchange != "distill":
            return
        self.round_buffer("knowledge", broadcast.extras["knowledge"])
        if self.ce_on == "local" and local.size():
            x, y = self.transferred(local.all())
            pairs = torch.arange(local.size("transfer")) % local.size()  # a sample of its own for each transfer sample
            order = torch.randperm(local.size(), generator=local.generator("pairs"))[pairs].to(y.device)
            self.round_buffer("x", x[order])
            self.round_buffer("y", y[order])

    def phases(self, exchange: str) -> Iterable[Phase]:
        if exchange == "train":
            return (Phase(),)
        return (Phase("transfer", self.finetune_epochs, self.finetune_batch, with_index=True),)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "knowledge" not in self.round:
            return self.local_loss(batch, batch_idx)
        (x, y), rows = batch
        logits = self(x)
        distance = self.distillation_loss(logits, self.round["knowledge"][rows])
        loss = self.lam**2 * distance
        self.log("train/distance", distance)
        if self.ce_on == "transfer":
            ce = cross_entropy(logits, y)
        elif "x" in self.round:
            ce = cross_entropy(self(self.round["x"][rows]), self.round["y"][rows])
        else:
            return loss
        self.log("train/finetune_ce", ce)
        return loss + ce

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if exchange != "train":
            return {}
        with torch.no_grad():
            logits = self.over(local, lambda batch: to_float32(self(batch[0])), "transfer", ROWS_AT_ONCE)
            return {"knowledge": self.predictions(torch.cat(logits))}


def soft_labels(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(logits / T): (K, C) -> (K, C), float32 or better.

    >>> soft_labels(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    return (to_float32(logits) / temperature).softmax(-1)


def soft_label_divergence(
    logits: Tensor, target: Tensor, temperature: float = 1.0, direction: Literal["forward", "reverse"] = "forward"
) -> Tensor:
    """Batch mean of KL(target ‖ softmax(logits / T)), or the other way round.

    No factor T².

    Args:
        logits: of the model in training, (B, C).
        target: probabilities to be matched, (B, C); a constant.
        temperature: T > 0.
        direction: `reverse`: KL(softmax ‖ target), the target floored at 1e-12.

    Returns:
        (), ≥ 0, in nats; 0 where both agree; float32 or better.

    >>> soft_label_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """
    log_q = (to_float32(logits) / temperature).log_softmax(-1)
    target = target.to(log_q.dtype)
    if direction == "forward":
        return (torch.xlogy(target, target) - target * log_q).sum(-1).mean()
    return (log_q.exp() * (log_q - target.clamp(min=1e-12).log())).sum(-1).mean()
