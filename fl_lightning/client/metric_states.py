"""Metric objects of a client: they begin anew for each client, and the states of all clients are joined."""

from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.metrics.user_metrics import computed
from fl_lightning.utils.attributes import instance_attributes
from fl_lightning.utils.own_generators import is_of_library

MetricState = Mapping[str, Tensor | list[Tensor]]
"""The state of one metric object, by the name under which the object keeps it."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps the parts of a module."""

ITERATED = (list, tuple, set, frozenset, deque)
"""Types of collections whose items have no names."""

COLLECTIONS = (*ITERATED, dict, UserDict, UserList, SimpleNamespace)
"""Types that are searched for metric objects, besides classes of the user's."""

MOST_HELD = 100
"""Largest number of items of a list, a dict or an object that are searched for metric objects."""

MOST_HOLDERS = 100
"""Largest number of lists, dicts and objects that are searched for each attribute of a module."""

NOBODY = -1
"""Id of no client, for what was logged before the first client."""


class ClientMetric(NamedTuple):
    """Holds what a client has counted in one metric object that it logged.

    Args:
        client_id: The id of the client.
        name: The key under which the object was logged.
        path: The path of the object in the client module. Empty if it is none of the module's parts.
        states: The state of the object and of each metric object within it.
    """

    client_id: int
    name: str
    path: str
    states: Sequence[MetricState]


def parts_that_count(client: nn.Module) -> list[Metric | MetricCollection]:
    """List the metric objects and collections in a module, each once."""
    return list({id(part): part for part in counting_by_name(client).values()}.values())


def counting_by_name(client: nn.Module) -> dict[str, Metric | MetricCollection]:
    """Return the metric objects and collections in a module by name.

    A metric object in a list, a dict or an object, which torch does not take for a part of the module, is found too.
    """
    found: dict[str, Metric | MetricCollection] = {}
    for path, part in client.named_modules():
        if isinstance(part, Metric | MetricCollection):
            found[path] = part
            continue
        for attribute, value in vars(part).items():
            if attribute not in OF_TORCH and may_count(value):
                found |= counting_in(f"{path}.{attribute}".lstrip("."), value)
    return found


def counting_in(name: str, holder: Any) -> dict[str, Metric | MetricCollection]:
    """Return the metric objects and collections that a list, a dict or an object keeps, at any depth, by name.

    Args:
        name: Name of the holder.
        holder: The holder.
    """
    found: dict[str, Metric | MetricCollection] = {}
    searched = [holder]
    waiting = deque(items_that_may_count(name, holder))
    while waiting and len(searched) < MOST_HOLDERS:
        path, value = waiting.popleft()
        if isinstance(value, Metric | MetricCollection):
            found |= {f"{path}.{inner}".rstrip("."): part for inner, part in counting_by_name(value).items()}
        elif all(value is not other for other in searched):
            searched.append(value)
            waiting.extend(items_that_may_count(path, value))
    return found


def items_that_may_count(path: str, holder: Any) -> list[tuple[str, Any]]:
    """List the items of a holder that `may_count`, with their names below the holder's."""
    return [(f"{path}.{key}", item) for key, item in items_of(holder) if may_count(item)]


def may_count(value: object) -> bool:
    """Return True for a metric object, and for a collection or an object of a user's class, which may keep some."""
    kind: Any = type(value)
    return kind_may_count(kind)


@cache
def kind_may_count(kind: type) -> bool:
    """Return True for the class of a value that `may_count`."""
    if issubclass(kind, (*COLLECTIONS, Metric, MetricCollection)):
        return True
    return not issubclass(kind, type | nn.Module | Tensor) and not is_of_library(kind.__module__)


def items_of(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a collection or an object keeps, with the key or the name of each item. No code of it runs."""
    if isinstance(holder, dict):
        yield from islice(dict.items(holder), MOST_HELD)
    elif isinstance(holder, ITERATED):
        yield from enumerate(islice(holder, MOST_HELD))
    yield from islice(instance_attributes(holder).items(), MOST_HELD)
    kind: Any = type(holder)
    for name, slot in slots_of(kind).items():
        # A slot may have no value yet.
        with suppress(AttributeError):
            yield name, slot.__get__(holder)


@cache
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slots of a class by name."""
    found: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        found |= {name: member for name, member in vars(base).items() if isinstance(member, MemberDescriptorType)}
    return found


@contextmanager
def fresh_metrics(parts: Sequence[Metric | MetricCollection]) -> Iterator[None]:
    """Context in which metric objects begin anew, and compute over this process alone.

    Afterwards they are as they were before. Nothing is copied, so states may have a graph of gradients.

    Args:
        parts: The metric objects and collections.
    """
    attributes_before = [dict(vars(part)) for part in parts]
    for part in parts:
        for name, value in vars(part).items():
            # A reset empties lists in place.
            vars(part)[name] = copied(value)
    for part in parts:
        part.reset()
        if isinstance(part, Metric):
            # `bool()` is False, so the metric takes the run for one without a process group.
            part.distributed_available_fn = bool
    try:
        yield
    finally:
        for part, attributes in zip(parts, attributes_before, strict=True):
            current = vars(part)
            current.clear()
            current.update(attributes)


@contextmanager
def silent_metrics(parts: Sequence[Metric | MetricCollection]) -> Iterator[None]:
    """Context in which metric objects count nothing and have the value NaN, under a transform of torch.func.

    A metric object writes into its state, which torch.func does not allow. A loss that reads such a value is NaN, too.

    Args:
        parts: The metric objects and collections.
    """
    if not parts:
        yield
        return
    with fresh_metrics(parts):
        for part in parts:
            if isinstance(part, Metric):
                vars(part).update(update=count_nothing, compute=not_a_number, forward=not_a_number)
        yield


def count_nothing(*_: Any, **__: Any) -> None:
    """Stand in for the `update` of a metric object."""


def not_a_number(*_: Any, **__: Any) -> Tensor:
    """Stand in for the value of a metric object."""
    return torch.tensor(torch.nan)


def copied(value: Any) -> Any:
    """Return a copy of a list, or of a dict of lists such as the groups of a collection. Other values are returned."""
    if isinstance(value, list):
        return list(value)
    if type(value) is dict and value and all(isinstance(part, list) for part in value.values()):
        return {name: list(part) for name, part in value.items()}
    return value


def states_of(metric: Metric) -> list[MetricState]:
    """Return the state of a metric object and of each metric object within it, without gradients."""
    states: list[MetricState] = []
    for part in metrics_in(metric):
        states.append({name: detached(value) for name, value in part.metric_state.items()})
    return states


def metrics_in(metric: Metric) -> list[Metric]:
    """List a metric object and the metric objects within it, in a fixed order."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def detached(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Return a copy of a state without gradients. The items of a list are not copied: nobody writes into them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [item.detach() for item in value]


def on_host(metric: ClientMetric) -> ClientMetric:
    """Return the same states on the CPU, to be sent to other processes."""
    states = [{name: placed(value, torch.device("cpu")) for name, value in state.items()} for state in metric.states]
    return metric._replace(states=states)


def placed(value: Tensor | list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """Return a state on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return [item.to(device) for item in value]


def joined_value(metric: Metric, counted: Iterable[ClientMetric]) -> float:
    """Return the value of a metric object over all clients. The object is as before afterwards.

    The states are joined in the order of client ids by the metric's own reductions, as DDP joins those of its
    processes. The value therefore does not depend on the processes of the clients.

    Args:
        metric: The metric object.
        counted: What the clients have counted in it, at least one.
    """
    in_order = sorted(counted, key=lambda of_client: of_client.client_id)
    with fresh_metrics(parts_that_count(metric)):
        states = []
        for place, part in enumerate(metrics_in(metric)):
            states.append(joined(part, [of_client.states[place] for of_client in in_order]))
        load_states(metric, states)
        return float(computed(metric))


def load_states(metric: Metric, states: Sequence[MetricState]) -> None:
    """Put states, as `states_of` gives them, into a metric object and the metric objects within it."""
    for part, state in zip(metrics_in(metric), states, strict=True):
        for name, value in state.items():
            setattr(part, name, value)


def joined(part: Metric, states: Sequence[MetricState]) -> MetricState:
    """Join the states of several clients by the reductions of a metric object, which must be fresh.

    Args:
        part: The metric object.
        states: The state of each client, in order. The state of a single client is returned.
    """
    names = list(part.metric_state)
    placed_states = [{name: placed(state[name], part.device) for name in names} for state in states]
    if len(placed_states) == 1:
        return placed_states[0]
    by_client: dict[int, list[Tensor]] = {}
    for name in names:
        tensors: list[Tensor] = []
        items: list[Tensor] = []
        for state in placed_states:
            value = state[name]
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                items += value
        if not tensors:
            setattr(part, name, items)
            continue
        # `gathered` finds the states of all clients by the identity of this tensor.
        mark = tensors[0].clone()
        setattr(part, name, mark)
        by_client[id(mark)] = tensors

    def gathered(state: Tensor, **_: Any) -> list[Tensor]:
        return by_client.get(id(state), [state])

    part.sync(dist_sync_fn=gathered, distributed_available=always)
    merged = part.metric_state
    part.unsync()
    return merged


def always() -> bool:
    """Return True, for a metric object that is told that there is something to join."""
    return True


Find = Callable[[str, str], Metric | None]
"""Finds the metric object of a key and a path."""


def joined_values(counted: Iterable[ClientMetric], find: Find) -> dict[str, float]:
    """Return the value of each logged metric object over all clients, by key.

    Args:
        counted: What the clients have counted.
        find: Finds a metric object. An object that this process does not know has no value.
    """
    by_name: dict[str, list[ClientMetric]] = {}
    for of_client in counted:
        by_name.setdefault(of_client.name, []).append(of_client)
    values: dict[str, float] = {}
    for name in sorted(by_name):
        metric = find(name, by_name[name][0].path)
        if metric is not None:
            values[name] = joined_value(metric, by_name[name])
    return values
