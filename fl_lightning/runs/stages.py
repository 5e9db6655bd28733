"""Counts which samples the clients have in the rounds of a run whose data change, or whose clients come and go."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.scenario import Scenario

MOST_CLIENTS = 50
"""Largest number of clients that are counted, the first ones."""

MOST_ROUNDS = 200
"""Largest number of rounds that are counted, at equal distances."""

MOST_STAGES = 2000
"""Largest number of stages of all clients that are counted. Of more stages fewer rounds are counted."""

Kind = Literal["class", "task", "samples"]
"""What samples are counted by: their class, the task that the client trains on, or nothing."""


class Presence(NamedTuple):
    """Has the numbers of samples of clients in rounds.

    Args:
        counts: Number of samples of each client, round and class, or task, (N, T, C).
        rounds: The rounds, ascending, (T,).
        clients: Ids of the clients, (N,).
        names: Names of the classes, or of the tasks, (C,).
        kind: What the samples are counted by.
        there: Whether each client is there in each round, (N, T). A client that is away has no samples.
    """

    counts: NDArray[np.int64]
    rounds: list[int]
    clients: list[int]
    names: list[str]
    kind: Kind
    there: NDArray[np.bool_]


def presence_of(data: FederatedDataModule, num_rounds: int, class_names: Sequence[str] | None) -> Presence | None:
    """Count the samples of each client in each round: by class, or by task where a task has samples of all classes.

    Args:
        data: The data, whose samples are dealt.
        num_rounds: Number of rounds, at least 1.
        class_names: Names of the C classes. None: the samples have no classes.

    Returns:
        The counts. None if the data do not change and no client joins or leaves, or if the samples come in streams.
    """
    if data.has_streams or (data.scenario is None and data.stays is None):
        return None
    samples = data.client_samples()
    labels = None
    if class_names is not None:
        labels = data.split("train").labels
    kind, names = kind_of(data.scenario, class_names if labels is not None else None)
    clients = list(range(min(MOST_CLIENTS, data.num_clients)))
    rounds = counted_rounds(data.scenario, num_rounds, num_clients=len(clients))
    counts = np.zeros((len(clients), len(rounds), len(names)), dtype=np.int64)
    for client_id in clients:
        of_stages: dict[int, NDArray[np.int64]] = {}
        for place, round_idx in enumerate(rounds):
            stage = stage_of(data.scenario, client_id, round_idx)
            if stage not in of_stages:
                indices = samples.indices(client_id, round_idx)
                if kind == "class" and labels is not None:
                    of_stages[stage] = counted(labels[indices], len(names))
                elif kind == "task" and data.scenario is not None:
                    task = data.scenario.task(client_id, stage)
                    of_stages[stage] = all_of(task, num_samples=len(indices), num_tasks=len(names))
                else:
                    of_stages[stage] = all_of(0, num_samples=len(indices), num_tasks=1)
            counts[client_id, place] = of_stages[stage]
    there = there_in(data, rounds, num_clients=len(clients))
    counts[~there] = 0
    return Presence(counts, rounds=rounds, clients=clients, names=names, kind=kind, there=there)


def stage_of(scenario: Scenario | None, client_id: int, round_idx: int) -> int:
    """Return the stage that a client is in, 0 if the data do not change.

    Args:
        scenario: How the data change. None: they do not.
        client_id: Id of the client.
        round_idx: Communication round, from 0.
    """
    return 0 if scenario is None else scenario.stage(client_id, round_idx)


def there_in(data: FederatedDataModule, rounds: Sequence[int], *, num_clients: int) -> NDArray[np.bool_]:
    """Return whether each of the first clients is there in each round, (N, T).

    Args:
        data: The data.
        rounds: The rounds, (T,).
        num_clients: Number N of clients.
    """
    if data.stays is None:
        return np.ones((num_clients, len(rounds)), dtype=np.bool_)
    there = np.zeros((num_clients, len(rounds)), dtype=np.bool_)
    for place, round_idx in enumerate(rounds):
        present = [client_id for client_id in data.present_clients(round_idx) if client_id < num_clients]
        there[present, place] = True
    return there


def counted_rounds(scenario: Scenario | None, num_rounds: int, *, num_clients: int) -> list[int]:
    """Return the rounds that are counted: all, or some at equal distances so that there are few enough stages.

    Args:
        scenario: How the data change. None: they do not.
        num_rounds: Number of rounds, at least 1.
        num_clients: Number of clients that are counted.
    """
    number = min(num_rounds, MOST_ROUNDS)
    while True:
        rounds = sorted({int(place) for place in np.linspace(0, num_rounds - 1, number)})
        if scenario is None:
            return rounds
        num_stages = 0
        for client_id in range(num_clients):
            num_stages += len({scenario.stage(client_id, round_idx) for round_idx in rounds})
        if num_stages <= MOST_STAGES or number <= 2:
            return rounds
        number //= 2


def kind_of(scenario: Scenario | None, class_names: Sequence[str] | None) -> tuple[Kind, list[str]]:
    """Return what samples are counted by, and the names of the counts.

    Args:
        scenario: How the data change. None: they do not.
        class_names: Names of the C classes. None: the samples have no classes.
    """
    if scenario is not None and any(task.classes is None for task in scenario.tasks):
        return "task", [task.name for task in scenario.tasks]
    if class_names is None:
        return "samples", ["samples"]
    return "class", list(class_names)


def counted(labels: Tensor, num_classes: int) -> NDArray[np.int64]:
    """Count the samples of each class, (C,)."""
    return np.bincount(labels.numpy(), minlength=num_classes).astype(np.int64)


def all_of(task: int | None, *, num_samples: int, num_tasks: int) -> NDArray[np.int64]:
    """Count all samples for one task, (K,).

    Args:
        task: Number of the task. None: the samples are of no task, and none is counted.
        num_samples: Number of samples.
        num_tasks: Number K of tasks.
    """
    counts = np.zeros(num_tasks, dtype=np.int64)
    if task is not None:
        counts[task] = num_samples
    return counts
