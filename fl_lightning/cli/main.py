"""LightningCLI for federations: `fl-lightning fit | validate | test | predict`."""

import os
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import Dataset

from fl_lightning.callbacks import ClasswiseReport, ClientsReport, MetricArrays, SavePredictions
from fl_lightning.callbacks.plots import Format
from fl_lightning.cli.adopt_files import FROM
from fl_lightning.cli.config_checks import check_best, check_devices, check_limits, directions_in, missing_weights
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
from fl_lightning.cli.run_callbacks import ADDED, callbacks_of_fit, is_of_twin_only, joined_callbacks, loggers_of_fit
from fl_lightning.cli.save_config import SaveConfig
from fl_lightning.data import FederatedDataModule, Partition, Source
from fl_lightning.distributed.stops import hangup_interrupts
from fl_lightning.federation.checks import check_trainer
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.keys import Direction
from fl_lightning.runs import folder as runs
from fl_lightning.types import DataModule
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.settings import as_list

Part = TypeVar("Part")

DEFAULTS = {
    "model.client": {"class_path": "fl_lightning.methods.FedAvg"},
    "data.source": {"class_path": "fl_lightning.data.Digits"},
}
"""Classes of the parts that are not named."""

TRAINER = {"log_every_n_steps": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}
"""Settings of the Trainer whose defaults suit rounds."""

PARTS_OF_DATA = (Source, DataModule, Partition, Dataset)
"""Kinds of objects below `data`, which users write and which may draw while they are constructed."""

NO_SYNC = "statistics of BatchNorm belong to one client: trainer.sync_batchnorm must be false, got true; leave it unset"


class FederatedCLI(LightningCLI):
    """The command line of a federation: a fit leaves one run folder, complete after every round.

    Args:
        args: The words of the command line. None takes the words of the process.
        callbacks: Callbacks of the Trainer, besides the callbacks of the configuration.

    Attributes:
        parent: Folder with the folders of this configuration's runs.
        folder: The run's folder. None if nothing is written.
        first_round: The first round that a continued run trains. None is a new run.
    """

    def __init__(self, args: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = list(callbacks)
        self.parent = Path(runs.DEFAULT_ROOT)
        self.folder: Path | None = None
        self.first_round: int | None = None
        self._argv = sys.argv[1:] if args is None else args
        self._lock: int | None = None
        self._predictions = Path()
        self._further_clients: list[int] = []
        try:
            with hangup_interrupts():
                super().__init__(
                    model_class=FederatedLoop,
                    datamodule_class=FederatedDataModule,
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
                raise KeyboardInterrupt(interrupted(self._rounds_kept(), self._argv, self.folder)) from None
            problem = ""
            if isinstance(stop, OSError):
                problem = runs.disk_error(stop, self.folder or self.parent)
            if problem:
                raise OSError(problem) from stop
            raise
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def _rounds_kept(self) -> int:
        """Count the complete rounds of an interrupted run."""
        if self.trainer.global_step:
            return self.trainer.global_step
        return runs.rounds_kept(self.folder) if self.folder else 0

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """List the command that is asked for, or all: the options of four take four times as long to make."""
        every = LightningCLI.subcommands()
        command = self._command_asked
        return {command: every[command]} if command in every else every

    @property
    def _command_asked(self) -> str:
        """The first word of the command line."""
        return self._argv[0] if self._argv else ""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(DEFAULTS)
        add = parser.add_argument
        add(
            "--allow_changes",
            nargs="*",
            default=[],
            help="settings that may differ from those of the run that is continued, such as model.client.mu",
        )
        add(
            "--plots.format",
            type=Format,
            default="png",
            help="of the pictures in the run folder; metrics: only those of model.metrics; none: none",
        )
        add(
            "--best.monitor",
            type=str | None,
            default=None,
            help="key of the value whose best round is kept; unset: the accuracy, else the evaluation's first key",
        )
        add(
            "--best.mode",
            type=Direction | None,
            default=None,
            help="unset: as --direction says, or the key's name",
        )
        add(
            "--direction",
            nargs="*",
            type=str,
            default=[],
            help="KEY=min or KEY=max: whether values are better when lower or higher, if the key's name does not tell",
        )
        if self._command_asked == "fit":
            # `adopt` has read the option. It is no setting of the run.
            add(
                f"--{FROM}",
                default=SUPPRESS,
                help="a configuration file of LightningCLI, with --model CLASS and --data CLASS that the program gives "
                "it",
            )
        if self._command_asked in ("validate", "test", "predict"):
            add_client_options(parser)
        if self._command_asked == "predict":
            add_options_of_predict(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            # Lightning's own method warns with the whole sys.argv beside `args`.
            self.config = parser.parse_args(self._argv)
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
            raise ValueError(missing_weights(command, self.parent))
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
        self._identify()
        # Afterwards only private attributes of the Trainer tell.
        if settings.sync_batchnorm:
            raise ValueError(NO_SYNC)
        given = as_list(settings.callbacks) + self.callbacks
        if self.subcommand == "fit" and not settings.fast_dev_run and not settings.barebones:
            folder = self._take_folder()
            kwargs["default_root_dir"] = str(folder)
            kwargs["logger"] = loggers_of_fit(settings.logger, folder, self.first_round)
            ours = callbacks_of_fit(self.config[self.subcommand], folder, given)
        else:
            folder = self.folder or self.parent
            self.folder = None
            kwargs |= {"log_every_n_steps": None} if settings.barebones else {"logger": False}
            ours = self._callbacks_of_evaluation(folder)
        callbacks = joined_callbacks(given, ours, settings)
        kwargs |= {name: False for name, kind in ADDED.items() if is_of_twin_only(callbacks, kind)}
        trainer = super().instantiate_trainer(**kwargs, callbacks=callbacks)
        # Lightning starts further processes later.
        check_trainer(trainer)
        return trainer

    def _identify(self) -> None:
        """Tell the loop its settings and the client that it deploys, and compare it with the run of a checkpoint.

        Raises:
            ValueError: The settings differ from the settings of the run.
        """
        config = self.config[self.subcommand]
        identity = self.model.identity
        identity.configure(settings_of(config))
        identity.allow(allowed_changes(config))
        self.model.recorder.directions |= directions_in(config)
        client = config.get("client")
        # `before_predict` deploys all clients, one after the other.
        if self.subcommand != "predict" or client != "all":
            # A number may be the name of an owner.
            self.model.deploy(None if client is None else str(client), tuned=config.get("tuned", False))
        if config.ckpt_path:
            # Nothing is written before. The loop compares the objects as well.
            saved = runs.identity_in(Path(config.ckpt_path)) or {"config": {}}
            told = {name: values for name, values in saved.items() if name in ("config", "code", "files")}
            identity.compare({**told, "objects": {}}, evaluates=self.subcommand != "fit")

    def _take_folder(self) -> Path:
        """Lock the folder of the run that is continued, or of a new run, and return it.

        Raises:
            ValueError: Another process writes there, or a link in the folder leads out of it.
        """
        folder = self.folder or runs.new_run(self.parent, runs.overrides_of(self._argv))
        self.folder = folder
        self.model.run_folder = folder
        self._lock = runs.take(folder)
        return folder

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
            beginning = f", continued from round {rounds}" if rounds else ""
            rank_zero_info(f"Run folder: {self.folder}{beginning}")
        if rounds and max_epochs is not None and 0 <= max_epochs <= rounds:
            complete = "1 round is" if rounds == 1 else f"{rounds} rounds are"
            rank_zero_info(f"{complete} complete; for more, set --trainer.max_epochs above {rounds}")


def add_client_options(parser: LightningArgumentParser) -> None:
    """Add the options of an evaluation that say whose model is evaluated."""
    parser.add_argument(
        "--client",
        type=int | str | None,
        default=None,
        help="id or name of the client whose model and test samples are taken, or all; unset: the global model",
    )
    parser.add_argument(
        "--tuned",
        type=bool,
        default=False,
        help="whether the client's model is fine-tuned first, as model.fine_tuning says",
    )


def add_options_of_predict(parser: LightningArgumentParser) -> None:
    """Add the options of `predict` that name new samples and the file of the predictions."""
    parser.add_argument(
        "--new",
        type=str | None,
        default=None,
        help="file or folder of new samples without targets, in place of the test samples; needs --ckpt_path",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="csv file of the predictions, with the outputs in a .pt file beside it; unset: in the run folder",
    )


def keyed_instance(seed: int, kind: type[Part], /, *args: Any, **kwargs: Any) -> Part:
    """Construct a part of the data, which may draw from the generators of Python, NumPy and torch.

    Args:
        seed: Seed of the data.
        kind: The class of the part.
        args: Its arguments by place.
        kwargs: Its arguments by name.
    """
    with keyed_globals(seed, "data/construction"):
        return kind(*args, **kwargs)


def not_utf8(error: UnicodeDecodeError, argv: Sequence[str]) -> str:
    """Return the sentence for a configuration file that is no text in UTF-8, whose name the error does not have.

    Args:
        error: The error of its reader.
        argv: The words of the command line.
    """
    name: str | Path = "the file"
    for path in paths_among(argv):
        if path.is_file() and error.object in path.read_bytes():
            name = path
            break
    return f"config: {name} must be text in UTF-8, got byte 0x{error.object[error.start]:02x}; save it as UTF-8"


def paths_among(argv: Sequence[str]) -> list[Path]:
    """Return the words of a command line, and the values in words such as `--config=a.yaml`, as paths."""
    paths: list[Path] = []
    for word in argv:
        _, _, value = word.partition("=")
        paths += [Path(word), Path(value)]
    return paths


def interrupted(rounds: int, argv: Sequence[str], folder: Path | None) -> str:
    """Return the sentence after Ctrl-C: the rounds that are kept, and the command that continues the run.

    Args:
        rounds: Number of complete rounds.
        argv: The words of the command line.
        folder: The run's folder. None if nothing is written.
    """
    if not rounds:
        return "interrupted before the first round was complete; nothing is kept"
    ending = "" if rounds == 1 else "s"
    done = f"interrupted after {rounds} complete round{ending}"
    last = None if folder is None else runs.checkpoint_of(folder, "last")
    if last is None:
        return f"{done}; no checkpoint is kept"
    words = without_checkpoint(argv)
    return f"{done}; continue with {shlex.join([PROG, *words, '--ckpt_path', str(last)])}"


def without_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line without `--ckpt_path` and its value.

    >>> without_checkpoint("fit --ckpt_path last -c a.yaml --ckpt_path=best".split())
    ['fit', '-c', 'a.yaml']
    """
    words: list[str] = []
    before = ""
    for word in argv:
        if before != "--ckpt_path" and not word.startswith("--ckpt_path"):
            words.append(word)
        before = word
    return words
