"""The whole benchmark within a given time: every part in a process of its own that is ended when its time is up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

SECONDS = 890.0
"""For all parts."""
LONGEST = 180.0
"""For one part."""
SHARE = 0.8
"""Of a part's time, in which it begins new turns: the rest is for its start and for a turn that takes longer."""
SHARES: dict[str, tuple[Sequence[str], float]] = {
    "speed, tiny": (("--workload", "tiny"), 100),
    "speed, cnn": (("--workload", "cnn"), 130),
    "speed, resnet": (("--workload", "resnet"), 120),
    "speed, text": (("--workload", "text"), 50),
    "speed, personal": (("--workload", "personal"), 80),
    "speed, adam": (("--workload", "adam"), 50),
    "methods": (("--methods",), 140),
    "parallel, cnn": (("--parallel", "--workload", "cnn"), 70),
    "parallel, resnet": (("--parallel", "--workload", "resnet"), 90),
    "costs, tiny": (("--costs", "--workload", "tiny"), 100),
    "costs, cnn": (("--costs", "--workload", "cnn"), 150),
    "startup": (("--startup",), 30),
    "scale": (("--scale",), 90),
    "stays": (("--stays",), 60),
    "monitors": (("--monitors",), 60),
}
"""Arguments of each part, and the seconds that it takes where nothing else runs; it gets more where there is time."""


def run_all(
    seconds: float = SECONDS, longest: float = LONGEST, parts: Mapping[str, tuple[Sequence[str], float]] | None = None
) -> list[str]:
    """Run the parts one after the other; what a part has written stays when it is ended.

    Args:
        seconds: for all parts.
        longest: for one part.
        parts: arguments and usual seconds by name; None: all.

    Returns:
        Names of those that were not done in their time.
    """
    ends, left, undone = time.monotonic() + seconds, dict(SHARES if parts is None else parts), []
    for name in list(left):
        arguments, usual = left.pop(name)
        rest = ends - time.monotonic()
        later = sum(share for _, share in left.values())
        given = min(longest, rest * usual / (usual + later))  # what others leave over is shared out
        print(f"\n--- {name}, at most {given:.0f} s", flush=True)
        if not run_part(arguments, given):
            undone.append(name)
            print(f"{name}: not done within {given:.0f} s; rows that are missing here stay as they were", flush=True)
    return undone


def run_part(arguments: Sequence[str], seconds: float) -> bool:
    """Run `python -m bench` with these arguments; False if it was ended. Its own processes end with it.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "bench", *arguments, "--seconds", f"{SHARE * seconds:.0f}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return True
