"""Runs ten thousand rounds with faults: `python -m tests.soak.rounds [ROUNDS]` (a part of `make soak`).

SCAFFOLD on digits through the command line, with a checkpoint every round, a record for each client, and 5 % of the
clients' trainings failing (an exception, or NaN). Memory, open files, disk and the time of a round must stay flat.
"""

import random
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

import psutil
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.methods import SCAFFOLD
from fl_lightning.types import Batch
from tests.commands import CONFIGS

FAULTS = 0.05
STRETCHES = 10
GROWS = ("metrics.csv", "classwise.csv", "skipped.csv", "events.out.tfevents")
"""Files that grow by a row a round."""
COLUMNS = ("rounds", "memory", "handles", "files", "disk", "time")
"""Rounds so far, MB of memory, open files, files in the folder, their MB, and the CPU ms of a round."""

MB = 2**20


class Faulty(SCAFFOLD):
    """Fails in 5 % of its trainings, by an exception or by NaN. Round and client alone decide which trainings fail."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        draw = random.Random(f"{self.trainer.current_epoch} {self.context.client_id}").random()
        if draw < FAULTS / 2:
            raise ZeroDivisionError("a fault")
        return loss * torch.nan if draw < FAULTS else loss


class Watch(Callback):
    """Notes the sizes of the process and its folder at the end of each stretch of rounds, and the median CPU time.

    It measures CPU time, because other processes of the machine lengthen the rounds by the clock.

    Args:
        rounds: Number of rounds.
    """

    def __init__(self, rounds: int) -> None:
        self.every = max(rounds // STRETCHES, 1)
        self.rows = list[tuple[float, ...]]()
        self._begun = 0.0
        self._times = list[float]()
        self._skipped = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._times.append(time.process_time() - self._begun)
        self._skipped += len(pl_module.skipped)
        done = trainer.current_epoch + 1
        if done % self.every:
            return
        row = self.measured(done)
        self.rows.append(row)
        print("{:7.0f} {:8.1f} {:7.0f} {:6.0f} {:9.2f} {:9.1f}".format(*row), self._skipped, flush=True)
        self._times = []

    def measured(self, done: int) -> tuple[float, ...]:
        """Return the values of `COLUMNS` after so many rounds."""
        process = psutil.Process()
        files = [path for path in Path("runs").rglob("*") if path.is_file()]
        kept = [path for path in files if not path.name.startswith(GROWS)]
        return (
            done,
            process.memory_info().rss / MB,
            process.num_fds(),
            len(kept),
            sum(path.stat().st_size for path in kept) / MB,
            1e3 * median(self._times),
        )


def soak(rounds: int) -> list[tuple[float, ...]]:
    """Run, print and return the values of `COLUMNS` after each stretch."""
    print("  round  rss MB handles  files   disk MB    cpu ms skipped")
    words = f"""fit -c {CONFIGS}/experiment/digits_scaffold.yaml --model.client tests.soak.rounds.Faulty
        --model.threads 1 --trainer.max_epochs {rounds} --model.faults.on_error skip --model.faults.nonfinite skip
        --model.local_epochs 1 --trainer.enable_progress_bar false --trainer.callbacks+ tests.soak.rounds.Watch
        --trainer.callbacks.rounds {rounds}""".split()
    with tempfile.TemporaryDirectory() as name, chdir(name), quiet_lightning():
        cli = FederatedCLI(words)
    watch = next(one for one in cli.trainer.callbacks if isinstance(one, Watch))
    return watch.rows


def flat(rows: list[tuple[float, ...]]) -> list[str]:
    """Name the columns that were greater by more than 10 % in the second half than ever in the first."""
    half = len(rows) // 2
    grown = []
    for column, name in enumerate(COLUMNS):
        if name == "rounds":
            continue
        before = max(row[column] for row in rows[:half])
        after = max(row[column] for row in rows[half:])
        if after > 1.1 * before:
            grown.append(f"{name}: {before:.4g} to {after:.4g}")
    return grown


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    grown = flat(soak(rounds))
    print("grew:", "; ".join(grown) or "nothing")
    sys.exit(bool(grown))


if __name__ == "__main__":
    # The command line finds the classes of the imported module, not those of `__main__`.
    resolve_name("tests.soak.rounds:main")()
