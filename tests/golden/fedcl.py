"""Adapters of FedCL."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.functional.importance import importance, importance_penalty
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.methods import FedCL
from fl_lightning.methods.fedcl import extra_communication
from fl_lightning.types import ClientUpdate, State

from .adapters_fn import Inputs, float64
from .end_to_end import Recorder, flat, rounds, run


def states(values: dict[str, Any]) -> State:
    return {name: float64(value) for name, value in values.items()}


def perceptron_loss(params: State, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    hidden = F.linear(x, params["W1"], params["b1"]).relu()
    return cross_entropy(F.linear(hidden, params["W2"], params["b2"]), y)


def estimated(inputs: Inputs) -> dict[str, Any]:
    x = float64(inputs["inputs"])
    y = torch.tensor(inputs["targets"])
    batches = zip(x.split(inputs["batch"]), y.split(inputs["batch"]), strict=True)
    params = states(inputs["params"])
    return {"omega": importance(loss=perceptron_loss, params=params, batches=batches, kind=inputs["kind"])}


def penalty(inputs: Inputs) -> dict[str, Any]:
    theta = states(inputs["theta"])
    received = states(inputs["theta_global"])
    if inputs["omega"] is None:
        omega = {name: torch.ones_like(value) for name, value in theta.items()}
    else:
        omega = states(inputs["omega"])
    return {"value": inputs["lam"] * importance_penalty(theta, received, omega)}


def communication(inputs: Inputs) -> dict[str, Any]:
    return {"value": extra_communication(inputs["rounds"], inputs["interval"])}


FN: dict[str, Callable[[Inputs], Any]] = {
    "importance": estimated,
    "cl_penalty": penalty,
    "extra_communication": communication,
}
METHOD: dict[str, Callable[[Inputs], Any]] = {}


class Omegas(Recorder):
    """Notes the Ω that the server sent in each round, and the round of the Ω that each client used, or -1."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor | None] = []
        self.used: list[dict[int, int]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        super().on_train_epoch_start(trainer, loop)
        self.sent.append(None)
        self.used.append({})

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        super().on_client_end(trainer, loop, update)
        mine = loop.client.round["importance"]
        of_server = loop.server_module.importance
        if of_server:
            self.sent[-1] = flat(of_server[name].expand_as(mine[name]) for name in mine)
        used = flat(mine.values())
        round_of_used = self.round_of(used)
        self.used[-1][update.client_id] = round_of_used
        assert round_of_used >= 0 or loop.client.when_missing == "local" or bool((used == 1).all())

    def round_of(self, omega: Tensor) -> int:
        """Return the first round in which the server sent this Ω, or -1."""
        for r, sent in enumerate(self.sent):
            if sent is not None and torch.equal(omega, sent):
                return r
        return -1


def fedcl_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    recorder = Omegas()
    client = partial(
        FedCL,
        strength=cfg["lam"],
        interval=cfg["interval"],
        importance=cfg["kind"],
        when_missing=cfg["when_missing"],
        importance_batch=cfg.get("importance_batch", 64),
    )
    result = rounds(run(client, inputs, sets=("proxy",), recorder=recorder))
    for of_round, sent, used in zip(result["rounds"], recorder.sent, recorder.used, strict=True):
        of_round["omega_sent"] = sent is not None
        of_round["omega"] = sent
        of_round["omega_round"] = [used[client_id] for client_id in of_round["participants"]]
    return result


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {"fedcl": fedcl_rounds}
