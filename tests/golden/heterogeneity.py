"""Adapters of the methods against label skew: FedLMD, FedDecorr, FedGKD, FedProto, CCVR, FedGen."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning import methods as M
from fl_lightning.methods.ccvr import ClassMoments
from fl_lightning.methods.fedgen import FedGenServer
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, State

from .end_to_end import Adapter, Inputs, Recorder, Run, flat, rounds, run, whole


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
    """Note the predictions of the client for its own samples after its training."""
    x = torch.from_numpy(client.case["problem"]["clients"][update.client_id]["X"])
    with torch.no_grad(), client.evaluation_mode():
        return {"deployed": client.deployed()(x)}


def proto_side(loop: Any) -> dict[str, Any]:
    server = loop.server_module
    return {"prototypes": server.prototypes.clone(), "prototype_seen": server.seen.tolist()}


class GivenNoise(M.CCVRServer):
    """Takes the noise of each round from the case, and notes the moments of the classes by round."""

    def __init__(self, noise: list[Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.given = [torch.from_numpy(of_round) for of_round in noise]
        self.noted: dict[int, ClassMoments] = {}

    def noise(self, width: int) -> Iterator[Tensor]:
        return iter(self.given[self.server.round_idx])

    def calibrate(self, moments: ClassMoments) -> State:
        self.noted[self.server.round_idx] = moments
        return super().calibrate(moments)


def ccvr(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    server = GivenNoise(
        inputs["noise"],
        every=cfg["every"],
        samples_per_class=cfg["samples_per_class"],
        covariance=cfg.get("covariance", "full"),
        calibration_epochs=cfg["calibration_epochs"],
        calibration_lr=cfg["calibration_lr"],
        calibration_momentum=cfg["calibration_momentum"],
        calibration_batch=cfg.get("calibration_batch", "full"),
    )
    recorder = Recorder()
    finished = run(M.FedAvg, inputs, recorder=recorder, server_module=server)
    found = rounds(finished)["rounds"]
    for r, of_round in enumerate(found):
        of_round["evaluated"] = finished.weights(recorder.evaluated[r])
        if r in server.noted:
            moments = server.noted[r]
            of_round["class_counts"] = moments.counts
            of_round["class_means"] = moments.means
            of_round["class_covariances"] = moments.covariances
    return {"rounds": found}


class GivenServer(FedGenServer):
    """Takes the first generator and the draws of a case."""

    def setup(self) -> None:
        super().setup()
        trained = [self.generator[name] for name in self.steps]
        sizes = [entry.numel() for entry in trained]
        given = torch.from_numpy(self.client.case["generator"]).split(sizes)
        for entry, value in zip(trained, given, strict=True):
            entry.copy_(value.view_as(entry))

    def begin_round(self, cohort: list[int]) -> None:
        super().begin_round(cohort)
        self.client.gen_steps = len(self.client.case["server_draws"][self.server.round_idx])

    def draws(self, step: int, classes: Tensor) -> tuple[Tensor, Tensor]:
        given = self.client.case["server_draws"][self.server.round_idx][step]
        return torch.from_numpy(given["labels"]), torch.from_numpy(given["noise"])


class GivenFedGen(M.FedGen):
    """Takes the draws of a case."""

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


GEN_SETTINGS = "alpha beta decay ensemble noise_dim gen_hidden=hidden gen_batch gen_lr gen_wd diversity"

METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {
    "ccvr": ccvr,
    "fedlmd": whole(M.FedLMD, "beta temperature=tau teacher", note=lmd_note),
    "fedgen": whole(GivenFedGen, GEN_SETTINGS, side=gen_side),
    "fedgkd": whole(M.FedGKD, "gamma temperature=tau models", side=gkd_side, more=of_fedgkd),
    "fedproto": whole(M.FedProto, "lam weighting=prototype_weighting predicts", note=proto_note, side=proto_side),
    "feddecorr": whole(M.FedDecorr, "beta form"),
}
