"""FedAdam, FedYogi, FedAdagrad: server optimizers that scale each weight's step by the size of its updates so far.

Source: Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2. Clients and rule: any; set as `model.server_optimizer`.
`torch.optim.Adam` is not FedAdam: it corrects the bias of its means and has ε = 1e-8 where the paper has τ = 1e-3.
Note: the paper starts v at τ² or more. Here `v_init` is 0, as in common codes.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.utils.settings import check_above, check_at_least


class FedOpt(Optimizer):
    """Steps m ← β₁ m + (1 − β₁) Δ, x ← x + η_s m / (√v + τ), with Δ = Σ p_i y_i − x, over the trainable weights.

    Args:
        params: Parameters, as in any optimizer.
        lr: Learning rate η_s > 0.
        beta1: Decay β₁ of the first moment m, in [0, 1).
        beta2: Decay β₂ of the second moment v, in [0, 1).
        tau: Adaptivity τ > 0. The smaller τ is, the more alike are the steps of all weights.
        v_init: The second moment v at first, ≥ 0.
        bias_correction: Whether the step is multiplied by √(1 − β₂^t) / (1 − β₁^t). t = 1, 2, … counts the rounds in
            which a client had data.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        v_init: float = 0.0,
        bias_correction: bool = False,
    ) -> None:
        check_above(0, lr=lr, tau=tau)
        check_at_least(0, beta1=beta1, beta2=beta2, v_init=v_init)
        for name, value in {"beta1": beta1, "beta2": beta2}.items():
            if not value < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {value}")
        settings = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "tau": tau,
            "v_init": v_init,
            "bias_correction": bias_correction,
        }
        super().__init__(params, settings)

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the next v.

        Args:
            v: The present v of a weight.
            square: Δ² of the weight, of the same shape.
            beta2: β₂.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. A parameter without a gradient and its m, v and t stay as they are."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, -parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, delta: Tensor, group: Mapping[str, Any]) -> None:
        """Move one parameter in place.

        Args:
            parameter: The parameter.
            delta: Δ of the parameter.
            group: The settings of its group.
        """
        state = self.state[parameter]
        if not state:
            state["t"] = 0
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.full_like(parameter, group["v_init"])
        beta1 = group["beta1"]
        beta2 = group["beta2"]
        state["t"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1) * delta
        state["v"] = self.second_moment(state["v"], delta.square(), beta2)
        lr = group["lr"]
        if group["bias_correction"]:
            lr *= (1 - beta2 ** state["t"]) ** 0.5 / (1 - beta1 ** state["t"])
        parameter.add_(state["m"] / (state["v"].sqrt() + group["tau"]), alpha=lr)


class FedAdam(FedOpt):
    """Implements FedOpt with v ← β₂ v + (1 − β₂) Δ²."""

    def second_moment(self, v: Tensor, square: Tensor, beta2: float) -> Tensor:
        return beta2 * v + (1 - beta2) * square


class FedYogi(FedOpt):
    """Implements FedOpt with v ← v − (1 − β₂) Δ² sign(v − Δ²).

    Args:
        params: Parameters, as in any optimizer.
        lr: Learning rate η_s > 0.
        settings: Further arguments of `FedOpt`.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, **settings: Any) -> None:
        super().__init__(params, lr, **settings)

    def second_moment(self, v: Tensor, square: Tensor, beta2: float) -> Tensor:
        return v - (1 - beta2) * square * (v - square).sign()


class FedAdagrad(FedOpt):
    """Implements FedOpt with v ← v + Δ².

    Args:
        params: Parameters, as in any optimizer.
        lr: Learning rate η_s > 0.
        beta1: Decay β₁ of the first moment m, in [0, 1). 0 has no momentum.
        tau: Adaptivity τ > 0.
        v_init: The second moment v at first, ≥ 0.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self, params: Iterable[Any], lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3, v_init: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, beta1=beta1, beta2=0.0, tau=tau, v_init=v_init, bias_correction=False)

    def second_moment(self, v: Tensor, square: Tensor, beta2: float) -> Tensor:
        return v + square
