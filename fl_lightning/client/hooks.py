"""Hooks of Lightning: the hooks that the loop calls in the Trainer's place, and the hooks that must be refused."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.utils.packages import LIGHTNING, lightning_base
from fl_lightning.utils.signatures import check_call, positional

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks about a batch of training, or about a step on one."""

BATCH_HOOKS = (
    *STEP_HOOKS,
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)
"""Hooks of callbacks about a batch, or about a step on one."""

EVALUATION_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_end",
)
"""Hooks of callbacks about a pass over samples that evaluates a module."""

FORWARDED = frozenset(
    {
        *BATCH_HOOKS,
        "on_fit_start",
        "on_fit_end",
        "on_train_start",
        "on_train_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_validation_model_eval",
        "on_test_start",
        "on_test_end",
        "on_test_epoch_start",
        "on_test_epoch_end",
        "on_test_model_eval",
        "on_predict_start",
        "on_predict_end",
        "on_predict_epoch_start",
        "on_predict_epoch_end",
        "on_predict_model_eval",
        "setup",
        "teardown",
        "configure_model",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "on_save_checkpoint",
        "on_load_checkpoint",
    }
)
"""Hooks of a client's modules that are called in the Trainer's place."""

SHIPPED = (*LIGHTNING, "fl_lightning.")
"""First parts of the names of modules whose callbacks are not of the user's own."""

IGNORED = ("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
"""Hooks of a module that a data module replaces."""

INSTEAD = {
    "configure_sharded_model": "use configure_model",
    "on_validation_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_test_model_train": "modes are restored after evaluation; set others in on_train_epoch_start",
    "on_validation_model_zero_grad": "gradients are None whenever the global model is evaluated",
}
"""What to do in the place of a hook that is refused, by the name of the hook."""


def overridden(module: object, name: str, base: type | None = None) -> bool:
    """Return True if an object or its class has a method `name` other than the base's.

    Args:
        module: The object.
        name: Name of the method.
        base: The class whose method is not an override. None is Lightning's class of the object.
    """
    method = getattr(module, name, None)
    inherited = getattr(base or lightning_base(type(module)), name, None)
    return method is not None and getattr(method, "__func__", method) is not inherited


def hooks(modules: Sequence[LightningModule], name: str) -> list[Callable[..., Any]]:
    """Return the bound methods `name` of the modules that override it, in order."""
    return [getattr(module, name) for module in modules if overridden(module, name)]


def own_hook(module: LightningModule, name: str) -> Callable[..., Any] | None:
    """Return the bound method `name` of a module that overrides it, or None."""
    return getattr(module, name) if overridden(module, name) else None


def written_hooks(callback: Callback, names: Iterable[str]) -> list[str]:
    """Return the names of the hooks that the user has written into a callback.

    The hooks of a callback of Lightning's are not the user's.

    Args:
        callback: The callback.
        names: Names of the hooks that are asked for.

    >>> from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
    >>> written_hooks(LambdaCallback(on_train_batch_end=print), BATCH_HOOKS)
    ['on_train_batch_end']
    >>> written_hooks(ModelCheckpoint(), BATCH_HOOKS)
    []
    """
    return [name for name in names if name in vars(callback) or is_written(type(callback), name)]


def is_written(kind: type[Callback], name: str) -> bool:
    """Return True if the user has written the hook `name` of a callback's class.

    A hook that overrides the one of a callback of Lightning's is taken for a part of that callback.
    """
    owners = [base for base in kind.__mro__ if name in vars(base)]
    shipped = [base for base in owners if base.__module__.startswith(SHIPPED)]
    if owners[:1] == shipped[:1]:
        return False
    return all(base.__name__ == "Callback" for base in shipped)


def check_hook(module: LightningModule, name: str, hook: Callable[..., Any]) -> None:
    """Refuse a hook that takes neither all arguments that Lightning gives it, nor the required ones.

    Raises:
        TypeError: The hook takes other arguments.
    """
    contract = getattr(lightning_base(type(module)), name, None)
    full_name = f"{type(module).__name__}.{name}"
    try:
        check_call(full_name, hook, positional(contract), of_object=True)
    except TypeError:
        check_call(full_name, hook, positional(contract, required=True), of_object=True)


def refuse_unforwarded(module: LightningModule) -> None:
    """Refuse a module with a hook that is not called inside a round, or cannot be called.

    Its loaders are only named in a message, because they are not read.

    Raises:
        TypeError: The module has such a hook.
    """
    name_loaders(module)
    for name in sorted(FORWARDED):
        hook = own_hook(module, name)
        if hook is not None:
            check_hook(module, name, hook)
    for name in sorted(lightning_hooks() - FORWARDED - set(IGNORED)):
        if overridden(module, name):
            raise TypeError(
                f"{type(module).__name__} overrides {name}, which is not called inside a federated round; "
                f"{INSTEAD.get(name, 'move its work to a hook that is forwarded, or to a callback')}"
            )


def name_loaders(module: LightningModule) -> None:
    """Report the loaders of a module, which are not called."""
    loaders = [name for name in IGNORED if overridden(module, name)]
    if loaders:
        verb = "is" if len(loaders) == 1 else "are"
        rank_zero_info(
            f"{', '.join(loaders)} of {type(module).__name__} {verb} not called: the data come from the "
            f"FederatedDataModule"
        )


def lightning_hooks() -> set[str]:
    """Return the names of all hooks that Lightning's modules have."""
    names = set[str]()
    for kind in (ModelHooks, DataHooks, CheckpointHooks):
        names.update(name for name in vars(kind) if not name.startswith("_"))
    return names
