"""The user's torchmetrics objects that are evaluated besides what the package reports itself."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fl_lightning.functional.state import to_float32
from fl_lightning.metrics.keys import check_metric_name
from fl_lightning.utils.settings import check_kind
from fl_lightning.utils.text import slug

Metrics = Metric | MetricCollection | dict[str, Metric]
"""A metric, a collection, or metrics by name; `update` takes predictions and targets."""

KINDS = (Metric, MetricCollection)
"""Classes of the objects that may be given."""


def as_collection(metrics: Metrics | None) -> MetricCollection | None:
    """Make a collection of one metric, several or a collection.

    Raises:
        ValueError: A name is one under which the package reports a value, or two names would name one file.
    """
    if not metrics:
        return None
    remedy = "give MulticlassAccuracy(num_classes=10), or a dict of such by name"
    for metric in objects_in(metrics):
        check_kind(KINDS, "torchmetrics objects", remedy, metrics=metric)
    collection = metrics if isinstance(metrics, MetricCollection) else MetricCollection(cast(Any, metrics))
    by_file: dict[str, str] = {}
    for key in collection:
        name = str(key)
        check_metric_name(name)
        other = by_file.setdefault(slug(name).casefold(), name)
        if other != name:
            raise ValueError(
                f"names of metrics must differ as names of files, got {other!r} and {name!r}; rename one of them"
            )
    return collection


def objects_in(metrics: Any) -> list[Any]:
    """List what the user gave as metrics, which need not be metrics."""
    if isinstance(metrics, (*KINDS, str)) or not isinstance(metrics, Iterable):
        return [metrics]
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    return list(metrics)


def alone(metrics: MetricCollection) -> MetricCollection:
    """Copy a collection for samples that this process alone evaluates, so that nothing crosses processes."""
    copy = metrics.clone()
    for metric in copy.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = bool  # no process group: False
    copy.reset()
    return copy


def update(metrics: MetricCollection, batch: Any, predict: Any) -> Tensor:
    """Predict a batch, update the metrics, and return the predictions.

    Raises:
        ValueError: The batch is no pair (x, y).
    """
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError(
            f"model.metrics needs batches (x, y), got {type(batch).__name__}; log the metrics in the module's own steps"
        )
    x, y = batch
    predictions: Tensor = to_float32(predict(x))
    count(metrics, predictions, y)
    return predictions


def count(metrics: MetricCollection, predictions: Tensor, targets: Any) -> None:
    """Update the metrics.

    Args:
        metrics: The metrics.
        predictions: What the model answers to the samples of a batch.
        targets: The targets of the batch.

    Raises:
        ValueError: A metric does not take such predictions and targets.
    """
    try:
        metrics.update(predictions, targets)
    except torch.OutOfMemoryError:
        raise
    # A metric may raise an error of any class.
    except Exception as error:
        name = refusing(metrics, predictions, targets)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the metric {name!r} must take predictions of shape {shape_of(predictions)} and targets of shape "
            f"{shape_of(targets)}, got {type(error).__name__}: {reason}; name another metric, or change its arguments"
        ) from error


def refusing(metrics: MetricCollection, predictions: Tensor, targets: Any) -> str:
    """Return the name of the first metric that raises an error."""
    names = [str(name) for name in metrics]
    for name in names:
        try:
            metrics[name].clone().update(predictions, targets)
        except Exception:
            return name
    return ", ".join(names)


def shape_of(values: Any) -> str:
    """Return the shape of a tensor, or the class of another object.

    >>> shape_of(torch.zeros(2, 3)), shape_of([1])
    ('(2, 3)', 'list')
    """
    return str(tuple(values.shape)) if isinstance(values, Tensor) else type(values).__name__


def computed(metric: Metric | MetricCollection) -> Any:
    """Compute the values, also on a process that has had no samples."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
        return metric.compute()


def values_of(result: Mapping[str, Tensor], prefix: str, class_names: Sequence[str]) -> dict[str, float]:
    """Name computed values for a round's row, and those of a vector by the classes.

    A vector that has not one value for each class is of something else, such as clients or outputs. Its values have
    the numbers of their positions. Values of further dimensions have no place in a row (`arrays_of`).

    Args:
        result: What a collection computed, by name.
        prefix: Beginning of the names, without a slash.
        class_names: Names of the C classes.
    """
    arrays = arrays_of(result)
    values: dict[str, float] = {}
    for name, value in result.items():
        if name in arrays:
            continue
        if not isinstance(value, Tensor) or value.ndim == 0:
            values[f"{prefix}/{name}"] = float(value)
        else:
            is_by_class = len(value) == len(class_names)
            names = class_names if is_by_class else [str(index) for index in range(len(value))]
            for part, number in zip(names, value.tolist(), strict=True):
                values[f"{prefix}/{name}/{part}"] = number
    return values


def arrays_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the computed values that are no numbers or vectors, such as a confusion matrix or a curve, by name.

    Args:
        result: What a collection computed, by name.
    """
    arrays: dict[str, Any] = {}
    for name, value in result.items():
        is_row = isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim <= 1)
        if not is_row:
            arrays[name] = value
    return arrays
