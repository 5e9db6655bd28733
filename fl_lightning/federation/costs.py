"""The cost of one sample in each net, by which clients are spread over processes."""

import copy
import warnings
from collections.abc import Iterable

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

INPUT_TYPES = (torch.float32, torch.int64)
"""The types of inputs that a net is tried with: numbers, then indices for a net that begins with an embedding."""


def sample_costs(nets: Iterable[nn.Module], input_shape: tuple[int, ...]) -> list[int]:
    """Return the cost of one sample in each net: the number of operations, or of parameters if that is larger.

    A net whose operations the counter does not know (an own kernel) has few or none, but takes time all the same.
    If the operations of one of the nets cannot be counted, the number of parameters is the cost in all nets, because
    operations and parameters of different nets cannot be compared. The costs depend on nothing but the nets, so that
    every process finds the same costs.

    Args:
        nets: The nets. They stay as they are, but forward hooks are called once, with tensors of the meta device.
        input_shape: The sizes of one input, without the batch.

    >>> small, large = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2))
    >>> sample_costs([small, large], (4,)), sample_costs([small, large], (5,))
    ([16, 1200], [10, 702])
    """
    nets = list(nets)
    sizes = [max(1, num_parameters(net)) for net in nets]
    operations = []
    for net in nets:
        count = operations_or_none(net, input_shape)
        if count is None:
            return sizes
        operations.append(count)
    return [max(pair) for pair in zip(operations, sizes, strict=True)]


def num_parameters(net: nn.Module) -> int:
    """Return the number of parameters of a net."""
    return sum(parameter.numel() for parameter in net.parameters())


def operations_or_none(net: nn.Module, input_shape: tuple[int, ...]) -> int | None:
    """Count the floating point operations of one sample in a net. None means that they cannot be counted."""
    for input_type in INPUT_TYPES:
        try:
            return count_operations(net, input_shape, input_type)
        except Exception:  # a user's net may raise anything
            continue
    return None


def count_operations(net: nn.Module, input_shape: tuple[int, ...], input_type: torch.dtype) -> int:
    """Count the floating point operations of one sample in a net.

    A copy of the net runs on the meta device, which computes nothing.

    Args:
        net: The net. It stays as it is.
        input_shape: The sizes of one input, without the batch.
        input_type: The type of the input.

    Raises:
        Exception: The net cannot be copied, or cannot read such an input on the meta device.
    """
    with (
        warnings.catch_warnings(action="ignore"),
        isolate_rng(include_cuda=False),
        # Without gradients, layers of transformers run as one kernel, which the counter does not know.
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        # The input is float32, so the weights must be too, whatever `trainer.precision` made of them.
        meta_net = copy.deepcopy(net).eval().to("meta", torch.float32)
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            meta_net(torch.zeros((1, *input_shape), dtype=input_type))
    operations: int = counter.get_total_flops()
    return operations
