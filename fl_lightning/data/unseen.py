"""Clients that never train: they are tested only, as a hospital that joins after the training would be."""

from collections.abc import Sequence

from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_numbers, described, find_client, listed

Given = int | float | Sequence[int | str] | None
"""A share of the clients, their number, or a list of ids and names. None: all clients train."""


class Unseen:
    """Says which clients never train: drawn once by the seed, or named.

    Args:
        given: A share of the clients in (0, 1), which is at least one client, their number (≥ 1), or a list of their
            ids and of names of owners. None: all clients train.
        seed: Seed of the data.
        has_owners: Whether a column names the owners of the samples.

    Raises:
        ValueError: A share or number is out of its range, or the list is empty, has an entry twice, or has names where
            no column names owners.
        TypeError: `given` is of another kind.

    >>> Unseen(0.25, seed=0).of(8) == Unseen(2, seed=0).of(8)
    True
    >>> Unseen(["north", 2], seed=0, has_owners=True).of(3, names=["east", "north", "west"])
    (1, 2)
    """

    def __init__(self, given: Given, seed: int, *, has_owners: bool = False) -> None:
        self.given = given
        self._seed = seed
        self._has_owners = has_owners
        self._entries: list[int | str] = []
        if given is None:
            return
        if isinstance(given, list | tuple):
            self._entries = list(given)
            self._check_entries()
        else:
            check_share_or_number(given)

    def _check_entries(self) -> None:
        """Refuse a list that cannot name clients.

        Raises:
            ValueError: The list is empty, or has names where no column names owners.
            TypeError: An entry is neither an id nor a name.
        """
        if not self._entries:
            raise ValueError("data.unseen must list clients, got []; leave it unset if all clients train")
        for entry in self._entries:
            if isinstance(entry, bool) or not isinstance(entry, int | str):
                raise TypeError(
                    f"data.unseen must list ids and names of clients, got {described(entry)}; give such as 3"
                )
            if isinstance(entry, str) and not self._has_owners:
                raise ValueError(
                    f"data.unseen must list ids of clients where no column (data.by) names owners, got {entry!r}; give "
                    f"such as [3]"
                )

    @property
    def waits_for_owners(self) -> bool:
        """Whether the clients are known only once the samples are dealt. A number, too, may be the name of an owner."""
        return bool(self._entries) and self._has_owners

    def of(self, num_clients: int, names: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the ids of the clients that never train, ascending.

        Args:
            num_clients: Number N of clients.
            names: Names of the owners by client id. Empty if a client has the samples of several owners, or of none.

        Raises:
            ValueError: There is no such client, an entry names a client twice, or no client would train.
        """
        if self.given is None:
            return ()
        if self._entries:
            chosen = [self._id_of(entry, num_clients, names) for entry in self._entries]
        else:
            chosen = self._drawn(num_clients)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"data.unseen must name each client once, got {self.given}; leave the second one out")
        if len(chosen) >= num_clients:
            raise ValueError(
                f"data.unseen must leave a client that trains, got {self.given} of {num_clients} clients; name fewer"
            )
        return tuple(sorted(chosen))

    def _id_of(self, entry: int | str, num_clients: int, names: Sequence[str]) -> int:
        """Return the id of a client by the name of its owner, else by its id.

        Raises:
            ValueError: There is no such client.
        """
        found = find_client(str(entry), names, num_clients)
        if found is not None:
            return found
        known = f"ids in [0, {num_clients})"
        if names:
            known = f"{known} or owners ({listed(names)})"
        elif isinstance(entry, str):
            known = f"{known}, because a client has the samples of several owners or of none"
        raise ValueError(f"data.unseen must name {known}, got {entry!r}; give such clients")

    def _drawn(self, num_clients: int) -> list[int]:
        """Draw the clients by their share or number."""
        count = self.given
        if isinstance(count, float):
            count = max(1, round(count * num_clients))
        generator = keyed_numpy(self._seed, "unseen")
        drawn: list[int] = generator.permutation(num_clients)[:count].tolist()
        return drawn


def check_share_or_number(given: object) -> None:
    """Refuse what is neither a share of clients nor their number.

    Args:
        given: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of its range.
    """
    check_numbers("it is a share of the clients, their number, or a list of them", **{"data.unseen": given})
    is_number = isinstance(given, int) and not isinstance(given, bool) and given >= 1
    is_share = isinstance(given, float) and 0 < given < 1
    if not (is_number or is_share):
        raise ValueError(
            f"data.unseen must be a share of the clients in (0, 1) or a whole number ≥ 1, got {given}; give such as 0.2"
        )
