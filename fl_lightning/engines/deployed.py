"""The score of what a client would deploy, on the client's own samples."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from fl_lightning.functional.accuracy import answer_counts
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, ClientScore, State

IMAGE_DIMS = 4
"""Number of dimensions of a batch of images (B, C, H, W)."""


def laid_out(x: Any, channels_last: bool) -> Any:
    """Return the inputs of a batch in the memory layout that the net expects.

    Args:
        x: The inputs of a batch. Only images (B, C, H, W) have another layout.
        channels_last: Whether images are laid out channels last.
    """
    if channels_last and isinstance(x, Tensor) and x.ndim == IMAGE_DIMS:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def score(
    client_id: int,
    predict: Callable[[Any], Tensor],
    batches: Iterable[Batch],
    *,
    device: torch.device,
    metrics: MetricCollection | None = None,
    channels_last: bool = False,
) -> ClientScore:
    """Return the score of a predictor on the samples of one client.

    Args:
        client_id: The id of the client.
        predict: The predictor `x -> logits`.
        batches: Pairs (x, y).
        device: The device of the batches.
        metrics: Further metrics to evaluate, which are reset at the end. None evaluates only
            the accuracy.
        channels_last: Whether batches of images are laid out channels last.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    is_finite = torch.ones((), dtype=torch.bool, device=device)
    for x, y in batches:
        logits = predict(laid_out(x, channels_last))
        counts += answer_counts(logits, y)
        if metrics is not None:
            metrics.update(to_float32(logits), y)
            is_finite &= logits.isfinite().all()
    correct, num_samples = counts.unbind()
    values: State = {}
    if metrics is not None:
        values = {name: value.cpu() for name, value in metrics.compute().items()}
        metrics.reset()
    return ClientScore(
        client_id=client_id,
        num_samples=num_samples,
        correct=correct,
        metrics=values,
        is_finite=is_finite,
    )
