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

    `MyModule.load_from_checkpoint("client.ckpt")` reads it without this package: the entries have the module's own
    names and the hyper-parameters are those that it saved itself. For a client with `net=` they are its plain
    arguments, and the factory is given again: `FedNTD.load_from_checkpoint("client.ckpt", net=...)`. Nothing is
    written where clients share no weights. Of a fit without a federation it writes the fitted module after every epoch,
    in the same form.

    Args:
        dirpath: folder of the file; None: `trainer.default_root_dir`.
        filename: of the checkpoint.
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
        inner = getattr(client, "module", None) if isinstance(client, ClientModule) else None
        prefix, inner = ("", client) if inner is None else ("module.", inner)
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
    """Collect the hyper-parameters that `module` saved itself, else its arguments, of both only plain values."""
    arguments: Mapping[str, Any] = module.hparams
    if not arguments:
        kinds = [kind for kind in reversed(type(module).__mro__) if issubclass(kind, ClientModule)]
        parameters = [p for kind in kinds for p in inspect.signature(kind.__init__).parameters.values()]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        arguments = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return {name: value for name, value in arguments.items() if is_plain(value)}
