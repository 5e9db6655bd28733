"""Holdout: samples that belong to no single client (server validation, proxy data, transfer set, one-per-class set)."""

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
"""The setting that gives a split, for errors."""

SERVER_ONLY = ("val", "proxy")
"""Splits that no client sees."""

UNLABELLED = ("proxy",)
"""Splits whose samples may be of classes that the training data do not have. Methods that read labels refuse these."""


def holdout_sizes(
    val_fraction: float, transfer_size: float, proxy_size: float, extra_splits: Iterable[str] = ()
) -> dict[str, float]:
    """Compute the sizes of the sets that are taken from the training samples, by split.

    Args:
        val_fraction: share of the training samples in [0, 1).
        transfer_size: number of samples (whole), or below 1 their share; 0: none.
        proxy_size: the same for the proxy set.
        extra_splits: names of the splits that come from sources of their own.

    Returns:
        Sizes of `val`, `transfer` and `proxy`.

    Raises:
        ValueError: a size out of its range, or a split that is given twice.

    >>> holdout_sizes(0.1, 20, 0)
    {'val': 0.1, 'transfer': 20, 'proxy': 0}
    """
    check_numbers(val_fraction=val_fraction, transfer_size=transfer_size, proxy_size=proxy_size)
    if val_fraction is None or not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must lie in [0, 1), got {val_fraction}; 0 holds nothing back")
    sizes = {"val": val_fraction, "transfer": transfer_size, "proxy": proxy_size}
    for name in ("proxy", "transfer"):
        if not 0 <= sizes[name] < float("inf") or (sizes[name] > 1 and sizes[name] % 1):
            raise ValueError(
                f"{name}_size must be a whole number of samples, or below 1 a share of the training samples, got "
                f"{sizes[name]}; 0 has none"
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

    Each set has a generator of its own; they are drawn in the order val, transfer, proxy, so a set does not change
    with the size of a later one.

    Args:
        num_samples: n of the training split.
        sizes: of `val`, `transfer` and `proxy`: samples (≥ 1), or below 1 a share of n, at least one sample.
        overlapping: whether the proxy's samples stay with the clients as well.
        seed: of the data.
        groups: name of a column and its value for every sample, (num_samples,): all samples of a value are in the
            validation split, or none is. None: samples are drawn one by one.

    Returns:
        Sorted indices of each set that has a size, and of `clients`, who get what is left.

    Raises:
        ValueError: if nothing would be left to the clients.

    >>> held = draw_holdout(100, {"proxy": 0.01, "transfer": 20}, overlapping=False, seed=0)
    >>> {name: len(indices) for name, indices in held.items()}
    {'transfer': 20, 'proxy': 1, 'clients': 79}
    """
    left = np.arange(num_samples)
    held = {}
    for name, purpose in (("val", "validation split"), ("transfer", "transfer set"), ("proxy", "proxy set")):
        size = sizes.get(name, 0)
        if not size:
            continue
        count = int(size) if size >= 1 else max(1, round(size * num_samples))
        stays = overlapping and name == "proxy"
        if count > len(left) or (count == len(left) and not stays):
            raise ValueError(
                f"the {name} set must leave training samples to the clients, got {count} of the {len(left)} that were "
                f"left; lower {SETTINGS[name].split()[0]}"
            )
        generator = keyed_numpy(seed, purpose)
        if groups is not None and name == "val":
            column, values = groups
            order = np.sort(whole_groups(column, values, count=count, generator=generator))
            held[name] = order
            left = np.setdiff1d(left, order)
            continue
        order = generator.permutation(left)
        held[name] = np.sort(order[:count])
        left = left if stays else np.sort(order[count:])
    return {**held, "clients": left}


def whole_groups(column: str, groups: Array, *, count: int, generator: np.random.Generator) -> Array:
    """Draw whole groups of samples, one after the other, until there are at least `count` samples.

    Args:
        column: name of the column of the groups, for the error.
        groups: group of each sample, (n,).
        count: least number of samples.
        generator: draws the order of the groups.

    Returns:
        Indices of the samples of the groups that were drawn, int64.

    Raises:
        ValueError: a sample is in no group, or no group would be left.

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


def one_per_class(labels: Array, pool: Array, per_class: int, num_classes: int, seed: int) -> Array:
    """Draw the same number of samples of every class, without taking them from their owners.

    Args:
        labels: class of each training sample, (n,).
        pool: indices of the clients' samples.
        per_class: samples of each class; of a class with fewer all are taken.
        num_classes: C.
        seed: of the data.

    Returns:
        Indices in order of the classes, at most per_class · C.

    >>> labels = np.array([1, 0, 1, 0])
    >>> labels[one_per_class(labels, np.arange(4), per_class=1, num_classes=3, seed=0)]
    array([0, 1])
    """
    generator = keyed_numpy(seed, "shared set")
    shuffled = generator.permutation(pool)
    classes = labels[shuffled]
    return np.concatenate([shuffled[classes == c][:per_class] for c in range(num_classes)]).astype(np.int64)


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
        if (shape := split.input_shape) != train.input_shape:
            raise ValueError(
                f"samples of data.extra_splits.{name} must have the shape of data.source's ({train.input_shape}), got "
                f"{shape}"
            )
    return splits


def tell_unknown(name: str, split: Split) -> None:
    """Tell how many samples of a split are of classes that the training data do not have."""
    if has_unknown_classes(split) and split.labels is not None:
        count = int((split.labels == UNKNOWN_CLASS).sum())
        rank_zero_info(
            f"data.extra_splits.{name}: {count} of {len(split)} samples are of classes that the training data do not "
            f"have; their labels are unknown, which is right for methods that do not read them"
        )
