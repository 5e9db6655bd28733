"""The checkpoint of the best round, by the value that sums up an evaluation or one that the user names."""

from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.value_names import is_lower_better

Mode = Literal["min", "max"]


ON_TEST = "-on-test"
"""End of the file's name, if the best round is chosen on the test split."""


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best round.

    The value that is compared is named by the first evaluation: an accuracy, else the first key that the module logs
    there; of clients that share no weights the mean accuracy of their own models. A run that evaluates nothing keeps
    none.

    Args:
        dirpath: its folder.
        filename: without `.ckpt`, and without `-on-test`, which is added if the test split is evaluated.
        monitor: key of the value; None: chosen as above.
        mode: `min` where lower is better; None: as the key's name says (`is_lower_better`).
    """

    def __init__(
        self, dirpath: str | Path, filename: str, monitor: str | None = None, mode: Mode | None = None
    ) -> None:
        self._asked = monitor
        self._mode = mode
        self._place = str(dirpath), filename
        self._watch(monitor)

    def _watch(self, key: str | None) -> None:
        """Begin to compare the values of a key, which is None as long as it is not known."""
        mode = self._mode or ("min" if key and is_lower_better(key) else "max")
        super().__init__(*self._place, key, mode=mode, save_on_train_epoch_end=True, enable_version_counter=False)

    @property
    def state_key(self) -> str:
        """The same before and after the key is known, so that a checkpoint's state is found."""
        return f"{type(self).__qualname__}{{'every_n_train_steps': 0, 'train_time_interval': None}}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._asked is None and state_dict["monitor"] is not None:
            self._watch(state_dict["monitor"])
        if state_dict["monitor"] == self.monitor:  # else the scores are of another value
            super().load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add to the name of the file if the test split is evaluated, which is known once the data are set up."""
        if isinstance(pl_module, FederatedLoop) and pl_module.data.evaluated != "val":
            dirpath, filename = self._place
            self.filename = f"{filename.removesuffix(ON_TEST)}{ON_TEST}"
            self._place = (dirpath, self.filename)
        super().setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the round where it is the best.

        Raises:
            ValueError: nobody logs the key that was asked for.
        """
        if not isinstance(pl_module, FederatedLoop):
            return
        logged = trainer.callback_metrics
        (alma,) = pl_module.parts.marked({"local/alma": 0.0})
        key = alma if pl_module.global_weights.own_models else pl_module.final_key
        if self.monitor is None and key in logged:
            self._watch(key)
            if pl_module.client.module is not None:
                lowest = "lowest" if self.mode == "min" else "highest"
                rank_zero_info(f"{self._place[1]}.ckpt is that of the round with the {lowest} {key}")
        if self.monitor in logged:
            super().on_train_epoch_end(trainer, pl_module)
        elif self._asked and pl_module.final_key and not self._asked.startswith("local/"):
            raise ValueError(
                f"best.monitor must be a key that is logged, one of {', '.join(sorted(logged))}; got {self._asked}"
            )
