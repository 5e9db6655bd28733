"""Draw samples that belong to no single client: server validation, proxy data, transfer set, one-per-class set."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.data.column_partition import owners_in
from fl_lightning.data.schema import UNKNOWN_CLASS, has_unknown_classes
from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Array, Split
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_numbers

SETTINGS = {
    "test": "test samples in data.source (a test_dataloader, or its argument test)",
    "val": "data.val_fraction (0.1: a tenth of the training samples)",
    "proxy": "data.proxy_size (0.01: one per cent of the training samples) or data.extra_splits.proxy",
    "transfer": "data.transfer_size (200: that many training samples) or data.extra_splits.transfer",
    "shared": "data.shared_per_class (1: one training sample of each class) or data.extra_splits.shared",
}
"""The setting that gives each split, for errors."""

SERVER_ONLY = ("val", "proxy")
"""Splits that no client sees."""

UNLABELLED = ("proxy",)
"""Splits whose samples may be of classes that the training data do not have. Methods that read labels refuse them."""


def holdout_sizes(
    val_fraction: float, transfer_size: float, proxy_size: float, extra_splits: Iterable[str] = ()
) -> dict[str, float]:
    """Return the sizes of the sets that are taken from the training samples, by split.

    Args:
        val_fraction: Share of the training samples in [0, 1).
        transfer_size: Whole number of samples of the transfer set, or below 1 their share of the training samples.
            0: there is no such set.
        proxy_size: Whole number of samples of the proxy set, or below 1 their share. 0: there is no such set.
        extra_splits: Names of the splits that come from sources of their own.

    Returns:
        The sizes of `val`, `transfer` and `proxy`.

    Raises:
        ValueError: A size is out of its range, or two settings give the same split.

    >>> holdout_sizes(val_fraction=0.1, transfer_size=20, proxy_size=0)
    {'val': 0.1, 'transfer': 20, 'proxy': 0}
    """
    check_numbers(val_fraction=val_fraction, transfer_size=transfer_size, proxy_size=proxy_size)
    if val_fraction is None or not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must lie in [0, 1), got {val_fraction}; 0 holds nothing back")
    sizes = {"val": val_fraction, "transfer": transfer_size, "proxy": proxy_size}
    for name in ("proxy", "transfer"):
        size = sizes[name]
        is_finite = 0 <= size < float("inf")
        if not is_finite or (size > 1 and size % 1):
            raise ValueError(
                f"{name}_size must be a whole number of samples, or below 1 a share of the training samples, got "
                f"{size}; 0 has none"
            )
    for name in extra_splits:
        if name in ("train", "test", "val"):
            raise ValueError(f"data.extra_splits cannot replace the {name} split; give it by data.source")
        if sizes.get(name):
            raise ValueError(f"data.{name}_size and data.extra_splits.{name} both give the {name} set; leave one unset")
    return sizes


def draw_holdout(
    num_samples: int,
    sizes: Mapping[str, float],
    *,
    overlapping: bool,
    seed: int,
    groups: tuple[str, Array] | None = None,
) -> dict[str, Array]:
    """Draw the sets that are taken from the training samples, uniformly without replacement.

    Each set has a generator of its own. The sets are drawn in the order val, transfer, proxy, so a set does not change
    with the size of a later set.

    Args:
        num_samples: Number n of training samples.
        sizes: Sizes of `val`, `transfer` and `proxy`: numbers of samples (≥ 1), or below 1 shares of n. A share is at
            least one sample.
        overlapping: Whether the proxy's samples stay with the clients, too.
        seed: Seed of the data.
        groups: Name of a column and its value for every sample, (num_samples,). All samples of a value are in the
            validation split, or none is. None: samples are drawn one by one.

    Returns:
        The sorted indices of each set that has a size, and of `clients`, who get the remaining samples.

    Raises:
        ValueError: A set leaves no samples to the clients.

    >>> held = draw_holdout(100, {"proxy": 0.01, "transfer": 20}, overlapping=False, seed=0)
    >>> {name: len(indices) for name, indices in held.items()}
    {'transfer': 20, 'proxy': 1, 'clients': 79}
    """
    remaining = np.arange(num_samples)
    held = {}
    for name, purpose in (("val", "validation split"), ("transfer", "transfer set"), ("proxy", "proxy set")):
        size = sizes.get(name, 0)
        if not size:
            continue
        count = int(size) if size >= 1 else max(1, round(size * num_samples))
        stays = overlapping and name == "proxy"
        if count > len(remaining) or (count == len(remaining) and not stays):
            raise ValueError(
                f"the {name} set must leave training samples to the clients, got {count} of the {len(remaining)} that "
                f"were left; lower {SETTINGS[name].split()[0]}"
            )
        generator = keyed_numpy(seed, purpose)
        if groups is not None and name == "val":
            column, values = groups
            order = np.sort(whole_groups(column, values, count=count, generator=generator))
            held[name] = order
            remaining = np.setdiff1d(remaining, order)
            continue
        order = generator.permutation(remaining)
        held[name] = np.sort(order[:count])
        if not stays:
            remaining = np.sort(order[count:])
    return {**held, "clients": remaining}


def whole_groups(column: str, groups: Array, *, count: int, generator: np.random.Generator) -> Array:
    """Draw whole groups of samples, one after the other, until there are at least `count` samples.

    Args:
        column: Name of the column of the groups, for the error.
        groups: Group of each sample, (n,).
        count: Least number of samples.
        generator: Generator of the order of the groups.

    Returns:
        The indices of the samples of the groups that were drawn, int64.

    Raises:
        ValueError: A sample is in no group, or no group would be left.

    >>> sites = np.array(["b", "a", "b"])
    >>> sites[whole_groups("site", sites, count=1, generator=np.random.default_rng(0))].tolist() in (["a"], ["b", "b"])
    True
    """
    names = owners_in(column, groups)
    members: dict[Any, list[int]] = {name: [] for name in names}
    for index, name in enumerate(groups.tolist()):
        members[name].append(index)
    drawn: list[int] = []
    for number, place in enumerate(generator.permutation(len(names)).tolist(), start=1):
        drawn += members[names[place]]
        if number == len(names):
            raise ValueError(
                f"data.val_by must leave groups of training samples to the clients, got {count} samples for the "
                f"validation split of {len(names)} groups in column {column!r}; lower data.val_fraction"
            )
        if len(drawn) >= count:
            break
    return np.array(drawn, dtype=np.int64)


def one_per_class(labels: Array, pool: Array, *, per_class: int, num_classes: int, seed: int) -> Array:
    """Draw the same number of samples of every class, without taking them from their owners.

    Args:
        labels: Class of each training sample, (n,).
        pool: Indices of the clients' samples, (m,).
        per_class: Number of samples of each class. A class with fewer samples gives all of them.
        num_classes: Number C of classes.
        seed: Seed of the data.

    Returns:
        The indices in order of the classes, at most per_class · C, int64.

    >>> labels = np.array([1, 0, 1, 0])
    >>> labels[one_per_class(labels, np.arange(4), per_class=1, num_classes=3, seed=0)]
    array([0, 1])
    """
    generator = keyed_numpy(seed, "shared set")
    shuffled = generator.permutation(pool)
    classes = labels[shuffled]
    drawn = [shuffled[classes == c][:per_class] for c in range(num_classes)]
    return np.concatenate(drawn).astype(np.int64)


def load_extra(sources: Mapping[str, Source], train: Split, training: Source) -> dict[str, Split]:
    """Load the sources of further splits, by name, by the schema of the training samples.

    Args:
        sources: Sources by the names of their splits.
        train: The training samples, whose shape all samples must have.
        training: The source of the training samples, which was read.

    Raises:
        ValueError: Samples are of another shape, or do not fit the schema.
    """
    schema = training.schema
    if sources and schema is not None and training.classes is not None:
        schema = schema._replace(num_classes=training.classes())
    splits = {}
    for name, source in sources.items():
        if source is training:
            splits[name] = train
            continue
        source.follow(schema, f"data.extra_splits.{name}", takes_other_classes=name in UNLABELLED)
        try:
            splits[name], _ = source.read()
        finally:
            source.follow(None, Source.place)  # it may be the source of another split, or of another data module
        tell_unknown(name, splits[name])
    for name, split in splits.items():
        shape = split.input_shape
        if shape != train.input_shape:
            raise ValueError(
                f"samples of data.extra_splits.{name} must have the shape of data.source's ({train.input_shape}), got "
                f"{shape}"
            )
    return splits


def tell_unknown(name: str, split: Split) -> None:
    """Log how many samples of a split are of classes that the training data do not have.

    Args:
        name: Name of the split.
        split: The samples.
    """
    if has_unknown_classes(split) and split.labels is not None:
        count = int((split.labels == UNKNOWN_CLASS).sum())
        rank_zero_info(
            f"data.extra_splits.{name}: {count} of {len(split)} samples are of classes that the training data do not "
            f"have; their labels are unknown, which is right for methods that do not read them"
        )
