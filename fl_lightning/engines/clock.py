"""The clock of a client: how many rounds, epochs and steps its module is told of while the client is trained."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from pytorch_lightning import LightningModule
from pytorch_lightning.loggers.logger import DummyLogger

from fl_lightning.client.progress import ClientProgress
from fl_lightning.engines.lockstep import Passes
from fl_lightning.engines.pytrees import StackingError
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.types import ClientData, ClockKind
from fl_lightning.utils.trainer_view import WITHOUT_TRAINER, TrainerView

COUNTS = (
    "current_epoch",
    "global_step",
    "max_epochs",
    "max_steps",
    "num_training_batches",
    "estimated_stepping_batches",
    "train_dataloader",
    "is_last_batch",
    "optimizers",
    "lr_scheduler_configs",
)
"""Attributes of a Trainer that the clock answers while a client is trained, and that differ between clients."""

LIMITS = ("accumulate_grad_batches", "gradient_clip_val")
"""Attributes of a Trainer that the clock answers by settings of the loop, for all clients alike."""


class Work(NamedTuple):
    """Holds what a client trains in one phase of a round, as far as that is known when the phase begins.

    Args:
        round_idx: Index of the round, from 0.
        batches: Number of batches of each epoch that the client begins.
        num_batches: Number of batches of a whole epoch.
        num_samples: Number of samples of the client.
        batch_size: Number of samples in a full batch.
        accumulated: Number of batches per optimizer step, ≥ 1.
        per_batch: Number of optimizer steps after these batches: 1, or the number of optimizers that the module steps
            by hand.
    """

    round_idx: int
    batches: tuple[int, ...]
    num_batches: int
    num_samples: int
    batch_size: int
    accumulated: int = 1
    per_batch: int = 1

    @classmethod
    def of(
        cls,
        passes: Passes,
        *,
        round_idx: int,
        num_samples: int,
        accumulated: int,
        batch_limit: int | None = None,
        step_limit: int | None = None,
    ) -> "Work":
        """Return what a client trains by the batches of a phase and its limits.

        Args:
            passes: The batches of the phase.
            round_idx: Index of the round, from 0.
            num_samples: Number of samples of the client.
            accumulated: Number of batches per optimizer step, ≥ 1.
            batch_limit: Largest number of batches of the phase. None is no limit.
            step_limit: Largest number of optimizer steps of the phase. None is no limit.

        >>> passes = Passes.over(7, 2, 3, drops_single=False)
        >>> Work.of(passes, round_idx=0, num_samples=7, accumulated=2, step_limit=3).batches
        (4, 2)
        """
        remaining = math.inf if step_limit is None else step_limit
        batches: list[int] = []
        for epoch in range(passes.epochs):
            number = passes.of_epoch(epoch, batch_limit).steps
            if remaining <= 0 or (number == 0 and batch_limit is not None):
                break
            if math.ceil(number / accumulated) > remaining:
                number = int(remaining) * accumulated
            remaining -= math.ceil(number / accumulated)
            batches.append(number)
        return cls(
            round_idx=round_idx,
            batches=tuple(batches),
            num_batches=passes.steps,
            num_samples=num_samples,
            batch_size=passes.batch_size,
            accumulated=accumulated,
        )

    @property
    def num_epochs(self) -> int:
        """Number of epochs, E."""
        return len(self.batches)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps, K, if no batch is skipped."""
        return sum(math.ceil(number / self.accumulated) for number in self.batches)

    def step_indices(self, epoch: int) -> Iterator[int]:
        """Yield the indices of the batches of an epoch after which an optimizer step is taken.

        >>> list(Work(0, (5,), 5, num_samples=20, batch_size=4, accumulated=2).step_indices(0))
        [1, 3, 4]
        """
        number = self.batches[epoch]
        yield from range(self.accumulated - 1, number, self.accumulated)
        if number % self.accumulated:
            yield number - 1

    def num_due(self, interval: str, frequency: int, rounds: int) -> int:
        """Return how often a scheduler is stepped in some rounds of this work, which are one fit.

        Args:
            interval: `epoch` or `step`.
            frequency: Number of epochs, or of batches of an epoch, from one step of the scheduler to the next.
            rounds: Number of rounds.

        >>> work = Work(0, (5, 5), 5, num_samples=20, batch_size=4)
        >>> work.num_due("step", 2, rounds=3), work.num_due("epoch", 2, rounds=3), work.num_due("epoch", 4, rounds=3)
        (12, 3, 1)
        """
        if interval == "epoch":
            return rounds * self.num_epochs // frequency
        in_round = 0
        for number in self.batches:
            in_round += number // math.lcm(self.accumulated, frequency)
            if number % self.accumulated and number % frequency == 0:
                in_round += 1
        return rounds * in_round


NO_WORK = Work(0, (), num_batches=0, num_samples=0, batch_size=1)


class Stepped(Protocol):
    """Gives the optimizers and schedulers of the client that is trained."""

    def raw_optimizers(self) -> Sequence[Any]:
        """Return the optimizers themselves."""

    def scheduler_configs(self) -> Sequence[Any]:
        """Return the schedulers with their settings."""


class ClientClock:
    """Answers what the module of a client asks its Trainer for while the client is trained.

    With the kind `run`, round t of R rounds of E epochs looks like the epochs t·E … t·E + E − 1 of one fit of R·E
    epochs. With `round` each round looks like a fit of E epochs.

    Args:
        settings: Settings of local training.
        rounds: Returns the number of planned rounds R, on which the run depends from then on. None is no limit.

    Attributes:
        kind: The kind of the present phase.
        work: What the client trains in the present phase.
        round_idx: Index of the round.
        epoch: Index of the local epoch in the phase, from 0.
        index: Index of the present batch in its epoch. Before the first batch of an epoch it is the last batch of the
            epoch before, and −1 in the first epoch.
        asked: Whether the module has asked for one of `COUNTS` since this was set to False.
    """

    def __init__(self, settings: LocalSettings, rounds: Callable[[], int | None] = lambda: None) -> None:
        self.settings = settings
        self.kind: ClockKind = settings.clock
        self.work = NO_WORK
        self.round_idx = 0
        self.epoch = 0
        self.index = -1
        self.asked = False
        self._rounds = rounds
        self._rounds_before = 0
        """Number of rounds whose epochs and steps count as the module's past."""
        self._progress = ClientProgress()
        self._first_step = 0
        self._batches_of_epoch = 0
        self._data: ClientData | None = None
        self._stepped: Stepped | None = None
        self._stacked = False
        self._epochs_of_stack: set[int] = set()
        """The values of `current_epoch` of the clients of a stack. Empty outside of its steps."""

    # --- told by what trains the client ---

    def begin(
        self, work: Work, *, kind: ClockKind | None, progress: ClientProgress, data: ClientData | None = None
    ) -> None:
        """Begin a phase of a client.

        Args:
            work: What the client trains.
            kind: The kind of the phase. None means that of the settings.
            progress: Counts the steps of the client from now on.
            data: The data of the client, restricted to the samples of the phase. None: nobody reads them.
        """
        self.kind = kind or self.settings.clock
        self.round_idx = work.round_idx
        self.work = work
        self._data = data
        self._stepped = None
        self.move_to(self.rounds_before, progress)

    def resume(self, work: Work, *, kind: ClockKind | None, progress: ClientProgress, epoch: int, index: int) -> None:
        """Go back to a phase that has begun, of one of several clients that are trained at once.

        Args:
            work: What the client trains.
            kind: The kind of the phase. None means that of the settings.
            progress: Counts the steps of the client, from 0 at the begin of the phase.
            epoch: Index of the epoch in the phase.
            index: Index of the batch in the epoch.
        """
        self.begin(work, kind=kind, progress=progress)
        self._first_step = 0
        self.begin_epoch(epoch, work.batches[epoch])
        self.index = index

    @property
    def progress(self) -> ClientProgress:
        """Counts the steps of the client."""
        return self._progress

    @property
    def rounds_before(self) -> int:
        """Number of rounds before the present one that count: t in a `run`, 0 in a `round`."""
        return self.work.round_idx if self.kind == "run" else 0

    def move_to(self, rounds_before: int, progress: ClientProgress) -> None:
        """Go to the begin of a round with the present work.

        Args:
            rounds_before: Number of rounds before it that count.
            progress: Counts the steps of the client from now on.
        """
        self._rounds_before = rounds_before
        self._progress = progress
        self._first_step = progress.num_steps
        self.begin_epoch(0, self.work.num_batches)

    def begin_epoch(self, epoch: int, num_batches: int) -> None:
        """Begin a local epoch.

        Args:
            epoch: Index of the epoch in the phase.
            num_batches: Number of its batches.
        """
        self.epoch = epoch
        self._batches_of_epoch = num_batches
        # As in Lightning, the last batch of the epoch before is the present one until the first batch.
        self.index = num_batches - 1 if self.current_epoch else -1

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and know which of them is the present one.

        Args:
            batches: The batches.
        """
        for index, batch in enumerate(batches):
            self.index = index
            yield batch

    def count_step(self) -> None:
        """Count a step of the optimizer, which is over."""
        self._progress.num_steps += 1

    def steps_with(self, stepped: Stepped, num_by_hand: int = 1) -> None:
        """Answer optimizers and schedulers by those of `stepped` from now on.

        Args:
            stepped: Gives the optimizers.
            num_by_hand: Number of optimizers that the module steps by hand. A round is taken to have a step of each
                after each batch.
        """
        self._stepped = stepped
        self.work = self.work._replace(per_batch=num_by_hand)

    @contextmanager
    def attached(self, client: LightningModule) -> Iterator[None]:
        """Context in which the client's modules see this clock in place of that of their Trainer.

        Args:
            client: The client module. Its setter passes the Trainer on to the module that it is built around.
        """
        trainer = trainer_of(client)
        makers: dict[str, Callable[[str], Any]] = dict.fromkeys((*COUNTS, *LIMITS), self.ask)
        answers: Mapping[str, Any] = WITHOUT_TRAINER
        if trainer is not None:
            answers = {}
            makers["logger"] = lambda _: self._at_round(trainer.logger)
            makers["loggers"] = lambda _: [self._at_round(logger) for logger in trainer.loggers]
        client.trainer = TrainerView(trainer, answers, makers=makers)  # type: ignore[assignment]
        try:
            yield
        finally:
            client.trainer = trainer

    def _at_round(self, logger: Any) -> Any:
        """Return a logger as the client's modules see it. None stays None."""
        return None if logger is None else RoundLogger(logger, self.round_idx)

    @contextmanager
    def in_stack(self, works: Sequence[Work], epoch: int) -> Iterator[None]:
        """Context of a step of several clients, which can ask only for what is the same for all of them.

        Args:
            works: What each of the clients trains.
            epoch: Index of their epoch.
        """
        self._stacked = True
        self._epochs_of_stack = {self.rounds_before * work.num_epochs + epoch for work in works}
        try:
            yield
        finally:
            self._stacked = False

    # --- asked by the module ---

    def ask(self, name: str) -> Any:
        """Return the value of an attribute of the Trainer, as the client's module sees it.

        Args:
            name: Name of the attribute.

        Raises:
            StackingError: Several clients are trained at once, and the value is not that of all of them.
        """
        if name in LIMITS:
            return getattr(self, name)
        self.asked = True
        if not self._stacked:
            return getattr(self, name)
        if name == "current_epoch" and len(self._epochs_of_stack) == 1:
            return next(iter(self._epochs_of_stack))
        raise StackingError(f"its training_step reads trainer.{name}, which differs between clients")

    @property
    def current_epoch(self) -> int:
        """Index of the epoch: t·E + e, or e."""
        return self._rounds_before * self.work.num_epochs + self.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far: t·K + k, or k."""
        before = self._rounds_before * self.work.num_steps * self.work.per_batch
        return before + self._progress.num_steps - self._first_step

    @property
    def max_epochs(self) -> int:
        """Number of epochs: R·E, or E. As in Lightning, −1 is no limit."""
        rounds = self._num_rounds()
        return -1 if rounds is None else rounds * self.work.num_epochs

    @property
    def max_steps(self) -> int:
        """Limit of optimizer steps: R·`max_local_steps`, or `max_local_steps`. As in Lightning, −1 is no limit."""
        limit = self.settings.max_local_steps
        if limit is None:
            return -1
        rounds = self._num_rounds()
        return -1 if rounds is None else rounds * limit

    @property
    def num_training_batches(self) -> int:
        """Number of batches of an epoch."""
        return self.work.num_batches

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps: R·K, or K. It is infinite without a limit of rounds."""
        rounds = self._num_rounds()
        return math.inf if rounds is None else rounds * self.work.num_steps

    def planned_rounds(self) -> int | None:
        """Return the number of planned rounds R, on which the run depends from now on. None is no limit."""
        return self._rounds()

    def _num_rounds(self) -> int | None:
        """Return the number of rounds that the module plans for: R, or 1."""
        return self.planned_rounds() if self.kind == "run" else 1

    @property
    def train_dataloader(self) -> "ClientLoader":
        """The sizes of the client's loader."""
        return ClientLoader(self.work)

    @property
    def is_last_batch(self) -> bool:
        """Whether the present batch is the last of its epoch."""
        if self._data is not None and self._data.ended:
            return True
        return self.index + 1 == self._batches_of_epoch

    @property
    def optimizers(self) -> list[Any]:
        """The client's optimizers. Empty before they are made."""
        return [] if self._stepped is None else list(self._stepped.raw_optimizers())

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The client's schedulers with their settings. Empty before they are made."""
        return [] if self._stepped is None else list(self._stepped.scheduler_configs())

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of batches per optimizer step."""
        return self.settings.accumulate_grad_batches

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest norm of a gradient, or None."""
        return self.settings.clip_norm


class LoggerInPlace:
    """Stands in the place of a logger, whose attributes it has.

    Args:
        logger: The logger.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the logger, so that `isinstance` accepts the object."""
        logger = vars(self).get("_logger")
        return type(self) if logger is None else logger.__class__

    def __getattr__(self, name: str) -> Any:
        if name == "_logger":
            # The object is being copied, and has no logger yet.
            raise AttributeError(name)
        return getattr(self._logger, name)


class RoundLogger(LoggerInPlace):
    """Shows a logger to a client: what it logs for a step lands at the round, like all values of the run.

    Args:
        logger: The logger.
        round_idx: Index of the round.
    """

    def __init__(self, logger: Any, round_idx: int) -> None:
        super().__init__(logger)
        self._round_idx = round_idx

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values at the round.

        Args:
            metrics: Values by log key.
            step: A step or an epoch of the client. None stays None.
        """
        self._logger.log_metrics(metrics, step=None if step is None else self._round_idx)


class SilentLogger(LoggerInPlace):
    """Shows a logger to a client that logs nothing: its attributes are there, and its methods do nothing.

    Args:
        logger: The logger.

    Attributes:
        experiment: Takes every call, and does nothing.
    """

    def __init__(self, logger: Any) -> None:
        super().__init__(logger)
        self.experiment = DummyLogger().experiment

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return do_nothing if callable(value) else value


def do_nothing(*_: Any, **__: Any) -> None:
    """Take any arguments."""


class ClientLoader:
    """Tells the sizes of a client's loader.

    Args:
        work: What the client trains.

    Attributes:
        dataset: Has the number of the client's samples as its length.
        batch_size: Number of samples in a full batch.
    """

    def __init__(self, work: Work) -> None:
        self.dataset = range(work.num_samples)
        self.batch_size = work.batch_size
        self._length = work.num_batches

    def __len__(self) -> int:
        return self._length


def trainer_of(module: LightningModule) -> Any:
    """Return the Trainer of a module, or None if it has none."""
    try:
        return module.trainer
    except RuntimeError:
        return None


@contextmanager
def without_logs(client: LightningModule) -> Iterator[None]:
    """Context in which the client's modules see loggers that do nothing.

    Args:
        client: The client module. Its setter passes the Trainer on to the module that it is built around.
    """
    trainer = trainer_of(client)
    if trainer is None or trainer.logger is None:
        yield
        return
    silent = [SilentLogger(logger) for logger in trainer.loggers]
    client.trainer = TrainerView(trainer, {"logger": silent[0], "loggers": silent})  # type: ignore[assignment]
    try:
        yield
    finally:
        client.trainer = trainer


def begin_without_trainer(client: LightningModule, clock: ClientClock, **answers: Any) -> None:
    """Let a client's modules see a Trainer of one process that trains nothing, for an engine without a Trainer.

    Its clock counts rounds, as the Trainer of a federation does outside the training of a client.

    Args:
        client: The client module.
        clock: The clock of the engine, which knows the round.
        answers: Further attributes of the Trainer by name.
    """

    def planned(_: str) -> int:
        rounds = clock.planned_rounds()
        return -1 if rounds is None else rounds

    def stepping(_: str) -> float:
        rounds = clock.planned_rounds()
        return math.inf if rounds is None else rounds

    def round_idx(_: str) -> int:
        return clock.round_idx

    makers = {
        "current_epoch": round_idx,
        "global_step": round_idx,
        "max_epochs": planned,
        "estimated_stepping_batches": stepping,
    }
    counts = {"max_steps": -1, "num_training_batches": 1, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    view = TrainerView(None, {**WITHOUT_TRAINER, **counts, **answers}, makers=makers)
    client.trainer = view  # type: ignore[assignment]
