"""Hands the Trainer's hooks on to the client's modules, which stock Lightning calls for the fitted module only."""

from collections.abc import Callable
from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client.checkpoint_io import CheckedLoading
from fl_lightning.client.hooks import hooks
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data.loaders import EMPTY_BATCH


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

    def client_modules(self) -> list[LightningModule]:
        """List the modules whose hooks are called."""
        raise AttributeError("client_modules must be given by the subclass")

    def services_of(self, hook: str) -> ClientServices:
        """Services that are attached while the hook of that name runs."""
        raise AttributeError("services_of must be given by the subclass")

    def forward_hook(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the hook `name` of the modules that override it."""
        found = self._forwarded.get(name)
        if found is None:
            found = self._forwarded[name] = hooks(self.client_modules(), name)
        if not found:
            return []
        with attach_services(self.client_modules(), self.services_of(name).methods):
            return [hook(*args, **kwargs) for hook in found]

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
    on_validation_end = forwards("on_validation_end")
    on_validation_epoch_start = forwards("on_validation_epoch_start")
    on_validation_batch_start = forwards("on_validation_batch_start")
    on_validation_batch_end = forwards("on_validation_batch_end")
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
