"""Whole commands, each in a process of its own: CPU seconds and seconds of fits, a comparison and reports on digits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from bench.blocks import turns

COLUMNS = ("command", "cpu_s", "seconds", "mb")
CONFIG = Path(__file__).parents[1] / "configs/experiment/digits_fedntd.yaml"
METHODS = ("FedAvg", "FedProx", "FedNTD", "SCAFFOLD", "MOON", "FedDyn")
GROUPS = 200
"""Number of runs that a report reads, each with a learning rate of its own."""

LIGHTNING = "import pytorch_lightning.cli"


def commands() -> dict[str, list[str]]:
    """Return the arguments of the interpreter by what is measured."""
    own = ["-m", "fl_lightning"]
    fit = [*own, "fit", "-c", str(CONFIG), "--trainer.max_epochs"]
    compare = [*own, "compare", "-c", str(CONFIG), "--trainer.max_epochs", "4", "--output", "compared"]
    seeds = ["0", "1", "2", "3", "4", "5"]
    return {
        LIGHTNING: ["-c", LIGHTNING],
        "fit, 1 round, no pictures": [*fit, "1", "--plots.format", "none"],
        "fit, 1 round": [*fit, "1"],
        "fit, 30 rounds": [*fit, "30"],
        "compare, 36 runs of 4": [*compare, "--processes", "0", "--methods", *METHODS, "--seeds", *seeds],
        "report, 1 run of 30": [*own, "report", "saved/0", "--output", "one"],
        f"report, {GROUPS} groups of 30": [*own, "report", "saved", "--output", "many"],
    }


def prepare(folder: Path) -> None:
    """Make the runs that reports read: one fit, saved with as many learning rates."""
    first = folder / "first"
    first.mkdir()
    run(commands()["fit, 30 rounds"], first)
    (config_path,) = first.rglob("config.yaml")
    fitted = config_path.parent
    config = config_path.read_text(encoding="utf-8")
    assert "lr: 0.05\n" in config
    for group in range(GROUPS):
        saved = folder / "saved" / str(group)
        shutil.copytree(fitted, saved, ignore=shutil.ignore_patterns("checkpoints", "*.png", "events.*"))
        changed = config.replace("lr: 0.05\n", f"lr: {0.05 + group / 1e4:.4f}\n")
        (saved / "config.yaml").write_text(changed, encoding="utf-8")


def measure(repeats: int, seconds: float) -> Iterator[tuple[str, float, float, float]]:
    """Yield rows under `COLUMNS`: medians over turns, and the MB of a report's pages.

    Args:
        repeats: Largest number of turns.
        seconds: Seconds within which turns are begun.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        taken: dict[str, list[tuple[float, float]]] = {what: [] for what in commands()}
        for _ in turns(repeats, seconds):
            shutil.rmtree(folder / "compared", ignore_errors=True)
            for what, arguments in commands().items():
                taken[what].append(run(arguments, folder))
        for what, arguments in commands().items():
            cpu = median(cpu for cpu, _ in taken[what])
            wall = median(wall for _, wall in taken[what])
            page_mb = size_of_pages(folder / arguments[-1]) if what.startswith("report") else 0.0
            yield what, cpu, wall, page_mb


def size_of_pages(folder: Path) -> float:
    """Return the MB of the pages in a folder."""
    return sum(page.stat().st_size for page in folder.glob("*.html")) / 1e6


def run(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Run a command on one thread.

    Args:
        arguments: Arguments of the interpreter.
        folder: Folder in which the command runs.

    Returns:
        CPU seconds, and seconds.
    """
    begin = perf_counter()
    before = getrusage(RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "matplotlib")}
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = getrusage(RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, perf_counter() - begin
