"""Client store: memory and personal entries by client id, in host memory up to a budget, then in files."""

from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer

from fl_lightning.client.records import decode, encode, kept, num_bytes
from fl_lightning.client.tracked_checkpoint_io import TrackedCheckpointIO, delete
from fl_lightning.types import State
from fl_lightning.utils.files import write_atomically
from fl_lightning.utils.settings import check_at_least

CHECKED_AT_START = 2**30
"""Bytes of files up to which their content is checked at the start of a fit, not only where they are read."""


class HeldRecord(NamedTuple):
    """A client's record in host memory: its `memory` and `personal` entries, where it has them."""

    content: dict[str, Any]
    size: int


class FileRecord(NamedTuple):
    """A client's record in a file, which never changes: its name says client, round and content."""

    file: str
    folder: str
    hash: str
    bytes: int

    @property
    def path(self) -> Path:
        return Path(self.folder, self.file)


class ClientStore:
    """Keeps memory and personal entries of every client that has taken part.

    While all records fit into the budget they lie in host memory and a checkpoint holds them. When they no longer do,
    each record becomes a file of its own, named (client, round), and a checkpoint holds names and hashes only; what was
    used last stays in memory too. A record is replaced, never edited, so a checkpoint taken at any time holds whole
    rounds only. Files that no checkpoint needs any more are deleted.

    Args:
        memory_budget_mb: megabytes (2^20 bytes) of host memory for the records, of each process; 0: always files;
            None: no limit, never files.
        folder: of the files; None: `clients` in the run's folder. On several nodes all must see it.

    Attributes:
        clients: ids of the clients that have a record in this process, in memory or in a file.
        owners: the process that keeps a client's record, by client id; empty with one process.

    Raises:
        ValueError: a budget below 0.
    """

    def __init__(self, memory_budget_mb: float | None = 4096, folder: str | Path | None = None) -> None:
        check_at_least(0, "0 keeps every record in a file, null none", memory_budget_mb=memory_budget_mb)
        self.budget = float("inf") if memory_budget_mb is None else memory_budget_mb * 2**20
        self.given_folder = folder
        self.folder = Path(folder or "clients").resolve()
        self.device = torch.device("cpu")
        self.clients: set[int] = set()
        self.owners: dict[int, int] = {}
        self._unshared = False
        self._records: dict[int, HeldRecord] = {}  # in order of use: all records, or those used last
        self._bytes = 0  # of the records held
        self._files: dict[int, FileRecord] = {}
        self._fresh: set[str] = set()  # names of files that were written here and are in no checkpoint yet

    # --- records -----------------------------------------------------------------------------------------------

    def memory(self, client_id: int) -> dict[str, Any]:
        """A copy of the client's memory: edited in place, or in a round that fails, it leaves the record as it is."""
        memory: dict[str, Any] = kept(self._record(client_id).get("memory", {}), "memory", self.device)
        return memory

    def personal(self, client_id: int) -> State | None:
        """The client's own entries, or None before its first training. Not to be edited."""
        personal: State | None = self._record(client_id).get("personal")
        return personal if personal is None else on_device(personal, self.device)

    def record(self, client_id: int) -> tuple[dict[str, Any], State | None]:
        """A copy of the client's memory, and its own entries, as `memory` and `personal` give them."""
        return self.memory(client_id), self.personal(client_id)

    def own(self, owners: Mapping[int, int]) -> None:
        """Note which process keeps the record of a client, by client id."""
        self.owners |= owners

    def put(self, records: Mapping[int, tuple[Mapping[str, Any], State | None]], round_idx: int) -> None:
        """Keep the memory and the personal entries of a round's clients: all of them, or after an error none.

        Raises:
            TypeError: if a memory holds something that a checkpoint cannot.
            OSError: if a file cannot be written.
        """
        new = {client_id: held(client_id, memory, personal) for client_id, (memory, personal) in records.items()}
        filled = {client_id: record for client_id, record in new.items() if record.content}
        change = sum(record.size for record in new.values())
        change -= sum(self._records[client_id].size for client_id in new if client_id in self._records)
        files: dict[int, FileRecord] = {}
        if self._files or self._bytes + change > self.budget:
            unwritten = {c: record for c, record in self._records.items() if c not in self._files and c not in new}
            files = {c: self._write(c, round_idx, record) for c, record in (unwritten | filled).items()}
        replaced = {self._files.pop(client_id).file for client_id in new if client_id in self._files}
        replaced &= self._fresh - {file.file for file in files.values()}
        for client_id in new:
            self._records.pop(client_id, None)
        self._records |= filled
        self._files |= files
        self._bytes += change
        self.clients.difference_update(new)
        self.clients.update(filled)
        self._evict()
        delete(self.folder, replaced)
        self._fresh -= replaced

    def _record(self, client_id: int) -> dict[str, Any]:
        """The client's record, which becomes the one used last; empty where it has none."""
        if client_id not in self.clients:
            return {}
        record = self._records.pop(client_id, None)
        if record is None:
            content = decode(self._read(client_id))
            record = HeldRecord(content, num_bytes(content))
            self._bytes += record.size
        self._records[client_id] = record
        self._evict()
        return record.content

    def _evict(self) -> None:
        """Release the records that were not used for longest, but never the one used last, nor one without a file."""
        while self._bytes > self.budget and len(self._records) > 1 and next(iter(self._records)) in self._files:
            self._bytes -= self._records.pop(next(iter(self._records))).size

    # --- files -------------------------------------------------------------------------------------------------

    def _write(self, client_id: int, round_idx: int, record: HeldRecord) -> FileRecord:
        if self._unshared:
            raise ValueError(self._not_shared())
        content = encode(record.content)
        digest = hash_of(content)
        name = f"client_{client_id}_round_{round_idx}_{digest[:12]}.safetensors"
        file = FileRecord(name, str(self.folder), digest, len(content))
        if not file.path.exists():  # else an earlier run wrote the same, and a checkpoint may need it
            self._fresh.add(name)
        try:
            write_atomically(file.path, lambda part: part.write_bytes(content))
        except OSError as error:
            raise OSError(
                f"the client store cannot write {file.path} ({error.strerror or error}); set model.store.folder to one "
                f"with space, or raise model.store.memory_budget_mb"
            ) from error
        return file

    def _read(self, client_id: int) -> bytes:
        file = self._files[client_id]
        try:
            content = file.path.read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the checkpoint needs the file {file.file} of client {client_id}, found neither in {self.folder} nor "
                f"in {file.folder}; restore it, or set model.store.folder to the folder that has it"
            ) from None
        if hash_of(content) != file.hash:
            raise ValueError(
                f"the file of client {client_id} in the client store must be as it was when the checkpoint was saved, "
                f"and {file.path} was altered; restore it, or continue from another checkpoint"
            )
        return content

    # --- a run -------------------------------------------------------------------------------------------------

    def start(self, trainer: Trainer, device: torch.device) -> None:
        """Begin a fit: find the folder, check the files that a checkpoint named, track checkpoints.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file was altered, or not all nodes see the folder.
        """
        self.device = device
        self.folder = Path(self.given_folder or Path(trainer.log_dir or trainer.default_root_dir, "clients")).resolve()
        self._check_shared(trainer)
        self._find_files(trainer.ckpt_path)
        if trainer.is_global_zero:
            strategy, in_use = trainer.strategy, [file.file for file in self._files.values()]
            inner = strategy.checkpoint_io
            inner = inner.inner if isinstance(inner, TrackedCheckpointIO) else inner
            strategy.checkpoint_io = TrackedCheckpointIO(inner, self.folder, in_use, trainer.ckpt_path)

    def _find_files(self, ckpt_path: Any) -> None:
        """Look for each file in this run's folder, in the one it was written to, and beside the checkpoint."""
        beside = [] if ckpt_path is None else [folder / "clients" for folder in list(Path(ckpt_path).parents)[:3]]
        checked = 0
        for client_id, file in self._files.items():
            folders = (self.folder, Path(file.folder), *beside)
            found = next((folder for folder in folders if (folder / file.file).is_file()), file.folder)
            self._files[client_id] = here = file._replace(folder=str(found))
            checked += file.bytes
            if checked <= CHECKED_AT_START or not here.path.is_file() or here.path.stat().st_size != file.bytes:
                self._read(client_id)

    def _check_shared(self, trainer: Trainer) -> None:
        """Learn whether all nodes see the folder."""
        if trainer.num_nodes == 1:
            return
        mark = self.folder / "seen_by_all_nodes"
        if trainer.is_global_zero:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
        trainer.strategy.barrier("client store written")
        self._unshared = not mark.exists()
        trainer.strategy.barrier("client store seen")
        if trainer.is_global_zero:
            mark.unlink(missing_ok=True)
        if self._unshared and (self.given_folder is not None or self.budget == 0 or self._files):
            raise ValueError(self._not_shared())

    def _not_shared(self) -> str:
        return (
            f"on several nodes the folder of the client store must be one that all of them see, and {self.folder} is "
            f"not; set model.store.folder to a shared one, or model.store.memory_budget_mb to null"
        )

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Each client's record, or the name, folder, hash and size of its file, for a checkpoint."""
        self._fresh.clear()
        records = {client_id: record.content for client_id, record in self._records.items()}
        files = {client_id: file._asdict() for client_id, file in self._files.items()}
        return dict(sorted((records | files).items()))

    def load_state_dict(self, state: Mapping[int, dict[str, Any]], rank: int = 0, world: int = 1) -> None:
        """Restore what `state_dict` gave: a client's record goes to rank `client_id mod world`."""
        self.owners = {client_id: client_id % world for client_id in state} if world > 1 else {}
        own = {client_id: record for client_id, record in state.items() if client_id % world == rank}
        self._files = {c: FileRecord(**record) for c, record in own.items() if "file" in record}
        self._records = {c: HeldRecord(record, num_bytes(record)) for c, record in own.items() if c not in self._files}
        self._bytes = sum(record.size for record in self._records.values())
        self.clients = set(own)


def held(client_id: int, memory: Mapping[str, Any], personal: State | None) -> HeldRecord:
    """A client's record in host memory, without what is empty.

    Raises:
        TypeError: if the memory holds something that a checkpoint cannot.
    """
    cpu = torch.device("cpu")
    content: dict[str, Any] = {}
    if memory:
        content["memory"] = kept(dict(memory), f"memory of client {client_id}", cpu)
    if personal is not None:
        content["personal"] = on_device(personal, cpu)
    return HeldRecord(content, num_bytes(content))


def on_device(state: State, device: torch.device) -> State:
    """A state with its tensors on a device: those that are there already are not copied."""
    return {name: value.to(device) for name, value in state.items()}


def hash_of(content: bytes) -> str:
    """A 128-bit hash as hex digits."""
    return blake2b(content, digest_size=16).hexdigest()
