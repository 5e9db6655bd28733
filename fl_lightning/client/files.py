"""The files of one client at its own node, which never change.

They hold what the client keeps, and shared entries that are sent once.

Another party knows the names of the files only. A name says what the file holds, so that the other party can go back to
the file of an earlier round.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.client.records import FileRecord, decode, delete, encode, file_names
from fl_lightning.client.store import hash_of, held
from fl_lightning.types import State
from fl_lightning.utils.files import write_file

FROZEN = "frozen"
"""First part of the name of the file with the entries that nobody trains."""


class ClientFiles:
    """Keeps a client's memory and personal entries, and the entries that nobody trains.

    Args:
        folder: The folder of the files.
        client_id: The client's id, 0 ... N-1.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self.folder = folder
        self.client_id = client_id

    def keep(self, round_idx: int, memory: Mapping[str, Any], personal: State | None) -> str | None:
        """Write what the client keeps.

        Args:
            round_idx: The round after which the client keeps it.
            memory: The client's memory.
            personal: The client's personal entries, or None.

        Returns:
            The name of the file. None if the client keeps nothing.
        """
        record = held(client_id=self.client_id, round_idx=round_idx, memory=memory, personal=personal)
        if not record.content:
            return None
        content = encode(record.content)
        file = FileRecord(client_id=self.client_id, round_idx=round_idx, hash=hash_of(content), bytes=len(content))
        path = self.folder / file.name
        if not path.exists():
            write_file(path, content)
        return file.name

    def read(self, name: str) -> tuple[dict[str, Any], State | None]:
        """Return the memory and the personal entries that the client kept in a file.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: The file was altered.
        """
        path = self.folder / name
        if not FileRecord.is_name(name) or not path.is_file():
            raise FileNotFoundError(
                f"client {self.client_id} needs its file {name!r}, which is not in {self.folder}; restore it, or begin "
                f"a new run"
            )
        content = path.read_bytes()
        if not name.endswith(f"_{hash_of(content)[:12]}.safetensors"):
            raise ValueError(f"{path} must be as it was written, and was altered; restore it, or begin a new run")
        record = decode(content)
        return record.get("memory", {}), record.get("personal")

    def shared(self, digest: str, entries: State | None) -> State:
        """Keep the entries that nobody trains, or read the entries that were kept.

        Args:
            digest: Hash of the entries. Empty if there are no such entries.
            entries: The entries as they are sent. None if they were sent before.

        Raises:
            ValueError: The entries are not those of the digest.
        """
        if not digest:
            return {}
        path = self.folder / f"{FROZEN}_{digest}.safetensors"
        if digest.isalnum():
            content = path.read_bytes() if entries is None else encode(entries)
        else:  # A forged digest must not lead to another folder.
            content = b""
        if hash_of(content) != digest:
            raise ValueError(f"frozen entries must be those of the digest {digest!r}, and are not; begin a new run")
        if entries is not None:
            delete(self.folder, [old.name for old in self.folder.glob(f"{FROZEN}_*")])
            write_file(path, content)
        return dict(decode(content))

    def collect(self, named: Iterable[str]) -> None:
        """Delete the client's files except the named ones."""
        own_prefix = f"client_{self.client_id}_"
        own_names = {name for name in file_names(self.folder) if name.startswith(own_prefix)}
        delete(self.folder, own_names.difference(named))
