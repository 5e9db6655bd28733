"""LightningCLI for federations: `fl-lightning fit | validate | test | predict`."""

import os
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from enum import Enum
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_info
from torch import cuda, mps
from torch.utils.data import Dataset

from fl_lightning.callbacks import (
    ClasswiseReport,
    ClientCheckpoint,
    ClientsReport,
    MetricArrays,
    RoundProgressBar,
    RunPlots,
    SavePredictions,
    SkippedClients,
)
from fl_lightning.callbacks.plots import Format
from fl_lightning.cli.adopt_files import FROM
from fl_lightning.cli.classes import may_log_metric_objects
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import FederatedParser
from fl_lightning.cli.predict import (
    allowed_changes,
    check_request,
    clients_to_predict,
    output_of,
    read_new,
    settings_of,
)
from fl_lightning.data import FederatedDataModule, Partition, Source
from fl_lightning.distributed.stops import hangup_interrupts
from fl_lightning.federation.checks import check_trainer
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.keys import Direction, direction_of, given_direction, parse_directions, unknown_direction
from fl_lightning.runs import folder as runs
from fl_lightning.runs.best import BestCheckpoint
from fl_lightning.runs.checkpoints import CHECKPOINTS, CheckpointIndex
from fl_lightning.runs.loggers import RoundCSVLogger, RunTensorBoard
from fl_lightning.types import DataModule
from fl_lightning.utils.files import write_file
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.packages import is_of_lightning
from fl_lightning.utils.settings import as_list

Part = TypeVar("Part")

DEFAULTS = {
    "model.client": {"class_path": "fl_lightning.methods.FedAvg"},
    "data.source": {"class_path": "fl_lightning.data.Digits"},
}
TRAINER = {"log_every_n_steps": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}

ADDED: dict[str, type[Callback]] = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
"""Settings with which the Trainer adds a callback of a kind if it sees none."""

PARTS_OF_DATA = (Source, DataModule, Partition, Dataset)
"""Kinds of objects below `data`, which users write and which may draw while they are constructed."""

CHANGES = "CHANGES"
"""Name of the file that lists settings that changed in the course of a run."""

NO_SYNC = "statistics of BatchNorm belong to one client: trainer.sync_batchnorm must be false, got true; leave it unset"

NO_TENSORBOARD = (
    "TensorBoard is not installed: the run logs metrics.csv only; pip install 'fl_lightning[tensorboard]' adds it"
)


yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))  # Timer's default


class SaveConfig(Callback):
    """Writes `config.yaml` into the run folder, when training starts, and a run of that file is a new run.

    It keeps the text only: jsonargparse's parsers cannot be pickled for a process that is started by spawn.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        config = config.clone()
        config["ckpt_path"] = None
        self.text = str(parser.dump(config, skip_unset=False))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = Path(trainer.default_root_dir)
            write_file(folder / runs.CONFIG, self.text)
            changed = pl_module.identity.changed if isinstance(pl_module, FederatedLoop) else []
            if changed:
                lines = [f"round {trainer.current_epoch}: {change}\n" for change in changed]
                before = (folder / CHANGES).read_text(encoding="utf-8") if (folder / CHANGES).is_file() else ""
                write_file(folder / CHANGES, before + "".join(lines))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Refuse to write a round to a folder that was deleted: it would hold a part of a run.

        Raises:
            FileNotFoundError: naming the folder.
        """
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            config = Path(trainer.default_root_dir) / runs.CONFIG
            if not config.is_file():
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(config))


class FederatedCLI(LightningCLI):
    """The command line of a federation: a fit leaves one run folder, complete after every round.

    Args:
        args: in place of those of the process.
        callbacks: of the Trainer, besides those of the configuration.

    Attributes:
        parent: holds the folders of this configuration's runs.
        folder: of the run, or None: nothing is written.
        first_round: that a continued run will train, or None: the run is new.
    """

    def __init__(self, args: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = list(callbacks)
        self.parent = Path(runs.DEFAULT_ROOT)
        self.folder: Path | None = None
        self.first_round: int | None = None
        self._argv = sys.argv[1:] if args is None else args
        self._lock: int | None = None
        self._predictions = Path()
        try:
            with hangup_interrupts():
                super().__init__(
                    FederatedLoop,
                    FederatedDataModule,
                    save_config_callback=SaveConfig,  # type: ignore[arg-type]
                    trainer_defaults=TRAINER,
                    seed_everything_default=0,
                    parser_class=FederatedParser,
                    args=args,
                    auto_configure_optimizers=False,
                    load_from_checkpoint_support=False,
                )
        except BaseException as stop:
            if self.folder is not None:
                runs.discard(self.folder)
            if isinstance(stop, SystemExit) and hasattr(self, "trainer") and self.trainer.interrupted:
                rounds = self.trainer.global_step or (runs.rounds_kept(self.folder) if self.folder else 0)
                raise KeyboardInterrupt(interrupted(rounds, self._argv, self.folder)) from None
            if isinstance(stop, OSError) and (problem := runs.disk_error(stop, self.folder or self.parent)):
                raise OSError(problem) from stop
            raise
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """List the command that is asked for, or all: the options of four take four times as long to make."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in self._argv[:1] if name in every} or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(DEFAULTS)
        add = parser.add_argument
        changes = "settings that may differ from those of the run that is continued, such as model.client.mu"
        add("--allow_changes", nargs="*", default=[], help=changes)
        pictures = "of the pictures in the run folder; metrics: only those of model.metrics; none: none"
        add("--plots.format", type=Format, default="png", help=pictures)
        best = "key of the value whose best round is kept; unset: the accuracy, else the evaluation's first key"
        add("--best.monitor", type=str | None, default=None, help=best)
        add("--best.mode", type=Direction | None, default=None, help="unset: as --direction says, or the key's name")
        better = "KEY=min or KEY=max: whether values are better when lower or higher, if the key's name does not tell"
        add("--direction", nargs="*", type=str, default=[], help=better)
        if self._argv[:1] == ["fit"]:
            theirs = (
                "a configuration file of LightningCLI, with --model CLASS and --data CLASS that the program gives it"
            )
            add(f"--{FROM}", default=SUPPRESS, help=theirs)  # which `adopt` has read: no setting of the run
        if self._argv[:1] in (["validate"], ["test"], ["predict"]):
            client = "id or name of the client whose model and test samples are taken, or all; unset: the global model"
            add("--client", type=int | str | None, default=None, help=client)
            tuned = "whether the client's model is fine-tuned first, as model.fine_tuning says"
            add("--tuned", type=bool, default=False, help=tuned)
        if self._argv[:1] == ["predict"]:
            new = "file or folder of new samples without targets, in place of the test samples; needs --ckpt_path"
            add("--new", type=str | None, default=None, help=new)
            output = "csv file of the predictions, with the outputs in a .pt file beside it; unset: in the run folder"
            add("--output", type=str | None, default=None, help=output)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            self.config = parser.parse_args(self._argv)  # Lightning's own warns with the whole sys.argv beside `args`
        except UnicodeDecodeError as error:
            parser.error(not_utf8(error, self._argv), error)
        except RecursionError as error:
            parser.error("a value in a file holds itself (&name, *name); write it out, or leave it out", error)
        command = self.config.subcommand
        config = self.config[command]
        begins = command == "fit" and not config.ckpt_path
        self.parent = runs.parent_of(config.config or [], config.trainer.default_root_dir, begins=begins)
        if command == "predict":
            check_request(config)
        if config.ckpt_path:
            checkpoint = runs.find_checkpoint(
                config.ckpt_path, self.parent, settings_of(config), allowed=allowed_changes(config)
            )
            self.first_round = runs.first_round(checkpoint)
            config.ckpt_path = str(checkpoint)
            self.folder = runs.run_of(checkpoint, self.parent)
        elif command != "fit" and not config.model.initial_weights:
            raise ValueError(missing_weights_sentence(command, self.parent))
        directions = directions_in(config)
        if command == "fit":
            check_limits(config.trainer)
            check_best(config, directions)
        check_devices(config.trainer)
        if command == "predict":
            self._predictions = output_of(config, self.folder or self.parent)

    def before_instantiate_classes(self) -> None:
        """Key what parts of the data draw while they are constructed, whatever the model draws before them."""
        seed = self.config[self.subcommand].data.seed
        for kind in PARTS_OF_DATA:
            self.parser.add_instantiator(partial(keyed_instance, seed), kind)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand].trainer
        config = self.config[self.subcommand]
        identity = self.model.identity
        identity.configure(settings_of(config))
        identity.allow(allowed_changes(config))
        self.model.recorder.directions |= directions_in(config)
        if self.subcommand != "predict" or config.client != "all":
            # `before_predict` deploys one client after the other.
            client = config.get("client")
            # A number may be the name of an owner.
            self.model.deploy(None if client is None else str(client), tuned=config.get("tuned", False))
        if config.ckpt_path:  # before anything is written; the loop compares the objects as well
            saved = runs.identity_in(Path(config.ckpt_path)) or {"config": {}}
            told = {name: values for name, values in saved.items() if name in ("config", "code")}
            identity.compare({**told, "objects": {}}, evaluates=self.subcommand != "fit")
        if settings.sync_batchnorm:  # afterwards only private attributes of the Trainer tell
            raise ValueError(NO_SYNC)
        given = as_list(settings.callbacks) + self.callbacks
        if self.subcommand != "fit" or settings.fast_dev_run or settings.barebones:
            continued = self.folder or self.parent
            self.folder = None
            kwargs |= {"log_every_n_steps": None} if settings.barebones else {"logger": False}
            ours = self._callbacks_of_evaluation(continued)
        else:
            self.folder = self.folder or runs.new_run(self.parent, runs.overrides_of(self._argv))
            self.model.run_folder = self.folder
            self._lock = runs.take(self.folder)
            kwargs["default_root_dir"] = str(self.folder)
            kwargs["logger"] = loggers(settings.logger, self.folder, self.first_round)
            plots = RunPlots(self.folder, format=config.plots.format)
            ours = [ClasswiseReport(self.folder), plots, SkippedClients(self.folder)]
            if settings.enable_checkpointing is not False:
                best = BestCheckpoint(self.folder / CHECKPOINTS, "best", config.best.monitor, config.best.mode)
                ours += checkpoints(best, given)
                trained = [callback for callback in given if isinstance(callback, ClientCheckpoint)]
                if not trained:
                    trained = [ClientCheckpoint(self.folder / CHECKPOINTS)]
                    ours += trained
                for callback in trained:
                    callback.dirpath = callback.dirpath or self.folder / CHECKPOINTS
                    callback.configured = config.as_dict()["model"]["client"] or {}
                ours.append(CheckpointIndex(self.folder))
        bars = any(is_of_lightning(callback, "ProgressBar") for callback in given)
        if settings.enable_progress_bar is not False and not settings.barebones and not bars:
            ours.append(RoundProgressBar())
        kinds = {type(callback) for callback in given}
        callbacks = given + [callback for callback in ours if type(callback) not in kinds]
        kwargs |= {name: False for name, kind in ADDED.items() if is_of_twin_only(callbacks, kind)}
        trainer = super().instantiate_trainer(**kwargs, callbacks=callbacks)
        check_trainer(trainer)  # before Lightning starts further processes
        return trainer

    def _callbacks_of_evaluation(self, folder: Path) -> list[Callback]:
        """Return the callbacks of a command that is no whole fit.

        Args:
            folder: Folder of the run, or of the runs if no run is known.
        """
        config = self.config[self.subcommand]
        asks_all = config.get("client") == "all"
        if self.subcommand == "predict":
            read_new(config, self.datamodule)
            name = self._predictions.with_suffix(".pt").name
            return [SavePredictions(self._predictions.parent, name, by_client=asks_all)]
        arrays = MetricArrays(folder, format=config.plots.format)
        if asks_all:
            return [ClasswiseReport(), ClientsReport(folder), arrays]
        return [ClasswiseReport(), arrays]

    def before_predict(self) -> None:
        """Find the clients whose models predict, and deploy the first one, if the command asks for all."""
        self._further_clients: list[int] = []
        if self.config.predict.client == "all":
            # A data module of the user's own may ask its Trainer, which attaches itself later.
            self.datamodule.trainer = self.trainer
            first, *self._further_clients = clients_to_predict(self.datamodule)
            self.model.deploy(first, tuned=self.config.predict.tuned)

    def after_predict(self) -> None:
        """Predict by the models of the further clients, one after the other."""
        for client_id in self._further_clients:
            self.model.deploy(client_id, tuned=self.config.predict.tuned)
            ckpt_path = self.config.predict.ckpt_path
            self.trainer.predict(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path)

    def before_fit(self) -> None:
        """Tell where the run lies, and that a run which is continued has its rounds already."""
        rounds = self.first_round or 0
        max_epochs = self.trainer.max_epochs
        if self.folder is not None:
            rank_zero_info(f"Run folder: {self.folder}{f', continued from round {rounds}' if rounds else ''}")
        if rounds and max_epochs is not None and 0 <= max_epochs <= rounds:
            complete = "1 round is" if rounds == 1 else f"{rounds} rounds are"
            rank_zero_info(f"{complete} complete; for more, set --trainer.max_epochs above {rounds}")


def is_of_twin_only(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    """Return True if callbacks of a kind are of `lightning.pytorch`, whose Trainer alone would see them as such."""
    return any(is_of_lightning(each, kind.__name__) for each in callbacks) and not any(
        isinstance(each, kind) for each in callbacks
    )


def keyed_instance(seed: int, kind: type[Part], /, *args: Any, **kwargs: Any) -> Part:
    """Construct a part of the data, which may draw from the generators of Python, NumPy and torch."""
    with keyed_globals(seed, "data/construction"):
        return kind(*args, **kwargs)


def loggers(given: Any, folder: Path, first_round: int | None) -> list[Logger]:
    """Choose the user's loggers, else TensorBoard, and always metrics.csv, but none if `trainer.logger` is false."""
    if given is False:
        return []
    chosen: list[Logger] = [] if given is True else as_list(given)
    if given is None or given is True:
        try:
            chosen = [RunTensorBoard(folder, first_round)]
        except ModuleNotFoundError:
            rank_zero_info(NO_TENSORBOARD)
    return chosen if any(isinstance(logger, RoundCSVLogger) for logger in chosen) else [*chosen, RoundCSVLogger(folder)]


def checkpoints(best: BestCheckpoint, given: list[Callback]) -> list[Callback]:
    """Keep the best and the last round's checkpoint, each unless the user's own ModelCheckpoints do that."""
    users: list[Any] = [callback for callback in given if is_of_lightning(callback, "ModelCheckpoint")]
    ours: list[Callback] = [] if any(callback.monitor for callback in users) else [best]
    if not any(callback.save_last for callback in users):
        ours.append(runs.LastCheckpoint(str(best.dirpath)))  # after the best one, whose path it stores
    return ours


def missing_weights_sentence(command: str, parent: Path) -> str:
    """Sentence for an evaluation that names no trained weights: the checkpoints of the newest run."""
    paths: list[Path] = []
    for run in reversed(runs.runs(parent).values()):
        found = [runs.checkpoint_of(run, kind) for kind in ("last", "best")]
        paths = [path for path in found if path is not None]
        if paths:
            break
    there = " or ".join(f"--ckpt_path {shlex.quote(str(path))}" for path in paths)
    given = f"give {there}" if there else f"there is no run in {parent} with a checkpoint: fit first"
    return (
        f"{command} needs trained weights, and those of a new federation are drawn at random; {given}, or name a file "
        f"of weights by --model.initial_weights"
    )


def check_limits(trainer: Any) -> None:
    """Refuse a fit whose length nobody said: Lightning would run 1,000 rounds.

    Raises:
        ValueError: naming the settings.
    """
    limited = trainer.max_epochs is not None or trainer.max_steps != -1 or trainer.max_time is not None
    if not (limited or trainer.fast_dev_run):
        raise ValueError(
            "fit needs trainer.max_epochs, the number of rounds, trainer.max_steps or trainer.max_time, and got none "
            "(Lightning would run 1,000 rounds); add --trainer.max_epochs 30, or trainer: {max_epochs: 30} in a file"
        )


def directions_in(config: Any) -> dict[str, Direction]:
    """Return the directions that a configuration gives, by log key: `direction`, and `best.mode` of its key.

    Raises:
        ValueError: A direction is not `KEY=min` or `KEY=max`.
    """
    directions = parse_directions(config.get("direction") or [])
    best = config.get("best")
    if best is not None and best.monitor is not None and best.mode is not None:
        directions.setdefault(best.monitor, best.mode)
    return directions


def check_best(config: Any, directions: Mapping[str, Direction]) -> None:
    """Refuse a best checkpoint by a key whose direction nobody tells, unless a metric object may tell it later.

    Raises:
        ValueError: Nobody tells whether lower or higher is better, or two options contradict each other.
    """
    monitor = config.best.monitor
    mode = config.best.mode
    told = None if monitor is None else given_direction(monitor, directions)
    if mode is not None and told is not None and mode != told:
        raise ValueError(
            f"best.mode must be the direction of {monitor} in --direction ({told}), got {mode}; leave out one of them"
        )
    if monitor is None or direction_of(monitor, directions) is not None or config.model.metrics:
        return
    if not may_log_metric_objects(config.model.client):
        raise ValueError(unknown_direction(monitor))


def check_devices(trainer: Any) -> None:
    """Refuse devices that are none, and a GPU where torch finds none, which Lightning does without a remedy.

    Raises:
        ValueError: naming the setting.
    """
    if trainer.devices in (0, "0"):
        raise ValueError(f"trainer.devices must be at least 1, got {trainer.devices}; auto takes all that there are")
    if trainer.accelerator in ("gpu", "cuda") and not any(backend.is_available() for backend in (cuda, mps)):
        raise ValueError(
            f"trainer.accelerator={trainer.accelerator} needs a GPU, and torch {torch.__version__} finds none here; "
            f"auto takes what there is"
        )


def not_utf8(error: UnicodeDecodeError, argv: Sequence[str]) -> str:
    """Name the configuration file that is no text in UTF-8, which the error itself does not."""
    given = [Path(path) for word in argv for path in (word, word.partition("=")[2])]
    name = next((path for path in given if path.is_file() and error.object in path.read_bytes()), "the file")
    return f"config: {name} must be text in UTF-8, got byte 0x{error.object[error.start]:02x}; save it as UTF-8"


def interrupted(rounds: int, argv: Sequence[str], folder: Path | None) -> str:
    """Sentence after Ctrl-C: the rounds that are kept, and the command that continues the run."""
    if not rounds:
        return "interrupted before the first round was complete; nothing is kept"
    done = f"interrupted after {rounds} complete round{'s' * (rounds != 1)}"
    last = None if folder is None else runs.checkpoint_of(folder, "last")
    if last is None:
        return f"{done}; no checkpoint is kept"
    pairs = zip(["", *argv], argv, strict=False)
    words = [word for before, word in pairs if before != "--ckpt_path" and not word.startswith("--ckpt_path")]
    return f"{done}; continue with {shlex.join([PROG, *words, '--ckpt_path', str(last)])}"
