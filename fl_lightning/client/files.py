"""Files of one client at its own node, which never change: what it keeps, and shared entries that are sent once.

Another party knows their names only, which say what they hold, so that it can go back to the file of an earlier round.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.client.records import FileRecord, decode, delete, encode, file_names
from fl_lightning.client.store import hash_of, held
from fl_lightning.types import State
from fl_lightning.utils.files import write_file

FROZEN = "frozen"
"""Beginning of the name of the file with entries that nobody trains."""


class ClientFiles:
    """Keeps a client's memory and personal entries, and entries that nobody trains.

    Args:
        folder: of the files.
        client_id: 0 ... N-1.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self.folder = folder
        self.client_id = client_id

    def keep(self, round_idx: int, memory: Mapping[str, Any], personal: State | None) -> str | None:
        """Write what the client keeps, and return the name of the file.

        None: it keeps nothing.
        """
        kept = held(self.client_id, round_idx, memory, personal).content
        if not kept:
            return None
        content = encode(kept)
        file = FileRecord(self.client_id, round_idx, hash_of(content), len(content))
        if not (self.folder / file.name).exists():
            write_file(self.folder / file.name, content)
        return file.name

    def read(self, name: str) -> tuple[dict[str, Any], State | None]:
        """Read what the client kept: memory and personal entries.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: it was altered.
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
        kept = decode(content)
        return kept.get("memory", {}), kept.get("personal")

    def shared(self, digest: str, entries: State | None) -> State:
        """Keep entries that nobody trains, or read those that were kept.

        Args:
            digest: of their content; empty: there are none.
            entries: that are sent; None: they were sent before.

        Raises:
            ValueError: they are not those of the digest.
        """
        if not digest:
            return {}
        path = self.folder / f"{FROZEN}_{digest}.safetensors"
        content = b"" if not digest.isalnum() else path.read_bytes() if entries is None else encode(entries)
        if hash_of(content) != digest:
            raise ValueError(f"frozen entries must be those of the digest {digest!r}, and are not; begin a new run")
        if entries is not None:
            delete(self.folder, [old.name for old in self.folder.glob(f"{FROZEN}_*")])
            write_file(path, content)
        return dict(decode(content))

    def collect(self, named: Iterable[str]) -> None:
        """Delete the client's files that are not named."""
        mine = {name for name in file_names(self.folder) if name.startswith(f"client_{self.client_id}_")}
        delete(self.folder, mine.difference(named))
