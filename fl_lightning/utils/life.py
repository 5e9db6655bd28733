"""Signs of life of this process, by which other processes of a run know that it is not stuck."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class SignOfLife(NamedTuple):
    """Describes the activity of a process at its latest sign of life.

    Args:
        signs: Number of signs so far.
        waits: Whether the process waits for the other processes.
        client_id: Id of the client that was loaded last. -1 before the first client.
        round_idx: The round in which that client is trained.
    """

    signs: int = 0
    waits: bool = False
    client_id: int = -1
    round_idx: int = -1

    def __str__(self) -> str:
        if self.client_id < 0:
            return "before its first client"
        return f"at client {self.client_id} in round {self.round_idx}"


class Life:
    """Counts the signs of life of a process.

    Attributes:
        count: Number of signs.
        waits: Depth of the blocks of `waiting`.
        client_id: Id of the client at work. -1 before the first client.
        round_idx: The round in which that client is trained.
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
        """Wait for the other processes within the block, in which this process is never at fault."""
        self.count += 1
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            self.count += 1

    def sign(self) -> SignOfLife:
        """Describe what the process is doing now."""
        return SignOfLife(
            signs=self.count,
            waits=self.waits > 0,
            client_id=self.client_id,
            round_idx=self.round_idx,
        )


LIFE = Life()
"""The signs of life of this process."""


def heartbeat() -> None:
    """Give a sign of life of this process, now and then in a long computation without clients or batches.

    A process that gives none for `process_timeout` seconds (600) while another one waits for it is ended. The call
    costs no more than an addition, and has no effect in a run of one process.
    """
    LIFE.beat()
