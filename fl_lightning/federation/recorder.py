"""The recorder: owns the logged values of a run, and counts the bytes of its messages."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.services import MetricAccumulator, Rows, drain
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.functional.forgetting import forgetting_since
from fl_lightning.functional.traffic import traffic
from fl_lightning.metrics.history import History
from fl_lightning.types import CONDITIONS, Broadcast, ClientResult, Member, RoundOutcome

Bytes = Counter[tuple[str, str]]
"""Bytes by log key and exchange."""

ClientRows = list[tuple[int | None, Rows]]
"""Values on the host, with the client that logged them; None: nobody in particular."""


class Recorder(Member):
    """Owner of the logged values: takes them in a round, reduces them to one row, keeps the rows of all rounds.

    Attributes:
        round_metrics: the row of the last round, by log key.
        pending_round: the round whose row no logger has yet, or None.
        class_accuracy: A_c of the last evaluation, (C,) float64 on the CPU, or None.
        peak: each class's best accuracy over the rounds so far, (C,), or None.
        evaluated_rounds: rounds up to and with the one that was evaluated last.
        history: the rows of all rounds; of a run that is continued those that its metrics.csv has.
        logged: values of the round under way, since the last client where these are kept apart.
        traffic: counts this process's bytes of the round under way.

    Args:
        separates: whether clients may be left out, so that the values of each are kept apart.
        root: the module that logged metric objects are part of; None: there are none.
    """

    name = "recorder"

    def __init__(self, separates: bool = False, root: nn.Module | None = None) -> None:
        self._separates = separates
        self._root = root or nn.Module()
        self._settled: list[tuple[int | None, MetricAccumulator]] = []
        """Values of the round that belong to clients taken in."""
        self._rows: ClientRows = []
        self.round_metrics: dict[str, float] = {}
        self.pending_round: int | None = None
        self.class_accuracy: Tensor | None = None
        self.peak: Tensor | None = None
        self.evaluated_rounds = 0
        self._chain, self._chained = b"", 0  # digest of the rows of so many rounds
        self.history = History()
        self.logged = MetricAccumulator(most_rows=None)
        self.traffic = Traffic()

    # --- writing -----------------------------------------------------------------------------------------------

    def log(self, key: str, value: Any, weight: float = 1, reduce: Any = "mean") -> None:
        """Take one value of the round under way: a number, a 0-d tensor (it stays on its device) or a metric object.

        Args:
            key: under which it is reported.
            value: of this client, batch or moment.
            weight: of the value in the round's mean.
            reduce: `mean`, `sum`, `max` or `min` over the round.
        """
        self.logged.log(key, value, weight, reduce)

    # --- as a member of the round ------------------------------------------------------------------------------

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._settle(None)

    def incoming(self, result: ClientResult) -> ClientResult:
        """Take the values that a client has logged, and those that callbacks have logged of it."""
        self.logged.absorb(result.logged)
        self._settle(result.update.client_id)
        return result

    def _settle(self, client_id: int | None) -> None:
        """Keep the values since the last client apart, as those of a client that may yet be left out."""
        if self._separates:
            self._settled.append((client_id, self.logged))
            self.logged = MetricAccumulator(most_rows=None)

    @property
    def has_metrics(self) -> bool:
        """True where clients have logged metric objects, which count all of them together."""
        return any(part.metrics for _, part in [*self._settled, (None, self.logged)])

    def read(self, checks: Sequence[Tensor]) -> list[float]:
        """Move the values of the round to the host, and with them those of `checks`, 0-d each, which are returned."""
        parts = [*self._settled, (None, self.logged)]
        numbers, rows = drain([part for _, part in parts], checks)
        self._rows = [(client_id, values) for (client_id, _), values in zip(parts, rows, strict=True) if values]
        for _, part in self._settled:
            self.logged.absorb(part)
        self._settled = []
        return numbers

    def share(self) -> tuple[ClientRows, dict[str, str]]:
        paths = self.logged.metric_paths(self._root) if self.logged.metrics else {}
        return self._rows, paths

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Reduce the values of all processes, without those of clients that were left out."""
        rows = [rows for part, _ in shared for client_id, rows in part if client_id not in outcome.failed]
        return self.logged.reduce(rows, [paths for _, paths in shared], self._root)

    def mark(self) -> Mapping[str, int]:
        return self.logged.sizes

    def undo(self, mark: Mapping[str, int]) -> None:
        for _, part in reversed(self._settled):
            part.absorb(self.logged)
            self.logged = part
        self._settled = []
        self.logged.cut(mark)

    def discard_round(self) -> None:
        """Forget the round under way and the row before it (the round failed)."""
        self.logged.clear()
        self.round_metrics = {}
        self.pending_round = None

    # --- rounds ------------------------------------------------------------------------------------------------

    def end_training(self, round_idx: int, values: dict[str, float]) -> None:
        """Begin the row of a round with the values of its training.

        The one before is complete.
        """
        if round_idx > self._chained:
            self._chain = chained(self._chain, self.round_metrics)
            self._chained = round_idx
        self.round_metrics = values
        self.pending_round = round_idx

    def take_class_accuracy(self, class_accuracy: Tensor | None) -> None:
        """Keep the class accuracies of an evaluation, (C,) float64 on the CPU, or None without classes."""
        self.class_accuracy = class_accuracy

    def end_evaluation(self, round_idx: int) -> None:
        """Count a round as evaluated, and raise each class's best accuracy to that of its evaluation."""
        self.evaluated_rounds = round_idx + 1
        if self.class_accuracy is None:
            return
        if self.peak is None:
            self.peak = self.class_accuracy
        else:
            self.peak = torch.fmax(self.peak, self.class_accuracy)

    def forgetting(self) -> float | None:
        """Return FedNTD's F after `end_evaluation`: the mean over classes of peak − accuracy, or None without classes.

        Source: Lee et al., NeurIPS 2022, arXiv:2106.03097, Eq. 5.
        """
        if self.class_accuracy is None or self.peak is None:
            return None
        return float(forgetting_since(self.peak, self.class_accuracy))

    def wrote(self, rows: Mapping[int, Mapping[str, float]]) -> bool:
        """Return True where these rows are those of the complete rounds before, as they were logged."""
        written = (rows.get(round_idx, {}) for round_idx in range(self._chained))
        return reduce(chained, written, b"") == self._chain

    def restore(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Take the rows of rounds that were run before, by round."""
        for round_idx in sorted(rows):
            self.history.record(round_idx, rows[round_idx])

    def go_back(self, round_idx: int) -> None:
        """Forget the rows from a round on, but for one that is only to be written (resumed at the end of its round).

        Before round 0 no class has a best accuracy.
        """
        self.history.drop(round_idx)
        if self.pending_round is not None and self.pending_round <= round_idx:
            self.keep_round(self.pending_round)
        if round_idx == 0:
            self.peak = None
            self.evaluated_rounds = 0
            self._chain = b""
            self._chained = 0

    def keep_round(self, round_idx: int) -> None:
        """Add the row, as it is now, to the history.

        Again where it has grown.
        """
        self.history.record(round_idx, self.round_metrics)

    def take_pending(self) -> int | None:
        """Hand over the round whose row is to be written.

        None where there is none, or it was handed over.
        """
        round_idx = self.pending_round
        self.pending_round = None
        return round_idx

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        return {
            "round_metrics": dict(self.round_metrics),
            "pending_round": self.pending_round,
            "peak": self.peak,
            "evaluated_rounds": self.evaluated_rounds,
            "rows": [self._chained, self._chain.hex()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round_metrics = dict(state["round_metrics"])
        self.pending_round = state["pending_round"]
        self.peak = state["peak"]
        self.evaluated_rounds = state["evaluated_rounds"]
        self._chained = state["rows"][0]
        self._chain = bytes.fromhex(state["rows"][1])
        self.history = History()


def chained(digest: bytes, row: Mapping[str, float]) -> bytes:
    """Digest of the rows before, whose digest is given, and of one more."""
    known = {key: float(value) for key, value in row.items() if not math.isnan(value)}
    return sha256(digest + repr(sorted(known.items())).encode()).digest()


class Traffic(Member):
    """Counts the bytes of a round's messages by exchange.

    What has moved is not undone.
    """

    name = "traffic"

    def __init__(self) -> None:
        self._exchanges: Sequence[str] = ()
        self._round_idx = -1
        self._bytes = Bytes()
        self._sent = set[tuple[str, int]]()
        """Exchanges and clients whose message is counted: an engine may ask for a job again."""

    def start(self, exchanges: Sequence[str]) -> None:
        """Begin a run, with the exchanges of a round that send something.

        Without any no bytes are counted.
        """
        self._exchanges = exchanges
        self._round_idx = -1
        self._bytes = Bytes()

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._sent.clear()
        if round_idx != self._round_idx:  # what a round that is run again has moved counts
            self._round_idx = round_idx
            self._bytes = Bytes()

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        if (key := (broadcast.exchange, client_id)) not in self._sent:
            self._sent.add(key)
            self._bytes["comm/bytes_down", broadcast.exchange] += traffic(broadcast.weights, broadcast.extras)
        return broadcast

    def incoming(self, result: ClientResult) -> ClientResult:
        update = result.update
        self._bytes["comm/bytes_up", result.job.broadcast.exchange] += traffic(update.weights, update.extras)
        return result

    def total(self, key: str) -> int:
        """Bytes of the round so far under `comm/bytes_down` or `comm/bytes_up`, over all exchanges."""
        return sum(self._bytes[key, exchange] for exchange in self._exchanges)

    def share(self) -> Bytes:
        return self._bytes

    def end(self, outcome: RoundOutcome, shared: Sequence[Bytes]) -> Mapping[str, float]:
        """Add up the bytes of all processes by log key, and where a round has several exchanges by exchange, too."""
        moved = sum(shared, Bytes())
        values = {}
        for key in ("comm/bytes_down", "comm/bytes_up") if self._exchanges else ():
            values[key] = float(sum(moved[key, exchange] for exchange in self._exchanges))
            if len(self._exchanges) > 1:
                values |= {f"{key}/{exchange}": float(moved[key, exchange]) for exchange in self._exchanges}
        self._bytes = Bytes()  # a round of too few clients does not even begin
        return values


def bytes_of_sets(data: FederatedDataModule, needs: Iterable[str]) -> dict[str, float]:
    """Count the bytes, as stored, of the sets that every client is sent once.

    Empty where a method needs none, and where all samples are at one place.
    """
    if data.pooled:
        return {}
    splits = [data.split(name) for name in needs if name not in {*CONDITIONS, *SERVER_ONLY}]
    moved = [split.num_bytes for split in splits if split.num_bytes is not None]
    return {"comm/bytes_sets": float(data.num_clients * sum(moved))} if moved else {}
