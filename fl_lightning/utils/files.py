"""Files that are written whole or not at all."""

from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one move: a reader finds the old content or the new, never a part of it.

    Args:
        path: of the file; its folder is created where it is missing.
        write: writes the content to the path it is given (`<name>.part` beside the file); what it returns is unused.

    Raises:
        OSError: if the file cannot be written. After any error the file is as it was and the part is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
