"""Adapters of the personalised and clustered methods: APFL, Per-FedAvg, pFedMe, FedBABU, FedAMP, IFCA."""

from functools import partial
from typing import Any

from fl_lightning import methods as M
from fl_lightning.types import ClientUpdate

from .end_to_end import Adapter, Inputs, Run, rounds, run, whole
from .tuned import tuned_rounds


def apfl_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    own = client.memory.get("own_models", [None])[0]
    return {"personal": own, "alpha": client.memory.get("alpha", client.alpha)}


def deployed_by_cohort(loop: Any) -> dict[str, Any]:
    """What the participants of a round deploy after it."""
    cohort = loop.client.case["cfg"]["schedule"][loop.server.round_idx]
    return {"deployed": [loop.client_model(client_id).state_dict() for client_id in cohort]}


def of_deployed(finished: Run, r: int) -> dict[str, Any]:
    return {"deployed": [finished.weights(state) for state in finished.recorder.sides[r]["deployed"]]}


def perfedavg(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    kind = partial(M.PerFedAvg, **{name: cfg[name] for name in ("inner_lr", "form", "delta") if name in cfg})
    if "fine_tuning" not in cfg:
        return rounds(run(kind, inputs))
    # The method sets the learning rate, which the case names.
    asked = {name: value for name, value in cfg["fine_tuning"].items() if name != "lr"}
    return tuned_rounds(kind, {**inputs, "cfg": {**cfg, "fine_tuning": asked}})


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "apfl": whole(M.APFL, "alpha adaptive alpha_lr", note=apfl_note, side=deployed_by_cohort, more=of_deployed),
    "perfedavg": perfedavg,
}
