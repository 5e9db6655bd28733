"""Clients that join and leave: the rounds in which each of them is there."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.data.spans import check_span, read_spans
from fl_lightning.utils.settings import check_kind, check_whole, described

Span = tuple[int, int | None]
"""First and last round in which a client is there, both included. None: to the end."""

Spans = dict[int, list[Span]]
"""The spans of some clients, by client id. A client without any is always there."""

SETTING = "data.stays"


class Stays:
    """Tells which clients are there in a round. It draws nothing, and keeps nothing between rounds.

    Args:
        spans: The spans of the clients that join or leave.
        num_clients: Number N of clients.
        unseen: Ids of clients that never train.

    Attributes:
        begins: The rounds in which other clients are there than in the round before, and round 0, ascending.

    Raises:
        ValueError: There is no such client, or it never trains.
    """

    def __init__(self, spans: Spans, num_clients: int, unseen: Sequence[int] = ()) -> None:
        for client_id in spans:
            if not 0 <= client_id < num_clients:
                raise ValueError(
                    f"{SETTING} must name clients in [0, {num_clients}), got {client_id}; leave it out, or raise "
                    f"data.num_clients"
                )
            if client_id in unseen:
                raise ValueError(
                    f"{SETTING} must leave out the clients of data.unseen, which never train, got client {client_id}; "
                    f"leave it out of {SETTING}, or of data.unseen"
                )
        self._spans = spans
        begins = {0}
        for of_client in spans.values():
            for first, last in of_client:
                begins.add(first)
                if last is not None:
                    begins.add(last + 1)
        self.begins = sorted(begins)

    def of(self, clients: Iterable[int], round_idx: int) -> list[int]:
        """List the clients that are there in a round, in their order.

        Args:
            clients: Ids of clients.
            round_idx: Communication round, from 0.
        """
        return [client_id for client_id in clients if self._is_there(client_id, round_idx)]

    def _is_there(self, client_id: int, round_idx: int) -> bool:
        """Return True if a client is there in a round."""
        if client_id not in self._spans:
            return True
        return any(first <= round_idx and (last is None or round_idx <= last) for first, last in self._spans[client_id])


def spans_of(given: Any) -> Spans:
    """Read when clients are there.

    Args:
        given: `[first, last]` by client id, or the path of a csv file with the columns `client`, `first` and `last`. A
            client in several lines of the file is there in all of their rounds.

    Raises:
        TypeError: It is of another kind.
        ValueError: A span or a line is wrong.
        FileNotFoundError: There is no such file.
    """
    spans: Spans = {}
    if isinstance(given, str) and given.lstrip().startswith("{"):
        raise TypeError(
            f"{SETTING} must give one first and one last round by client id, got {given}; write such as "
            f"'{{3: [10, null]}}', with spaces after the colons, or name a csv file"
        )
    if isinstance(given, str | Path):
        for line in read_spans(Path(given), setting=SETTING, column="client"):
            spans.setdefault(line.number, []).append((line.first, line.last))
        return spans
    check_kind(Mapping, "spans by client id, or a csv file", "give such as {3: [10, null]}", **{SETTING: given})
    for client_id, span in given.items():
        check_whole("the id of a client", **{SETTING: client_id})
        spans[client_id] = [checked_span(span, f"client {client_id}")]
    return spans


def checked_span(span: Any, place: str) -> Span:
    """Return a span as it is used.

    Args:
        span: Its first and last round.
        place: The client or line that has it, for the error.

    Raises:
        TypeError: It is no pair.
        ValueError: A round is below 0, or the last one comes before the first.
    """
    if not isinstance(span, list | tuple) or len(span) != 2:
        raise TypeError(
            f"{SETTING} must give the first and the last round of a client, got {described(span)} for {place}; give "
            f"such as [10, 20], or [10, null] for a client that stays"
        )
    first, last = span
    check_span(first, last, setting=SETTING, place=place)
    return first, last


def written(spans: Spans) -> dict[int, Any]:
    """Return spans as a configuration has them, so that a file and its content are one setting.

    >>> written({3: [(10, None)], 4: [(0, 1), (5, 6)]})
    {3: [10, None], 4: [[0, 1], [5, 6]]}
    """
    texts: dict[int, Any] = {}
    for client_id, of_client in sorted(spans.items()):
        pairs = [list(span) for span in of_client]
        texts[client_id] = pairs if len(pairs) > 1 else pairs[0]
    return texts
