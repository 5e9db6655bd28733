"""Callback that saves the trained model without the federation around it."""

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.client.hooks import own_hook
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.stored_schema import SCHEMA, stored_schema
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.values import class_name, is_plain
from fl_lightning.runs.folder import CLIENT
from fl_lightning.utils.files import DIGEST, save_with_digest
from fl_lightning.utils.packages import distribution_of, lightning_base
from fl_lightning.utils.plain import is_readable, plain_value, without_refused
from fl_lightning.utils.settings import described


class ClientCheckpoint(Callback):
    """Writes the global model after every round, as it is evaluated, as a checkpoint of the client's own class.

    `MyModule.load_from_checkpoint("client.ckpt")` reads the file without this package. The file holds what Lightning
    would write for the module alone: the entries by the module's own names, all hyper-parameters that the module saved
    itself, and what its `on_save_checkpoint` adds or changes. As in Lightning, objects among these are read with
    `weights_only=False`. Of the user's data module the file holds the hyper-parameters that are no objects, and the
    state. For a client with `net=` the hyper-parameters are its plain arguments, and the factory is given again:
    `FedNTD.load_from_checkpoint("client.ckpt", net=...)`. The callback writes nothing if the clients share no weights.
    In a fit without a federation it writes the fitted module after every epoch, in the same form.

    The file of a federation also holds the schema of the training samples, which `fl_lightning.data.read_schema` reads:
    how stored samples become inputs of the module.

    At the end of a fit it also writes what chosen clients would deploy, `client-3.ckpt` of client 3, in the same form.

    Args:
        dirpath: Folder of the files. None is `trainer.default_root_dir`.
        filename: Name of the checkpoint of the global model.
        clients: Ids or names of the clients whose models are written at the end, or `all`. None is none.

    Attributes:
        configured: The client as a configuration names it, with `class_path` and `init_args`, or an empty mapping. An
            object among the hyper-parameters is then written as the configuration has it, as LightningCLI does.
        path_of_round: The file of the global model of the last round of the fit. None if there is no such file.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = CLIENT,
        clients: list[int | str] | int | str | None = None,
    ) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self.clients = clients
        self.configured: Mapping[str, Any] = {}
        self.path_of_round: Path | None = None
        self._reported: set[str] = set()
        """The names of the entries that cannot be written, which were reported."""

    def configure(self, folder: Path, configured: Mapping[str, Any]) -> None:
        """Set the folder of the files, unless there is one, and the client as a configuration names it.

        Args:
            folder: The folder.
            configured: The client, with `class_path` and `init_args`, or an empty mapping.
        """
        self.dirpath = self.dirpath or folder
        self.configured = configured

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path_of_round = None
        if isinstance(pl_module, FederatedLoop):
            self._chosen(pl_module)
        elif self.clients is not None:
            raise ValueError(
                "ClientCheckpoint.clients needs a federation, got the fit of a module alone; leave clients unset"
            )

    def _chosen(self, loop: FederatedLoop) -> Sequence[int]:
        """Return the ids of the clients whose models are written.

        Raises:
            TypeError: Something else than ids and names is given.
            ValueError: There is no such client.
        """
        num_clients = loop.data.num_clients
        if self.clients is None:
            return []
        if isinstance(self.clients, str) and self.clients == "all":
            return range(num_clients)
        asked: Any = self.clients
        if isinstance(asked, Tensor | np.ndarray):
            asked = asked.tolist()
        if isinstance(asked, str | bytes) or not isinstance(asked, Iterable):
            asked = [asked]
        try:
            return [loop.data.client_id(client) for client in asked]
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"ClientCheckpoint.clients must be ids in [0, {num_clients}), names of clients or all, got "
                f"{described(self.clients)}; give such clients"
            ) from None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            return
        for client_id in self._chosen(pl_module):
            # Every process must enter it, because one of them has what the client keeps.
            with pl_module.lent_to(client_id) as is_whole:
                if is_whole and trainer.is_global_zero:
                    filename = f"client-{client_id}.ckpt"
                    self._write(trainer, pl_module.client, pl_module.forward_to, filename=filename)
            if not is_whole:
                name = type(pl_module.client).__name__
                rank_zero_info(
                    f"client-{client_id}.ckpt is not written: {name} predicts with more than the entries of its "
                    f"module; take loop.client_model({client_id})"
                )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if not isinstance(pl_module, FederatedLoop):
            self._write(trainer, pl_module, call_on_save)
        elif pl_module.global_weights.shared:
            with pl_module.evaluation.evaluated_entries():
                self.path_of_round = self._write(trainer, pl_module.client, pl_module.forward_to)

    def _write(
        self, trainer: Trainer, client: LightningModule, forward: Callable[..., Any], filename: str | None = None
    ) -> Path:
        """Write a module as it is, and return the path of the file.

        Args:
            trainer: The Trainer of the run.
            client: The module, or the client that is built around it.
            forward: Calls a hook of a module, as `(module, name, checkpoint)`.
            filename: Name of the file. None is that of the global model.
        """
        inner = client
        prefix = ""
        wrapped = getattr(client, "module", None) if isinstance(client, ClientModule) else None
        if wrapped is not None:
            inner = wrapped
            prefix = "module."
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": version(distribution_of(type(inner))),
            "state_dict": {name.removeprefix(prefix): value for name, value in client.state_dict().items()},
            **hyperparameters(inner, self.configured),
            **self._of_data(trainer),
        }
        if own_hook(inner, "on_save_checkpoint") is not None:
            of_trainer = states_of_trainer(trainer)
            checkpoint |= of_trainer
            forward(inner, "on_save_checkpoint", checkpoint)
            for name in of_trainer:
                checkpoint.pop(name, None)
        checkpoint[DIGEST] = "sha256"
        checkpoint |= schema_of_data(trainer)
        path = Path(self.dirpath or trainer.default_root_dir, filename or self.filename)
        save_with_digest(self._writable(checkpoint), path)
        return path

    def _of_data(self, trainer: Trainer) -> dict[str, Any]:
        """Return what Lightning writes for the user's data module, without objects, which are reported once."""
        left_out: list[str] = []
        entries = without_refused(plain_value(entries_of_data(trainer)), keeps=is_readable, left_out=left_out)
        self._report(left_out, "are objects of the data module")
        return entries

    def _report(self, left_out: Iterable[str], reason: str) -> None:
        """Report once which entries the file lacks.

        Args:
            left_out: Names of the entries.
            reason: Words that say why the file lacks them.
        """
        names = [name for name in left_out if name not in self._reported]
        self._reported.update(names)
        if names:
            rank_zero_info(
                f"{', '.join(names)} {reason}, so that {self.filename} lacks them; give them again to "
                f"load_from_checkpoint"
            )

    def _writable(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint in plain form, without the objects that cannot be written, which are reported once."""
        left_out: list[str] = []
        writable = without_refused(plain_value(checkpoint), keeps=is_writable, left_out=left_out)
        self._report(left_out, "cannot be pickled")
        return writable


def entries_of_data(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning keeps in a checkpoint of the user's data module: hyper-parameters and its state.

    Args:
        trainer: The Trainer of the run.
    """
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    source = None
    if isinstance(datamodule, FederatedDataModule):
        source = datamodule.source
        datamodule = getattr(source, "datamodule", None)
    if datamodule is None:
        return {}
    entries: dict[str, Any] = {}
    if datamodule.hparams:
        # Lightning notes which argument the hyper-parameters are, and has no public name for it.
        name = vars(datamodule).get("_hparams_name")
        if name is not None:
            entries[datamodule.CHECKPOINT_HYPER_PARAMS_NAME] = name
        entries[datamodule.CHECKPOINT_HYPER_PARAMS_KEY] = dict(datamodule.hparams)
    with nullcontext() if source is None else source.keyed("state_dict"):
        state = datamodule.state_dict()
    if state:
        entries[type(datamodule).__qualname__] = state
    return entries


def schema_of_data(trainer: Trainer) -> dict[str, Any]:
    """Return the schema of a federation's training samples, which tells how samples become inputs of the module.

    Args:
        trainer: The Trainer of the run.
    """
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    schema = datamodule.source.schema if isinstance(datamodule, FederatedDataModule) else None
    return {} if schema is None else {SCHEMA: stored_schema(schema)}


def states_of_trainer(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning keeps in a checkpoint besides the module, which its hook may read or delete.

    The states of callbacks, which are not of the module, are left out.

    Args:
        trainer: The Trainer of the run.
    """
    return {
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs],
    }


def call_on_save(module: LightningModule, name: str, checkpoint: dict[str, Any]) -> None:
    """Call a hook of a module that is fitted without a federation.

    Args:
        module: The module.
        name: The name of the hook.
        checkpoint: The checkpoint.
    """
    getattr(module, name)(checkpoint)


def hyperparameters(module: LightningModule, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint for the hyper-parameters of a module, by Lightning's keys.

    They are those that the module saved itself, else its plain arguments.

    Args:
        module: The module.
        configured: The client as a configuration names it, or an empty mapping.
    """
    hparams: Any = module.hparams
    if not hparams:
        arguments = arguments_of(module)
        return {module.CHECKPOINT_HYPER_PARAMS_KEY: {key: value for key, value in arguments.items() if is_plain(value)}}
    entries: dict[str, Any] = {}
    # Lightning notes which argument the hyper-parameters are, and has no public name for it.
    name = vars(module).get("_hparams_name")
    if name is not None:
        entries[module.CHECKPOINT_HYPER_PARAMS_NAME] = name
    if isinstance(hparams, dict):
        entries[module.CHECKPOINT_HYPER_PARAMS_KEY] = {**hparams, **as_configured(module, configured)}
    else:
        # A container of OmegaConf, which Lightning makes again by its type.
        entries[module.CHECKPOINT_HYPER_PARAMS_KEY] = hparams
        entries[module.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    return entries


def as_configured(module: LightningModule, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects among the hyper-parameters of a module as a configuration has them.

    With them come the keys by which Lightning makes the objects again, if there is such an object.

    Args:
        module: The module.
        configured: The client as a configuration names it, or an empty mapping.
    """
    named = configuration_of(type(module), configured)
    arguments: Mapping[str, Any] = named.get("init_args") or {}
    values: dict[str, Any] = {}
    for name, value in module.hparams.items():
        if name in arguments and not is_plain(value):
            values[name] = arguments[name]
    if not values:
        return {}
    package = lightning_base(type(module)).__module__.partition(".core.")[0]
    return {**values, "_class_path": named["class_path"], "_instantiator": f"{package}.cli.instantiate_module"}


def configuration_of(kind: type, configured: Any) -> Mapping[str, Any]:
    """Return the part of a configuration that names a class, or an empty mapping.

    Args:
        kind: The class.
        configured: The configuration.
    """
    if not isinstance(configured, Mapping):
        return {}
    if "class_path" in configured and class_name(configured["class_path"]) == class_name(kind):
        return configured
    for value in configured.values():
        found = configuration_of(kind, value)
        if found:
            return found
    return {}


def arguments_of(module: LightningModule) -> dict[str, Any]:
    """Return the arguments of a client module that are its attributes, by name. Those of its bases come first."""
    values: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if not issubclass(kind, ClientModule):
            continue
        for parameter in inspect.signature(kind.__init__).parameters.values():
            has_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if has_name and hasattr(module, parameter.name):
                values[parameter.name] = getattr(module, parameter.name)
    return values


def is_writable(value: Any) -> bool:
    """Return True if a value can be pickled."""
    if is_readable(value):
        return True
    try:
        torch.save(value, BytesIO())
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return False
    return True
