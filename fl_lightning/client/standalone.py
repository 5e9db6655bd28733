"""Support for a client under a plain Trainer, outside a federation."""

from contextlib import ExitStack
from inspect import isgeneratorfunction
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from fl_lightning.aggregation import ServerModule
from fl_lightning.client.context import ClientContext
from fl_lightning.client.services import TRAINER_SERVICES, BatchTransfer, attach_services
from fl_lightning.data import DatasetSource, FederatedDataModule
from fl_lightning.types import CONDITIONS, Broadcast, ClientData, Phase
from fl_lightning.utils.packages import lightning_base

HOOKS = (
    "on_",
    "optimizer_",
    "lr_scheduler_",
    "configure_",
    "setup",
    "teardown",
    "prepare_data",
    "transfer_",
    "backward",
)
"""Beginnings of the names of hooks. A Trainer calls hooks only in the fitted module."""

NOT_HOOKS = ("configure_optimizers", "configure_model")
"""Names with such a beginning that a ClientModule calls in the module that it is built around."""


class StandaloneClient(Callback):
    """Replaces the federation by one client, whose broadcast is its own starting weights.

    The client's data are those of the train dataloader. Its `receive` is called once, when the fit starts.

    Raises:
        ValueError: The method needs a part of a federation. The error is raised when the fit starts.
    """

    def __init__(self) -> None:
        self._attached = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_alone(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        client: Any = pl_module
        local = view_of_loader(trainer, client)
        client.fix_trainable()
        received = {name: value.detach().clone() for name, value in client.params().items()}
        context = ClientContext(
            client_id=0,
            start=received,
            trainable=tuple(received),
            weights_token=object(),
        )
        client.begin(context)
        self._connect(trainer, client)
        if client.module is not None:
            methods = {name: getattr(client, name) for name in TRAINER_SERVICES}
            self._attached.enter_context(attach_services([client.module], methods))
        if client.is_fedavg_equivalent:
            self._attached.enter_context(attach_services([client], {"training_step": client.local_loss}))
            return
        broadcast = Broadcast(round_idx=0, exchange=client.exchanges[0], weights=received)
        with torch.enable_grad():
            client.receive(broadcast, local)

    def _connect(self, trainer: Trainer, client: Any) -> None:
        """Let the client use the Trainer's precision and the user's transfer hooks."""
        precision = trainer.precision_plugin
        transfer = BatchTransfer(
            modules=client.lightning_modules(),
            device=client.device,
            precision=precision,
            datamodule=getattr(trainer, "datamodule", None),
        )
        client.connect(precision.forward_context, transfer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        client: Any = pl_module
        progress = client.context.progress
        new_steps = trainer.global_step - progress.num_steps
        progress.move(new_steps, accumulated_lr=float("nan"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the services and the precision back."""
        client: Any = pl_module
        self._attached.close()
        client.disconnect()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, stage="fit")


def view_of_loader(trainer: Trainer, client: Any) -> ClientData:
    """Return the samples of the Trainer's dataloader, as those of the only client.

    Args:
        trainer: The Trainer.
        client: The ClientModule.

    Raises:
        ValueError: The Trainer was given no DataLoader.
    """
    loader = trainer.train_dataloader
    if isinstance(getattr(trainer, "datamodule", None), FederatedDataModule) or not isinstance(loader, DataLoader):
        raise ValueError(
            f"{type(client).__name__} alone trains on the batches of a DataLoader, got {type(loader).__name__}; "
            f"give the Trainer one, or fit a FederatedLoop(client=...)"
        )
    source = DatasetSource(loader.dataset, num_classes=client.num_classes)
    data = FederatedDataModule(source, num_clients=1, batch_size=loader.batch_size)
    data.setup("fit")
    return data.view(0, 0)


def refuse_alone(client: Any) -> None:
    """Refuse a method that needs a server, or hooks that a plain Trainer would not call.

    Args:
        client: The ClientModule.

    Raises:
        ValueError: The method needs a part of a federation, or the module in the client has a hook. The sentence names
            it.
    """
    name = type(client).__name__
    needs = needs_of_federation(client)
    if needs:
        raise ValueError(
            f"{name} needs a federation ({', '.join(needs)}), got a plain Trainer; fit "
            f"FederatedLoop(client={name}(...))"
        )
    if client.module is None:
        return
    kind = type(client.module)
    hooks = overridden_hooks(kind)
    if hooks:
        raise ValueError(
            f"{kind.__name__} overrides {hooks[0]}, which is not called inside {name} under a plain Trainer; fit "
            f"{kind.__name__} itself, or FederatedLoop(client={name}(module=...))"
        )


def needs_of_federation(client: Any) -> list[str]:
    """Name the parts of a federation that a client's method needs.

    Args:
        client: The ClientModule.
    """
    if client.is_fedavg_equivalent:
        return []
    server = client.server_class
    conditions = client.needs | server.needs
    needs = [f"the split {split!r}" for split in sorted(conditions - CONDITIONS)]
    if "accumulated_lr" in conditions:
        needs.append("the accumulated lr of its optimizer")
    if client.is_private:
        needs.append("the draws and accounts of its guarantee")
    if len(client.exchanges) > 1:
        needs.append("several exchanges a round")
    if server.broadcast is not ServerModule.broadcast:
        needs.append(f"what {server.__name__} sends")
    if isgeneratorfunction(client.phases) or list(client.phases(client.exchanges[0])) != [Phase()]:
        needs.append("training in phases")
    return needs


def overridden_hooks(kind: type[LightningModule]) -> list[str]:
    """Return the names of the hooks that a class overrides and that only a Trainer calls."""
    base = lightning_base(kind)
    hooks = []
    for name in dir(kind):
        is_hook = name.startswith(HOOKS) and name not in NOT_HOOKS
        if is_hook and getattr(kind, name) is not getattr(base, name, None):
            hooks.append(name)
    return hooks
