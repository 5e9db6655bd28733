"""Messages of a federation as Flower's records, and what may come in.

Every part of a message is the content of a safetensors file, in an `Array` of its own: what all clients are sent is
encoded and hashed once.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.client.records import FileRecord, decode, encode
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.types import ClientScore, ClientUpdate
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.text import printable

RECORD = "fl_lightning"
"""Name of the record that holds a message."""

FORMAT = "safetensors"
"""Name of the serialisation of its parts."""

Content = dict[str, Any]
"""Parts of a message by name: pytrees of tensors and plain values."""

OF_THE_SERVER = ("global/", "local/", "comm/", "test/")
"""Beginnings of the log keys that the server alone reports."""

COUNTS = ("client_id", "num_samples", "num_steps", "idle_steps", "uncounted_steps")
RATES = ("accumulated_lr", "lr")
"""Numbers in a result."""

LONGEST = 500
"""Characters of a text from elsewhere that are kept."""


class WireError(ValueError):
    """Error for what arrived and is not what it must be.

    What is read may raise any other error, too: nothing is known of it.
    """


def part_of(value: Any) -> Array:
    """Encode a pytree as a part of a message."""
    data = encode(value)
    return Array(FORMAT, (len(data),), FORMAT, data)


def to_records(parts: Mapping[str, Array]) -> RecordDict:
    """Make the content of a message of its parts."""
    return RecordDict({RECORD: ArrayRecord(dict(parts))})


def from_records(records: RecordDict, device: torch.device) -> Content:
    """Read the parts of a message.

    Raises:
        WireError: if it cannot be read.
    """
    try:
        parts = {name: decode(part.data) for name, part in records.array_records[RECORD].items()}
        if not isinstance(parts["head"], dict):
            raise TypeError("a head of another kind")
    except Exception as error:  # whatever bytes from elsewhere bring about
        raise WireError(
            f"a message must be one of fl_lightning, and this one cannot be read ({type(error).__name__})"
        ) from error
    return {name: apply_to_collection(part, Tensor, to_device, device) for name, part in parts.items()}


# --- what a node sends


def parts_of_update(update: ClientUpdate, logged: MetricAccumulator, file: str | None) -> dict[str, Array]:
    """Encode the result of a client.

    Args:
        update: what is sent to the server.
        logged: values that the client logged.
        file: name of the node's file with its memory and personal entries; None: it keeps nothing.

    Raises:
        TypeError: metric objects, which do not travel.
    """
    if logged.metrics:
        raise TypeError(
            f"metric objects that a client logs in training stay at its node, but {min(logged.metrics)!r} was logged; "
            f"log its value, or set model.metrics"
        )
    head: Content = {name: int(getattr(update, name)) for name in COUNTS}
    head |= {name: float(getattr(update, name)) for name in RATES}
    head |= {"logged": logged.drain()[1], "file": file}
    whole = {"head": head, "extras": dict(update.extras), "weights": update.weights and dict(update.weights)}
    return {name: part_of(value) for name, value in whole.items()}


def read_update(content: Content, client_id: int, most_samples: int) -> tuple[ClientUpdate, MetricAccumulator, Any]:
    """Read the result of a client: its update, the values that it logged, and the name of its file.

    Names, shapes and types of weights, and NaN, are checked where every update is: in the round.

    Args:
        content: of the message.
        client_id: that was asked.
        most_samples: that its node has registered.

    Raises:
        WireError: naming what is wrong.
    """
    head, extras, weights = (content[name] for name in ("head", "extras", "weights"))
    if not (isinstance(extras, dict) and (weights is None or isinstance(weights, dict))):
        raise WireError("extras and weights of a result must be entries by name, and these are not; send such")
    whole: Any = {name: head.get(name) for name in COUNTS}
    for name, value in whole.items():
        if type(value) is not int or value < 0:
            raise WireError(f"{name} of a result must be a whole number ≥ 0, got {shown(value)}; send its number")
    if whole["client_id"] != client_id:
        raise WireError(f"client_id of a result must be {client_id}, got {whole['client_id']}; answer for that client")
    if whole["num_samples"] > most_samples:
        raise WireError(
            f"num_samples of a result must lie in [0, {most_samples}], as its node has registered, got "
            f"{whole['num_samples']}; send their number"
        )
    rates: Any = {name: head.get(name) for name in RATES}
    for name, value in rates.items():
        if type(value) is not float or not (0 <= value < math.inf or math.isnan(value)):
            raise WireError(f"{name} of a result must be finite and ≥ 0, got {shown(value)}; send the client's own")
    file = head.get("file")
    if file is not None and not (isinstance(file, str) and FileRecord.is_name(file)):
        raise WireError(f"a node's file must be named as it names its files, got {shown(file)}; send its name")
    update = ClientUpdate(weights=weights, extras=extras, **whole, **rates)
    return update, read_logged(head["logged"]), file


def read_score(head: Mapping[str, Any], client_id: int, most_samples: int) -> ClientScore:
    """Read the score of a client.

    Raises:
        WireError: it is of more samples than the client has, or of something else.
    """
    correct, tested, values = (cast(Any, head.get(name)) for name in ("correct", "num_samples", "metrics"))
    for number, most in ((tested, most_samples), (correct, tested)):
        if not (isinstance(number, float) and 0 <= number <= most):
            raise WireError(f"a score must count answers in [0, {most}], got {shown(number)}; send its counts")
    if not (isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())):
        raise WireError(f"the metrics of a score must be tensors by name, got {shown(values)}; send such")
    return ClientScore(client_id, tested, correct, values)


def read_logged(rows: Any) -> MetricAccumulator:
    """Read the values that a client logged.

    Raises:
        WireError: they are none, or the server's own.
    """
    logged = MetricAccumulator(most_rows=None)
    for name, (kind, pairs) in rows.items():
        if not isinstance(name, str) or name != printable(name) or name.startswith(OF_THE_SERVER):
            raise WireError(f"a client must log under names of its own, got {shown(name)}; rename it")
        for value, weight in pairs:
            if not (isinstance(value, float) and isinstance(weight, float) and weight >= 0):
                raise WireError(f"{name!r} must be logged as numbers, got {shown(value)}; send numbers")
            logged.log(name, value, weight, kind)
    return logged


def shown(value: Any) -> str:
    """Show a value from elsewhere, whatever it is, in a sentence."""
    text = printable(repr(value) if not isinstance(value, str) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
