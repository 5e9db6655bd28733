"""Origin of an error: a check of the user's input, or a bug."""

from linecache import getline
from traceback import walk_tb

CHECKED = ("fl_lightning", "pytorch_lightning", "lightning_fabric", "torch.optim", "jsonargparse")
"""Packages whose own `raise` statements are about the user's input."""


def raised_by_check(error: BaseException) -> bool:
    """Return True for an error of a `raise` statement in one of the packages `CHECKED`, in this process or another."""
    if (known := getattr(error, "raised_by_check", None)) is not None:
        return bool(known)
    frames = list(walk_tb(error.__traceback__))
    if not frames:
        return False
    frame, line = frames[-1]
    checked = str(frame.f_globals.get("__name__", "")).startswith(CHECKED)
    return checked and getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
