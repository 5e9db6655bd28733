"""Adapters of SCAFFOLD, FedDyn, FedCurv, MOON, FedLC, FedRS and FedAlign."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from fl_lightning import methods
from fl_lightning.federation.server import ServerOptimizer
from fl_lightning.functional.importance import importance
from fl_lightning.functional.losses import calibrated_cross_entropy, cross_entropy
from fl_lightning.functional.state import add, sub
from fl_lightning.methods import fedalign, fedcurv, feddyn, fedlc, fedrs, moon
from fl_lightning.types import State

from .adapters_fn import Inputs, float64, server_step, with_gradient
from .end_to_end import Adapter, GivenGradients, Run, flat, train_given, whole

W = "module.w"

# --- single steps


def scaffold_step(inputs: Inputs) -> dict[str, Any]:
    x, c = ({W: float64(inputs[name])} for name in ("x", "c"))
    if "ys" in inputs:
        sent = [{"control_change": change} for change in inputs["dcs"]]
        _, new, control = server_step(methods.SCAFFOLD(), inputs, inputs["x"], inputs["c"], sent)
        server = ServerOptimizer(partial(SGD, lr=inputs["server_lr"]), x)
        return {"x": server.step(x, new, server.optimizer.step, None)[W], "c": control}
    client = methods.SCAFFOLD(where=inputs["where"], module=GivenGradients(inputs))
    result = train_given(client, {"control": {W: float64(inputs["ci"])}}, control=c)
    change, own = result.update.extras["control_change"][W], result.memory["control"][W]
    found = {"y": client.module.w, "traj": client.module.steps, "dc": change, "ci_plus": own}
    return {**found, "A": client.travelled}


def feddyn_step(inputs: Inputs) -> dict[str, Any]:
    alpha = inputs["alpha"]
    if "theta" in inputs:
        x, g, y = ({W: float64(inputs[name])} for name in ("theta_g", "g", "theta"))
        terms = with_gradient("theta", "penalty", lambda y, _: feddyn.dynamic_regularizer({W: y}, x, g, alpha))(inputs)
        return {**terms, "g_new": add(g, sub(y, x), -alpha)[W]}
    client, none = methods.FedDyn(alpha, "active_mean"), [{} for _ in inputs["ys"]]
    server, new, h = server_step(client, inputs, inputs["theta_g"], inputs["h"], none)
    return {"theta": new[W], "h": h, "active_mean": server.evaluation_weights(new)[W]}


def fedcurv_step(inputs: Inputs) -> dict[str, Any]:
    if "w" in inputs:
        u, v = ({W: float64(inputs[a]) - float64(inputs[b])} for a, b in (("U", "u_own"), ("V", "v_own")))
        term = partial(with_gradient, "w", "penalty")
        found = term(lambda w, _: fedcurv.curvature_penalty({W: w}, u, v) * inputs["lam"])(inputs)
        return {**found, "direct_minus_const": found["penalty"]}
    params = {name: float64(value) for name, value in inputs["init"].items()}
    batches = [(float64(inputs["X"][a:b]), torch.tensor(inputs["y"][a:b])) for a, b in inputs["batches"]]

    def loss(state: State, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(F.linear(batch[0], state["weight"], state["bias"]), batch[1])

    return {"sample": importance(loss, params, batches, "square"), "batch": fedcurv.batch_fisher(loss, params, batches)}


def moon_step(z: Tensor, inputs: Inputs) -> Tensor:
    return moon.model_contrastive(z, float64(inputs["z_g"]), [*map(float64, inputs["z_prevs"])], inputs["tau"])


def fedlc_step(logits: Tensor, inputs: Inputs) -> Tensor:
    form = inputs.get("form", "softmax")
    shift = fedlc.margins(torch.tensor(inputs["counts"]), inputs["tau"], form)
    loss = fedlc.calibrated_margin_loss if form == "paper" else calibrated_cross_entropy
    return loss(logits, torch.tensor(inputs["y"]), shift)


def fedrs_step(logits: Tensor, inputs: Inputs) -> Tensor:
    scale = fedrs.scaling(torch.tensor(inputs["counts"]), inputs["alpha"], inputs.get("form", "hard"))
    return fedrs.restricted_cross_entropy(logits, torch.tensor(inputs["y"]), scale)


def fedalign_step(inputs: Inputs) -> dict[str, Any]:
    f1, *others = (float64(inputs[name]).unsqueeze(0) for name in ("f1", "f2_sub", "f2_full"))
    narrow, full = (fedalign.spectral_norm(fedalign.transmission(f1, f), inputs["iters"]) for f in others)
    loss = fedalign.aligned(float64(inputs["ce"]), narrow, full, inputs["mu"])
    return {"sub": narrow[0], "full": full[0], "mse": F.mse_loss(narrow, full), "scaled_loss_value": loss}


FN: dict[str, Adapter] = {}
METHOD: dict[str, Adapter] = {
    **{"scaffold": scaffold_step, "feddyn": feddyn_step, "fedcurv": fedcurv_step, "fedalign": fedalign_step},
    **{"moon": with_gradient("z", "loss", moon_step), "fedlc": with_gradient("logits", "loss", fedlc_step)},
    "fedrs": with_gradient("logits", "loss", fedrs_step),
}


# --- whole rounds


class Watched(methods.MOON):
    """MOON that notes the contrast before the first step."""

    def contrast(self, x: Tensor, features: Tensor) -> Tensor:
        value = super().contrast(x, features)
        self.round.setdefault("first", value.detach())
        return value


def of_scaffold(finished: Run, r: int) -> dict[str, Any]:
    after = finished.client.where == "param"
    pairs = zip(finished.cohort(r), finished.states(r), strict=True)
    exposures = [state["travelled"] if after else update.exposure for update, state in pairs]
    return {"c": finished.server_state(r, "control"), "ci": finished.memories(r, "control"), "A": exposures}


def of_feddyn(finished: Run, r: int) -> dict[str, Any]:
    mean = flat(finished.recorder.evaluated[r][name] for name in finished.client.params())
    return {"h": finished.server_state(r, "correction"), "g": finished.memories(r, "gradient"), "active_mean": mean}


def of_moon(finished: Run, r: int) -> dict[str, Any]:
    pairs = [*zip(finished.cohort(r), finished.states(r), strict=True)]
    first = [state.get("first", 0.0) if update.num_steps else None for update, state in pairs]
    return {"contrastive_at_first_step": first, "previous_stored": ["own_models" in state for _, state in pairs]}


def of_fedcurv(finished: Run, r: int) -> dict[str, Any]:
    return {"U": finished.server_state(r, "u"), "V": finished.server_state(r, "v")}


E2E: dict[str, Adapter] = {
    "scaffold": whole(methods.SCAFFOLD, "where option", more=of_scaffold),
    "feddyn": whole(partial(methods.FedDyn, evaluates="active_mean"), "alpha", more=of_feddyn),
    "fedcurv": whole(methods.FedCurv, "lam fisher scope fisher_samples=s", more=of_fedcurv),
    "moon": whole(Watched, "mu temperature=tau", more=of_moon),
    "fedlc": whole(methods.FedLC, "tau form"),
    "fedrs": whole(methods.FedRS, "alpha form"),
}
