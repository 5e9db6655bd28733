"""What clients keep between rounds, by client id: in host memory up to a budget, then in files."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins.io import CheckpointIO

from fl_lightning.functional.records import decode, encode, kept, num_bytes
from fl_lightning.types import State
from fl_lightning.utils.settings import check_at_least

CHECKED_AT_START = 2**30
"""Bytes of files up to which their content is checked at the start of a fit, not only where they are read."""

REGISTRY = "checkpoints.json"
"""Beside the files: paths of the checkpoints that may need them."""


class StoredFile(NamedTuple):
    """One client's record in a file: never changed, since its name says client, round and content."""

    folder: str
    name: str
    hash: str
    size: int

    @property
    def path(self) -> Path:
        return Path(self.folder, self.name)


class ClientStore:
    """Memory and personal entries of every client that has taken part.

    While all records fit into the budget they lie in host memory and a checkpoint holds them. When they no longer do,
    each record becomes a file of its own, named (client, round), and a checkpoint holds names and hashes only; what was
    used last stays in memory too. A record is replaced, never edited, so a checkpoint taken at any time holds whole
    rounds only. Files that no checkpoint needs any more are deleted.

    Args:
        memory_budget_mb: megabytes (2^20 bytes) of host memory for the records, of each process; 0: always files;
            None: no limit, never files.
        folder: of the files; None: `clients` in the run's folder. On several nodes all must see it.

    Raises:
        ValueError: a budget below 0.
    """

    def __init__(self, memory_budget_mb: float | None = 4096, folder: str | Path | None = None) -> None:
        check_at_least(0, "0 keeps every record in a file, null none", memory_budget_mb=memory_budget_mb)
        self.budget = float("inf") if memory_budget_mb is None else memory_budget_mb * 2**20
        self.given = folder
        self.folder = Path(folder or "clients").resolve()
        self.device = torch.device("cpu")
        self.owners: dict[int, int] = {}
        """Which process keeps a client's record, by client id; empty with one process."""
        self._unshared = False
        self._records: dict[int, dict[str, Any]] = {}  # in order of use: all of them, or those used last
        self._bytes = 0
        self._files: dict[int, StoredFile] = {}
        self._fresh: set[str] = set()  # written here, and in no checkpoint yet
        self._live: dict[str, frozenset[str]] = {}  # names of files that a checkpoint needs, by its path
        self._latest: frozenset[str] = frozenset()  # those of the checkpoint saved last: all that are in use are in it

    # --- records -----------------------------------------------------------------------------------------------

    def memory(self, client_id: int) -> dict[str, Any]:
        """A copy of what the client kept: edited in place, or in a round that fails, it leaves the record as it is."""
        memory: dict[str, Any] = kept(self._record(client_id).get("memory", {}), "memory", self.device)
        return memory

    def personal(self, client_id: int) -> State | None:
        """The client's own entries, or None before its first training. Not to be edited."""
        personal: State | None = self._record(client_id).get("personal")
        if personal is None or self.device.type == "cpu":
            return personal
        return {name: value.to(self.device) for name, value in personal.items()}

    def put(self, records: Mapping[int, tuple[Mapping[str, Any], State | None]], round_idx: int) -> None:
        """Keep the memory and the personal entries of a round's clients: all of them, or after an error none.

        Raises:
            TypeError: if a memory holds something that a checkpoint cannot.
            OSError: if a file cannot be written.
        """
        cpu, new = torch.device("cpu"), {}
        for client_id, (memory, personal) in records.items():
            if not memory and personal is None and client_id not in self._records and client_id not in self._files:
                continue  # a client that keeps nothing, as ever
            new[client_id] = {"memory": kept(dict(memory), f"memory of client {client_id}", cpu)} if memory else {}
            if personal is not None:
                on_cpu = self.device == cpu
                new[client_id]["personal"] = personal if on_cpu else {n: value.to(cpu) for n, value in personal.items()}
        if not new:
            return
        change = sum(num_bytes(record) - num_bytes(self._records.get(c, {})) for c, record in new.items())
        files: dict[int, StoredFile] = {}
        if self._files or self._bytes + change > self.budget:
            unwritten = {c: record for c, record in self._records.items() if c not in self._files}
            files = {c: self._write(c, round_idx, record) for c, record in {**unwritten, **new}.items() if record}
        old = [self._files.pop(c) for c in new if c in self._files]
        self._files |= files
        for client_id, record in new.items():
            self._records.pop(client_id, None)
            if record:
                self._records[client_id] = record
        self._bytes += change
        self._evict()
        in_use = {file.name for file in files.values()}
        self._delete({file.name for file in old} & self._fresh - in_use)

    def _record(self, client_id: int) -> dict[str, Any]:
        record = self._records.get(client_id)
        if record is None:
            if client_id not in self._files:
                return {}
            record = decode(self._read(client_id))
            self._bytes += num_bytes(record)
        elif not self._files:
            return record
        else:
            del self._records[client_id]
        self._records[client_id] = record  # the last one used
        self._evict()
        return record

    def _evict(self) -> None:
        """Let go of what was not used for longest and lies in a file."""
        while self._files and self._bytes > self.budget and len(self._records) > 1:
            first = next(iter(self._records))
            self._bytes -= num_bytes(self._records.pop(first))

    # --- files -------------------------------------------------------------------------------------------------

    def _write(self, client_id: int, round_idx: int, record: dict[str, Any]) -> StoredFile:
        if self._unshared:
            raise ValueError(self._not_shared())
        content = encode(record)
        digest = hash_of(content)
        name = f"client_{client_id}_round_{round_idx}_{digest[:12]}.safetensors"
        file = StoredFile(str(self.folder), name, digest, len(content))
        if file.path.exists():  # from a run that came by here before: the name says what is in it
            if file.path.read_bytes() == content:
                return file
        else:
            self._fresh.add(name)
        replace(file.path, content, "set model.store.folder to one with space, or raise model.store.memory_budget_mb")
        return file

    def _read(self, client_id: int) -> bytes:
        file = self._files[client_id]
        try:
            content = file.path.read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(self._missing(client_id)) from None
        if hash_of(content) != file.hash:
            raise ValueError(
                f"the file of client {client_id} in the client store must be as it was when the checkpoint was saved, "
                f"and {file.path} was altered; restore it, or continue from another checkpoint"
            )
        return content

    def _missing(self, client_id: int) -> str:
        file = self._files[client_id]
        return (
            f"the checkpoint needs the file {file.name} of client {client_id}, found neither in {self.folder} nor in "
            f"{file.folder}; restore it, or set model.store.folder to the folder that has it"
        )

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files of the own folder."""
        for name in names:
            self._fresh.discard(name)
            with suppress(OSError):
                (self.folder / name).unlink()

    # --- a run -------------------------------------------------------------------------------------------------

    def start(self, trainer: Trainer, device: torch.device) -> None:
        """At the start of a fit: find the folder, check what a checkpoint said is there, watch checkpoints.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file was altered, or not all nodes see the folder.
        """
        self.device = device
        self.folder = Path(self.given or Path(trainer.log_dir or trainer.default_root_dir, "clients")).resolve()
        self._check_shared(trainer)
        beside = [] if trainer.ckpt_path is None else list(Path(trainer.ckpt_path).parents)[:3]
        checked = 0
        for client_id, entry in self._files.items():
            folders = (self.folder, Path(entry.folder), *(folder / "clients" for folder in beside))
            found = next((folder for folder in folders if (folder / entry.name).is_file()), None)
            if found is None:
                raise FileNotFoundError(self._missing(client_id))
            file = self._files[client_id] = entry._replace(folder=str(found))
            checked += file.size
            if checked <= CHECKED_AT_START or file.path.stat().st_size != file.size:
                self._read(client_id)
        if trainer.is_global_zero:
            self._recall(trainer.ckpt_path)
            strategy = trainer.strategy
            inner = strategy.checkpoint_io
            strategy.checkpoint_io = Watched(inner.inner if isinstance(inner, Watched) else inner, self)

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
        if self._unshared and (self.given is not None or self.budget == 0 or self._files):
            raise ValueError(self._not_shared())

    def _not_shared(self) -> str:
        return (
            f"on several nodes the folder of the client store must be one that all of them see, and {self.folder} is "
            f"not; set model.store.folder to a shared one, or model.store.memory_budget_mb to null"
        )

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """For a checkpoint: each client's record, or the name, folder, hash and size of its file."""
        self._fresh.clear()
        files = {
            c: {"file": f.name, "folder": f.folder, "hash": f.hash, "bytes": f.size} for c, f in self._files.items()
        }
        return {**{c: record for c, record in self._records.items() if c not in files}, **files}

    def load_state_dict(self, state: Mapping[int, dict[str, Any]], rank: int = 0, world: int = 1) -> None:
        """Restore what `state_dict` gave: a client's record goes to rank `client_id mod world`."""
        self.owners = {client_id: client_id % world for client_id in state} if world > 1 else {}
        own = {c: record for c, record in state.items() if c % world == rank}
        self._files = {c: stored(entry) for c, entry in own.items() if "file" in entry}
        self._records = {c: record for c, record in own.items() if c not in self._files}
        self._bytes = sum(map(num_bytes, self._records.values()))

    # --- what checkpoints need ---------------------------------------------------------------------------------

    def saved(self, path: str, records: Mapping[int, Mapping[str, Any]]) -> None:
        """A checkpoint with these records was written to `path`: what its predecessor alone needed is deleted."""
        self._latest = names_in(records)
        known = set(self._live)
        before = self._live.pop(path, frozenset())
        gone = [p for p in self._live if "://" not in p and not os.path.exists(p)]
        before = before.union(*(self._live.pop(p) for p in gone))
        if self._latest:
            self._live[path] = self._latest
        self._collect(before, known)

    def removed(self, path: str) -> None:
        """The checkpoint at `path` was deleted."""
        known = set(self._live)
        self._collect(self._live.pop(path, frozenset()), known)

    def _collect(self, candidates: frozenset[str], known: set[str]) -> None:
        self._delete(candidates - self._latest.union(*self._live.values()))
        if known != set(self._live):
            relative = [path if "://" in path else os.path.relpath(path, self.folder) for path in self._live]
            replace(self.folder / REGISTRY, json.dumps(relative).encode(), "free some space")

    def _recall(self, ckpt_path: Any) -> None:
        """Learn what checkpoints of earlier runs in this folder need."""
        registry, paths = self.folder / REGISTRY, [] if ckpt_path is None else [str(ckpt_path)]
        if registry.is_file():
            paths += [path if "://" in path else str(self.folder / path) for path in json.loads(registry.read_text())]
        self._live = {}
        for path in {plain(path) for path in paths}:
            if os.path.exists(path) and (names := self._needed_by(path)):
                self._live[path] = names

    def _needed_by(self, path: str) -> frozenset[str]:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return names_in(checkpoint.get("federated", {}).get("store", {}))
        except Exception:  # broken off, or not ours to read: it may need any of them
            return frozenset(os.listdir(self.folder)) if self.folder.is_dir() else frozenset()


class Watched(CheckpointIO):
    """Tells the store which checkpoints there are.

    Args:
        inner: what saves and loads them.
        store: is told.
    """

    def __init__(self, inner: CheckpointIO, store: ClientStore) -> None:
        self.inner, self.store = inner, store

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.store.saved(plain(path), checkpoint.get("federated", {}).get("store", {}))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        self.store.removed(plain(path))

    def teardown(self) -> None:
        self.inner.teardown()


def plain(path: Any) -> str:
    """A path as the store compares it: absolute, without links; an address as it is."""
    return str(path) if "://" in str(path) else os.path.realpath(path)


def names_in(records: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
    """The files that a checkpoint's records name."""
    return frozenset(record["file"] for record in records.values() if "file" in record)


def stored(entry: Mapping[str, Any]) -> StoredFile:
    """A checkpoint's entry as a StoredFile."""
    return StoredFile(entry["folder"], entry["file"], entry["hash"], entry["bytes"])


def hash_of(content: bytes) -> str:
    """A 128-bit hash as hex digits."""
    return blake2b(content, digest_size=16).hexdigest()


def replace(path: Path, content: bytes, remedy: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: with the remedy.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise OSError(f"the client store cannot write {path} ({error.strerror or error}); {remedy}") from error
