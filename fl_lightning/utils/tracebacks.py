"""Origin of an error: a check of the user's input, a line of the user's own, or a bug."""

import os
import sysconfig
from linecache import getline
from pathlib import Path
from traceback import walk_tb

CHECKED = ("fl_lightning", "pytorch_lightning", "lightning_fabric", "lightning.", "torch.optim", "jsonargparse")
"""Packages whose own `raise` statements are about the user's input."""

PACKAGE = str(Path(__file__).parents[1]) + os.sep
"""Folder of this package."""

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders whose files are not the user's own."""


def module_of(error: BaseException) -> str:
    """Name the module whose code raised an error. The text is empty if it is not known."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1] if names else ""


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """List the files and lines that an error came through. The last line raised it."""
    return [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]


def users_lines(error: BaseException) -> list[tuple[str, int]]:
    """List the user's own files and lines that an error came through."""
    return [(name, line) for name, line in lines_of(error) if not name.startswith((PACKAGE, *LIBRARIES, "<"))]


def is_raised(lines: list[tuple[str, int]]) -> bool:
    """Return True if the last line is a `raise` statement."""
    if not lines:
        return False
    file, line = lines[-1]
    return getline(file, line).lstrip().startswith("raise ")


def raised_by_check(error: BaseException) -> bool:
    """Return True if an error is of a `raise` statement in one of the packages `CHECKED`, in any process."""
    # An error that came from another process carries the answer.
    known = getattr(error, "raised_by_check", None)
    if known is not None:
        return bool(known)
    return module_of(error).startswith(CHECKED) and is_raised(lines_of(error))


def place_of(error: Exception) -> tuple[str, bool]:
    """Find the user's own line that an error came through last, and whether a check of the package raised it.

    Returns:
        The place as "file, line n", and True for a check of the package. Without a line of the user's own the place is
        empty for a check, and the line that raised the error otherwise.
    """
    lines = lines_of(error)
    if not lines:
        return "", False
    is_refusal = isinstance(error, ValueError | TypeError | TimeoutError) and is_raised(lines)
    file, line = lines[-1]
    by_package = is_refusal and file.startswith(PACKAGE)
    users = users_lines(error)
    if users:
        file, line = users[-1]
        return f"{shortest_path(file)}, line {line}", by_package
    return ("" if by_package else f"{file}, line {line}"), by_package


def shortest_path(file: str) -> str:
    """Return the path of a file from the working folder if the file is in it, else the whole path."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
