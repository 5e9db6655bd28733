"""The optimizer and the scheduler that a client is given for its LightningModule, as by LightningCLI's sections."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_lightning import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.types import OptimizerFactory

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes the scheduler of an optimizer."""


def set_optimizers(module: LightningModule, optimizer: OptimizerFactory, lr_scheduler: SchedulerFactory | None) -> None:
    """Put an optimizer and a scheduler in the place of a module's `configure_optimizers`.

    They are set on the module itself, as LightningCLI does, so that everything that asks the module gets them.

    Args:
        module: The module.
        optimizer: The factory of the optimizer.
        lr_scheduler: The factory of its scheduler. None: the rate is constant.
    """
    # A partial, and not a method: it is copied and pickled with the module.
    settable: Any = module
    settable.configure_optimizers = partial(configured, module, optimizer=optimizer, lr_scheduler=lr_scheduler)


def configured(module: LightningModule, optimizer: OptimizerFactory, lr_scheduler: SchedulerFactory | None) -> Any:
    """Return what LightningCLI makes `configure_optimizers` of a module return for these factories.

    Args:
        module: The module.
        optimizer: The factory of the optimizer.
        lr_scheduler: The factory of its scheduler, or None.
    """
    made = optimizer(module.parameters())
    if lr_scheduler is None:
        return made
    # It imports jsonargparse, which a client without a scheduler does not need.
    from pytorch_lightning.cli import LightningCLI  # noqa: PLC0415

    return LightningCLI.configure_optimizers(module, optimizer=made, lr_scheduler=lr_scheduler(made))
