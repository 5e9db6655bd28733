"""Messages of a federation as Flower's records, and what may come in.

Every part of a message is the content of a safetensors file, in an `Array` of its own: what all clients are sent is
encoded and hashed once.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.metric_states import ClientMetric, states_of
from fl_lightning.client.records import FileRecord, decode, encode
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.metrics.keys import own_key
from fl_lightning.types import ClientJob, ClientScore, ClientUpdate, FineTuning, Scoring
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.text import printable

RECORD = "fl_lightning"
"""Name of the record that holds a message."""

FORMAT = "safetensors"
"""Name of the serialization of the parts of a message."""

Content = dict[str, Any]
"""Parts of a message by name: pytrees of tensors and plain values."""

OF_THE_SERVER = ("global/", "local/", "unseen/", "comm/", "test/", "val/")
"""Beginnings of the log keys that the server alone reports."""

COLUMNS = ("epoch", "step", "round")
"""Names of the columns of a run's rows that are no values."""

COUNTS = ("client_id", "num_samples", "num_steps", "idle_steps", "uncounted_steps")
RATES = ("accumulated_lr", "lr")
"""Names of the numbers in a result."""

LONGEST = 500
"""Largest number of characters that are kept of a text from elsewhere."""


class WireError(ValueError):
    """Reports a message that breaks a rule.

    Reading a message may raise any other error, too, because it holds any bytes.
    """


def part_of(value: Any) -> Array:
    """Encode a pytree as a part of a message."""
    data = encode(value)
    return Array(dtype=FORMAT, shape=(len(data),), stype=FORMAT, data=data)


def to_records(parts: Mapping[str, Array]) -> RecordDict:
    """Make the content of a message from its parts, by name."""
    return RecordDict({RECORD: ArrayRecord(dict(parts))})


def from_records(records: RecordDict, device: torch.device) -> Content:
    """Read the parts of a message.

    Args:
        records: Content of the message.
        device: Device of the tensors that are read.

    Raises:
        WireError: The message cannot be read.
    """
    # Bytes from elsewhere may raise any error.
    try:
        parts = {name: decode(part.data) for name, part in records.array_records[RECORD].items()}
        if not isinstance(parts["head"], dict):
            raise TypeError("a head of another kind")
    except Exception as error:
        raise WireError(
            f"a message must be one of fl_lightning, and this one cannot be read ({type(error).__name__})"
        ) from error
    content: Content = {}
    for name, part in parts.items():
        content[name] = apply_to_collection(part, dtype=Tensor, function=partial(copy_to_device, device=device))
    return content


# --- what a node sends


def parts_of_update(update: ClientUpdate, logged: MetricAccumulator, file: str | None) -> dict[str, Array]:
    """Encode the result of a client.

    Args:
        update: Update of the client.
        logged: Values that the client logged.
        file: Name of the node's file with the client's memory and personal entries. None means that the client keeps
            nothing.

    Raises:
        ValueError: The client has logged a metric object that cannot be sent.
    """
    head: Content = {name: int(getattr(update, name)) for name in COUNTS}
    head |= {name: float(getattr(update, name)) for name in RATES}
    _, head["logged"] = logged.drain()
    head["file"] = file
    return {
        "head": part_of(head),
        "extras": part_of(dict(update.extras)),
        "weights": part_of(update.weights and dict(update.weights)),
        "counted": part_of([states_to_send(of_client) for of_client in logged.counted]),
    }


def states_to_send(counted: ClientMetric) -> Content:
    """Return what a client has counted in a metric object, as a message holds it.

    Raises:
        ValueError: The object keeps predictions and targets, or it is no part of the module.
    """
    if not counted.path:
        raise ValueError(
            f"a metric object that a client logs in training must be a part of its module, and that of "
            f"{counted.name!r} is none; make it an attribute, or log its value"
        )
    for state in counted.states:
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"a metric object that a client logs in training must count in sums, and that of {counted.name!r} "
                    f"keeps the client's samples ({name}); give it thresholds, or log its value"
                )
    return {"name": counted.name, "path": counted.path, "states": [dict(state) for state in counted.states]}


def read_update(
    content: Content, job: ClientJob, *, most_samples: int, rated: bool, root: nn.Module
) -> tuple[ClientUpdate, MetricAccumulator, str | None]:
    """Read the result of a client: its update, the values that it logged, and the name of its file.

    The round checks the names, shapes, types and values of weights, as it does for every update.

    Args:
        content: Content of the message.
        job: Job that the node was asked to do.
        most_samples: Number of samples that the client's node has registered.
        rated: Whether the accumulated learning rate must be a number.
        root: The client module of this process, whose metric objects tell what may be sent of those at nodes.

    Raises:
        WireError: A part of the result breaks its rule.
    """
    head = content["head"]
    extras = content["extras"]
    weights = content["weights"]
    are_entries = isinstance(extras, dict) and (weights is None or isinstance(weights, dict))
    demand(are_entries, "extras and weights of a result must be entries by name, and these are not; send such")
    counts = read_counts(head, job, most_samples)
    rates = read_rates(head, rated=rated)
    file = head.get("file")
    prefix = f"client_{job.client_id}_round_{job.broadcast.round_idx}_"
    is_own_file = file is None or (isinstance(file, str) and FileRecord.is_name(file) and file.startswith(prefix))
    demand(is_own_file, f"a node's file must be named {prefix}…, as it names its files, got {{}}; send its name", file)
    update = ClientUpdate(weights=weights, extras=extras, **counts, **rates)
    logged = read_logged(head["logged"])
    logged.counted = [read_counted(counted, job.client_id, root) for counted in content["counted"]]
    return update, logged, file


def read_counted(counted: Mapping[str, Any], client_id: int, root: nn.Module) -> ClientMetric:
    """Read what a client has counted in a metric object.

    Args:
        counted: The key under which the object was logged, its path in the module, and its states.
        client_id: Id of the client.
        root: The client module of this process.

    Raises:
        WireError: There is no such object in the module, or its states have other names, types or shapes.
    """
    name: Any = counted["name"]
    path: Any = counted["path"]
    states: Any = counted["states"]
    demand(is_own_key(name), "a client must log under names of its own, got {}; rename it", name)
    found: Any = dict(root.named_modules()).get(path)
    is_metric = isinstance(found, Metric)
    demand(is_metric, "a logged metric object must be one of the module here, got {}; give both one module", path)
    wanted = [layout_of_state(state) for state in states_of(found)]
    sent = [layout_of_state(state) for state in states]
    is_alike = sent == wanted
    demand(is_alike, "the state of metric {} must be as that of the module here; give both one module", path)
    return ClientMetric(client_id, name=name, path=path, states=states)


def layout_of_state(state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size] | None]:
    """Return type and shape of each part of a metric object's state by name, None of what is no tensor."""
    layout: dict[str, tuple[torch.dtype, torch.Size] | None] = {}
    for name, value in state.items():
        layout[name] = (value.dtype, value.shape) if isinstance(value, Tensor) else None
    return layout


def read_counts(head: Mapping[str, Any], job: ClientJob, most_samples: int) -> Any:
    """Read the whole numbers of a result, by the name of the field of `ClientUpdate`.

    Args:
        head: Head of the message.
        job: Job that the node was asked to do.
        most_samples: Number of samples that the client's node has registered.

    Raises:
        WireError: A number is no count, or is of another client.
    """
    counts: Any = {name: head.get(name) for name in COUNTS}
    limits = {"num_samples": most_samples, "idle_steps": counts["num_steps"]}
    for name, value in counts.items():
        most = limits.get(name, math.inf)
        is_count = type(value) is int and 0 <= value <= most
        demand(is_count, f"{name} of a result must be a whole number in [0, {most}], got {{}}; send its number", value)
    client_id = counts["client_id"]
    rule = f"client_id of a result must be {job.client_id}, got {{}}; answer for that client"
    demand(client_id == job.client_id, rule, client_id)
    return counts


def read_rates(head: Mapping[str, Any], *, rated: bool) -> Any:
    """Read the learning rates of a result, by the name of the field of `ClientUpdate`.

    Args:
        head: Head of the message.
        rated: Whether the accumulated learning rate must be a number.

    Raises:
        WireError: A rate is none, or the client has moved at a rate of 0.
    """
    rates: Any = {name: head.get(name) for name in RATES}
    for name, value in rates.items():
        may_be_undefined = name == "accumulated_lr" and not rated
        is_undefined = may_be_undefined and value is not None and math.isnan(value)
        is_rate = type(value) is float and (0 <= value < math.inf or is_undefined)
        demand(is_rate, f"{name} of a result must be finite and ≥ 0, got {{}}; send the client's own", value)
    has_rate = rates["lr"] > 0 or not rates["accumulated_lr"] > 0
    demand(has_rate, "lr of a result must be > 0 where its accumulated_lr is; send the client's own")
    return rates


def plain_scoring(how: Scoring) -> Content:
    """Return how clients are tested as plain values. A node has its own copy of the metrics."""
    plain = how._replace(metrics=None)._asdict()
    if how.tuning is not None:
        plain["tuning"] = asdict(how.tuning)
    return plain


def read_scoring(plain: Content, metrics: Any) -> Scoring:
    """Return how clients are tested, as `plain_scoring` has written it.

    Args:
        plain: The plain values.
        metrics: The node's own metrics.
    """
    how = Scoring(**plain)._replace(metrics=metrics)
    if how.tuning is None:
        return how
    return how._replace(tuning=FineTuning(**plain["tuning"]))


def plain_score(score: ClientScore) -> Content:
    """Return a score as plain values, as `read_score` reads it."""
    return {
        "client_id": score.client_id,
        "num_samples": float(score.num_samples),
        "correct": None if score.correct is None else float(score.correct),
        "logged": dict(score.logged),
        "directions": dict(score.directions),
        "metrics": dict(score.metrics),
        "is_finite": bool(score.is_finite),
        "tuned": None if score.tuned is None else plain_score(score.tuned),
    }


def read_score(
    head: Mapping[str, Any], client_id: int, most_samples: int, *, classifies: bool, is_tuned: bool = False
) -> ClientScore:
    """Read the score of a client.

    Args:
        head: Head of the message.
        client_id: Id of the client.
        most_samples: Number of test samples that the client's node has registered.
        classifies: Whether right answers were to be counted.
        is_tuned: Whether the client was to be fine-tuned for a second score.

    Raises:
        WireError: The score counts more samples than the client has, or its numbers or metrics are of another kind.
    """
    correct: Any = head.get("correct")
    tested: Any = head.get("num_samples")
    values: Any = head.get("metrics")
    logged: Any = head.get("logged", {})
    demand(
        (correct is not None) == classifies,
        "a score must count right answers where the server asks for them, got {}; test as asked",
        correct,
    )
    counted = [(tested, most_samples), *([(correct, tested)] if classifies else [])]
    for number, most in counted:
        is_count = isinstance(number, float) and 0 <= number <= most and number.is_integer()
        demand(is_count, f"a score must count answers in [0, {most}], got {{}}; send its counts", number)
    are_numbers = isinstance(logged, dict) and all(
        isinstance(name, str) and isinstance(value, float) for name, value in logged.items()
    )
    demand(are_numbers, "the logged values of a score must be numbers by name, got {}; send such", logged)
    for name in logged:
        entry = own_key(f"local/{name}")
        is_users = entry is None or entry.writer == "clients"
        demand(is_users, "a logged value of a score must have a name of the user, got {}; send others", name)
    directions: Any = head.get("directions", {})
    are_directions = isinstance(directions, dict) and all(value in ("min", "max") for value in directions.values())
    demand(are_directions, "the directions of a score must be min or max by name, got {}; send such", directions)
    are_tensors = isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())
    demand(are_tensors, "the metrics of a score must be tensors by name, got {}; send such", values)
    for name, value in values.items():
        rule = "metric {} of a score must be finite, or NaN where it is not defined; send its value"
        has_infinite = bool(value.isinf().any())
        demand(not has_infinite, rule, name)
    is_finite = head.get("is_finite", True)
    demand(isinstance(is_finite, bool), "is_finite of a score must be true or false, got {}; send it", is_finite)
    tuned: Any = head.get("tuned")
    are_asked = isinstance(tuned, dict) if is_tuned else tuned is None
    demand(are_asked, "a score after fine-tuning must come where the server asks for it; test as asked")
    return ClientScore(
        client_id=client_id,
        num_samples=tested,
        correct=correct,
        metrics=values,
        is_finite=is_finite,
        logged=logged,
        directions=directions,
        tuned=read_score(tuned, client_id, most_samples, classifies=classifies) if is_tuned else None,
    )


def read_logged(rows: Any) -> MetricAccumulator:
    """Read the values that a client logged.

    Args:
        rows: Kind and pairs (value, weight) of each value, by log key.

    Raises:
        WireError: A log key is the server's own, or a value is no number.
    """
    logged = MetricAccumulator(most_rows=None)
    for name, (kind, pairs) in rows.items():
        demand(is_own_key(name), "a client must log under names of its own, got {}; rename it", name)
        for value, weight in pairs:
            is_number = isinstance(value, float) and isinstance(weight, float) and 0 <= weight < math.inf
            demand(is_number, f"{name!r} must be logged as numbers of finite weight, got {{}}; send numbers", value)
            logged.log(name, value, weight, reduce_fx=kind)
    return logged


def is_own_key(name: Any) -> bool:
    """Return True for a log key that a client may use."""
    if not isinstance(name, str):
        return False
    return name == shown(name) and name not in COLUMNS and not name.startswith(OF_THE_SERVER)


def demand(holds: bool, rule: str, value: Any = None) -> None:
    """Refuse a message, unless a rule holds.

    Args:
        holds: Whether the rule holds.
        rule: Sentence of the rule, with `{}` in the place of the value.
        value: Value that has arrived.

    Raises:
        WireError: The rule does not hold.
    """
    if not holds:
        raise WireError(rule.replace("{}", shown(value)))


def shown(value: Any) -> str:
    """Write any value from elsewhere for a sentence."""
    text = printable(value if isinstance(value, str) else repr(value))
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}…"
