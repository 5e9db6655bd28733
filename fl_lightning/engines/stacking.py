"""Reasons against training several clients at once, and the number of clients in a stack."""

from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchmetrics import Metric

from fl_lightning.client.hooks import overridden
from fl_lightning.client.metric_states import parts_that_count
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.unwrapped_step import no_hook, unwrapped_step
from fl_lightning.engines.execution import Chunk
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.training import LOCAL_HOOKS
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.nets import HeterogeneousNets

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LazyConv1d,
    nn.LazyConv2d,
    nn.LazyConv3d,
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
"""Attributes of modules and parameters that hold their hooks on gradients. torch has no public way to ask for them."""

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold what the module has registered, by name."""

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Optimizers that treat every number by itself, so that a step on a stack is a step of each row."""

SINGLE_CLIENT_HOOKS = (
    *LOCAL_HOOKS,
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
    "lr_scheduler_step",
)
"""Hooks that are called for one client at a time."""

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

MAX_CLIENTS = 32
"""The largest number of clients that `auto` stacks."""

MAX_PARAMS = 2**25
"""The largest number of parameters of all clients together that `auto` stacks."""

MIN_CLIENTS_PER_STEP = 4
"""The least mean number of clients in a step with which `auto` stacks. `vmap` costs as much as about three clients."""


def clients_at_once(client: ClientModule, chunk: Chunk) -> int:
    """Return the number of clients in a stack.

    Args:
        client: The client module.
        chunk: The number that the user set. `auto` takes as many clients as fit into memory several times over.
    """
    if chunk != "auto":
        return chunk
    params_per_client = sum(parameter.numel() for parameter in client.parameters())
    clients_in_memory = MAX_PARAMS // max(1, params_per_client)
    return max(1, min(MAX_CLIENTS, clients_in_memory))


def why_not(
    client: ClientModule,
    *,
    settings: LocalSettings,
    chunk: Chunk,
    global_weights: GlobalWeights,
    precision: Precision,
    device: torch.device,
) -> str | None:
    """Explain why clients are not trained at once, or return None if nothing speaks against it before they train.

    Args:
        client: The client module.
        settings: The settings of local training.
        chunk: The number of clients at once that the user set. `auto` also refuses what may be wrong or slower.
        global_weights: The entries of the global model in the module.
        precision: The precision plugin of the Trainer.
        device: The device that the client is trained on.
    """
    return (
        _reason_of_class(client, chunk)
        or _reason_of_settings(client, settings, str(precision.precision))
        or _reason_of_modules(client, chunk, device)
        or _reason_of_entries(client, global_weights)
    )


def _reason_of_class(client: ClientModule, chunk: Chunk) -> str | None:
    """Return the reason that the class of the module gives.

    A class without `stackable` is stacked only if the user sets a number of clients.
    """
    kind = type(client)
    declaring = next(base for base in kind.__mro__ if "stackable" in vars(base))
    if declaring is not ClientModule and not vars(declaring)["stackable"]:
        return f"{declaring.__name__} says stackable = False"
    if chunk == "auto" and (declaring is not kind or declaring is ClientModule):
        return f"{kind.__name__} does not say stackable = True in its own body; ask for it by model.chunk=K"
    if chunk == "auto" and client.module is not None:
        return f"{type(client.module).__name__} is a module of your own; ask for it by model.chunk=K"
    return client.why_not_stacked()


def _reason_of_settings(client: ClientModule, settings: LocalSettings, precision: str) -> str | None:
    """Return the reason that a hook of the user or a setting gives."""
    for hook in SINGLE_CLIENT_HOOKS:
        if any(overridden(module, hook) for module in client.lightning_modules()):
            return f"{hook} is called for one client at a time"
    if not client.automatic_optimization:
        return f"{type(client).__name__} steps its optimizers itself"
    if settings.accumulate_grad_batches > 1:
        return f"model.accumulate_grad_batches is {settings.accumulate_grad_batches}"
    if settings.client_timeout is not None:
        return "model.faults.client_timeout is asked client by client"
    if precision not in PRECISIONS:
        return f"trainer.precision is {precision}"
    return None


def _reason_of_modules(client: ClientModule, chunk: Chunk, device: torch.device) -> str | None:
    """Return the reason that a part of the net gives."""
    if isinstance(client.net, HeterogeneousNets):
        return "the clients have different nets"
    for module in client.modules():
        kind = type(module).__name__
        if isinstance(module, DROPOUTS) and module.p > 0:
            return f"{kind} would draw other numbers"
        if has_backward_hooks(module):
            return f"a backward hook of {kind} would not be called"
        if isinstance(module, CONVOLUTIONS) and device.type == "cpu" and chunk == "auto":
            return f"{kind} is slower for several clients at once on a CPU; ask for it by model.chunk=K"
    for counting in parts_that_count(client):
        if isinstance(counting, Metric):
            return f"{type(counting).__name__} counts one client's batch at a time"
    return None


def _reason_of_entries(client: ClientModule, global_weights: GlobalWeights) -> str | None:
    """Return the reason that a parameter or buffer gives."""
    for name in global_weights.non_persistent.places:
        return f"the buffer {name!r} is in no state dict"
    alias = find_alias(client)
    if alias is not None:
        name, entry = alias
        return f"{name!r} shares memory with {entry!r}"
    for name, parameter in client.named_parameters():
        if not parameter.requires_grad:
            return f"the parameter {name!r} is not trained"
        if has_backward_hooks(parameter):
            return f"a hook of the parameter {name!r} would not be called"
    return None


def find_alias(client: nn.Module) -> tuple[str, str] | None:
    """Find a tensor of the module that lies in the memory of a parameter or buffer.

    The stack replaces parameters and buffers by its rows, and such a tensor does not follow.

    Returns:
        The names of the tensor and of the entry, or None if there is no such tensor.

    >>> layer = nn.Linear(2, 3)
    >>> layer.register_buffer("last", layer.weight.data[0])
    >>> find_alias(layer)
    ('last', 'weight')
    """
    entries: dict[int, tuple[str, Tensor]] = {}
    for name, value in (*client.named_buffers(), *client.named_parameters()):
        if value.layout is torch.strided:
            entries[value.untyped_storage().data_ptr()] = (name, value)
    for path, module in client.named_modules():
        for name, value, is_registered in tensors_of(module):
            if value.layout is not torch.strided or not value.numel():
                continue
            entry_name, entry = entries.get(value.untyped_storage().data_ptr(), ("", None))
            if entry is None or not overlap(value, entry):
                continue
            # The stack replaces a registered entry, but not another attribute with the same tensor.
            if is_registered and value is entry:
                continue
            return f"{path}.{name}".lstrip("."), entry_name
    return None


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """List the tensors of a module without its submodules.

    Returns:
        The name of the attribute, the tensor, and whether it is a registered parameter or buffer.
    """
    found: list[tuple[str, Tensor, bool]] = []
    for name, value in vars(module).items():
        if name not in REGISTERED:
            found += [(name, tensor, False) for tensor in tensors_in(value)]
    registered = (*module.named_parameters("", recurse=False), *module.named_buffers("", recurse=False))
    found += [(name, tensor, True) for name, tensor in registered]
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an attribute: its value, or the items of a list, tuple, set or dict."""
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple | set):
        items = list(value)
    else:
        items = [value]
    return [item for item in items if isinstance(item, Tensor)]


def overlap(value: Tensor, other: Tensor) -> bool:
    """Return True if the ranges of addresses of two tensors of one storage overlap."""
    start, stop = address_range(value)
    other_start, other_stop = address_range(other)
    return start < other_stop and other_start < stop


def address_range(value: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first number, and the address behind its last number."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = value.data_ptr()
    return start, start + value.element_size() * (1 + last)


def has_backward_hooks(part: nn.Module | nn.Parameter) -> bool:
    """Return True if a hook on gradients is registered.

    The rows of a stack are trained in the place of the parameters, so that such a hook would not be called.

    >>> layer = nn.Linear(2, 3)
    >>> handle = layer.weight.register_hook(lambda gradient: 2 * gradient)
    >>> has_backward_hooks(layer), has_backward_hooks(layer.weight), has_backward_hooks(layer.bias)
    (False, True, False)
    """
    return any(getattr(part, name, None) for name in BACKWARD_HOOKS)


def why_not_optimizers(optimizers: LocalOptimizers, *, only_sgd: bool) -> str | None:
    """Explain why a stack cannot be stepped by these optimizers, or return None if it can.

    Args:
        optimizers: The optimizers of a client.
        only_sgd: Whether only a step in proportion to the gradient is accepted. A bias before BatchNorm has a
            gradient of nothing but rounding errors. Adam and its like make steps of full length of them.
    """
    if len(optimizers.raw) != 1:
        return f"it has {len(optimizers.raw)} optimizers"
    kind = type(optimizers.raw[0])
    if kind not in ELEMENTWISE:
        return f"{kind.__name__} is not known to treat every number by itself"
    if unwrapped_step(kind.step) is None:
        return f"the step of {kind.__name__} is not torch's"
    if optimizers.foreign is not None:
        return f"{optimizers.foreign} is one client's"
    if has_global_step_hooks():
        return "a global hook of optimizers would see all clients at once"
    if only_sgd and kind is not SGD:
        return f"BatchNorm under {kind.__name__} differs by more than the last bits; ask for it by model.chunk=K"
    return None


def has_global_step_hooks() -> bool:
    """Return True if a hook on the steps of all optimizers is registered."""
    # The handle of a hook is the only public way to the other hooks.
    handles = [register_optimizer_step_pre_hook(no_hook), register_optimizer_step_post_hook(no_hook)]
    has_others = [len(handle.hooks_dict_ref() or ()) > 1 for handle in handles]
    for handle in handles:
        handle.remove()
    return any(has_others)
