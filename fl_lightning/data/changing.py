"""The clients' training samples where a scenario says which of them a client has in a round."""

from collections.abc import Mapping, Sequence
from copy import copy
from hashlib import blake2b
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.clients import ClientIndices, ClientSamples, ClientView, FederatedData
from fl_lightning.data.scenario import Scenario, ScenarioInput, Task
from fl_lightning.data.splits import Split, TensorSplit, Transform
from fl_lightning.utils.settings import check_kind, described

DIGESTED_ROUNDS = 100
DIGESTED_CLIENTS = 50
"""Rounds and clients whose samples tell one scenario from another: the first ones."""

KEPT_STAGES = 4
"""Number of stages of a client whose samples are kept. Those of other stages are chosen again."""


class SeenSplit(NamedTuple):
    """Holds a split that is seen through a transform.

    Args:
        split: The split. It is kept, so that no other split gets its identity.
        transform: The transform, which is kept for the same reason.
        seen: The split through the transform.
    """

    split: Split
    transform: Transform
    seen: Split


class ChangingSamples(ClientSamples):
    """Holds the training samples of every client, of which a scenario chooses those of a round.

    Args:
        train: The training split.
        dealt: Indices of each client's samples in the split, int64.
        data: The data module.
        seed: Seed of the data.
        scenario: The scenario, which begins with these samples.
    """

    def __init__(
        self, train: Split, dealt: ClientIndices, data: FederatedData, seed: int, *, scenario: Scenario
    ) -> None:
        super().__init__(train, dealt=dealt, data=data, seed=seed)
        self.scenario = scenario
        self._masks: dict[int, dict[int, Tensor]] = {}
        """Which of the samples that it was dealt a client has, (n,) bool, by client and stage."""
        self._seen: dict[tuple[int, int], SeenSplit] = {}
        """The splits that are seen through a transform, by the identities of the split and the transform."""
        scenario.has_begun = True
        given = ScenarioInput(parts=dealt, train=train, num_classes=lambda: data.num_classes, seed=seed)
        scenario.begin(given)
        check_tasks(scenario.tasks, given)
        check_answers(scenario, train, num_clients=len(dealt))

    def view(self, client_id: int, round_idx: int) -> ClientView:
        """Make the view of one client's data in one round."""
        stage = self.scenario.stage(client_id, round_idx)
        view = ClientView(
            data=self._data,
            train=self.seen(self._train, self.scenario.seen(client_id, stage)),
            indices={"train": self._indices_in(client_id, stage)},
            client_id=client_id,
            round_idx=round_idx,
        )
        view.given = self.dealt[client_id]
        view.changes = ClientChanges(self, client_id=client_id, stage=stage)
        return view

    def indices(self, client_id: int, round_idx: int) -> Tensor:
        return self._indices_in(client_id, self.scenario.stage(client_id, round_idx))

    def all_indices(self, client_id: int) -> Tensor:
        return self.dealt[client_id]

    def _indices_in(self, client_id: int, stage: int) -> Tensor:
        """Get the samples that a client has in a stage, (n,) int64, in the order in which they were dealt."""
        return self.dealt[client_id][self.mask(client_id, stage)]

    def mask(self, client_id: int, stage: int) -> Tensor:
        """Return which of the samples that it was dealt a client has in a stage, (n,) bool.

        Args:
            client_id: Id of the client, from 0.
            stage: Stage of the client, from 0.

        Raises:
            ValueError: The scenario does not say this of every sample.
        """
        masks = self._masks.setdefault(client_id, {})
        if stage not in masks:
            if len(masks) >= KEPT_STAGES:
                masks.pop(min(masks))
            masks[stage] = self._chosen(client_id, stage)
        return masks[stage]

    def _chosen(self, client_id: int, stage: int) -> Tensor:
        """Ask the scenario which samples a client has in a stage."""
        num_dealt = len(self.dealt[client_id])
        keeps = self.scenario.keeps(client_id, stage)
        if keeps is None or not num_dealt:
            return torch.ones(num_dealt, dtype=torch.bool)
        mask = torch.as_tensor(keeps)
        if mask.dtype != torch.bool or mask.shape != (num_dealt,):
            raise ValueError(
                f"{type(self.scenario).__name__}.keeps must return ({num_dealt},) truth values, one for each sample "
                f"that client {client_id} was dealt, got {tuple(mask.shape)} of {mask.dtype}; mend it"
            )
        return mask

    def digest(self) -> str:
        """Return a digest of the tasks, and of which the first clients have in the first rounds, with which samples.

        It tells a changed scenario of the user's own, whose arguments may not tell all.
        """
        found = blake2b(digest_size=6)
        tasks = [(task.name, task.classes, task.column, task.value) for task in self.scenario.tasks]
        found.update(repr(tasks).encode())
        for client_id in range(min(DIGESTED_CLIENTS, len(self.dealt))):
            stages = [self.scenario.stage(client_id, round_idx) for round_idx in range(DIGESTED_ROUNDS)]
            found.update(repr(stages).encode())
            for stage in sorted(set(stages)):
                found.update(self._chosen(client_id, stage).numpy().tobytes())
                found.update(repr(self.scenario.task(client_id, stage)).encode())
        return found.hexdigest()

    def seen(self, split: Split, transform: Transform | None) -> Split:
        """See the samples of a split through a transform: one split for each transform, which stacks rely on.

        Args:
            split: The split.
            transform: The transform. None: the samples are seen as they are.
        """
        if transform is None:
            return split
        key = (id(split), id(transform))
        if key not in self._seen or not self._seen[key].seen.has_samples_of(split):
            self._seen[key] = SeenSplit(split=split, transform=transform, seen=split.through(transform))
        return self._seen[key].seen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing, because a scenario keeps nothing. An earlier version saved what SampleReduction had taken."""

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        raise ValueError(
            "set_class_count takes samples from a client, and data.scenario says which samples a client has; take "
            "the scenario RemoveSamples, or leave data.scenario out"
        )


def check_tasks(tasks: Sequence[Task], data: ScenarioInput) -> None:
    """Refuse what is no task, and tasks of classes that there are not.

    Args:
        tasks: The tasks of a scenario that has begun.
        data: The samples.

    Raises:
        TypeError: Something is no task.
        ValueError: A task has such a class.
    """
    for task in tasks:
        check_kind(Task, "a list of Task", "give such as [Task('first')]", **{"data.scenario.tasks": task})
        num_classes = None if task.classes is None else data.num_classes
        for class_idx in task.classes or ():
            if num_classes is not None and not 0 <= class_idx < num_classes:
                raise ValueError(
                    f"data.scenario.tasks must name classes in [0, {num_classes}), got {class_idx}; leave it out"
                )


def check_answers(scenario: Scenario, train: Split, num_clients: int) -> None:
    """Refuse a scenario whose stages fall, that names a task which it does not have, or that makes transforms anew.

    Args:
        scenario: The scenario, which has begun.
        train: The training split.
        num_clients: Number of clients.

    Raises:
        ValueError: It does so for one of the first clients in one of the first rounds, or the samples cannot be seen in
            another way.
    """
    name = type(scenario).__name__
    num_tasks = len(scenario.tasks)
    for client_id in range(min(DIGESTED_CLIENTS, num_clients)):
        stages = [scenario.stage(client_id, round_idx) for round_idx in range(DIGESTED_ROUNDS)]
        for round_idx, (before, after) in enumerate(pairwise([0, *stages])):
            if not isinstance(after, Integral):
                raise ValueError(
                    f"{name}.stage must return a whole number, got {described(after)} for client {client_id} in round "
                    f"{round_idx}; number the stages from 0"
                )
            if after < before:
                raise ValueError(
                    f"{name}.stage must begin at 0 or above and never fall, got {after} after {before} for client "
                    f"{client_id} in round {round_idx}; number the stages in their order"
                )
        for stage in sorted(set(stages)):
            task = scenario.task(client_id, stage)
            is_known = isinstance(task, Integral) and 0 <= task < num_tasks
            if num_tasks and task is not None and not is_known:
                raise ValueError(
                    f"{name}.task must return a number in [0, {num_tasks}), the tasks, got {described(task)} for "
                    f"client {client_id} in stage {stage}; return None for a stage of no task"
                )
            seen = scenario.seen(client_id, stage)
            if seen is not scenario.seen(client_id, stage):
                raise ValueError(
                    f"{name}.seen must return the same object for equal ways of seeing, got another one when it was "
                    f"asked again for client {client_id} in stage {stage}; make the transform once, in __init__"
                )
            if seen is not None:
                train.through(seen)


class ClientChanges:
    """Tells how a client's data in one round differ from those of its other rounds.

    Args:
        samples: The samples of all clients.
        client_id: Id of the client, from 0.
        stage: Stage of the client in the round, from 0.
    """

    def __init__(self, samples: ChangingSamples, *, client_id: int, stage: int) -> None:
        self.stage = stage
        self._samples = samples
        self._client_id = client_id

    def arrived(self, since: int) -> Tensor:
        """Return which of the samples that it was dealt a client has now, and did not have in this way in a round.

        Args:
            since: The round, from 0.

        Returns:
            (n,) bool.
        """
        scenario = self._samples.scenario
        before = scenario.stage(self._client_id, since)
        present = self._samples.mask(self._client_id, self.stage)
        if before == self.stage:
            return torch.zeros_like(present)
        if scenario.seen(self._client_id, before) is not scenario.seen(self._client_id, self.stage):
            return present
        return present & ~self._samples.mask(self._client_id, before)

    def met(self) -> list[int]:
        """Return the numbers of the tasks that the client has met up to now, ascending."""
        scenario = self._samples.scenario
        found = {scenario.task(self._client_id, stage) for stage in range(self.stage + 1)}
        return sorted(task for task in found if task is not None)

    def tested(self, test: Split, own: Tensor, task: int | None = None) -> tuple[Split, Tensor]:
        """Return the client's own test samples: those of the tasks that it has met, seen as each task says.

        Args:
            test: The test split.
            own: All test samples of the client, int64 (n,).
            task: A task, all of whose samples among `own` are returned, met or not. None: the tasks that it has met.

        Returns:
            A split, and the indices of the samples in it, int64.
        """
        scenario = self._samples.scenario
        if not scenario.tasks:
            seen = scenario.seen(self._client_id, self.stage)
            return self._samples.seen(test, seen), own
        numbers = self.met() if task is None else [task]
        tasks = [scenario.tasks[number] for number in numbers]
        return samples_of_tasks(self._samples, test, among=own, tasks=tasks)


def samples_of_tasks(
    samples: ChangingSamples, test: Split, *, among: Tensor, tasks: Sequence[Task]
) -> tuple[Split, Tensor]:
    """Return the samples of some tasks, seen as each task says.

    Args:
        samples: The samples of all clients, which keep a split for each way of seeing.
        test: The split of the samples.
        among: The samples to choose from, int64 (n,).
        tasks: The tasks.

    Returns:
        A split, and the indices of the samples in it, int64. A sample of several tasks that are seen in different ways
        is there once for each.
    """
    parts = [among[belongs(test, among, task)] for task in tasks]
    ways = {id(task.seen): task.seen for task in tasks}
    if len(ways) <= 1:
        seen = next(iter(ways.values()), None)
        chosen = torch.cat(parts) if parts else among[:0]
        return samples.seen(test, seen), among[torch.isin(among, chosen)]
    several = SeveralWays(test, list(ways.values()))
    number_of_way = {way: number for number, way in enumerate(ways)}
    indices: list[Tensor] = []
    for task, part in zip(tasks, parts, strict=True):
        indices.append(number_of_way[id(task.seen)] * len(test) + part)
    return several, torch.cat(indices)


def belongs(split: Split, among: Tensor, task: Task) -> Tensor:
    """Return which samples belong to a task, (n,) bool.

    Args:
        split: The split of the samples.
        among: The samples, int64 (n,).
        task: The task.

    Raises:
        ValueError: The samples lack the column of the task, or classes.
    """
    chosen = torch.ones(len(among), dtype=torch.bool)
    if task.classes is not None:
        if split.labels is None:
            raise ValueError(
                "data.scenario.tasks are tested by the classes of test samples, and these have none; give test samples "
                "with integer labels"
            )
        chosen &= torch.isin(split.labels[among], torch.tensor(task.classes))
    if task.column is not None:
        try:
            values = split.column(task.column)
        except ValueError as error:
            raise ValueError(
                f"data.scenario.column must be a column of the test samples as well, and {error}"
            ) from None
        chosen &= torch.tensor([values[index] == task.value for index in among.tolist()], dtype=torch.bool)
    return chosen


class SeveralWays(TensorSplit):
    """Holds the samples of a split once for each of several ways of seeing them, without copies.

    Sample i of n seen in way k has the index k · n + i.

    Args:
        split: The samples.
        ways: The transforms. None: the samples are seen as they are.
    """

    def __init__(self, split: Split, ways: Sequence[Transform | None]) -> None:
        # It keeps what the split has, such as the loaders that give its samples.
        self.__dict__.update(vars(copy(split)))
        self._splits = [split if way is None else split.through(way) for way in ways]
        self._num_samples = len(split)
        if split.labels is not None:
            self.labels = split.labels.repeat(len(ways))

    def __len__(self) -> int:
        return self._num_samples * len(self._splits)

    def by_loader(self, positions: Tensor) -> list[Tensor]:
        if not self.loader_sizes:
            return [positions]
        # A sample has the loader that gives it, in whatever way it is seen.
        of_split = positions % self._num_samples
        parts = super().by_loader(torch.arange(self._num_samples))
        return [positions[torch.isin(of_split, part)] for part in parts]

    def batches(self, indices: Any, generator: torch.Generator | None) -> Any:
        for index in indices:
            yield self._batch(index.cpu(), generator)

    def _batch(self, index: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """Make one batch, whose samples may be seen in different ways.

        Args:
            index: Indices of the samples, int64 (B,).
            generator: The generator of random draws. None draws nothing.
        """
        ways = index // self._num_samples
        of_split = index % self._num_samples
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        places: list[Tensor] = []
        for way in sorted(set(ways.tolist())):
            places_of_way = (ways == way).nonzero().flatten()
            x, y = next(iter(self._splits[way].batches([of_split[places_of_way]], generator)))
            inputs.append(x)
            targets.append(y)
            places.append(places_of_way)
        order = torch.cat(places).argsort().to(inputs[0].device)
        return [torch.cat(inputs)[order], torch.cat(targets)[order]]
