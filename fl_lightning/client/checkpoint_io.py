"""Checkpoint IO: files whole on disk, checked when read.

Files of the client store that none needs are deleted.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client.records import decode, delete, file_names, files_of
from fl_lightning.utils.files import DIGEST, check_digest, loaded, read_saved, save_with_digest, write_atomically

REGISTRY = "checkpoints.json"
"""Name of the file beside the store's that lists the checkpoints that may need them."""

Names = frozenset[str]


class FederatedCheckpointIO(CheckpointIO):
    """Saves checkpoints whole or not at all, with a digest that is checked when they are loaded.

    Paths that are addresses (`s3://...`), and a checkpoint IO of the user's own, are left as they are.

    Args:
        inner: the Trainer's checkpoint IO.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        super().__init__()
        self.inner = inner
        self._folder: Path | None = None  # of the store's files
        self._anywhere = False
        self._latest: Names = frozenset()  # of the checkpoint saved last: all that are in use are among them
        self._needed: dict[str, Names] = {}  # files that a checkpoint needs, by its path
        self._registered: list[str] = []
        self._kept: Names = frozenset()  # that a checkpoint may need which a damaged registry named
        self._places: set[tuple[str, str]] = set()  # folders in which this process saved, with the files' ending

    def track(self, folder: Path, in_use: Iterable[str], ckpt_path: Any, anywhere: bool) -> None:
        """Keep the files of a client store that a checkpoint needs, and delete the others.

        Args:
            folder: of the files.
            in_use: names of those that the store uses now.
            ckpt_path: checkpoint that is continued, or None.
            anywhere: whether the folder is found from every checkpoint; else those outside the run hold the records.
        """
        self._folder = folder
        self._anywhere = anywhere
        self._latest = frozenset(in_use)
        names = read_registry(folder / REGISTRY)
        self._registered = names or []
        self._kept = file_names(folder) if names is None else frozenset()
        self._needed = self._recall(ckpt_path)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        store = checkpoint.get("federated", {}).get("store")
        if store and self._folder is not None and not self._anywhere and not is_below(path, self._folder.parent):
            whole = {**store, **inlined(store, self._folder)}
            checkpoint = {**checkpoint, "federated": {**checkpoint["federated"], "store": whole}}
        if storage_options is None and self._is_ours(path):
            self._places.add(place_of(path))
            try:
                save_with_digest({**checkpoint, DIGEST: "sha256"}, Path(path))
            except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                raise OSError(
                    f"the checkpoint {path} cannot be written ({reason}); the one before it is as it was: make space "
                    f"or give the run another folder, then continue with --ckpt_path last"
                ) from error
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        if self._folder is not None:
            self._latest = names_needed(checkpoint)
            self._note(path, self._latest)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not self._is_ours(path) or weights_only is False:
            return self.inner.load_checkpoint(path, map_location, weights_only)
        checkpoint = read_saved(path)
        say_if_unchecked(path, checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, but nothing else: its name may come from a forged checkpoint that the run continues."""
        foreign = place_of(path) not in self._places or not os.path.isfile(path)
        if self._is_ours(path) and foreign and os.path.lexists(path):
            rank_zero_info(f"{path} stays: this run has saved no checkpoint beside it, so it may not be the run's own")
            return
        self.inner.remove_checkpoint(path)
        if self._folder is not None:
            self._note(path, frozenset())

    def teardown(self) -> None:
        self.inner.teardown()

    def _is_ours(self, path: Any) -> bool:
        return type(self.inner) is TorchCheckpointIO and not is_url(str(path))

    def _note(self, path: Any, files: Names) -> None:
        """Record the files that the checkpoint at `path` needs.

        Delete those that only its predecessor needed.
        """
        folder = Path(self._folder or ".")
        before = self._needed
        path = full_path(path)
        self._needed = {p: names for p, names in before.items() if p != path and (is_url(p) or os.path.exists(p))}
        if files:
            self._needed[path] = files
        needed = self._latest.union(self._kept, *self._needed.values())
        delete(folder, frozenset().union(*before.values()) - needed)
        relative = [p if is_url(p) else os.path.relpath(p, folder) for p in self._needed]
        if relative != self._registered:
            write_atomically(folder / REGISTRY, lambda part: part.write_text(registry_of(relative)))
            self._registered = relative

    def _recall(self, ckpt_path: Any) -> dict[str, Names]:
        """Files that checkpoints of earlier runs in this folder need, and the one that is continued, by path."""
        folder = Path(self._folder or ".")
        needed = dict[str, Names]()
        for name in self._registered:
            path = name if is_url(name) else full_path(folder / name)
            if is_below(path, folder.parent):
                needed[path] = read_names(path, folder)
            elif not is_url(name):  # of another folder: the registry may be forged, so it is not read
                needed[path] = file_names(folder)
        if ckpt_path is not None:
            needed[full_path(ckpt_path)] = read_names(full_path(ckpt_path), folder)
        return {path: names for path, names in needed.items() if names}


def read_names(path: str | Path, folder: Path) -> Names:
    """Names of the store's files that a saved checkpoint needs: all in `folder` where it cannot be read."""
    if not os.path.exists(path):
        return frozenset()
    try:
        return names_needed(loaded(path, mmap=True)) if os.path.isfile(path) else file_names(folder)
    except Exception:  # incomplete, or unreadable to us: it may need any of them
        return file_names(folder)


def collect_orphans(folder: Path, checkpoints: Iterable[Path]) -> None:
    """Delete a store's files that neither these checkpoints nor those of its registry need: a killed run left them.

    To be called while no other process writes to the folder.
    """
    names = read_registry(folder / REGISTRY)
    registered = [Path(full_path(folder / name)) for name in names or () if not is_url(name)]
    if names is not None and all(is_below(path, folder.parent) for path in registered):
        paths = [*checkpoints, *registered]
        delete(folder, file_names(folder).difference(*(read_names(path, folder) for path in paths)))


def check_files_of(strategy: Strategy) -> None:
    """Let a Trainer's strategy save checkpoints whole, and check them when it loads them."""
    if not isinstance(strategy.checkpoint_io, FederatedCheckpointIO):
        strategy.checkpoint_io = FederatedCheckpointIO(strategy.checkpoint_io)


class CheckedLoading(LightningModule):
    """A module whose checkpoints are checked when they are loaded."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a checkpoint, as Lightning does, whose content is as it was written.

        Raises:
            ValueError: if the file is damaged.
        """
        local = isinstance(checkpoint_path, str | Path) and not is_url(str(checkpoint_path))
        if local and not check_digest(checkpoint_path) and kwargs.get("weights_only") is not False:
            say_if_unchecked(checkpoint_path, read_saved(checkpoint_path, mmap=True))
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)


def say_if_unchecked(path: Any, checkpoint: Mapping[str, Any]) -> None:
    """Report that a file of another program cannot be checked."""
    if DIGEST not in checkpoint:
        rank_zero_info(f"{path} has no digest: it is read, but whether it is as it was written cannot be told")


def registry_of(names: list[str]) -> str:
    """Text of a registry: the names of checkpoints, and a digest of them."""
    return json.dumps({"checkpoints": names, "sha256": sha256(json.dumps(names).encode()).hexdigest()})


def read_registry(path: Path) -> list[str] | None:
    """Names in a registry of checkpoints.

    None where there is no registry, None where it is damaged.
    """
    if not path.exists():
        return []
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        names: list[str] = json.loads(text)["checkpoints"]
        return names if all(isinstance(name, str) for name in names) and text == registry_of(names) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def names_needed(checkpoint: Mapping[str, Any]) -> Names:
    """Names of the store's files that a checkpoint needs."""
    store = checkpoint.get("federated", {}).get("store") or {}
    return frozenset(file.name for file in files_of(store).values())


def inlined(store: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Records that lie in files as they stand in a checkpoint that needs no files."""
    records = {c: decode((folder / file.name).read_bytes()) for c, file in files_of(store).items()}
    return {"records": {**store["records"], **records}, "files": store["files"][:0]}


def place_of(path: Any) -> tuple[str, str]:
    """Folder and ending of a file.

    Links are followed.
    """
    folder, name = os.path.split(full_path(path))
    return folder, os.path.splitext(name)[1]


def is_url(path: str) -> bool:
    """Return True for a path that is an address, such as `s3://bucket/last.ckpt`."""
    return "://" in path


def is_below(path: Any, folder: Path) -> bool:
    """Return True for a file that lies in a folder or below it.

    Links are followed.
    """
    return not is_url(str(path)) and Path(path).resolve().is_relative_to(folder.resolve())


def full_path(path: Any) -> str:
    """A path as checkpoints are compared by: absolute, without links.

    An address as it is.
    """
    return str(path) if is_url(str(path)) else os.path.realpath(path)
