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
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

PART = ".part"
"""Ending of a file that is being written; one that is left over is of a process that was killed."""

MARK = b"fl_lightning sha256 "
DIGEST = "digest"
"""Key in a checkpoint's content: its file must end with a digest."""

END = MARK + bytes(64)
"""Comment at the end of a zip file: the mark, then the digest as 64 hex digits (here zeros)."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: a reader finds the old one or the new one, never a part.

    The content goes to a `.part` file beside `path`, is on disk before that takes its place, and the folder after it;
    after an error it is removed and the old file stays. Missing folders are made.

    Args:
        path: of the file.
        write: called with the path of the `.part` file, which it writes and closes.

    Raises:
        OSError: naming `path`, if it cannot be written; besides, whatever `write` raises.

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
    with suppress(OSError):  # a folder cannot be opened everywhere
        flush_to_disk(path.parent)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file in one move, text as UTF-8."""
    encoded = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda part: part.write_bytes(encoded))


def write_table(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a csv file in one move, with its names marked."""

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            write_cells(file, rows)

    write_atomically(path, write)


def at_path(error: OSError, path: Path) -> OSError:
    """Name the file in an error of the operating system, which a full disk's does not."""
    return error if error.errno is None else OSError(error.errno, error.strerror, str(path))


def check_output(folder: Path, writes: bool = True) -> None:
    """Refuse an `--output` that is no folder and cannot become one.

    Args:
        folder: that is asked for.
        writes: whether anything will be written there.

    Raises:
        ValueError: naming what is in its way.
    """
    try:
        there = next(path for path in (folder, *folder.parents) if is_there(path))
        if there.is_dir() and (not writes or os.access(there, os.W_OK)):
            return
        kind = "cannot be written" if there.is_dir() else "is a file" if there.is_file() else "is no folder"
        reason = f"{there} {kind}"
    except OSError as error:  # a name too long, a folder that may not be entered
        reason = str(error.strerror)
    raise ValueError(f"--output must be a folder, got {folder}: {reason}; name another")


def is_there(path: Path) -> bool:
    """Tell whether there is a file, a folder or a link, also one to nothing.

    Raises:
        OSError: no one can tell.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk.

    Raises:
        OSError: the disk is full, or the path cannot be opened.
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


def lock_path(path: Path, wait: bool = False) -> int | None:
    """Lock a folder or file for this process, until it unlocks it or ends, however it ends.

    Args:
        path: to be locked.
        wait: until another process unlocks it.

    Returns:
        A descriptor, to be closed to unlock it; None where nothing can be locked (some network shares).

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


class _Hashed:
    """A file that hashes the bytes written to it."""

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

    Any program that reads what `torch.save` wrote reads it; `check_digest` finds every change of it.

    Raises:
        OSError: the file cannot be written.
    """

    def write(part: Path) -> None:
        with part.open("wb") as file:  # the name of a path would stand in the content
            hashed = _Hashed(file)
            try:
                torch.save(content, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:  # torch's words for a full disk
                raise hashed.error or error from None
            file.seek(-2, os.SEEK_END)  # the comment's length, zero so far
            file.write(len(END).to_bytes(2, "little") + MARK + hashed.digest.hexdigest().encode())

    write_atomically(path, write)


def check_digest(path: str | Path) -> bool:
    """Compare a file with the digest that `save_with_digest` gave it.

    Returns:
        True where they agree, False for a file without a digest (another program wrote it).

    Raises:
        ValueError: the file was changed after it was written.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
        raise OSError(f"{path} is no file: give the path of a checkpoint")
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END) - len(END)
        if size < 2:
            return False
        file.seek(size)
        end = file.read()
        if not end.startswith(MARK):
            return False
        file.seek(0)
        digest = hashlib.sha256()
        left = size - 2
        while left and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
        digest.update(bytes(2))
    if end[len(MARK) :] != digest.hexdigest().encode():
        raise ValueError(f"{path} is damaged: its content is not what was written; take another checkpoint or a copy")
    return True


def content_digest(path: str | Path) -> str | None:
    """Return a digest of the content of a file, or None if there is no such file."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def loaded(path: str | Path, mmap: bool) -> Any:
    """Load tensors and plain values, mapped where `mmap` is set and the file's form allows it, else whole."""
    with suppress(Exception):
        if mmap:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def read_saved(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """Read a file that `torch.save` wrote: a checkpoint or a state dict, its tensors on the CPU.

    Args:
        path: of the file.
        mmap: whether tensors stay in the file until they are used, where it has a digest and its form allows that.

    Raises:
        ValueError: if the file is damaged, or holds something else than tensors and plain values.
        OSError: it cannot be read.
    """
    checked = check_digest(path)
    try:
        content = loaded(path, mmap and checked)
        problem = type(content).__name__
    except Exception as error:  # pickle and zip raise many kinds for a damaged file
        content = None
        problem = type(error).__name__
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({problem}): it is damaged, or holds more than tensors and plain "
            f"values; give another one, or a state dict"
        )
    if DIGEST in content and not checked:
        raise ValueError(
            f"{path} is damaged or was written anew by another program: the digest at its end is gone; take another "
            f"checkpoint, or remove its entry {DIGEST!r} if the change was yours"
        )
    return dict(content)
