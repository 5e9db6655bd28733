"""Runs scripts in a process forked from this one, so that nothing is imported again."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch


def run_script(
    script: Path, *arguments: str, cwd: Path, timeout: float, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS...` in a session of its own, and return its end and its output.

    Processes that the script starts by its own command line import everything, as they would for a user.

    Args:
        script: The script.
        arguments: Its arguments.
        cwd: Its working folder.
        timeout: Seconds that it may take.
        stdout: Descriptor that it prints to. None means a file, whose text is returned.

    Raises:
        subprocess.TimeoutExpired: The script took longer. All its processes were killed.
    """
    out = cwd / "forked.out"
    err = cwd / "forked.err"
    child = os.fork()
    if not child:
        _run(script, arguments, cwd=cwd, stdout=out if stdout is None else stdout, stderr=err)
    over = threading.Event()

    def kill() -> None:
        over.set()
        os.killpg(child, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
    finally:
        timer.cancel()
    if over.is_set():
        said = out.read_bytes() if stdout is None else b""
        raise subprocess.TimeoutExpired(str(script), timeout, output=said, stderr=err.read_bytes())
    said = out.read_text() if stdout is None else ""
    words = [str(script), *arguments]
    return subprocess.CompletedProcess(words, code, stdout=said, stderr=err.read_text())


def exit_code(child: int, *, seconds: float) -> int | None:
    """Wait for the end of a child process, and return its exit code, or None if it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _run(script: Path, arguments: Sequence[str], *, cwd: Path, stdout: Path | int, stderr: Path) -> None:
    """Run the script in place of this process."""
    code = 70
    try:
        os.setsid()
        os.chdir(cwd)
        # A shell's background jobs ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(_descriptor(stdout), 1)
        os.dup2(_descriptor(stderr), 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = [str(script), *arguments]
        os.environ["OMP_NUM_THREADS"] = "1"
        # The threads of the process that was forked are not here.
        torch.set_num_threads(1)
        # No GPU is used here, so it does not matter that another test has counted them.
        torch.cuda._is_in_bad_fork = lambda: False
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
        # So ends an interpreter that cannot flush.
        code = 120
    finally:
        os._exit(code)


def _descriptor(stream: Path | int) -> int:
    if isinstance(stream, int):
        return stream
    return os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
