"""Adapters of the cases with `fn`: from a case's inputs to what `expected` is compared with."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning import Aggregator, ClientModule
from fl_lightning.aggregation import ServerModule, UpdateTransform
from fl_lightning.data.partitioning import lda_counts
from fl_lightning.functional.classes import class_split
from fl_lightning.functional.forgetting import forgetting
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.methods.fedntd import distillation
from fl_lightning.types import Broadcast, ClientUpdate

Inputs = dict[str, Any]


def float64(values: Any) -> Tensor:
    """Nested lists as a tensor; null is NaN."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


def tensors(*given: dict[str, Any]) -> list[dict[str, Tensor]]:
    """States of nested lists or arrays."""
    return [{name: torch.as_tensor(value) for name, value in state.items()} for state in given]


def linear_loss(state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of a linear classifier."""
    return cross_entropy(F.linear(batch[0], state["weight"], state["bias"]), batch[1])


def with_gradient(name: str, key: str, loss: Callable[[Tensor, Inputs], Tensor]) -> Callable[[Inputs], dict[str, Any]]:
    """An adapter of a loss, called `key`, with its gradient in the input `name`."""

    def adapter(inputs: Inputs) -> dict[str, Any]:
        point = float64(inputs[name]).requires_grad_()
        value = loss(point, inputs)
        (gradient,) = torch.autograd.grad(value, point)
        return {key: value, **dict.fromkeys(("grad", "grad_z", "grad_personal"), gradient)}

    return adapter


def on_logits(loss: Callable[[Tensor, Tensor, Tensor, Inputs], Tensor]) -> Callable[[Inputs], dict[str, Any]]:
    """An adapter of a loss (local, global, targets, inputs) -> (), with its gradient in the local logits."""

    def adapter(inputs: Inputs) -> dict[str, Any]:
        local = float64(inputs["logits_local"]).requires_grad_()
        value = loss(local, float64(inputs["logits_global"]), torch.tensor(inputs["targets"]), inputs)
        (gradient,) = torch.autograd.grad(value, local)
        return {"value": value, "grad_local": gradient}

    return adapter


def kd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, inputs["tau"], ntd_weight=0.0)


def ntd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, inputs["tau"])


def kd_to_ntd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, inputs["tau"], ntd_weight=inputs["lam"])


def ntd_mse(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, inputs["tau"], distance="mse")


def fedntd_total(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return cross_entropy(local, target) + inputs["beta"] * ntd(local, teacher, target, inputs)


def split_classes(inputs: Inputs) -> dict[str, Any]:
    split = class_split(torch.tensor(inputs["counts"]), inputs["gamma"])
    return {name: getattr(split, name).nonzero().flatten() for name in ("missing", "non_dominant", "dominant")}


def bwt_forgetting(inputs: Inputs) -> dict[str, Any]:
    return {"value": forgetting(float64(inputs["A"]), inputs["exclude_final"])}


def states(inputs: Inputs) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The server's state and the clients', of which there may be but one weight."""
    named = "global" in inputs
    start = inputs["global"] if named else {"w": inputs["x"] if "x" in inputs else inputs["w"]}
    clients = inputs["locals"] if named else [{"w": y} for y in inputs["ys"]]
    start, *found = ({name: torch.from_numpy(value) for name, value in one.items()} for one in [start, *clients])
    return start, found


def aggregated(
    states: list[dict[str, Tensor]],
    sizes: list[int],
    weighting: str,
    aggregator: Aggregator | None = None,
    lengths: list[float] | None = None,
    transform: UpdateTransform | None = None,
) -> dict[str, Tensor] | None:
    """One exchange of a rule (None: the mean), as the round drives it; `lengths`: the clients' accumulated lr."""
    aggregator = aggregator or Aggregator()
    aggregator.weighting = weighting
    aggregator.setup()
    aggregator.begin_round(list(range(len(states))))
    for client_id, (state, n) in enumerate(zip(states, sizes, strict=True)):
        update = ClientUpdate(client_id, n, int(n > 0), lengths[client_id] if lengths else 0.0, state)
        update = transform.on_server(update, Broadcast(0, "train", None)) if transform else update
        aggregator.add(replace(update, extras=aggregator.client_statistics(update)))
    return aggregator.finish()


def server_step(
    client: ClientModule, inputs: Inputs, start: Any, kept: Any, sent: list[dict[str, Any]]
) -> tuple[ServerModule, dict[str, Tensor], Tensor]:
    """One exchange of the mean with the method's server side, of weights named module.w.

    Returns:
        The server side, the new weights, and what the server keeps, which is `kept` before.
    """
    server_module = client.server_class()
    name = "module.w"
    weights = {"module.w": float64(start)}
    server_module.attach(SimpleNamespace(weights=weights, trainable=(name,), module=client, num_clients=inputs["N"]))
    server_module.setup()
    (state,) = server_module.children()
    state[name].copy_(float64(kept))
    ys = [{name: float64(y)} for y in inputs["ys"]]
    for client_id, (y, n, extras) in enumerate(zip(ys, inputs["n"], sent, strict=True)):
        server_module.add(ClientUpdate(client_id, n, 1, 0.0, y, {e: {name: float64(v)} for e, v in extras.items()}))
    new = server_module.finish("train", aggregated(ys, inputs["n"], inputs["weighting"]))
    return server_module, new, state[name]


def aggregate(inputs: Inputs) -> dict[str, Any]:
    states = [{"theta": float64(theta)} for theta in inputs["thetas"]]
    result = aggregated(states, inputs["sizes"], inputs["weighting"])
    return {"value": result and result["theta"]}


ADAPTERS: dict[str, Callable[[Inputs], Any]] = {
    "ntd_loss": on_logits(ntd),
    "kd_loss": on_logits(kd),
    "kd_to_ntd": on_logits(kd_to_ntd),
    "ntd_mse": on_logits(ntd_mse),
    "fedntd_total": on_logits(fedntd_total),
    "class_split": split_classes,
    "bwt_forgetting": bwt_forgetting,
    "aggregate": aggregate,
    "lda_counts": lambda inputs: {"counts": lda_counts(inputs["class_sizes"], inputs["proportions"])},
}

PENDING: dict[str, str] = {}
"""Names whose issue has not come, with that issue; their cases are expected to fail.

`NAME[setting=value]`: only the cases with that setting.
"""
