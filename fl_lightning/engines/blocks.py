"""Blocks of a stack: neighboring rows with the same batches, which an optimizer steps as stacked parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import AccumulatedLR, ClientProgress
from fl_lightning.engines.clock import NO_WORK, Work
from fl_lightning.engines.lockstep import Passes
from fl_lightning.types import State

Gradients = Mapping[str, Tensor | None]
"""Gradients by name, each (k, ...). None: the losses do not depend on the parameter."""


class Block:
    """Holds neighboring rows of a stack whose clients have the same batches.

    Several blocks share an optimizer. It skips parameters without a gradient, and counts the steps of each parameter.

    Args:
        rows: The rows in the stack.
        passes: The batches of each of the clients.
        optimizers: The optimizers that step the parameters of the rows.
        params: The parameters of the rows by name, each (k, ...).
        work: What each of the clients trains in the phase.

    Attributes:
        progress: The progress of each of the clients in the phase.
        last_size: The number of samples in the last batch.
    """

    def __init__(
        self, rows: slice, passes: Passes, optimizers: LocalOptimizers, params: State, *, work: Work = NO_WORK
    ) -> None:
        self.rows = rows
        self.passes = passes
        self.optimizers = optimizers
        self.params = params
        self.work = work
        self.progress = ClientProgress()
        self.accumulated_lr = AccumulatedLR(optimizers.raw, optimizers.accumulated_lr.slope)
        self.last_size = 1

    def take_gradients(self, gradients: Gradients, rows: slice, num_samples: int) -> None:
        """Take the gradients of the next step.

        Args:
            gradients: The gradients of the losses of `rows`. A parameter without an entry is not stepped.
            rows: The rows of the step in the stack. The rows of the block are among them.
            num_samples: The number of samples in the batch of each client.
        """
        own_rows = slice(self.rows.start - rows.start, self.rows.stop - rows.start)
        self.last_size = num_samples
        for name, gradient in gradients.items():
            self.params[name].grad = None if gradient is None else gradient[own_rows]

    def finish_step(self) -> None:
        """Count a step, and remove the gradients, so that the optimizer skips the block until it has new ones."""
        self.accumulated_lr.step()
        for parameter in self.params.values():
            parameter.grad = None


def begin_blocks(blocks: Sequence[Block], module_params: Mapping[str, Tensor]) -> None:
    """Begin the training of all blocks that share an optimizer. The optimizer has been begun before.

    Args:
        blocks: The blocks, at least one.
        module_params: The parameters of the client module by name. The optimizer was built for them.
    """
    for block in blocks:
        block.accumulated_lr.begin(block.progress)
    training = [block for block in blocks if block.passes.epochs]
    if not training:
        return
    rows: dict[int, list[Tensor]] = {}
    for name, parameter in module_params.items():
        rows[id(parameter)] = [block.params[name] for block in training]
    replace_params(blocks[0].optimizers.raw[0], rows)


def replace_params(optimizer: Optimizer, rows: Mapping[int, Sequence[Tensor]]) -> None:
    """Let an optimizer step stacked parameters in the place of its own.

    Args:
        optimizer: An optimizer that has taken no step yet. It treats every number by itself.
        rows: The stacked parameters, each (k, ...), by the `id` of the parameter that they replace.
    """
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for group in optimizer.param_groups:
        stacked: list[Tensor] = []
        for parameter in group["params"]:
            stacked += rows[id(parameter)]
        group["params"] = stacked
        if "fused" in group:
            group["fused"] = fused_setting(type(optimizer), group)
    # Adagrad has a state before its first step. Other optimizers have none.
    for parameter, state in states:
        for stacked_parameter in rows[id(parameter)]:
            optimizer.state[stacked_parameter] = stacked_state(state, number=len(stacked_parameter))


def stacked_state(state: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Repeat the state of a parameter for each row of a stack. The number of steps stays one value.

    Args:
        state: The state of the parameter by name.
        number: The number of rows k.

    >>> stacked_state({"step": torch.tensor(0.0), "sum": torch.zeros(3)}, number=2)["sum"].shape
    torch.Size([2, 3])
    """
    stacked = {}
    for key, value in state.items():
        if key == "step":
            stacked[key] = value.clone()
        else:
            stacked[key] = value.expand((number, *value.shape)).clone()
    return stacked


def fused_setting(kind: type[Optimizer], group: Mapping[str, Any]) -> bool | None:
    """Return the `fused` setting of a parameter group: whether one kernel steps all its parameters.

    On a CPU one kernel is faster for many small parameters. The kernel of SGD is not used: it
    does not take parameters of which some have no gradient in a step.

    Args:
        kind: The class of the optimizer.
        group: The parameter group.

    Returns:
        True for one kernel, False if the user has set it, or None if torch chooses.

    >>> fused_setting(Adam, {"params": [torch.zeros(2)], "fused": None})
    True
    """
    if group["fused"] is False:
        return False
    excludes_fused = any(group.get(name) for name in ("foreach", "capturable", "differentiable"))
    if kind not in (Adam, AdamW) or excludes_fused:
        return None
    on_cpu = all(parameter.is_contiguous() and parameter.device.type == "cpu" for parameter in group["params"])
    return True if on_cpu else None


def lay_out_like(params: State, gradients: Gradients) -> dict[str, Tensor | None]:
    """Lay gradients out in memory like their parameters. A kernel for all parameters reads them so.

    >>> lay_out_like({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2).T})["w"].stride()
    (3, 1)
    """
    laid_out: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is not None and params[name].is_contiguous():
            laid_out[name] = gradient.contiguous()
        else:
            laid_out[name] = gradient
    return laid_out


def clip_rows(gradients: Gradients, max_norm: float) -> dict[str, Tensor | None]:
    """Clip the gradient of each row to a norm, as `torch.nn.utils.clip_grad_norm_` does for one client.

    Args:
        gradients: The gradients by name, each (k, ...).
        max_norm: The largest norm of the gradient of a row, over all parameters.

    >>> clip_rows({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "v": None}, 1.0)["w"].round(decimals=4)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms = []
    for gradient in gradients.values():
        if gradient is not None:
            vectors = gradient.reshape(len(gradient), gradient[0].numel())
            norms.append(torch.linalg.vector_norm(vectors, dim=1))
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    clipped: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            clipped[name] = None
        else:
            per_row = factor.view([-1] + [1] * (gradient.ndim - 1))
            clipped[name] = gradient * per_row
    return clipped
