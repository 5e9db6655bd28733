"""Whether all processes of a run have the same data."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.splits import Split
from fl_lightning.distributed import Communicator
from fl_lightning.federation.fingerprint import bytes_of, digest_of_inputs

SETTINGS = ("num_clients", "batch_size", "eval_batch_size", "shuffle", "drop_last")
"""Settings of the data that a source or a loader may give."""


class SamplesOfSplit(NamedTuple):
    """Describes the samples of a split, so that processes can compare them.

    Args:
        size: Number of samples, or of streams.
        labels: Digest of the labels. Empty if they are not known.
        inputs: Digest of some samples. Empty if reading them is random, or they are a stream.
    """

    size: int
    labels: str
    inputs: str


def check_same_everywhere(data: FederatedDataModule, communicator: Communicator, *, fits: bool) -> None:
    """Refuse data that differ between processes, because a client would depend on the process that trains it.

    Args:
        data: The data module, which is set up.
        communicator: The communicator of the processes. With one process nothing is compared.
        fits: Whether the samples of the clients are dealt.

    Raises:
        ValueError: A setting, the number of samples of a split, its labels, its inputs or the clients' samples differ.
    """
    if communicator.world == 1:
        return
    settings = {name: getattr(data, name) for name in SETTINGS}
    splits = {name: samples_of(split, data.seed) for name, split in data.loaded_splits.items()}
    dealt = ""
    if fits:
        clients = data.client_samples().dealt
        dealt = digest_of(clients.indices, clients.ends)
    by_rank = communicator.gather((settings, splits, dealt))
    first_settings, first_splits, first_dealt = by_rank[0]
    for rank, (settings_of_rank, splits_of_rank, dealt_of_rank) in enumerate(by_rank):
        check_settings(first_settings, settings_of_rank, rank)
        check_splits(first_splits, splits_of_rank, rank)
        if dealt_of_rank != first_dealt:
            raise ValueError(
                f"data.partition must deal the same samples to a client in every process, got other ones at rank "
                f"{rank} than at rank 0; draw from the generator that it is given"
            )


def samples_of(split: Split, seed: int) -> SamplesOfSplit:
    """Return what processes compare of a split.

    Args:
        split: The split.
        seed: Seed of the data, which chooses the samples that are read.
    """
    labels = split.known_labels
    return SamplesOfSplit(
        size=len(split),
        labels="" if labels is None else digest_of(labels),
        inputs=digest_of_inputs(split, seed) or "",
    )


def digest_of(*tensors: Tensor) -> str:
    """Return a digest of some tensors."""
    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def check_settings(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Compare the settings of two processes.

    Args:
        first: The settings at rank 0, by name.
        other: The settings at another rank.
        rank: The other rank.

    Raises:
        ValueError: A setting differs.
    """
    for name, value in first.items():
        if other[name] != value:
            raise ValueError(
                f"data.{name} must be the same in every process, got {value} at rank 0 and {other[name]} at rank "
                f"{rank}; set data.{name} to {value}"
            )


def check_splits(first: Mapping[str, SamplesOfSplit], other: Mapping[str, SamplesOfSplit], rank: int) -> None:
    """Compare the samples of two processes.

    Args:
        first: The samples at rank 0, by the name of their split.
        other: The samples at another rank.
        rank: The other rank.

    Raises:
        ValueError: A process has other splits, sizes, labels or inputs.
    """
    nothing = SamplesOfSplit(size=0, labels="", inputs="")
    for name in sorted({*first, *other}):
        one = first.get(name, nothing)
        another = other.get(name, nothing)
        if one.size != another.size:
            difference = f"{one.size} {name} samples at rank 0 and {another.size} at rank {rank}"
        elif one.labels != another.labels:
            difference = f"other labels of the {name} samples at rank {rank} than at rank 0"
        elif one.inputs and another.inputs and one.inputs != another.inputs:
            difference = f"other inputs of the {name} samples at rank {rank} than at rank 0"
        else:
            continue
        raise ValueError(
            f"data.source must give every process the same samples, since clients are spread over processes, got "
            f"{difference}; leave rank and world size out of its samples"
        )
