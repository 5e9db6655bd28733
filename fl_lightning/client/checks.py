"""Checks of a LightningModule before and while it is a client."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.hooks import overridden
from fl_lightning.types import TrainableModule
from fl_lightning.utils.packages import is_of_lightning, lightning_base
from fl_lightning.utils.settings import check_factory, check_kind, check_whole, described
from fl_lightning.utils.signatures import POSITIONAL, check_call

KNOWN = frozenset(
    {
        "fl_lightning",
        "torch",
        "torchvision",
        "pytorch_lightning",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "builtins",
        "abc",
        "typing",
    }
)
"""Packages whose modules keep their parameters and buffers as they are."""

METHOD_HOOKS = ("training_step", "receive", "phases", "reply", "accumulated_lr_slope")
"""Hooks that the coefficients of a method switch off, if these make the method FedAvg."""

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The steps of a module, which are given batches."""

MAX_STEP_ARGUMENTS = 3
"""Positional arguments that a step can be given: batch, index of the batch, index of the dataloader."""


def uncompiled(module: Any) -> Any:
    """Return the module in what `torch.compile` returned, which computes by the compiled steps."""
    if type(module).__name__ != "OptimizedModule":
        return module
    inner = getattr(module, "_orig_mod", None)
    if not is_of_lightning(inner, "LightningModule"):
        return module
    # Each package takes modules of its own only.
    package = lightning_base(type(inner)).__module__.partition(".core.")[0]
    return resolve_name(f"{package}.utilities.compile:from_compiled")(module)


def check_module(module: object) -> None:
    """Refuse a module that cannot be a client.

    Raises:
        TypeError: `module` is no LightningModule of either package, it has no `training_step` of its own or one that
            draws its own batches, or its `state_dict` cannot be called for a part of another module.
    """
    if not (isinstance(module, nn.Module) and isinstance(module, TrainableModule)):
        raise TypeError(
            f"a client must be a LightningModule, of pytorch_lightning or lightning.pytorch, got {described(module)}; "
            f"{remedy_for(module)}"
        )
    check_training_step(module)
    check_draws_no_batches(module)
    kind: Any = type(module)
    parameters = inspect.signature(kind.state_dict).parameters
    if "prefix" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        raise TypeError(
            f"{kind.__name__}.state_dict must take torch's arguments, since the module is part of another one; define "
            f"state_dict(self, *args, **kwargs) and hand them on"
        )


def remedy_for(value: object) -> str:
    """Return what to give in the place of a value that is no LightningModule."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"give an instance, {value.__name__}(...)"
    if isinstance(value, list | tuple):
        return "all clients have one; nets that differ are HeterogeneousNets"
    if isinstance(value, nn.Module):
        return "give a net by the function that makes it: FedAvg(net=lambda num_classes, input_shape: ...)"
    return "derive it from pytorch_lightning.LightningModule"


def check_training_step(module: Any) -> None:
    """Refuse a LightningModule whose `training_step` cannot be called with a batch and its index.

    Raises:
        TypeError: There is no `training_step`, it draws its own batches, or it takes other arguments.
    """
    kind: Any = type(module)
    if not overridden(module, "training_step"):
        raise TypeError(
            f"a client needs a training_step, and {kind.__name__} has none; define training_step(batch, batch_idx) "
            f"returning the loss"
        )
    step = module.training_step
    arguments = ["batch", "batch_idx"][: max(1, num_arguments(step))]
    check_call(f"{kind.__name__}.training_step", step, arguments, of_object=True)


def check_draws_no_batches(module: Any) -> None:
    """Refuse a module with a step that draws its batches from an iterator.

    Raises:
        TypeError: A step takes `dataloader_iter`.
    """
    for name in STEPS:
        step = getattr(module, name, None)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise TypeError(
                f"{type(module).__name__}.{name} takes dataloader_iter, but the batches of a client are drawn for it; "
                f"take (batch, batch_idx)"
            )


def num_arguments(step: Callable[..., Any]) -> int:
    """Return the number of positional arguments that a step can be given, at most three.

    The arguments are the batch, the index of the batch, and the index of the dataloader.

    >>> num_arguments(lambda batch: batch), num_arguments(lambda batch, batch_idx: batch), num_arguments(print)
    (1, 2, 3)
    """
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return MAX_STEP_ARGUMENTS
    return sum(kind in POSITIONAL for kind in kinds)


def evaluation_arguments(
    step: Callable[..., Any], *, batch_idx: int, dataloader_idx: int | None
) -> tuple[list[int], dict[str, int]]:
    """Return the arguments of a step of an evaluation besides the batch, by place and by name.

    As in Lightning, a step is given the index of the dataloader only if there are several. A third argument of another
    meaning keeps its default.

    Args:
        step: The step.
        batch_idx: Index of the batch in its dataloader.
        dataloader_idx: Index of the dataloader. None: there is only one.

    >>> evaluation_arguments(lambda batch, batch_idx, stage="val": None, batch_idx=4, dataloader_idx=1)
    ([4], {})
    >>> evaluation_arguments(lambda batch, batch_idx, dataloader_idx=0: None, batch_idx=4, dataloader_idx=1)
    ([4, 1], {})
    """
    placed = [batch_idx][: num_arguments(step) - 1]
    if dataloader_idx is None:
        return placed, {}
    parameters = inspect.signature(step).parameters
    places = [name for name, parameter in parameters.items() if parameter.kind in POSITIONAL]
    is_third = places[2:3] == ["dataloader_idx"]
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if is_third or (takes_any and len(places) < MAX_STEP_ARGUMENTS):
        return [*placed, dataloader_idx], {}
    if "dataloader_idx" in parameters:
        return placed, {"dataloader_idx": dataloader_idx}
    return placed, {}


def check_evaluation_step(module: LightningModule, name: str, num_loaders: int) -> None:
    """Refuse a step of an evaluation that cannot be called.

    Args:
        module: The module.
        name: Name of the step.
        num_loaders: Number of its dataloaders.

    Raises:
        TypeError: The step has a further argument without a default.
    """
    if not overridden(module, name):
        return
    step = getattr(module, name)
    placed, named = evaluation_arguments(step, batch_idx=0, dataloader_idx=0 if num_loaders > 1 else None)
    if not named:
        given = ["batch", "batch_idx", "dataloader_idx"][: 1 + len(placed)]
        check_call(f"{type(module).__name__}.{name}", step, given, of_object=True)


def check_client_arguments(
    client: Any, module: LightningModule | None, num_classes: object, input_shape: object, **others: object
) -> None:
    """Refuse arguments of a ClientModule that have a wrong type, or do not go together.

    Args:
        client: The ClientModule under construction.
        module: The LightningModule around which the client is built, or None.
        num_classes: Number of classes C, or None.
        input_shape: Shape of a sample, or None.
        others: `net`, `optimizer` and `lr_scheduler`.

    Raises:
        ValueError: Two arguments do not go together, or one needs another.
        TypeError: An argument has a wrong type, or `check_module` refuses `module`.
    """
    net = others["net"]
    if isinstance(net, nn.Module) and isinstance(net, TrainableModule):
        raise TypeError(
            f"net makes a net for the data, got the LightningModule {type(net).__name__}; give it by name: "
            f"{type(client).__name__}(module={type(net).__name__}(...))"
        )
    example = "lambda num_classes, input_shape: MyNet(num_classes)"
    check_factory("num_classes, input_shape", "a net", example, net=net)
    check_factory(
        "parameters",
        "an optimizer, anew for every client and round",
        "functools.partial(torch.optim.SGD, lr=0.1)",
        optimizer=others["optimizer"],
    )
    check_factory(
        "optimizer",
        "a scheduler, anew for every client and round",
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)",
        lr_scheduler=others["lr_scheduler"],
    )
    if others["lr_scheduler"] is not None and (module is None or others["optimizer"] is None):
        raise ValueError(
            f"lr_scheduler needs module= and optimizer=, got {'no module' if module is None else 'no optimizer'}; "
            f"{'take model.lr_decay for a net' if module is None else 'give both or neither'}"
        )
    check_whole(num_classes=num_classes)
    check_kind((tuple, list), "the sizes of one sample", "give such as (3, 32, 32)", input_shape=input_shape)
    if module is not None:
        check_wrapped(client, module, net)


def check_wrapped(client: Any, module: LightningModule, net: object) -> None:
    """Refuse a LightningModule around which no client of this class can be built.

    Args:
        client: The ClientModule under construction.
        module: The LightningModule.
        net: The argument of this name, which must be None.

    Raises:
        ValueError: The client is given a net, too.
        TypeError: `check_module` refuses `module`.
    """
    if net is not None:
        raise ValueError(f"{type(client).__name__} takes either module= or net=, got both; a module brings its own net")
    check_module(module)


def check_method_around_module(client: Any) -> None:
    """Refuse a method around a LightningModule that lacks what the method needs at its coefficients.

    The constructor of `ClientModule` cannot ask, because a method sets its coefficients after it.

    Args:
        client: A ClientModule around a LightningModule, or with a net.

    Raises:
        ValueError: The method needs what the module lacks.
    """
    module = client.module
    if module is None:
        return
    name = type(client).__name__
    inner = type(module).__name__
    if "logits" in client.present_needs:
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

    A module that steps its optimizers by hand may change its entries in another way, so it only gets a warning.

    Args:
        owner: The module whose `configure_optimizers` has made the optimizers.
        optimizers: All optimizers of the client. Empty if nothing is trained by gradients.
        params: The parameters of the client.

    Raises:
        ValueError: No optimizer holds a parameter of the client.
    """
    known = {id(param): param.requires_grad for param in params}
    held = set[int]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held.update(id(param) for param in group["params"])
    all_frozen = not any(known.values())  # Frozen parameters may be trained later.
    if not held or all_frozen or not held.isdisjoint(known):
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


def check_outputs(client: Any, name: str, remedy: str) -> None:
    """Refuse a module without `forward` for what reads its outputs.

    Args:
        client: A ClientModule.
        name: Name of what reads the outputs.
        remedy: What the user may do instead of defining `forward`, as the end of a sentence.

    Raises:
        ValueError: The client's module has no `forward`.
    """
    if client.module is not None and not overridden(uncompiled(client.module), "forward"):
        raise ValueError(
            f"{name} needs the outputs of {type(client.module).__name__}, which has no forward; define "
            f"forward(self, x), or {remedy}"
        )


def check_loss_returned(client: Any) -> None:
    """Refuse a module that steps its optimizers itself, if its loss is computed outside training.

    Args:
        client: A ClientModule.

    Raises:
        ValueError: The client's module steps its optimizers itself.
    """
    if client.module is not None and not client.module.automatic_optimization:
        raise ValueError(
            f"{type(client).__name__} computes the loss of models that it does not train, but "
            f"{type(client.module).__name__} steps its optimizers itself (automatic_optimization=False); return the "
            f"loss from training_step instead, or use FedAvg"
        )


def made_net(factory: Callable[..., Any], num_classes: Any, input_shape: Any) -> Any:
    """Make a net by its factory.

    Args:
        factory: Makes the net, given `num_classes` and `input_shape`.
        num_classes: Number of classes C.
        input_shape: Shape of a sample.

    Raises:
        TypeError: The factory raises a TypeError, or what it makes is no module.
    """
    try:
        net = factory(num_classes, input_shape)
    except TypeError as error:
        name = name_of_factory(factory)
        # Torch lists all signatures of a function in further lines.
        reason = str(error).partition("\n")[0].rstrip(":")
        raise TypeError(
            f"net={name} must make a net of (num_classes, input_shape), and raised for ({num_classes}, "
            f"{tuple(input_shape)}): {reason}; give net=lambda num_classes, input_shape: ..."
        ) from error
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must make a torch.nn.Module, got {described(net)}; let the function return it")
    return net


def name_of_factory(factory: Callable[..., Any]) -> str:
    """Return the name of a function or class, which a `partial` or a configuration file may have wrapped."""
    made: Any = factory
    while isinstance(made, partial):
        # The function of a configuration file has the class among its arguments.
        made = next((value for value in made.args if isinstance(value, type)), made.func)
    return getattr(made, "__name__", type(made).__name__)


def same_or_unset(client: Any, name: str, given: Any, known: Any) -> Any:
    """Return the client's own value of a setting, or the value of the data if the client has none.

    Args:
        client: The ClientModule.
        name: Name of the setting.
        given: The client's value, or None.
        known: The data's value, or None.

    Raises:
        ValueError: The two values differ, or neither is known.
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

    Args:
        client: A ClientModule around a LightningModule.
        output: The loss, a mapping with the loss, or None.

    Raises:
        ValueError: There is no loss, and one is needed.
    """
    loss = output
    outputs: dict[str, Any] = {}
    if isinstance(output, Mapping):
        loss = output.get("loss")
        outputs = {name: value for name, value in output.items() if name != "loss"}
        if loss is None and client.automatic_optimization:
            raise ValueError(
                f"{type(client.module).__name__}.training_step must return its loss under 'loss', got the keys "
                f"{sorted(output)}"
            )
    if loss is None and client.adds_terms:
        raise ValueError(
            f"{type(client).__name__} adds terms to the loss of {type(client.module).__name__}.training_step, which "
            f"returned None; return a loss for every batch"
        )
    return cast(Tensor, loss), outputs


def can_be_fedavg_equivalent(client: Any) -> bool:
    """Return True if coefficients of this client may make its method FedAvg.

    They may unless a subclass overrides what the coefficients switch off.

    Args:
        client: A ClientModule.
    """
    if not client.fedavg_equivalent:
        return False
    kind = type(client)
    owner = next(parent for parent in kind.__mro__ if "fedavg_equivalent" in vars(parent))
    return all(getattr(kind, hook) is getattr(owner, hook) for hook in METHOD_HOOKS)


def sets_hooks(client: Any) -> bool:
    """Return True if hooks of a method are set on the object itself, not on its class.

    `local_loss` is none, which a plain Trainer calls as the `training_step` of a client that is FedAvg.

    Args:
        client: A ClientModule.
    """
    hooks = vars(client).keys() & METHOD_HOOKS
    return any(vars(client)[name] != client.local_loss for name in hooks)


def runs_foreign_code(client: nn.Module) -> bool:
    """Return True if the client has a module of another package than this one and torch.

    Such a module may do anything.
    """
    return are_foreign(client.modules())


def are_foreign(parts: Iterable[object]) -> bool:
    """Return True if a part is of a class that neither this package, torch nor Lightning defines."""
    kinds = set[type]()
    for part in parts:
        kinds.update(type(part).__mro__)
    return any(kind.__module__.partition(".")[0] not in KNOWN for kind in kinds)
