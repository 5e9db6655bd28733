"""The folder of a run, which the command line gives to the loop."""

from pathlib import Path
from typing import Any


def run_folder(trainer: Any, dirpath: str | Path | None = None) -> Path | None:
    """Find the folder of the files of a callback or of the store.

    It is `dirpath`, else the folder that the loop was given, else the folder of the Trainer's first logger, else None.
    All ranks must call this function, because Lightning broadcasts the folder.

    Args:
        trainer: The Trainer of the run.
        dirpath: Folder that the user names. None means the run's.
    """
    if dirpath is not None:
        return Path(dirpath)
    given = getattr(trainer.lightning_module, "run_folder", None)
    if isinstance(given, Path):
        return Path(trainer.strategy.broadcast(str(given)))
    folder = trainer.log_dir
    if not trainer.loggers or folder is None:
        return None
    logger = trainer.loggers[0]
    if getattr(logger, "log_dir", None) is not None:
        return Path(folder)
    # All runs of such a logger share its folder.
    path = Path(folder)
    for part in (logger.name, logger.version):
        if part is not None:
            path /= str(part)
    return path
