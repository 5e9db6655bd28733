"""Time that a run took, and versions that it was made with, in `times.csv` of its folder."""

import os
import platform
import subprocess
import time
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
        self.before: list[dict[str, Any]] = []
        self.began = 0.0
        self.began_cpu = 0.0
        self.first = 0
        self.written = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, None)
        if folder is None or not trainer.is_global_zero:
            return
        self.path = folder / TIMES
        columns = read_cells(self.path) if self.path.is_file() else {}
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
        """Write the table, with a line for what this process has made."""
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
        alike = [line for line in self.before if list(line) == list(row)]
        write_table(self.path, [list(row), *(list(line.values()) for line in [*alike, row])])


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@cache
def machine() -> str:
    """Name processor, cores and GPU."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores {name}{gpu}"


@cache
def commit() -> str:
    """Name the commit of a checkout of this package, with a `+` where files differ from it, empty where it is none."""
    folder = Path(fl_lightning.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else the folder lies in somebody else's checkout
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return ""
