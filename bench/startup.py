"""Start-up times: importing the package, importing what it depends on, and the help of its command."""

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.blocks import turns

BASE = "import pytorch_lightning"


AFTER = {
    "FederatedLoop after Lightning": ("pytorch_lightning", "from fl_lightning import FederatedLoop"),
    "command after Lightning's": ("pytorch_lightning.cli", "import fl_lightning.cli.main"),
}
"""What is imported in a process that has imported another module."""


def commands() -> dict[str, list[str]]:
    """Commands that are timed, each in a fresh process; the others are compared with the first one."""
    found = {
        BASE: [sys.executable, "-c", "import pytorch_lightning"],
        "import fl_lightning": [sys.executable, "-c", "import fl_lightning"],  # which loads a name when it is asked for
        "fl_lightning.FederatedLoop": [sys.executable, "-c", "from fl_lightning import FederatedLoop"],
    }
    script = Path(sys.executable).with_name("fl-lightning")
    if script.is_file():
        found["fl-lightning --help"] = [str(script), "--help"]
    return found


def seconds_of(command: list[str]) -> float:
    start = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def seconds_after(before: str, own: str) -> float:
    """Time an import in a fresh process that has imported a module before."""
    lines = [f"import {before}, time", "start = time.perf_counter()", own, "print(time.perf_counter() - start)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def startup(repeats: int, seconds: float) -> list[tuple[str, float, float]]:
    """Rows (what, seconds, ratio to importing Lightning): medians over interleaved runs, in so many seconds."""
    runs = commands()
    times: dict[str, list[float]] = {what: [] for what in [*runs, *AFTER]}
    for _ in turns(repeats + 1, seconds):
        for what, command in runs.items():
            times[what].append(seconds_of(command))
        for what, (before, own) in AFTER.items():
            times[what].append(seconds_after(before, own))
    times = {what: taken[1:] or taken for what, taken in times.items()}  # the first turn fills the caches
    base = times[BASE]
    return [
        (what, median(taken), median(own / lightning for own, lightning in zip(taken, base, strict=True)))
        for what, taken in times.items()
    ]
