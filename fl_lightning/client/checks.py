"""Checks of a LightningModule before and while it is a client."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.types import TrainableModule
from fl_lightning.utils.packages import lightning_base
from fl_lightning.utils.settings import check_factory, check_kind, check_whole, described
from fl_lightning.utils.signatures import check_call

KNOWN = frozenset(["fl_lightning", "torch", "torchvision", "pytorch_lightning", "lightning_fabric"])
KNOWN |= {"lightning_utilities", "builtins", "abc", "typing"}
"""Packages whose modules keep their parameters and buffers as they are."""


def uncompiled(module: Any) -> Any:
    """Give the module in what `torch.compile` returned, which computes by the compiled steps, as a Trainer does."""
    if type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), LightningModule):
        return from_compiled(module)
    return module


def check_module(module: object) -> None:
    """Refuse a module that cannot be a client.

    Raises:
        TypeError: if `module` is no LightningModule, of either package, has no `training_step` of its own or one that
            draws its own batches, or a `state_dict` that cannot be called for a part of another module.
    """
    kind: Any = type(module)
    if not (isinstance(module, nn.Module) and isinstance(module, TrainableModule)):
        remedy = "derive it from pytorch_lightning.LightningModule"
        if isinstance(module, type) and issubclass(module, nn.Module):
            remedy = f"give an instance, {module.__name__}(...)"
        elif isinstance(module, list | tuple):
            remedy = "all clients have one; nets that differ are HeterogeneousNets"
        elif isinstance(module, nn.Module):
            remedy = "give a net by the function that makes it: FedAvg(net=lambda num_classes, input_shape: ...)"
        raise TypeError(
            f"a client must be a LightningModule, of pytorch_lightning or lightning.pytorch, got {described(module)}; "
            f"{remedy}"
        )
    if getattr(kind, "training_step", None) is getattr(lightning_base(kind), "training_step", None):
        raise TypeError(
            f"a client needs a training_step, and {kind.__name__} has none; define training_step(batch, batch_idx) "
            f"returning the loss"
        )
    if "dataloader_iter" in inspect.signature(kind.training_step).parameters:
        raise TypeError(
            f"{kind.__name__}.training_step takes dataloader_iter, but the batches of a client are drawn for it; "
            f"take (batch, batch_idx)"
        )
    step: Any = module.training_step
    arguments = ["batch", "batch_idx"][: max(1, num_arguments(step))]
    check_call(f"{kind.__name__}.training_step", step, arguments, of_object=True)
    takes = inspect.signature(kind.state_dict).parameters
    if "prefix" not in takes and all(p.kind is not p.VAR_KEYWORD for p in takes.values()):
        raise TypeError(
            f"{kind.__name__}.state_dict must take torch's arguments, since the module is part of another one; define "
            f"state_dict(self, *args, **kwargs) and hand them on"
        )


def num_arguments(step: Callable[..., Any]) -> int:
    """Count the positional arguments of a step, at most three: batch, its index, its dataloader's index.

    >>> num_arguments(lambda batch: batch), num_arguments(lambda batch, batch_idx: batch), num_arguments(print)
    (1, 2, 3)
    """
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in positional for kind in kinds)


def check_client_arguments(
    client: Any, module: LightningModule | None, num_classes: object, input_shape: object, **others: object
) -> None:
    """Refuse arguments of a ClientModule that are none, or do not go together.

    Args:
        client: the ClientModule under construction.
        module: the LightningModule that it is built around, or None.
        num_classes: C, or None.
        input_shape: of a sample, or None.
        others: `net` and `optimizer`.

    Raises:
        ValueError: naming the argument.
        TypeError: naming the argument, or as `check_module`.
    """
    given = others["net"]
    if isinstance(given, nn.Module) and isinstance(given, TrainableModule):
        raise TypeError(
            f"net makes a net for the data, got the LightningModule {type(given).__name__}; give it by name: "
            f"{type(client).__name__}(module={type(given).__name__}(...))"
        )
    example = "lambda num_classes, input_shape: MyNet(num_classes)"
    check_factory("num_classes, input_shape", "a net", example, net=given)
    check_factory(
        "parameters",
        "an optimizer, anew for every client and round",
        "functools.partial(torch.optim.SGD, lr=0.1)",
        optimizer=others["optimizer"],
    )
    check_whole(num_classes=num_classes)
    check_kind((tuple, list), "the sizes of one sample", "give such as (3, 32, 32)", input_shape=input_shape)
    if module is None:
        return
    name = type(client).__name__
    inner = type(module).__name__
    for other, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} takes either module= or {other}=, got both; a module brings its own net and "
                f"configure_optimizers"
            )
    check_module(module)
    if "logits" in client.needs:
        raise ValueError(
            f"{name} needs the logits of a net, got module={inner}; give it net= (a factory of a classifier) instead"
        )
    if not module.automatic_optimization and client.adds_terms:
        raise ValueError(
            f"{name} adds terms to the loss, but {inner} steps its optimizers itself (automatic_optimization=False); "
            f"return the loss from training_step instead, or use FedAvg"
        )


def check_optimized(owner: LightningModule, optimizers: Sequence[Optimizer], params: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold no parameter of the client, which then learns nothing.

    A module that steps them by hand may change its entries in another way, and is only told.

    Args:
        owner: whose `configure_optimizers` has made them.
        optimizers: all of them; none are right where nothing is trained by gradients.
        params: of the client.

    Raises:
        ValueError: naming the module and the optimizers.
    """
    known = {id(param): param.requires_grad for param in params}
    held = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    if not held or not any(known.values()) or not held.isdisjoint(known):  # frozen ones may be trained later
        return
    name = type(owner).__name__
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    sentence = (
        f"the optimizer of {name} must hold parameters of {name}, got {kinds} of others only, so that nothing would be "
        f"trained; make it of self.parameters() in configure_optimizers"
    )
    if owner.automatic_optimization:
        raise ValueError(sentence)
    rank_zero_warn(sentence)


def check_loss_returned(client: Any) -> None:
    """Refuse a module that steps its optimizers itself, where a method computes its loss besides training.

    Args:
        client: a ClientModule.

    Raises:
        ValueError: naming both.
    """
    if client.module is not None and not client.module.automatic_optimization:
        raise ValueError(
            f"{type(client).__name__} computes the loss of models that it does not train, but "
            f"{type(client.module).__name__} steps its optimizers itself (automatic_optimization=False); return the "
            f"loss from training_step instead, or use FedAvg"
        )


def made_net(factory: Callable[..., Any], num_classes: Any, input_shape: Any) -> Any:
    """Make a net by its factory.

    Raises:
        TypeError: if that fails by a TypeError, or what it makes is no module.
    """
    try:
        net = factory(num_classes, input_shape)
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise TypeError(
            f"net={name} must make a net of (num_classes, input_shape), and raised for ({num_classes}, "
            f"{tuple(input_shape)}): {error}; give net=lambda num_classes, input_shape: ..."
        ) from error
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must make a torch.nn.Module, got {described(net)}; let the function return it")
    return net


def same_or_unset(client: Any, name: str, given: Any, known: Any) -> Any:
    """Choose the client's own value, else that of the data.

    Raises:
        ValueError: if they differ, or neither is known.
    """
    if given is not None and known is not None and given != known:
        raise ValueError(
            f"{name} of the client must be that of the data ({known}), got {given}; leave it unset to take it from the "
            f"data"
        )
    if given is None and known is None:
        raise ValueError(
            f"{type(client).__name__} with net= needs {name}, which the data do not know; give {name} to the client or "
            f"to the data module, or use module="
        )
    return known if given is None else given


def check_returned(client: Any, output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Split what the wrapped module's `training_step` returned into the loss and the further outputs.

    Raises:
        ValueError: without a loss where one is needed.
    """
    kind = type(client.module).__name__
    more = isinstance(output, Mapping)
    loss = output.get("loss") if more else output
    if more and loss is None and client.automatic_optimization:
        raise ValueError(f"{kind}.training_step must return its loss under 'loss', got the keys {sorted(output)}")
    if loss is None and client.adds_terms:
        raise ValueError(
            f"{type(client).__name__} adds terms to the loss of {kind}.training_step, which returned None; return a "
            f"loss for every batch"
        )
    outputs = {name: value for name, value in output.items() if name != "loss"} if more else {}
    return cast(Tensor, loss), outputs


def can_be_fedavg_equivalent(client: Any) -> bool:
    """Return True for a class with such coefficients, unless a subclass or the object overrides what they switch off.

    Args:
        client: a ClientModule.
    """
    kind = type(client)
    owner = next(parent for parent in kind.__mro__ if "fedavg_equivalent" in vars(parent))
    hooks = ("training_step", "receive", "phases", "reply", "accumulated_lr_slope")
    return bool(client.fedavg_equivalent) and all(getattr(kind, hook) is getattr(owner, hook) for hook in hooks)


def runs_foreign_code(client: nn.Module) -> bool:
    """Return True where a module in the client is of neither this package nor torch: it may do anything."""
    return are_foreign(client.modules())


def are_foreign(parts: Iterable[object]) -> bool:
    """Return True where one of the parts is of a class that neither this package, torch nor Lightning defines."""
    kinds = {base for part in parts for base in type(part).__mro__}
    return any(kind.__module__.partition(".")[0] not in KNOWN for kind in kinds)
