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
"""Beginnings of the names of hooks, which a Trainer calls in the fitted module only."""

NOT_HOOKS = ("configure_optimizers", "configure_model")
"""Those that a ClientModule calls in the module that it is built around."""


class StandaloneClient(Callback):
    """Callback that replaces the federation by one client, whose broadcast is its own starting weights.

    The client's data are those of the train dataloader, its `receive` is called once, when the fit starts.

    Raises:
        ValueError: when the fit starts, if the method needs what only a federation has.
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
        client.begin(ClientContext(0, received, tuple(received), weights_token=object()))
        plugin = trainer.precision_plugin
        datamodule = getattr(trainer, "datamodule", None)
        transfer = BatchTransfer(client.lightning_modules(), client.device, plugin, datamodule)
        client.connect(plugin.forward_context, transfer)
        if client.module is not None:
            methods = {name: getattr(client, name) for name in TRAINER_SERVICES}
            self._attached.enter_context(attach_services([client.module], methods))
        if client.is_fedavg_equivalent:
            self._attached.enter_context(attach_services([client], {"training_step": client.local_loss}))
            return
        with torch.enable_grad():
            client.receive(Broadcast(0, client.exchanges[0], received), local)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        client: Any = pl_module
        progress = client.context.progress
        progress.move(trainer.global_step - progress.num_steps, float("nan"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take services and precision back."""
        client: Any = pl_module
        self._attached.close()
        client.disconnect()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def view_of_loader(trainer: Trainer, client: Any) -> ClientData:
    """Make the samples of the Trainer's dataloader those of the only client.

    Raises:
        ValueError: if it is no DataLoader.
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
        client: a ClientModule.

    Raises:
        ValueError: naming what the method needs.
    """
    name = type(client).__name__
    server = client.server_class
    needs = client.needs | server.needs
    lacks = [f"the split {split!r}" for split in sorted(needs - CONDITIONS)]
    lacks += ["the accumulated lr of its optimizer"] if "accumulated_lr" in needs else []
    lacks += ["the draws and accounts of its guarantee"] if client.is_private else []
    lacks += ["several exchanges a round"] if len(client.exchanges) > 1 else []
    lacks += [f"what {server.__name__} sends"] if server.broadcast is not ServerModule.broadcast else []
    in_phases = isgeneratorfunction(client.phases) or list(client.phases(client.exchanges[0])) != [Phase()]
    lacks += ["training in phases"] if in_phases else []
    if lacks:
        raise ValueError(
            f"{name} needs a federation ({', '.join(lacks)}), got a plain Trainer; fit "
            f"FederatedLoop(client={name}(...))"
        )
    if client.module is None:
        return
    inner = type(client.module)
    hooks = [hook for hook in dir(inner) if hook.startswith(HOOKS) and hook not in NOT_HOOKS]
    lost = [hook for hook in hooks if getattr(inner, hook) is not getattr(lightning_base(inner), hook, None)]
    if lost:
        raise ValueError(
            f"{inner.__name__} overrides {lost[0]}, which is not called inside {name} under a plain Trainer; fit "
            f"{inner.__name__} itself, or FederatedLoop(client={name}(module=...))"
        )
