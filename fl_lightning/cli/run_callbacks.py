"""The callbacks and loggers that a command adds to those of the user."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.callbacks import ClasswiseReport, ClientCheckpoint, RoundProgressBar, RunPlots, SkippedClients
from fl_lightning.runs.best import BestCheckpoint
from fl_lightning.runs.checkpoints import CHECKPOINTS, CheckpointIndex
from fl_lightning.runs.folder import LastCheckpoint
from fl_lightning.runs.loggers import RoundCSVLogger, RunTensorBoard
from fl_lightning.utils.packages import is_of_lightning
from fl_lightning.utils.settings import as_list

ADDED: dict[str, type[Callback]] = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
"""Settings with which the Trainer adds a callback of a kind if it sees none."""

NO_TENSORBOARD = (
    "TensorBoard is not installed: the run logs metrics.csv only; pip install 'fl_lightning[tensorboard]' adds it"
)


def callbacks_of_fit(config: Any, folder: Path, given: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a whole fit, which keep everything in its folder.

    Args:
        config: The parsed configuration of the fit.
        folder: The run's folder.
        given: The user's callbacks. A `ClientCheckpoint` among them without a folder gets this one's.
    """
    ours: list[Callback] = [
        ClasswiseReport(folder),
        RunPlots(folder, format=config.plots.format),
        SkippedClients(folder),
    ]
    if config.trainer.enable_checkpointing is False:
        return ours
    best = BestCheckpoint(folder / CHECKPOINTS, "best", config.best.monitor, mode=config.best.mode)
    ours += checkpoints(best, given)
    of_clients = [callback for callback in given if isinstance(callback, ClientCheckpoint)]
    if not of_clients:
        of_clients = [ClientCheckpoint(folder / CHECKPOINTS)]
        ours += of_clients
    for callback in of_clients:
        callback.configure(folder / CHECKPOINTS, config.as_dict()["model"]["client"] or {})
    ours.append(CheckpointIndex(folder))
    return ours


def checkpoints(best: BestCheckpoint, given: Sequence[Callback]) -> list[Callback]:
    """Keep the best and the last round's checkpoint, each unless the user's own ModelCheckpoints do that.

    Args:
        best: The callback that keeps the best round's.
        given: The user's callbacks.
    """
    users: list[Any] = [callback for callback in given if is_of_lightning(callback, "ModelCheckpoint")]
    ours: list[Callback] = []
    if not any(callback.monitor for callback in users):
        ours.append(best)
    if not any(callback.save_last for callback in users):
        # It stores the path of the best one, and so comes after it.
        ours.append(LastCheckpoint(str(best.dirpath)))
    return ours


def joined_callbacks(given: Sequence[Callback], ours: Sequence[Callback], trainer: Any) -> list[Callback]:
    """Return the user's callbacks and ours, without ours of a class that the user has given, and a progress bar.

    Args:
        given: The user's callbacks.
        ours: Our callbacks.
        trainer: The settings of the Trainer, which may turn the progress bar off.
    """
    callbacks = list(given)
    kinds = {type(callback) for callback in given}
    has_bar = any(is_of_lightning(callback, "ProgressBar") for callback in given)
    if trainer.enable_progress_bar is not False and not trainer.barebones and not has_bar:
        ours = [*ours, RoundProgressBar()]
    callbacks += [callback for callback in ours if type(callback) not in kinds]
    return callbacks


def is_of_twin_only(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    """Return True if callbacks of a kind are of `lightning.pytorch`, whose Trainer alone would see them as such."""
    if any(isinstance(callback, kind) for callback in callbacks):
        return False
    return any(is_of_lightning(callback, kind.__name__) for callback in callbacks)


def loggers_of_fit(given: Any, folder: Path, first_round: int | None) -> list[Logger]:
    """Choose the user's loggers, else TensorBoard, and always metrics.csv, but none if `trainer.logger` is false.

    Args:
        given: The value of `trainer.logger`: loggers, a truth value, or None.
        folder: The run's folder.
        first_round: The first round that a continued run trains. None is a new run.
    """
    if given is False:
        return []
    if given is None or given is True:
        chosen = tensorboard_of(folder, first_round)
    else:
        chosen = as_list(given)
    if any(isinstance(logger, RoundCSVLogger) for logger in chosen):
        return chosen
    return [*chosen, RoundCSVLogger(folder)]


def tensorboard_of(folder: Path, first_round: int | None) -> list[Logger]:
    """Return TensorBoard's logger, or nothing and a message if TensorBoard is not installed."""
    try:
        return [RunTensorBoard(folder, first_round)]
    except ModuleNotFoundError:
        rank_zero_info(NO_TENSORBOARD)
        return []
