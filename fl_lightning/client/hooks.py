"""The client's Lightning hooks that are called in the Trainer's place, and those that must be refused."""

from collections.abc import Callable, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.utils.packages import lightning_base
from fl_lightning.utils.signatures import check_call, positional

STEP_HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
)  # fmt: skip
"""Hooks that are about a batch of training, or a step on one."""

BATCH_HOOKS = (
    *STEP_HOOKS, "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end",
    "on_predict_batch_start", "on_predict_batch_end",
)  # fmt: skip
"""Hooks of callbacks that are about a batch, or a step on one."""

FORWARDED = frozenset({
    *BATCH_HOOKS, "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_model_eval", "on_test_start", "on_test_end", "on_test_epoch_start",
    "on_test_epoch_end", "on_test_model_eval", "on_predict_start", "on_predict_end", "on_predict_epoch_start",
    "on_predict_epoch_end", "on_predict_model_eval", "setup", "teardown", "configure_model",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_save_checkpoint",
    "on_load_checkpoint",
})  # fmt: skip

SHIPPED = ("pytorch_lightning.", "lightning.pytorch.", "fl_lightning.")

IGNORED = ("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
"""Hooks of a module that a data module takes the place of."""

INSTEAD = {
    "configure_sharded_model": "use configure_model",
    "on_validation_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_test_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_validation_model_zero_grad": "gradients are None whenever the global model is evaluated",
}


def overridden(module: object, name: str, base: type | None = None) -> bool:
    """Return True where the object, or its class, has a `name` other than that of `base`, else of Lightning's class."""
    method = getattr(module, name, None)
    plain = getattr(base or lightning_base(type(module)), name, None)
    return method is not None and getattr(method, "__func__", method) is not plain


def hooks(modules: Sequence[LightningModule], name: str) -> list[Callable[..., Any]]:
    """The bound methods `name` of the modules that override it, in order."""
    return [getattr(module, name) for module in modules if overridden(module, name)]


def own_hook(module: LightningModule, name: str) -> Callable[..., Any] | None:
    """The bound method `name` of a module that overrides it, else None."""
    return next(iter(hooks([module], name)), None)


def hooks_on_batches(callback: Callback) -> list[str]:
    """Name the `BATCH_HOOKS` that a callback has of its author, and that are no part of a callback of Lightning's.

    >>> from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
    >>> hooks_on_batches(LambdaCallback(on_train_batch_end=print)), hooks_on_batches(ModelCheckpoint())
    (['on_train_batch_end'], [])
    """
    names = []
    for name in BATCH_HOOKS:
        owners = [base for base in type(callback).__mro__ if name in vars(base)]
        shipped = [base for base in owners if base.__module__.startswith(SHIPPED)]
        written = owners[:1] != shipped[:1] and all(base.__name__ == "Callback" for base in shipped)
        if name in vars(callback) or written:
            names.append(name)
    return names


def check_hook(module: LightningModule, name: str, hook: Callable[..., Any]) -> None:
    """Refuse a hook of Lightning's that cannot be called as Lightning calls it, without or with all its arguments.

    Raises:
        TypeError: naming the hook and its right arguments.
    """
    contract = getattr(lightning_base(type(module)), name, None)
    try:
        check_call(f"{type(module).__name__}.{name}", hook, positional(contract), of_object=True)
    except TypeError:
        check_call(f"{type(module).__name__}.{name}", hook, positional(contract, required=True), of_object=True)


def refuse_unforwarded(module: LightningModule) -> None:
    """Refuse a module with a hook that is not called inside a round, or cannot be.

    Name loaders, which are not read.

    Raises:
        TypeError: naming the hook and what to do instead.
    """
    known = {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind) if name[0] != "_"}
    if names := [name for name in IGNORED if overridden(module, name)]:
        rank_zero_info(
            f"{', '.join(names)} of {type(module).__name__} {'is' if len(names) == 1 else 'are'} not called: the data "
            f"come from the FederatedDataModule"
        )
    for name in sorted(FORWARDED):
        if (hook := own_hook(module, name)) is not None:
            check_hook(module, name, hook)
    for name in sorted(known - FORWARDED - set(IGNORED)):
        if overridden(module, name):
            raise TypeError(
                f"{type(module).__name__} overrides {name}, which is not called inside a federated round; "
                f"{INSTEAD.get(name, 'move its work to a hook that is forwarded, or to a callback')}"
            )
