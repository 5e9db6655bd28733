"""The checkpoint IO of a run, which saves checkpoints whole, and checks them when they are read.

It also deletes files of the client store that no checkpoint needs.
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
from fl_lightning.utils.plain import objects_in, plain_value

REGISTRY = "checkpoints.json"
"""Name of the file, beside the store's files, that lists the checkpoints that may need the store's files."""

Names = frozenset[str]
"""Names of files of the client store."""


class FederatedCheckpointIO(CheckpointIO):
    """Saves checkpoints whole or not at all, with a digest that is checked when they are loaded.

    A path that is an address (`s3://...`) and a checkpoint IO of the user's own are left to the inner checkpoint IO.

    Args:
        inner: The Trainer's checkpoint IO.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        super().__init__()
        self.inner = inner
        self._folder: Path | None = None
        """The folder of the store's files. None if no store is tracked."""
        self._anywhere = False
        """Whether the folder is found from every checkpoint."""
        self._latest: Names = frozenset()
        """The files that the checkpoint saved last needs. They include all files that the store uses."""
        self._needed: dict[str, Names] = {}
        """The files that each checkpoint needs, by the path of the checkpoint."""
        self._registered: list[str] = []
        """The names of the checkpoints in the registry on disk."""
        self._protected: Names = frozenset()
        """The files that a checkpoint of a damaged registry may need. They are never deleted."""
        self._reported: set[str] = set()
        """The names of the objects in checkpoints that were reported."""
        self._places: set[tuple[str, str]] = set()
        """Where this process saved checkpoints: the folders, with the ending of the files."""

    def track(self, folder: Path, in_use: Iterable[str], ckpt_path: Any, anywhere: bool) -> None:
        """Keep the files of a client store that a checkpoint needs, and delete the others.

        Args:
            folder: The folder of the store's files.
            in_use: Names of the files that the store uses now.
            ckpt_path: The checkpoint that the run continues. None is a new run.
            anywhere: Whether the folder is found from every checkpoint. If it is not, a checkpoint outside the
                run holds the records itself.
        """
        self._folder = folder
        self._anywhere = anywhere
        self._latest = frozenset(in_use)
        names = read_registry(folder / REGISTRY)
        self._registered = names or []
        self._protected = file_names(folder) if names is None else frozenset()
        self._needed = self._recall(ckpt_path)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        checkpoint = plain_value(self._with_records(checkpoint, path))
        self._say_unreadable(checkpoint)
        if storage_options is None and self._is_ours(path):
            self._places.add(folder_and_ending(path))
            self._save(checkpoint, path)
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
        """Remove a checkpoint of this run.

        Another file stays, because its name may come from a forged checkpoint that the run continues.
        """
        foreign = folder_and_ending(path) not in self._places or not os.path.isfile(path)
        if self._is_ours(path) and foreign and os.path.lexists(path):
            rank_zero_info(f"{path} stays: this run has saved no checkpoint beside it, so it may not be the run's own")
            return
        self.inner.remove_checkpoint(path)
        if self._folder is not None:
            self._note(path, frozenset())

    def teardown(self) -> None:
        self.inner.teardown()

    def _is_ours(self, path: Any) -> bool:
        """Return True if a file is saved and loaded here, not by the inner checkpoint IO."""
        return type(self.inner) is TorchCheckpointIO and not is_url(str(path))

    def _with_records(self, checkpoint: dict[str, Any], path: Any) -> dict[str, Any]:
        """Return the checkpoint, with the client store's records in it if it must not need their files.

        A checkpoint outside the run must not, unless the folder is found from every checkpoint.
        """
        federated = checkpoint.get("federated", {})
        store = federated.get("store")
        folder = self._folder
        if not store or folder is None or self._anywhere or is_below(path, folder.parent):
            return checkpoint
        whole_store = {**store, **inlined(store, folder)}
        return {**checkpoint, "federated": {**federated, "store": whole_store}}

    def _save(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Save a checkpoint whole or not at all.

        Raises:
            OSError: The file cannot be written.
        """
        try:
            save_with_digest({**checkpoint, DIGEST: "sha256"}, Path(path))
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError.
            first_line = str(error).partition("\n")[0]
            reason = getattr(error, "strerror", None) or first_line
            raise OSError(
                f"the checkpoint {path} cannot be written ({reason}); the one before it is as it was: make space "
                f"or give the run another folder, then continue with --ckpt_path last"
            ) from error

    def _say_unreadable(self, checkpoint: Mapping[str, Any]) -> None:
        """Report the objects in a checkpoint, once each, because it is read with `weights_only=False` only."""
        names = {name: None for name in objects_in(checkpoint) if name not in self._reported}
        self._reported.update(names)
        if names:
            rank_zero_info(
                f"{', '.join(names)} of the checkpoint are objects, so that it is read with weights_only=False only; "
                f"keep tensors, numbers, strings, lists and dicts of them there"
            )

    def _note(self, path: Any, files: Names) -> None:
        """Take down which files a checkpoint needs, and delete the files that no checkpoint needs any more.

        Args:
            path: The path of the checkpoint.
            files: Names of the files. Empty for a checkpoint that is gone.
        """
        folder = Path(self._folder or ".")
        noted_path = full_path(path)
        before = self._needed
        after: dict[str, Names] = {}
        for other_path, names in before.items():
            if other_path != noted_path and (is_url(other_path) or os.path.exists(other_path)):
                after[other_path] = names
        if files:
            after[noted_path] = files
        self._needed = after
        still_needed = self._latest.union(self._protected, *after.values())
        delete(folder, frozenset().union(*before.values()) - still_needed)
        self._register(folder)

    def _register(self, folder: Path) -> None:
        """Write the registry of the checkpoints that need files, if it has changed."""
        names = [path if is_url(path) else os.path.relpath(path, folder) for path in self._needed]
        if names != self._registered:
            write_atomically(folder / REGISTRY, lambda part: part.write_text(registry_of(names)))
            self._registered = names

    def _recall(self, ckpt_path: Any) -> dict[str, Names]:
        """Return the files that earlier checkpoints need, by the path of the checkpoint.

        Args:
            ckpt_path: The checkpoint that the run continues. None is a new run.
        """
        folder = Path(self._folder or ".")
        needed: dict[str, Names] = {}
        for name in self._registered:
            path = name if is_url(name) else full_path(folder / name)
            if is_below(path, folder.parent):
                needed[path] = read_names(path, folder)
            elif not is_url(name):
                # The registry may be forged, so a file outside the run is not read.
                needed[path] = file_names(folder)
        if ckpt_path is not None:
            path = full_path(ckpt_path)
            needed[path] = read_names(path, folder)
        return {path: names for path, names in needed.items() if names}


def read_names(path: str | Path, folder: Path) -> Names:
    """Return the names of the store's files that a saved checkpoint needs.

    Args:
        path: The path of the checkpoint.
        folder: The folder of the store's files. If the checkpoint cannot be read, it may need all of them.
    """
    if not os.path.exists(path):
        return frozenset()
    if not os.path.isfile(path):
        return file_names(folder)
    try:
        return names_needed(loaded(path, mmap=True))
    except Exception:  # A damaged file raises errors of many kinds.
        return file_names(folder)


def collect_orphans(folder: Path, checkpoints: Iterable[Path]) -> None:
    """Delete a store's files that no checkpoint needs, as a killed run leaves them.

    Call it while no other process writes to the folder.

    Args:
        folder: The folder of the store's files, with the registry.
        checkpoints: The paths of the checkpoints that the registry may lack.
    """
    names = read_registry(folder / REGISTRY)
    if names is None:
        return
    registered = [Path(full_path(folder / name)) for name in names if not is_url(name)]
    if not all(is_below(path, folder.parent) for path in registered):
        return
    orphans = file_names(folder)
    for path in [*checkpoints, *registered]:
        orphans -= read_names(path, folder)
    delete(folder, orphans)


def check_files_of(strategy: Strategy) -> None:
    """Let a Trainer's strategy save checkpoints whole, and check them when it loads them."""
    if not isinstance(strategy.checkpoint_io, FederatedCheckpointIO):
        strategy.checkpoint_io = FederatedCheckpointIO(strategy.checkpoint_io)


class CheckedLoading(LightningModule):
    """Checks a checkpoint when it is loaded into the module."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a checkpoint as Lightning does, if the content is as it was written.

        Raises:
            ValueError: The file is damaged.
        """
        is_local = isinstance(checkpoint_path, str | Path) and not is_url(str(checkpoint_path))
        if is_local and not check_digest(checkpoint_path) and kwargs.get("weights_only") is not False:
            say_if_unchecked(checkpoint_path, read_saved(checkpoint_path, mmap=True))
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)


def say_if_unchecked(path: Any, checkpoint: Mapping[str, Any]) -> None:
    """Report that a file of another program cannot be checked."""
    if DIGEST not in checkpoint:
        rank_zero_info(f"{path} has no digest: it is read, but whether it is as it was written cannot be told")


def registry_of(names: list[str]) -> str:
    """Return the text of a registry: the names of checkpoints, and a digest of the names."""
    return json.dumps({"checkpoints": names, "sha256": sha256(json.dumps(names).encode()).hexdigest()})


def read_registry(path: Path) -> list[str] | None:
    """Return the names in a registry of checkpoints.

    Returns:
        The names. Empty if there is no registry, None if the registry is damaged.
    """
    if not path.exists():
        return []
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        names: list[str] = json.loads(text)["checkpoints"]
        is_whole = all(isinstance(name, str) for name in names) and text == registry_of(names)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return names if is_whole else None


def names_needed(checkpoint: Mapping[str, Any]) -> Names:
    """Return the names of the store's files that a checkpoint needs."""
    store = checkpoint.get("federated", {}).get("store") or {}
    return frozenset(file.name for file in files_of(store).values())


def inlined(store: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state of a client store whose records are all in the state, none in files.

    Args:
        store: The state of the client store in a checkpoint.
        folder: The folder of the store's files.
    """
    records = dict(store["records"])
    for client_id, file in files_of(store).items():
        records[client_id] = decode((folder / file.name).read_bytes())
    return {"records": records, "files": store["files"][:0]}


def folder_and_ending(path: Any) -> tuple[str, str]:
    """Return the folder and the ending of a file, with links followed."""
    folder, name = os.path.split(full_path(path))
    _, ending = os.path.splitext(name)
    return folder, ending


def is_url(path: str) -> bool:
    """Return True if a path is an address, such as `s3://bucket/last.ckpt`."""
    return "://" in path


def is_below(path: Any, folder: Path) -> bool:
    """Return True if a file lies in a folder or below it, with links followed."""
    return not is_url(str(path)) and Path(path).resolve().is_relative_to(folder.resolve())


def full_path(path: Any) -> str:
    """Return the path by which checkpoints are compared, absolute and without links.

    An address stays as it is.
    """
    return str(path) if is_url(str(path)) else os.path.realpath(path)
