"""Signs of life of this process, by which other processes of a run know that it is not stuck."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class SignOfLife(NamedTuple):
    """Activity of a process at its latest sign of life.

    Args:
        signs: so far.
        waits: whether it waits for the other processes.
        client_id: of the client loaded last; -1: none.
        round_idx: of that client's training.
    """

    signs: int = 0
    waits: bool = False
    client_id: int = -1
    round_idx: int = -1

    def __str__(self) -> str:
        begun = self.client_id >= 0
        return f"at client {self.client_id} in round {self.round_idx}" if begun else "before its first client"


class Life:
    """Counts the signs of life of a process.

    Attributes:
        count: of the signs.
        waits: depth of the blocks of `waiting`.
        client_id: of the client at work; -1: none yet.
        round_idx: of that client.
    """

    def __init__(self) -> None:
        self.count = 0
        self.waits = 0
        self.client_id = -1
        self.round_idx = -1

    def beat(self) -> None:
        """Give a sign of life."""
        self.count += 1

    def begin_client(self, client_id: int, round_idx: int) -> None:
        """Set the client that is at work from now on."""
        self.client_id = client_id
        self.round_idx = round_idx
        self.count += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the other processes within the block: this one is not at fault, however long it takes."""
        self.count += 1
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            self.count += 1

    def sign(self) -> SignOfLife:
        """Describe what the process is doing now."""
        return SignOfLife(self.count, self.waits > 0, self.client_id, self.round_idx)


LIFE = Life()
"""Of this process."""


def heartbeat() -> None:
    """Give a sign of life of this process, now and then in a long computation without clients or batches.

    A process that gives none for `process_timeout` seconds (600) while another one waits for it is ended. The call
    costs no more than an addition, and does nothing else where there is one process only.
    """
    LIFE.beat()
