"""Bases of clients that keep a part of the model, or a whole model of their own, between rounds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import batch_length
from fl_lightning.functional.state import clone, is_entry
from fl_lightning.types import Batch, ClientData, State

OWN = "own_models"
INITIAL = "initial_model"
HEAD = "net.head."


class OwnModelClient(ClientModule):
    """A client that keeps a model of its own in its memory, and deploys it.

    As it stands, FedAvg's.

    After an exchange in which it took a step it keeps the module as it is: all entries of the state dict, buffers too.

    Attributes:
        models_kept: how many it keeps, the last ones, >= 1.
    """

    models_kept: int = 1

    def entries(self) -> State:
        """All entries of the client as they are now: they change in training, so clone what is kept."""
        client_id = self.context.client_id
        return {n: value for n, value in self.state_dict().items() if is_entry(n, value) and self.has(client_id, n)}

    def own_models(self) -> list[State]:
        """Return the models that this client kept, the last one at the end."""
        kept: list[State] = self.memory.get(OWN, [])
        return kept

    def own_model(self) -> State | None:
        """Return the model that this client kept last.

        None before the first.
        """
        kept = self.own_models()
        return kept[-1] if kept else None

    def keep_model(self) -> None:
        """Keep the entries as they are now as the client's own model."""
        self.memory[OWN] = [*self.own_models(), clone(self.entries())][-self.models_kept :]

    @torch.no_grad()
    def load_model(self, state: Mapping[str, Tensor]) -> None:
        """Copy a model, or some of its entries, into the module."""
        entries = self.entries()
        for name, value in state.items():
            entries[name].copy_(value)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if self.num_steps:
            self.keep_model()
        return {}

    def mean_over(self, local: ClientData, loss: Callable[[Batch], Tensor]) -> Tensor:
        """Compute the mean over the client's samples of `loss`, the mean of a batch, in eval mode: () float64."""
        losses = self.over(local, lambda batch: (loss(batch).detach().double(), batch_length(batch)))
        return torch.stack([value * (size / local.size()) for value, size in losses]).sum()

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """Predict with the own model.

        With the module as it is before the client has one.
        """
        self.load_model(self.own_model() or {})
        return self


class InitialModelClient(OwnModelClient):
    """A client whose own model is the initial model until it has trained one.

    Attributes:
        initial: entries of the initial model, once a fit has begun; checkpoints hold them.
    """

    initial: State | None = None

    def own_model(self) -> State | None:
        return super().own_model() or (self.initial and {name: self.initial[name] for name in self.entries()})

    def on_fit_start(self) -> None:
        if self.initial is None:
            self.initial = clone({n: value for n, value in self.state_dict().items() if is_entry(n, value)})
        device = next(self.parameters()).device
        self.initial = {name: value.to(device) for name, value in self.initial.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[INITIAL] = self.initial

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.initial = checkpoint.get(INITIAL)


class PersonalHeadClient(ClientModule):
    """A client that keeps the net's head (its last linear layer) to itself.

    The body, all else, is shared.

    Args:
        base: of `ClientModule`; needs `net`.

    Raises:
        ValueError: when the net is built, if it has no head that is trained, or nothing else to train.
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
        """Name the trainable entries of the head."""
        return tuple(name for name in self.trained() if name.startswith(HEAD))

    def body_names(self) -> tuple[str, ...]:
        """Name the trainable entries of the body."""
        return tuple(name for name in self.trained() if not name.startswith(HEAD))


def check_head(client: Any, needs_body: bool = True) -> None:
    """Refuse a net without `head`, or one that is nothing else.

    Args:
        client: a ClientModule whose net is built.
        needs_body: whether there must be something to train besides the head.

    Raises:
        ValueError: naming client and net.
    """
    name = type(client).__name__
    net = client.net
    if not isinstance(getattr(net, "head", None), nn.Linear):
        raise ValueError(
            f"{name} needs a net whose last layer is a torch.nn.Linear called head, got {type(net).__name__}; derive "
            f"it from fl_lightning.nets.Backbone"
        )
    body = [n for n, p in client.named_parameters() if p.requires_grad and not n.startswith(HEAD)]
    if needs_body and not body:
        raise ValueError(
            f"{name} shares all but the head, but {type(net).__name__} has nothing else to train; give it a hidden "
            f"layer, or take Local"
        )
