"""How the first error of a run comes back from the processes that were started for it, and how these are ended."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from traceback import format_exception
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException

from fl_lightning.distributed.watch import GRACE, RemoteError
from fl_lightning.utils.tracebacks import raised_by_check


class RemoteTracebackError(Exception):
    """Traceback of another process, as the cause of its error in this one."""


def leave(mail: Path, rank: int, error: BaseException) -> None:
    """Leave an error for the process that started this one."""
    text = "".join(format_exception(error))
    try:
        content = pickle.dumps((error, raised_by_check(error), text))
        pickle.loads(content)
    except Exception:  # some errors cannot be pickled or unpickled
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        content = pickle.dumps((plain, raised_by_check(error), text))
    with suppress(OSError):
        part = mail / f"{rank}.part"
        part.write_bytes(content)
        part.replace(mail / f"{rank}.error")


def first_error(mail: Path, ended: Exception) -> BaseException:
    """Choose the error that the others follow from, or tell how a process ended where none has left one."""
    errors: list[BaseException] = []
    for path in sorted(mail.glob("*.error")):
        with suppress(Exception):
            error, checked, text = pickle.loads(path.read_bytes())
            error.raised_by_check = checked
            error.__cause__ = RemoteTracebackError(f"\n{text}")
            errors.append(error)
    errors.sort(key=lambda error: isinstance(error, RemoteError))
    if errors:
        return errors[0]
    if isinstance(ended, ProcessExitedException):
        return RemoteError(f"rank {ended.error_index} ended without a word: {ended}")
    return ended


def end_all(processes: Sequence[Any]) -> None:
    """Wait until processes have ended after Ctrl-C, and end those that have not."""
    until = monotonic() + GRACE / 3
    while monotonic() < until and any(alive(process) for process in processes):
        sleep(0.05)
    for process in processes:
        if alive(process):
            process.kill()


def alive(process: Any) -> bool:
    """Tell whether a process (of subprocess or multiprocessing) runs."""
    return bool(process.is_alive() if hasattr(process, "is_alive") else process.poll() is None)
