"""The client store, which keeps memory and personal entries of clients in host memory or files."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer

from fl_lightning.client.checkpoint_io import FederatedCheckpointIO
from fl_lightning.client.records import FileRecord, copy_pytree, decode, delete, encode, files_of, num_bytes, table_of
from fl_lightning.types import State
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.files import write_atomically, write_file
from fl_lightning.utils.run_folder import run_folder
from fl_lightning.utils.settings import check_at_least

CHECKED_AT_START = 2**30
"""Bytes of files whose content is checked at the start of a fit. The others are checked when they are read."""

PARENTS_SEARCHED = 3
"""Folders above a checkpoint in which the files of its clients may lie."""


class HeldRecord(NamedTuple):
    """Holds the memory and personal entries of a client in host memory, with the round that wrote them.

    Args:
        content: `memory` and `personal`, if the client has them.
        size: Bytes of the tensors.
        round_idx: The round that wrote the record.
    """

    content: dict[str, Any]
    size: int
    round_idx: int


class ClientStore:
    """Keeps memory and personal entries of every client that has taken part.

    All records lie in host memory while they fit into the budget. Above the budget, the records used last lie there.

    If the run has a folder (a logger or ModelCheckpoint), each record becomes a file of its own, named (client, round),
    as soon as a checkpoint is saved or the budget is spent. The checkpoint then holds hashes only, and the files that
    are written for it are those of the clients that took part since the checkpoint before. Without a folder, and in a
    checkpoint that is saved elsewhere, the records lie in the checkpoint.

    A record is replaced, never edited, so a checkpoint taken at any time holds whole rounds only. Files that no
    checkpoint needs any more are deleted.

    Args:
        memory_budget_mb: Megabytes (2^20 bytes) of host memory for the records of each process, ≥ 0. 0 keeps every
            record in a file. None sets no limit and writes no files.
        folder: The folder of the files. None is `clients` in the run's folder. All nodes must see it.

    Attributes:
        clients: Ids of the clients that have a record in this process, in memory or in a file.
        owners: The process that keeps a client's record, by client id. Empty with one process.

    Raises:
        ValueError: The budget is below 0.
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
        """Whether some nodes do not see the folder."""
        self._in_files = False
        """Whether every record becomes a file when a checkpoint is saved."""
        self._records: dict[int, HeldRecord] = {}
        """The records in host memory, by client id. The record used last is at the end."""
        self._bytes = 0
        """Bytes of the records in host memory."""
        self._files: dict[int, FileRecord] = {}
        """The records in files, by client id."""
        self._loaded: dict[int, FileRecord] = {}
        """The files of all processes that a checkpoint named, until the fit starts."""
        self._fresh: set[str] = set()
        """Names of the files that were written here and are in no checkpoint yet."""
        self._beside: list[Path] = []
        """Folders beside the checkpoint that is evaluated, in which its files are looked for, too."""

    # --- records ---

    def memory(self, client_id: int) -> dict[str, Any]:
        """Return a copy of the client's memory, which may be edited without a change of the record."""
        memory: dict[str, Any] = copy_pytree(self._record(client_id).get("memory", {}), "memory", self.device)
        return memory

    def personal(self, client_id: int) -> State | None:
        """Return the client's own entries, which must not be edited, or None before its first training."""
        personal: State | None = self._record(client_id).get("personal")
        return personal if personal is None else on_device(personal, self.device)

    def record(self, client_id: int) -> tuple[dict[str, Any], State | None]:
        """Return what `memory` and `personal` return."""
        return self.memory(client_id), self.personal(client_id)

    def own(self, owners: Mapping[int, int]) -> None:
        """Take down which process keeps the record of a client, by client id."""
        self.owners |= owners

    def put(self, records: Mapping[int, tuple[Mapping[str, Any], State | None]], round_idx: int) -> None:
        """Keep the memory and the personal entries of all clients of a round, or of none after an error.

        Args:
            records: Memory and personal entries (or None), by client id.
            round_idx: The round that wrote them.

        Raises:
            TypeError: A memory holds something that a checkpoint cannot.
            OSError: A file cannot be written.
        """
        new: dict[int, HeldRecord] = {}
        for client_id, (memory, personal) in records.items():
            new[client_id] = held(client_id=client_id, round_idx=round_idx, memory=memory, personal=personal)
        change = sum(record.size for record in new.values())
        change -= sum(self._records[client_id].size for client_id in new if client_id in self._records)
        files: dict[int, FileRecord] = {}
        exceeds_budget = self._bytes + change > self.budget
        if exceeds_budget or (self._files and not self._in_files):
            older = {c: record for c, record in self._unwritten().items() if c not in new}
            files = self._write_all(older | with_content(new))
        self._replace(new, files=files, change=change)

    def _replace(self, new: Mapping[int, HeldRecord], *, files: Mapping[int, FileRecord], change: int) -> None:
        """Replace the records of a round's clients, once nothing can fail any more.

        Args:
            new: The new records by client id. An empty record removes the client.
            files: The records that were written to files, by client id.
            change: Bytes that the new records take more than the records they replace.
        """
        outdated = {self._files.pop(client_id).name for client_id in new if client_id in self._files}
        outdated &= self._fresh - {file.name for file in files.values()}
        for client_id in new:
            self._records.pop(client_id, None)
        filled = with_content(new)
        self._records |= filled
        self._files |= files
        self._bytes += change
        self.clients.difference_update(new)
        self.clients.update(filled)
        self._evict()
        delete(self.folder, outdated)
        self._fresh -= outdated

    def _record(self, client_id: int) -> dict[str, Any]:
        """Return the content of the client's record, which becomes the record used last, or an empty dict."""
        if client_id not in self.clients:
            return {}
        record = self._records.pop(client_id, None)
        if record is None:
            content = decode(self._read(client_id))
            record = HeldRecord(content, num_bytes(content), self._files[client_id].round_idx)
            self._bytes += record.size
        self._records[client_id] = record
        self._evict()
        return record.content

    def _unwritten(self) -> dict[int, HeldRecord]:
        """Return the records that are in no file, by client id."""
        return {client_id: record for client_id, record in self._records.items() if client_id not in self._files}

    def _evict(self) -> None:
        """Release the records that were not used for longest, until the rest fits into the budget.

        The record used last stays, and so does a record without a file.
        """
        while self._bytes > self.budget and len(self._records) > 1:
            oldest = next(iter(self._records))
            if oldest not in self._files:
                return
            self._bytes -= self._records.pop(oldest).size

    # --- files ---

    def _write_all(self, records: Mapping[int, HeldRecord]) -> dict[int, FileRecord]:
        """Write records to files, and return the files by client id."""
        return {client_id: self._write(client_id, record) for client_id, record in records.items()}

    def _write(self, client_id: int, record: HeldRecord) -> FileRecord:
        """Write a record to its file.

        Raises:
            ValueError: Some nodes do not see the folder.
            OSError: The file cannot be written.
        """
        if self._unshared:
            raise ValueError(self._not_shared())
        content = encode(record.content)
        file = FileRecord(
            client_id=client_id,
            round_idx=record.round_idx,
            hash=hash_of(content),
            bytes=len(content),
        )
        path = self.folder / file.name
        if not path.exists():  # A file that an earlier run wrote may be needed by a checkpoint, so it is not fresh.
            self._fresh.add(file.name)
        try:
            write_file(path, content)
        except OSError as error:
            raise OSError(
                f"the client store cannot write {path} ({error.strerror or error}); set model.store.folder to one "
                f"with space, or raise model.store.memory_budget_mb"
            ) from error
        return file

    def _read(self, client_id: int) -> bytes:
        """Return the content of a client's file.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: The file was altered.
        """
        file = self._files[client_id]
        path = first_file([self.folder, *self._beside], file.name)
        if path is None:
            raise FileNotFoundError(
                f"the checkpoint needs the file {file.name} of client {client_id}, found neither in {self.folder} nor "
                f"beside the checkpoint; restore it, or set model.store.folder to the folder that has it"
            )
        content = path.read_bytes()
        if hash_of(content) != file.hash:
            raise ValueError(
                f"the file of client {client_id} in the client store must be as it was when the checkpoint was saved, "
                f"and {path} was altered; restore it, or continue from another checkpoint"
            )
        return content

    # --- a run ---

    def begin_fit(self, trainer: Trainer, device: torch.device) -> None:
        """Begin a fit: find the folder, check the files that a checkpoint named, track checkpoints.

        Args:
            trainer: The Trainer of the fit.
            device: The device on which clients get their memory and personal entries.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file was altered, or some nodes do not see the folder.
        """
        self.device = device
        folder = run_folder(trainer) or Path(trainer.default_root_dir)
        self.folder = Path(self.given_folder or folder / "clients").resolve()
        self._check_shared(trainer)
        has_folder = bool(trainer.loggers or trainer.checkpoint_callbacks)
        self._in_files = has_folder and self.budget != float("inf") and not self._unshared
        if trainer.is_global_zero:
            self._find_files(trainer.ckpt_path)
        trainer.strategy.barrier("files of clients found")
        self._check_files()
        checkpoint_io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and isinstance(checkpoint_io, FederatedCheckpointIO):
            checkpoint_io.track(
                folder=self.folder,
                in_use=[file.name for file in self._loaded.values()],
                ckpt_path=trainer.ckpt_path,
                anywhere=self.given_folder is not None,
            )
        self._loaded = {}

    def look_beside(self, ckpt_path: Any) -> None:
        """Look for files beside the checkpoint of an evaluation, too, which has no run folder of its own.

        Args:
            ckpt_path: The path of the checkpoint. None if there is none.
        """
        self._beside = folders_beside(ckpt_path)

    def _find_files(self, ckpt_path: Any) -> None:
        """Copy the files that a checkpoint names from beside the checkpoint to this run's folder.

        The files are those of all processes.

        Args:
            ckpt_path: The path of the checkpoint. None if there is none.
        """
        for file in self._loaded.values():
            found = first_file(folders_beside(ckpt_path), file.name)
            path = self.folder / file.name
            if found is not None and not path.exists():
                write_atomically(path, partial(shutil.copyfile, found))

    def _check_files(self) -> None:
        """Check the content of this process's files, or their size once `CHECKED_AT_START` bytes were read."""
        checked = 0
        for client_id, file in self._files.items():
            path = self.folder / file.name
            checked += file.bytes
            if checked <= CHECKED_AT_START or not path.is_file() or path.stat().st_size != file.bytes:
                self._read(client_id)

    def _check_shared(self, trainer: Trainer) -> None:
        """Find out whether all nodes see the folder.

        Raises:
            ValueError: The run needs the folder, and some nodes do not see it.
        """
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
            with suppress(OSError):  # The folder holds files, or was never made.
                self.folder.rmdir()
        if self._unshared and (self.given_folder is not None or self.budget == 0 or self._files):
            raise ValueError(self._not_shared())

    def _not_shared(self) -> str:
        """Return the sentence about a folder that some nodes do not see."""
        return (
            f"on several nodes the folder of the client store must be one that all of them see, and {self.folder} is "
            f"not; set model.store.folder to a shared one, or model.store.memory_budget_mb to null"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the records that lie in memory only and the files of the others, for a checkpoint."""
        if self._in_files:
            self._files |= self._write_all(self._unwritten())
        self._fresh.clear()
        records = {client_id: record.content for client_id, record in sorted(self._unwritten().items())}
        files = [file for _, file in sorted(self._files.items())]
        return {"records": records, "files": table_of(files)}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        rank: int = 0,
        assign: Callable[[Sequence[int]], dict[int, int]] | None = None,
    ) -> None:
        """Load the records of a checkpoint, of which this process keeps its share.

        Args:
            state: What `state_dict` returned, with the records of all processes.
            rank: The rank of this process.
            assign: Chooses the rank of each client, the same in all processes. None means that there is one process.
        """
        self._loaded = files_of(state)
        clients = sorted(self._loaded | state["records"])
        self.owners = {} if assign is None else assign(clients)
        self.clients = {client_id for client_id in clients if self.owners.get(client_id, rank) == rank}
        self._files = {client_id: file for client_id, file in self._loaded.items() if client_id in self.clients}
        self._records = {}
        for client_id, content in state["records"].items():
            if client_id in self.clients:
                self._records[client_id] = HeldRecord(content, num_bytes(content), round_idx=0)
        self._bytes = sum(record.size for record in self._records.values())


def held(*, client_id: int, round_idx: int, memory: Mapping[str, Any], personal: State | None) -> HeldRecord:
    """Make a client's record in host memory, without empty parts.

    Args:
        client_id: The client's id.
        round_idx: The round that writes the record.
        memory: The client's memory, which is copied.
        personal: The client's personal entries, or None.

    Raises:
        TypeError: The memory holds something that a checkpoint cannot.
    """
    cpu = torch.device("cpu")
    content: dict[str, Any] = {}
    if memory:
        content["memory"] = copy_pytree(dict(memory), f"memory of client {client_id}", cpu)
    if personal is not None:
        content["personal"] = on_device(personal, cpu)
    return HeldRecord(content, num_bytes(content), round_idx)


def with_content(records: Mapping[int, HeldRecord]) -> dict[int, HeldRecord]:
    """Return the records that are not empty, by client id."""
    return {client_id: record for client_id, record in records.items() if record.content}


def on_device(state: State, device: torch.device) -> State:
    """Return a state with its tensors on a device. A tensor that lies there is not copied."""
    return {name: copy_to_device(value, device) for name, value in state.items()}


def folders_beside(ckpt_path: Any) -> list[Path]:
    """Return the folders in which the files of a checkpoint may lie. Without a checkpoint there are none."""
    if ckpt_path is None:
        return []
    return [parent / "clients" for parent in list(Path(ckpt_path).parents)[:PARENTS_SEARCHED]]


def first_file(folders: Sequence[Path], name: str) -> Path | None:
    """Return the path of a file in the first of the folders that has it, or None."""
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    return None


def hash_of(content: bytes) -> str:
    """Return a 128-bit hash as 32 hex digits."""
    return blake2b(content, digest_size=16).hexdigest()
