"""The checkpoint of the best round, by the value that sums up an evaluation or one that the user names."""

import math
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.keys import (
    Direction,
    describe,
    direction_of,
    needed_direction,
    plain_name,
    split_of,
    unknown_direction,
)
from fl_lightning.utils.files import write_file

ON_TEST = "-on-test"
"""End of the file's name, if the best round is chosen on the test split."""


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best round, and beside it a copy of the round's `client.ckpt` as `client-best.ckpt`.

    The first evaluation names the value that is compared: an accuracy, else the first key that the module logs
    there. Of clients that share no weights it is such a mean of their own models. Nothing is kept if a run
    evaluates nothing, if every value is NaN or infinite, or if nobody tells whether lower or higher is better. If the
    data have tasks (`data.scenario`), nothing is kept unless `monitor` is given, because such a round may lie in the
    middle of a task.

    Args:
        dirpath: Folder of the checkpoint.
        filename: Name of the file, without `.ckpt`, and without `-on-test`, which is added if the test split is
            evaluated.
        monitor: Key of the value. None chooses it as above.
        mode: `min` if lower is better, `max` if higher is. None asks the registry of keys, which knows what the user
            gave as `--direction`, the logged metric objects, and the usual names.
    """

    def __init__(
        self, dirpath: str | Path, filename: str, monitor: str | None = None, mode: Direction | None = None
    ) -> None:
        self._asked = monitor
        self._mode = mode
        self._place = (str(dirpath), filename)
        self._is_told = False
        """Whether the user was told why nothing is kept."""
        self._watch(None, mode or "max")

    def _watch(self, key: str | None, mode: Direction) -> None:
        """Begin to compare the values of a key, which is None as long as the key or its direction is not known."""
        dirpath, filename = self._place
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=key,
            mode=mode,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    @property
    def state_key(self) -> str:
        """The same before and after the key is known, so that a checkpoint's state is found."""
        return f"{type(self).__qualname__}{{'every_n_train_steps': 0, 'train_time_interval': None}}"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        key = state_dict["monitor"]
        if key is None or (self._asked is not None and plain_name(key) != plain_name(self._asked)):
            return  # The scores are of another value.
        saved_mode = state_dict.get("mode")
        if saved_mode is None:
            saved_mode = self._mode or mode_of_earlier_version(key)
        if saved_mode is None or (self._mode is not None and saved_mode != self._mode):
            return  # The scores are of another direction.
        self._watch(key, saved_mode)
        super().load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add to the name of the file if the test split is evaluated, which is known once the data are set up."""
        if stage == "fit" and isinstance(pl_module, FederatedLoop) and pl_module.data.evaluated != "val":
            dirpath, filename = self._place
            self.filename = f"{filename.removesuffix(ON_TEST)}{ON_TEST}"
            self._place = (dirpath, self.filename)
        super().setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the round if it is the best.

        Raises:
            ValueError: Nobody logs the key that was asked for, or nobody tells its direction.
        """
        if not isinstance(pl_module, FederatedLoop):
            return
        if self.monitor is not None and self._mode is None:
            # A run that continues may have another direction.
            direction = direction_of(self.monitor, pl_module.recorder.directions)
            if direction is not None and direction != self.mode:
                self._watch(None, direction)
        if self.monitor is None:
            self._choose(trainer, pl_module)
        value = trainer.callback_metrics.get(self.monitor or "")
        # Lightning would keep a first round that is NaN, and an infinite one for ever.
        if value is not None and math.isfinite(value):
            before = self.best_model_score
            super().on_train_epoch_end(trainer, pl_module)
            if self.best_model_score is not before and trainer.is_global_zero:
                self._keep_client(trainer)

    def _keep_client(self, trainer: Trainer) -> None:
        """Keep the round's checkpoint of the client's own class, which a ClientCheckpoint has written before."""
        dirpath, filename = self._place
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            of_round: Path | None = getattr(callback, "path_of_round", None)
            if of_round is not None:
                write_file(Path(dirpath, f"client-{filename}.ckpt"), of_round.read_bytes())
                return

    def _choose(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Choose the key and its direction, once the key is logged."""
        logged = trainer.callback_metrics
        key = loop.final_key if self._asked is None else self._asked
        # A value that a guarantee does not cover is watched by its marked name, which the checkpoint then tells.
        (marked,) = loop.parts.marked({key: 0.0})
        if marked in logged:
            key = marked
        if key not in logged:
            # Clients need not be evaluated every round.
            is_of_clients = split_of(plain_name(self._asked or "")) == "clients"
            if self._asked and loop.final_key and not is_of_clients:
                raise ValueError(
                    f"best.monitor must be a key that is logged, one of {', '.join(sorted(logged))}; got {self._asked}"
                )
            return
        if self._asked is None and loop.data.scenario is not None and loop.data.scenario.tasks:
            self._tell(
                f"the best round by {key} may lie in the middle of a task of data.scenario; take last.ckpt, or set "
                f"best.monitor, such as to global/acc_tasks"
            )
            return
        given = loop.recorder.directions
        if self._asked and self._mode is None:
            needed_direction(key, given)
        mode = self._mode or direction_of(key, given)
        if mode is None:
            self._tell(unknown_direction(key))
            return
        filename = self._place[1]
        self._watch(key, mode)
        if self._asked is None and loop.client.module is not None:
            lowest = "lowest" if self.mode == "min" else "highest"
            rank_zero_info(f"{filename}.ckpt is that of the round with the {lowest} {key}")

    def _tell(self, reason: str) -> None:
        """Tell once why nothing is kept."""
        if not self._is_told:
            rank_zero_warn(f"{self._place[1]}.ckpt is not kept: {reason}")
        self._is_told = True


def mode_of_earlier_version(key: str) -> Direction | None:
    """Return the mode of the scores in a checkpoint of 0.2.0, or None if these may be of the wrong direction.

    That version took every key for better when higher, unless the key ended with one of some words.
    """
    direction = direction_of(key)
    is_certain = direction == "max" or describe(key).is_own or plain_name(key).endswith("loss")
    return direction if is_certain else None
