"""Checkpoint IO that knows which files of the client store each checkpoint needs, and deletes the others."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from fl_lightning.utils.files import write_atomically

REGISTRY = "checkpoints.json"
"""Name of the file beside the store's that lists the checkpoints that may need them."""


class TrackedCheckpointIO(CheckpointIO):
    """Saves, loads and removes checkpoints as `inner` does; deletes files that no checkpoint needs any more.

    Args:
        inner: the checkpoint IO that saves, loads and removes.
        folder: of the client store's files.
        in_use: names of the files that the store uses now.
        ckpt_path: checkpoint that is continued, or None.
    """

    def __init__(self, inner: CheckpointIO, folder: Path, in_use: Iterable[str], ckpt_path: Any = None) -> None:
        super().__init__()
        self.inner, self.folder = inner, folder
        self._latest = frozenset(in_use)  # files of the checkpoint saved last: all that are in use are among them
        self._needed = self._recall(ckpt_path)  # files that a checkpoint needs, by its path

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self._latest = files_of(checkpoint)
        self._note(path, self._latest)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        self._note(path, frozenset())

    def teardown(self) -> None:
        self.inner.teardown()

    def _note(self, path: Any, files: frozenset[str]) -> None:
        """Note the files that the checkpoint at `path` needs; delete those that only its predecessor needed."""
        before, path = self._needed, full_path(path)
        self._needed = {p: names for p, names in before.items() if p != path and (is_url(p) or os.path.exists(p))}
        if files:
            self._needed[path] = files
        delete(self.folder, frozenset().union(*before.values()) - self._latest.union(*self._needed.values()))
        if before.keys() != self._needed.keys():
            relative = [p if is_url(p) else os.path.relpath(p, self.folder) for p in self._needed]
            write_atomically(self.folder / REGISTRY, lambda part: part.write_text(json.dumps(relative)))

    def _recall(self, ckpt_path: Any) -> dict[str, frozenset[str]]:
        """Files that checkpoints of earlier runs in this folder need, and the one that is continued, by path."""
        registry, paths = self.folder / REGISTRY, [] if ckpt_path is None else [str(ckpt_path)]
        if registry.is_file():
            paths += [p if is_url(p) else str(self.folder / p) for p in json.loads(registry.read_text())]
        needed = {path: self._read_files(path) for path in map(full_path, paths) if os.path.exists(path)}
        return {path: files for path, files in needed.items() if files}

    def _read_files(self, path: str) -> frozenset[str]:
        """Names of the files that a saved checkpoint needs: all where it cannot be read."""
        try:
            return files_of(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception:  # incomplete, or unreadable to us: it may need any of them
            return frozenset(os.listdir(self.folder)) if self.folder.is_dir() else frozenset()


def files_of(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Names of the files that a checkpoint's client records name."""
    records = checkpoint.get("federated", {}).get("store", {})
    return frozenset(record["file"] for record in records.values() if "file" in record)


def delete(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, as far as they are there and may be deleted."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def is_url(path: str) -> bool:
    """True for a path that is an address, such as `s3://bucket/last.ckpt`."""
    return "://" in path


def full_path(path: Any) -> str:
    """A path as checkpoints are compared by: absolute, without links; an address as it is."""
    return str(path) if is_url(str(path)) else os.path.realpath(path)
