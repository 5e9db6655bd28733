"""A fingerprint of samples, which tells whether two evaluations were on the same ones."""

from hashlib import blake2b

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.data.loaders import without_none
from fl_lightning.data.splits import Split

MOST_BYTES = 2**27
"""Bytes of samples in memory that are all read. Of more, and of samples that are loaded, some are."""

NUM_READ = 64
"""Number of samples that are read of a split that is large or loaded. The labels of all samples count."""


def fingerprint(split: Split, size: int, batch_size: int) -> str:
    """Return a digest of the first samples of a split, the same in every process and run.

    Args:
        split: The split.
        size: Number of samples.
        batch_size: Samples per batch.
    """
    digest = blake2b(digest_size=16)
    digest.update(str(size).encode())
    labels = split.known_labels
    if labels is not None:
        digest.update(bytes_of(labels[:size]))
    if not size:
        return digest.hexdigest()
    positions = torch.arange(size)
    num_bytes = split.num_bytes
    if num_bytes is None or num_bytes > MOST_BYTES:
        positions = torch.linspace(0, size - 1, min(size, NUM_READ), dtype=torch.float64).long()
    # A dataset of the user's own may draw.
    with isolate_rng():
        for batch in without_none(split.batches(torch.split(positions, batch_size), None)):
            for part in batch:
                digest.update(bytes_of(part) if isinstance(part, Tensor) else repr(part).encode())
    return digest.hexdigest()


def bytes_of(value: Tensor) -> bytes:
    """Return type, shape and bytes of a tensor."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return f"{value.dtype} {tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
