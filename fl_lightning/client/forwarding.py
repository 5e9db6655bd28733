"""Hands the Trainer's hooks on to the client's modules, which stock Lightning calls for the fitted module only."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_lightning import Callback, LightningModule

from fl_lightning.client.checkpoint_io import CheckedLoading
from fl_lightning.client.hooks import hooks, hooks_on_batches, overridden
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.utils.settings import as_list


def forwards(name: str) -> Callable[..., None]:
    """Make a hook that calls the clients' hooks of that name, with the logging services attached."""

    def hook(self: "Forwarding", *args: Any, **kwargs: Any) -> None:
        if not any(argument is EMPTY_BATCH for argument in args):
            self.forward_hook(name, *args, **kwargs)

    return hook


class Forwarding(CheckedLoading):
    """A LightningModule that forwards its hooks to `client_modules`, with the services of `services_of` attached."""

    def __init__(self) -> None:
        super().__init__()
        self._forwarded: dict[str, list[Callable[..., Any]]] = {}
        self.batch_hooks: dict[str, list[Callable[..., None]]] = {}
        """Hooks on batches of the callbacks that the modules make, by name."""

    def client_modules(self) -> list[LightningModule]:
        """List the modules whose hooks are called."""
        raise AttributeError("client_modules must be given by the subclass")

    def services_of(self, hook: str) -> ClientServices:
        """Services that are attached while the hook of that name runs."""
        raise AttributeError("services_of must be given by the subclass")

    def forward_hook(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the hook `name` of the modules that override it."""
        if name not in self._forwarded:
            self._forwarded[name] = [*self.batch_hooks.get(name, ()), *hooks(self.client_modules(), name)]
        if not self._forwarded[name]:
            return []
        with attach_services(self.client_modules(), self.services_of(name).methods):
            return [hook(*args, **kwargs) for hook in self._forwarded[name]]

    def module_callbacks(self) -> list[Callback]:
        """Ask the modules for their callbacks.

        Their hooks on batches are taken over, since the Trainer's are rounds.

        These are called as `(trainer, module, ...)` of the module that made the callback, before its own of the name.
        """
        self._forwarded.clear()
        self.batch_hooks.clear()
        asked = [module for module in self.client_modules() if overridden(module, "configure_callbacks")]
        made = [*zip(asked, self.forward_hook("configure_callbacks"), strict=True)]
        pairs = [(module, callback) for module, callbacks in made for callback in as_list(callbacks)]
        for module, callback in pairs:
            for name in hooks_on_batches(callback):
                hook = getattr(callback, name)
                if not isinstance(hook, NotOfTheLoop):
                    vars(callback)[name] = hook = NotOfTheLoop(callback, hook)
                self.batch_hooks.setdefault(name, []).append(partial(hook, self.trainer, module))
        return [callback for _, callback in pairs]

    def on_validation_model_zero_grad(self) -> None:
        """Do nothing: there are no gradients between rounds."""

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


class NotOfTheLoop:
    """A callback's hook `(trainer, module, ...)` that does nothing when the Trainer calls it with the loop.

    Args:
        callback: whose hook it is; within it the callback logs as the module does, elsewhere as the loop.
        hook: the callback's own.
    """

    def __init__(self, callback: Callback, hook: Callable[..., Any]) -> None:
        self._callback = callback
        self._hook = hook

    def __call__(self, trainer: Any, module: LightningModule, *args: Any) -> None:
        if isinstance(module, Forwarding):
            return
        attributes = vars(self._callback)
        before: dict[str, Any] = {n: attributes[n] for n in ("log", "log_dict") if n in attributes}  # the Trainer's
        attributes.update({name: getattr(module, name) for name in before})
        try:
            self._hook(trainer, module, *args)
        finally:
            attributes.update(before)
