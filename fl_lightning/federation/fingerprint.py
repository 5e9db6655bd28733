"""Fingerprints of samples and of their files, which tell whether two runs or evaluations had the same ones."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.data.loaders import without_none
from fl_lightning.data.seen import NUM_READINGS
from fl_lightning.data.splits import Split
from fl_lightning.utils.keyed import keyed_generator, keyed_globals
from fl_lightning.utils.own_generators import kept_states

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
    # A single number may lie in memory with any stride, and only a copy has the stride that `view` needs.
    flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return f"{value.dtype} {tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()


# --- the samples of a run ---

MOST_HASHED = 2**24
"""Bytes of training samples in memory that are all read when a run begins. Of more, `NUM_READ` samples are read."""

READ_AT_ONCE = 64
"""Samples that are read as one batch. The digest depends on it, so that no setting decides it."""

NUM_PROBED = 3
"""Samples that are read several times to find out whether reading them is random."""

DEEPEST = 6
"""Largest depth of the parts of a batch that count in its digest."""


def digest_of_inputs(split: Split, seed: int) -> str | None:
    """Return a digest of the samples of a split, the same in every process and run of a seed.

    All samples are read if they lie in memory and are not many. Otherwise `NUM_READ` of them are read, chosen by the
    seed. The split keeps the digest.

    Args:
        split: The split.
        seed: Seed of the data.

    Returns:
        The digest. None if the samples are a stream, or differ from one reading to the next.
    """
    if split.digest == "":
        split.digest = read_digest(split, seed)
    return split.digest


def read_digest(split: Split, seed: int) -> str | None:
    """Read samples of a split, and return their digest, as `digest_of_inputs` does."""
    size = len(split)
    if not size:  # a stream, or samples that are elsewhere
        return None
    positions = torch.arange(size)
    num_bytes = split.num_bytes
    if num_bytes is None or num_bytes > MOST_HASHED:
        draws = keyed_generator(seed, "data/fingerprint")
        positions = torch.randperm(size, generator=draws)[:NUM_READ].sort().values
    if num_bytes is None:
        few = positions[:NUM_PROBED]
        readings = {digest_of_samples(split, few, seed) for _ in range(NUM_READINGS)}
        if len(readings) > 1:
            return None
    return digest_of_samples(split, positions, seed)


def digest_of_samples(split: Split, positions: Tensor, seed: int) -> str:
    """Return a digest of some samples of a split.

    Args:
        split: The split.
        positions: Positions of the samples.
        seed: Key of what a dataset draws from the generators of Python, NumPy and torch.
    """
    digest = blake2b(digest_size=6)
    with keyed_globals(seed, "data/fingerprint"), kept_states(split.own_generators):
        for batch in without_none(split.batches(torch.split(positions, READ_AT_ONCE), None)):
            for leaf in leaves_of(batch):
                digest.update(leaf)
    return digest.hexdigest()


def leaves_of(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Give the numbers and texts within a batch as bytes. Other objects count by what they hold.

    Args:
        value: A batch, or a part of it.
        depth: Depth of the part, from 0. Parts below `DEEPEST` are left out.
    """
    if depth > DEEPEST:
        return
    if isinstance(value, np.ndarray | Tensor):
        yield from leaves_of_array(value, depth)
        return
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield repr(value).encode()
        return
    if isinstance(value, type | Enum):
        yield str(value).encode()
        return
    if hasattr(value, "__array_interface__"):
        # Such as a picture of Pillow, whose pixels are no attribute.
        yield from leaves_of_array(np.asarray(value), depth)
        return
    parts: Iterable[Any] = attributes_of(value)
    if isinstance(value, Mapping):
        parts = chain(value.keys(), value.values())
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        parts = value
    elif not parts and " at 0x" not in repr(value):
        # Such as a date: its text tells what it is.
        yield repr(value).encode()
    for part in parts:
        yield from leaves_of(part, depth + 1)


def leaves_of_array(value: np.ndarray[Any, Any] | Tensor, depth: int) -> Iterator[bytes]:
    """Give the values of an array or a tensor as bytes, of whatever type.

    Args:
        value: The array or tensor.
        depth: Its depth, from 0.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            yield from leaves_of(value.tolist(), depth + 1)
            return
        try:
            yield bytes_of(torch.as_tensor(np.asarray(value, order="C")))
        except (TypeError, ValueError):
            # torch lacks the type, such as that of texts and dates.
            yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif value.is_nested:
        yield from leaves_of(value.unbind(), depth + 1)
    else:
        dense = value.to_dense() if value.layout != torch.strided else value
        yield bytes_of(dense.resolve_conj())


def attributes_of(value: Any) -> list[Any]:
    """Return the attributes of an object, also those in `__slots__`."""
    attributes = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        for member in vars(kind).values():
            if isinstance(member, MemberDescriptorType):
                # A slot may have no value yet.
                with suppress(AttributeError):
                    attributes.append(member.__get__(value))
    return attributes
