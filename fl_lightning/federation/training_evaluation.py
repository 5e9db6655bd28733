"""Evaluation of the global model on the training samples of all clients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from fl_lightning.engines.deployed import PassLoader, laid_out
from fl_lightning.federation.clients_evaluation import values_of_score
from fl_lightning.federation.run import FederatedRun
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.keys import ON_TRAINING_SAMPLES, Direction, metric_directions
from fl_lightning.metrics.user_metrics import computed, count, values_of
from fl_lightning.types import Batch, Scoring
from fl_lightning.utils.life import heartbeat

PREFIX = ON_TRAINING_SAMPLES.removesuffix("/")

Found = tuple[dict[str, float], dict[str, Direction]]
"""Values, and whether they are better when lower or higher, both by log key."""


class TrainingEvaluation:
    """Evaluates the global model on all clients' training samples, as the clients see them without augmentation.

    The first process does all of it, so the values do not depend on the number of processes.

    Args:
        run: The objects of the Trainer's run.
        evaluated_model: Context in which the client module is the global model.
        class_names: Gives the names of the C classes, for log keys.
        how: Says how the model is evaluated: as clients are.
    """

    def __init__(
        self,
        run: FederatedRun,
        *,
        evaluated_model: Callable[[], AbstractContextManager[None]],
        class_names: Callable[[], Sequence[str]],
        how: Callable[[], Scoring],
    ) -> None:
        self._run = run
        self._data = run.data
        self._client = run.engine.client
        self._local = run.engine.local
        self._evaluated_model = evaluated_model
        self._class_names = class_names
        self._how = how
        self._own_steps = run.engine.own_steps

    @torch.no_grad()
    def evaluate(self, round_idx: int) -> dict[str, float]:
        """Return the values by log key. Every process must call it.

        Args:
            round_idx: Index of the round.
        """
        found: Found = ({}, {})
        error: Exception | None = None
        communicator = self._run.communicator
        if communicator.rank == 0:
            try:
                found = self._found(round_idx)
            except Exception as raised:
                # The other processes wait for this one.
                error = raised
        everywhere: list[Found] = communicator.all_gather_or_raise(found, error)
        values, directions = everywhere[0]
        # All processes must know them, or only one would keep a best checkpoint.
        self._run.parts.recorder.take_directions(directions)
        return values

    def _found(self, round_idx: int) -> Found:
        """Evaluate the model in this process."""
        how = self._how()
        modes = [(module, module.training) for module in self._client.modules()]
        with self._evaluated_model():
            self._client.eval()
            try:
                if how.classifies:
                    return self._of_classifier(round_idx, how)
                return self._of_module(round_idx, how)
            finally:
                for module, was_training in modes:
                    module.training = was_training

    def _batches(self, round_idx: int, batch_size: int) -> Iterator[Batch]:
        """Yield the training samples of each client, one client after the other."""
        for client_id in self._data.cohort.there(round_idx):
            view = self._data.view(client_id, round_idx)
            yield from self._local.transfer.each(view.batches("train", batch_size=batch_size))

    def _of_classifier(self, round_idx: int, how: Scoring) -> Found:
        """Return accuracy, loss and further metrics of a net."""
        scores = ClassifierScores(self._data.num_classes or 0, distributed_available_fn=bool).to(self._local.device)
        for x, y in self._batches(round_idx, how.batch_size):
            heartbeat()
            logits = self._client(laid_out(x, how.channels_last))
            scores.update(logits, y)
            if how.metrics is not None:
                count(how.metrics, to_float32(logits), y)
        *_, accuracy, loss = computed(scores).tolist()
        values = {f"{PREFIX}/acc": accuracy, f"{PREFIX}/loss": loss}
        if how.metrics is not None:
            values |= values_of(computed(how.metrics), PREFIX, self._class_names())
        return values, directions_of(how)

    def _of_module(self, round_idx: int, how: Scoring) -> Found:
        """Return what the module's own step and the further metrics say."""
        clients = self._data.cohort.there(round_idx)
        self._local.seed("training samples", self._data.view(clients[0], round_idx))
        loader = PassLoader(
            partial(self._batches, round_idx, how.batch_size),
            sizes=[self._data.view(client_id, round_idx).size() for client_id in clients],
            batch_size=how.batch_size,
        )
        score = self._own_steps.score(client_id=0, loaders=[loader], how=how)
        found = values_of_score(score, self._class_names(), prefix=PREFIX)
        logged = {f"{PREFIX}/{name}": direction for name, direction in score.directions.items()}
        values = {name: float("nan") if value is None else value for name, value in found.items()}
        return values, {**directions_of(how), **logged}


def directions_of(how: Scoring) -> dict[str, Direction]:
    """Return the directions that the further metrics tell, by log key."""
    return {} if how.metrics is None else metric_directions(how.metrics, PREFIX)
