"""Streams: clients whose training samples have neither a length nor an index."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.data.clients import ClientIndices, ClientView, FederatedData
from fl_lightning.data.loader_settings import LoaderSpec, check_loader_class
from fl_lightning.data.partitions import IIDPartition, Partition
from fl_lightning.data.splits import LoadedSplit
from fl_lightning.types import Batch
from fl_lightning.utils.own_generators import generators_in, key_generators


class Stream(NamedTuple):
    """Holds one client's training samples, and how batches are made of them."""

    dataset: IterableDataset[Any]
    loader_spec: LoaderSpec


class StreamSplit(LoadedSplit):
    """Holds a stream of training samples for each client. They are counted as 0, because no sample has an index.

    Args:
        streams: The streams by client id.

    Raises:
        ValueError: The ids are not 0 ... N-1, or the loaders differ in `batch_size` or `drop_last`.
    """

    labels = None
    # A stream may draw.
    augments = True

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        if sorted(streams) != list(range(len(streams))) or not streams:
            raise ValueError(
                f"streams must be given for the client ids 0 ... N-1, got {list(streams)}; number the clients from 0"
            )
        batching = {(spec.batch_size, spec.drop_last) for _, spec in streams.values()}
        if len(batching) > 1:
            got = ", ".join(sorted(map(str, batching)))
            raise ValueError(
                f"the loaders of all streams must have the same batch_size and drop_last, got {got}; give every "
                f"client's loader the same"
            )
        self.streams = [streams[client_id] for client_id in range(len(streams))]

    def __len__(self) -> int:
        return 0

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        raise ValueError("the samples of a stream have no index; a client reads them in their order")

    def subset(self, indices: Tensor) -> "StreamSplit":
        raise ValueError("the samples of a stream have no index; give sets of the server as datasets of their own")


class StreamedData(FederatedData, Protocol):
    """Names the part of the data module that streams read."""

    partition: Partition
    holdout_sizes: dict[str, float]


class ClientStreams:
    """Gives the clients' training samples if these are streams, with the attributes of `ClientSamples`.

    Args:
        split: The streams.
        data: The data module.

    Attributes:
        dealt: No index for each client.

    Raises:
        ValueError: A setting of the data module needs the number of samples, or their index.
    """

    def __init__(self, split: StreamSplit, data: StreamedData) -> None:
        self.split = split
        self._data = data
        self._most_batches: int | None = None
        given = len(split.streams)
        kind = type(data.partition)
        held = [name for name, size in data.holdout_sizes.items() if size]
        rules = (
            (data.num_clients != given, f"each client has its own: data.num_clients must be {given}", data.num_clients),
            (kind is not IIDPartition, "nothing is left to be divided: data.partition must stay unset", kind.__name__),
            (bool(held), "no share can be held back: give a validation set, or data.extra_splits, in place", held),
            (data.batch_size == "full", "data.batch_size must be a number", data.batch_size),
        )
        for broken, rule, got in rules:
            if broken:
                raise ValueError(f"the clients' samples are streams, which have no length, so that {rule}; got {got}")
        self.dealt = ClientIndices([np.arange(0)] * given)

    def limit(self, batches: int) -> None:
        """Let a pass over a stream end after a number of batches.

        Args:
            batches: The number of batches.
        """
        self._most_batches = batches

    def indices(self, client_id: int, round_idx: int) -> Tensor:
        """Return no index."""
        return self.all_indices(client_id)

    def all_indices(self, client_id: int) -> Tensor:
        """Return no index."""
        return self.dealt[client_id]

    def size(self, client_id: int, round_idx: int) -> int:
        """Count the samples of the longest pass that a client makes.

        Args:
            client_id: 0 ... N-1, which is the same for all clients.
            round_idx: Communication round, from 0, which is the same for all rounds.

        Raises:
            ValueError: The pass is not limited.
        """
        if self._most_batches is None:
            raise ValueError("the clients' samples are streams, which have no length; set model.max_local_steps")
        # The batch size is never "full" here.
        return self._most_batches * int(self._data.batch_size)

    def view(self, client_id: int, round_idx: int) -> "StreamView":
        """Make the view of one client's data in one round."""
        return StreamView(
            data=self._data,
            train=self.split,
            indices={},
            client_id=client_id,
            round_idx=round_idx,
            most=self.size(client_id, round_idx),
        )

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Refuse to hold samples back."""
        raise ValueError("set_class_count needs samples with integer labels, and those of a stream are not known")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing: every pass begins the stream anew."""


class StreamView(ClientView):
    """Gives one client's stream in one round (the `ClientData` protocol).

    Every pass begins the stream anew and ends after `most` samples. Before it, a stream with the method `set_epoch` is
    told the round.

    Args:
        data: The data module.
        train: The streams of all clients.
        indices: The client's samples by split, without `train`.
        client_id: The client's id, 0 ... N-1.
        round_idx: The communication round, from 0.
        most: The most samples of a pass.
    """

    def __init__(
        self,
        data: FederatedData,
        train: StreamSplit,
        indices: Mapping[str, Tensor],
        *,
        client_id: int,
        round_idx: int,
        most: int,
    ) -> None:
        super().__init__(data, train, indices, client_id=client_id, round_idx=round_idx)
        self._streams = train
        self._most = most
        self._seen = 0

    @property
    def label_counts(self) -> Tensor:
        raise ValueError("label_counts needs samples with integer labels, and those of a stream are not known")

    @property
    def num_samples(self) -> int:
        return self._seen

    def size(self, split: str = "train") -> int:
        if split == "train":
            return self._most
        return super().size(split)

    def all(self, split: str = "train") -> Batch:
        if split != "train":
            return super().all(split)
        for batch in self.batches(batch_size=self._most):
            return batch
        raise ValueError(f"the stream of client {self.client_id} gave no sample; leave the client out by data.schedule")

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        if split != "train":
            return super().batches(
                split,
                epoch=epoch,
                batch_size=batch_size,
                shuffle=shuffle,
                with_index=with_index,
            )
        return self._pass(epoch, batch_size=self.samples_per_batch("train", batch_size), with_index=with_index)

    def _pass(self, epoch: int | None, *, batch_size: int, with_index: bool) -> Iterator[Batch]:
        """Read the stream once.

        Args:
            epoch: The local epoch. None: the pass does not train.
            batch_size: The number of samples of a batch.
            with_index: Whether each batch comes with the numbers of its samples in the pass.
        """
        dataset, spec = self._streams.streams[self.client_id]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.round_idx)
        spec = replace(spec, collate_fn=partial(counted_batch, spec.collate_fn))
        generator = self.generator(f"stream/{epoch}")
        own_generators = generators_in(dataset, spec.collate_fn)
        if own_generators:
            key = torch.randint(2**31, (), generator=self.generator(f"own/{epoch}"))
            key_generators(own_generators, int(key))
        drop_last = self.drop_last and epoch is not None
        loader = spec.loader(dataset, generator, self._streams.pins, batch_size=batch_size, drop_last=drop_last)
        staging = self._streams.staging
        first = 0
        read = islice(loader, -(-self._most // batch_size))
        batches: Iterator[Any] = read if staging is None else map(staging.begin, read)
        current = next(batches, None)
        while current is not None:
            # Lightning, too, reads ahead where a length is not known.
            following = next(batches, None)
            self.ended = following is None
            size, batch = current if staging is None else current()
            if batch is None and epoch is None:
                # A pass that trains counts the batches that it skips, as Lightning does.
                pass
            elif with_index:
                yield batch, torch.arange(first, first + size)
            else:
                yield batch
            first += size
            # The next batch was asked for, so this one was trained on.
            if epoch is not None and batch is not None:
                self._seen += size
            current = following

    def restricted(self, split: str, positions: Tensor) -> ClientView:
        if split == "train":
            raise ValueError("the samples of a stream have no positions, so that a phase cannot choose some of them")
        return StreamView(
            data=self._data,
            train=self._streams,
            indices=super().restricted(split, positions)._indices,
            client_id=self.client_id,
            round_idx=self.round_idx,
            most=self._most,
        )


def counted_batch(collate_fn: Callable[[list[Any]], Any], items: list[Any]) -> tuple[int, Any]:
    """Make `(number of items, batch)` of a list of items.

    Args:
        collate_fn: Makes a batch of a list of items.
        items: The items.

    >>> counted_batch(tuple, ["a", "b"])
    (2, ('a', 'b'))
    """
    return len(items), collate_fn(items)


def are_streams(train: Any) -> TypeGuard[Mapping[int, Any]]:
    """Return True if `train` maps clients to streams, as datasets or as DataLoaders of datasets."""
    if not isinstance(train, Mapping):
        return False
    datasets = [getattr(value, "dataset", value) for value in train.values()]
    return bool(datasets) and all(isinstance(dataset, IterableDataset) for dataset in datasets)


def read_stream_loader(loader: DataLoader[Any]) -> Stream:
    """Read a DataLoader of a stream.

    Args:
        loader: The DataLoader.

    Raises:
        ValueError: The DataLoader makes no batches.
        TypeError: Its dataset is no stream.
    """
    check_loader_class(loader)
    if loader.batch_size is None:
        raise ValueError(
            "the DataLoader of a stream must have a batch_size, by which a client's samples are counted, got one "
            "without; let the dataset yield samples, and give the DataLoader batch_size"
        )
    if not isinstance(loader.dataset, IterableDataset):
        raise TypeError(f"a stream must be an IterableDataset, got {type(loader.dataset).__name__}")
    spec = LoaderSpec(
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        batch_size=loader.batch_size,
        shuffle=None,
        drop_last=loader.drop_last,
    )
    return Stream(loader.dataset, spec)
