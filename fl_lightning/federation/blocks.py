"""Blocks of a stack: clients with the same batches, stepped by one optimizer whose state has a row for each of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.optimizers import LocalOptimizers, LocalProgress
from fl_lightning.federation.lockstep import Passes
from fl_lightning.types import State


class Block:
    """Neighbouring rows of a stack with the same batches.

    Args:
        rows: of the stack.
        passes: the batches of each of its clients.
        optimizers: built for the module's own parameters; they step the rows' in place of these.
        leaves: the rows' parameters by name, each (k, ...).
    """

    def __init__(self, rows: slice, passes: Passes, optimizers: LocalOptimizers, leaves: State) -> None:
        self.rows, self.passes, self.optimizers, self.leaves = rows, passes, optimizers, leaves
        self.progress = LocalProgress()
        """Of each of its clients."""
        self.last_size = 1
        """Samples in the last batch."""

    def begin(self, params: Mapping[str, Tensor], lr: float | None, factor: float, factors: Any) -> None:
        """Begin the training of its clients.

        Args:
            params: the module's own parameters, by name.
            lr: learning rate in place of the optimizer's own; None: its own.
            factor: of the learning rate.
            factors: further ones, by optimizer and parameter group; empty: none.
        """
        self.optimizers.begin(self.progress, lr, factor, factors)
        if self.passes.epochs:
            rows = {id(value): self.leaves[name] for name, value in params.items()}
            step_rows(self.optimizers.raw[0], rows)

    def step(self, gradients: Mapping[str, Tensor | None], clip_norm: float | None, num_samples: int) -> None:
        """Take one step.

        Args:
            gradients: of the losses by name, each (k, ...); None: they do not depend on the parameter, or it rests.
            clip_norm: largest norm of a client's gradient; None: not clipped.
            num_samples: in the batch of each client.
        """
        self.last_size = num_samples
        if clip_norm is not None:
            gradients = clipped(gradients, clip_norm)
        for name, leaf in self.leaves.items():
            leaf.grad = gradients.get(name)
        self.optimizers.wrapped[0].step()

    def end(self) -> None:
        """Let go of the rows: the optimizers may be used again."""
        self.optimizers.begin(LocalProgress())


def step_rows(optimizer: Optimizer, rows: Mapping[int, Tensor]) -> None:
    """Let an optimizer that has taken no step yet step stacked parameters in place of its own.

    Args:
        optimizer: one that treats every number by itself.
        rows: stacked parameters (k, ...), by the id of each parameter.
    """
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [rows[id(parameter)] for parameter in group["params"]]
    for parameter, state in states:  # of Adagrad, which has one from the start
        stacked = rows[id(parameter)]
        optimizer.state[stacked] = {
            key: value.expand(len(stacked), *value.shape).clone() if key != "step" else value
            for key, value in state.items()
        }


def clipped(gradients: Mapping[str, Tensor | None], most: float) -> dict[str, Tensor | None]:
    """Clip each row's gradient to the norm `most`, as `torch.nn.utils.clip_grad_norm_` does for one client.

    >>> clipped({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "v": None}, 1.0)["w"].round(decimals=4)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms = [torch.linalg.vector_norm(value.flatten(1), dim=1) for value in gradients.values() if value is not None]
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return {
        name: None if value is None else value * factor.view(-1, *[1] * (value.ndim - 1))
        for name, value in gradients.items()
    }
