"""Adapters of the rules, server optimizers and server sides: FedNova, FedAvgM, FedOpt, FedDF, the robust ones."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning import Aggregator
from fl_lightning import aggregation as rules
from fl_lightning.client.optimizers import Exposure, LocalProgress
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.functional.losses import kl_divergence
from fl_lightning.methods import FedAdagrad, FedAdam, FedAvgM, FedDFServer, FedNovaAggregator, FedProx, FedYogi
from fl_lightning.types import State

from .adapters_fn import Inputs, aggregated, states
from .end_to_end import Recorder, Run, flat, rounds, run
from .feded import Server
from .fedka import fedka_run


def plain(inputs: Inputs, **settings: Any) -> tuple[Run, dict[str, Any]]:
    """FedAvg, or FedProx where the case has a mu, with settings of the run or the loop."""
    finished = run(partial(FedProx, mu=inputs["cfg"].get("mu", 0.0)), inputs, **settings)
    return finished, rounds(finished)


# --- FedNova


def exposure(lrs: Iterable[float], rho: float, nesterov: bool, mu: float) -> float:
    """E after one step with each lr, of FedProx's client."""
    sgd = SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=rho, nesterov=nesterov)
    counted, progress = Exposure([sgd], FedProx(mu=mu).exposure_slope), LocalProgress()
    counted.begin(progress)
    for lr in lrs:
        sgd.param_groups[0]["lr"] = lr
        counted.step()
    return progress.exposure


def fednova(inputs: Inputs) -> dict[str, Any]:
    lr, given = inputs.get("lr", 1.0), (inputs["rho"], inputs.get("nesterov", False), inputs.get("mu", 0.0))
    if "n" not in inputs:
        E = exposure(inputs["lrs"] if "lrs" in inputs else [lr] * inputs["K"], *given)
        return {"E": E, "a": E / lr}
    start, clients = states(inputs)
    lengths, found = [exposure([lr] * K, *given) for K in inputs["K"]], []
    for trainable in (inputs.get("trainable", ["w"]), [name for name, x in start.items() if x.is_floating_point()]):
        rule = FedNovaAggregator()
        rule.attach(Server(start, trainable))
        found.append(aggregated(clients, inputs["n"], "samples", rule, lengths))
    right, wrong = found
    more = {"state": right, "x_new": right["w"], "wrong_if_buffers_extrapolated": wrong.get("bn.running_var")}
    return {"a": [E / lr for E in lengths], "tau_eff": rule.tau_eff / lr, **more}


def fednova_rounds(runs: Callable[..., tuple[Run, dict[str, Any]]], inputs: Inputs) -> dict[str, Any]:
    recorder = Recorder(side=lambda loop: {"tau_eff": float(loop.aggregator.tau_eff)})
    finished, result = runs(inputs, recorder=recorder, aggregator=FedNovaAggregator())
    for r, one in enumerate(result["rounds"]):
        one["a"] = [recorder.updates[r][c].exposure / one["lr"] for c in finished.schedule[r]]
        one["tau_eff"] /= one["lr"]
    return result


# --- server optimizers

KINDS = {"fedavgm": FedAvgM, "adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}
NAMES = {"beta": "momentum", "b1": "beta1", "b2": "beta2"}


def server_optimizer(kind: str, given: dict[str, Any], lr: float) -> Callable[..., Optimizer]:
    own = {"fedavgm": ("beta", "nesterov", "ema"), "adagrad": ("b1", "tau", "v_init")}
    names = own.get(kind, ("b1", "b2", "tau", "v_init", "bias_correction"))
    return partial(KINDS[kind], lr=lr, **{NAMES.get(name, name): given[name] for name in names if name in given})


def moments(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps, flat, in the order of the parameters."""
    kept = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return {name: flat(one[name] for one in kept) for name in ("m", "v") if name in kept[0]}


def stepped(kind: str, inputs: Inputs) -> dict[str, Any]:
    if "global" in inputs:
        state, clients = states(inputs)
        means = [aggregated(clients, inputs["n"], "samples")]
    else:
        state, *means = ({"w": torch.from_numpy(w)} for w in [inputs["w0"], *inputs["means"]])
    trainable = {name: state[name] for name in inputs.get("trainable", ["w"])}
    server, found = ServerOptimizer(server_optimizer(kind, inputs, inputs.get("lr", 1.0)), trainable), []
    for mean in means:
        state = server.step(state, mean, server.optimizer.step, None)
        found.append({"w": state["w"].clone(), **moments(server.optimizer)})
    return {"rounds": found, "state": state}


def optimizer_rounds(kind: str, inputs: Inputs) -> dict[str, Any]:
    cfg, recorder = inputs["cfg"], Recorder(side=lambda loop: moments(loop.trainer.optimizers[0]))
    return plain(inputs, recorder=recorder, server_optimizer=server_optimizer(kind, cfg, cfg.get("server_lr", 1.0)))[1]


# --- robust rules

RULES: dict[str, Callable[[dict[str, Any]], Aggregator]] = {
    "norm_clipping": lambda given: Aggregator(),
    "krum": lambda given: rules.KrumAggregator(given["f"], given["m"]),
    "trimmed_mean": lambda given: rules.TrimmedMeanAggregator(given["beta"]),
    "geometric_median": lambda given: rules.GeometricMedianAggregator(given["iters"], given["nu"]),
    "median": lambda given: rules.MedianAggregator(),
}


def robust(inputs: Inputs) -> dict[str, Any]:
    rows = torch.from_numpy(inputs["V"])
    signs = {"bound": "norm_clipping", "f": "krum", "beta": "trimmed_mean", "iters": "geometric_median", "V": "median"}
    rule = RULES[next(kind for name, kind in signs.items() if name in inputs)](inputs)
    clip = rules.NormClip(inputs.get("bound", torch.inf))
    for part in (rule.attach, clip.setup):
        part(Server({"w": torch.from_numpy(inputs["x"]) if "x" in inputs else rows[0]}, ["w"]))
    sizes, weighting = inputs.get("n", [1] * len(rows)), inputs.get("weighting", "samples")
    out = aggregated([{"w": row} for row in rows], sizes, weighting, rule, transform=clip)["w"]
    scores = rules.robust.krum_scores(rows, inputs["f"]) if "f" in inputs else None
    return {"out": out, "scores": scores, "selected": scores is not None and scores.argsort()[: inputs["m"]]}


def robust_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    clip = rules.NormClip(cfg.get("bound", torch.inf))
    return plain(inputs, aggregator=RULES[cfg["server"]](cfg), transforms=[clip])[1]


# --- FedDF


def feddf(inputs: Inputs) -> dict[str, Any]:
    student = torch.from_numpy(inputs["student"]).requires_grad_()
    teacher = torch.stack([torch.from_numpy(one) for one in inputs["teachers"]]).mean(0)
    loss = kl_divergence(student, teacher, inputs["T"])
    (gradient,) = torch.autograd.grad(loss, student)
    return {"loss": loss, "grad": gradient, "teacher_probs": (teacher / inputs["T"]).softmax(1)}


class Noting(FedDFServer):
    """FedDF that notes each round's mean and what it distils."""

    def begin_round(self, cohort: list[int]) -> None:
        self.noted: dict[str, Any] = {"mean": None, "teacher_probs": None}

    def distilled(self, student: State, target: Tensor) -> State:
        mean = flat(student[name] for name in self.server.trainable).clone()
        self.noted = {"mean": mean, "teacher_probs": (target / self.temperature).softmax(1)}
        return super().distilled(student, target)


def feddf_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg, X = inputs["cfg"], inputs["unlabelled"]
    settings = {name: cfg[name] for name in ("distill_lr", "distill_steps")}
    side = Noting(cfg["T"], distill_schedule=cfg.get("distill_schedule", "constant"), distill_batch="full", **settings)
    given = {**inputs, "proxy": {"X": X, "y": np.zeros(len(X), dtype=np.int64)}}
    recorder = Recorder(side=lambda loop: side.noted)
    return plain(given, sets=("proxy",), recorder=recorder, server_module=side)[1]


FN: dict[str, Callable[[Inputs], Any]] = {}
METHOD: dict[str, Callable[[Inputs], Any]] = {
    "fednova": fednova,
    "fedavgm": partial(stepped, "fedavgm"),
    "fedopt": lambda inputs: stepped(inputs["kind"], inputs),
    "robust": robust,
    "feddf": feddf,
}
E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fednova": partial(fednova_rounds, plain),
    "fedka+fednova": partial(fednova_rounds, fedka_run),
    "fedavgm": partial(optimizer_rounds, "fedavgm"),
    **{f"fed{kind}": partial(optimizer_rounds, kind) for kind in ("adam", "yogi", "adagrad")},
    "robust": robust_rounds,
    "feddf": feddf_rounds,
}
