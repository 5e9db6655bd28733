"""Adapters of the methods with personal entries or a model of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.functional.density import DensityRatio, gaussian
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import clone
from fl_lightning.methods import Ditto, FedALA, FedAvg, FedBN, FedFOMO, FedPAC, FedRep, FedRoD
from fl_lightning.methods import fedala as ala
from fl_lightning.methods import fedfomo as fomo
from fl_lightning.methods import fedpac as pac
from fl_lightning.methods.fedrod import balanced_softmax, personal_loss
from fl_lightning.methods.selectivefd import kept_ensemble
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, State

from .adapters_fn import Inputs, float64
from .end_to_end import flat, whole

FN: dict[str, Callable[[Inputs], Any]] = {}


def states(*given: dict[str, Any]) -> list[State]:
    return [{name: torch.as_tensor(value) for name, value in state.items()} for state in given]


def fedrod(inputs: Inputs) -> dict[str, Any]:
    target, generic = torch.tensor(inputs["y"]), "logits" in inputs
    z = float64(inputs["logits" if generic else "logits_personal"]).requires_grad_()
    if generic:
        loss = balanced_softmax(z, target, torch.tensor(inputs["counts"]), inputs["gamma"])
    else:
        loss = personal_loss(float64(inputs["logits_generic_detached"]), z, target)
    return {"loss": loss, "grad" if generic else "grad_personal": torch.autograd.grad(loss, z)[0]}


def fedala(inputs: Inputs) -> dict[str, Any]:
    own, received, mixing = states(inputs["local"], inputs["global"], inputs["W0"])
    result = {}
    for step in (1, 2):
        theta = {name: value.requires_grad_() for name, value in ala.mixed(own, received, mixing).items()}
        loss = cross_entropy(F.linear(float64(inputs["X"]), theta["weight"], theta["bias"]), torch.tensor(inputs["y"]))
        gradients = dict(zip(theta, torch.autograd.grad(loss, [*theta.values()]), strict=True))
        mixing = ala.stepped(mixing, gradients, own, received, inputs["eta"])
        result |= {f"grad{step - 1}": gradients, f"W{step}": mixing, f"theta{step}": ala.mixed(own, received, mixing)}
    return result


def fedfomo(inputs: Inputs) -> dict[str, Any]:
    if "own" in inputs:
        own, *candidates = states(inputs["own"], *inputs["candidates"])
        return {"state": fomo.moved_towards(own, candidates, torch.tensor(inputs["weights"]).double())}
    theta, *others = states(*({"x": x} for x in (inputs["theta"], *inputs["others"])))
    away = torch.stack([(other["x"] - theta["x"]).norm() for other in others])
    raw = fomo.helpfulness(float64(inputs["loss_self"]), float64(inputs["losses"]), away, inputs["floor"])
    weights = fomo.candidate_weights(raw)
    return {"raw": raw, "weights": weights, "theta_new": fomo.moved_towards(theta, others, weights)["x"]}


def fedpac(inputs: Inputs) -> dict[str, Any]:
    if "P" in inputs:
        return {"weights": pac.head_weights(float64(inputs["P"]))}
    pairs = [(float64(one["features"]), torch.tensor(one["y"])) for one in inputs["clients"]]
    _, h, v = map(torch.stack, zip(*(pac.feature_statistics(f, y, inputs["C"]) for f, y in pairs), strict=True))
    matrix = pac.discrepancies(h, v, inputs["for_client"])
    weights = pac.head_weights(matrix)
    return {"h": h, "v": v, "P": matrix, "weights": weights, "objective": weights @ matrix @ weights}


def selective_fd(inputs: Inputs) -> dict[str, Any]:
    if "probs" in inputs:
        masks = float64(inputs["masks"])
        total = torch.einsum("nk,nkc->kc", masks, float64(inputs["probs"]))
        found = kept_ensemble(total, masks.sum(0), inputs["tau_server"], inputs["criterion"])
        return {"kept": found.rows, "ensemble": found.mean, "ambiguity": found.ambiguity}
    known, reference, held, proxy = (float64(inputs[name]) for name in ("known", "aux", "held_out", "proxy"))
    width, lam, n = inputs["width"], inputs["lam"], len(reference)
    ratio = DensityRatio.fit(known, reference, width, lam)
    threshold = ratio(held).quantile(inputs["quantile"])
    system = gaussian(reference, reference, width) / n + lam * torch.eye(n)
    result = {"alpha": ratio.alpha, "ratio_held_out": ratio(held), "ratio_proxy": ratio(proxy), "threshold": threshold}
    return {**result, "selected": ratio(proxy) > threshold, "alpha_of_official_bug": system @ system @ ratio.alpha}


METHOD: dict[str, Callable[[Inputs], Any]] = {
    one.__name__: one for one in (fedrod, fedala, fedfomo, fedpac, selective_fd)
}


# --- whole rounds


class CountingDitto(Ditto):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.round["K"] = self.round.get("K", 0) + ("anchor" in self.round)
        return super().training_step(batch, batch_idx)


def ditto_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"K_personal": client.round.get("K", 0), "personal": next(reversed(client.own_models()), None)}


def fedrod_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    head = flat(clone(client.personal_head.state_dict()).values())
    return {"personal_heads": head if client.memory.get("has_head") else None}


class GivenFedALA(FedALA):
    def drawn(self, local: ClientData) -> Tensor:
        return torch.from_numpy(self.case["ala_indices"][local.client_id])

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round.update(losses=[], K=0)
        super().receive(broadcast, local)
        self.round["start"] = clone(self.entries())

    def one_pass(self, mixing: State, own: State, received: State, local: ClientData) -> tuple[State, float]:
        mixing, loss = super().one_pass(mixing, own, received, local)
        self.round["losses"].append(loss)
        self.round["K"] += len([*local.batches()])
        return mixing, loss


def fedala_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    seen = client.round
    mixing = flat(client.memory["mixing"].values()) if seen["K"] else None
    return {"A": mixing, "K_ala": seen["K"], "start": seen["start"], "ala_losses": seen["losses"] or None}


class GivenServer(fomo.FedFOMOServer):
    def explored(self, client_id: int, others: list[int], epsilon: float) -> list[int] | None:
        case, r = self.server.module.case, self.server.round_idx
        return case["explored"][r][case["cfg"]["schedule"][r].index(client_id)] if "explored" in case else None


class GivenFedFOMO(FedFOMO):
    def parts(self, local: ClientData) -> list[Tensor]:
        return [torch.from_numpy(self.case[name][local.client_id]) for name in ("train_indices", "val_indices")]

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, local)
        self.round.update(start=clone(self.entries()), candidates=[*broadcast.extras["candidates"]])


def fedfomo_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    found = {name: client.round[name] for name in ("candidates", "start")}
    raw = client.round["helpfulness"][found["candidates"]]
    return {**found, "raw": raw, "weights": fomo.candidate_weights(raw)}


def fedfomo_side(loop: Any) -> dict[str, Any]:
    return {"affinity": loop.server_module.affinity.clone()}


def fedpac_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    if "h" in update.extras:
        return {name: update.extras[name] if update.num_samples else None for name in ("h", "v")}
    return {"combined_heads": flat(clone(client.head.state_dict()).values()) if update.num_samples else None}


def fedpac_side(loop: Any) -> dict[str, Any]:
    server, cohort = loop.server_module, loop.data.cohort(loop.current_epoch)
    weights = torch.zeros(len(cohort), len(cohort)).double()
    for client_id, row in server.combined.items():
        weights[cohort.index(client_id), [cohort.index(other) for other in server.combined]] = row
    return {"prototypes": server.prototypes + 0, "prototype_seen": server.seen | False, "head_weights": weights}


MIXING = "eta layers=p first_epochs=ala_epochs_first epochs=ala_epochs threshold=ala_threshold"
CHOICE = "epsilon num_candidates=M epsilon_decay"
E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fedbn": whole(FedBN),
    "fedper": whole(FedAvg, personal="net.head.*"),
    "lg_fedavg": whole(FedAvg, personal=["*", "!net.head.*"]),
    "fedrep": whole(FedRep, "head_epochs"),
    "ditto": whole(CountingDitto, "lam personal_epochs", ditto_note),
    "fedrod": whole(FedRoD, "gamma", fedrod_note),
    "fedala": whole(GivenFedALA, MIXING, fedala_note),
    "fedfomo": whole(GivenFedFOMO, CHOICE, fedfomo_note, fedfomo_side, server_module=GivenServer),
    "fedpac": whole(FedPAC, "lam head_epochs head_lr", fedpac_note, fedpac_side),
}
