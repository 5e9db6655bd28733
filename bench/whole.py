"""The whole benchmark within a given time: every part runs in a process of its own, which ends when its time is up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

SECONDS = 890.0
"""Seconds for all parts."""

LONGEST = 180.0
"""Largest number of seconds for one part."""

SHARE = 0.8
"""Share of a part's time in which it begins new turns. The rest is for its start and for a turn that takes longer."""

SHARES: dict[str, tuple[Sequence[str], float]] = {
    "speed, tiny": (("--workload", "tiny"), 42),
    "speed, cnn": (("--workload", "cnn"), 48),
    "speed, resnet": (("--workload", "resnet"), 60),
    "speed, text": (("--workload", "text"), 28),
    "speed, personal": (("--workload", "personal"), 36),
    "speed, ditto": (("--workload", "ditto"), 40),
    "speed, adam": (("--workload", "adam"), 26),
    "methods": (("--methods",), 52),
    "parallel, cnn": (("--parallel", "--workload", "cnn"), 65),
    "parallel, resnet": (("--parallel", "--workload", "resnet"), 115),
    "parallel, unlike": (("--parallel", "--workload", "unlike"), 45),
    "costs, tiny": (("--costs", "--workload", "tiny"), 60),
    "costs, cnn": (("--costs", "--workload", "cnn"), 95),
    "startup": (("--startup",), 25),
    "scale": (("--scale",), 70),
    "stays": (("--stays",), 50),
    "monitors": (("--monitors",), 33),
}
"""Arguments of each part, and its share in seconds. A part that is done earlier leaves the rest to those after it."""


def run_all(
    seconds: float = SECONDS, longest: float = LONGEST, parts: Mapping[str, tuple[Sequence[str], float]] | None = None
) -> list[str]:
    """Run the parts one after the other. A part that is ended leaves what it has written.

    Args:
        seconds: Seconds for all parts.
        longest: Largest number of seconds for one part.
        parts: Arguments and usual seconds by name. None: all parts.

    Returns:
        A sentence for each part that failed or was not done in its time.
    """
    begin = time.monotonic()
    remaining = dict(SHARES if parts is None else parts)
    undone: list[str] = []
    for name in list(remaining):
        arguments, usual = remaining.pop(name)
        rest = begin + seconds - time.monotonic()
        later = sum(share for _, share in remaining.values())
        # Seconds that earlier parts leave over are shared out.
        given = min(longest, rest * usual / (usual + later))
        # The parts after this one can do with fewer turns.
        limit = max(given, min(longest, rest - later / 2))
        print(f"\n--- {name}: turns for {given:.0f} s, ended after {limit:.0f} s", flush=True)
        started = time.monotonic()
        problem = run_part(arguments, seconds=given, limit=limit)
        print(f"--- {name}: took {time.monotonic() - started:.0f} s", flush=True)
        if problem:
            sentence = f"{name}: {problem}; rows that are missing above stay as they were"
            undone.append(sentence)
            print(sentence, flush=True)
    print(f"\nall parts: {time.monotonic() - begin:.0f} s")
    print("\n".join(undone or ["nothing is left out"]))
    return undone


def run_part(arguments: Sequence[str], *, seconds: float, limit: float) -> str:
    """Run `python -m bench` for a part.

    Args:
        arguments: Arguments of the part.
        seconds: Seconds for its turns and its start.
        limit: Seconds after which the part is ended, with its own processes.

    Returns:
        The words for what went wrong. Empty: nothing did.
    """
    command = [sys.executable, "-m", "bench", *arguments, "--seconds", f"{SHARE * seconds:.0f}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return f"failed with exit status {code}" if code else ""
