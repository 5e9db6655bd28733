"""Forwards the Trainer's hooks to the client's modules: Lightning calls only the fitted module's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from pytorch_lightning import Callback, LightningModule

from fl_lightning.client.checkpoint_io import CheckedLoading
from fl_lightning.client.hooks import BATCH_HOOKS, EVALUATION_HOOKS, hooks, overridden, own_hook, written_hooks
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.utils.settings import as_list


def forwards(name: str) -> Callable[..., None]:
    """Make a hook that calls the modules' hooks of the same name, with services attached.

    Args:
        name: The name of the hook.
    """

    def hook(self: "Forwarding", *args: Any, **kwargs: Any) -> None:
        if not any(argument is EMPTY_BATCH for argument in args):
            self.forward_hook(name, *args, **kwargs)

    return hook


class Forwarding(CheckedLoading):
    """Forwards its hooks to the `client_modules`, with the services of `services_of` attached.

    Attributes:
        batch_hooks: Hooks on batches of the callbacks that the modules make, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forwarded: dict[str, list[Callable[..., Any]]] = {}
        self.batch_hooks: dict[str, list[Callable[..., None]]] = {}
        self._evaluation_hooks: dict[str, list[Callable[..., None]]] = {}
        """Hooks of evaluations of the callbacks that the modules make, by name."""

    def client_modules(self) -> list[LightningModule]:
        """Return the modules whose hooks are called."""
        raise AttributeError("client_modules must be given by the subclass")

    def services_of(self, hook: str) -> ClientServices:
        """Return the services that are attached while a hook runs.

        Args:
            hook: The name of the hook.
        """
        raise AttributeError("services_of must be given by the subclass")

    def forward_hook(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a hook of the callbacks that the modules make and of the modules, and return what each returns.

        Args:
            name: The name of the hook.
            args: The positional arguments of the hook.
            kwargs: The named arguments of the hook.
        """
        forwarded = self.forwarded_hooks(name)
        if not forwarded:
            return []
        with attach_services(self.client_modules(), self.services_of(name).methods):
            return [hook(*args, **kwargs) for hook in forwarded]

    def forwarded_hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return a hook of the callbacks that the modules make, and of the modules, in order.

        Args:
            name: The name of the hook.
        """
        if name not in self._forwarded:
            of_callbacks = [*self.batch_hooks.get(name, ()), *self._evaluation_hooks.get(name, ())]
            self._forwarded[name] = [*of_callbacks, *hooks(self.client_modules(), name)]
        return self._forwarded[name]

    def forward_to(self, module: LightningModule, name: str, *args: Any) -> bool:
        """Call a hook of one of the modules, and return whether the module overrides it.

        Args:
            module: The module.
            name: The name of the hook.
            args: The positional arguments of the hook.
        """
        hook = own_hook(module, name)
        if hook is None:
            return False
        with attach_services(self.client_modules(), self.services_of(name).methods):
            hook(*args)
        return True

    def module_callbacks(self) -> list[Callback]:
        """Return the callbacks that the modules make, and take over their hooks on batches and evaluations.

        The batches of the Trainer are rounds, so the Trainer must not call the hooks on batches. They are called for
        the batches of a client. All these hooks are called as `(trainer, module, ...)` with the module that made the
        callback, before the module's own hook.
        """
        self._forwarded.clear()
        self.batch_hooks.clear()
        self._evaluation_hooks.clear()
        makers = [module for module in self.client_modules() if overridden(module, "configure_callbacks")]
        all_callbacks: list[Callback] = []
        for module, made in zip(makers, self.forward_hook("configure_callbacks"), strict=True):
            callbacks: list[Callback] = as_list(made)
            for callback in callbacks:
                for name in written_hooks(callback, BATCH_HOOKS):
                    self.batch_hooks.setdefault(name, []).append(taken_hook(callback, name, module))
                for name in written_hooks(callback, EVALUATION_HOOKS):
                    self._evaluation_hooks.setdefault(name, []).append(taken_hook(callback, name, module))
            all_callbacks += callbacks
        return all_callbacks

    def on_validation_model_zero_grad(self) -> None:
        """Do nothing, because there are no gradients between rounds."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.forward_hook("on_validation_model_eval")

    def on_test_model_eval(self) -> None:
        super().on_test_model_eval()
        self.forward_hook("on_test_model_eval")

    def on_predict_model_eval(self) -> None:
        super().on_predict_model_eval()
        self.forward_hook("on_predict_model_eval")

    on_fit_end = forwards("on_fit_end")
    on_train_end = forwards("on_train_end")
    on_validation_start = forwards("on_validation_start")
    on_validation_end = forwards("on_validation_end")
    on_validation_epoch_start = forwards("on_validation_epoch_start")
    on_validation_batch_start = forwards("on_validation_batch_start")
    on_validation_batch_end = forwards("on_validation_batch_end")
    on_test_start = forwards("on_test_start")
    on_test_end = forwards("on_test_end")
    on_test_epoch_start = forwards("on_test_epoch_start")
    on_test_batch_start = forwards("on_test_batch_start")
    on_test_batch_end = forwards("on_test_batch_end")
    on_predict_start = forwards("on_predict_start")
    on_predict_end = forwards("on_predict_end")
    on_predict_epoch_start = forwards("on_predict_epoch_start")
    on_predict_epoch_end = forwards("on_predict_epoch_end")
    on_predict_batch_start = forwards("on_predict_batch_start")
    on_predict_batch_end = forwards("on_predict_batch_end")
    teardown = forwards("teardown")


@contextmanager
def logging_as(module: LightningModule, *, callback: Callback) -> Iterator[None]:
    """Context in which a callback logs as a module does.

    Args:
        module: The module.
        callback: The callback. The Trainer gave it the methods of the fitted module, which is the loop.
    """
    attributes = vars(callback)
    methods_of_loop: dict[str, Any] = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
    attributes.update({name: getattr(module, name) for name in methods_of_loop})
    try:
        yield
    finally:
        attributes.update(methods_of_loop)


def taken_hook(callback: Callback, name: str, module: LightningModule) -> Callable[..., None]:
    """Take over a hook of a callback, and return it for a call with a module in place of the loop.

    Args:
        callback: The callback. The Trainer's call of the hook does nothing from now on.
        name: The name of the hook.
        module: The module that made the callback.
    """
    hook = getattr(callback, name)
    if not isinstance(hook, ClientHook):
        hook = ClientHook(callback, hook)
        vars(callback)[name] = hook
    return hook.bound_to(module)


class ClientHook:
    """Calls a callback's hook `(trainer, module, ...)`, unless the Trainer calls it with the loop.

    Args:
        callback: The callback of the hook. Within the hook it logs as the module does, elsewhere as the loop.
        hook: The callback's own hook.
    """

    def __init__(self, callback: Callback, hook: Callable[..., Any]) -> None:
        self._callback = callback
        self._hook = hook

    def bound_to(self, module: LightningModule) -> Callable[..., None]:
        """Return the hook of a module, called with the Trainer that the module sees at that time."""

        def hook(*args: Any) -> None:
            self(module.trainer, module, *args)

        return hook

    def __call__(self, trainer: Any, module: LightningModule, *args: Any) -> None:
        if isinstance(module, Forwarding):
            return
        with logging_as(module, callback=self._callback):
            self._hook(trainer, module, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the copied callback's own hook: a copy of its module is trained without the loop."""
        copied: Callable[..., Any] = deepcopy(self._hook, memo)
        return copied
