"""Callbacks under a Trainer that fits a module without a federation around it."""

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn


def warn_of_plain_fit(callback: Callback, pl_module: LightningModule) -> None:
    """Warn that a callback of the federation has nothing to do in this fit."""
    name = type(callback).__name__
    module = type(pl_module).__name__
    rank_zero_warn(
        f"{name} does nothing here: it follows the clients of a FederatedLoop, got a fit of {module}; fit "
        f"FederatedLoop(client={module}(...)), or leave {name} out",
        category=UserWarning,
    )


def epoch_values(trainer: Trainer) -> dict[str, float]:
    """Return the values that a module has logged in an epoch, those of its validation among them."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
