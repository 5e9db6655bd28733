"""FedAvgM: a server optimizer that steps along a momentum of the clients' mean updates.

Source: Hsu et al. 2019, arXiv:1909.06335, Section 4.2. Clients and rule: any; set as `model.server_optimizer`.
In the paper's form it is `torch.optim.SGD` with momentum. `nesterov` and `ema` are forms of other codes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fl_lightning.utils.settings import check_above, check_at_least


class FedAvgM(Optimizer):
    """Steps v ← β v + g, x ← x − η_s v, with g = x − Σ p_i y_i and v = 0 at first, over the trainable weights.

    Args:
        params: Parameters, as in any optimizer.
        lr: Learning rate η_s > 0.
        momentum: Momentum β in [0, 1). 0 is FedAvg for lr = 1.
        nesterov: Whether the step is along g + β v.
        ema: Whether v ← β v + (1 − β) g, so that the first step is 1 − β of the mean's.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self, params: Iterable[Any], lr: float = 1.0, momentum: float = 0.7, nesterov: bool = False, ema: bool = False
    ) -> None:
        check_above(0, "1 with momentum=0 is FedAvg", lr=lr)
        check_at_least(0, "0 is FedAvg", momentum=momentum)
        if not momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}; the paper tunes it in 0.7, 0.9, 0.97")
        if nesterov and ema:
            raise ValueError("FedAvgM takes nesterov or ema, got both; they are two forms of one step")
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ema": ema})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. A parameter without a gradient and its v stay as they are."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta = group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "v" not in state:
                    state["v"] = torch.zeros_like(parameter)
                v = state["v"].mul_(beta).add_(gradient, alpha=1 - beta if group["ema"] else 1)
                direction = gradient + beta * v if group["nesterov"] else v
                parameter.add_(direction, alpha=-group["lr"])
        return loss
