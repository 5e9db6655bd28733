"""Files written in one move."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: a reader finds the old one or the new one, never a part.

    The content goes to a `.part` file beside `path`, which then takes its place; after an error it is removed and the
    old file stays. Missing folders are made.

    Args:
        path: of the file.
        write: called with the path of the `.part` file, which it writes and closes.

    Raises:
        OSError: the file cannot be written; besides, whatever `write` raises.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "runs" / "note.txt"
    ...     write_atomically(path, lambda part: part.write_text("whole"))
    ...     print(path.read_text(), [file.name for file in path.parent.iterdir()])
    whole ['note.txt']
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
