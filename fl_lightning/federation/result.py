"""The outcome of a round as it comes to be: what is kept of it, who is left out, whether it is run again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fl_lightning.client.services import Rows
from fl_lightning.members.faults import Fault, skipped_of
from fl_lightning.types import State

Record = tuple[dict[str, Any], State | None]
"""Record of a client: memory and personal entries."""

Sizes = dict[str, int]
"""Numbers of the values that were logged, by log key."""

NOBODY: Mapping[int, str] = MappingProxyType({})
"""No client failed."""


@dataclass
class RoundResult:
    """Outcome of a round as it comes to be, before anything of it is kept.

    Args:
        cohort: ids of the clients that were asked.
        weights: the new shared weights, or None: unchanged.
        personal: mean of the participants' personal entries, or None where there is none: no client had data, or
            nothing is shared, so that there is no global model.
        records: memory and personal entries by client id.
        metrics: logged values by log key.
        failed: why a client was left out, by client id.
        lost: why the round leaves the federation as it was; empty where it does not.
        skipped: the clients left out: all of them where the round is lost.
        total: Σ of the rule's weights over all clients and exchanges; 0: the weights stay as they are.
        repeats: whether the round is to be undone and run again without the failed clients, which have left traces.
        problem: of the rule, which ends the run unless a client is at fault.
        mark: numbers of values logged when the last client was taken in.
        logged: numbers of values logged before and after each client was taken in, where clients may be left out.
    """

    cohort: list[int]
    weights: State | None = None
    personal: State | None = None
    records: dict[int, Record] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    lost: str = ""
    skipped: list[Fault] = field(default_factory=list)
    total: float | Tensor = 0
    repeats: bool = False
    problem: Exception | None = None
    mark: Sizes = field(default_factory=dict)
    logged: dict[int, list[tuple[Sizes, Sizes]]] = field(default_factory=dict)

    @property
    def asked(self) -> list[int]:
        """The clients that have not failed."""
        return [client_id for client_id in self.cohort if client_id not in self.failed]

    def take(self, weights: State | None, personal: State | None, total: float | Tensor) -> None:
        """Take the weights after an exchange and the mean of the personal entries; None: they stay as they are."""
        self.total = self.total + total
        self.weights = self.weights if weights is None else weights
        self.personal = self.personal if personal is None else personal

    def leave_out(self, failed: Mapping[int, str]) -> None:
        """Note clients that are left out, and why: nothing of them is kept."""
        self.failed = dict(sorted({**self.failed, **failed}.items()))
        for client_id in self.records.keys() & self.failed:
            del self.records[client_id]

    def took(self, client_id: int, logged: Sizes) -> None:
        """Note how many values are logged once a client is taken in."""
        self.logged.setdefault(client_id, []).append((self.mark, logged))
        self.mark = logged

    def repeat(self, needed: bool = True) -> None:
        """Note where the round is to be run again; it stays so."""
        self.repeats = self.repeats or needed

    def lose(self, reason: str) -> None:
        """Leave the federation as it was, for the first such reason."""
        self.lost = self.lost or reason

    def give_up(self, round_idx: int, lost: str) -> None:
        """Note which clients are skipped, of which nothing is kept: all of the cohort where the round is lost."""
        self.lost, self.skipped = lost, skipped_of(round_idx, self.failed, self.cohort, lost)
        self.metrics["train/skipped"] = float(len(self.skipped))
        if lost:
            self.weights, self.personal, self.records = None, None, {}


def without(rows: Rows, spans: Iterable[tuple[Sizes, Sizes]]) -> Rows:
    """Drop the values of clients that are left out; `spans`: how many there were before and after each client.

    >>> rows = {"a": ("mean", [(1.0, 1), (2.0, 1), (3.0, 1)]), "b": ("sum", [(4.0, 1)])}
    >>> without(rows, [({"a": 1}, {"a": 2, "b": 1})])
    {'a': ('mean', [(1.0, 1), (3.0, 1)])}
    """
    kept = {name: (kind, dict(enumerate(pairs))) for name, (kind, pairs) in rows.items()}
    for before, after in spans:
        for name, end in after.items():
            for i in range(before.get(name, 0), end):
                kept[name][1].pop(i, None)
    return {name: (kind, list(pairs.values())) for name, (kind, pairs) in kept.items() if pairs}
