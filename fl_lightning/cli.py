"""LightningCLI for federations: `fl-lightning fit | validate | test | predict`."""

import shlex
import sys
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import Logger

from fl_lightning.callbacks import ClasswiseReport, RoundProgressBar, RunPlots
from fl_lightning.data import FederatedDataModule
from fl_lightning.loggers import RoundCSVLogger, RunTensorBoard
from fl_lightning.loop import FederatedLoop
from fl_lightning.parsing import PROG, FederatedParser
from fl_lightning.run_folder import (
    CHECKPOINTS,
    DEFAULT_ROOT,
    BestCheckpoint,
    LastCheckpoint,
    discard,
    find_checkpoint,
    first_round,
    new_run,
    run_of,
    stem_of,
)

DEFAULTS = {
    "model.client": {"class_path": "fl_lightning.methods.FedAvg"},
    "data.source": {"class_path": "fl_lightning.data.Digits"},
}
TRAINER = {"log_every_n_steps": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}


class SaveConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run folder; run again, it starts a new run."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            config = self.config.clone()
            config["ckpt_path"] = None
            path = Path(trainer.default_root_dir) / self.config_filename
            self.parser.save(config, path, skip_none=False, overwrite=True, multifile=False)


class FederatedCLI(LightningCLI):
    """The command line of a federation: a fit leaves one run folder, complete after every round.

    Args:
        args: in place of those of the process.

    Attributes:
        folder: of the run, or None: nothing is written.
    """

    def __init__(self, args: list[str] | None = None) -> None:
        self.folder: Path | None = None
        self.first_round: int | None = None
        try:
            super().__init__(
                FederatedLoop,
                FederatedDataModule,
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults=TRAINER,
                seed_everything_default=0,
                parser_class=FederatedParser,
                args=args,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
        except BaseException as stop:
            rounds = self.trainer.global_step if hasattr(self, "trainer") else 0
            if self.folder is not None and self.first_round is None and not rounds:
                discard(self.folder)
            if isinstance(stop, SystemExit) and hasattr(self, "trainer") and self.trainer.interrupted:
                raise KeyboardInterrupt(interrupted(rounds, sys.argv[1:] if args is None else args)) from None
            raise

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(DEFAULTS)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        self.parent = Path(config.trainer.default_root_dir or DEFAULT_ROOT) / stem_of(config.config or [])
        if config.ckpt_path:
            checkpoint = find_checkpoint(config.ckpt_path, self.parent)
            self.first_round = first_round(checkpoint)
            config.ckpt_path = str(checkpoint)
            self.folder = run_of(checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand].trainer
        given = as_list(settings.callbacks)
        if self.subcommand != "fit" or settings.fast_dev_run or settings.barebones:
            self.folder = None
            kwargs |= {} if settings.barebones else {"logger": False}
            ours: list[Callback] = [ClasswiseReport()]
        else:
            self.folder = self.folder or new_run(self.parent)
            kwargs |= {"default_root_dir": str(self.folder), "logger": self.loggers(settings.logger)}
            ours = [ClasswiseReport(self.folder), RunPlots(self.folder)]
            if settings.enable_checkpointing is not False:
                ours += checkpoints(self.folder / CHECKPOINTS, given, self.datamodule.val_fraction)
        bars = any(isinstance(callback, ProgressBar) for callback in given)
        if settings.enable_progress_bar is not False and not settings.barebones and not bars:
            ours.append(RoundProgressBar())
        kinds = {type(callback) for callback in given}
        callbacks = given + [callback for callback in ours if type(callback) not in kinds]
        return super().instantiate_trainer(**kwargs, callbacks=callbacks)

    def loggers(self, given: Any) -> list[Logger]:
        """The user's, else TensorBoard, and always metrics.csv; none where `trainer.logger` is false."""
        assert self.folder is not None
        if given is False:
            return []
        if given is None or given is True:
            given = RunTensorBoard(self.folder, self.first_round)
        table = RoundCSVLogger(self.folder)
        chosen: list[Logger] = as_list(given)
        return chosen if any(isinstance(logger, RoundCSVLogger) for logger in chosen) else [*chosen, table]


def checkpoints(folder: Path, given: list[Callback], val_fraction: float) -> list[Callback]:
    """The best and the last round's checkpoint, each unless the user's own ModelCheckpoints do that."""
    own = [callback for callback in given if isinstance(callback, ModelCheckpoint)]
    ours: list[Callback] = []
    if not any(callback.monitor for callback in own):
        monitor, name = ("val/acc", "best") if val_fraction else ("global/acc", "best-on-test")
        ours.append(BestCheckpoint(folder, monitor, name))
    if not any(callback.save_last for callback in own):
        ours.append(LastCheckpoint(folder))  # after the best: it remembers which that is
    return ours


def interrupted(rounds: int, argv: list[str]) -> str:
    """What a run that was stopped by Ctrl-C left behind, and how it goes on."""
    if not rounds:
        return "interrupted before the first round was complete; nothing is kept"
    words = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if before != "--ckpt_path" and not word.startswith("--ckpt_path")
    ]
    command = shlex.join([PROG, *words, "--ckpt_path", "last"])
    return f"interrupted after {rounds} complete rounds; continue with {command}"


def as_list(value: Any) -> list[Any]:
    """A list of what may be a list, one thing or None."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
