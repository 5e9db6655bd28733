"""Adapters of the methods against label skew: FedLMD, FedDecorr, FedGKD, FedProto."""

from typing import Any

import torch

from fl_lightning import methods as M
from fl_lightning.types import ClientUpdate

from .end_to_end import Adapter, Run, whole


def lmd_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"majority": client.round["majority"]}


def gkd_side(loop: Any) -> dict[str, Any]:
    if not loop.client.distils:
        return {"teacher_state": None}
    entries = loop.client.teacher("global").net.state_dict()
    return {"teacher_state": {f"net.{name}": value.clone() for name, value in entries.items()}}


def of_fedgkd(finished: Run, r: int) -> dict[str, Any]:
    state = finished.recorder.sides[r]["teacher_state"]
    if state is None:
        return {"teacher": None, "teacher_buffers": None}
    return {"teacher": finished.weights(state), "teacher_buffers": finished.buffers(state)}


def proto_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    """What the client would predict of its own samples after its training."""
    x = torch.from_numpy(client.case["problem"]["clients"][update.client_id]["X"])
    with torch.no_grad(), client.evaluation_mode():
        return {"deployed": client.deployed()(x)}


def proto_side(loop: Any) -> dict[str, Any]:
    server = loop.server_module
    return {"prototypes": server.prototypes.clone(), "prototype_seen": server.seen.tolist()}


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "fedlmd": whole(M.FedLMD, "beta temperature=tau teacher", lmd_note),
    "fedgkd": whole(M.FedGKD, "gamma temperature=tau models", side=gkd_side, more=of_fedgkd),
    "fedproto": whole(M.FedProto, "lam weighting=prototype_weighting predicts", proto_note, proto_side),
    "feddecorr": whole(M.FedDecorr, "beta form"),
}
