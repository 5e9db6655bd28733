"""Evaluation of the global model on each task of a scenario."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fl_lightning.data.changing import ChangingSamples, samples_of_tasks
from fl_lightning.data.scenario import Task
from fl_lightning.data.splits import Split
from fl_lightning.engines.deployed import PassLoader, laid_out
from fl_lightning.federation.clients_evaluation import value_on_task
from fl_lightning.federation.run import FederatedRun
from fl_lightning.functional.accuracy import answer_counts, answers_among
from fl_lightning.members.tasks import TaskValue
from fl_lightning.types import Batch, ClientScore, Scoring
from fl_lightning.utils.life import heartbeat


class TasksEvaluation:
    """Evaluates the global model on each task: a net by its answers, a user's module by the value that sums it up.

    That value is an accuracy which the module logs or `model.metrics` has, else the first value.
    The first process does all of it, so the values do not depend on the number of processes.

    Args:
        run: The objects of the Trainer's run.
        evaluated_model: Context in which the client module is the global model.
        how: Says how the model is evaluated: as clients are.
        value_in: Returns by which value a module is tested, given a score.
    """

    def __init__(
        self,
        run: FederatedRun,
        *,
        evaluated_model: Callable[[], AbstractContextManager[None]],
        how: Callable[[], Scoring],
        value_in: Callable[[ClientScore], TaskValue | None],
    ) -> None:
        self._run = run
        self._data = run.data
        self._client = run.engine.client
        self._local = run.engine.local
        self._own_steps = run.engine.own_steps
        self._evaluated_model = evaluated_model
        self._how = how
        self._value_in = value_in
        self._value: TaskValue | None = None
        """The value of the present evaluation."""

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of the scenario. Empty: there are none."""
        return () if self._data.scenario is None else self._data.scenario.tasks

    @property
    def by_classes(self) -> bool:
        """Whether the tasks are classes of samples that are seen as they are, which any pass over all samples tells."""
        scenario = self._data.scenario
        if scenario is None or scenario.knows_task:
            return False
        return all(task.classes is not None and task.seen is None and task.column is None for task in scenario.tasks)

    def of_classes(self, class_accuracy: Tensor, class_samples: Tensor) -> list[float]:
        """Return the accuracy on each task, given those of the classes.

        Args:
            class_accuracy: The accuracy of each class, (C,), NaN without samples.
            class_samples: The number of samples of each class, (C,).
        """
        hits = (class_accuracy.nan_to_num() * class_samples).round()
        accuracies: list[float] = []
        for task in self.tasks:
            classes = list(task.classes or ())
            num_samples = float(class_samples[classes].sum())
            accuracies.append(float(hits[classes].sum()) / num_samples if num_samples else math.nan)
        return accuracies

    @torch.no_grad()
    def evaluate(self, split: str, among: Tensor) -> tuple[list[float], TaskValue | None]:
        """Return the values on each task, by a pass over its samples, and which they are. Every process must call it.

        Args:
            split: Name of the split.
            among: Samples of the split that are evaluated, int64 (n,).

        Returns:
            The accuracies of a net and None, or another value on each task and its name.
        """
        accuracies: list[float] = []
        self._value = None
        error: Exception | None = None
        communicator = self._run.communicator
        if communicator.rank == 0:
            try:
                accuracies = self._accuracies(split, among)
            except Exception as raised:
                # The other processes wait for this one.
                error = raised
        everywhere: list[tuple[list[float], TaskValue | None]]
        everywhere = communicator.all_gather_or_raise((accuracies, self._value), error)
        return everywhere[0]

    def _accuracies(self, split: str, among: Tensor) -> list[float]:
        """Evaluate the model in this process."""
        how = self._how()
        modes = [(module, module.training) for module in self._client.modules()]
        with self._evaluated_model():
            self._client.eval()
            try:
                return [self._accuracy(task, self._data.split(split), among, how=how) for task in self.tasks]
            finally:
                for module, was_training in modes:
                    module.training = was_training

    def _accuracy(self, task: Task, split: Split, among: Tensor, *, how: Scoring) -> float:
        """Return the accuracy on one task, or the value of a module. NaN without samples, or without a value.

        Args:
            task: The task.
            split: The split.
            among: Samples of the split that are evaluated, int64 (n,).
            how: How the model is evaluated.
        """
        samples = self._data.client_samples()
        if not isinstance(samples, ChangingSamples):
            return math.nan
        seen, indices = samples_of_tasks(samples, split, among=among, tasks=[task])
        if not len(indices):
            return math.nan

        def read() -> Iterator[Batch]:
            chosen = torch.split(indices, how.batch_size)
            return iter(self._local.transfer.each(seen.batches(chosen, None)))

        if how.classifies:
            return self._of_classifier(read(), task, how)
        self._local.seed_by(self._local.settings.seed)
        loader = PassLoader(read, sizes=[len(indices)], batch_size=how.batch_size)
        score = self._own_steps.score(client_id=0, loaders=[loader], how=how)
        self._value = self._value or self._value_in(score)
        return value_on_task(score, self._value)

    def _of_classifier(self, batches: Iterator[Batch], task: Task, how: Scoring) -> float:
        """Return the accuracy of a net."""
        scenario = self._data.scenario
        counts = torch.zeros(2, dtype=torch.float64, device=self._local.device)
        for x, y in batches:
            heartbeat()
            logits = self._client(laid_out(x, how.channels_last))
            if scenario is not None and scenario.knows_task and task.classes is not None:
                logits = answers_among(logits, task.classes)
            counts += answer_counts(logits, y)
        correct, num_samples = counts.tolist()
        return float(correct / num_samples)
