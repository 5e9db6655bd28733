"""Bases of clients that keep a part of the model, or a whole model of their own, between rounds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.state import clone, is_entry
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import Batch, ClientData, State
from fl_lightning.utils.batches import batch_length

OWN = "own_models"
"""Key of the client's own models in its memory."""

INITIAL = "initial_model"
"""Key of the initial model in a checkpoint."""

HEAD = "net.head."
"""First part of the names of the head's entries."""


class WholeModelClient(ClientModule):
    """Trains a client that loads whole models, and measures losses of models on its samples."""

    def entries(self) -> State:
        """Return all entries of the client as they are now. Training changes them, so clone what is kept."""
        client_id = self.context.client_id
        entries = entries_of(self)
        return {name: value for name, value in entries.items() if self.has(client_id, name)}

    @torch.no_grad()
    def load_model(self, state: Mapping[str, Tensor]) -> None:
        """Copy a model, or some of its entries, into the module."""
        entries = self.entries()
        for name, value in state.items():
            entries[name].copy_(value)

    def mean_over(self, local: ClientData, loss: Callable[[Batch], Tensor | None]) -> Tensor:
        """Return the mean of a loss over the client's samples in eval mode, () float64. Without a sample it is 0.

        Args:
            local: The client's data.
            loss: Returns the mean loss of a batch, (). As in training, None leaves the batch out.
        """
        losses: list[Tensor] = []
        sizes: list[int] = []

        def add_batch(batch: Batch) -> None:
            value = loss(batch)
            if value is not None:
                losses.append(value.detach().double())
                sizes.append(batch_length(batch))

        self.over(local, add_batch)
        num_samples = sum(sizes)
        if not num_samples:
            return torch.zeros((), dtype=torch.float64)
        shares = [value * (size / num_samples) for value, size in zip(losses, sizes, strict=True)]
        return torch.stack(shares).sum()


class OwnModelClient(WholeModelClient):
    """Trains a client that keeps a model of its own in its memory, and deploys it.

    The client trains as FedAvg's does. After an exchange in which it took a step, it keeps the module as it is: all
    entries of the state dict, buffers too.

    Attributes:
        models_kept: Number of models that the client keeps, the last ones, ≥ 1.
    """

    models_kept: int = 1

    def own_models(self) -> list[State]:
        """Return the models that this client kept, the last one at the end."""
        models: list[State] = self.memory.get(OWN, [])
        return models

    def own_model(self) -> State | None:
        """Return the model that this client kept last, or None before the first."""
        models = self.own_models()
        return models[-1] if models else None

    def keep_model(self) -> None:
        """Keep the entries as they are now as the client's own model."""
        models = [*self.own_models(), clone(self.entries())]
        self.memory[OWN] = models[-self.models_kept :]

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if self.num_steps:
            self.keep_model()
        return {}

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """Return the module with the client's own model, or as it is if the client has none."""
        self.load_model(self.own_model() or {})
        return self


class InitialModelClient(OwnModelClient):
    """Trains a client whose own model is the initial model until it has trained one.

    Attributes:
        initial: Entries of the initial model, which checkpoints hold. None before a fit has begun.
    """

    initial: State | None = None

    def own_model(self) -> State | None:
        model = super().own_model()
        if model:
            return model
        if not self.initial:
            return self.initial
        return {name: self.initial[name] for name in self.entries()}

    def on_fit_start(self) -> None:
        if self.initial is None:
            self.initial = clone(entries_of(self))
        device = next(self.parameters()).device
        self.initial = {name: value.to(device) for name, value in self.initial.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[INITIAL] = self.initial

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.initial = checkpoint.get(INITIAL)


class PersonalHeadClient(ClientModule):
    """Trains a client that keeps the net's head (its last linear layer) to itself.

    The body, which is the rest of the net, is shared.

    Args:
        base: Arguments of `ClientModule`; needs `net`.

    Raises:
        ValueError: The net has no head that is trained, or nothing else to train. The error comes when it is built.
    """

    needs = frozenset({"logits"})

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        check_head(self)
        if not any(parameter.requires_grad for parameter in self.head.parameters()):
            raise ValueError(
                f"{type(self).__name__} trains the head apart, but that of {type(self.net).__name__} has no parameter "
                f"with requires_grad=True; let it require a gradient, or take FedAvg"
            )

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return name.startswith(HEAD)

    @property
    def head(self) -> nn.Linear:
        """The net's head."""
        return self.built_net.head

    def head_names(self) -> tuple[str, ...]:
        """Return the names of the trainable entries of the head."""
        return tuple(name for name in self.trained() if name.startswith(HEAD))

    def body_names(self) -> tuple[str, ...]:
        """Return the names of the trainable entries of the body."""
        return tuple(name for name in self.trained() if not name.startswith(HEAD))


def entries_of(client: nn.Module) -> State:
    """Return all entries of a module, live: its state dict without extra states."""
    return {name: value for name, value in client.state_dict().items() if is_entry(name, value)}


def nets_of(client: Any) -> list[nn.Module]:
    """Return the nets of the clients, one or several.

    Args:
        client: A ClientModule whose net is built.
    """
    if isinstance(client.net, HeterogeneousNets):
        return list(client.net.nets)
    return [client.net]


def check_head(client: Any, needs_body: bool = True) -> None:
    """Refuse a net that has no `head`, or nothing to train except the head, and nets that differ.

    The entries of the head must have the same names at all clients.

    Args:
        client: A ClientModule whose net is built.
        needs_body: Whether there must be something to train besides the head.

    Raises:
        ValueError: The net has no head, or nothing else to train, or the clients have different nets.
    """
    name = type(client).__name__
    net = client.net
    if isinstance(net, HeterogeneousNets):
        raise ValueError(
            f"{name} needs a net whose last layer is a torch.nn.Linear called head, got {type(net).__name__}, in which "
            f"each net has a head of its own; give all clients one net"
        )
    heads_of(client)
    trained = [name for name, parameter in client.named_parameters() if parameter.requires_grad]
    if needs_body and all(entry.startswith(HEAD) for entry in trained):
        raise ValueError(
            f"{name} shares all but the head, but {type(net).__name__} has nothing else to train; give it a hidden "
            f"layer, or take Local"
        )


def heads_of(client: Any) -> list[nn.Linear]:
    """Return the heads of the clients' nets, one or several.

    Args:
        client: A ClientModule whose net is built.

    Raises:
        ValueError: The net, or one of the clients' nets, has no head.
    """
    heads: list[nn.Linear] = []
    for net in nets_of(client):
        head = getattr(net, "head", None)
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{type(client).__name__} needs a net whose last layer is a torch.nn.Linear called head, got "
                f"{type(net).__name__}; derive it from fl_lightning.nets.Backbone"
            )
        heads.append(head)
    return heads


def check_features(client: Any, who: str) -> None:
    """Refuse a net without `features`. The clients may have different nets.

    Args:
        client: A ClientModule whose net is built.
        who: Name of what reads the features.

    Raises:
        ValueError: The net, or one of the clients' nets, has no `features`.
    """
    for net in nets_of(client):
        check_part_of_net(who, net, method="features", what="the inputs of the head")


def check_part_of_net(who: str, net: nn.Module, method: str, what: str) -> None:
    """Refuse a net that lacks a method of `Backbone`.

    Args:
        who: Name of what needs the method.
        net: The net.
        method: Name of the method.
        what: What the method gives, in words.

    Raises:
        ValueError: The net has no such method.
    """
    if not callable(getattr(net, method, None)):
        raise ValueError(
            f"{who} needs a net whose {method} gives {what}, got {type(net).__name__}; derive it from "
            f"fl_lightning.nets.Backbone"
        )
