"""Division of the samples among the server, everyone and the single clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Subset

from fl_lightning.data.clients import ClientIndices, FederatedData
from fl_lightning.data.holdout import draw_holdout, one_per_class
from fl_lightning.data.partitions import Dealt, Partition, PartitionInput
from fl_lightning.data.seen import is_read_randomly
from fl_lightning.data.splits import Array, Split
from fl_lightning.utils.keyed import keyed_globals, keyed_numpy


class Division:
    """Divides the samples of a source, equally for equal seeds.

    Args:
        splits: The splits by name, which are not changed.
        data: The data module, which tells N, and the number of classes, which may have to be counted.
        partition: The partition that deals samples to the clients.
        seed: The seed of every draw.

    Attributes:
        owner_names: Names of the clients, known once the training samples are dealt. Empty if no column names owners,
            or if a client has the samples of several owners.
    """

    def __init__(self, splits: Mapping[str, Split], data: FederatedData, partition: Partition, seed: int) -> None:
        self._splits = splits
        self._data = data
        self.partition = partition
        self.seed = seed
        self._left: Array | None = None
        """The training samples that are left to the clients. None: all are."""
        self.owner_names: list[str] = []

    def decides_owners(self) -> bool:
        """Return True if a sample belongs to its client before any sample is held out."""
        return self.partition.column is not None or self.deals_stored_positions()

    def hold_out(
        self,
        sizes: Mapping[str, float],
        *,
        proxy_overlap: bool,
        val_by: str | None = None,
        excluded: Tensor | None = None,
    ) -> dict[str, Split]:
        """Take the server's samples, and those that everyone has, out of the training samples.

        Args:
            sizes: Sizes of `val`, `transfer` and `proxy`, as `draw_holdout` takes them.
            proxy_overlap: Whether the clients keep the proxy's samples, too.
            val_by: The column whose values the validation split holds whole. None: samples are drawn one by one.
            excluded: Samples that are never taken, those of clients that never train. None: there are none.

        Returns:
            The new splits, by name. The clients have the samples that are left. Validation samples are seen as the
            test samples are.
        """
        train = self._splits["train"]
        if not any(sizes.values()):
            return {}
        groups = None if val_by is None else (val_by, train.column(val_by))
        if excluded is None:
            held = draw_holdout(len(train), sizes, overlapping=proxy_overlap, seed=self.seed, groups=groups)
        else:
            pool = np.setdiff1d(np.arange(len(train)), excluded.numpy())
            if groups is not None:
                column, values = groups
                groups = (column, np.asarray(values)[pool])
            places = draw_holdout(len(pool), sizes, overlapping=proxy_overlap, seed=self.seed, groups=groups)
            held = {name: pool[chosen] for name, chosen in places.items()}
            held["clients"] = np.union1d(held["clients"], excluded.numpy())
        self._left = held.pop("clients", None)
        splits = {name: train.subset(torch.from_numpy(indices)) for name, indices in held.items()}
        # Test samples are looked for only where they tell something, because a fit may do without them.
        if "val" in splits and train.may_transform:
            test = None
            if "test" in self._splits:
                test = self._splits["test"]
            splits["val"] = seen_as_tested(splits["val"], test)
        return splits

    def count_owners(self) -> int:
        """Count the owners of the training samples that are left."""
        with keyed_globals(self.seed, "partition"):
            return self.partition.count_owners(self._train())

    def deal_train(self) -> ClientIndices:
        """Deal the training samples that are left to the clients."""
        if self._left is not None and self.deals_stored_positions():
            return self._deal_stored(self._left)
        samples = self._train()
        dealt = self._deal(samples)
        if self.partition.column is not None and samples.labels is not None:
            self.owner_names = owner_names(samples.labels, dealt)
        return ClientIndices(dealt, samples.size, self._left)

    def _deal(self, samples: PartitionInput) -> list[Array]:
        """Deal samples by the partition, which may draw from the global generators if a user wrote it."""
        generator = keyed_numpy(self.seed, "partition")
        with keyed_globals(self.seed, "partition"):
            return self.partition(samples, self._data.num_owners, generator)

    def deals_stored_positions(self) -> bool:
        """Tell whether the partition gives indices that it stores to some client, whatever the samples are.

        A user's partition need not say so. It is asked for all samples, and for fewer of them. Another client may have
        the rest.
        """
        partition = self.partition
        said = said_of_positions(partition)
        if said is not None:
            return said
        if type(partition).__module__.startswith("fl_lightning."):
            return False
        size = len(self._splits["train"])
        whole = self._try_to_deal(np.arange(size))
        if whole is None:
            return False
        stored = {client_id for client_id, part in enumerate(whole) if len(part)}
        for num_samples in (size - 1, size // 2):
            for first in (0, size - num_samples):
                fewer = self._try_to_deal(np.arange(first, first + num_samples))
                if fewer is not None:
                    stored = {client_id for client_id in stored if same_samples(whole, fewer, client_id)}
        return bool(stored)

    def _try_to_deal(self, chosen: Array) -> Sequence[Array] | None:
        """Deal some of the training samples, or return None if the partition refuses so few.

        A partition that stores positions may refuse them by any error if there are no such samples.
        """
        try:
            return self._deal(self._describe(chosen))
        except Exception:
            return None

    def _deal_stored(self, left: Array) -> ClientIndices:
        """Deal stored positions, without those of samples that are held out, and say how many these are."""
        size = len(self._splits["train"])
        # ClientIndices refuses positions of samples that do not exist.
        given = ClientIndices(self._deal(self._describe(None)), size)
        kept = []
        for part in given:
            positions = part.numpy()
            kept.append(positions[np.isin(positions, left)])
        num_given = sum(map(len, given))
        num_kept = sum(map(len, kept))
        if num_kept < num_given:
            rank_zero_warn(
                f"{type(self.partition).__name__} deals {num_given} stored positions of training samples, and "
                f"{num_given - num_kept} of them are held out (data.val_fraction, data.transfer_size or "
                f"data.proxy_size); the clients have the other {num_kept}"
            )
        return ClientIndices(kept, size)

    def _train(self) -> PartitionInput:
        """Describe the training samples that are left."""
        return self._describe(self._left)

    def _describe(self, chosen: Array | None) -> PartitionInput:
        """Describe training samples for the partition, with labels if it reads them. None chooses all."""
        if self.partition.column is not None or self.partition.needs_labels:
            return self._input("train", chosen)
        if chosen is None:
            return PartitionInput(len(self._splits["train"]))
        return PartitionInput(len(chosen))

    def deal_test(self, dealt: Sequence[Tensor], size: int | None) -> Sequence[Tensor]:
        """Deal each client's own test set by the partition, if there are test samples.

        Args:
            dealt: The training samples of each client.
            size: The number of samples of a client's test set. None: as the partition says.
        """
        if "test" not in self._splits:
            return [torch.arange(0)] * self._data.num_owners
        samples = self._input("train", None)
        test = self._input("test", None)
        if self.partition.column is not None and test.labels is None:
            samples = self._with_classes("train", samples)
            test = self._with_classes("test", test)
        train = Dealt(
            parts=[part.numpy() for part in dealt],
            samples=samples,
            generator=keyed_numpy(self.seed, "partition"),
        )
        with keyed_globals(self.seed, "partition"):
            parts = self.partition.partition_test(train, test, size)
        return ClientIndices(parts, test.size)

    def _with_classes(self, split: str, samples: PartitionInput) -> PartitionInput:
        """Add their classes to the samples of a split, which are described by a column."""
        # Counting the classes may find that the labels are no classes, so it comes before the labels are read.
        num_classes = self._data.num_classes
        labels = self._splits[split].labels
        classes = None if labels is None else labels.numpy().copy()
        return replace(samples, num_classes=num_classes, classes=classes)

    def draw_shared(self, per_class: int, excluded: Tensor | None = None) -> Split:
        """Draw samples of each class, which everyone has, from the clients' own.

        Args:
            per_class: The number of samples of each class.
            excluded: Samples that are never taken, those of clients that never train. None: there are none.

        Raises:
            ValueError: The samples have no classes.
        """
        train = self._splits["train"]
        num_classes = self._data.num_classes
        labels = train.labels
        if labels is None or num_classes is None:
            raise ValueError(
                "the shared set needs samples with classes, and these have none; set data.extra_splits.shared"
            )
        pool = np.arange(len(train)) if self._left is None else self._left
        if excluded is not None:
            pool = np.setdiff1d(pool, excluded.numpy())
        drawn = one_per_class(
            labels=labels.numpy(),
            pool=pool,
            per_class=per_class,
            num_classes=num_classes,
            seed=self.seed,
        )
        return train.subset(torch.from_numpy(drawn))

    def _input(self, split: str, chosen: Array | None) -> PartitionInput:
        """Describe samples of a split with what the partition divides by: labels, or its column. None chooses all."""
        samples = self._splits[split]
        column = self.partition.column
        # Counting the classes may find that the labels are no classes, so it comes before the labels are read.
        num_classes = self._data.num_classes if column is None else None
        try:
            values: Any = samples.labels if column is None else samples.column(column)
        except ValueError:
            if split == "train":
                raise
            values = None
        if chosen is None:
            chosen = np.arange(len(samples))
        if values is not None:
            # This makes a copy, which a partition may sort.
            values = np.asarray(values)[chosen]
        return PartitionInput(len(chosen), values, num_classes)


def seen_as_tested(held: Split, test: Split | None) -> Split:
    """See the samples that are held back as test samples are seen, and warn where that cannot be decided.

    Args:
        held: The samples that are held back.
        test: The test samples. None: there are none.
    """
    doubts: list[str] = []
    if test is not None:
        held, doubts = held.seen_as(test)
    if not doubts and is_read_randomly(held.look_at, len(held)):
        if test is None:
            doubts = ["there are none, and reading a sample twice gives two values"]
        elif not is_read_randomly(test.look_at, len(test)):
            doubts = ["reading one of them twice gives one value, and reading a sample that is held back gives two"]
    if doubts:
        rank_zero_warn(
            f"data.val_fraction holds back {len(held)} training samples ({described_split(held)}), which may be "
            f"augmented where test samples are not: {', '.join(doubts)}; set data.val_fraction to 0 and give "
            f"validation samples of their own, by val_dataloader or from_datasets(val=...)"
        )
    return held


def described_split(split: Split) -> str:
    """Name the class of a split's dataset, or of the split where there is none."""
    dataset: Any = getattr(split, "dataset", split)
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset).__name__


def said_of_positions(partition: Partition) -> bool | None:
    """Return what a partition says of its positions by `stores_positions`. None: it says nothing."""
    if "stores_positions" in vars(partition):
        return partition.stores_positions
    for kind in type(partition).__mro__:
        if kind is Partition:
            return None
        if "stores_positions" in vars(kind):
            return partition.stores_positions
    return None


def same_samples(parts: Sequence[Array], others: Sequence[Array], client_id: int) -> bool:
    """Return True if a client has the same samples in both divisions, in any order.

    >>> same_samples([np.array([2, 0])], [np.array([0, 2])], client_id=0)
    True
    """
    if client_id >= len(others):
        return False
    return np.array_equal(np.sort(parts[client_id]), np.sort(others[client_id]))


def owner_names(column: Array, dealt: Sequence[Array]) -> list[str]:
    """Name the owner of each client's samples. Nobody is named if a client has samples of none or of several owners.

    Args:
        column: The owner of each sample, (n,).
        dealt: The positions of each client's samples.

    >>> owner_names(np.array(["b", "a", "b"]), [np.array([1]), np.array([0, 2])])
    ['a', 'b']
    >>> owner_names(np.array(["b", "a", "b"]), [np.array([0, 1]), np.array([2])])
    []
    """
    names = []
    for part in dealt:
        if not len(part):
            return []
        owner = column[part[0]]
        if not (column[part] == owner).all():
            return []
        names.append(str(owner))
    return names if len(set(names)) == len(names) else []
