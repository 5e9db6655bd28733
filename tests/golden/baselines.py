"""Adapters of the baselines: with control terms, with personal entries or models, and the server's rules and steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
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
from fl_lightning.functional.state import add, clone, sub
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, State

from . import end_to_end
from .adapters_fn import Inputs, aggregated, float64, linear_loss, server_step, states, tensors, with_gradient
from .end_to_end import Adapter, Recorder, Run, flat, whole
from .feded import Server
from .fedka import fedka_run

W = "module.w"

# --- single steps


def scaffold_step(inputs: Inputs) -> dict[str, Any]:
    x, c = ({W: float64(inputs[name])} for name in ("x", "c"))
    if "ys" in inputs:
        sent = [{"control_change": change} for change in inputs["dcs"]]
        _, new, control = server_step(M.SCAFFOLD(), inputs, inputs["x"], inputs["c"], sent)
        server = ServerOptimizer(partial(SGD, lr=inputs["server_lr"]), x)
        return {"x": server.step(x, new, server.optimizer.step, None)[W], "c": control}
    client = M.SCAFFOLD(where=inputs["where"], module=end_to_end.GivenGradients(inputs))
    result = end_to_end.train_given(client, {"control": {W: float64(inputs["ci"])}}, control=c)
    change = result.update.extras["control_change"][W]
    own = result.memory["control"][W]
    return {"y": client.module.w, "traj": client.module.steps, "dc": change, "ci_plus": own, "A": client.travelled}


def feddyn_step(inputs: Inputs) -> dict[str, Any]:
    alpha = inputs["alpha"]
    if "theta" in inputs:
        x, g, y = ({W: float64(inputs[name])} for name in ("theta_g", "g", "theta"))
        term = partial(with_gradient, "theta", "penalty")
        found = term(lambda y, _: M.feddyn.dynamic_regularizer({W: y}, x, g, alpha))(inputs)
        return {**found, "g_new": add(g, sub(y, x), -alpha)[W]}
    client = M.FedDyn(alpha, "active_mean")
    none = [{} for _ in inputs["ys"]]
    server, new, h = server_step(client, inputs, inputs["theta_g"], inputs["h"], none)
    return {"theta": new[W], "h": h, "active_mean": server.evaluation_weights(new)[W]}


def fedcurv_step(inputs: Inputs) -> dict[str, Any]:
    if "w" in inputs:
        u, v = ({W: float64(inputs[a]) - float64(inputs[b])} for a, b in (("U", "u_own"), ("V", "v_own")))
        term = partial(with_gradient, "w", "penalty")
        found = term(lambda w, _: M.fedcurv.curvature_penalty({W: w}, u, v) * inputs["lam"])(inputs)
        return {**found, "direct_minus_const": found["penalty"]}
    params = {name: float64(value) for name, value in inputs["init"].items()}
    batches = [(float64(inputs["X"][a:b]), torch.tensor(inputs["y"][a:b])) for a, b in inputs["batches"]]
    given = linear_loss, params, batches
    return {"sample": importance(*given, "square"), "batch": batch_fisher(*given)}


def moon_step(z: Tensor, inputs: Inputs) -> Tensor:
    return M.moon.model_contrastive(z, float64(inputs["z_g"]), [*map(float64, inputs["z_prevs"])], inputs["tau"])


def fedlc_step(logits: Tensor, inputs: Inputs) -> Tensor:
    form = inputs.get("form", "softmax")
    shift = M.fedlc.margins(torch.tensor(inputs["counts"]), inputs["tau"], form)
    loss = M.fedlc.calibrated_margin_loss if form == "paper" else calibrated_cross_entropy
    return loss(logits, torch.tensor(inputs["y"]), shift)


def fedrs_step(logits: Tensor, inputs: Inputs) -> Tensor:
    scale = M.fedrs.scaling(torch.tensor(inputs["counts"]), inputs["alpha"], inputs.get("form", "hard"))
    return M.fedrs.restricted_cross_entropy(logits, torch.tensor(inputs["y"]), scale)


def fedalign_step(inputs: Inputs) -> dict[str, Any]:
    f1, *others = (float64(inputs[name]).unsqueeze(0) for name in ("f1", "f2_sub", "f2_full"))
    narrow, full = (M.fedalign.spectral_norm(M.fedalign.transmission(f1, f), inputs["iters"]) for f in others)
    loss = M.fedalign.aligned(float64(inputs["ce"]), narrow, full, inputs["mu"])
    return {"sub": narrow[0], "full": full[0], "mse": F.mse_loss(narrow, full), "scaled_loss_value": loss}


def fedrod_step(inputs: Inputs) -> dict[str, Any]:
    target = torch.tensor(inputs["y"])
    if "logits" in inputs:
        shape = (target, torch.tensor(inputs["counts"]), inputs["gamma"])
        return with_gradient("logits", "loss", lambda z, _: M.fedrod.balanced_softmax(z, *shape))(inputs)
    generic = float64(inputs["logits_generic_detached"])
    return with_gradient("logits_personal", "loss", lambda z, _: M.fedrod.personal_loss(generic, z, target))(inputs)


def fedala_step(inputs: Inputs) -> dict[str, Any]:
    own, received, mixing = tensors(inputs["local"], inputs["global"], inputs["W0"])
    result = {}
    for k in (1, 2):
        theta = {name: value.requires_grad_() for name, value in M.fedala.mixed(own, received, mixing).items()}
        loss = linear_loss(theta, (float64(inputs["X"]), torch.tensor(inputs["y"])))
        gradients = dict(zip(theta, torch.autograd.grad(loss, [*theta.values()]), strict=True))
        mixing = M.fedala.stepped(mixing, gradients, own, received, inputs["eta"])
        result |= {f"grad{k - 1}": gradients, f"W{k}": mixing, f"theta{k}": M.fedala.mixed(own, received, mixing)}
    return result


def fedfomo_step(inputs: Inputs) -> dict[str, Any]:
    if "own" in inputs:
        own, *candidates = tensors(inputs["own"], *inputs["candidates"])
        return {"state": M.fedfomo.moved_towards(own, candidates, torch.tensor(inputs["weights"]).double())}
    theta, *others = tensors(*({"x": x} for x in (inputs["theta"], *inputs["others"])))
    away = torch.stack([(other["x"] - theta["x"]).norm() for other in others])
    raw = M.fedfomo.helpfulness(float64(inputs["loss_self"]), float64(inputs["losses"]), away, inputs["floor"])
    weights = M.fedfomo.candidate_weights(raw)
    return {"raw": raw, "weights": weights, "theta_new": M.fedfomo.moved_towards(theta, others, weights)["x"]}


def fedpac_step(inputs: Inputs) -> dict[str, Any]:
    if "P" in inputs:
        return {"weights": M.fedpac.head_weights(float64(inputs["P"]))}
    pairs = [(float64(one["features"]), torch.tensor(one["y"])) for one in inputs["clients"]]
    _, h, v = map(torch.stack, zip(*(M.fedpac.feature_statistics(f, y, inputs["C"]) for f, y in pairs), strict=True))
    matrix = M.fedpac.discrepancies(h, v, inputs["for_client"])
    weights = M.fedpac.head_weights(matrix)
    return {"h": h, "v": v, "P": matrix, "weights": weights, "objective": weights @ matrix @ weights}


def selective_fd_step(inputs: Inputs) -> dict[str, Any]:
    if "probs" in inputs:
        masks = float64(inputs["masks"])
        total = torch.einsum("nk,nkc->kc", masks, float64(inputs["probs"]))
        found = M.selectivefd.kept_ensemble(total, masks.sum(0), inputs["tau_server"], inputs["criterion"])
        return {"kept": found.rows, "ensemble": found.mean, "ambiguity": found.ambiguity}
    known, reference, held, proxy = (float64(inputs[name]) for name in ("known", "aux", "held_out", "proxy"))
    width = inputs["width"]
    lam = inputs["lam"]
    n = len(reference)
    ratio = DensityRatio.fit(known, reference, width, lam)
    threshold = ratio(held).quantile(inputs["quantile"])
    system = gaussian(reference, reference, width) / n + lam * torch.eye(n)
    result = {"alpha": ratio.alpha, "ratio_held_out": ratio(held), "ratio_proxy": ratio(proxy), "threshold": threshold}
    return {**result, "selected": ratio(proxy) > threshold, "alpha_of_official_bug": system @ system @ ratio.alpha}


# --- FedNova


def accumulated_lr(lrs: Iterable[float], rho: float, nesterov: bool, mu: float) -> float:
    """E after one step with each lr, of FedProx's client."""
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
    given = (inputs["rho"], inputs.get("nesterov", False), inputs.get("mu", 0.0))
    if "n" not in inputs:
        E = accumulated_lr(inputs["lrs"] if "lrs" in inputs else [lr] * inputs["K"], *given)
        return {"E": E, "a": E / lr}
    start, clients = states(inputs)
    lengths = [accumulated_lr([lr] * K, *given) for K in inputs["K"]]
    found = []
    for trainable in (inputs.get("trainable", ["w"]), [name for name, x in start.items() if x.is_floating_point()]):
        rule = M.FedNovaAggregator()
        rule.attach(Server(start, trainable))
        found.append(aggregated(clients, inputs["n"], "samples", rule, lengths))
    right, wrong = found
    more = {"state": right, "x_new": right["w"], "wrong_if_buffers_extrapolated": wrong.get("bn.running_var")}
    return {"a": [E / lr for E in lengths], "tau_eff": rule.tau_eff / lr, **more}


# --- server optimizers

KINDS = {"avgm": M.FedAvgM, "adam": M.FedAdam, "yogi": M.FedYogi, "adagrad": M.FedAdagrad}
NAMES = {"beta": "momentum", "b1": "beta1", "b2": "beta2"}
SETTINGS = {"avgm": ("beta", "nesterov", "ema"), "adagrad": ("b1", "tau", "v_init")}


def server_optimizer(kind: str, given: dict[str, Any], lr: str) -> Callable[..., Optimizer]:
    names = SETTINGS.get(kind, ("b1", "b2", "tau", "v_init", "bias_correction"))
    settings = {NAMES.get(name, name): given[name] for name in names if name in given}
    return partial(KINDS[kind], lr=given.get(lr, 1.0), **settings)


def optimizer_step(inputs: Inputs) -> dict[str, Any]:
    if "global" in inputs:
        state, clients = states(inputs)
        means = [aggregated(clients, inputs["n"], "samples")]
    else:
        state, *means = ({"w": torch.from_numpy(w)} for w in [inputs["w0"], *inputs["means"]])
    trainable = {name: state[name] for name in inputs.get("trainable", ["w"])}
    server = ServerOptimizer(server_optimizer(inputs.get("kind", "avgm"), inputs, "lr"), trainable)
    found = []
    for mean in means:
        state = server.step(state, mean, server.optimizer.step, None)
        found.append({"w": state["w"].clone(), **end_to_end.moments(server.optimizer, m="m", v="v")})
    return {"rounds": found, "state": state}


# --- robust rules

RULES: dict[str, Callable[[dict[str, Any]], rules.Aggregator]] = {
    "norm_clipping": lambda given: rules.Aggregator(),
    "krum": lambda given: rules.KrumAggregator(given["f"], given["m"]),
    "trimmed_mean": lambda given: rules.TrimmedMeanAggregator(given["beta"]),
    "geometric_median": lambda given: rules.GeometricMedianAggregator(given["iters"], given["nu"]),
    "median": lambda given: rules.MedianAggregator(),
}


def robust_step(inputs: Inputs) -> dict[str, Any]:
    rows = torch.from_numpy(inputs["V"])
    clip = rules.NormClip(inputs.get("bound", torch.inf))
    signs = {"bound": "norm_clipping", "f": "krum", "beta": "trimmed_mean", "iters": "geometric_median", "V": "median"}
    rule = RULES[next(kind for name, kind in signs.items() if name in inputs)](inputs)
    for part in (rule.attach, clip.setup):
        part(Server({"w": torch.from_numpy(inputs["x"]) if "x" in inputs else rows[0]}, ["w"]))
    sizes = inputs.get("n", [1] * len(rows))
    weighting = inputs.get("weighting", "samples")
    out = aggregated([{"w": row} for row in rows], sizes, weighting, rule, transform=clip)["w"]
    scores = rules.robust.krum_scores(rows, inputs["f"]) if "f" in inputs else None
    return {"out": out, "scores": scores, "selected": scores is not None and scores.argsort()[: inputs["m"]]}


# --- FedDF


def feddf_step(inputs: Inputs) -> dict[str, Any]:
    teacher = torch.stack([torch.from_numpy(one) for one in inputs["teachers"]]).mean(0)
    found = with_gradient("student", "loss", lambda z, _: kl_divergence(z, teacher, inputs["T"]))(inputs)
    return {**found, "teacher_probs": (teacher / inputs["T"]).softmax(1)}


METHOD: dict[str, Adapter] = {
    **{"scaffold": scaffold_step, "feddyn": feddyn_step, "fedcurv": fedcurv_step, "fedalign": fedalign_step},
    **{"moon": with_gradient("z", "loss", moon_step), "fedlc": with_gradient("logits", "loss", fedlc_step)},
    **{"fedrs": with_gradient("logits", "loss", fedrs_step), "fedrod": fedrod_step, "fedala": fedala_step},
    **{"fedfomo": fedfomo_step, "fedpac": fedpac_step, "selective_fd": selective_fd_step, "robust": robust_step},
    **{"fednova": fednova_step, "fedavgm": optimizer_step, "fedopt": optimizer_step, "feddf": feddf_step},
}

# --- whole rounds


class Watched(M.MOON):
    """MOON that notes the contrast before the first step."""

    def contrast(self, x: Tensor, features: Tensor) -> Tensor:
        value = super().contrast(x, features)
        self.round.setdefault("first", value.detach())
        return value


def of_scaffold(finished: Run, r: int) -> dict[str, Any]:
    return {"c": finished.server_state(r, "control"), "ci": finished.memories(r, "control")}


def of_feddyn(finished: Run, r: int) -> dict[str, Any]:
    mean = flat(finished.recorder.evaluated[r][name] for name in finished.client.params())
    return {"h": finished.server_state(r, "correction"), "g": finished.memories(r, "gradient"), "active_mean": mean}


def moon_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    first = client.round.get("first", 0.0) if update.num_steps else None
    return {"contrastive_at_first_step": first, "previous_stored": bool(client.own_models())}


def of_fedcurv(finished: Run, r: int) -> dict[str, Any]:
    return {"U": finished.server_state(r, "u"), "V": finished.server_state(r, "v")}


class CountingDitto(M.Ditto):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.round["K"] = self.round.get("K", 0) + ("anchor" in self.round)
        return super().training_step(batch, batch_idx)


def ditto_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    return {"K_personal": client.round.get("K", 0), "personal": next(reversed(client.own_models()), None)}


def fedrod_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    head = flat(clone(client.personal_head.state_dict()).values())
    return {"personal_heads": head if client.memory.get("has_head") else None}


class GivenFedALA(M.FedALA):
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


class GivenSide(M.fedfomo.FedFOMOServer):
    def explored(self, client_id: int, others: list[int], epsilon: float) -> list[int] | None:
        case = self.server.module.case
        r = self.server.round_idx
        return case["explored"][r][case["cfg"]["schedule"][r].index(client_id)] if "explored" in case else None


class Given(M.FedFOMO):
    def parts(self, local: ClientData) -> list[Tensor]:
        return [torch.from_numpy(self.case[name][local.client_id]) for name in ("train_indices", "val_indices")]

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, local)
        self.round.update(start=clone(self.entries()), candidates=[*broadcast.extras["candidates"]])


def fomo_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    start, candidates, helpfulness = (client.round[name] for name in ("start", "candidates", "helpfulness"))
    weights = M.fedfomo.candidate_weights(raw := helpfulness[candidates])
    return {"start": start, "candidates": candidates, "raw": raw, "weights": weights}


def fedpac_note(client: Any, update: ClientUpdate) -> dict[str, Any]:
    if "h" in update.extras:
        return {name: update.extras[name] if update.num_samples else None for name in ("h", "v")}
    return {"combined_heads": flat(clone(client.head.state_dict()).values()) if update.num_samples else None}


def fedpac_side(loop: Any) -> dict[str, Any]:
    server = loop.server_module
    cohort = loop.data.cohort(loop.current_epoch)
    weights = torch.zeros(len(cohort), len(cohort)).double()
    for client_id, row in server.combined.items():
        weights[cohort.index(client_id), [cohort.index(other) for other in server.combined]] = row
    return {"prototypes": server.prototypes + 0, "prototype_seen": server.seen | False, "head_weights": weights}


class Noting(M.FedDFServer):
    """FedDF that notes each round's mean and what it distils."""

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
"""FedAvg, or FedProx where the case has a mu."""


def fedka_fednova(inputs: Inputs) -> dict[str, Any]:
    finished, found = fedka_run(inputs, recorder=Recorder(side=TAU_EFF), aggregator=M.FedNovaAggregator())
    return {"rounds": [{**one, **of_fednova(finished, r)} for r, one in enumerate(found["rounds"])]}


def feddf_rounds(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    X = inputs["unlabelled"]
    settings = {name: cfg[name] for name in ("distill_lr", "distill_steps")}
    made = Noting(cfg["T"], distill_schedule=cfg.get("distill_schedule", "constant"), distill_batch="full", **settings)
    none = {"mean": None, "teacher_probs": None}
    adapter = plain(side=lambda loop: vars(made).pop("noted", none), server_module=made, sets=("proxy",))
    unread = np.zeros(len(X), dtype=np.int64)
    return adapter({**inputs, "proxy": {"X": X, "y": unread}})


def optimizer_rounds(kind: str, inputs: Inputs) -> dict[str, Any]:
    made = server_optimizer(kind, inputs["cfg"], "server_lr")
    return plain(side=end_to_end.server_moments(m="m", v="v"), server_optimizer=made)(inputs)


def robust_rounds(inputs: Inputs) -> dict[str, Any]:
    rule = RULES[inputs["cfg"]["server"]]
    clip = rules.NormClip(inputs["cfg"].get("bound", torch.inf), buffers="keep")
    return plain(aggregator=rule(inputs["cfg"]), transforms=clip)(inputs)


MIXING = "eta layers=p first_epochs=ala_epochs_first epochs=ala_epochs threshold=ala_threshold"
E2E: dict[str, Adapter] = {
    "scaffold": whole(M.SCAFFOLD, "where option", lambda client, update: {"A": client.travelled}, more=of_scaffold),
    "feddyn": whole(partial(M.FedDyn, evaluates="active_mean"), "alpha", more=of_feddyn),
    "fedcurv": whole(M.FedCurv, "lam fisher scope fisher_samples=s", more=of_fedcurv),
    "moon": whole(Watched, "mu temperature=tau", moon_note),
    "fedlc": whole(M.FedLC, "tau form"),
    "fedrs": whole(M.FedRS, "alpha form"),
    "fedbn": whole(M.FedBN),
    "fedper": whole(M.FedAvg, personal="net.head.*"),
    "lg_fedavg": whole(M.FedAvg, personal=["*", "!net.head.*"]),
    "fedrep": whole(M.FedRep, "head_epochs"),
    "ditto": whole(CountingDitto, "lam personal_epochs", ditto_note),
    "fedrod": whole(M.FedRoD, "gamma", fedrod_note),
    "fedala": whole(GivenFedALA, MIXING, fedala_note),
    "fedfomo": whole(Given, "epsilon num_candidates=M epsilon_decay", fomo_note, AFFINITY, server_module=GivenSide),
    "fedpac": whole(M.FedPAC, "lam head_epochs head_lr", fedpac_note, fedpac_side),
    "fednova": plain(side=TAU_EFF, more=of_fednova, aggregator=M.FedNovaAggregator),
    "fedka+fednova": fedka_fednova,
    **{f"fed{kind}": partial(optimizer_rounds, kind) for kind in KINDS},
    "robust": robust_rounds,
    "feddf": feddf_rounds,
}
