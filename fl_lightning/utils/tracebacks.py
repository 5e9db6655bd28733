"""Origin of an error: a check of the user's input, a line of the user's own, or a bug."""

import os
import sysconfig
from linecache import getline
from pathlib import Path
from traceback import walk_tb

CHECKED = ("fl_lightning", "pytorch_lightning", "lightning_fabric", "lightning.", "torch.optim", "jsonargparse")
"""Packages whose own `raise` statements are about the user's input."""

PACKAGE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders whose files are not the user's own."""


def module_of(error: BaseException) -> str:
    """Name the module whose code raised an error, or nothing where none is known."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1] if names else ""


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """List the files and lines that an error came through, the one that raised it last."""
    return [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]


def users_lines(error: BaseException) -> list[tuple[str, int]]:
    """List those of the files and lines that an error came through which are the user's own."""
    return [(name, line) for name, line in lines_of(error) if not name.startswith((PACKAGE, *LIBRARIES, "<"))]


def is_raised(lines: list[tuple[str, int]]) -> bool:
    """True where the last line is a `raise` statement."""
    return bool(lines) and getline(*lines[-1]).lstrip().startswith("raise ")


def raised_by_check(error: BaseException) -> bool:
    """Tell whether an error is of a `raise` statement in one of the packages `CHECKED`, in any process."""
    if (known := getattr(error, "raised_by_check", None)) is not None:
        return bool(known)
    return module_of(error).startswith(CHECKED) and is_raised(lines_of(error))


def place_of(error: Exception) -> tuple[str, bool]:
    """Find the user's own line that an error came through last, and whether a check of the package raised it.

    Returns:
        "file, line n", empty where no file of the user's is involved; and True for an error of the package's own.
    """
    lines = lines_of(error)
    users = users_lines(error)
    checks = isinstance(error, ValueError | TypeError | TimeoutError) and is_raised(lines)
    by_package = checks and lines[-1][0].startswith(PACKAGE)
    if not users:
        return ("" if by_package or not lines else "{}, line {}".format(*lines[-1])), by_package
    name, line = users[-1]
    relative = os.path.relpath(name)
    return f"{name if relative.startswith('..') else relative}, line {line}", by_package
