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
from fl_lightning.types import ClientJob, ClientScore, ClientUpdate
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.text import printable

RECORD = "fl_lightning"
"""Name of the record that holds a message."""

FORMAT = "safetensors"
"""Name of the serialisation of its parts."""

Content = dict[str, Any]
"""Parts of a message by name: pytrees of tensors and plain values."""

OF_THE_SERVER = ("global/", "local/", "comm/", "test/", "val/")
"""Beginnings of the log keys that the server alone reports."""

COLUMNS = ("epoch", "step", "round")
"""Names of the columns of a run's rows that are no values."""

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
    return {name: apply_to_collection(part, Tensor, copy_to_device, device) for name, part in parts.items()}


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


def read_update(
    content: Content, job: ClientJob, most_samples: int, rated: bool
) -> tuple[ClientUpdate, MetricAccumulator, str | None]:
    """Read the result of a client: its update, the values that it logged, and the name of its file.

    Names, shapes and types of weights, and NaN, are checked where every update is: in the round.

    Args:
        content: of the message.
        job: that was asked for.
        most_samples: that its node has registered.
        rated: whether the accumulated learning rate must be a number.

    Raises:
        WireError: naming what is wrong.
    """
    head, extras, weights = (content[name] for name in ("head", "extras", "weights"))
    entries = isinstance(extras, dict) and (weights is None or isinstance(weights, dict))
    demand(entries, "extras and weights of a result must be entries by name, and these are not; send such")
    whole: Any = {name: head.get(name) for name in COUNTS}
    rates: Any = {name: head.get(name) for name in RATES}
    for name, value in whole.items():
        most = {"num_samples": most_samples, "idle_steps": whole["num_steps"]}.get(name, math.inf)
        counted = type(value) is int and 0 <= value <= most
        demand(counted, f"{name} of a result must be a whole number in [0, {most}], got {{}}; send its number", value)
    client_id = whole["client_id"]
    rule = f"client_id of a result must be {job.client_id}, got {{}}; answer for that client"
    demand(client_id == job.client_id, rule, client_id)
    for name, value in rates.items():
        undefined = name == "accumulated_lr" and not rated and value is not None and math.isnan(value)
        known = type(value) is float and (0 <= value < math.inf or undefined)
        demand(known, f"{name} of a result must be finite and ≥ 0, got {{}}; send the client's own", value)
    moved = rates["lr"] > 0 or not rates["accumulated_lr"] > 0
    demand(moved, "lr of a result must be > 0 where its accumulated_lr is; send the client's own")
    file = head.get("file")
    owned = f"client_{job.client_id}_round_{job.broadcast.round_idx}_"
    named = file is None or (isinstance(file, str) and FileRecord.is_name(file) and file.startswith(owned))
    demand(named, f"a node's file must be named {owned}…, as it names its files, got {{}}; send its name", file)
    update = ClientUpdate(weights=weights, extras=extras, **whole, **rates)
    return update, read_logged(head["logged"]), file


def read_score(head: Mapping[str, Any], client_id: int, most_samples: int) -> ClientScore:
    """Read the score of a client.

    Raises:
        WireError: it counts more samples than the client has, parts of answers, or something else.
    """
    correct, tested, values = (cast(Any, head.get(name)) for name in ("correct", "num_samples", "metrics"))
    for number, most in ((tested, most_samples), (correct, tested)):
        counted = isinstance(number, float) and 0 <= number <= most and number.is_integer()
        demand(counted, f"a score must count answers in [0, {most}], got {{}}; send its counts", number)
    tensors = isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())
    demand(tensors, "the metrics of a score must be tensors by name, got {}; send such", values)
    for name, value in values.items():
        rule = "metric {} of a score must be finite, or NaN where it is not defined; send its value"
        demand(not bool(value.isinf().any()), rule, name)
    is_finite = head.get("is_finite", True)
    demand(isinstance(is_finite, bool), "is_finite of a score must be true or false, got {}; send it", is_finite)
    return ClientScore(
        client_id=client_id,
        num_samples=tested,
        correct=correct,
        metrics=values,
        is_finite=is_finite,
    )


def read_logged(rows: Any) -> MetricAccumulator:
    """Read the values that a client logged.

    Raises:
        WireError: they are none, or the server's own.
    """
    logged = MetricAccumulator(most_rows=None)
    for name, (kind, pairs) in rows.items():
        owned = isinstance(name, str) and name == shown(name) and name not in COLUMNS
        owned = owned and not name.startswith(OF_THE_SERVER)
        demand(owned, "a client must log under names of its own, got {}; rename it", name)
        for value, weight in pairs:
            number = isinstance(value, float) and isinstance(weight, float) and 0 <= weight < math.inf
            demand(number, f"{name!r} must be logged as numbers of finite weight, got {{}}; send numbers", value)
            logged.log(name, value, weight, kind)
    return logged


def demand(holds: bool, rule: str, value: Any = None) -> None:
    """Refuse what arrived, unless a rule holds.

    Args:
        holds: whether it does.
        rule: a sentence, with `{}` in the place of the value.
        value: that was got.

    Raises:
        WireError: it does not.
    """
    if not holds:
        raise WireError(rule.replace("{}", shown(value)))


def shown(value: Any) -> str:
    """Show a value from elsewhere, whatever it is, in a sentence."""
    text = printable(repr(value) if not isinstance(value, str) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
