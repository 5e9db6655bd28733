"""Blocks of a stack: clients with the same batches, whose parameters are the same parameters of an optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import AccumulatedLR, LocalProgress
from fl_lightning.engines.lockstep import Passes
from fl_lightning.types import State


class Block:
    """Neighbouring rows of a stack with the same batches.

    Several blocks share an optimizer: it leaves out parameters without a gradient, and counts the steps of each.

    Args:
        rows: of the stack.
        passes: the batches of each of its clients.
        optimizers: that step the leaves.
        leaves: the rows' parameters by name, each (k, ...).
    """

    def __init__(self, rows: slice, passes: Passes, optimizers: LocalOptimizers, leaves: State) -> None:
        self.rows = rows
        self.passes = passes
        self.optimizers = optimizers
        self.leaves = leaves
        self.progress = LocalProgress()
        """Of each of its clients."""
        self.accumulated_lr = AccumulatedLR(optimizers.raw, optimizers.accumulated_lr.slope)
        self.last_size = 1
        """Samples in the last batch."""

    def take_gradients(self, gradients: Mapping[str, Tensor | None], rows: slice, num_samples: int) -> None:
        """Take the gradients of a step to come.

        Args:
            gradients: of the losses of `rows` by name; None: they do not depend on the parameter. Left out: it rests.
            rows: of the stack, these among them.
            num_samples: in the batch of each client.
        """
        block = slice(self.rows.start - rows.start, self.rows.stop - rows.start)
        self.last_size = num_samples
        for name, value in gradients.items():
            self.leaves[name].grad = None if value is None else value[block]

    def stepped(self) -> None:
        """Count a step, and rest until the next gradients."""
        self.accumulated_lr.step()
        for leaf in self.leaves.values():
            leaf.grad = None


def begin_blocks(blocks: Sequence[Block], params: Mapping[str, Tensor]) -> None:
    """Begin the training of blocks that share an optimizer, which has been begun.

    Args:
        blocks: one or more.
        params: the module's own parameters, by name, which the optimizer was built for.
    """
    for block in blocks:
        block.accumulated_lr.begin(block.progress)
    leaves = [block.leaves for block in blocks if block.passes.epochs]
    if leaves:
        step_rows(
            blocks[0].optimizers.raw[0], {id(value): [of[name] for of in leaves] for name, value in params.items()}
        )


def step_rows(optimizer: Optimizer, rows: Mapping[int, Sequence[Tensor]]) -> None:
    """Let an optimizer that has taken no step yet step stacked parameters in place of its own.

    Args:
        optimizer: one that treats every number by itself.
        rows: stacked parameters, each (k, ...), by the id of each parameter.
    """
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [leaf for parameter in group["params"] for leaf in rows[id(parameter)]]
        if "fused" in group:
            group["fused"] = takes_one_kernel(type(optimizer), group)
    for parameter, state in states:  # of Adagrad, which has one from the start
        for leaf in rows[id(parameter)]:
            optimizer.state[leaf] = {
                key: (value if key == "step" else value.expand(len(leaf), *value.shape)).clone()
                for key, value in state.items()
            }


def takes_one_kernel(kind: type[Optimizer], group: Mapping[str, Any]) -> bool | None:
    """Choose whether one kernel steps all blocks: on a CPU it takes a fifth of the time for many small parameters.

    False where the user says so; None: torch chooses. SGD's kernel takes no blocks that have rested beside others.

    >>> takes_one_kernel(Adam, {"params": [torch.zeros(2)], "fused": None})
    True
    """
    others = any(group.get(name) for name in ("foreach", "capturable", "differentiable"))
    laid = all(leaf.is_contiguous() and leaf.device.type == "cpu" for leaf in group["params"])
    if group["fused"] is False:
        return False
    return True if kind in (Adam, AdamW) and laid and not others else None


def laid_as(params: State, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Lay gradients in memory as their parameters lie, as which a kernel for all parameters reads them.

    >>> laid_as({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2).T})["w"].stride()
    (3, 1)
    """
    return {
        name: value.contiguous() if value is not None and params[name].is_contiguous() else value
        for name, value in gradients.items()
    }


def clipped(gradients: Mapping[str, Tensor | None], most: float) -> dict[str, Tensor | None]:
    """Clip each row's gradient to the norm `most`, as `torch.nn.utils.clip_grad_norm_` does for one client.

    >>> clipped({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "v": None}, 1.0)["w"].round(decimals=4)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    flat = [value.reshape(len(value), value[0].numel()) for value in gradients.values() if value is not None]
    norms = [torch.linalg.vector_norm(value, dim=1) for value in flat]
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return {
        name: None if value is None else value * factor.view(-1, *[1] * (value.ndim - 1))
        for name, value in gradients.items()
    }
