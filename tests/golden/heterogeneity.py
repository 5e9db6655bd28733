"""Adapters of the methods against label skew: FedLMD, FedDecorr."""

from typing import Any

from fl_lightning import methods as M
from fl_lightning.types import ClientUpdate

from .end_to_end import Adapter, whole


def lmd_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"majority": client.round["majority"]}


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "fedlmd": whole(M.FedLMD, "beta temperature=tau teacher", lmd_note),
    "feddecorr": whole(M.FedDecorr, "beta form"),
}
