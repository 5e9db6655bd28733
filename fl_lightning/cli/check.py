"""`fl-lightning check`: whether checkpoints, and the clients' files that they name, are as they were written."""

import os
import sys
from pathlib import Path

from fl_lightning.client.records import files_of
from fl_lightning.client.store import hash_of
from fl_lightning.federation.checkpoint import federated
from fl_lightning.utils.files import DIGEST, read_saved
from fl_lightning.utils.text import printable


def run(argv: list[str]) -> None:
    """Print one line for each checkpoint.

    Args:
        argv: paths of checkpoints, or of folders with checkpoints in them or below.

    Raises:
        SystemExit: with 1, where one is damaged or cannot be read.
        FileNotFoundError: there is none.
    """
    files = []
    for path in map(Path, argv):
        files += sorted(path.rglob("*.ckpt")) if os.path.isdir(path) else [path]
    if not files:
        where = ", ".join(argv) or "what was named"
        raise FileNotFoundError(f"check needs checkpoints, and there is none in {where}; name files, or folders")
    states = []
    for file in files:
        try:
            states.append(examined(file))
        except (ValueError, OSError) as error:
            states.append(f"BROKEN: {error}")
        except Exception as error:  # whatever a forged file brings about: the others are to be checked
            states.append(f"BROKEN: it is no checkpoint as a federation writes it ({type(error).__name__})")
        print(printable(f"{file}: {states[-1]}"))
    if any(state.startswith("BROKEN") for state in states):
        sys.exit(1)


def examined(path: Path) -> str:
    """Describe a checkpoint in a few words.

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
