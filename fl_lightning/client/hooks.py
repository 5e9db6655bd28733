"""The client's Lightning hooks that are called in the Trainer's place, and those that must be refused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor

FORWARDED = frozenset({
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval",
    "on_test_start", "on_test_end",
    "on_test_epoch_start", "on_test_epoch_end", "on_test_batch_start", "on_test_batch_end", "on_test_model_eval",
    "on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end",
    "on_predict_batch_start", "on_predict_batch_end", "on_predict_model_eval", "setup", "teardown", "configure_model",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_save_checkpoint",
    "on_load_checkpoint",
})  # fmt: skip

INSTEAD = {
    "train_dataloader": "give the data to FederatedDataModule",
    "val_dataloader": "give the data to FederatedDataModule",
    "test_dataloader": "give the data to FederatedDataModule",
    "predict_dataloader": "give the data to FederatedDataModule",
    "prepare_data": "put it in the data module",
    "configure_sharded_model": "use configure_model",
    "on_validation_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_test_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_validation_model_zero_grad": "gradients are None whenever the global model is evaluated",
}


def overridden(module: LightningModule, name: str, base: type = LightningModule) -> bool:
    """True where the module, or its class, has a `name` other than that of `base`."""
    own = getattr(module, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, name, None)


def hooks(modules: Sequence[LightningModule], name: str) -> list[Callable[..., Any]]:
    """The bound methods `name` of the modules that override it, in order."""
    return [getattr(module, name) for module in modules if overridden(module, name)]


def refuse_unforwarded(module: LightningModule) -> None:
    """Refuse a module with a hook that nobody would call.

    Raises:
        TypeError: naming the hook and what to do instead.
    """
    known = {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind) if name[0] != "_"}
    for name in sorted(known - FORWARDED):
        if overridden(module, name):
            raise TypeError(
                f"{type(module).__name__} overrides {name}, which is not called inside a federated round; "
                f"{INSTEAD.get(name, 'move its work to a hook that is forwarded, or to a callback')}"
            )


class BatchTransfer:
    """Puts batches on the device and in the Trainer's precision, through the client's own transfer hooks.

    Args:
        modules: the client and the module in it.
        device: where batches belong.
        precision: the Trainer's precision plugin; None: 32-true.
        datamodule: the user's own, whose transfer hooks go before the module's, as in Lightning; or None.

    Attributes:
        hooked: whether a hook of the user's may change a batch.
    """

    def __init__(
        self,
        modules: Sequence[LightningModule],
        device: torch.device,
        precision: Precision | None = None,
        datamodule: LightningDataModule | None = None,
    ) -> None:
        self._precision, self._device = precision or Precision(), device

        def of_data(name: str) -> bool:
            return getattr(type(datamodule), name, None) not in (None, getattr(DataHooks, name))

        names = ("on_before_batch_transfer", "transfer_batch_to_device")
        self._before, self._transfer = (getattr(datamodule if of_data(n) else modules[-1], n) for n in names)
        self._transfers = any(of_data(name) or overridden(modules[-1], name) for name in names)
        after = "on_after_batch_transfer"
        self._after = [getattr(datamodule, after)] if of_data(after) else hooks(modules, after)
        self.hooked = self._transfers or bool(self._after)

    def __call__(self, batch: Any) -> Any:
        there = type(batch) is tuple and isinstance(batch[0], Tensor) and batch[0].device == self._device
        if self._transfers or not there:
            batch = self._before(batch, 0)
            batch = self._transfer(batch, self._device, 0)
        for hook in self._after:
            batch = hook(batch, 0)
        return self._precision.convert_input(batch)
