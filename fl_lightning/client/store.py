"""Client store: memory and personal entries by client id, in host memory up to a budget, then in files."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer

from fl_lightning.client.checkpoint_io import FederatedCheckpointIO
from fl_lightning.client.records import FileRecord, decode, delete, encode, files_of, kept, num_bytes, table_of
from fl_lightning.types import State
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.files import write_atomically, write_file
from fl_lightning.utils.settings import check_at_least

CHECKED_AT_START = 2**30
"""Bytes of files up to which their content is checked at the start of a fit, not only where they are read."""


class HeldRecord(NamedTuple):
    """A client's record in host memory: its `memory` and `personal` entries, where it has them.

    From which round.
    """

    content: dict[str, Any]
    size: int
    round_idx: int


class ClientStore:
    """Keeps memory and personal entries of every client that has taken part.

    While all records fit into the budget they lie in host memory; beyond it what was used last does. Where a run has a
    folder (a logger or ModelCheckpoint), each record becomes a file of its own, named (client, round), as soon as a
    checkpoint is saved or the budget is spent, and a checkpoint holds hashes only: what it writes depends on the
    clients that took part since the one before. Without a folder, and in a checkpoint that is saved elsewhere, the
    records lie in the checkpoint. A record is replaced, never edited, so a checkpoint taken at any time holds whole
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
        self._in_files = False
        self._records: dict[int, HeldRecord] = {}  # in order of use: all records, or those used last
        self._bytes = 0  # of the records held
        self._files: dict[int, FileRecord] = {}
        self._loaded: dict[int, FileRecord] = {}  # all processes' files that a checkpoint named, until the fit starts
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
        """Record which process keeps the record of a client, by client id."""
        self.owners |= owners

    def put(self, records: Mapping[int, tuple[Mapping[str, Any], State | None]], round_idx: int) -> None:
        """Keep the memory and the personal entries of a round's clients: all of them, or after an error none.

        Raises:
            TypeError: if a memory holds something that a checkpoint cannot.
            OSError: if a file cannot be written.
        """
        new = {c: held(c, round_idx, memory, personal) for c, (memory, personal) in records.items()}
        filled = {client_id: record for client_id, record in new.items() if record.content}
        change = sum(record.size for record in new.values())
        change -= sum(self._records[client_id].size for client_id in new if client_id in self._records)
        files: dict[int, FileRecord] = {}
        if self._bytes + change > self.budget or (self._files and not self._in_files):
            unwritten = {c: record for c, record in self._records.items() if c not in self._files and c not in new}
            files = {c: self._write(c, record) for c, record in (unwritten | filled).items()}
        replaced = {self._files.pop(client_id).name for client_id in new if client_id in self._files}
        replaced &= self._fresh - {file.name for file in files.values()}
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
        """The client's record, which becomes the one used last.

        Empty where it has none.
        """
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

    def _evict(self) -> None:
        """Release the records that were not used for longest, but never the one used last, nor one without a file."""
        while self._bytes > self.budget and len(self._records) > 1 and next(iter(self._records)) in self._files:
            self._bytes -= self._records.pop(next(iter(self._records))).size

    # --- files -------------------------------------------------------------------------------------------------

    def _write(self, client_id: int, record: HeldRecord) -> FileRecord:
        if self._unshared:
            raise ValueError(self._not_shared())
        content = encode(record.content)
        file = FileRecord(client_id, record.round_idx, hash_of(content), len(content))
        path = self.folder / file.name
        if not path.exists():  # else an earlier run wrote the same, and a checkpoint may need it
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
        file = self._files[client_id]
        path = self.folder / file.name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the checkpoint needs the file {file.name} of client {client_id}, found neither in {self.folder} nor "
                f"beside the checkpoint; restore it, or set model.store.folder to the folder that has it"
            ) from None
        if hash_of(content) != file.hash:
            raise ValueError(
                f"the file of client {client_id} in the client store must be as it was when the checkpoint was saved, "
                f"and {path} was altered; restore it, or continue from another checkpoint"
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
        run = Path(trainer.log_dir or trainer.default_root_dir)
        self.folder = Path(self.given_folder or run / "clients").resolve()
        self._check_shared(trainer)
        has_folder = bool(trainer.loggers or trainer.checkpoint_callbacks)
        self._in_files = has_folder and self.budget != float("inf") and not self._unshared
        if trainer.is_global_zero:
            self._find_files(trainer.ckpt_path)
        trainer.strategy.barrier("files of clients found")
        self._check_files()
        checkpoint_io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and isinstance(checkpoint_io, FederatedCheckpointIO):
            in_use = [file.name for file in self._loaded.values()]
            checkpoint_io.track(self.folder, in_use, trainer.ckpt_path, anywhere=self.given_folder is not None)
        self._loaded = {}

    def _find_files(self, ckpt_path: Any) -> None:
        """Bring each file that a checkpoint names, of any process, from beside the checkpoint to this run's folder."""
        beside = [] if ckpt_path is None else [folder / "clients" for folder in list(Path(ckpt_path).parents)[:3]]
        for file in self._loaded.values():
            there = next((folder / file.name for folder in beside if (folder / file.name).is_file()), None)
            if there is not None and not (self.folder / file.name).exists():
                write_atomically(self.folder / file.name, partial(shutil.copyfile, there))

    def _check_files(self) -> None:
        """Read this process's files, up to so many bytes.

        Of the others the size is compared.
        """
        checked = 0
        for client_id, file in self._files.items():
            path = self.folder / file.name
            checked += file.bytes
            if checked <= CHECKED_AT_START or not path.is_file() or path.stat().st_size != file.bytes:
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
            with suppress(OSError):  # it holds files, or was never made
                self.folder.rmdir()
        if self._unshared and (self.given_folder is not None or self.budget == 0 or self._files):
            raise ValueError(self._not_shared())

    def _not_shared(self) -> str:
        return (
            f"on several nodes the folder of the client store must be one that all of them see, and {self.folder} is "
            f"not; set model.store.folder to a shared one, or model.store.memory_budget_mb to null"
        )

    def state_dict(self) -> dict[str, Any]:
        """The records that lie in memory only, and the files of the others, for a checkpoint."""
        if self._in_files:
            unwritten = {c: record for c, record in self._records.items() if c not in self._files}
            self._files |= {c: self._write(c, record) for c, record in unwritten.items()}
        self._fresh.clear()
        records = {c: record.content for c, record in sorted(self._records.items()) if c not in self._files}
        return {"records": records, "files": table_of(file for _, file in sorted(self._files.items()))}

    def load_state_dict(self, state: Mapping[str, Any], rank: int = 0, world: int = 1) -> None:
        """Restore what `state_dict` gave: a client's record goes to rank `client_id mod world`."""
        self._loaded = files_of(state)
        clients = sorted(self._loaded | state["records"])
        self.owners = {client_id: client_id % world for client_id in clients} if world > 1 else {}
        self.clients = {client_id for client_id in clients if client_id % world == rank}
        self._files = {c: file for c, file in self._loaded.items() if c in self.clients}
        records = state["records"].items()
        self._records = {c: HeldRecord(content, num_bytes(content), 0) for c, content in records if c in self.clients}
        self._bytes = sum(record.size for record in self._records.values())


def held(client_id: int, round_idx: int, memory: Mapping[str, Any], personal: State | None) -> HeldRecord:
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
    return HeldRecord(content, num_bytes(content), round_idx)


def on_device(state: State, device: torch.device) -> State:
    """A state with its tensors on a device: those that are there already are not copied."""
    return {name: to_device(value, device) for name, value in state.items()}


def hash_of(content: bytes) -> str:
    """A 128-bit hash as hex digits."""
    return blake2b(content, digest_size=16).hexdigest()
