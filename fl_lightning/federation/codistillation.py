"""Co-distillation: the clients share predictions on a common, labeled transfer set, and no weights.

A round has two exchanges. In the first, each client trains its own model on its own data and sends its predictions on
the K transfer samples, the *knowledge* (K, C). The server fuses the knowledge of all clients. In the second exchange
each client gets its fused knowledge and fine-tunes on the transfer set towards it. A method says how knowledge is
fused and how a client learns from it.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32, to_host
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, Phase, State
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

KNOWLEDGE_BATCH_SIZE = 1000
"""Transfer samples per forward pass when knowledge is made."""


class KnowledgeServer(ServerModule):
    """Fuses the knowledge of a round's clients, which share no weights.

    Attributes:
        fused: The knowledge (K, C) that is sent to each client of the round, by client id.
    """

    needs = frozenset({"logits", "transfer", "clients"})
    stale_reason = "fuses what the clients of one round know, in several exchanges"

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

    @abstractmethod
    def fuse(self, client_ids: list[int], knowledge: Tensor) -> Tensor:
        """Fuse the knowledge of a round's clients.

        Args:
            client_ids: Ids of the N clients.
            knowledge: The knowledge of each client, (N, K, C) float64.

        Returns:
            The fused knowledge for each client, (N, K, C) float64.
        """

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        extras: dict[str, Any] = {}
        if exchange == "distill":
            extras["knowledge"] = self.fused[client_id]
        return Broadcast(
            round_idx=self.server.round_idx,
            exchange=exchange,
            weights=None,
            extras=extras,
            uploads=False,
        )

    def add(self, update: ClientUpdate) -> None:
        self.gather(update, weights=False)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        if exchange != "train":
            return aggregate
        self.fused = {client_id: row.extras["knowledge"] for client_id, row in sorted(self.rows.items())}
        client_ids = self._clients_to_fuse()
        if client_ids:
            knowledge = torch.stack([self.fused[client_id] for client_id in client_ids])
            fused = self.fuse(client_ids, knowledge.double())
            for client_id, new in zip(client_ids, fused, strict=True):
                self.fused[client_id] = new.to(self.fused[client_id].dtype)
        return aggregate

    def _clients_to_fuse(self) -> list[int]:
        """Return the ids of the clients whose knowledge can be fused, with one transfer to the host.

        The guard reports knowledge that is not finite, which must not spread to other clients. The knowledge of a
        client that is left out is zero.
        """
        is_valid: list[Tensor] = []
        for client_id, knowledge in self.fused.items():
            is_valid.append(knowledge.isfinite().all() & self.rows[client_id].included)
        return [client_id for client_id, valid in zip(self.fused, to_host(is_valid), strict=True) if valid]


class KnowledgeClient(ClientModule):
    """Trains a model of its own, exchanges knowledge, and fine-tunes on the transfer set.

    The loss of the fine-tuning is CE + λ² · `distillation_loss`. The models may differ in architecture
    (`fl_lightning.nets.HeterogeneousNets`). A client without data skips only its own training.

    Args:
        finetune_epochs: Passes over the transfer set in a round, ≥ 0. 0 only exchanges knowledge.
        finetune_batch: Samples per step of the fine-tuning. `full` means the whole transfer set, None the batch size
            of the data module.
        lam: Weight λ ≥ 0 of the distillation, which is squared. 0 fine-tunes with cross-entropy alone.
        temperature: Temperature T > 0 of the softmaxes in the distillation, which has no factor T². The
            cross-entropy has no temperature.
        ce_on: Samples of the cross-entropy of the fine-tuning: `transfer`, `local` (as many samples of the client's
            own, drawn in every round) or `none` for no cross-entropy.
        base: Arguments of `ClientModule`, which must include `net`.

    Raises:
        ValueError: An argument is out of its range.
    """

    exchanges = ("train", "distill")
    needs = frozenset({"logits", "transfer", "clients"})
    server_class = KnowledgeServer

    def __init__(
        self,
        *,
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
        """Make the knowledge that is sent, here soft labels.

        Args:
            logits: Logits of the transfer samples, (K, C).

        Returns:
            The knowledge, (K, C), in float32 or better.
        """
        return soft_labels(logits, self.temperature)

    @abstractmethod
    def distillation_loss(self, logits: Tensor, knowledge: Tensor) -> Tensor:
        """Return the distance of logits from the fused knowledge.

        Args:
            logits: Logits of the client, (B, C).
            knowledge: Fused knowledge of the same samples, (B, C).

        Returns:
            The distance, a 0-d tensor.
        """

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return True

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if broadcast.exchange != "distill":
            return
        self.round_buffer("knowledge", broadcast.extras["knowledge"])
        if self.ce_on == "local" and local.size():
            self._draw_local_samples(local)

    def _draw_local_samples(self, local: ClientData) -> None:
        """Draw a sample of the client's own for each transfer sample."""
        x, y = self.transferred(local.all())
        num_samples = local.size()
        shuffled = torch.randperm(num_samples, generator=local.generator("pairs"))
        # A client with too few samples uses them several times.
        positions = torch.arange(local.size("transfer")) % num_samples
        drawn = shuffled[positions].to(y.device)
        self.round_buffer("x", x[drawn])
        self.round_buffer("y", y[drawn])

    def phases(self, exchange: str) -> Iterable[Phase]:
        if exchange == "train":
            return (Phase(),)
        finetuning = Phase(
            split="transfer",
            epochs=self.finetune_epochs,
            batch_size=self.finetune_batch,
            with_index=True,
        )
        return (finetuning,)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "knowledge" not in self.round:
            return self.local_loss(batch, batch_idx)
        (x, y), positions = batch
        logits = self(x)
        distance = self.distillation_loss(logits, self.round["knowledge"][positions])
        loss = self.lam**2 * distance
        self.log("train/distance", distance)
        if self.ce_on == "transfer":
            ce = cross_entropy(logits, y)
        elif "x" in self.round:
            ce = cross_entropy(self(self.round["x"][positions]), self.round["y"][positions])
        else:
            return loss
        self.log("train/finetune_ce", ce)
        return loss + ce

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if exchange != "train":
            return {}
        with torch.no_grad():
            logits = self.rows_over(
                local,
                lambda batch: to_float32(self(batch[0])),
                split="transfer",
                batch_size=KNOWLEDGE_BATCH_SIZE,
            )
            return {"knowledge": self.predictions(logits)}


def soft_labels(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return softmax(logits / T) in float32 or better.

    Args:
        logits: Logits, (K, C).
        temperature: Temperature T > 0.

    >>> soft_labels(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    return (to_float32(logits) / temperature).softmax(-1)


def soft_label_divergence(
    logits: Tensor, target: Tensor, temperature: float = 1.0, direction: Literal["forward", "reverse"] = "forward"
) -> Tensor:
    """Return the batch mean of a Kullback-Leibler divergence between softmax(logits / T) and a target.

    There is no factor T².

    Args:
        logits: Logits of the model that is trained, (B, C).
        target: Probabilities to match, (B, C). They are constants.
        temperature: Temperature T > 0.
        direction: `forward` for KL(target ‖ softmax), `reverse` for KL(softmax ‖ target) with a target of at least
            1e-12.

    Returns:
        The divergence in nats, a 0-d tensor ≥ 0 in float32 or better. 0 if both agree.

    >>> soft_label_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """
    log_q = (to_float32(logits) / temperature).log_softmax(-1)
    target = target.to(log_q.dtype)
    if direction == "forward":
        return (torch.xlogy(target, target) - target * log_q).sum(-1).mean()
    return (log_q.exp() * (log_q - target.clamp(min=1e-12).log())).sum(-1).mean()
