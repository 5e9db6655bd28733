"""Adapters of whole rounds of the baselines, with the parts of the methods that draw or note something."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import aggregation as rules
from fl_lightning import methods as M
from fl_lightning.functional.state import clone
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, State

from . import end_to_end
from .adapters_fn import Inputs
from .baseline_steps import KINDS, RULES, server_optimizer
from .end_to_end import Adapter, Recorder, Run, flat, last_own_model, whole
from .fedka import fedka_run


class Watched(M.MOON):
    """Notes the contrast before the first step."""

    def contrast(self, x: Tensor, features: Tensor) -> Tensor:
        value = super().contrast(x, features)
        self.round.setdefault("first", value.detach())
        return value


def of_scaffold(finished: Run, r: int) -> dict[str, Any]:
    return {"c": finished.server_state(r, "control"), "ci": finished.memories(r, "control")}


def of_feddyn(finished: Run, r: int) -> dict[str, Any]:
    mean = flat(finished.recorder.evaluated[r][name] for name in finished.client.params())
    return {
        "h": finished.server_state(r, "correction"),
        "g": finished.memories(r, "gradient"),
        "active_mean": mean,
    }


def moon_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    first = client.round.get("first", 0.0) if update.num_steps else None
    return {"contrastive_at_first_step": first, "previous_stored": bool(client.own_models())}


def of_fedcurv(finished: Run, r: int) -> dict[str, Any]:
    return {"U": finished.server_state(r, "u"), "V": finished.server_state(r, "v")}


class CountingDitto(M.Ditto):
    """Counts the steps of the personal model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "anchor" in self.round:
            self.round["K"] = self.round.get("K", 0) + 1
        return super().training_step(batch, batch_idx)


def ditto_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"K_personal": client.round.get("K", 0), "personal": last_own_model(client)}


def fedrod_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    head = flat(clone(client.personal_head.state_dict()).values())
    return {"personal_heads": head if client.memory.get("has_head") else None}


class GivenFedALA(M.FedALA):
    """Draws the samples of the case, and notes the passes over them."""

    def drawn(self, local: ClientData) -> Tensor:
        return torch.from_numpy(self.case["ala_indices"][local.client_id])

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round.update(losses=[], K=0)
        super().receive(broadcast, local)
        self.round["start"] = clone(self.entries())

    def one_pass(self, mixing: State, old: State, received: State, local: ClientData) -> tuple[State, float]:
        mixing, loss = super().one_pass(mixing=mixing, old=old, received=received, local=local)
        self.round["losses"].append(loss)
        self.round["K"] += len(list(local.batches()))
        return mixing, loss


def fedala_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    seen = client.round
    mixing = flat(client.memory["mixing"].values()) if seen["K"] else None
    return {
        "A": mixing,
        "K_ala": seen["K"],
        "start": seen["start"],
        "ala_losses": seen["losses"] or None,
    }


class GivenFedFOMOServer(M.fedfomo.FedFOMOServer):
    """Explores the clients of the case."""

    def explored(self, client_id: int, others: list[int], epsilon: float) -> list[int] | None:
        case = self.server.module.case
        if "explored" not in case:
            return None
        r = self.server.round_idx
        place = case["cfg"]["schedule"][r].index(client_id)
        return case["explored"][r][place]


class GivenFedFOMO(M.FedFOMO):
    """Splits its samples as the case does, and notes its start and its candidates."""

    def parts(self, local: ClientData) -> list[Tensor]:
        return [torch.from_numpy(self.case[name][local.client_id]) for name in ("train_indices", "val_indices")]

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, local)
        self.round["start"] = clone(self.entries())
        self.round["candidates"] = list(broadcast.extras["candidates"])


def fomo_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    candidates = client.round["candidates"]
    raw = client.round["helpfulness"][candidates]
    return {
        "start": client.round["start"],
        "candidates": candidates,
        "raw": raw,
        "weights": M.fedfomo.candidate_weights(raw),
    }


def fedpac_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    has_samples = bool(update.num_samples)
    if "h" in update.extras:
        return {name: update.extras[name] if has_samples else None for name in ("h", "v")}
    head = flat(clone(client.head.state_dict()).values())
    return {"combined_heads": head if has_samples else None}


def fedpac_side(loop: Any) -> dict[str, Any]:
    server = loop.server_module
    cohort = loop.data.cohort(loop.current_epoch)
    weights = torch.zeros(len(cohort), len(cohort)).double()
    columns = [cohort.index(client_id) for client_id in server.combined]
    for client_id, row in server.combined.items():
        weights[cohort.index(client_id), columns] = row
    return {
        "prototypes": server.prototypes.clone(),
        "prototype_seen": server.seen.clone(),
        "head_weights": weights,
    }


class NotingFedDFServer(M.FedDFServer):
    """Notes each round's mean and what the server distills."""

    noted: dict[str, Tensor] | None = None

    def distilled(self, student: State, target: Tensor) -> State:
        mean = flat(student[name] for name in self.server.trainable).clone()
        self.noted = {"mean": mean, "teacher_probs": (target / self.temperature).softmax(1)}
        return super().distilled(student, target)


def of_fednova(finished: Run, r: int) -> dict[str, Any]:
    lr = finished.cfg["lr"] * finished.cfg["lr_decay"] ** r
    accumulated_lrs = [update.accumulated_lr / lr for update in finished.cohort(r)]
    return {"a": accumulated_lrs, "tau_eff": finished.recorder.sides[r]["tau_eff"] / lr}


AFFINITY = end_to_end.server_buffer("server_module", "affinity")
TAU_EFF = end_to_end.server_buffer("aggregator", "tau_eff")
plain = partial(whole, partial(M.FedProx, mu=0.0), "mu")
"""FedAvg, or FedProx if the case has a mu."""


def fedka_fednova(inputs: Inputs) -> dict[str, Any]:
    finished, found = fedka_run(inputs, recorder=Recorder(side=TAU_EFF), aggregator=M.FedNovaAggregator())
    rounds = [{**one, **of_fednova(finished, r)} for r, one in enumerate(found["rounds"])]
    return {"rounds": rounds}


def feddf_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    server = NotingFedDFServer(
        cfg["T"],
        distill_lr=cfg["distill_lr"],
        distill_steps=cfg["distill_steps"],
        distill_schedule=cfg.get("distill_schedule", "constant"),
        distill_batch="full",
    )

    def side(loop: Any) -> dict[str, Any]:
        noted = server.noted or {"mean": None, "teacher_probs": None}
        server.noted = None
        return noted

    adapter = plain(side=side, server_module=server, sets=("proxy",))
    samples = inputs["unlabelled"]
    unread_labels = np.zeros(len(samples), dtype=np.int64)
    return adapter({**inputs, "proxy": {"X": samples, "y": unread_labels}})


def optimizer_rounds(kind: str, inputs: Inputs) -> dict[str, Any]:
    optimizer = server_optimizer(kind, inputs["cfg"], "server_lr")
    adapter = plain(side=end_to_end.server_moments(m="m", v="v"), server_optimizer=optimizer)
    return adapter(inputs)


def robust_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    rule = RULES[cfg["server"]](cfg)
    clip = rules.NormClip(cfg.get("bound", torch.inf), buffers="keep")
    return plain(aggregator=rule, transforms=clip)(inputs)


def scaffold_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"A": client.travelled}


METHOD: dict[str, Adapter] = {}
MIXING = "eta layers=p first_epochs=ala_epochs_first epochs=ala_epochs threshold=ala_threshold"
E2E: dict[str, Adapter] = {
    "scaffold": whole(M.SCAFFOLD, "where option", note=scaffold_note, more=of_scaffold),
    "feddyn": whole(partial(M.FedDyn, evaluates="active_mean"), "alpha", more=of_feddyn),
    "fedcurv": whole(M.FedCurv, "lam fisher scope fisher_samples=s", more=of_fedcurv),
    "moon": whole(Watched, "mu temperature=tau", note=moon_note),
    "fedlc": whole(M.FedLC, "tau form"),
    "fedrs": whole(M.FedRS, "alpha form"),
    "fedbn": whole(M.FedBN),
    "fedper": whole(M.FedAvg, personal="net.head.*"),
    "lg_fedavg": whole(M.FedAvg, personal=["*", "!net.head.*"]),
    "fedrep": whole(M.FedRep, "head_epochs"),
    "ditto": whole(CountingDitto, "lam personal_epochs", note=ditto_note),
    "fedrod": whole(M.FedRoD, "gamma", note=fedrod_note),
    "fedala": whole(GivenFedALA, MIXING, note=fedala_note),
    "fedfomo": whole(
        GivenFedFOMO,
        "epsilon num_candidates=M epsilon_decay",
        note=fomo_note,
        side=AFFINITY,
        server_module=GivenFedFOMOServer,
    ),
    "fedpac": whole(M.FedPAC, "lam head_epochs head_lr", note=fedpac_note, side=fedpac_side),
    "fednova": plain(side=TAU_EFF, more=of_fednova, aggregator=M.FedNovaAggregator),
    "fedka+fednova": fedka_fednova,
    **{f"fed{kind}": partial(optimizer_rounds, kind) for kind in KINDS},
    "robust": robust_rounds,
    "feddf": feddf_rounds,
}
