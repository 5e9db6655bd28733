"""The server's step from the round's first weights to the next ones."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.types import State


class ServerOptimizer:
    """Treats global − aggregate as a gradient, in float64; without an optimizer the aggregate is copied.

    Reddi et al., ICLR 2021, arXiv:2003.00295 (FedOpt). Even without one an SGD is stepped once a round, because
    Lightning counts the steps of the fitted module's optimizer.

    Args:
        factory: the optimizer, as a function of its parameters, or None.
        trainable: the shared trainable weights, which alone it moves; the rest is copied.
    """

    def __init__(self, factory: Callable[[Iterable[Any]], Optimizer] | None, trainable: State) -> None:
        self.copies = factory is None
        if factory is None:
            self.params = {"rounds": nn.Parameter(torch.zeros((), dtype=torch.float32))}
            self.optimizer: Optimizer = SGD(self.params.values(), lr=1.0)
        else:
            self.params = {name: nn.Parameter(value.detach().double()) for name, value in trainable.items()}
            self.optimizer = factory(self.params.values())

    @torch.no_grad()
    def step(self, start: State, new: State | None, run: Callable[[], Any], scaler: Any | None) -> State:
        """The next shared weights.

        Args:
            start: the round's first shared weights.
            new: what the aggregator returned, or None: nothing moves, but the step counts.
            run: steps the optimizer through Lightning.
            scaler: the Trainer's gradient scaler, which divides what is multiplied here.
        """
        moves = new is not None and not self.copies
        before = None if moves or self.copies or scaler is None else copy.deepcopy(self.optimizer.state_dict())
        for name, parameter in self.params.items():
            gradient: Tensor | None = None
            if moves and new is not None:
                parameter.copy_(start[name])
                gradient = parameter - new[name].double()
            elif scaler is not None:
                gradient = torch.zeros_like(parameter)  # a scaler refuses to step without a gradient
            parameter.grad = gradient if scaler is None else scaler.scale(gradient)
        run()
        if before is not None:
            self.optimizer.load_state_dict(before)
        if new is None or self.copies:
            return start if new is None else new
        return {
            name: self.params[name].to(value.dtype) if name in self.params else value for name, value in new.items()
        }
