"""Evaluation of the global model: class by class for a classifier, by the module's own steps otherwise."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from pytorch_lightning import Callback
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.client.checks import check_evaluation_step, evaluation_arguments, runs_foreign_code
from fl_lightning.client.hooks import overridden
from fl_lightning.client.services import LoggedRows, attach_services, loader_suffix
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.engines.deployed import EVALUATION, laid_out
from fl_lightning.engines.execution import evaluates_channels_last
from fl_lightning.engines.held_entries import HeldEntries
from fl_lightning.engines.inspection import Inspection
from fl_lightning.federation.agreement import check_same_everywhere
from fl_lightning.federation.checks import averaging_callbacks
from fl_lightning.federation.clients_evaluation import ClientsEvaluation
from fl_lightning.federation.fingerprint import fingerprint
from fl_lightning.federation.run import FederatedRun
from fl_lightning.federation.tasks_evaluation import TasksEvaluation
from fl_lightning.federation.training_evaluation import TrainingEvaluation
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.keys import metric_directions
from fl_lightning.metrics.user_metrics import arrays_of, computed, count, update, values_of
from fl_lightning.types import State
from fl_lightning.utils.keyed import GlobalStates, keyed_seed
from fl_lightning.utils.life import heartbeat
from fl_lightning.utils.trainer_view import whole_world

PASS_HOOKS = frozenset(
    (
        "on_validation_start",
        "on_validation_end",
        "on_test_start",
        "on_test_end",
        "on_predict_start",
        "on_predict_end",
    )
)
"""A module's first and last hook of a pass of the Trainer over a split."""


MOST_CLASSES = 50
"""Largest number of classes whose confusion matrix is counted. More cannot be read in a picture."""


class Evaluation:
    """Evaluates the global model, one pass over a split at a time.

    Args:
        run: The objects of the Trainer's run.

    Attributes:
        before: All entries from before the current pass. None between passes.
        inspection: Evaluates clients in the middle of a round, for monitors.
        of_clients: Evaluates what each client would deploy.
        of_tasks: Evaluates the global model on each task of a scenario.
        of_training: Evaluates the global model on the training samples of all clients.
        arrays: The values of `model.metrics` of the last pass that are no numbers or vectors, by name.
        has_global: Whether there is a global model to evaluate. If not, the module's own steps and hooks of an
            evaluation are not called.
    """

    def __init__(self, run: FederatedRun) -> None:
        self._run = run
        engine = run.engine
        self.parts = run.parts
        self.data = run.data
        self.communicator = run.communicator
        self.services = run.parts.evaluation_services
        self.metrics = run.parts.metrics
        self.clients = run.clients_engine
        self.records = run.records
        self.client = engine.client
        self.global_weights = engine.global_weights
        self.modules = engine.modules
        self.transfer = engine.local.transfer
        self.inspection = Inspection(engine, run.data, round_idx=lambda: run.server.round_idx)
        self.arrays: dict[str, Any] = {}
        self.before: HeldEntries | None = None
        self._after: HeldEntries | None = None
        self._num_transferred: Counter[int] = Counter()
        """Number of batches of the present pass so far, by loader."""
        """All entries as a pass has left them. The module's last hook of the pass must find them."""
        self._generators: GlobalStates | None = None
        """The states of the global random generators before the present pass."""
        """Puts the random generators back at the end of a pass."""
        self._loaded = ExitStack()
        """Holds `evaluated_entries` open during a pass."""
        self._has_evaluated = False
        """Whether the module has other entries than the global ones, because they are evaluated."""
        personal_elsewhere = self.global_weights.personal and getattr(self.clients, "is_remote", False)
        self._client_id = run.data.tested_client
        """Id of the client whose model is evaluated in place of the global one, or None."""
        has_shared = bool(self.global_weights.shared) and not personal_elsewhere
        self.has_global = has_shared or self._client_id is not None
        self._predict: Callable[[Any], Any] = self.client
        # If the model has personal entries, their mean must be in this process.
        runs_foreign_steps = self.client.module is not None or runs_foreign_code(self.client)
        self._may_draw = runs_foreign_steps or self.metrics is not None or self.transfer.hooked
        """Whether a pass runs code that may draw from the generators of NumPy and Python."""
        self._channels_last = evaluates_channels_last(self.client, self.client.device)
        self.class_samples: Tensor | None = None
        """The number of samples of each class in the last pass, (C,) on the CPU. None without classes."""
        self._fingerprints: dict[tuple[str, int], str] = {}
        """The fingerprints of the first samples of a split, by its name and their number."""
        self._accuracy: ClassifierScores | None = None
        if self.client.module is None and self.data.num_classes is not None:
            num_classes = self.data.num_classes
            scores = ClassifierScores(num_classes, confusion=num_classes <= MOST_CLASSES)
            self._accuracy = scores.to(self.client.device)
        self.of_clients = ClientsEvaluation(
            run=run,
            evaluated=self.evaluated_entries,
            kept_generators=partial(self._kept_generators, foreign=True),
            class_names=lambda: self.class_names,
            classifies=self._accuracy is not None,
            channels_last=self._channels_last,
        )
        self.of_tasks = TasksEvaluation(
            run=run,
            evaluated_model=self.evaluated_model,
            how=partial(self.of_clients.how, "validation"),
            value_in=self.of_clients.task_value,
        )
        self.of_training = TrainingEvaluation(
            run=run,
            evaluated_model=self.evaluated_model,
            class_names=lambda: self.class_names,
            how=partial(self.of_clients.how, "validation"),
        )

    @property
    def note(self) -> str:
        """A sentence for who evaluates the global model of clients that use other ones. Empty if they do not."""
        if not self.has_global or self._client_id is not None:
            return ""
        name = type(self.client).__name__
        if self.client.needs_fine_tuning:
            return (
                f"This is the global model, which means nothing before a client of {name} has fine-tuned it "
                f"(--client 0 --tuned true, or loop.deploy(0, tuned=True))"
            )
        if not self.client.deploys_own_model and not self.global_weights.personal:
            return ""
        return (
            f"This is the global model; each client of {name} deploys a model of its own "
            f"(--client 0, or loop.deploy(0))"
        )

    # --- which entries are the model ---

    @contextmanager
    def evaluated_entries(self) -> Iterator[None]:
        """Context in which the client module has the entries that are evaluated, exported and deployed.

        No other place decides which entries these are. It may be entered within a pass, whose entries it leaves.
        """
        evaluated = None if self._has_evaluated else self._evaluated()
        if evaluated is None:
            yield
            return
        before = self.global_weights.snapshot(evaluated)
        self.global_weights.load(evaluated)
        self._has_evaluated = True
        try:
            yield
        finally:
            self._has_evaluated = False
            self.global_weights.load(before)

    def _evaluated(self) -> State | None:
        """Return the entries that are evaluated in place of the global ones, or None if the global ones are.

        A callback that averages the weights of a fit decides first. A rule or server module cannot average as well
        (`check_averages`).
        """
        live = self.global_weights.live(self.global_weights.shared)
        if not live:
            return None
        for callback in averaging_callbacks(self.data.trainer):
            return self._averaged(callback)
        evaluated = self.parts.server_module.evaluation_weights(self.parts.aggregator.evaluation_weights(live))
        return None if evaluated is live else evaluated

    def _averaged(self, callback: Callback) -> State:
        """Return the averages of a callback, which its hooks put into the module and take out again."""
        trainer = self.data.trainer
        loop = trainer.lightning_module
        callback.on_validation_epoch_start(trainer, loop)
        try:
            return self.global_weights.snapshot(self.global_weights.entries)
        finally:
            callback.on_validation_epoch_end(trainer, loop)

    # --- a pass over a split ---

    def begin(self, *, evaluates: bool = True) -> None:
        """Begin a pass, and load the entries that are evaluated.

        Args:
            evaluates: Whether the pass makes values. A prediction makes none.
        """
        self.restore()
        self._num_transferred = Counter()
        # Without shared entries and without a module of the user's own a pass changes nothing.
        if self.has_global or self.client.module is not None:
            self.before = HeldEntries(self.global_weights)
            on_gpu = self.communicator.device.type == "cuda"
            self._generators = GlobalStates(on_gpu=on_gpu, foreign=self._may_draw)
            self._seed("begin")
        if evaluates:
            self._begin_values()
        elif self.note:
            rank_zero_info(self.note)
        self._loaded.enter_context(self._model_of_pass())

    @contextmanager
    def _model_of_pass(self) -> Iterator[None]:
        """Context in which the client module is the model of a pass: the global one, or what a client would deploy."""
        if self._client_id is None:
            with self.evaluated_entries():
                yield
            return
        job = self.of_clients.job_of(self._client_id, self.data.last_round)
        tuning = self.parts.fine_tuning if self.parts.deploys_tuned else None
        try:
            with self._run.engine.deployed(job, tuning) as self._predict:
                yield
        finally:
            self._predict = self.client

    def _begin_values(self) -> None:
        """Forget the values of the pass before."""
        self.global_weights.non_persistent.set_back({})
        self.data.to(self.communicator.device, early=not self.transfer.moves)
        self.parts.recorder.take_class_accuracy(None)
        self.services.logged.clear()
        if self._accuracy is not None:
            self._accuracy.reset()
        if self.metrics is not None:
            self.metrics.reset()

    def _kept_generators(self, *, foreign: bool) -> AbstractContextManager[None]:
        """Return a context that puts the global random generators back.

        Args:
            foreign: Whether code of others runs in it, which may draw from NumPy and Python. Their generators are kept
                only for such code, because that takes long.
        """
        device = self.communicator.device
        on_gpu = device.type == "cuda"
        if foreign:
            return isolate_rng(include_cuda=on_gpu)
        return torch.random.fork_rng([device] if on_gpu else [])

    def transferred(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch as the client's module sees it: in its hooks on batches, and in its step.

        What hooks and step draw is keyed by the batch.

        Args:
            batch: The batch of the loader.
            dataloader_idx: Index of the loader.

        Returns:
            The transferred batch, or `EMPTY_BATCH` if no step sees it.
        """
        self._seed_batch(batch_idx=self._num_transferred[dataloader_idx], dataloader_idx=dataloader_idx)
        self._num_transferred[dataloader_idx] += 1
        if batch is EMPTY_BATCH:
            return batch
        batch = self.transfer(batch, dataloader_idx)
        return EMPTY_BATCH if batch is None else batch

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Evaluate one batch, by the net's logits or by the module's own step.

        Args:
            kind: `validation` or `test`.
            batch: The batch, as `transferred` returns it.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.

        Returns:
            What the module's own step returns, or None.
        """
        heartbeat()
        if batch is EMPTY_BATCH or not self.has_global:
            return None
        if self._accuracy is not None:
            x, y = batch
            logits = self._predict(laid_out(x, self._channels_last))
            self._accuracy.update(logits, y)
            if self.metrics is not None:
                count(self.metrics, to_float32(logits), y)
            return None
        if self.metrics is not None:
            update(self.metrics, batch, self.client)
        module = self.client.module
        if module is None or not overridden(module, f"{kind}_step"):
            return None
        self.services.begin(batch=batch)
        self.services.begin_loader(loader_suffix(dataloader_idx) if self._num_loaders() > 1 else "")
        step = getattr(module, f"{kind}_step")
        return self._call(step, batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

    def predict(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Return the logits of one batch, or what the module's own `predict_step` returns.

        Args:
            batch: The batch, as `transferred` returns it.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.

        Raises:
            ValueError: The clients share no weights.
        """
        if not self.global_weights.shared and self._client_id is None:
            raise ValueError(
                f"predict needs a global model, but the clients of this {type(self.client).__name__} share no weights; "
                f"take the model of a client (--client 0), or run test, which gives the mean of their own"
            )
        heartbeat()
        if batch is EMPTY_BATCH:
            return None
        module = self.client.module
        if module is None:
            return self._predict(laid_out(inputs_in(batch), self._channels_last))
        return self._call(module.predict_step, batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

    def _seed_batch(self, *, batch_idx: int, dataloader_idx: int) -> None:
        """Seed the generators for one batch.

        Args:
            batch_idx: Index of the batch in its dataloader in this process.
            dataloader_idx: Index of the dataloader.
        """
        communicator = self.communicator
        self._seed(f"{dataloader_idx}/{batch_idx * communicator.world + communicator.rank}")

    def _seed(self, part: str) -> None:
        """Seed the generators for a part of a pass, the same in all passes and whoever makes the pass.

        Args:
            part: Name of the part.
        """
        if self._may_draw and self.before is not None:
            local = self._run.engine.local
            local.seed_by(keyed_seed(local.settings.seed, f"{EVALUATION}/{part}"))

    def _call(self, step: Callable[..., Any], batch: Any, *, batch_idx: int, dataloader_idx: int) -> Any:
        """Call a step of the user's module with logging attached, and with the arguments that the step takes."""
        of_several = dataloader_idx if self._num_loaders() > 1 else None
        placed, named = evaluation_arguments(step, batch_idx=batch_idx, dataloader_idx=of_several)
        with attach_services(self.modules, self.services.methods), whole_world(self.modules):
            return step(batch, *placed, **named)  # style: ok, a step takes them by place, as in Lightning

    def _num_loaders(self) -> int:
        """Return the number of dataloaders of the present pass."""
        trainer = self.data.trainer
        if trainer.predicting:
            return len(trainer.num_predict_batches)
        if trainer.testing:
            return len(trainer.num_test_batches)
        if trainer.sanity_checking:
            return len(trainer.num_sanity_val_batches)
        return len(trainer.num_val_batches)

    def restore(self) -> None:
        """Put back the entries that a pass has changed, even if the pass was interrupted."""
        # A client that was deployed leaves before the entries are put back.
        self._loaded.close()
        if self.before is not None:
            self.before.restore()
        self.before = None
        self._after = None

    @contextmanager
    def around(self, hook: str) -> Iterator[None]:
        """Context of the module's first and last hook of a pass.

        The last hook may undo what the first one did. It therefore finds the entries as the pass has left them.

        Args:
            hook: Name of the hook, one of `PASS_HOOKS`.
        """
        if hook.endswith("_start"):
            if self.data.trainer.state.fn != "fit":
                # A fit has compared the data when it began. Test samples may be loaded only now.
                check_same_everywhere(self.data, self.communicator, fits=False)
            if hook == "on_predict_start" and self.client.module is not None:
                check_evaluation_step(self.client.module, "predict_step", self._num_loaders())
            self.begin(evaluates=hook != "on_predict_start")
            yield
            return
        if self._after is not None:
            self._after.restore()
        yield
        self.restore()
        self._restore_generators()

    def _restore_generators(self) -> None:
        """Put the global random generators back, once for each pass."""
        if self._generators is not None:
            self._generators.restore()
        self._generators = None

    def end(self, prefix: str, *, hook_follows: bool) -> dict[str, float]:
        """End a pass, put back what it has changed, and return its values by log key.

        Args:
            prefix: Beginning of the log keys.
            hook_follows: Whether a last hook follows within `around`, of the module or of a callback that it makes.
        """
        values = self._values(prefix)
        if self.before is not None and hook_follows:
            self._after = HeldEntries(self.global_weights)
            self._loaded.close()
            self.before.restore()
        else:
            self.restore()
        self._restore_generators()
        return values

    def _values(self, prefix: str) -> dict[str, float]:
        """Return the values of a pass by log key. Every process must call it."""
        values = self._logged_values()
        if not self.has_global:
            return values
        if self.metrics is not None:
            found = computed(self.metrics)
            self.arrays = arrays_of(found)
            values |= values_of(found, prefix, self.class_names)
            self.parts.recorder.take_directions(metric_directions(self.metrics, prefix))
        if self._accuracy is None:
            return values
        return self._scores(self._accuracy, prefix) | values

    def _logged_values(self) -> dict[str, float]:
        """Return the values that the module has logged in all processes."""
        logged = self.services.logged
        _, rows = logged.drain()
        values = self._reduced(rows, logged.reduce)
        self.parts.recorder.take_directions(logged.directions)
        return values

    def logged_so_far(self) -> dict[str, float]:
        """Return what the module has logged in the present pass so far, by key. Every process must call it."""
        logged = self.services.logged
        return self._reduced(logged.rows_so_far(), logged.reduce_so_far)

    def _reduced(self, rows: LoggedRows, reduce: Callable[..., dict[str, float]]) -> dict[str, float]:
        """Reduce the values that the module has logged in all processes.

        Args:
            rows: The values of this process.
            reduce: Reduces the values of all processes.
        """
        everywhere = self.communicator.gather((rows, self.services.logged.metric_paths(self.client)))
        return reduce(
            rows=[rows for rows, _ in everywhere],
            paths=[paths for _, paths in everywhere],
            root=self.client,
        )

    def _scores(self, accuracy: ClassifierScores, prefix: str) -> dict[str, float]:
        """Return accuracy, loss and class accuracies of a classifier, and give the recorder the last ones."""
        result = computed(accuracy).cpu()
        self.class_samples = accuracy.class_samples.cpu()
        samples = f"{self._words_for_samples()}; {self.class_samples.tolist()}"
        confusion = None if accuracy.confusion is None else accuracy.confusion.long().cpu()
        self.parts.recorder.take_class_accuracy(result[:-2], samples, confusion)
        *by_class, overall, loss = result.tolist()
        scores = {f"{prefix}/acc": overall, f"{prefix}/loss": loss}
        for name, value in zip(self.class_names, by_class, strict=True):
            scores[f"{prefix}/acc_class/{name}"] = value
        return scores

    @cached_property
    def class_names(self) -> list[str]:
        """The names of the C classes, for keys of logged values. A continued run keeps those of its earlier rounds."""
        names = self.inspection.class_names
        kept = self.parts.recorder.keep_class_names(names)
        if kept != names:
            rank_zero_info(
                f"keys of logged values keep the class names of earlier rounds ({', '.join(kept)}); start a new "
                f"run for others"
            )
        return kept

    # --- the samples of a pass ---

    def samples(self) -> dict[str, int]:
        """Return by split how many samples a pass of the present run evaluates: the first ones of the split."""
        trainer = self.data.trainer
        names = [self.data.evaluated, *self.data.further_validation]
        limits = trainer.num_val_batches
        if trainer.state.fn == "test":
            names = ["test"]
            limits = trainer.num_test_batches
        sizes: list[tuple[str, int]] = []
        for name in names:
            split = self.data.split(name)
            sizes += [(name, size) for size in split.loader_sizes or [len(split)]]
        found: dict[str, int] = dict.fromkeys(names, 0)
        for (name, size), num_batches in zip(sizes, limits or [math.inf] * len(sizes), strict=False):
            most = num_batches * self.data.eval_batch_size * trainer.world_size
            found[name] += int(min(most, size))
        return found

    def _positions(self, name: str) -> Tensor:
        """Return which samples of a split a pass of validation evaluates: the first ones of each loader, (n,) int64."""
        trainer = self.data.trainer
        split = self.data.split(name)
        at_once = self.data.eval_batch_size * trainer.world_size
        parts: list[Tensor] = []
        for part in split.by_loader(torch.arange(len(split))):
            num_batches = batches_within(trainer.limit_val_batches, math.ceil(len(part) / at_once))
            parts.append(part[: num_batches * at_once])
        return torch.cat(parts)

    def initial_tasks(self) -> None:
        """Measure the model before round 0 on each task, for what earlier tasks give. Every process must call it.

        A run that is continued within round 0 has measured it.
        """
        tasks = self._run.tasks
        if tasks is None or tasks.table.last_round is not None:
            return
        if self.has_global and self.data.evaluated is not None and self.data.trainer.enable_validation:
            initial, value = self.of_tasks.evaluate(self.data.evaluated, self._positions(self.data.evaluated))
            self.of_clients.take_task_value(value, self.data.evaluated_prefix)
            tasks.take(initial, round_idx=-1)

    def task_values(self, prefix: str, round_idx: int) -> dict[str, float]:
        """Return the values of the tasks after a pass of the Trainer, by log key. Every process must call it.

        Args:
            prefix: Beginning of the log keys.
            round_idx: Round after which the global model was evaluated.
        """
        tasks = self._run.tasks
        if tasks is None or not self.has_global or self.data.evaluated is None:
            return {}
        class_accuracy = self.parts.recorder.class_accuracy
        # The pass counts the classes of further validation loaders, too.
        by_classes = self.of_tasks.by_classes and not self.data.further_validation
        if by_classes and class_accuracy is not None and self.class_samples is not None:
            accuracies = self.of_tasks.of_classes(class_accuracy, self.class_samples)
        else:
            accuracies, value = self.of_tasks.evaluate(self.data.evaluated, self._positions(self.data.evaluated))
            self.of_clients.take_task_value(value, prefix)
        measures = tasks.take(accuracies, round_idx)
        return task_keys(f"{prefix}/{tasks.key('acc_task')}", tasks.names, accuracies) | {
            f"{prefix}/{name}": value for name, value in measures.items()
        }

    def _words_for_samples(self) -> str:
        """Return words that are the same for another evaluation if it is on the same samples."""
        words: list[str] = []
        for name, size in self.samples().items():
            if (name, size) not in self._fingerprints:
                split = self.data.split(name)
                self._fingerprints[name, size] = fingerprint(split, size, self.data.eval_batch_size)
            words.append(f"{name} {self._fingerprints[name, size]}")
        return "; ".join(words)

    # --- outside of the Trainer's passes ---

    @contextmanager
    def evaluated_model(self) -> Iterator[None]:
        """Context in which the client module is the global model as it is evaluated.

        It may be entered within a pass. At the end of a fit Lightning has moved all parts off the samples' device, so
        they are moved back for it.
        """
        device = self.client.device
        with ExitStack() as undone:
            for part in (self.client, self.parts.aggregator, self.parts.server_module):
                undone.callback(part.to, device)
                part.to(self.communicator.device)
            undone.callback(HeldEntries(self.global_weights).restore)
            undone.enter_context(self._kept_generators(foreign=True))
            undone.enter_context(self.evaluated_entries())
            yield


def batches_within(limit: int | float, num_batches: int) -> int:
    """Return how many batches of a loader Lightning evaluates under a limit: a number, or a share of them.

    >>> batches_within(3, 10), batches_within(0.25, 10), batches_within(1.0, 10)
    (3, 2, 10)
    """
    return min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)


def task_keys(beginning: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the values on tasks by log key, without those that are not defined.

    >>> task_keys("global/acc_task", ["0-1", "2"], [0.5, math.nan])
    {'global/acc_task/0-1': 0.5}
    """
    found = zip(names, values, strict=True)
    return {f"{beginning}/{name}": value for name, value in found if not math.isnan(value)}


def inputs_in(batch: Any) -> Tensor:
    """Return the inputs of a net in a batch that is predicted: the batch itself, or its first item.

    Raises:
        TypeError: There are no such inputs.

    >>> inputs_in(torch.ones(2, 3)).shape, inputs_in([torch.ones(2, 3), "names"]).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"a batch that a net predicts must be its inputs (n, ...), or begin with these, got "
            f"{type(inputs).__name__}; give module= with a predict_step of your own"
        )
    return inputs
