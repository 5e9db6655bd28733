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
LIGHTNING = "import pytorch_lightning.cli"


def commands() -> dict[str, list[str]]:
    """Arguments of the interpreter, by what is measured."""
    own = ["-m", "fl_lightning"]
    fit = [*own, "fit", "-c", str(CONFIG), "--trainer.max_epochs"]
    compare = [*own, "compare", "-c", str(CONFIG), "--trainer.max_epochs", "4", "--output", "compared"]
    return {
        LIGHTNING: ["-c", LIGHTNING],
        "fit, 1 round, no pictures": [*fit, "1", "--plots.format", "none"],
        "fit, 1 round": [*fit, "1"],
        "fit, 30 rounds": [*fit, "30"],
        "compare, 36 runs of 4": [*compare, "--processes", "0", "--methods", *METHODS, "--seeds", *"012345"],
        "report, 1 run of 30": [*own, "report", "saved/0", "--output", "one"],
        f"report, {GROUPS} groups of 30": [*own, "report", "saved", "--output", "many"],
    }


def prepare(folder: Path) -> None:
    """Make the runs that reports read: one fit, saved with as many learning rates."""
    first = folder / "first"
    first.mkdir()
    run(commands()["fit, 30 rounds"], first)
    (fitted,) = (path.parent for path in first.rglob("config.yaml"))
    config = (fitted / "config.yaml").read_text(encoding="utf-8")
    assert "lr: 0.05\n" in config
    for group in range(GROUPS):
        saved = folder / "saved" / str(group)
        shutil.copytree(fitted, saved, ignore=shutil.ignore_patterns("checkpoints", "*.png", "events.*"))
        changed = config.replace("lr: 0.05\n", f"lr: {0.05 + group / 1e4:.4f}\n")
        (saved / "config.yaml").write_text(changed, encoding="utf-8")


def measure(repeats: int, seconds: float) -> Iterator[tuple[str, float, float, float]]:
    """Rows under `COLUMNS`: medians over turns, `repeats` or as many as are done in so many seconds; MB of the page."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        taken: dict[str, list[tuple[float, float]]] = {what: [] for what in commands()}
        for _ in turns(repeats, seconds):
            shutil.rmtree(folder / "compared", ignore_errors=True)
            for what, arguments in commands().items():
                taken[what].append(run(arguments, folder))
        for what, found in taken.items():
            pages = [*(folder / commands()[what][-1]).glob("*.html")] if what.startswith("report") else []
            cpu, wall = (median(of) for of in zip(*found, strict=True))
            yield what, cpu, wall, sum(page.stat().st_size for page in pages) / 1e6


def run(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Run a command on one thread: its CPU seconds, and seconds."""
    begin = perf_counter()
    before = getrusage(RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "matplotlib")}
    quiet = subprocess.DEVNULL
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=quiet, stderr=quiet)
    after = getrusage(RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, perf_counter() - begin
