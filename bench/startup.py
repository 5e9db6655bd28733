"""Start-up times: importing the package, importing what it depends on, and the help of its command."""

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.blocks import turns

BASE = "import pytorch_lightning"
"""Command that the others are compared with."""

AFTER = {
    "FederatedLoop after Lightning": ("pytorch_lightning", "from fl_lightning import FederatedLoop"),
    "command after Lightning's": ("pytorch_lightning.cli", "import fl_lightning.cli.main"),
}
"""Imports that are timed in a process that has imported another module, with that module."""


def commands() -> dict[str, list[str]]:
    """Return the commands that are timed, each in a fresh process."""
    found = {
        BASE: [sys.executable, "-c", "import pytorch_lightning"],
        # The package loads a name when the name is asked for.
        "import fl_lightning": [sys.executable, "-c", "import fl_lightning"],
        "fl_lightning.FederatedLoop": [sys.executable, "-c", "from fl_lightning import FederatedLoop"],
    }
    script = Path(sys.executable).with_name("fl-lightning")
    if script.is_file():
        found["fl-lightning --help"] = [str(script), "--help"]
    return found


def seconds_of(command: list[str]) -> float:
    """Time a command."""
    start = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def seconds_after(before: str, own: str) -> float:
    """Time an import in a fresh process that has imported a module before.

    Args:
        before: Name of the module.
        own: The statement that imports.
    """
    lines = [f"import {before}, time", "start = time.perf_counter()", own, "print(time.perf_counter() - start)"]
    program = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return float(done.stdout)


def startup(repeats: int, seconds: float) -> list[tuple[str, float, float]]:
    """Time the commands and imports in turn.

    Args:
        repeats: Largest number of turns that count.
        seconds: Seconds within which turns are begun.

    Returns:
        Rows of name, median seconds, and median ratio to importing Lightning.
    """
    runs = commands()
    times: dict[str, list[float]] = {what: [] for what in [*runs, *AFTER]}
    for _ in turns(repeats + 1, seconds):
        for what, command in runs.items():
            times[what].append(seconds_of(command))
        for what, (before, own) in AFTER.items():
            times[what].append(seconds_after(before, own))
    # The first turn fills the caches.
    counted = {what: taken[1:] or taken for what, taken in times.items()}
    rows = []
    for what, taken in counted.items():
        ratio = median(own / lightning for own, lightning in zip(taken, counted[BASE], strict=True))
        rows.append((what, median(taken), ratio))
    return rows
