"""FedAlign: make a narrow copy of the last block as smooth as the block itself.

Source: Mendieta et al., CVPR 2022, arXiv:2111.14213. Server: FedAvg. The paper trains ResNet-56 (`FedAlignResNet`) with
SGD of lr 0.01, momentum 0.9, Nesterov and weight decay 1e-4, and clips gradients at norm 10 (`model.clip_norm`).
Note: the narrow copy reads a narrow input, as in the authors' code (`narrow_input`). Its BatchNorm has the first
    entries of scale and shift and the batch's statistics; the running ones are the whole block's. The authors' code
    divides by zero where both norms agree; here the term is left out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.client import ClientModule, check_part_of_net
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.nets.backbone import Stages
from fl_lightning.types import Batch, State
from fl_lightning.utils.settings import check_at_least, check_numbers

ITERATIONS = 10
"""Of the power method, started from ones; they need not converge."""


def transmission(before: Tensor, after: Tensor) -> Tensor:
    """Compute T = f_{L-1} f_Lᵀ / (h w): (B, c1, *spatial), (B, c2, h, w) -> (B, c1, c2), f_{L-1} pooled to h × w."""
    if before.shape[2:] != after.shape[2:]:
        before = F.adaptive_avg_pool2d(before, (after.shape[2], after.shape[3]))
    f1, f2 = (to_float32(f if f.ndim > 2 else f.unsqueeze(2)).flatten(2) for f in (before, after))
    return f1 @ f2.transpose(1, 2) / f2.shape[2]


def spectral_norm(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Compute √λ_max(T Tᵀ) by power iterations from ones: (B, c1, c2) -> (B,).

    It is 0 with zero gradient for T = 0.
    """
    square = matrix @ matrix.transpose(1, 2)
    tiny = torch.finfo(matrix.dtype).tiny
    v = torch.ones_like(square[..., :1])
    for _ in range(iterations):
        product = square @ v
        length = squared_length(v).clamp(min=tiny).sqrt()
        norm = squared_length(product).clamp(min=tiny).sqrt()
        value = norm / length
        v = product / norm[:, None, None]
    return torch.where(squared_length(product) > 0, value.sqrt(), 0.0)


def squared_length(v: Tensor) -> Tensor:
    """Compute ‖v‖² of each sample: (B, c, 1) -> (B,)."""
    return v.square().sum((1, 2))


def aligned(ce: Tensor, narrow: Tensor, full: Tensor, mu: float) -> Tensor:
    """Compute μ (CE/ℓ) ℓ, CE/ℓ a constant and ℓ = MSE of the norms: (), (B,), (B,) -> (), 0 where ℓ = 0."""
    gap = F.mse_loss(narrow, full.detach())
    scale = ce.detach() / gap.detach()
    return mu * scale.where(scale.isfinite(), 0.0) * gap


def kept_channels(channels: int, width: float) -> int:
    """Round width · c to the nearest multiple of 8, at least 8 and at most c, but to a whole number below 16 channels.

    >>> [kept_channels(channels, 0.25) for channels in (256, 80, 24, 16, 12, 1)]
    [64, 24, 8, 8, 3, 1]
    """
    if channels < 16:
        return max(1, round(width * channels))
    return min(channels, max(8, int(width * channels + 4) // 8 * 8))


def narrowed(block: nn.Module, width: float, inputs: int | None = None) -> State:
    """Cut a block's parameters and buffers, by name, to the first share `width` of their channels.

    Args:
        block: of Linear, Conv2d (ungrouped) and BatchNorm layers, and others without parameters.
        width: in (0, 1]; `kept_channels` rounds.
        inputs: channels of the block's own input where that stays whole; the layers that read it are told by this
            number. None: the input is made narrow as all else.

    Raises:
        ValueError: if a layer within the block has as many channels as an input that stays whole.
    """
    narrow: State = {}
    made_before = False
    for name, layer in block.named_modules():
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        for entry, value in tensors:
            cut = value[: kept_channels(len(value), width)] if value.ndim else value
            reads_input = value.ndim > 1 and value.shape[1] == inputs
            if reads_input and made_before:
                raise ValueError(
                    f"FedAlign knows the layers that read the last block's input by its {inputs} channels, but an "
                    f"earlier layer than {name} has as many; give the block's inner layers another width, or set "
                    f"narrow_input to true"
                )
            made_before = made_before or (value.ndim > 1 and value.shape[0] == inputs)
            if value.ndim > 1 and not reads_input:
                cut = cut[:, : kept_channels(value.shape[1], width)]
            buffer = not isinstance(value, nn.Parameter)
            narrow[f"{name}.{entry}".lstrip(".")] = cut.clone() if buffer else cut  # the forward changes statistics
    return narrow


def check_block(block: nn.Module) -> None:
    """Refuse a block with layers that cannot be made narrower by leaving channels out.

    Raises:
        ValueError: naming the layer.
    """
    for name, layer in block.named_modules():
        plain = isinstance(layer, (nn.Linear, nn.Conv2d, *BATCH_NORMS)) and getattr(layer, "groups", 1) == 1
        if not plain and [*layer.parameters(recurse=False)]:
            raise ValueError(
                f"FedAlign makes the last block narrower, which must be of Linear, BatchNorm and ungrouped Conv2d "
                f"layers, but {name or 'it'} is {type(layer).__name__}; take ResNet, CIFARResNet or FedAlignResNet"
            )


class FedAlign(ClientModule):
    """Local loss CE + μ (CE/ℓ) ℓ, where ℓ compares the Lipschitz bounds of the last block and its narrow copy.

    Args:
        mu: μ >= 0; 0 is FedAvg.
        width: share of the last block's channels in the narrow copy, in (0, 1], rounded to a multiple of 8 channels.
        narrow_input: whether the narrow copy reads the same share of its input's channels, as in the authors' code, or
            all of them.
        base: of `ClientModule`; needs a `net` with `stages` (ResNet, CIFARResNet, FedAlignResNet).
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"mu": 0}
    stackable = True

    def __init__(self, mu: float = 0.45, width: float = 0.25, narrow_input: bool = True, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", mu=mu)
        check_numbers(width=width)
        if not 0 < width <= 1:
            raise ValueError(f"width must lie in (0, 1], got {width}; the paper takes 0.25")
        self.mu = mu
        self.width = width
        self.narrow_input = narrow_input

    def configure_model(self) -> None:
        super().configure_model()
        if self.mu:
            check_block(self.stages().last)

    def stages(self) -> Stages:
        """Give the net, cut around its last block."""
        net = self.built_net
        check_part_of_net(type(self).__name__, net, method="stages", what="its last block")
        return net.stages()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        before, last, after = self.stages()
        with self.forward_context():
            inner = before(x)
            outer = last(inner)
            logits = self.built_net.head(after(outer))
            inner, whole = inner.detach(), inner.shape[1]
            fewer = inner[:, : kept_channels(whole, self.width)] if self.narrow_input else inner
            entries = narrowed(last, self.width, None if self.narrow_input else whole)
            narrow = functional_call(last, entries, (fewer,))
        ce = cross_entropy(logits, y)
        norms = [spectral_norm(transmission(*pair)) for pair in ((fewer, narrow), (inner, outer.detach()))]
        term = aligned(ce, norms[0], norms[1], self.mu)
        self.log_dict({"train/ce": ce, "train/aligned": F.mse_loss(norms[0], norms[1])})
        return ce + term
