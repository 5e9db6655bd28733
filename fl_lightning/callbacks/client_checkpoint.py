"""Callback that saves the trained model without the federation around it."""

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.client import ClientModule
from fl_lightning.federation.identity import is_plain
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.utils.files import DIGEST, save_with_digest


class ClientCheckpoint(Callback):
    """Writes the global model after every round, as it is evaluated, as a checkpoint of the client's own class.

    `MyModule.load_from_checkpoint("client.ckpt")` reads the file without this package. The entries have the module's
    own names, and the hyper-parameters are those that the module saved itself. For a client with `net=` they are its
    plain arguments, and the factory is given again: `FedNTD.load_from_checkpoint("client.ckpt", net=...)`. The callback
    writes nothing if the clients share no weights. In a fit without a federation it writes the fitted module after
    every epoch, in the same form.

    Args:
        dirpath: Folder of the file. None is `trainer.default_root_dir`.
        filename: Name of the checkpoint.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str = "client.ckpt") -> None:
        self.dirpath = dirpath
        self.filename = filename

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if not isinstance(pl_module, FederatedLoop):
            self._write(trainer, pl_module)
        elif pl_module.global_weights.shared:
            with pl_module.evaluation.evaluated_entries():
                self._write(trainer, pl_module.client)

    def _write(self, trainer: Trainer, client: LightningModule) -> None:
        """Write a module as it is."""
        inner = client
        prefix = ""
        wrapped = getattr(client, "module", None) if isinstance(client, ClientModule) else None
        if wrapped is not None:
            inner = wrapped
            prefix = "module."
        checkpoint: dict[str, Any] = {
            "state_dict": {name.removeprefix(prefix): value for name, value in client.state_dict().items()},
            inner.CHECKPOINT_HYPER_PARAMS_KEY: hyperparameters(inner),
            "pytorch-lightning_version": version("pytorch_lightning"),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            DIGEST: "sha256",
        }
        save_with_digest(checkpoint, Path(self.dirpath or trainer.default_root_dir, self.filename))


def hyperparameters(module: LightningModule) -> dict[str, Any]:
    """Return the plain hyper-parameters that a module saved itself, else its plain arguments."""
    values: Mapping[str, Any] = module.hparams or arguments_of(module)
    return {name: value for name, value in values.items() if is_plain(value)}


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
