"""Adapters of the methods with personal entries or a model of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedLoop
from fl_lightning.methods import Ditto, FedAvg, FedBN, FedRep, FedRoD
from fl_lightning.methods.fedrod import balanced_softmax, personal_loss
from fl_lightning.types import ClientUpdate

from .adapters_fn import Inputs, float64
from .end_to_end import Recorder, Run, flat, rounds, run

FN: dict[str, Callable[[Inputs], Any]] = {}


def with_gradient(loss: Callable[[Tensor], Tensor], at: Any, name: str) -> dict[str, Any]:
    at = float64(at).requires_grad_()
    value = loss(at)
    return {"loss": value, name: torch.autograd.grad(value, at)[0]}


def fedrod(inputs: Inputs) -> dict[str, Any]:
    target = torch.tensor(inputs["y"])
    if "logits" in inputs:
        counts = torch.tensor(inputs["counts"])
        return with_gradient(lambda z: balanced_softmax(z, target, counts, inputs["gamma"]), inputs["logits"], "grad")
    generic = float64(inputs["logits_generic_detached"])
    return with_gradient(lambda z: personal_loss(generic, z, target), inputs["logits_personal"], "grad_personal")


METHOD: dict[str, Callable[[Inputs], Any]] = {"fedrod": fedrod}


# --- whole rounds


class Notes(Recorder):
    """What `note(client, update)` says of every client, and its number of steps and lr after every epoch, by round."""

    def __init__(self, note: Callable[[Any, ClientUpdate], dict[str, Any]] = lambda client, update: {}) -> None:
        super().__init__()
        self.note = note
        self.notes: list[dict[int, dict[str, Any]]] = []
        self.steps: list[dict[int, list[int]]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        super().on_train_epoch_start(trainer, loop)
        self.notes.append({})
        self.steps.append({})

    def on_client_epoch_end(self, trainer: pl.Trainer, loop: FederatedLoop, client_id: int, epoch: int) -> None:
        self.steps[-1].setdefault(client_id, []).append(loop.client.num_steps)

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        super().on_client_end(trainer, loop, update)
        self.notes[-1].setdefault(update.client_id, {}).update(self.note(loop.client, update))

    def steps_of(self, r: int, client_id: int, epochs: int) -> int:
        """Steps after so many epochs; 0 of a client without data."""
        return self.steps[r].get(client_id, [0] * epochs)[epochs - 1]


def noted(finished: Run) -> dict[str, Any]:
    """The rounds, with what was noted of the participants."""
    result = rounds(finished)
    for one, notes in zip(result["rounds"], finished.recorder.notes, strict=True):
        for name in next(iter(notes.values())):
            one[name] = [notes[client_id][name] for client_id in one["participants"]]
    return result


def plain(inputs: Inputs, kind: Callable[..., Any] = FedAvg, **loop: Any) -> dict[str, Any]:
    return rounds(run(kind, inputs, **loop))


def fedrep(inputs: Inputs) -> dict[str, Any]:
    epochs, recorder = inputs["cfg"]["head_epochs"], Notes()
    result = rounds(run(partial(FedRep, head_epochs=epochs), inputs, recorder=recorder))
    for r, one in enumerate(result["rounds"]):
        one["K_head"] = [recorder.steps_of(r, client_id, epochs) for client_id in one["participants"]]
    return result


class CountingDitto(Ditto):
    """Counts the steps of the own model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.round["K_personal"] = self.round.get("K_personal", 0) + ("anchor" in self.round)
        return super().training_step(batch, batch_idx)


def ditto(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]

    def note(client: Any, update: ClientUpdate) -> dict[str, Any]:
        return {"K_personal": client.round.get("K_personal", 0), "personal": client.own_model()}

    client = partial(CountingDitto, lam=cfg["lam"], personal_epochs=cfg["personal_epochs"])
    finished = run(client, inputs, recorder=Notes(note))
    result = noted(finished)
    for one in result["rounds"]:
        own = one["personal"]
        one["personal"] = [state and finished.weights(state) for state in own]
        one["personal_buffers"] = [state and finished.buffers(state) for state in own]
    return result


def fedrod_rounds(inputs: Inputs) -> dict[str, Any]:
    def note(client: Any, update: ClientUpdate) -> dict[str, Any]:
        head = flat(value.detach().clone() for value in client.personal_head.parameters())
        return {"personal_heads": head if client.memory.get("has_head") else None}

    cfg = inputs["cfg"]
    client = partial(FedRoD, gamma=cfg["gamma"])
    return noted(run(client, inputs, recorder=Notes(note), clip_norm=cfg.get("clip_norm")))


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fedbn": partial(plain, kind=FedBN),
    "fedper": partial(plain, personal="net.head.*"),
    "lg_fedavg": partial(plain, personal=["*", "!net.head.*"]),
    "fedrep": fedrep,
    "ditto": ditto,
    "fedrod": fedrod_rounds,
}
