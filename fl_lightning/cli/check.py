"""`fl-lightning check`: whether checkpoints, and the clients' files that they name, are as they were written."""

import os
import sys
from collections.abc import Collection
from pathlib import Path

from fl_lightning.client.records import FileRecord, files_of
from fl_lightning.client.store import hash_of
from fl_lightning.federation.checkpoint import federated
from fl_lightning.utils.files import DIGEST, read_saved
from fl_lightning.utils.text import printable


def run(argv: list[str]) -> None:
    """Print one line for each checkpoint.

    Args:
        argv: Paths of checkpoints, or of folders with checkpoints in them or below.

    Raises:
        SystemExit: The exit status is 1, because a checkpoint is damaged or cannot be read.
        FileNotFoundError: There is no checkpoint.
    """
    files: list[Path] = []
    for path in map(Path, argv):
        if os.path.isdir(path):
            files += sorted(path.rglob("*.ckpt"))
        else:
            files.append(path)
    if not files:
        where = ", ".join(argv) or "what was named"
        raise FileNotFoundError(f"check needs checkpoints, and there is none in {where}; name files, or folders")
    has_broken = False
    for file in files:
        try:
            state = examined(file)
        except Exception as error:
            # A forged file may bring about any error. The other files are checked all the same.
            state = broken(error)
            has_broken = True
        print(printable(f"{file}: {state}"))
    if has_broken:
        sys.exit(1)


def broken(error: Exception) -> str:
    """Describe a checkpoint that could not be examined."""
    if isinstance(error, ValueError | OSError):
        return f"BROKEN: {error}"
    return f"BROKEN: it is no checkpoint as a federation writes it ({type(error).__name__})"


def examined(path: Path) -> str:
    """Describe a checkpoint in a few words.

    Raises:
        ValueError: The checkpoint, or a client's file that it names, is damaged or missing.
        OSError: The checkpoint cannot be read.
    """
    content = read_saved(path, mmap=True)
    if not content:
        raise ValueError(f"{path} holds nothing; take another checkpoint")
    state = "whole" if DIGEST in content else "readable, without a digest"
    if "federated" not in content:
        return state
    rounds = int(content["global_step"])
    ending = "" if rounds == 1 else "s"
    files = files_of(federated(content, str(path))["store"])
    of_clients = check_files(files.values(), folder=path.resolve().parent.parent / "clients")
    return f"{state}, {rounds} round{ending}{of_clients}"


def check_files(files: Collection[FileRecord], folder: Path) -> str:
    """Compare the files of clients with what their checkpoint says, and describe them.

    Args:
        files: The files that the checkpoint names.
        folder: Folder of the files, which may be missing.

    Raises:
        ValueError: A file is missing or was altered.
    """
    if not files:
        return ""
    if not folder.is_dir():
        return f", {len(files)} files of clients not beside it, so not checked"
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise ValueError(f"the file {file.name} of client {file.client_id} is not in {folder}")
        if hash_of(path.read_bytes()) != file.hash:
            raise ValueError(f"the file {path} of client {file.client_id} was altered")
    return f", {len(files)} files of clients whole"
