"""SAM: a local optimizer that steps with the gradient at the worst point nearby (with federated clients: FedSAM).

Source: Foret et al., ICLR 2021, arXiv:2010.01412, Algorithm 1; Qu et al., ICML 2022, arXiv:2206.02618 (FedSAM).
Server: FedAvg. As a local optimizer it works with any client and any aggregator.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.optimizers import needs_closure
from fl_lightning.functional import state as S
from fl_lightning.types import State
from fl_lightning.utils.settings import check_at_least


def perturbation(gradients: State, sam_rho: float) -> State:
    """Compute ε = ρ g / ‖g‖₂, one norm over all tensors: the names and shapes of `gradients`, 0 where all are 0."""
    norm = S.inner(gradients, gradients).sqrt()
    factor = sam_rho / (norm + 1e-12)
    return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


class SAM(Optimizer):
    """Any optimizer, stepped with the gradient at θ + ε, from θ.

    Both passes see the same batch and count as one step; dropout is drawn anew. Weight decay is not in ε and acts on θ.
    Logged training losses are the mean of both passes.

    Args:
        params: as of any optimizer.
        base: factory of the optimizer that takes the step, e.g. `torch.optim.SGD` with its lr.
        sam_rho: ρ, length of ε, >= 0; 0 is the base optimizer alone.
        bn_second_pass: whether the second pass updates BatchNorm's running statistics as well, as some codes do.
        module: whose BatchNorm layers these are; a `ClientModule` built with `net=` gives itself.

    Raises:
        ValueError: `sam_rho` is below 0, or the optimizer of `base` needs a closure.
    """

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[[Iterable[Any]], Optimizer],
        sam_rho: float = 0.05,
        bn_second_pass: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        check_at_least(0, "0 is the base optimizer alone", sam_rho=sam_rho)
        self.base = base(params)
        if needs_closure(self.base):
            raise ValueError(
                f"base must be a factory of an optimizer whose step needs no closure, got {type(self.base).__name__}; "
                f"take SGD or Adam"
            )
        self.sam_rho = sam_rho
        self.bn_second_pass = bn_second_pass
        self.module = module
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups  # the same: an lr schedule reaches the step
        self.state = self.base.state

    def attach_module(self, module: nn.Module) -> None:
        """Leave the BatchNorm layers of this module alone in the second pass, unless one was given."""
        self.module = module if self.module is None else self.module

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take one step, where `closure` zeroes the gradients, runs forward and backward, and returns the loss."""
        again = torch.enable_grad()(closure)
        loss = again()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.sam_rho and params:
            start = [p.clone() for p in params]
            away = perturbation({str(i): p.grad for i, p in enumerate(params)}, self.sam_rho)
            for parameter, shift in zip(params, away.values(), strict=True):
                parameter.add_(shift)
            with self._statistics_kept():
                again()
            for parameter, value in zip(params, start, strict=True):
                parameter.copy_(value)  # subtracting ε would leave rounding errors
        self.base.step()
        return loss

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Leave BatchNorm's running statistics unchanged within the block, where it normalises with the batch."""
        modules = [] if self.module is None or self.bn_second_pass else self.module.modules()
        norms = [module for module in modules if isinstance(module, BATCH_NORMS) and module.track_running_stats]
        for norm in norms:
            norm.track_running_stats = not norm.training
        try:
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True
