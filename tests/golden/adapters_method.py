"""Adapters of the cases with `method`: single steps here, whole rounds (`e2e:NAME`) in `end_to_end`."""

from collections.abc import Callable
from typing import Any

import torch

from fl_lightning.functional.losses import proximal

from . import end_to_end
from .adapters_fn import Inputs, aggregated, tensors


def aggregate(inputs: Inputs) -> dict[str, Any]:
    return {"state": aggregated(tensors(*inputs["states"]), inputs["n"], inputs["weighting"])}


def fedprox(inputs: Inputs) -> dict[str, Any]:
    w = torch.from_numpy(inputs["w"]).requires_grad_()
    penalty = inputs["mu"] * proximal({"w": w}, {"w": torch.from_numpy(inputs["wg"])})
    (gradient,) = torch.autograd.grad(penalty, w)
    return {"penalty": penalty, "grad": gradient}


ADAPTERS: dict[str, Callable[[Inputs], Any]] = {
    "aggregate": aggregate,
    "fedprox": fedprox,
    **{f"e2e:{name}": run for name, run in end_to_end.ADAPTERS.items()},
}

PENDING: dict[str, str] = {}
"""Names whose issue has not come, with that issue; their cases are expected to fail.

`NAME[setting=value]`: only the cases with that setting.
"""
