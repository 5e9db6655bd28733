"""FedAlign: make a narrow copy of the last block as smooth as the block itself.

Source: Mendieta et al., CVPR 2022, arXiv:2111.14213. Server: FedAvg. The paper trains ResNet-56 (`FedAlignResNet`) with
SGD of lr 0.01, momentum 0.9, Nesterov and weight decay 1e-4, and clips gradients at norm 10 (`model.clip_norm`).
Note: the narrow copy reads a narrow input, as in the authors' code (`narrow_input`). Its BatchNorm has the first
entries of scale and shift, and takes the batch's statistics. The running statistics are the whole block's. The authors'
code divides by zero if both norms agree. Here the term is left out then.
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
"""Number of iterations of the power method, started from ones. They need not converge."""


def transmission(before: Tensor, after: Tensor) -> Tensor:
    """Compute T = f_{L-1} f_Lᵀ / (h w): (B, c1, *spatial), (B, c2, h, w) -> (B, c1, c2).

    Args:
        before: The features f_{L-1}, which are pooled to h × w. Features without spatial dimensions are one pixel.
        after: The features f_L.
    """
    if before.shape[2:] != after.shape[2:]:
        before = F.adaptive_avg_pool2d(before, (after.shape[2], after.shape[3]))
    f1 = by_pixel(before)
    f2 = by_pixel(after)
    return f1 @ f2.transpose(1, 2) / f2.shape[2]


def by_pixel(features: Tensor) -> Tensor:
    """Return features with all pixels in one dimension: (B, c, *spatial) -> (B, c, pixels), in float32 or better."""
    if features.ndim == 2:
        features = features.unsqueeze(2)
    return to_float32(features).flatten(2)


def spectral_norm(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Compute √λ_max(T Tᵀ) by power iterations from ones: (B, c1, c2) -> (B,).

    It is 0 with zero gradient for T = 0.

    Args:
        matrix: The matrices T.
        iterations: Number of iterations, ≥ 1.
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
    """Compute μ (CE/ℓ) ℓ, with CE/ℓ as a constant and ℓ = MSE of the norms: (), (B,), (B,) -> ().

    It is 0 if ℓ = 0.

    Args:
        ce: The cross-entropy CE.
        narrow: The norms of the narrow copy.
        full: The norms of the whole block, as constants.
        mu: The weight μ.
    """
    gap = F.mse_loss(narrow, full.detach())
    scale = ce.detach() / gap.detach()
    return mu * scale.where(scale.isfinite(), 0.0) * gap


def kept_channels(channels: int, width: float) -> int:
    """Return the number of channels of a narrow copy, near width · c.

    From 16 channels on it is the nearest multiple of 8, at least 8 and at most c. Below 16 it is the nearest whole
    number, at least 1.

    >>> [kept_channels(channels, 0.25) for channels in (256, 80, 24, 16, 12, 1)]
    [64, 24, 8, 8, 3, 1]
    """
    if channels < 16:
        return max(1, round(width * channels))
    return min(channels, max(8, int(width * channels + 4) // 8 * 8))


def narrowed(block: nn.Module, width: float, inputs: int | None = None) -> State:
    """Cut a block's parameters and buffers, by name, to the first share `width` of their channels.

    Args:
        block: A block of Linear, Conv2d (ungrouped) and BatchNorm layers, and others without parameters.
        width: Share of the channels, in (0, 1], which `kept_channels` rounds.
        inputs: Number of channels of the block's input, which then stays whole. A layer with so many input channels is
            taken to read it. None cuts the input, too.

    Raises:
        ValueError: The input stays whole, and a layer within the block makes as many channels.
    """
    narrow: State = {}
    made_before = False
    for name, layer in block.named_modules():
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        for entry, value in tensors:
            reads_input = value.ndim > 1 and value.shape[1] == inputs
            if reads_input and made_before:
                raise ValueError(
                    f"FedAlign knows the layers that read the last block's input by its {inputs} channels, but an "
                    f"earlier layer than {name} has as many; give the block's inner layers another width, or set "
                    f"narrow_input to true"
                )
            made_before = made_before or (value.ndim > 1 and value.shape[0] == inputs)
            cut = cut_channels(value, width, whole_input=reads_input)
            if not isinstance(value, nn.Parameter):
                # The forward pass changes statistics.
                cut = cut.clone()
            narrow[f"{name}.{entry}".lstrip(".")] = cut
    return narrow


def cut_channels(value: Tensor, width: float, *, whole_input: bool) -> Tensor:
    """Return the first output channels of an entry, and of these the first input channels unless `whole_input`."""
    if not value.ndim:
        return value
    cut = value[: kept_channels(len(value), width)]
    if value.ndim > 1 and not whole_input:
        cut = cut[:, : kept_channels(value.shape[1], width)]
    return cut


def check_block(block: nn.Module) -> None:
    """Refuse a block with layers that cannot be made narrower by leaving channels out.

    Raises:
        ValueError: The block has such a layer.
    """
    for name, layer in block.named_modules():
        is_plain = isinstance(layer, (nn.Linear, nn.Conv2d, *BATCH_NORMS)) and getattr(layer, "groups", 1) == 1
        has_parameters = any(True for _ in layer.parameters(recurse=False))
        if has_parameters and not is_plain:
            raise ValueError(
                f"FedAlign makes the last block narrower, which must be of Linear, BatchNorm and ungrouped Conv2d "
                f"layers, but {name or 'it'} is {type(layer).__name__}; take ResNet, CIFARResNet or FedAlignResNet"
            )


class FedAlign(ClientModule):
    """Trains with the loss CE + μ (CE/ℓ) ℓ, where ℓ compares Lipschitz bounds of the last block and its narrow copy.

    Args:
        mu: Weight μ >= 0. 0 is FedAvg.
        width: Share of the last block's channels in the narrow copy, in (0, 1], rounded to a multiple of 8 channels.
        narrow_input: Whether the narrow copy reads the same share of its input's channels, as in the authors' code.
            False reads all of them.
        base: Arguments of `ClientModule`, which must include a `net` with `stages` (ResNet, CIFARResNet,
            FedAlignResNet).
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
        """Return the net, cut around its last block."""
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
            inner = inner.detach()
            inputs = inner.shape[1]
            if self.narrow_input:
                narrow_inner = inner[:, : kept_channels(inputs, self.width)]
                entries = narrowed(last, self.width)
            else:
                narrow_inner = inner
                entries = narrowed(last, self.width, inputs=inputs)
            narrow_outer = functional_call(last, entries, (narrow_inner,))
        ce = cross_entropy(logits, y)
        narrow = spectral_norm(transmission(narrow_inner, narrow_outer))
        full = spectral_norm(transmission(inner, outer.detach()))
        term = aligned(ce=ce, narrow=narrow, full=full, mu=self.mu)
        self.log_dict({"train/ce": ce, "train/aligned": F.mse_loss(narrow, full)})
        return ce + term
