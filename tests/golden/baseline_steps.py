"""Adapters of single steps of the baselines: control terms, losses, personal models, the server's rules and steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from fl_lightning import aggregation as rules
from fl_lightning import methods as M
from fl_lightning.client.progress import AccumulatedLR, ClientProgress
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.functional.density import DensityRatio, gaussian
from fl_lightning.functional.importance import batch_fisher, importance
from fl_lightning.functional.losses import calibrated_cross_entropy, kl_divergence
from fl_lightning.functional.state import add, sub

from . import end_to_end
from .adapters_fn import Inputs, aggregated, float64, linear_loss, server_step, states, tensors, with_gradient
from .end_to_end import Adapter
from .feded import Server

W = "module.w"
"""Name of the single entry of a case without names."""


def entry(inputs: Inputs, name: str) -> dict[str, Tensor]:
    """Return an input as the state with the single entry."""
    return {W: float64(inputs[name])}


# --- control terms


def scaffold_step(inputs: Inputs) -> dict[str, Any]:
    if "ys" in inputs:
        return scaffold_at_server(inputs)
    client = M.SCAFFOLD(where=inputs["where"], module=end_to_end.GivenGradients(inputs))
    memory = {"control": entry(inputs, "ci")}
    result = end_to_end.train_given(client, memory, control=entry(inputs, "c"))
    return {
        "y": client.module.w,
        "traj": client.module.steps,
        "dc": result.update.extras["control_change"][W],
        "ci_plus": result.memory["control"][W],
        "A": client.travelled,
    }


def scaffold_at_server(inputs: Inputs) -> dict[str, Any]:
    sent = [{"control_change": change} for change in inputs["dcs"]]
    _, new, control = server_step(M.SCAFFOLD(), inputs, start=inputs["x"], kept=inputs["c"], sent=sent)
    x = entry(inputs, "x")
    server = ServerOptimizer(partial(SGD, lr=inputs["server_lr"]), x)
    stepped = server.step(x, new, run=server.optimizer.step, scaler=None)
    return {"x": stepped[W], "c": control}


def feddyn_step(inputs: Inputs) -> dict[str, Any]:
    if "theta" in inputs:
        return feddyn_at_client(inputs)
    client = M.FedDyn(inputs["alpha"], "active_mean")
    without_extras = [{} for _ in inputs["ys"]]
    server, new, h = server_step(
        client,
        inputs,
        start=inputs["theta_g"],
        kept=inputs["h"],
        sent=without_extras,
    )
    return {"theta": new[W], "h": h, "active_mean": server.evaluation_weights(new)[W]}


def feddyn_at_client(inputs: Inputs) -> dict[str, Any]:
    alpha = inputs["alpha"]
    received = entry(inputs, "theta_g")
    gradient = entry(inputs, "g")

    def penalty(theta: Tensor, _: Inputs) -> Tensor:
        return M.feddyn.dynamic_regularizer({W: theta}, received, gradient, alpha=alpha)

    found = with_gradient("theta", "penalty", penalty)(inputs)
    change = sub(entry(inputs, "theta"), received)
    return {**found, "g_new": add(gradient, change, -alpha)[W]}


def fedcurv_step(inputs: Inputs) -> dict[str, Any]:
    if "w" not in inputs:
        return fisher_step(inputs)
    curvature = {W: float64(inputs["U"]) - float64(inputs["u_own"])}
    pull = {W: float64(inputs["V"]) - float64(inputs["v_own"])}

    def penalty(w: Tensor, _: Inputs) -> Tensor:
        return M.fedcurv.curvature_penalty({W: w}, curvature, pull) * inputs["lam"]

    found = with_gradient("w", "penalty", penalty)(inputs)
    return {**found, "direct_minus_const": found["penalty"]}


def fisher_step(inputs: Inputs) -> dict[str, Any]:
    params = {name: float64(value) for name, value in inputs["init"].items()}
    batches = []
    for first, end in inputs["batches"]:
        batches.append((float64(inputs["X"][first:end]), torch.tensor(inputs["y"][first:end])))
    return {
        "sample": importance(loss=linear_loss, params=params, batches=batches, kind="square"),
        "batch": batch_fisher(loss=linear_loss, params=params, batches=batches),
    }


# --- losses


def moon_step(z: Tensor, inputs: Inputs) -> Tensor:
    return M.moon.model_contrastive(
        local=z,
        received=float64(inputs["z_g"]),
        previous=[float64(features) for features in inputs["z_prevs"]],
        temperature=inputs["tau"],
    )


def fedlc_step(logits: Tensor, inputs: Inputs) -> Tensor:
    form = inputs.get("form", "softmax")
    shift = M.fedlc.margins(torch.tensor(inputs["counts"]), tau=inputs["tau"], form=form)
    loss = M.fedlc.calibrated_margin_loss if form == "paper" else calibrated_cross_entropy
    return loss(logits, torch.tensor(inputs["y"]), shift)


def fedrs_step(logits: Tensor, inputs: Inputs) -> Tensor:
    form = inputs.get("form", "hard")
    scale = M.fedrs.scaling(torch.tensor(inputs["counts"]), inputs["alpha"], form)
    return M.fedrs.restricted_cross_entropy(logits, torch.tensor(inputs["y"]), scale)


def fedalign_step(inputs: Inputs) -> dict[str, Any]:
    before = float64(inputs["f1"]).unsqueeze(0)
    narrow = lipschitz(before, float64(inputs["f2_sub"]).unsqueeze(0), inputs["iters"])
    full = lipschitz(before, float64(inputs["f2_full"]).unsqueeze(0), inputs["iters"])
    return {
        "sub": narrow[0],
        "full": full[0],
        "mse": F.mse_loss(narrow, full),
        "scaled_loss_value": M.fedalign.aligned(float64(inputs["ce"]), narrow, full, mu=inputs["mu"]),
    }


def lipschitz(before: Tensor, after: Tensor, iters: int) -> Tensor:
    return M.fedalign.spectral_norm(M.fedalign.transmission(before, after), iters)


def fedrod_step(inputs: Inputs) -> dict[str, Any]:
    target = torch.tensor(inputs["y"])
    if "logits" in inputs:

        def balanced(logits: Tensor, _: Inputs) -> Tensor:
            counts = torch.tensor(inputs["counts"])
            return M.fedrod.balanced_softmax(logits, target, counts, gamma=inputs["gamma"])

        return with_gradient("logits", "loss", balanced)(inputs)

    def personal(logits: Tensor, _: Inputs) -> Tensor:
        return M.fedrod.personal_loss(float64(inputs["logits_generic_detached"]), logits, target)

    return with_gradient("logits_personal", "loss", personal)(inputs)


def feddf_step(inputs: Inputs) -> dict[str, Any]:
    teacher = torch.stack([torch.from_numpy(one) for one in inputs["teachers"]]).mean(0)

    def distance(student: Tensor, _: Inputs) -> Tensor:
        return kl_divergence(student, teacher, inputs["T"])

    found = with_gradient("student", "loss", distance)(inputs)
    return {**found, "teacher_probs": (teacher / inputs["T"]).softmax(1)}


# --- personal entries and models


def fedala_step(inputs: Inputs) -> dict[str, Any]:
    own, received, mixing = tensors(inputs["local"], inputs["global"], inputs["W0"])
    batch = (float64(inputs["X"]), torch.tensor(inputs["y"]))
    result = {}
    for step in (1, 2):
        theta = M.fedala.mixed(own, received, mixing)
        for value in theta.values():
            value.requires_grad_()
        found = torch.autograd.grad(linear_loss(theta, batch), list(theta.values()))
        gradients = dict(zip(theta, found, strict=True))
        mixing = M.fedala.stepped(mixing=mixing, gradients=gradients, old=own, received=received, eta=inputs["eta"])
        result[f"grad{step - 1}"] = gradients
        result[f"W{step}"] = mixing
        result[f"theta{step}"] = M.fedala.mixed(own, received, mixing)
    return result


def fedfomo_step(inputs: Inputs) -> dict[str, Any]:
    if "own" in inputs:
        (own,) = tensors(inputs["own"])
        candidates = tensors(*inputs["candidates"])
        weights = torch.tensor(inputs["weights"]).double()
        return {"state": M.fedfomo.moved_towards(own, candidates, weights)}
    own = {"x": torch.as_tensor(inputs["theta"])}
    candidates = [{"x": torch.as_tensor(other)} for other in inputs["others"]]
    raw = M.fedfomo.helpfulness(
        own_loss=float64(inputs["loss_self"]),
        losses=float64(inputs["losses"]),
        distances=torch.stack([(candidate["x"] - own["x"]).norm() for candidate in candidates]),
        floor=inputs["floor"],
    )
    weights = M.fedfomo.candidate_weights(raw)
    return {"raw": raw, "weights": weights, "theta_new": M.fedfomo.moved_towards(own, candidates, weights)["x"]}


def fedpac_step(inputs: Inputs) -> dict[str, Any]:
    if "P" in inputs:
        return {"weights": M.fedpac.head_weights(float64(inputs["P"]))}
    statistics = []
    for client in inputs["clients"]:
        features = float64(client["features"])
        statistics.append(M.fedpac.feature_statistics(features, torch.tensor(client["y"]), inputs["C"]))
    h = torch.stack([of_client.h for of_client in statistics])
    v = torch.stack([of_client.v for of_client in statistics])
    matrix = M.fedpac.discrepancies(h, v, inputs["for_client"])
    weights = M.fedpac.head_weights(matrix)
    return {"h": h, "v": v, "P": matrix, "weights": weights, "objective": weights @ matrix @ weights}


def selective_fd_step(inputs: Inputs) -> dict[str, Any]:
    if "probs" in inputs:
        return ensemble_step(inputs)
    known = float64(inputs["known"])
    reference = float64(inputs["aux"])
    held_out = float64(inputs["held_out"])
    proxy = float64(inputs["proxy"])
    lam = inputs["lam"]
    n = len(reference)
    ratio = DensityRatio.fit(known=known, reference=reference, width=inputs["width"], lam=lam)
    threshold = ratio(held_out).quantile(inputs["quantile"])
    system = gaussian(reference, reference, inputs["width"]) / n + lam * torch.eye(n)
    return {
        "alpha": ratio.alpha,
        "ratio_held_out": ratio(held_out),
        "ratio_proxy": ratio(proxy),
        "threshold": threshold,
        "selected": ratio(proxy) > threshold,
        "alpha_of_official_bug": system @ system @ ratio.alpha,
    }


def ensemble_step(inputs: Inputs) -> dict[str, Any]:
    masks = float64(inputs["masks"])
    found = M.selectivefd.kept_ensemble(
        total=torch.einsum("nk,nkc->kc", masks, float64(inputs["probs"])),
        counts=masks.sum(0),
        tau=inputs["tau_server"],
        kind=inputs["criterion"],
    )
    return {"kept": found.rows, "ensemble": found.mean, "ambiguity": found.ambiguity}


# --- FedNova


def accumulated_lr(lrs: Iterable[float], *, rho: float, nesterov: bool, mu: float) -> float:
    """Return E after one step with each learning rate, of FedProx's client."""
    sgd = SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=rho, nesterov=nesterov)
    counted = AccumulatedLR([sgd], M.FedProx(mu=mu).accumulated_lr_slope)
    progress = ClientProgress()
    counted.begin(progress)
    for lr in lrs:
        sgd.param_groups[0]["lr"] = lr
        counted.step()
    return progress.accumulated_lr


def fednova_step(inputs: Inputs) -> dict[str, Any]:
    lr = inputs.get("lr", 1.0)
    accumulated = partial(
        accumulated_lr,
        rho=inputs["rho"],
        nesterov=inputs.get("nesterov", False),
        mu=inputs.get("mu", 0.0),
    )
    if "n" not in inputs:
        E = accumulated(inputs["lrs"] if "lrs" in inputs else [lr] * inputs["K"])
        return {"E": E, "a": E / lr}
    start, clients = states(inputs)
    accumulated_lrs = [accumulated([lr] * K) for K in inputs["K"]]

    def normalized(trainable: list[str]) -> tuple[M.FedNovaAggregator, dict[str, Tensor]]:
        rule = M.FedNovaAggregator()
        rule.attach(Server(start, trainable))
        state = aggregated(clients, inputs["n"], "samples", aggregator=rule, accumulated_lrs=accumulated_lrs)
        return rule, state

    rule, right = normalized(inputs.get("trainable", ["w"]))
    floats = [name for name, value in start.items() if value.is_floating_point()]
    _, wrong = normalized(floats)
    return {
        "a": [E / lr for E in accumulated_lrs],
        "tau_eff": rule.tau_eff / lr,
        "state": right,
        "x_new": right["w"],
        "wrong_if_buffers_extrapolated": wrong.get("bn.running_var"),
    }


# --- server optimizers

KINDS = {"avgm": M.FedAvgM, "adam": M.FedAdam, "yogi": M.FedYogi, "adagrad": M.FedAdagrad}
NAMES = {"beta": "momentum", "b1": "beta1", "b2": "beta2"}
"""Names of settings where those of the cases differ."""

SETTINGS = {
    "avgm": ("beta", "nesterov", "ema"),
    "adagrad": ("b1", "tau", "v_init"),
}
ADAPTIVE_SETTINGS = ("b1", "b2", "tau", "v_init", "bias_correction")


def server_optimizer(kind: str, given: dict[str, Any], lr: str) -> Callable[..., Optimizer]:
    """Make the factory of a server optimizer.

    Args:
        kind: A key of `KINDS`.
        given: Settings by the names of the cases, among others.
        lr: Name of the learning rate in `given`. The learning rate is 1 if it is missing.
    """
    settings = {}
    for name in SETTINGS.get(kind, ADAPTIVE_SETTINGS):
        if name in given:
            settings[NAMES.get(name, name)] = given[name]
    return partial(KINDS[kind], lr=given.get(lr, 1.0), **settings)


def optimizer_step(inputs: Inputs) -> dict[str, Any]:
    if "global" in inputs:
        state, clients = states(inputs)
        means = [aggregated(clients, inputs["n"], "samples")]
    else:
        (state,) = tensors({"w": inputs["w0"]})
        means = tensors(*({"w": mean} for mean in inputs["means"]))
    trainable = {name: state[name] for name in inputs.get("trainable", ["w"])}
    server = ServerOptimizer(server_optimizer(inputs.get("kind", "avgm"), inputs, "lr"), trainable)
    rounds = []
    for mean in means:
        state = server.step(state, mean, run=server.optimizer.step, scaler=None)
        rounds.append({"w": state["w"].clone(), **end_to_end.moments(server.optimizer, m="m", v="v")})
    return {"rounds": rounds, "state": state}


# --- robust rules

RULES: dict[str, Callable[[dict[str, Any]], rules.Aggregator]] = {
    "norm_clipping": lambda given: rules.Aggregator(),
    "krum": lambda given: rules.KrumAggregator(f=given["f"], num_selected=given["m"]),
    "trimmed_mean": lambda given: rules.TrimmedMeanAggregator(beta=given["beta"]),
    "geometric_median": lambda given: rules.GeometricMedianAggregator(iters=given["iters"], nu=given["nu"]),
    "median": lambda given: rules.MedianAggregator(),
}
RULE_OF_INPUT = {
    "bound": "norm_clipping",
    "f": "krum",
    "beta": "trimmed_mean",
    "iters": "geometric_median",
    "V": "median",
}
"""The rule by the first of these inputs that a case has."""


def robust_step(inputs: Inputs) -> dict[str, Any]:
    rows = torch.from_numpy(inputs["V"])
    start = torch.from_numpy(inputs["x"]) if "x" in inputs else rows[0]
    server = Server({"w": start}, ["w"])
    clip = rules.NormClip(inputs.get("bound", torch.inf))
    clip.setup(server)
    kind = next(kind for name, kind in RULE_OF_INPUT.items() if name in inputs)
    rule = RULES[kind](inputs)
    rule.attach(server)
    center = aggregated(
        states=[{"w": row} for row in rows],
        sizes=inputs.get("n", [1] * len(rows)),
        weighting=inputs.get("weighting", "samples"),
        aggregator=rule,
        transform=clip,
    )
    if "f" not in inputs:
        return {"out": center["w"], "scores": None, "selected": False}
    scores = rules.robust.krum_scores(rows, inputs["f"])
    return {"out": center["w"], "scores": scores, "selected": scores.argsort()[: inputs["m"]]}


METHOD: dict[str, Adapter] = {
    "scaffold": scaffold_step,
    "feddyn": feddyn_step,
    "fedcurv": fedcurv_step,
    "fedalign": fedalign_step,
    "moon": with_gradient("z", "loss", moon_step),
    "fedlc": with_gradient("logits", "loss", fedlc_step),
    "fedrs": with_gradient("logits", "loss", fedrs_step),
    "fedrod": fedrod_step,
    "fedala": fedala_step,
    "fedfomo": fedfomo_step,
    "fedpac": fedpac_step,
    "selective_fd": selective_fd_step,
    "robust": robust_step,
    "fednova": fednova_step,
    "fedavgm": optimizer_step,
    "fedopt": optimizer_step,
    "feddf": feddf_step,
}
E2E: dict[str, Adapter] = {}
