"""`fl-lightning check`: whether checkpoints, and the clients' files that they name, are as they were written."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from fl_lightning.client.records import files_of
from fl_lightning.client.store import hash_of
from fl_lightning.federation.checkpoint import federated
from fl_lightning.utils.files import DIGEST, read_saved
from fl_lightning.utils.text import printable


def run(argv: list[str]) -> NoReturn:
    """End with 1 where a checkpoint is broken, else with 0.

    Args:
        argv: paths of checkpoints and folders.
    """
    sys.exit(min(check(argv), 1))


def check(paths: list[str]) -> int:
    """Print one line for each checkpoint.

    Args:
        paths: of checkpoints, or of folders with checkpoints in them or below.

    Returns:
        How many are damaged or cannot be read.
    """
    files = []
    for path in map(Path, paths):
        files += sorted(path.rglob("*.ckpt")) if os.path.isdir(path) else [path]
    if not files:
        raise FileNotFoundError(f"check needs checkpoints, and there is none in {', '.join(paths)}")
    broken = 0
    for file in files:
        try:
            said = examined(file)
        except (ValueError, OSError) as error:
            said = f"BROKEN: {error}"
        except Exception as error:  # whatever a forged file brings about: the others are to be checked
            said = f"BROKEN: it is no checkpoint as a federation writes it ({type(error).__name__})"
        broken += said.startswith("BROKEN")
        print(printable(f"{file}: {said}"))
    return broken


def examined(path: Path) -> str:
    """Say what a checkpoint is.

    Raises:
        ValueError: it, or a client's file that it names, is damaged or missing.
        OSError: it cannot be read.
    """
    content = read_saved(path, mmap=True)
    if not content:
        raise ValueError(f"{path} holds nothing; take another checkpoint")
    state = "whole" if DIGEST in content else "readable, without a digest"
    if "federated" not in content:
        return state
    files = files_of(federated(content, str(path))["store"])
    folder = path.resolve().parent.parent / "clients"
    for file in files.values() if folder.is_dir() else ():
        there = folder / file.name
        if not there.is_file():
            raise ValueError(f"the file {file.name} of client {file.client_id} is not in {folder}")
        if hash_of(there.read_bytes()) != file.hash:
            raise ValueError(f"the file {there} of client {file.client_id} was altered")
    rounds = int(content["global_step"])
    where = "whole" if folder.is_dir() else "not beside it, so not checked"
    clients = f", {len(files)} files of clients {where}" if files else ""
    return f"{state}, {rounds} round{'s' * (rounds != 1)}{clients}"
