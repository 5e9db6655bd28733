"""Launcher around Lightning's, which raises the run's first error, of whichever process."""

import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from traceback import format_exception
from typing import Any, Protocol

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fl_lightning.distributed.watch import GRACE, RemoteError, Watch
from fl_lightning.utils.tracebacks import raised_by_check


class Watched(Protocol):
    """A strategy with a watch over its processes.

    Attributes:
        watch: while the processes run.
        starts_all: whether the first process starts all others and only waits; else it runs rank 0.
    """

    starts_all: bool
    watch: Watch | None

    def report_to(self, mail: Path | None) -> None:
        """Set the folder in which an error that ends the run is left for the process that has started this one."""


class RemoteTracebackError(Exception):
    """Traceback of another process, as the cause of its error in this one."""


def launch_watched(
    launcher: Any,
    launch: Callable[..., Any],
    strategy: Watched,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Start the processes by a launcher of Lightning's and run `function` in each.

    Args:
        launcher: of Lightning's.
        launch: its own method of this name.
        strategy: whose processes it starts.
        function: to be run.
        args: of the function.
        kwargs: of the launcher and the function.

    Raises:
        BaseException: the first error of any process.
    """
    mail = Path(tempfile.mkdtemp(prefix="fl_lightning-")) if strategy.starts_all else None
    try:
        return launch(partial(run_rank, strategy, mail, os.getpid(), function), *args, **kwargs)
    except KeyboardInterrupt:
        end_all(launcher.procs)
        raise
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise first_error(mail, error) if mail is not None else error from None
    finally:
        if mail is not None:
            shutil.rmtree(mail, ignore_errors=True)


def run_rank(
    strategy: Watched, mail: Path | None, starter: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `function` in one of the processes.

    Args:
        strategy: of this process.
        mail: folder for an error, where another process has started this one and waits for it; else None.
        starter: id of that process.
        function: to be run.
        args: of the function.
        kwargs: of the function.

    Raises:
        BaseException: the run's first error.
        SystemExit: in place of that error, in a process that was started for the fit.
    """
    strategy.report_to(mail)
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if mail is not None:  # the starting process sends that signal once one has ended, and the handler may block
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first = error if strategy.watch is None else strategy.watch.explain(error)
        if mail is not None:
            leave(mail, strategy.watch.rank if strategy.watch is not None else 0, first)
            if os.getppid() != starter:
                shutil.rmtree(mail, ignore_errors=True)
            sys.exit(1)
        if strategy.watch is not None:
            first.reported = not strategy.watch.reports  # type: ignore[attr-defined]
        if first is error:
            raise
        raise first from None


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
