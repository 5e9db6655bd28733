"""Adapters of FedED, FedEXP and SAM."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from fl_lightning import Aggregator
from fl_lightning.functional.classes import in_local
from fl_lightning.methods import SAM, FedAvg, FedED, FedEXPAggregator
from fl_lightning.methods.feded import calibrated_softmax, empty_class_distillation, logit_suppression
from fl_lightning.methods.sam import perturbation

from .adapters_fn import Inputs, aggregated, linear_loss, on_logits, states, tensors
from .end_to_end import flat, rounds, run


def prior(inputs: Inputs) -> Tensor:
    return in_local(torch.tensor(inputs["counts"]))


def cal(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return calibrated_softmax(local, target, prior(inputs))


def cal_official(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return calibrated_softmax(local, target, prior(inputs), prior_eps=1e-9)


def dis(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return empty_class_distillation(local, teacher, prior(inputs))


def logit(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return logit_suppression(local, target, prior(inputs))


def logit_official(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return logit_suppression(local, target, prior(inputs), form="official")


def total(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    given = {"local": local, "teacher": teacher, "target": target, "inputs": inputs}
    return cal(**given) + inputs["lam"] * dis(**given) + inputs["logit_weight"] * logit(**given)


FN = {
    "feded_cal": on_logits(cal),
    "feded_dis": on_logits(dis),
    "feded_logit": on_logits(logit),
    "feded_logit_official": on_logits(logit_official),
    "feded_cal_official": on_logits(cal_official),
    "feded_total": on_logits(total),
}


# --- single steps of FedEXP and SAM


class Server:
    """Stands for a server with these weights, as an aggregator sees it."""

    round_idx = 0
    module = None

    def __init__(self, weights: dict[str, Tensor], trainable: list[str]) -> None:
        self.weights = weights
        self.exact_weights = weights
        self.trainable = tuple(trainable)
        self.cohort_size = 1000


def fedexp(inputs: Inputs) -> dict[str, Any]:
    if "w_t" in inputs:
        return fedexp_evaluation(inputs)
    start, clients = states(inputs)
    aggregator = FedEXPAggregator(eps=inputs["eps"], eps_scale=inputs["eps_scale"])
    aggregator.attach(Server(start, inputs.get("trainable", ["w"])))
    state = aggregated(clients, inputs["n"], inputs["weighting"], aggregator=aggregator)
    deltas = torch.stack([of_client["w"] - start["w"] for of_client in clients])
    shares = torch.ones(len(deltas)).double()
    if inputs["weighting"] == "samples":
        shares = torch.tensor(inputs["n"]).double()
    shares = shares / shares.sum()
    return {
        "eta_g": aggregator.eta_g,
        "state": state,
        "w_new": state["w"],
        "mean_sq": shares @ deltas.square().sum(1),
        "sq_mean": (shares @ deltas).square().sum(),
        "wrong_eta_if_counters_included": 1.0,
    }


def fedexp_evaluation(inputs: Inputs) -> dict[str, Any]:
    """Return the weights that are evaluated after the first round and after a later one."""
    before = {"w": torch.from_numpy(inputs["w_tm1"])}
    now = {"w": torch.from_numpy(inputs["w_t"])}
    aggregator = FedEXPAggregator()
    aggregator.attach(Server(before, ["w"]))
    aggregator.setup()
    aggregator.begin_round([0])
    first = aggregator.evaluation_weights(now)["w"]
    aggregator.begin_round([0])
    return {"eval": aggregator.evaluation_weights(now)["w"], "first_round_eval": first}


def fedsam(inputs: Inputs) -> dict[str, Any]:
    if "grads" in inputs:
        (gradients,) = tensors(inputs["grads"])
        norm = flat(gradients.values()).norm()
        return {"eps": perturbation(gradients, inputs["rho"]), "grad_norm": norm}
    batch = (torch.from_numpy(inputs["X"]), torch.from_numpy(inputs["y"]))
    params = {name: torch.from_numpy(value).requires_grad_() for name, value in inputs["init"].items()}
    sgd = partial(SGD, lr=inputs["lr"], weight_decay=inputs["wd"])
    optimizer = SAM(params.values(), sgd, sam_rho=inputs["rho"])
    passes = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = linear_loss(params, batch)
        loss.backward()
        passes.append({name: parameter.grad for name, parameter in params.items()})
        return loss

    optimizer.step(closure)
    first, second = passes
    return {"g0": first, "g_sam": second, "w_new": params}


METHOD: dict[str, Callable[[Inputs], Any]] = {"fedexp": fedexp, "fedsam": fedsam}


# --- whole rounds


def feded_client(cfg: dict[str, Any]) -> Callable[..., FedED]:
    return partial(FedED, lam=cfg["lam"], omega=cfg["omega"], logit_form=cfg["logit_form"])


def feded_rounds(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(feded_client(inputs["cfg"]), inputs))


class Watched(FedEXPAggregator):
    """Notes its step sizes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.step_sizes: list[float] = []

    def finish(self) -> dict[str, Tensor] | None:
        result = super().finish()
        self.step_sizes.append(float(self.eta_g))
        return result


def with_fedexp(client: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    aggregator: Aggregator = Watched(eps=cfg["eps"], eps_scale=cfg.get("eps_scale", "paper"))
    finished = run(client, inputs, aggregator=aggregator)
    result = rounds(finished)
    assert len(aggregator.step_sizes) == len(result["rounds"])
    for r, of_round in enumerate(result["rounds"]):
        evaluated = finished.recorder.evaluated[r]
        of_round["eta_g"] = aggregator.step_sizes[r]
        of_round["eval"] = finished.weights(evaluated)
        of_round["eval_buffers"] = finished.buffers(evaluated)
    return result


def feded_fedexp_rounds(inputs: Inputs) -> dict[str, Any]:
    return with_fedexp(feded_client(inputs["cfg"]), inputs)


def fedexp_rounds(inputs: Inputs) -> dict[str, Any]:
    return with_fedexp(FedAvg, inputs)


def fedsam_rounds(inputs: Inputs) -> dict[str, Any]:
    sam_rho = inputs["cfg"]["sam_rho"]
    return rounds(run(FedAvg, inputs, local_optimizer=lambda sgd: partial(SAM, base=sgd, sam_rho=sam_rho)))


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "feded": feded_rounds,
    "feded+fedexp": feded_fedexp_rounds,
    "fedexp": fedexp_rounds,
    "fedsam": fedsam_rounds,
}
