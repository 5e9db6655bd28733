"""Adapters of the methods against label skew: FedLMD, FedDecorr, FedGen, FedGKD."""

from typing import Any

import torch
from torch import Tensor

from fl_lightning import methods as M
from fl_lightning.methods.fedgen import FedGenServer
from fl_lightning.types import Broadcast, ClientData, ClientUpdate

from .end_to_end import Adapter, Run, flat, whole


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


class GivenServer(FedGenServer):
    """FedGen's server with the first generator and the draws of a case."""

    def setup(self) -> None:
        super().setup()
        flat_generator = torch.from_numpy(self.client.case["generator"])
        trained = [self.generator[name] for name in self.steps]
        for entry, given in zip(trained, flat_generator.split([x.numel() for x in trained]), strict=True):
            entry.copy_(given.view_as(entry))

    def begin_round(self, cohort: list[int]) -> None:
        super().begin_round(cohort)
        self.client.gen_steps = len(self.client.case["server_draws"][self.server.round_idx])

    def draws(self, step: int, classes: Tensor) -> tuple[Tensor, Tensor]:
        given = self.client.case["server_draws"][self.server.round_idx][step]
        return torch.from_numpy(given["labels"]), torch.from_numpy(given["noise"])


class GivenFedGen(M.FedGen):
    """FedGen's client with the draws of a case."""

    server_class = GivenServer

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, local)
        place = self.case["cfg"]["schedule"][broadcast.round_idx].index(local.client_id)
        self.round["given"] = self.case["client_draws"][broadcast.round_idx][place]
        self.round["next"] = "noise_batch"

    def noise(self, size: int) -> Tensor:
        name = self.round["next"]
        self.round["next"] = "noise_batch"
        return torch.from_numpy(self.round["given"][self.num_steps][name])

    def labels(self) -> Tensor:
        # The noise of these labels is drawn next.
        self.round["next"] = "noise"
        return torch.from_numpy(self.round["given"][self.num_steps]["labels"])


def gen_side(loop: Any) -> dict[str, Any]:
    side = loop.server_module
    statistics = {
        "running_mean": side.generator["norm.running_mean"].clone(),
        "running_var": side.generator["norm.running_var"].clone(),
        "num_batches_tracked": int(side.steps["norm.weight"]),
    }
    return {
        "generator": flat(side.generator[name] for name in side.steps),
        "generator_buffers": [statistics],
        "seen": side.seen["classes"].clone(),
    }


GEN_SETTINGS = "alpha beta decay ensemble noise_dim hidden gen_batch gen_lr gen_wd diversity"

METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "fedlmd": whole(M.FedLMD, "beta temperature=tau teacher", lmd_note),
    "fedgen": whole(GivenFedGen, GEN_SETTINGS, side=gen_side),
    "fedgkd": whole(M.FedGKD, "gamma temperature=tau models", side=gkd_side, more=of_fedgkd),
    "feddecorr": whole(M.FedDecorr, "beta form"),
}
