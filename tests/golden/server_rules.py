"""Adapters of the rules, server optimizers and server sides: FedNova, FedAvgM, FedOpt, FedDF, the robust ones."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import (
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    NormClip,
    TrimmedMeanAggregator,
    UpdateTransform,
)
from fl_lightning.aggregation.robust import krum_scores
from fl_lightning.client.optimizers import Exposure
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.functional.losses import kl_divergence
from fl_lightning.functional.state import clone
from fl_lightning.methods import FedAdagrad, FedAdam, FedAvgM, FedDFServer, FedNovaAggregator, FedProx, FedYogi
from fl_lightning.types import Broadcast, ClientUpdate, State

from .adapters_fn import Inputs, aggregated
from .end_to_end import Recorder, Run, flat, rounds, run
from .feded import Server
from .fedka import fedka_run


def exposure(lrs: Iterable[float], rho: float, nesterov: bool = False, mu: float = 0.0) -> float:
    """E after one step with each lr, of FedProx's client."""
    sgd = SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=rho, nesterov=nesterov)
    counted = Exposure([sgd], FedProx(mu=mu).exposure_slope)
    for lr in lrs:
        sgd.param_groups[0]["lr"] = lr
        counted.step()
    return counted.value


def states(inputs: Inputs) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[str]]:
    """The server's state, the clients', and the trainable names."""
    named = "global" in inputs
    start, clients = (inputs["global"], inputs["locals"]) if named else ({"w": inputs["x"]}, inputs["ys"])
    clients = clients if named else [{"w": y} for y in clients]
    found = [{name: torch.from_numpy(value) for name, value in state.items()} for state in [start, *clients]]
    return found[0], found[1:], inputs.get("trainable", ["w"])


def fednova(inputs: Inputs) -> dict[str, Any]:
    lr, settings = inputs.get("lr"), (inputs["rho"], inputs.get("nesterov", False), inputs.get("mu", 0.0))
    if "n" not in inputs:
        E = exposure(inputs["lrs"] if "lrs" in inputs else [lr] * inputs["K"], *settings)
        return {"E": E, "a": E / (lr or 1.0)}
    start, clients, trainable = states(inputs)
    rule, lengths = FedNovaAggregator(), [exposure([lr] * K, *settings) for K in inputs["K"]]
    rule.attach(Server(start, trainable))
    for client_id, (state, n, K, E) in enumerate(zip(clients, inputs["n"], inputs["K"], lengths, strict=True)):
        update = ClientUpdate(client_id, n, K, E, state)
        rule.add(ClientUpdate(client_id, n, K, E, state, rule.client_statistics(update)))
    state = rule.finish()
    wrong = None
    if "bn.running_var" in state:
        p = torch.tensor(inputs["n"]).double() / sum(inputs["n"])
        name, step = "bn.running_var", rule.tau_eff * p / torch.tensor(lengths)
        wrong = start[name] + sum(s * (one[name] - start[name]) for s, one in zip(step, clients, strict=True))
    return {
        "state": state,
        "x_new": state["w"],
        "a": [E / lr for E in lengths],
        "tau_eff": rule.tau_eff / lr,
        "wrong_if_buffers_extrapolated": wrong,
    }


KINDS = {"adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}


def server_optimizer(kind: str, given: dict[str, Any], lr: float) -> Callable[..., Optimizer]:
    """The optimizer `fedavgm`, `adam`, `yogi` or `adagrad` with a case's settings."""
    if kind == "fedavgm":
        settings = {name: given[name] for name in ("nesterov", "ema") if name in given}
        return partial(FedAvgM, lr=lr, momentum=given["beta"], **settings)
    settings = {"beta1": given["b1"], "tau": given["tau"], "v_init": given.get("v_init", 0.0)}
    if kind != "adagrad":
        settings |= {"beta2": given["b2"], "bias_correction": given.get("bias_correction", False)}
    return partial(KINDS[kind], lr=lr, **settings)


def moments(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps, flat, in the order of the parameters."""
    kept = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    names = {"momentum_buffer": "v", "m": "m", "v": "v"}
    return {short: flat(one[name] for one in kept) for name, short in names.items() if all(name in k for k in kept)}


def stepped(kind: str, inputs: Inputs) -> dict[str, Any]:
    if "global" in inputs:
        start, clients, trainable = states(inputs)
        means = [aggregated(clients, inputs["n"], "samples")]
    else:
        start, trainable = {"w": torch.from_numpy(inputs["w0"])}, ["w"]
        means = [{"w": torch.from_numpy(mean)} for mean in inputs["means"]]
    optimizer = server_optimizer(kind, inputs, inputs.get("lr", 1.0))
    server = ServerOptimizer(optimizer, {name: start[name] for name in trainable})
    found, state = [], start
    for mean in means:
        state = server.step(state, mean, server.optimizer.step, None)
        found.append({"w": state["w"].clone(), **moments(server.optimizer)})
    return {"rounds": found, "state": state}


# --- whole rounds


class Noting(Recorder):
    """Notes further values of the loop after each round."""

    def __init__(self, note: Callable[[FederatedLoop], dict[str, Any]]) -> None:
        super().__init__()
        self.note, self.noted = note, []

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *rest: Any) -> None:
        super().on_train_batch_end(trainer, loop, *rest)
        self.noted.append(self.note(loop))

    def added(self, result: dict[str, Any]) -> dict[str, Any]:
        """The rounds of `result` with what was noted of each."""
        for one, noted in zip(result["rounds"], self.noted, strict=True):
            one.update(noted)
        return result


def client_of(cfg: dict[str, Any]) -> Callable[..., FedProx]:
    return partial(FedProx, mu=cfg.get("mu", 0.0))


def with_fednova(runs: Callable[..., tuple[Run, dict[str, Any]]], inputs: Inputs) -> dict[str, Any]:
    recorder = Noting(lambda loop: {"tau_eff": float(loop.aggregator.tau_eff)})
    finished, result = runs(inputs, recorder=recorder, aggregator=FedNovaAggregator())
    for r, one in enumerate(recorder.added(result)["rounds"]):
        updates = recorder.updates[r]
        one["a"] = [updates[c].exposure / one["lr"] for c in finished.schedule[r]]
        one["tau_eff"] /= one["lr"]
    return result


def plain(inputs: Inputs, **loop: Any) -> tuple[Run, dict[str, Any]]:
    finished = run(client_of(inputs["cfg"]), inputs, **loop)
    return finished, rounds(finished)


def with_optimizer(kind: str, inputs: Inputs) -> dict[str, Any]:
    recorder = Noting(lambda loop: moments(loop.trainer.optimizers[0]))
    cfg = inputs["cfg"]
    optimizer = server_optimizer(kind, cfg, cfg.get("server_lr", 1.0))
    return recorder.added(plain(inputs, recorder=recorder, server_optimizer=optimizer)[1])


def robust_rule(kind: str, given: dict[str, Any]) -> Aggregator:
    """The rule of a case, `krum` and so on, with its settings."""
    if kind == "trimmed_mean":
        return TrimmedMeanAggregator(given["beta"])
    if kind == "krum":
        return KrumAggregator(given["f"], given["m"])
    if kind == "geometric_median":
        return GeometricMedianAggregator(given["iters"], given["nu"])
    return MedianAggregator() if kind == "median" else Aggregator()


def robust(inputs: Inputs) -> dict[str, Any]:
    rows = torch.from_numpy(inputs["V"])
    kinds = {"beta": "trimmed_mean", "f": "krum", "iters": "geometric_median", "bound": "norm_clipping"}
    kind = next((kinds[name] for name in kinds if name in inputs), "median")
    server = Server({"w": torch.from_numpy(inputs["x"]) if "x" in inputs else rows[0]}, ["w"])
    rule, sizes = robust_rule(kind, inputs), inputs.get("n", [1] * len(rows))
    rule.attach(server)
    rule.weigh_by(inputs.get("weighting", "samples"))
    for client_id, (row, n) in enumerate(zip(rows, sizes, strict=True)):
        update = ClientUpdate(client_id, n, 1, 1.0, {"w": row})
        if kind == "norm_clipping":
            clip = NormClip(inputs["bound"])
            clip.setup(server)
            update = clip.on_server(update, Broadcast(0, "train", None))
        rule.add(update)
    found = {"out": rule.finish()["w"]}
    if kind == "krum":
        scores = krum_scores(rows, inputs["f"])
        found |= {"scores": scores, "selected": scores.argsort()[: inputs["m"]]}
    return found


class Trained(UpdateTransform):
    """Notes the clients' weights before they are clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, int], dict[str, Tensor]] = {}

    def on_server(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        self.seen[broadcast.round_idx, update.client_id] = clone(update.weights)
        return update


def robust_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg, trained = inputs["cfg"], Trained()
    clip = [NormClip(cfg["bound"])] if "bound" in cfg else []
    finished, _ = plain(inputs, aggregator=robust_rule(cfg["server"], cfg), transforms=[trained, *clip])
    for (r, client_id), weights in trained.seen.items():
        updates = finished.recorder.updates[r]
        updates[client_id] = replace(updates[client_id], weights=weights)
    return rounds(finished)


def feddf(inputs: Inputs) -> dict[str, Any]:
    student = torch.from_numpy(inputs["student"]).requires_grad_()
    teacher = torch.stack([torch.from_numpy(one) for one in inputs["teachers"]]).mean(0)
    loss = kl_divergence(student, teacher, inputs["T"])
    (gradient,) = torch.autograd.grad(loss, student)
    return {"loss": loss, "grad": gradient, "teacher_probs": (teacher / inputs["T"]).softmax(1)}


class NotingFedDF(FedDFServer):
    """FedDF that notes each round's mean and what it distils."""

    def begin_round(self, cohort: list[int]) -> None:
        self.noted: dict[str, Any] = {"mean": None, "teacher_probs": None}

    def distilled(self, student: State, target: Tensor) -> State:
        names, T = self.server.trainable, self.temperature
        self.noted = {"mean": flat(student[n] for n in names).clone(), "teacher_probs": (target / T).softmax(1)}
        return super().distilled(student, target)


def feddf_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg, recorder = inputs["cfg"], Noting(lambda loop: loop.server_module.noted)
    X = inputs["unlabelled"]
    names = ("distill_lr", "distill_steps")
    settings = {name: cfg[name] for name in names} | {"distill_schedule": cfg.get("distill_schedule", "constant")}
    side = NotingFedDF(temperature=cfg["T"], distill_batch="full", **settings)
    proxy = {"X": X, "y": np.zeros(len(X), dtype=np.int64)}
    given = {**inputs, "proxy": proxy}
    return recorder.added(plain(given, recorder=recorder, sets=("proxy",), server_module=side)[1])


METHOD: dict[str, Callable[[Inputs], Any]] = {
    "fednova": fednova,
    "fedavgm": partial(stepped, "fedavgm"),
    "robust": robust,
    "feddf": feddf,
    "fedopt": lambda inputs: stepped(inputs["kind"], inputs),
}
FN: dict[str, Callable[[Inputs], Any]] = {}
E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fednova": partial(with_fednova, plain),
    "fedka+fednova": partial(with_fednova, fedka_run),
    "robust": robust_rounds,
    "feddf": feddf_rounds,
    "fedavgm": partial(with_optimizer, "fedavgm"),
    **{f"fed{kind}": partial(with_optimizer, kind) for kind in KINDS},
}
