"""Adapters of FedED, FedEXP and SAM."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from fl_lightning import Aggregator
from fl_lightning.functional.classes import in_local
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.methods import SAM, FedAvg, FedED, FedEXPAggregator
from fl_lightning.methods.feded import calibrated_softmax, empty_class_distillation, logit_suppression
from fl_lightning.methods.sam import perturbation

from .adapters_fn import Inputs, aggregated, on_logits, states
from .end_to_end import rounds, run


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
    terms = (local, teacher, target, inputs)
    return cal(*terms) + inputs["lam"] * dis(*terms) + inputs["logit_weight"] * logit(*terms)


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
    """What an aggregator sees of a server that has these weights."""

    round_idx = 0
    module = None

    def __init__(self, weights: dict[str, Tensor], trainable: list[str]) -> None:
        self.weights = weights
        self.exact_weights = weights
        self.trainable = tuple(trainable)
        self.cohort_size = 1000


def fedexp(inputs: Inputs) -> dict[str, Any]:
    if "w_t" in inputs:
        now, before = ({"w": torch.from_numpy(inputs[name])} for name in ("w_t", "w_tm1"))
        aggregator = FedEXPAggregator()
        aggregator.attach(Server(before, ["w"]))
        aggregator.setup()
        aggregator.begin_round([0])
        first = aggregator.evaluation_weights(now)["w"]
        aggregator.begin_round([0])
        return {"eval": aggregator.evaluation_weights(now)["w"], "first_round_eval": first}
    start, clients = states(inputs)
    aggregator = FedEXPAggregator(eps=inputs["eps"], eps_scale=inputs["eps_scale"])
    aggregator.attach(Server(start, inputs.get("trainable", ["w"])))
    state = aggregated(clients, inputs["n"], inputs["weighting"], aggregator)
    deltas = torch.stack([one["w"] - start["w"] for one in clients])
    p = torch.tensor(inputs["n"]).double() if inputs["weighting"] == "samples" else torch.ones(len(deltas)).double()
    p = p / p.sum()
    return {
        "eta_g": aggregator.eta_g,
        "state": state,
        "w_new": state["w"],
        "mean_sq": p @ deltas.square().sum(1),
        "sq_mean": (p @ deltas).square().sum(),
        "wrong_eta_if_counters_included": 1.0,
    }


def fedsam(inputs: Inputs) -> dict[str, Any]:
    if "grads" in inputs:
        gradients = {name: torch.from_numpy(value) for name, value in inputs["grads"].items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        return {"eps": perturbation(gradients, inputs["rho"]), "grad_norm": norm}
    X = torch.from_numpy(inputs["X"])
    y = torch.from_numpy(inputs["y"])
    params = {name: torch.from_numpy(value).requires_grad_() for name, value in inputs["init"].items()}
    sgd = partial(SGD, lr=inputs["lr"], weight_decay=inputs["wd"])
    optimizer = SAM(params.values(), sgd, sam_rho=inputs["rho"])
    passes = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(X @ params["weight"].T + params["bias"], y)
        loss.backward()
        passes.append({name: parameter.grad for name, parameter in params.items()})
        return loss

    optimizer.step(closure)
    return {"g0": passes[0], "g_sam": passes[1], "w_new": params}


METHOD: dict[str, Callable[[Inputs], Any]] = {"fedexp": fedexp, "fedsam": fedsam}


# --- whole rounds


def feded_client(cfg: dict[str, Any]) -> Callable[..., FedED]:
    return partial(FedED, lam=cfg["lam"], omega=cfg["omega"], logit_form=cfg["logit_form"])


def feded_rounds(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(feded_client(inputs["cfg"]), inputs))


class Watched(FedEXPAggregator):
    """FedEXP that notes its step size and what it would have evaluated."""

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
    for one, evaluated, step_size in zip(
        result["rounds"], finished.recorder.evaluated, aggregator.step_sizes, strict=True
    ):
        one |= {"eta_g": step_size, "eval": finished.weights(evaluated), "eval_buffers": finished.buffers(evaluated)}
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
