"""Adapters of the personalised and clustered methods: APFL, Per-FedAvg, pFedMe, FedBABU, FedAMP, IFCA."""

from functools import partial
from typing import Any

from fl_lightning import methods as M
from fl_lightning.types import ClientUpdate

from .end_to_end import Adapter, whole
from .tuned import tuned_rounds


def own_model(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"personal": client.own_model()}


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "fedbabu": partial(tuned_rounds, M.FedBABU),
    "pfedme": whole(M.PFedMe, "lam eta inner_steps start", own_model),
}
