"""The settings of a run, which a callback writes into the run's folder."""

import os
from enum import Enum
from errno import ENOENT
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.folder import CONFIG
from fl_lightning.utils.files import write_file

CHANGES = "CHANGES"
"""Name of the file that lists settings that changed in the course of a run."""

# The default of an argument of Lightning's Timer is an Enum.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))


class SaveConfig(Callback):
    """Writes `config.yaml` into the run folder, when training starts, and a run of that file is a new run.

    It keeps the text only: jsonargparse's parsers cannot be pickled for a process that is started by spawn.

    Args:
        parser: The parser of the command.
        config: The parsed configuration.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        config = config.clone()
        config["ckpt_path"] = None
        self.text = str(parser.dump(config, skip_unset=False))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _writes(trainer):
            return
        folder = Path(trainer.default_root_dir)
        write_file(folder / CONFIG, self.text)
        changed = pl_module.identity.changed if isinstance(pl_module, FederatedLoop) else []
        if changed:
            lines = [f"round {trainer.current_epoch}: {change}\n" for change in changed]
            path = folder / CHANGES
            before = path.read_text(encoding="utf-8") if path.is_file() else ""
            write_file(path, before + "".join(lines))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Refuse to write a round to a folder that was deleted: it would hold a part of a run.

        Raises:
            FileNotFoundError: The folder has no `config.yaml` any more.
        """
        if not _writes(trainer):
            return
        config = Path(trainer.default_root_dir) / CONFIG
        if not config.is_file():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(config))


def _writes(trainer: Trainer) -> bool:
    """Return True for the first process of a run that leaves something on disk."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
