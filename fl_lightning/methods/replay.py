"""Replay: train on samples of earlier rounds, which each client keeps, beside its present ones.

Source: Chaudhry et al. 2019, arXiv:1902.10486 (ER, reservoir); Buzzega et al., NeurIPS 2020, arXiv:2004.07211, Eq. 6
(DER++). Balanced classes: Chrysakis and Moens, ICML 2020. Server: FedAvg.
Note: a sample comes to the reservoir once, when it arrives at the client, and not in every epoch or round. The buffer
stays in the client's memory and is never sent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_at_least, check_choice


class Replay(ClientModule):
    """Trains with CE + beta · CE(buffer) + alpha · mean squared difference of the buffer's logits and the stored ones.

    Args:
        size: Number of samples in a client's buffer, >= 0. 0 is FedAvg.
        alpha: Weight of the stored logits, >= 0. 0 is ER, which stores none. Above 0 it is DER++.
        beta: Weight of the cross-entropy of the buffer's samples, >= 0.
        select: Samples that stay in a full buffer. `reservoir`: each sample that has come stays with one probability.
            `balanced`: classes get as many places as they can fill.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"size": 0}
    stackable = True
    reads = frozenset({"batches"})

    def __init__(
        self,
        size: int = 200,
        alpha: float = 0.0,
        beta: float = 1.0,
        select: Literal["reservoir", "balanced"] = "reservoir",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", size=size)
        check_at_least(0, "0 is ER", alpha=alpha)
        check_at_least(0, beta=beta)
        check_choice(("reservoir", "balanced"), select=select)
        self.size = size
        self.alpha = alpha
        self.beta = beta
        self.select = select

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if self.is_fedavg_equivalent:
            return
        buffer = self.memory.get("buffer")
        count = self.memory.get("count", 0)
        if buffer is None:
            if self._keeps_statistics or not local.size():
                return
            buffer = self._empty(local)
        # Within a stack nothing can be drawn, so that the rows of all batches are drawn here.
        order = torch.randperm(max(1, count), generator=local.generator("replay"))
        places = torch.arange(self.size) % max(1, count)
        self.round["rows"] = order[places].to(self.device)
        self.round["is_filled"] = torch.tensor(float(count > 0), device=self.device)
        for name, value in buffer.items():
            self.round[name] = value.to(self.device)

    @property
    def _keeps_statistics(self) -> bool:
        """Whether the net has statistics, such as BatchNorm's, which a pass over an empty buffer would change."""
        return any(True for _ in self.built_net.buffers())

    def why_not_stacked(self) -> str | None:
        if self._keeps_statistics:
            return "clients without samples in their buffers train without them, so that BatchNorm does not see them"
        return None

    def _empty(self, local: ClientData) -> dict[str, Tensor]:
        """Return a buffer of zeros, whose shapes are those of the client's samples."""
        x, y = next(iter(self.transfer_each(local.batches(batch_size=1))))
        buffer = {"x": x.new_zeros((self.size, *x.shape[1:])), "y": y.new_zeros((self.size, *y.shape[1:]))}
        if self.alpha:
            with self.evaluation_mode(), torch.no_grad():
                logits = to_float32(self(x))
            buffer["z"] = logits.new_zeros((self.size, *logits.shape[1:]))
        return buffer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        ce = cross_entropy(self(x), y)
        self.log("train/ce", ce)
        if "rows" not in self.round:
            return ce
        begin = batch_idx * len(x)
        places = torch.arange(begin, begin + len(x), device=x.device) % self.size
        rows = self.round["rows"][places]
        is_filled = self.round["is_filled"]
        logits = self(self.round["x"][rows])
        replayed = is_filled * cross_entropy(logits, self.round["y"][rows])
        self.log("train/replayed", replayed)
        loss: Tensor = ce + self.beta * replayed
        if self.alpha:
            kd = is_filled * F.mse_loss(to_float32(logits), self.round["z"][rows])
            self.log("train/kd", kd)
            loss = loss + self.alpha * kd
        return loss

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if not self.is_fedavg_equivalent and self.num_steps:
            self._keep(local)
        return {}

    def _keep(self, local: ClientData) -> None:
        """Offer the samples that have arrived since the client's last round to the buffer."""
        arrived = local.arrived(self.memory.get("round"))
        self.memory["round"] = local.round_idx
        if not len(arrived):
            return
        buffer = self.memory.get("buffer") or self._empty(local)
        buffer = {name: value.clone() for name, value in buffer.items()}
        held: list[int] = buffer["y"][: self.memory.get("count", 0)].tolist()
        seen: dict[int, int] = dict(self.memory.get("seen", {}))
        drawn = torch.rand(len(arrived), 2, generator=local.generator("replay/buffer"), dtype=torch.float64)
        draws = iter(drawn.tolist())
        batches = local.restricted("train", arrived).batches()
        for x, y in self.transfer_each(batches):
            parts = {"x": x, "y": y}
            if self.alpha:
                with self.evaluation_mode(), torch.no_grad():
                    parts["z"] = to_float32(self(x))
            rows = self._rows_by_place(y.tolist(), held=held, seen=seen, draws=draws)
            for name, value in parts.items():
                kept = value[torch.tensor(list(rows.values()), dtype=torch.int64, device=value.device)]
                buffer[name][list(rows)] = kept.to(buffer[name].device)
        self.memory["buffer"] = buffer
        self.memory["count"] = len(held)
        self.memory["seen"] = seen

    def _rows_by_place(
        self, labels: Sequence[int], *, held: list[int], seen: dict[int, int], draws: Iterator[list[float]]
    ) -> dict[int, int]:
        """Return the rows of a batch that stay in the buffer, by their places there.

        Args:
            labels: Classes of the samples of the batch.
            held: Classes of the samples in the buffer. The kept rows are entered in place.
            seen: Number of samples that have come so far by class. The batch is counted in place.
            draws: Two numbers, uniform in [0, 1), for each sample.
        """
        rows: dict[int, int] = {}
        for row, label in enumerate(labels):
            seen[label] = seen.get(label, 0) + 1
            place = self._place(held, label=label, seen=seen, draws=next(draws))
            if place is not None:
                # The first free place is the end of the list.
                held[place : place + 1] = [label]
                rows[place] = row
        return rows

    def _place(self, labels: Sequence[int], *, label: int, seen: Mapping[int, int], draws: list[float]) -> int | None:
        """Choose the place of a sample in the buffer, or None if it does not stay.

        Args:
            labels: Classes of the samples in the buffer, n of them.
            label: Class of the sample.
            seen: Number of samples that have come so far by class, with this one.
            draws: Two numbers, uniform in [0, 1).
        """
        if len(labels) < self.size:
            return len(labels)
        if self.select == "reservoir":
            place = int(draws[0] * sum(seen.values()))
            return place if place < self.size else None
        counts = Counter(labels)
        chosen = label
        if counts[label] < max(counts.values()):
            chosen = min(counts, key=lambda class_idx: (-counts[class_idx], class_idx))
        elif draws[1] * seen[label] >= counts[label]:
            # Of a class with the most places each sample stays with one probability.
            return None
        places = [place for place, of_place in enumerate(labels) if of_place == chosen]
        return places[int(draws[0] * len(places))]
