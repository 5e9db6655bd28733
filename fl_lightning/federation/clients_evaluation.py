"""Evaluation of what each client would deploy, on the client's own test samples."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation import ServerModule
from fl_lightning.client.hooks import overridden
from fl_lightning.engines.deployed import Kind
from fl_lightning.federation.final import summary_key
from fl_lightning.federation.run import FederatedRun
from fl_lightning.functional.accuracy import class_accuracy
from fl_lightning.functional.state import to_host
from fl_lightning.members.tasks import MEANS, TaskValue
from fl_lightning.metrics.keys import Directions, direction_of, metric_directions, unknown_direction
from fl_lightning.metrics.user_metrics import alone, values_of
from fl_lightning.types import Broadcast, ClientData, ClientJob, ClientScore, Scoring, State

ALMA = "alma"
"""Name of the accuracy of a client's own model."""

AS_DEPLOYED = "local"
TUNED = "local/tuned"
"""Beginnings of the log keys of what a client would deploy, and of the same after fine-tuning."""

UNSEEN = "unseen"
"""Beginning of the log keys of clients that never train, in place of `local`."""

Record = tuple[dict[str, Any], State | None]
"""A client's memory and its personal entries."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""What most servers give a client that deploys its model."""

Values = dict[str, float | None]
"""A client's values by log key. None is a value that is not defined, such as the recall of a class that it lacks."""


class TestedModel(NamedTuple):
    """Holds what one model of a client has in a round's evaluation of the clients.

    Args:
        correct: Number of right answers. NaN if they are not counted.
        num_samples: Number of samples tested.
        values: The other values.
        directions: Whether values are better when lower or higher, as metric objects tell, by log key.
    """

    correct: float
    num_samples: float
    values: Values
    directions: Directions


class TestedClient(NamedTuple):
    """Holds what one client has in a round's evaluation of the clients.

    Args:
        client_id: Id of the client, from 0.
        models: What the client would deploy, and the same after fine-tuning, by the beginning of their log keys.
    """

    client_id: int
    models: Mapping[str, TestedModel]


class ClientsEvaluation:
    """Evaluates all clients: a net by its accuracy, a user's module by its own step, both by `model.metrics`.

    Args:
        run: The objects of the Trainer's run.
        evaluated: Context in which the client module has the shared entries that are evaluated.
        kept_generators: Context that puts the global random generators back.
        class_names: Gives the names of the C classes, for log keys.
        classifies: Whether the accuracy of a net is measured.
        channels_last: Whether batches of images are laid out channels last.
    """

    def __init__(
        self,
        run: FederatedRun,
        *,
        evaluated: Callable[[], AbstractContextManager[None]],
        kept_generators: Callable[[], AbstractContextManager[None]],
        class_names: Callable[[], Sequence[str]],
        classifies: bool,
        channels_last: bool,
    ) -> None:
        self._run = run
        self._data = run.data
        self._parts = run.parts
        self._communicator = run.communicator
        self._evaluated = evaluated
        self._kept_generators = kept_generators
        self._class_names = class_names
        self._classifies = classifies
        self._channels_last = channels_last
        self._gives = overridden(run.parts.server_module, "deployment", ServerModule)

    @torch.no_grad()
    def evaluate(self, round_idx: int, kind: Kind) -> tuple[dict[str, float], dict[int, Values]]:
        """Evaluate all clients. Every process must call it, and has all values.

        The log keys are `local/alma` of a net's accuracy, `local/NAME` of `model.metrics`, and `local/KEY` of what a
        module logs in its own steps. After fine-tuning they begin with `local/tuned/`. The means over clients that
        never train begin with `unseen/` in place of `local/`.

        Args:
            round_idx: Index of the round.
            kind: The step that evaluates a user's module.

        Returns:
            The means over the clients with samples by log key, and the values of each such client by its id.
        """
        tested = self._tested_everywhere(round_idx, kind)
        unseen = self._data.unseen_clients
        means = self._means([client for client in tested if client.client_id not in unseen], AS_DEPLOYED)
        if unseen:
            means |= self._means([client for client in tested if client.client_id in unseen], UNSEEN)
        return means, {client.client_id: self._values(client) for client in tested}

    def task_values(self, round_idx: int, kind: Kind) -> dict[str, float]:
        """Return the means over the clients that train of the values of the tasks, by log key.

        Every process must call it.

        Args:
            round_idx: Index of the round.
            kind: The step that evaluates a user's module.
        """
        tasks = self._run.tasks
        if tasks is None:
            return {}
        names = tasks.names
        found, value = self.evaluate_tasks(round_idx, kind, len(names))
        self.take_task_value(value, AS_DEPLOYED)
        unseen = self._data.unseen_clients
        found = {client_id: of_client for client_id, of_client in found.items() if client_id not in unseen}
        values: dict[str, float] = {}
        for index, name in enumerate(names):
            column = [of_client[index] for of_client in found.values() if not math.isnan(of_client[index])]
            if column:
                values[f"{AS_DEPLOYED}/{tasks.key('acc_task')}/{name}"] = mean_of_column(column)
        measures = tasks.take_clients(found, round_idx)
        return values | {f"{AS_DEPLOYED}/{name}": value for name, value in measures.items()}

    @torch.no_grad()
    def evaluate_tasks(
        self, round_idx: int, kind: Kind, num_tasks: int
    ) -> tuple[dict[int, list[float]], TaskValue | None]:
        """Evaluate all clients on all of their own test samples of each task. Every process must call it.

        Args:
            round_idx: Index of the round.
            kind: The step that evaluates a user's module.
            num_tasks: The number K of tasks.

        Returns:
            The values, K, by client id, NaN for a task of which a client has no samples, and how a module is tested.
        """
        mine: dict[int, list[float]] = {}
        value: TaskValue | None = None
        error: Exception | None = None
        try:
            for task in range(num_tasks):
                for score in self._of_task(round_idx, kind, task):
                    value = value or self.task_value(score)
                    mine.setdefault(score.client_id, [math.nan] * num_tasks)[task] = value_on_task(score, value)
        except Exception as raised:
            # The other processes wait for this one.
            error = raised
        found: dict[int, list[float]] = {}
        for of_process, value_there in self._communicator.all_gather_or_raise((mine, value), error):
            found |= of_process
            value = value or value_there
        return dict(sorted(found.items())), value

    def _of_task(self, round_idx: int, kind: Kind, task: int) -> list[ClientScore]:
        """Return the scores of the clients of this process on one task."""
        how = self.how(kind)._replace(tuning=None, classes=self._answers(task))
        if self._classifies:
            how = how._replace(metrics=None)
        with self._kept_generators():
            with closing(self._run.clients_engine.evaluate(self._jobs(round_idx, task), how)) as scores:
                return list(scores)

    def task_value(self, score: ClientScore) -> TaskValue | None:
        """Return by which value a module is tested on tasks: the one that sums up an evaluation, always the same.

        Args:
            score: A score of the module.

        Returns:
            The value. None for a net, which is tested by its accuracy, and for a module without values.
        """
        tasks = self._run.tasks
        if tasks is not None and tasks.value is not None:
            return tasks.value
        others = [key.removeprefix(f"{AS_DEPLOYED}/") for key in values_of_score(score, names=())]
        key = summary_key([*score.logged, *others])
        if score.correct is not None or key is None:
            return None
        metrics = self._parts.metrics
        told = {} if metrics is None else metric_directions(metrics)
        given = {**told, **score.directions, **self._parts.recorder.directions}
        return TaskValue(key=key, direction=direction_of(key, given))

    def take_task_value(self, value: TaskValue | None, prefix: str) -> None:
        """Keep the value by which a module is tested on tasks. Every process must call it.

        Args:
            value: The value. None changes nothing.
            prefix: Beginning of the log keys.
        """
        tasks = self._run.tasks
        if tasks is None or value is None:
            return
        if tasks.value is None:
            tasks.value = value
            if value.direction is None:
                rank_zero_warn(
                    f"tasks are compared by {value.key} without forgetting and transfer: {unknown_direction(value.key)}"
                )
        if value.direction is not None:
            names = [tasks.key(name) for name in ("acc_task", *MEANS)]
            self._parts.recorder.take_directions({f"{prefix}/{name}": value.direction for name in names})

    def _answers(self, task: int) -> tuple[int, ...] | None:
        """Return the classes that may be answered in the test of a task. None: all."""
        scenario = self._data.scenario
        return scenario.tasks[task].classes if scenario is not None and scenario.knows_task else None

    def _means(self, tested: Sequence[TestedClient], beginning: str) -> dict[str, float]:
        """Return the means over some clients by log key, and let the recorder know the directions of these keys.

        Args:
            tested: The clients.
            beginning: Beginning of the log keys, in place of `local`.
        """
        means: dict[str, float] = {}
        for name in self._beginnings():
            key = renamed(name, beginning)
            models = [client.models[name] for client in tested]
            for model in models:
                directions = {renamed(of_value, beginning): told for of_value, told in model.directions.items()}
                self._parts.recorder.take_directions(directions)
            if self._parts.metrics is not None:
                self._parts.recorder.take_directions(metric_directions(self._parts.metrics, key))
            if self._classifies:
                means[f"{key}/{ALMA}"] = self._alma(name, tested)
            for of_value, mean in mean_values(model.values for model in models).items():
                means[renamed(of_value, beginning)] = mean
        return means

    def _beginnings(self) -> list[str]:
        """List the beginnings of the log keys of a client's models."""
        return [AS_DEPLOYED] if self._parts.fine_tuning is None else [AS_DEPLOYED, TUNED]

    def _alma(self, name: str, tested: Iterable[TestedClient]) -> float:
        """Return the mean accuracy of models of clients. It is NaN without a client that has samples."""
        hits = torch.zeros(2, self._data.num_clients, dtype=torch.float64)
        for client in tested:
            model = client.models[name]
            hits[:, client.client_id] = torch.tensor([model.correct, model.num_samples], dtype=torch.float64)
        return float(class_accuracy(hits).nanmean())

    def _values(self, client: TestedClient) -> Values:
        """Return all values of a client by log key."""
        values: Values = {}
        for name, model in client.models.items():
            if self._classifies:
                values[f"{name}/{ALMA}"] = model.correct / model.num_samples if model.num_samples else None
            for key, value in model.values.items():
                if key in values:
                    raise ValueError(
                        f"a module must not log a value whose name begins with 'tuned/' if model.fine_tuning is set, "
                        f"got {key!r} for two values; rename it"
                    )
                values[key] = value
        return values

    def how(self, kind: Kind) -> Scoring:
        """Return how the clients are tested.

        Args:
            kind: The step that evaluates a user's module.
        """
        return Scoring(
            kind=kind,
            batch_size=self._data.eval_batch_size,
            classifies=self._classifies,
            metrics=None if self._parts.metrics is None else alone(self._parts.metrics),
            channels_last=self._channels_last,
            tuning=self._parts.fine_tuning,
        )

    def _tested_everywhere(self, round_idx: int, kind: Kind) -> list[TestedClient]:
        """Return the clients of all processes, by id. A failure of one process is an error of all."""
        mine: list[TestedClient] = []
        error: Exception | None = None
        try:
            mine = self._tested(round_idx, kind)
        except Exception as raised:
            # The other processes wait for this one.
            error = raised
        tested: list[TestedClient] = []
        for of_process in self._communicator.all_gather_or_raise(mine, error):
            tested += of_process
        return sorted(tested, key=lambda client: client.client_id)

    def _tested(self, round_idx: int, kind: Kind) -> list[TestedClient]:
        """Evaluate the clients of this process."""
        with self._kept_generators():
            evaluations = self._run.clients_engine.evaluate(self._jobs(round_idx), self.how(kind))
            with closing(evaluations) as scores_of_clients:
                scores = list(scores_of_clients)
        models_by_name = {AS_DEPLOYED: self._models(scores, AS_DEPLOYED)}
        if self._parts.fine_tuning is not None:
            tuned = [score.tuned for score in scores if score.tuned is not None]
            models_by_name[TUNED] = self._models(tuned, TUNED)
        tested: list[TestedClient] = []
        for place, score in enumerate(scores):
            models = {name: models[place] for name, models in models_by_name.items()}
            tested.append(TestedClient(client_id=score.client_id, models=models))
        return tested

    def _models(self, scores: Sequence[ClientScore], beginning: str) -> list[TestedModel]:
        """Return what models have, given their scores.

        Args:
            scores: The scores.
            beginning: Beginning of the log keys.
        """
        names = self._class_names()
        models: list[TestedModel] = []
        for score, (correct, num_samples) in zip(scores, answer_numbers(scores), strict=True):
            model = TestedModel(
                correct=correct,
                num_samples=num_samples,
                values=values_of_score(score, names, prefix=beginning),
                directions={f"{beginning}/{name}": direction for name, direction in score.directions.items()},
            )
            models.append(model)
        return models

    def _jobs(self, round_idx: int, task: int | None = None) -> Iterator[ClientJob]:
        """Make the job of every client of this process that is there in the round and has test samples.

        Args:
            round_idx: Index of the round.
            task: A task, of whose samples the clients are tested. None: they are tested as they are.
        """
        global_weights = self._run.engine.global_weights
        with self._evaluated():
            start = global_weights.snapshot(global_weights.shared)
        clients = self._data.present_clients(round_idx)
        ranks = self._communicator.assign_clients(clients, cost=self._run.client_cost, owners=self._parts.store.owners)
        for client_id in clients:
            if ranks[client_id] != self._communicator.rank:
                continue
            data = self._data.view(client_id, round_idx)
            if task is not None:
                data = data.of_task(task)
            if data.size("test"):
                record = self._run.records.of(client_id)
                yield deployed_job(data, start, record=record, given=self._given(client_id))

    def job_of(self, client_id: int, round_idx: int) -> ClientJob:
        """Return the job that makes the module what a client would deploy. Every process must call it.

        Args:
            client_id: Id of the client.
            round_idx: Index of the round.
        """
        global_weights = self._run.engine.global_weights
        with self._evaluated():
            start = global_weights.snapshot(global_weights.shared)
        data = self._data.view(client_id, round_idx)
        return deployed_job(data, start, record=self._record_of(client_id), given=self._given(client_id))

    def _given(self, client_id: int) -> Mapping[str, Any]:
        """Return what the server gives a client for the model that it deploys, which few methods do."""
        return self._parts.server_module.deployment(client_id) if self._gives else NOTHING

    def _record_of(self, client_id: int) -> Record:
        """Return a client's memory and personal entries, which another process may have. Every process must call it."""
        if self._communicator.world == 1:
            return self._run.records.of(client_id)
        owner = self._parts.store.owners.get(client_id, 0)
        record: Record | None = None
        if owner == self._communicator.rank:
            record = apply_to_collection(self._run.records.of(client_id), Tensor, Tensor.cpu)
        records: list[Record] = self._communicator.gather(record)
        return records[owner]


def renamed(key: str, beginning: str) -> str:
    """Return a log key with another first part in place of `local`.

    >>> renamed("local/tuned/alma", "unseen"), renamed("local", "unseen")
    ('unseen/tuned/alma', 'unseen')
    """
    return beginning + key.removeprefix(AS_DEPLOYED)


def deployed_job(data: ClientData, start: State, *, record: Record, given: Mapping[str, Any]) -> ClientJob:
    """Return the job of a client that deploys its model.

    Args:
        data: The client's samples in a round.
        start: The shared entries that are evaluated.
        record: The client's memory and personal entries.
        given: What the server gives the client besides these entries.
    """
    memory, personal = record
    return ClientJob(
        client_id=data.client_id,
        broadcast=Broadcast(data.round_idx, "deployed", weights=None, extras=given),
        data=data,
        memory=memory,
        personal=personal,
        start=start,
    )


def answer_numbers(scores: Sequence[ClientScore]) -> list[tuple[float, float]]:
    """Return the numbers of right answers and of samples of each score, with one transfer to the host."""
    values: list[torch.Tensor] = []
    for score in scores:
        values.append(torch.as_tensor(math.nan if score.correct is None else score.correct))
        values.append(torch.as_tensor(score.num_samples))
    numbers = to_host(values)
    return list(zip(numbers[0::2], numbers[1::2], strict=True))


def values_of_score(score: ClientScore, names: Sequence[str], prefix: str = "local") -> Values:
    """Return the values of `model.metrics` and of the module's own steps at a client, by log key.

    NaN of predictions that are finite is a value that is not defined, such as the recall of a class that the client
    lacks, and is None. NaN of other predictions stays. NaN that a module has logged is None, too.

    Args:
        score: The score of the client.
        names: The names of the classes.
        prefix: Beginning of the log keys.

    Raises:
        ValueError: `model.metrics` and the module give one name to two values.
    """
    values: Values = {}
    for key, value in values_of(score.metrics, prefix, names).items():
        is_undefined = math.isnan(value) and bool(score.is_finite)
        values[key] = None if is_undefined else value
    for name, value in score.logged.items():
        key = f"{prefix}/{name}"
        if key in values:
            raise ValueError(
                f"model.metrics must not have the name of a value that the module logs itself, got {name!r} for both; "
                f"rename one of them"
            )
        values[key] = None if math.isnan(value) else value
    return values


def mean_values(rows: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of each name's values. None in a row means that the value is not defined there.

    >>> mean_values([{"recall": 0.5, "mse": 0.1}, {"recall": None, "mse": math.nan}])
    {'recall': 0.5, 'mse': nan}
    """
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            # A name without any defined value has a column too, whose mean is NaN.
            column = columns[name]
            if value is not None:
                column.append(value)
    return {name: mean_of_column(column) for name, column in columns.items()}


def mean_of_column(column: Sequence[float]) -> float:
    """Return the mean of values, NaN of none and if one is NaN or infinite ones cancel."""
    if not column:
        return math.nan
    if all(math.isfinite(value) for value in column):
        return math.fsum(column) / len(column)
    return sum(column) / len(column)  # fsum raises where infinite values cancel.


def value_on_task(score: ClientScore, value: TaskValue | None) -> float:
    """Return the accuracy of a net, or the value by which a module is tested. NaN without samples or such a value.

    Args:
        score: The score on the samples of a task.
        value: The value by which a module is tested.
    """
    if score.correct is not None:
        num_samples = float(score.num_samples)
        return float(score.correct) / num_samples if num_samples else math.nan
    if value is None:
        return math.nan
    found = values_of_score(score, names=()).get(f"{AS_DEPLOYED}/{value.key}")
    return math.nan if found is None else found
