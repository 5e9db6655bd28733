"""The index of a run's checkpoints, which may lie in other folders than the run's own."""

import json
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from fl_lightning.utils.files import write_file

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""

INDEX = "checkpoints.json"
"""Name of the file in a run's folder that names its last and its best checkpoint, if these lie elsewhere."""

Kind = Literal["last", "best"]
KINDS: tuple[Kind, ...] = ("last", "best")


def indexed(run: Path, kind: str) -> Path | None:
    """Return the checkpoint of a kind that the index of a run names, or None if there is no such file.

    Args:
        run: Folder of the run.
        kind: `last` or `best`.
    """
    try:
        content = json.loads((run / INDEX).read_text(encoding="utf-8"))
        named = content.get(kind)
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(named, str):
        return None
    path = run / named  # An absolute path stays as it is.
    return path if path.is_file() else None


class CheckpointIndex(Checkpoint):
    """Writes the index of a run, from what the user's ModelCheckpoints tell, unless the run's folder shows it.

    It is a `Checkpoint`, and the last one, so that the Trainer calls its hooks after those which write checkpoints.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[str, str] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Write the index if it has changed."""
        if not trainer.is_global_zero:
            return
        named: dict[str, str] = {}
        for callback in trainer.checkpoint_callbacks:
            for kind, path in paths_of(callback).items():
                if not self._is_found(kind, path):
                    named.setdefault(kind, self._relative(path))
        for kind in KINDS:
            kept = indexed(self.folder, kind)
            if kept is not None:
                # An earlier part of a continued run may have written it.
                named.setdefault(kind, self._relative(str(kept)))
        if named and named != self._written:
            write_file(self.folder / INDEX, json.dumps(named, indent=1) + "\n")
            self._written = named

    def _is_found(self, kind: str, path: str) -> bool:
        """Return True for a checkpoint that the run's folder shows by its name."""
        is_own = Path(path).resolve().parent == (self.folder / CHECKPOINTS).resolve()
        return is_own and Path(path).name.startswith(kind)

    def _relative(self, path: str) -> str:
        """Return a path within the run's folder relative to it, so that the folder can be moved."""
        resolved = Path(path).resolve()
        folder = self.folder.resolve()
        if resolved.is_relative_to(folder):
            return resolved.relative_to(folder).as_posix()
        return str(resolved)


def paths_of(callback: Any) -> dict[Kind, str]:
    """Return the paths of the last and of the best checkpoint that a callback has written.

    A callback that writes every round without comparing them has the last one.
    """
    paths: dict[Kind, str] = {}
    last = getattr(callback, "last_model_path", "")
    best = getattr(callback, "best_model_path", "")
    monitor = getattr(callback, "monitor", None)
    if last:
        paths["last"] = last
    elif best and monitor is None:
        paths["last"] = best
    if best and monitor is not None:
        paths["best"] = best
    return paths
