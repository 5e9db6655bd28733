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
    """Return nested lists as a tensor, with NaN for null."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


def tensors(*given: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return states of nested lists or arrays with tensors as values."""
    return [state_of(values) for values in given]


def state_of(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in values.items()}


def linear_loss(state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a linear classifier."""
    x, y = batch
    return cross_entropy(F.linear(x, state["weight"], state["bias"]), y)


def with_gradient(name: str, key: str, loss: Callable[[Tensor, Inputs], Tensor]) -> Callable[[Inputs], dict[str, Any]]:
    """Make an adapter of a loss.

    Args:
        name: Name of the input in which the gradient is taken.
        key: Name of the loss in the result.
        loss: `(point, inputs) -> ()`.
    """

    def adapter(inputs: Inputs) -> dict[str, Any]:
        point = float64(inputs[name]).requires_grad_()
        value = loss(point, inputs)
        (gradient,) = torch.autograd.grad(value, point)
        return {key: value, "grad": gradient, "grad_z": gradient, "grad_personal": gradient}

    return adapter


def on_logits(loss: Callable[..., Tensor]) -> Callable[[Inputs], dict[str, Any]]:
    """Make an adapter of a loss `(local, teacher, target, inputs) -> ()`, with its gradient in the local logits."""

    def adapter(inputs: Inputs) -> dict[str, Any]:
        local = float64(inputs["logits_local"]).requires_grad_()
        value = loss(
            local=local,
            teacher=float64(inputs["logits_global"]),
            target=torch.tensor(inputs["targets"]),
            inputs=inputs,
        )
        (gradient,) = torch.autograd.grad(value, local)
        return {"value": value, "grad_local": gradient}

    return adapter


def kd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, temperature=inputs["tau"], ntd_weight=0.0)


def ntd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, temperature=inputs["tau"])


def kd_to_ntd(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, temperature=inputs["tau"], ntd_weight=inputs["lam"])


def ntd_mse(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    return distillation(local, teacher, target, temperature=inputs["tau"], distance="mse")


def fedntd_total(local: Tensor, teacher: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    distilled = ntd(local=local, teacher=teacher, target=target, inputs=inputs)
    return cross_entropy(local, target) + inputs["beta"] * distilled


def split_classes(inputs: Inputs) -> dict[str, Any]:
    split = class_split(torch.tensor(inputs["counts"]), inputs["gamma"])
    return {name: getattr(split, name).nonzero().flatten() for name in ("missing", "non_dominant", "dominant")}


def bwt_forgetting(inputs: Inputs) -> dict[str, Any]:
    return {"value": forgetting(float64(inputs["A"]), inputs["exclude_final"])}


def states(inputs: Inputs) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the server's state and the clients'. A case without names of entries has the single entry `w`."""
    if "global" in inputs:
        start = inputs["global"]
        clients = inputs["locals"]
    else:
        start = {"w": inputs["x"] if "x" in inputs else inputs["w"]}
        clients = [{"w": y} for y in inputs["ys"]]
    return state_of(start), tensors(*clients)


def aggregated(
    states: list[dict[str, Tensor]],
    sizes: list[int],
    weighting: str,
    *,
    aggregator: Aggregator | None = None,
    accumulated_lrs: list[float] | None = None,
    transform: UpdateTransform | None = None,
) -> dict[str, Tensor] | None:
    """Drive a rule through one exchange, as the round does.

    Args:
        states: The weights that the clients send.
        sizes: Numbers of their samples.
        weighting: That of the rule.
        aggregator: The rule. None is the mean.
        accumulated_lrs: Those of the clients. None is 0 for each.
        transform: Transform of the updates at the server.
    """
    aggregator = aggregator or Aggregator()
    accumulated_lrs = accumulated_lrs or [0.0] * len(states)
    aggregator.weighting = weighting
    aggregator.setup()
    aggregator.begin_round(list(range(len(states))))
    for client_id, (state, n) in enumerate(zip(states, sizes, strict=True)):
        update = ClientUpdate(
            client_id=client_id,
            num_samples=n,
            num_steps=int(n > 0),
            accumulated_lr=accumulated_lrs[client_id],
            weights=state,
        )
        if transform:
            update = transform.on_server(update, Broadcast(round_idx=0, exchange="train", weights=None))
        aggregator.add(replace(update, extras=aggregator.client_statistics(update)))
    return aggregator.finish()


def server_step(
    client: ClientModule, inputs: Inputs, *, start: Any, kept: Any, sent: list[dict[str, Any]]
) -> tuple[ServerModule, dict[str, Tensor], Tensor]:
    """Drive the mean and the method's server side through one exchange, with the single entry `module.w`.

    Args:
        client: The method's client.
        inputs: The case: `ys` are the weights that the clients send, `n` their numbers of samples.
        start: The server's weight before.
        kept: The only state of the server side before.
        sent: Extras of the clients' updates by name, nested lists.

    Returns:
        The server side, the new weights, and its state after.
    """
    name = "module.w"
    server_module = client.server_class()
    server = SimpleNamespace(
        weights={name: float64(start)},
        trainable=(name,),
        module=client,
        num_clients=inputs["N"],
    )
    server_module.attach(server)
    server_module.setup()
    (state,) = server_module.children()
    state[name].copy_(float64(kept))
    weights = [{name: float64(y)} for y in inputs["ys"]]
    for client_id, (of_client, n, given) in enumerate(zip(weights, inputs["n"], sent, strict=True)):
        update = ClientUpdate(
            client_id=client_id,
            num_samples=n,
            num_steps=1,
            accumulated_lr=0.0,
            weights=of_client,
            extras={extra: {name: float64(value)} for extra, value in given.items()},
        )
        server_module.add(update)
    mean = aggregated(weights, inputs["n"], inputs["weighting"])
    new = server_module.finish("train", mean)
    return server_module, new, state[name]


def aggregate(inputs: Inputs) -> dict[str, Any]:
    states = [{"theta": float64(theta)} for theta in inputs["thetas"]]
    result = aggregated(states, inputs["sizes"], inputs["weighting"])
    return {"value": None if result is None else result["theta"]}


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
