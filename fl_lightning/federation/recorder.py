"""The recorder: owns the logged values of a run, and counts the bytes of its messages."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client.metric_states import ClientMetric, on_host
from fl_lightning.client.services import LoggedRows, MetricAccumulator, drain
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.functional.accuracy import answers_and_samples
from fl_lightning.functional.forgetting import forgetting_since
from fl_lightning.functional.traffic import traffic
from fl_lightning.metrics.history import BY_CLASS, History
from fl_lightning.metrics.keys import Direction, Directions
from fl_lightning.types import CONDITIONS, Broadcast, ClientResult, Member, RoundOutcome

Bytes = Counter[tuple[str, str]]
"""Bytes by log key and exchange."""

ClientRows = list[tuple[int | None, LoggedRows]]
"""Values on the host, each with the id of the client that logged them. None means no single client."""


class RoundConfusion(NamedTuple):
    """The confusion matrix of a round.

    Attributes:
        round_idx: Index of the round.
        counts: (C, C + 1) int64 as `confusion_counts` gives it.
    """

    round_idx: int
    counts: Tensor

    @property
    def accuracy(self) -> float:
        """The share of all samples that is recognized. NaN without samples."""
        hits, samples = answers_and_samples(self.counts).sum(1).tolist()
        return hits / samples if samples else math.nan


class Recorder(Member):
    """Owns the logged values: takes them in a round, reduces them to one row, and keeps the rows of all rounds.

    Args:
        separates: Whether clients may be left out. The values of each client are then kept apart.
        root: The module that contains the logged metric objects. None means that there are none.

    Attributes:
        round_metrics: The row of the last round, by log key.
        pending_round: Index of the round whose row no logger has yet, or None.
        class_accuracy: A_c of the last evaluation, (C,) float64 on the CPU, or None without classes.
        confusion: (C, C + 1) int64 of the last evaluation on the CPU, as `confusion_counts` gives it. None without
            classes, and with many of them.
        confusions: The confusion matrix of the last round that was evaluated (`last`), and of the first of the rounds
            with the highest accuracy (`best`).
        peak: Best accuracy of each class over the evaluated rounds, (C,), or None before the first of them.
        samples: Words for the samples of the last evaluation. Empty without classes.
        peak_samples: The same for the samples on which `peak` was measured. Empty if they are not known.
        trained_rounds: Number of rounds up to the last trained round, which is included.
        evaluated_rounds: Number of rounds up to the last evaluated round, which is included.
        evaluations: Names of the evaluations that belong to the round of `pending_round` and are done.
        client_values: The values of each client after the present round, by client id and log key. Empty if the
            clients were not evaluated after it.
        history: The rows of all rounds. A continued run begins with the rows in its metrics.csv.
        directions: Whether values are better when lower or higher, by log key, as the user or logged metric objects
            tell.
        logged: Values of the current round: all of them, or those since the last client if they are kept apart.
        traffic: Counts the bytes of the current round in this process.
    """

    name = "recorder"

    def __init__(self, separates: bool = False, root: nn.Module | None = None) -> None:
        self._separates = separates
        self._root = root or nn.Module()
        self._settled: list[tuple[int | None, MetricAccumulator]] = []
        """Values of the round before those in `logged`, each part with the client that logged them."""
        self._rows: ClientRows = []
        self.round_metrics: dict[str, float] = {}
        self.pending_round: int | None = None
        self.class_accuracy: Tensor | None = None
        self.confusion: Tensor | None = None
        self.confusions: dict[str, RoundConfusion] = {}
        self.peak: Tensor | None = None
        self.samples = ""
        self.peak_samples = ""
        self.trained_rounds = 0
        self.evaluated_rounds = 0
        self.evaluations: set[str] = set()
        self.client_values: dict[int, dict[str, float | None]] = {}
        self._chain = b""
        """Digest of the rows of the first `_chained` rounds."""
        self._chained = 0
        self.history = History()
        self.class_names: list[str] = []
        """Names of the classes in the keys of this run."""
        self.directions: dict[str, Direction] = {}
        self.logged = MetricAccumulator(most_rows=None)
        self.traffic = Traffic()

    # --- writing ---

    def log(self, key: str, value: Any, weight: float = 1, reduce: Any = "mean") -> None:
        """Take one value of the current round.

        Args:
            key: The log key.
            value: A number, a 0-d tensor, which stays on its device, or a metric object.
            weight: Weight of the value in the round's mean.
            reduce: `mean`, `sum`, `max` or `min` over the round.
        """
        self.logged.log(name=key, value=value, weight=weight, reduce_fx=reduce)

    # --- as a member of the round ---

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._settle(None)

    def incoming(self, result: ClientResult) -> ClientResult:
        """Take the values that a client has logged and that callbacks have logged about the client."""
        self.logged.absorb(result.logged)
        self._settle(result.update.client_id)
        return result

    def _settle(self, client_id: int | None) -> None:
        """Keep the values since the last client apart, because this client may still be left out."""
        if self._separates:
            self._settled.append((client_id, self.logged))
            self.logged = MetricAccumulator(most_rows=None)

    @property
    def has_metrics(self) -> bool:
        """Whether callbacks have logged metric objects, which count all clients together."""
        return bool(self.logged.metrics) or any(part.metrics for _, part in self._settled)

    def read(self, checks: Sequence[Tensor]) -> list[float]:
        """Move the values of the round to the host, together with those of `checks`, and return the latter.

        Args:
            checks: 0-d tensors.
        """
        parts = [*self._settled, (None, self.logged)]
        numbers, rows_of_parts = drain([part for _, part in parts], checks)
        self._rows = []
        for (client_id, _), rows in zip(parts, rows_of_parts, strict=True):
            if rows:
                self._rows.append((client_id, rows))
        for _, part in self._settled:
            self.logged.absorb(part)
        self._settled = []
        return numbers

    def share(self) -> tuple[ClientRows, dict[str, str], list[ClientMetric]]:
        paths: dict[str, str] = {}
        if self.logged.metrics:
            paths = self.logged.metric_paths(self._root)
        return self._rows, paths, [on_host(of_client) for of_client in self.logged.counted]

    def reduce(self, outcome: RoundOutcome, shared: Sequence[Any]) -> dict[str, float]:
        """Reduce the values of all processes, without those of clients that were left out.

        This runs the user's metric objects, which may raise. It therefore comes before anything that `Undo` does not
        undo: the step of the server optimizer and the records of clients in the store.

        Args:
            outcome: The outcome of the round.
            shared: What each process has shared, by `share`.
        """
        kept_rows: list[LoggedRows] = []
        counted: list[ClientMetric] = []
        for rows_of_process, _, counted_in_process in shared:
            for client_id, rows in rows_of_process:
                if client_id not in outcome.failed:
                    kept_rows.append(rows)
            counted += [of_client for of_client in counted_in_process if of_client.client_id not in outcome.failed]
        values = self.logged.reduce(rows=kept_rows, paths=[paths for _, paths, _ in shared], root=self._root)
        if counted or self.logged.counted:
            # What clients that were left out have counted must go, too.
            values |= self.logged.joined(counted, self._root)
        self.take_directions(self.logged.directions)
        return values

    def take_directions(self, directions: Directions) -> None:
        """Keep the directions that metric objects tell. Those that the user gave, or that are known, stay."""
        self.directions = {**directions, **self.directions}

    def mark(self) -> Mapping[str, int]:
        return self.logged.sizes

    def undo(self, mark: Mapping[str, int]) -> None:
        # Absorbed backwards, the values end up in the first part, which is the one that `mark` measured.
        for _, part in reversed(self._settled):
            part.absorb(self.logged)
            self.logged = part
        self._settled = []
        self.logged.cut(mark)

    def discard_round(self) -> None:
        """Drop the current round, which has failed, and the row before it."""
        self.logged.clear()
        self.round_metrics = {}
        self.pending_round = None

    # --- rounds ---

    def end_training(self, round_idx: int, values: dict[str, float]) -> None:
        """Begin the row of a round with the values of its training. The row before it is complete."""
        if round_idx > self._chained:
            self._chain = chained(self._chain, self.round_metrics)
            self._chained = round_idx
        self.round_metrics = values
        self.client_values = {}
        self.evaluations = set()
        self.pending_round = round_idx
        self.trained_rounds = round_idx + 1

    def take_class_accuracy(
        self, class_accuracy: Tensor | None, samples: str = "", confusion: Tensor | None = None
    ) -> None:
        """Keep the class accuracies of an evaluation.

        Args:
            class_accuracy: The accuracies, (C,) float64 on the CPU, or None without classes.
            samples: Words for the evaluated samples: their splits, and a fingerprint of each.
            confusion: The confusion matrix, (C, C + 1) int64 on the CPU, or None.
        """
        self.class_accuracy = class_accuracy
        self.confusion = confusion
        self.samples = samples

    def take_client_values(self, values: Mapping[int, Mapping[str, float | None]]) -> None:
        """Keep the values of the clients after the present round.

        Args:
            values: The values by client id and log key.
        """
        self.client_values = {client_id: dict(of_client) for client_id, of_client in values.items()}

    @property
    def known_peak(self) -> Tensor | None:
        """The best accuracy of each class, or None if the last evaluation was on other samples than `peak`."""
        return self.peak if self.samples and self.samples == self.peak_samples else None

    def end_evaluation(self, round_idx: int) -> None:
        """Count a round as evaluated, and raise each class's best accuracy to that of its evaluation."""
        self.evaluated_rounds = round_idx + 1
        if self.samples != self.peak_samples:
            # Matrices of other samples cannot be compared.
            self.confusions = {}
        self.peak_samples = self.samples
        if self.confusion is not None:
            self._keep_confusion(RoundConfusion(round_idx, self.confusion))
        if self.class_accuracy is None:
            return
        if self.peak is None:
            self.peak = self.class_accuracy
        else:
            self.peak = torch.fmax(self.peak, self.class_accuracy)

    def _keep_confusion(self, present: RoundConfusion) -> None:
        """Keep the confusion matrix of a round as that of the last round, and of the best one if it is better."""
        self.confusions["last"] = present
        best = self.confusions.get("best")
        if best is None or present.accuracy > best.accuracy:
            self.confusions["best"] = present

    def forgetting(self) -> float | None:
        """Return FedNTD's F after `end_evaluation`: the mean over classes of peak − accuracy, or None without classes.

        Source: Lee et al., NeurIPS 2022, arXiv:2106.03097, Eq. 5.
        """
        if self.class_accuracy is None or self.peak is None:
            return None
        return float(forgetting_since(self.peak, self.class_accuracy))

    def wrote(self, rows: Mapping[int, Mapping[str, float]]) -> bool:
        """Return True if these rows, by round, are those of the complete rounds as they were logged."""
        digest = b""
        for round_idx in range(self._chained):
            digest = chained(digest, rows.get(round_idx, {}))
        return digest == self._chain

    def restore(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Add the rows of earlier rounds, by round, to the history."""
        for round_idx in sorted(rows):
            self.history.record(round_idx, rows[round_idx])

    def go_back(self, round_idx: int) -> None:
        """Drop the rows from a round on, except a row that no logger has yet (resumed at the end of its round).

        Before round 0 no class has a best accuracy.
        """
        self.history.drop(round_idx)
        self.trained_rounds = round_idx
        if self.pending_round is not None and self.pending_round <= round_idx:
            self.keep_round(self.pending_round)
        if round_idx == 0:
            self.peak = None
            self.confusions = {}
            self.evaluated_rounds = 0
            self._chain = b""
            self._chained = 0

    def keep_round(self, round_idx: int) -> None:
        """Put the present row into the history, in place of an earlier state of the row."""
        self.history.record(round_idx, self.round_metrics)

    def take_pending(self) -> int | None:
        """Hand over the round whose row must be written, once. None means that there is none."""
        round_idx = self.pending_round
        self.pending_round = None
        return round_idx

    # --- checkpoints ---

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        return {
            "round_metrics": dict(self.round_metrics),
            "pending_round": self.pending_round,
            "peak": self.peak,
            "peak_samples": self.peak_samples,
            "trained_rounds": self.trained_rounds,
            "evaluated_rounds": self.evaluated_rounds,
            "evaluations": sorted(self.evaluations),
            # They go to a table with the row that is pending.
            "client_values": {} if self.pending_round is None else dict(self.client_values),
            "directions": dict(self.directions),
            "rows": [self._chained, self._chain.hex()],
            "class_names": self.class_names,
            # Two tensors also where the last round is the best, so that the size is the same after every round.
            "confusions": {
                name: (of_round.round_idx, of_round.counts.clone()) for name, of_round in self.confusions.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round_metrics = dict(state["round_metrics"])
        self.pending_round = state["pending_round"]
        self.peak = state["peak"]
        self.evaluated_rounds = state["evaluated_rounds"]
        self._chained = state["rows"][0]
        # Version 0.2.0 did not tell. A round that is evaluated again gets the same values.
        self.evaluations = set(state.get("evaluations", ()))
        self.client_values = dict(state.get("client_values", {}))
        # Version 0.2.0 wrote none of these.
        self.take_directions(state.get("directions", {}))
        self.peak_samples = state.get("peak_samples", "")
        self.trained_rounds = state.get("trained_rounds", self._chained + bool(self.round_metrics))
        self._chain = bytes.fromhex(state["rows"][1])
        self.history = History()
        # Version 0.2.0 wrote the names in the keys of the last round only.
        self.class_names = state.get("class_names") or names_in(self.round_metrics)
        # Version 0.2.0 counted no confusion matrix.
        confusions = state.get("confusions", {})
        self.confusions = {name: RoundConfusion(*of_round) for name, of_round in confusions.items()}

    def keep_class_names(self, names: list[str]) -> list[str]:
        """Return the names of the classes that keys of earlier rounds have, else these names from now on.

        Args:
            names: The names that the data have now, C.
        """
        if len(self.class_names) != len(names):
            self.class_names = list(names)
        return self.class_names


def names_in(values: Mapping[str, float]) -> list[str]:
    """Return the names of the classes in the keys of a round.

    >>> names_in({"global/acc": 0.5, "global/acc_class/a": 0.5, "global/acc_class/b": 0.5})
    ['a', 'b']
    """
    names: dict[str, None] = {}
    for key in values:
        _, found, name = key.partition(BY_CLASS)
        if found:
            names[name] = None
    return list(names)


def chained(digest: bytes, row: Mapping[str, float]) -> bytes:
    """Return the digest of some rows and one more.

    Args:
        digest: Digest of the rows before. Empty without any.
        row: The values of the further row, by log key. A value that is NaN counts as missing.
    """
    known = {key: float(value) for key, value in row.items() if not math.isnan(value)}
    return sha256(digest + repr(sorted(known.items())).encode()).digest()


class Traffic(Member):
    """Counts the bytes of a round's messages by exchange. Undoing a round does not undo the count.

    Attributes:
        by_client: The bytes of the round in this process by log key and client id, until the next round begins.
    """

    name = "traffic"

    def __init__(self) -> None:
        self._exchanges: Sequence[str] = ()
        self._round_idx = -1
        self._bytes = Bytes()
        self.by_client = Counter[tuple[str, int]]()
        self._sent = set[tuple[str, int]]()
        """Exchanges and clients whose message is counted. An engine may ask for a job again."""
        self._counts_ahead: bool | None = None
        """Whether messages are counted to clients that do not come back in the round. None: others are sent."""
        self._ahead_round = -1
        """The round of the last of them."""

    def begin_fit(self, exchanges: Sequence[str]) -> None:
        """Forget the bytes of an earlier fit.

        Args:
            exchanges: The exchanges of a round that send something. Without any, no bytes are counted.
        """
        self._exchanges = exchanges
        self._round_idx = -1
        self._ahead_round = -1
        self._bytes = Bytes()

    @contextmanager
    def ahead(self, round_idx: int, *, is_root: bool) -> Iterator[None]:
        """Context in which clients are sent messages that do not come back in the round. They are counted once.

        Args:
            round_idx: Index of the round.
            is_root: Whether this process counts them.
        """
        self._counts_ahead = is_root and round_idx != self._ahead_round
        self._ahead_round = round_idx
        try:
            yield
        finally:
            self._counts_ahead = None

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._sent.clear()
        if round_idx != self._round_idx:  # A repeated round keeps the bytes of its earlier attempts.
            self._round_idx = round_idx
            self._bytes = Bytes()
            self.by_client = Counter()

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        message = (broadcast.exchange, client_id)
        is_counted = message not in self._sent if self._counts_ahead is None else self._counts_ahead
        if is_counted:
            if self._counts_ahead is None:
                self._sent.add(message)
            num_bytes = traffic(broadcast.weights, broadcast.extras)
            self._count("comm/bytes_down", exchange=broadcast.exchange, client_id=client_id, num_bytes=num_bytes)
        return broadcast

    def incoming(self, result: ClientResult) -> ClientResult:
        update = result.update
        num_bytes = traffic(update.weights, update.extras)
        exchange = result.job.broadcast.exchange
        self._count("comm/bytes_up", exchange=exchange, client_id=update.client_id, num_bytes=num_bytes)
        return result

    def _count(self, key: str, *, exchange: str, client_id: int, num_bytes: int) -> None:
        """Count the bytes of one message."""
        self._bytes[key, exchange] += num_bytes
        if exchange in self._exchanges:
            self.by_client[key, client_id] += num_bytes

    def share(self) -> Bytes:
        return self._bytes

    def end(self, outcome: RoundOutcome, shared: Sequence[Bytes]) -> Mapping[str, float]:
        """Sum the bytes of all processes by log key, and by exchange too if a round has several."""
        # A round of too few clients ends without a beginning, so the next count begins here.
        self._bytes = Bytes()
        if not self._exchanges:
            return {}
        counted = sum(shared, Bytes())
        values: dict[str, float] = {}
        for key in ("comm/bytes_down", "comm/bytes_up"):
            by_exchange = {exchange: counted[key, exchange] for exchange in self._exchanges}
            values[key] = float(sum(by_exchange.values()))
            if len(self._exchanges) > 1:
                for exchange, num_bytes in by_exchange.items():
                    values[f"{key}/{exchange}"] = float(num_bytes)
        return values


def bytes_of_sets(data: FederatedDataModule, needs: Iterable[str]) -> dict[str, float]:
    """Return the bytes of the data sets that every client is sent once, by log key.

    Args:
        data: The data module.
        needs: Names of the splits that the method needs, among other needs.

    Returns:
        `comm/bytes_sets`, the bytes as the sets are stored. Empty if the method needs no such set, or if all samples
        are in one place.
    """
    if data.pooled:
        return {}
    sizes: list[int] = []
    for name in needs:
        if name in CONDITIONS or name in SERVER_ONLY:
            continue
        num_bytes = data.split(name).num_bytes
        if num_bytes is not None:
            sizes.append(num_bytes)
    if not sizes:
        return {}
    return {"comm/bytes_sets": float(len(data.training_clients) * sum(sizes))}
