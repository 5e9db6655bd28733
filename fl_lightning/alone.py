"""A client outside a federation: its own loss under a plain Trainer, as any other LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from fl_lightning.aggregation import Aggregator
from fl_lightning.data import DatasetSource, FederatedDataModule
from fl_lightning.types import Broadcast

if TYPE_CHECKING:
    from fl_lightning.client import ClientModule

BORROWED = ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients")
NOT_HOOKS = ("training_step", "configure_optimizers", "configure_model", "forward")


class Alone(Callback):
    """Stands in for the federation: one client, whose broadcast is its own starting weights.

    The client's data are those of the train dataloader, its `receive` is called once, when the fit starts.

    Raises:
        ValueError: when the fit starts, if the method needs what only a federation has.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse(pl_module)  # type: ignore[arg-type]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        loader = trainer.train_dataloader
        if isinstance(getattr(trainer, "datamodule", None), FederatedDataModule) or not isinstance(loader, DataLoader):
            raise ValueError(
                f"{type(module).__name__} alone trains on the batches of a DataLoader, got {type(loader).__name__}; "
                f"give the Trainer one, or fit a FederatedLoop(client=...)"
            )
        data = FederatedDataModule(
            DatasetSource(loader.dataset, num_classes=module.num_classes), num_clients=1, batch_size=loader.batch_size
        )
        data.setup("fit")
        module.fix_trainable()
        received = {name: value.detach().clone() for name, value in module.params().items()}
        context = type(module.context)(0, received, weights_key=(object(),))
        module.switch(context)
        if module.module is not None:
            for name in BORROWED:
                module.module.__dict__[name] = getattr(module, name)
        local = data.view(0, 0)
        module.receive(Broadcast(0, module.exchanges[0], received), local)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module: Any = pl_module
        module.context.num_steps = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        inner: Any = pl_module.module
        for name in BORROWED if inner is not None else ():
            inner.__dict__.pop(name, None)


def refuse(module: ClientModule) -> None:
    """Refuse what makes no sense without a server.

    Raises:
        ValueError: naming what the method needs.
    """
    name, kind = type(module).__name__, module.aggregator_class
    lacks = [f"the split {split!r}" for split in sorted(module.needs - {"logits"})]
    lacks += ["several exchanges a round"] if len(module.exchanges) > 1 else []
    lacks += [f"what {kind.__name__} sends"] if kind.broadcast is not Aggregator.broadcast else []
    if lacks:
        raise ValueError(
            f"{name} needs a federation ({', '.join(lacks)}), got a plain Trainer; fit "
            f"FederatedLoop(client={name}(...))"
        )
    if module.module is None:
        return
    inner = type(module.module)
    own = [hook for hook in dir(inner) if hook.startswith(("on_", "optimizer_", "lr_scheduler_", "configure_"))]
    lost = [h for h in own if h not in NOT_HOOKS and getattr(inner, h) is not getattr(LightningModule, h, None)]
    if lost:
        raise ValueError(
            f"{inner.__name__} overrides {lost[0]}, which is not called inside {name} under a plain Trainer; fit "
            f"{inner.__name__} itself, or FederatedLoop(client={name}(module=...))"
        )
