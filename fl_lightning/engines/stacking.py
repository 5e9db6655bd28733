"""Reasons against training several clients at once, and how many are."""

from typing import Any, Literal

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchmetrics import Metric

from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.unwrapped_step import no_hook, unwrapped_step
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.training import LOCAL_HOOKS
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.nets import HeterogeneousNets

Chunk = Literal["auto"] | int
"""Clients trained at once."""

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LazyConv1d, nn.LazyConv2d, nn.LazyConv3d),
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
"""Attributes of modules and parameters with their hooks on gradients; torch has no public way to ask for them."""

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module with what it has registered, by name."""

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Optimizers that treat every number by itself, so that a step on a stack is a step of each row."""

OWN_STEPS = (
    *LOCAL_HOOKS,
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "lr_scheduler_step"),
)
"""Hooks that are called for one client at a time."""

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

MOST_CLIENTS = 32
MOST_NUMBERS = 2**25
"""Clients, and parameters of all of them, that `auto` stacks at most."""

FEW_CLIENTS = 4
"""Clients in a step, in the mean, below which `auto` trains them one by one: vmap costs that of three or so."""


def clients_at_once(client: ClientModule, chunk: Chunk) -> int:
    """Number of clients in a stack.

    With `auto` as many as fit into memory several times over.
    """
    if chunk != "auto":
        return chunk
    numbers = sum(parameter.numel() for parameter in client.parameters())
    return max(1, min(MOST_CLIENTS, MOST_NUMBERS // max(1, numbers)))


def why_not(
    client: ClientModule,
    settings: LocalSettings,
    chunk: Chunk = "auto",
    weights: GlobalWeights | None = None,
    precision: Precision | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Explain why clients are not trained at once.

    None: they are, as far as can be told before they train.

    Args:
        client: the module.
        settings: of local training.
        chunk: clients at once as asked for; `auto` leaves out what may be wrong or slower.
        weights: the global model's entries in the module; None: not looked at.
        precision: the Trainer's precision plugin; None: 32-true.
        device: that the client is trained on; None: a CPU.
    """
    return (
        _of_class(client, chunk)
        or _of_settings(client, settings, "32-true" if precision is None else str(precision.precision))
        or _of_modules(client, chunk, device)
        or (None if weights is None else _of_entries(client, weights))
    )


def _of_class(client: ClientModule, chunk: Chunk) -> str | None:
    """Reason that the class itself gives.

    Where it says nothing, `chunk: K` asks for it.
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


def _of_settings(client: ClientModule, settings: LocalSettings, precision: str) -> str | None:
    kind = type(client).__name__
    hook = next((name for name in OWN_STEPS for module in client.lightning_modules() if overridden(module, name)), None)
    if hook is not None:
        return f"{hook} is called for one client at a time"
    if not client.automatic_optimization:
        return f"{kind} steps its optimizers itself"
    if settings.accumulate_grad_batches > 1:
        return f"model.accumulate_grad_batches is {settings.accumulate_grad_batches}"
    if settings.client_timeout is not None:
        return "model.faults.client_timeout is asked client by client"
    if precision not in PRECISIONS:
        return f"trainer.precision is {precision}"
    return None


def _of_modules(client: ClientModule, chunk: Chunk, device: torch.device | None) -> str | None:
    """Reason against stacking that a part of the net gives."""
    if isinstance(client.net, HeterogeneousNets):
        return "the clients have different nets"
    on_cpu = device is None or device.type == "cpu"
    for module in client.modules():
        kind = type(module).__name__
        if isinstance(module, DROPOUTS) and module.p > 0:
            return f"{kind} would draw other numbers"
        if has_backward_hooks(module):
            return f"a backward hook of {kind} would not be called"
        if isinstance(module, Metric):
            return f"{kind} counts one client's batch at a time"
        if isinstance(module, CONVOLUTIONS) and on_cpu and chunk == "auto":
            return f"{kind} is slower for several clients at once on a CPU; ask for it by model.chunk=K"
    return None


def _of_entries(client: ClientModule, weights: GlobalWeights) -> str | None:
    if weights.non_persistent.places:
        return f"the buffer {next(iter(weights.non_persistent.places))!r} is in no state dict"
    if (pair := aliases(client)) is not None:
        return f"{pair[0]!r} shares memory with {pair[1]!r}"
    for name, value in client.named_parameters():
        if not value.requires_grad:
            return f"the parameter {name!r} is not trained"
        if has_backward_hooks(value):
            return f"a hook of the parameter {name!r} would not be called"
    return None


def aliases(client: nn.Module) -> tuple[str, str] | None:
    """Name a tensor of the module, and an entry in whose memory it lies: rows of a stack do not.

    >>> layer = nn.Linear(2, 3)
    >>> layer.register_buffer("last", layer.weight.data[0])
    >>> aliases(layer)
    ('last', 'weight')
    """
    entries = {
        value.untyped_storage().data_ptr(): (name, value)
        for name, value in (*client.named_buffers(), *client.named_parameters())
        if value.layout is torch.strided
    }
    for path, module in client.named_modules():
        # a registered entry is the one that the stack replaces; another name for it is not
        held = [(name, tensor, False) for name, value in vars(module).items() for tensor in inside(name, value)]
        held += [(*entry, True) for entry in (*module.named_parameters("", False), *module.named_buffers("", False))]
        for name, value, registered in held:
            if value.layout is torch.strided and value.numel():
                whose, entry = entries.get(value.untyped_storage().data_ptr(), ("", None))
                if entry is not None and not (registered and value is entry) and overlap(value, entry):
                    return f"{path}.{name}".lstrip("."), whose
    return None


def inside(name: str, value: Any) -> list[Tensor]:
    """List the tensors that an attribute is, or holds in a list, tuple, set or dict."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else [value]
    return [item for item in values if isinstance(item, Tensor)] if name not in REGISTERED else []


def overlap(value: Tensor, other: Tensor) -> bool:
    """Return True where two tensors of one storage have numbers between the same addresses."""
    (first, last), (begin, end) = map(addresses, (value, other))
    return first < end and begin < last


def addresses(value: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first number, and behind its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + value.element_size() * (1 + reach)


def has_backward_hooks(part: nn.Module | nn.Parameter) -> bool:
    """Return True where a hook on gradients is registered: rows of a stack stand in for the parameters, which get none.

    >>> layer = nn.Linear(2, 3)
    >>> handle = layer.weight.register_hook(lambda gradient: 2 * gradient)
    >>> has_backward_hooks(layer), has_backward_hooks(layer.weight), has_backward_hooks(layer.bias)
    (False, True, False)
    """
    return any(getattr(part, name, None) for name in BACKWARD_HOOKS)


def why_not_optimizers(optimizers: LocalOptimizers, plain: bool = False) -> str | None:
    """Explain why a stack cannot be stepped by these optimizers.

    None: it can.

    Args:
        optimizers: of a client.
        plain: whether only a step in proportion to the gradient will do. Where BatchNorm follows, gradients of a bias
            are nothing but what is left by rounding, which Adam and its like make steps of full length of.
    """
    if len(optimizers.raw) != 1:
        return f"it has {len(optimizers.raw)} optimizers"
    optimizer = optimizers.raw[0]
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        return f"{kind.__name__} is not known to treat every number by itself"
    if unwrapped_step(kind.step) is None:
        return f"the step of {kind.__name__} is not torch's"
    if optimizers.foreign is not None:
        return f"{optimizers.foreign} is one client's"
    if listens_to_all():
        return "a global hook of optimizers would see all clients at once"
    if plain and kind is not SGD:
        return f"BatchNorm under {kind.__name__} differs by more than the last bits; ask for it by model.chunk=K"
    return None


def listens_to_all() -> bool:
    """Return True where somebody has a hook on the steps of all optimizers."""
    handles = [register_optimizer_step_pre_hook(no_hook), register_optimizer_step_post_hook(no_hook)]
    others = [len(handle.hooks_dict_ref() or ()) > 1 for handle in handles]
    for handle in handles:
        handle.remove()
    return any(others)
