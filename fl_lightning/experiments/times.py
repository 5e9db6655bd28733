"""The time that a run took, and the versions that made it, in `times.csv` of its folder."""

import os
import platform
import subprocess
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

import fl_lightning
from fl_lightning.reports.saved import TIMES
from fl_lightning.utils.files import write_table
from fl_lightning.utils.round_table import read_cells
from fl_lightning.utils.run_folder import run_folder

OFTEN = 5.0
"""Seconds between two writes."""

PACKAGES = ("fl_lightning", "torch", "torchvision", "pytorch-lightning", "torchmetrics", "numpy")


class Times(Callback):
    """Writes the seconds, the CPU time and the host's load of a run after its rounds, with commit and versions."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """The table, None in a process that writes none."""
        self.before: list[dict[str, Any]] = []
        """Lines of earlier processes."""
        self.began = 0.0
        self.began_cpu = 0.0
        self.first = 0
        """Index of the first round of this process."""
        self.written = 0.0
        """Time of the last write."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, None)
        if folder is None or not trainer.is_global_zero:
            return
        self.path = folder / TIMES
        if self.path.is_file():
            columns = read_cells(self.path)
            self.before = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
        self.began = time.time()
        self.began_cpu = cpu_seconds()
        self.first = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if time.time() - self.written > OFTEN:
            self.write(trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write(trainer.current_epoch)

    def write(self, rounds: int) -> None:
        """Write the table, with a line for this process.

        Args:
            rounds: Number of complete rounds of the run.
        """
        if self.path is None:
            return
        self.written = time.time()
        row = {
            "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began)),
            "first_round": self.first,
            "rounds": rounds - self.first,
            "seconds": round(self.written - self.began, 2),
            "cpu_seconds": round(cpu_seconds() - self.began_cpu, 2),
            "host_load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "",
            "threads": torch.get_num_threads(),
            "machine": machine(),
            "commit": commit(),
            **{name: version(name) for name in PACKAGES},
            "python": platform.python_version(),
        }
        # Lines of a version with other columns are left out.
        alike = [line for line in self.before if list(line) == list(row)]
        write_table(self.path, [list(row), *(list(line.values()) for line in [*alike, row])])


def cpu_seconds() -> float:
    """Return the CPU time in seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@cache
def machine() -> str:
    """Name cores, processor and GPU of this machine."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores {processor()}{gpu}"


def processor() -> str:
    """Name the processor of this machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def commit() -> str:
    """Name the commit of this package's checkout, with a `+` if files differ from it. Empty without a checkout."""
    try:
        # The folder may lie in the checkout of another project.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "+" if git("status", "--porcelain", "-uno") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(*words: str) -> str:
    """Return what a command of git prints in the folder of this package.

    Raises:
        OSError: There is no git.
        CalledProcessError: The command has failed.
    """
    folder = Path(fl_lightning.__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
