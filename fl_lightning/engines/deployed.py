"""Tests of what a client would deploy, on its own samples."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from fl_lightning.functional.accuracy import answer_counts
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, ClientScore

IMAGES = 4
"""Dimensions of a batch of images."""


def laid_out(x: Any, channels_last: bool) -> Any:
    """Lay out a batch of images (B, C, H, W) channels last, if that is asked for.

    Anything else stays as it is.
    """
    images = channels_last and isinstance(x, Tensor) and x.ndim == IMAGES
    return x.contiguous(memory_format=torch.channels_last) if images else x


def score(
    client_id: int,
    predict: Callable[[Any], Tensor],
    batches: Iterable[Batch],
    device: torch.device,
    metrics: MetricCollection | None = None,
    channels_last: bool = False,
) -> ClientScore:
    """Count the right answers of a predictor.

    Args:
        client_id: whose samples these are.
        predict: `x -> logits`.
        batches: pairs (x, y).
        device: that they lie on.
        metrics: further ones, which are reset; or None.
        channels_last: whether images are laid out so.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in batches:
        logits = predict(laid_out(x, channels_last))
        counts += answer_counts(logits, y)
        if metrics is not None:
            metrics.update(to_float32(logits), y)
    correct, num_samples = counts.unbind()
    values = {} if metrics is None else {name: value.cpu() for name, value in metrics.compute().items()}
    if metrics is not None:
        metrics.reset()
    return ClientScore(client_id, num_samples, correct, values)
