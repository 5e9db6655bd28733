"""What is asked of a LightningModule before it can be a client."""

import inspect
from collections.abc import Callable
from typing import Any

from pytorch_lightning import LightningModule


def check_module(module: object) -> None:
    """Refuse what cannot be a client.

    Raises:
        TypeError: if `module` is no `pytorch_lightning.LightningModule`, has no `training_step` of its own or one
            that draws its own batches, or a `state_dict` that cannot be called for a part of another module.
    """
    kind: Any = type(module)
    if not isinstance(module, LightningModule):
        twin = any(base.__module__.startswith("lightning.") for base in kind.__mro__)
        remedy = (
            "it comes from the twin package `lightning`: import LightningModule from pytorch_lightning"
            if twin
            else "derive it from pytorch_lightning.LightningModule"
        )
        raise TypeError(f"a client must be a pytorch_lightning.LightningModule, got {kind.__name__}; {remedy}")
    if kind.training_step is LightningModule.training_step:
        raise TypeError(
            f"a client needs a training_step, and {kind.__name__} has none; define training_step(batch, batch_idx) "
            f"returning the loss"
        )
    if "dataloader_iter" in inspect.signature(kind.training_step).parameters:
        raise TypeError(
            f"{kind.__name__}.training_step takes dataloader_iter, but the batches of a client are drawn for it; "
            f"take (batch, batch_idx)"
        )
    arguments = inspect.signature(kind.state_dict).parameters
    if "prefix" not in arguments and all(p.kind is not p.VAR_KEYWORD for p in arguments.values()):
        raise TypeError(
            f"{kind.__name__}.state_dict must take torch's arguments, since the module is part of another one; define "
            f"state_dict(self, *args, **kwargs) and hand them on"
        )


def num_arguments(step: Callable[..., Any]) -> int:
    """How many positional arguments a step takes, of at most three: batch, its index, its dataloader's index.

    >>> num_arguments(lambda batch: batch), num_arguments(lambda batch, batch_idx: batch), num_arguments(print)
    (1, 2, 3)
    """
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in positional for kind in kinds)
