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
    """Compute ε = ρ g / ‖g‖₂ with one norm over all tensors, in the names and shapes of g. It is 0 if g is 0.

    Args:
        gradients: g, by name.
        sam_rho: ρ.

    >>> perturbation({"w": torch.tensor([3.0, 4.0])}, sam_rho=0.5)
    {'w': tensor([0.3000, 0.4000])}
    """
    norm = S.inner(gradients, gradients).sqrt()
    factor = sam_rho / (norm + 1e-12)
    return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


class SAM(Optimizer):
    """Steps any optimizer from θ with the gradient at θ + ε.

    Both passes see the same batch and count as one step. Dropout is drawn anew. Weight decay is not in ε and acts on θ.
    Logged training losses are the mean of both passes.

    Args:
        params: Parameters, as in any optimizer.
        base: Factory of the optimizer that takes the step, such as `torch.optim.SGD` with its lr.
        sam_rho: Length ρ of ε, >= 0. 0 is the base optimizer alone.
        bn_second_pass: Whether the second pass updates BatchNorm's running statistics, too, as some codes do.
        module: Module with the BatchNorm layers. A `ClientModule` built with `net=` gives itself.

    Raises:
        ValueError: `sam_rho` is below 0, or the optimizer of `base` needs a closure.
    """

    def __init__(  # noqa: PLR0917 - called by position
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
        # They are the same objects, so that an lr schedule reaches the step.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def attach_module(self, module: nn.Module) -> None:
        """Keep the statistics of this module's BatchNorm layers in the second pass, unless a module was given."""
        if self.module is None:
            self.module = module

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take one step, and return the loss of the first pass.

        Args:
            closure: Zeroes the gradients, runs forward and backward, and returns the loss.
        """
        forward_and_backward = torch.enable_grad()(closure)
        loss = forward_and_backward()
        params: list[Any] = []
        for group in self.param_groups:
            params += [parameter for parameter in group["params"] if parameter.grad is not None]
        if self.sam_rho and params:
            start = [parameter.clone() for parameter in params]
            gradients = {str(place): parameter.grad for place, parameter in enumerate(params)}
            away = perturbation(gradients, self.sam_rho)
            for parameter, shift in zip(params, away.values(), strict=True):
                parameter.add_(shift)
            with self._statistics_kept():
                forward_and_backward()
            for parameter, value in zip(params, start, strict=True):
                # To subtract ε would leave rounding errors.
                parameter.copy_(value)
        self.base.step()
        return loss

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Keep BatchNorm's running statistics within the block. It normalizes with the batch as before."""
        modules = [] if self.module is None or self.bn_second_pass else self.module.modules()
        norms = [module for module in modules if isinstance(module, BATCH_NORMS) and module.track_running_stats]
        for norm in norms:
            norm.track_running_stats = not norm.training
        try:
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True
