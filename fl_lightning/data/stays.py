"""Clients that join and leave: the rounds in which each of them is there."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.utils.settings import check_kind, check_whole, described

Span = tuple[int, int | None]
"""First and last round in which a client is there, both included. None: to the end."""

Spans = dict[int, list[Span]]
"""The spans of some clients, by client id. A client without any is always there."""

SETTING = "data.stays"
COLUMNS = ("client", "first", "last")


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
    if isinstance(given, str | Path):
        return spans_in(Path(given))
    check_kind(Mapping, "spans by client id, or a csv file", "give such as {3: [10, null]}", **{SETTING: given})
    spans: Spans = {}
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
    for value in (first, 0 if last is None else last):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{SETTING} must give rounds, from 0, got {described(value)} for {place}; give such as 10")
    if first < 0 or (last is not None and last < first):
        raise ValueError(
            f"{SETTING} must give rounds of at least 0, the first not after the last, got {[first, last]} for {place}; "
            f"mend it"
        )
    return first, last


def spans_in(path: Path) -> Spans:
    """Read the spans in a csv file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A column is missing, or a line has something else. The sentence names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{SETTING} must be spans by client id or a csv file with the columns client, first and last, got {path}, "
            f"which does not exist"
        )
    spans: Spans = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{SETTING} must have the columns client, first and last, and {path} has no "
                f"{' and no '.join(missing)}; add it"
            )
        for row in reader:
            place = f"line {reader.line_num} of {path}"
            client_id, first, last = numbers_in(row, place)
            spans.setdefault(client_id, []).append(checked_span([first, last], place))
    return spans


def numbers_in(row: Mapping[str, str | None], place: str) -> tuple[int, int, int | None]:
    """Read a line: the client, its first and its last round.

    Args:
        row: The texts by column.
        place: The line, for the error.

    Raises:
        ValueError: A text is no whole number.
    """
    texts = [(row[column] or "").strip() for column in COLUMNS]
    client_id, first, last = texts
    try:
        return int(client_id), int(first), int(last) if last else None
    except ValueError:
        raise ValueError(
            f"a line of {SETTING} must have whole numbers, or an empty last round for a client that stays, and {place} "
            f"has {texts}; mend it"
        ) from None


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
