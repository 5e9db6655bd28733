"""Files written in one move, and files that carry a digest of their content."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fl_lightning.utils.text import write_cells

try:
    import fcntl
except ImportError:
    # Windows does not have it.
    fcntl = None  # type: ignore[assignment]

PART = ".part"
"""Ending of a file that is being written. A process that was killed leaves such a file."""

MARK = b"fl_lightning sha256 "
"""Beginning of the comment at the end of a file with a digest."""

LENGTH_OF_END = len(MARK) + 64
"""Bytes of that comment: the mark, then the digest as 64 hex digits."""

DIGEST = "digest"
"""Key in a checkpoint's content: its file must end with a digest."""

BLOCK = 2**20
"""Bytes that are read at a time."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: a reader finds the old one or the new one, never a part.

    The content goes to a `.part` file beside `path`, which takes its place once the content is on disk. After an error
    the `.part` file is removed and the old file stays. Missing folders are made.

    Args:
        path: The file.
        write: Writes and closes the `.part` file, whose path it is given.

    Raises:
        OSError: The file cannot be written. The error names `path`.
        Exception: `write` raises it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "runs" / "note.txt"
    ...     write_atomically(path, lambda part: part.write_text("whole"))
    ...     print(path.read_text(), [file.name for file in path.parent.iterdir()])
    whole ['note.txt']
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        flush_to_disk(part)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise at_path(error, path) from error
        raise
    # Not every system opens a folder.
    with suppress(OSError):
        flush_to_disk(path.parent)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file in one move, text as UTF-8."""
    encoded = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda part: part.write_bytes(encoded))


def write_table(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a csv file in one move, with marks before names that a spreadsheet would run.

    Args:
        path: The file.
        rows: The rows of cells.
    """

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            write_cells(file, rows)

    write_atomically(path, write)


def at_path(error: OSError, path: Path) -> OSError:
    """Name the file in an error of the operating system. The error of a full disk does not name it."""
    if error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def check_output(folder: Path, *, writes: bool = True) -> None:
    """Refuse an `--output` that is no folder and cannot become one.

    Args:
        folder: The folder.
        writes: Whether anything will be written there.

    Raises:
        ValueError: Something is in the way of the folder.
    """
    try:
        reason = obstacle_to(folder, writes=writes)
    except OSError as error:
        # The name is too long, or a folder may not be entered.
        reason = str(error.strerror)
    if reason:
        raise ValueError(f"--output must be a folder, got {folder}: {reason}; name another")


def obstacle_to(folder: Path, *, writes: bool) -> str:
    """Describe what is in the way of a folder. The text is empty if there is nothing.

    Args:
        folder: The folder.
        writes: Whether anything will be written there.

    Raises:
        OSError: Nobody can tell.
    """
    nearest = next(path for path in (folder, *folder.parents) if is_there(path))
    if nearest.is_dir():
        is_usable = not writes or os.access(nearest, os.W_OK)
        return "" if is_usable else f"{nearest} cannot be written"
    return f"{nearest} is a file" if nearest.is_file() else f"{nearest} is no folder"


def is_there(path: Path) -> bool:
    """Return True if there is a file, a folder, or a link, even a link to nothing.

    Raises:
        OSError: Nobody can tell.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk.

    Raises:
        OSError: The disk is full, or the path cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove the files that killed processes left half written in a folder and those below it."""
    for part in folder.rglob(f"*{PART}"):
        with suppress(OSError):
            part.unlink()


def lock_path(path: Path, *, wait: bool = False) -> int | None:
    """Lock a folder or file for this process, until it unlocks it or ends, however it ends.

    Args:
        path: The folder or file.
        wait: Whether to wait until another process unlocks it.

    Returns:
        A descriptor, which the caller closes to unlock it. None if nothing can be locked, as on Windows and on some
        network shares.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


class _Hashed:
    """Hashes the bytes that are written to a file.

    Args:
        file: The file.

    Attributes:
        digest: Hash of the bytes so far.
        error: The error of the file, whose words `torch.save` replaces by its own.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self.digest.update(content)
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_with_digest(content: Any, path: Path) -> None:
    """Write with `torch.save`, whole or not at all, and end the file with its digest (a zip comment).

    Any program that reads files of `torch.save` reads this file. `check_digest` finds every change of the file.

    Args:
        content: The content.
        path: The file.

    Raises:
        OSError: The file cannot be written.
    """

    def write(part: Path) -> None:
        # Of a path, torch would write the name into the content.
        with part.open("wb") as file:
            hashed = _Hashed(file)
            try:
                torch.save(content, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch has words of its own for a full disk.
                raise hashed.error or error from None
            # The last two bytes are the length of the comment, which is 0 so far.
            file.seek(-2, os.SEEK_END)
            length = LENGTH_OF_END.to_bytes(2, "little")
            file.write(length + MARK + hashed.digest.hexdigest().encode())

    write_atomically(path, write)


def check_digest(path: str | Path) -> bool:
    """Compare a file with the digest that `save_with_digest` gave it.

    Args:
        path: The file.

    Returns:
        True if they agree, False for a file without a digest, which another program wrote.

    Raises:
        ValueError: The file was changed after it was written.
        OSError: The file cannot be read.
    """
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is no file: give the path of a checkpoint")
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END) - LENGTH_OF_END
        if size < 2:
            return False
        file.seek(size)
        end = file.read()
        if not end.startswith(MARK):
            return False
        written = digest_of_content(file, size)
    if end.removeprefix(MARK) != written.encode():
        raise ValueError(f"{path} is damaged: its content is not what was written; take another checkpoint or a copy")
    return True


def digest_of_content(file: BinaryIO, size: int) -> str:
    """Return the digest of a file as it was before it got its comment, as hex digits.

    Args:
        file: The file.
        size: Number of bytes before the comment. The last two, the length of the comment, were 0.
    """
    digest = hashlib.sha256()
    file.seek(0)
    remaining = size - 2
    while remaining:
        block = file.read(min(remaining, BLOCK))
        if not block:
            break
        digest.update(block)
        remaining -= len(block)
    digest.update(bytes(2))
    return digest.hexdigest()


def content_digest(path: str | Path) -> str | None:
    """Return a digest of the content of a file, or None if there is no such file."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def loaded(path: str | Path, *, mmap: bool) -> Any:
    """Load tensors and plain values.

    Args:
        path: The file.
        mmap: Whether tensors stay in the file until they are used, if the form of the file allows that.

    Raises:
        Exception: The file is damaged, or has other values. The error may be of any kind.
    """
    if mmap:
        with suppress(Exception):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def read_saved(path: str | Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a file that `torch.save` wrote: a checkpoint or a state dict, with tensors on the CPU.

    Args:
        path: The file.
        mmap: Whether tensors stay in the file until they are used, if it has a digest and its form allows that.

    Raises:
        ValueError: The file is damaged, or holds something else than tensors and plain values.
        OSError: The file cannot be read.
    """
    has_digest = check_digest(path)
    try:
        content = loaded(path, mmap=mmap and has_digest)
        problem = type(content).__name__
    except Exception as error:
        # pickle and zip raise many kinds of errors for a damaged file.
        content = None
        problem = type(error).__name__
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({problem}): it is damaged, or holds more than tensors and plain "
            f"values; give another one, or a state dict"
        )
    if DIGEST in content and not has_digest:
        raise ValueError(
            f"{path} is damaged or was written anew by another program: the digest at its end is gone; take another "
            f"checkpoint, or remove its entry {DIGEST!r} if the change was yours"
        )
    return dict(content)
