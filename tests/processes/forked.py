"""Scripts that are run in a process forked from this one, so that nothing is imported again."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch


def run_script(
    script: Path, *arguments: str, cwd: Path, timeout: float, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS...` in a session of its own; what it printed and how it ended.

    Processes that the script starts by its own command line import everything, as they would for a user.

    Args:
        stdout: descriptor of what it prints to; None: a file, whose text is returned.

    Raises:
        subprocess.TimeoutExpired: it took longer than so many seconds; all its processes were killed.
    """
    out = cwd / "forked.out"
    err = cwd / "forked.err"
    child = os.fork()
    if not child:
        _run(script, arguments, cwd, (out if stdout is None else stdout, err))
    over = threading.Event()

    def kill() -> None:
        over.set()
        os.killpg(child, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()
    if over.is_set():
        said = out.read_bytes() if stdout is None else b""
        raise subprocess.TimeoutExpired(str(script), timeout, said, err.read_bytes())
    said = out.read_text() if stdout is None else ""
    return subprocess.CompletedProcess([str(script), *arguments], code, said, err.read_text())


def _run(script: Path, arguments: Sequence[str], cwd: Path, streams: Sequence[Path | int]) -> None:
    """Run the script in place of this process."""
    code = 70
    try:
        os.setsid()
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        for number, to in enumerate(streams, start=1):
            os.dup2(to if isinstance(to, int) else os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = [str(script), *arguments]
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # threads of the process that was forked are not here
        torch.cuda._is_in_bad_fork = lambda: False  # no GPU is used here; that another test has counted them is no use
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as of an interpreter that cannot flush
    finally:
        os._exit(code)
