"""Run folders `<root>/<stem>/<n>`, their checkpoints, and the checkpoint that `--ckpt_path` means."""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_only

from fl_lightning.federation.checkpoint import federated, read_checkpoint
from fl_lightning.federation.loop import FederatedLoop

DEFAULT_ROOT = "runs"
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
LAST = "last.ckpt"


def stem_of(configs: Sequence[str | Path]) -> str:
    """Name the runs of these configuration files, in any order: by the experiments, else by all files.

    >>> stem_of(["configs/trainer/gpu.yaml", "configs/experiment/digits_fedntd.yaml"])
    'digits_fedntd'
    >>> stem_of(["configs/method/fedntd.yaml", "configs/data/cifar10.yaml"]), stem_of([])
    ('cifar10+fedntd', 'fit')
    >>> stem_of(["runs/digits_fedntd/3/config.yaml"])
    'digits_fedntd'
    """
    paths = [Path(os.path.abspath(config)) for config in configs]
    again = [path for path in paths if path.name == CONFIG and path.parent.name.isdecimal()]  # of an earlier run
    chosen = again or [path for path in paths if path.parent.name == "experiment"] or paths
    return "+".join(sorted({path.parent.parent.name if again else path.stem for path in chosen})) or "fit"


def runs(parent: Path) -> dict[int, Path]:
    """Find the numbered folders in `parent`, by number, lowest first."""
    found = parent.iterdir() if parent.is_dir() else ()
    return dict(sorted((int(path.name), path) for path in found if re.fullmatch(r"\d+", path.name)))


def new_run(parent: Path) -> Path:
    """Make the folder of the next number (two runs at a time get two).

    Of a run's processes only the first writes; the others get `parent`.
    """
    if getattr(rank_zero_only, "rank", 0):
        return parent
    number = max(runs(parent), default=-1) + 1
    while True:
        with suppress(FileExistsError):
            (parent / str(number)).mkdir(parents=True)
            return parent / str(number)
        number += 1


def discard(run: Path) -> None:
    """Remove the folder of a run that completed no round, and its parent where that is empty then."""
    if getattr(rank_zero_only, "rank", 0):
        return
    shutil.rmtree(run, ignore_errors=True)
    if run.parent.is_dir() and not any(run.parent.iterdir()):
        run.parent.rmdir()


def find_checkpoint(asked: str, parent: Path) -> Path:
    """Find the file that `--ckpt_path` means: a path, or `last` or `best` of the highest run that has one.

    Raises:
        FileNotFoundError: naming what was looked for and where.
    """
    if asked not in ("last", "best"):
        path = Path(asked).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"--ckpt_path must be last, best or a checkpoint file, got {asked}, which does not exist"
            )
        return path
    for run in reversed(runs(parent).values()):
        found = sorted((run / CHECKPOINTS).glob(f"{asked}*.ckpt"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    raise FileNotFoundError(
        f"--ckpt_path {asked} needs a run in {parent} with {CHECKPOINTS}/{asked}*.ckpt, and there is none; "
        f"leave --ckpt_path out to start a new run, or give the checkpoint's file"
    )


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None if it lies somewhere else."""
    run = checkpoint.resolve().parent.parent
    return run if checkpoint.resolve().parent.name == CHECKPOINTS and (run / CONFIG).is_file() else None


def first_round(path: Path) -> int:
    """Return the first round whose row a run that continues from this checkpoint will write.

    Raises:
        ValueError: the file is damaged, or no checkpoint of a federation.
    """
    checkpoint = read_checkpoint(path, mmap=True)
    if "federated" not in checkpoint:
        raise ValueError(
            f"--ckpt_path must be a checkpoint of a federation, and {path} is another one; to start from its "
            f"weights set model.initial_weights"
        )
    unwritten = federated(checkpoint, str(path))["recorder"]["pending_round"]
    return int(checkpoint["global_step"] if unwritten is None else unwritten)


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` after every round.

    Args:
        dirpath: its folder.
    """

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__(dirpath, Path(LAST).stem, save_on_train_epoch_end=True, enable_version_counter=False)


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the round with the highest accuracy; none where the client logs no accuracy.

    Args:
        dirpath: its folder.
        monitor: key of the accuracy.
        filename: without `.ckpt`.
    """

    def __init__(self, dirpath: str | Path, monitor: str, filename: str) -> None:
        super().__init__(
            dirpath, filename, monitor, mode="max", save_on_train_epoch_end=True, enable_version_counter=False
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)


class BestOwnCheckpoint(BestCheckpoint):
    """Keeps the best checkpoint of clients that share no weights, by the mean accuracy of their own models."""

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__(dirpath, "local/alma", "best-on-test")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop) and pl_module.weights.own_models:
            super().on_train_epoch_end(trainer, pl_module)


def run_folder(trainer: Trainer, dirpath: str | Path | None) -> Path | None:
    """The folder that a callback writes to: `dirpath`, else that of the Trainer's first logger; None: nowhere.

    To be called on all ranks.
    """
    if dirpath is not None:
        return Path(dirpath)
    folder = trainer.log_dir
    if not trainer.loggers or folder is None:
        return None
    logger = trainer.loggers[0]
    if getattr(logger, "log_dir", None) is not None:
        return Path(folder)
    # such a logger's folder is shared by its runs
    return Path(folder, *(str(part) for part in (logger.name, logger.version) if part is not None))
