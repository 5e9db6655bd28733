"""Adapters of the personalised and clustered methods: APFL, Per-FedAvg, pFedMe, FedBABU, FedAMP, IFCA."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning import methods as M
from fl_lightning.functional.state import State, StateLike, clone
from fl_lightning.types import Broadcast, ClientData, ClientUpdate

from .end_to_end import Adapter, Inputs, Run, last_own_model, whole
from .tuned import tuned_rounds


def apfl_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    own = client.memory.get("own_models", [None])[0]
    return {"personal": own, "alpha": client.memory.get("alpha", client.alpha)}


def deployed_by_cohort(loop: Any) -> dict[str, Any]:
    """Return the models that the participants of a round deploy after it."""
    cohort = loop.client.case["cfg"]["schedule"][loop.server.round_idx]
    return {"deployed": [loop.client_model(client_id).state_dict() for client_id in cohort]}


def of_deployed(finished: Run, r: int) -> dict[str, Any]:
    return {"deployed": [finished.weights(state) for state in finished.recorder.sides[r]["deployed"]]}


def perfedavg(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    settings = {name: cfg[name] for name in ("inner_lr", "form", "delta") if name in cfg}
    fine_tuning = dict(cfg.get("fine_tuning") or {})
    if fine_tuning.get("lr") == cfg.get("inner_lr"):
        # The method sets this learning rate, which the case names.
        fine_tuning.pop("lr", None)
    return tuned_rounds(partial(M.PerFedAvg, **settings), {**inputs, "cfg": {**cfg, "fine_tuning": fine_tuning}})


class NotingAttention(M.fedamp.FedAMPServer):
    """Notes how the models of others weigh for each client of a round, before the round changes these models."""

    def begin_round(self, cohort: list[int]) -> None:
        super().begin_round(cohort)
        self.noted = {client_id: self.attention(client_id) for client_id in cohort}


class Started(M.FedAMP):
    """Notes the model from which each client trains."""

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, local)
        self.round["start"] = clone(self.entries())


def fedamp_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"start": client.round["start"], "personal": last_own_model(client)}


def fedamp(inputs: Inputs) -> dict[str, Any]:
    server = NotingAttention()
    schedule = inputs["cfg"]["schedule"]

    def side(loop: Any) -> dict[str, Any]:
        noted = [list(server.noted[client_id].values()) for client_id in schedule[loop.current_epoch]]
        return {"weights": [torch.tensor(weights, dtype=torch.float64) for weights in noted]}

    names = "attention alpha sigma lam self_weight"
    return whole(Started, names, note=fedamp_note, side=side, server_module=server)(inputs)


class Given(M.ifca.IFCAServer):
    """Begins with the models of the case."""

    def drawn(self, cluster: int, names: Sequence[str]) -> State:
        client: Any = self.server.module
        start = dict(self.server.weights)
        sizes = [parameter.numel() for parameter in client.parameters()]
        given = torch.from_numpy(client.case["models"][cluster - 1]).split(sizes)
        for (name, parameter), value in zip(client.named_parameters(), given, strict=True):
            start[name] = value.view(parameter.shape)
        return {name: start[name].clone() for name in names}


class Chooses(M.IFCA):
    """Notes the losses by which a client chooses.

    Args:
        shared: The shared part of the net, `body` or `head`, or None.
        given: Further settings of IFCA.
    """

    def __init__(self, shared: str | None = None, **given: Any) -> None:
        super().__init__(shared=f"net.{shared}.*" if shared else shared, **given)

    def losses(self, models: Sequence[StateLike], local: ClientData) -> Tensor:
        losses = super().losses(models, local)
        self.round["losses"] = losses
        return losses


def ifca_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    cluster = update.extras["cluster"]
    choice = None if cluster < 0 else cluster
    return {"choice": choice, "losses": client.round.get("losses")}


def ifca_side(loop: Any) -> dict[str, Any]:
    shared = {name: value.clone() for name, value in loop.client.state_dict().items()}
    return {"models_now": [{**shared, **clone(model)} for model in loop.server_module.models]}


def of_ifca(finished: Run, r: int) -> dict[str, Any]:
    models = finished.recorder.sides[r]["models_now"]
    return {
        "clusters": [finished.weights(model) for model in models],
        "clusters_buffers": [finished.buffers(model) for model in models],
    }


def own_model(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"personal": client.own_model()}


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "apfl": whole(M.APFL, "alpha adaptive alpha_lr", note=apfl_note, side=deployed_by_cohort, more=of_deployed),
    "perfedavg": perfedavg,
    "fedamp": fedamp,
    "ifca": whole(Chooses, "k shared", note=ifca_note, side=ifca_side, more=of_ifca, server_module=Given),
    "fedbabu": partial(tuned_rounds, M.FedBABU),
    "pfedme": whole(M.PFedMe, "lam eta inner_steps start", note=own_model),
}
