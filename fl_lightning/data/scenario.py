"""Scenarios: how the clients' data change over the rounds of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.splits import Array, Split, Transform
from fl_lightning.utils.signatures import check_overrides


@dataclass(frozen=True)
class Task:
    """Describes what is tested apart: some classes, the samples of a column's value, or all samples seen in some way.

    Args:
        name: Name of the task, for log keys and tables, without slashes and line breaks.
        classes: The classes of the task. None: all.
        seen: Transform through which the samples of the task are seen, on their device. None: as they are.
        column: Column of the samples that tells which of them belong to the task. None: all do.
        value: Value of the column.
    """

    name: str
    classes: tuple[int, ...] | None = None
    seen: Transform | None = None
    column: str | None = None
    value: Any = None


class ScenarioInput:
    """Describes the samples that the partition has dealt to the clients, as a scenario reads them.

    Args:
        parts: Indices of each client's samples in the training split, int64 (n,).
        train: The training split.
        num_classes: Returns the number C of classes. None: the samples have no classes.
        seed: Seed of the data.
    """

    def __init__(self, parts: Sequence[Tensor], train: Split, num_classes: Callable[[], int | None], seed: int) -> None:
        self.parts = parts
        self.seed = seed
        self._train = train
        self._num_classes = num_classes

    @property
    def num_clients(self) -> int:
        """The number N of clients."""
        return len(self.parts)

    @property
    def num_samples(self) -> int:
        """The number of samples of the training split, whose indices `parts` holds."""
        return len(self._train)

    @property
    def num_classes(self) -> int | None:
        """The number C of classes. None: the samples have no classes."""
        return self._num_classes()

    def classes_of(self, client_id: int, setting: str = "data.scenario") -> Array:
        """Return the class of each of a client's samples, (n,) int64.

        Args:
            client_id: Id of the client, from 0.
            setting: Name of the setting that needs classes, for the error.

        Raises:
            ValueError: The samples have no classes.
        """
        if self.num_classes is None or self._train.labels is None:
            raise ValueError(
                f"{setting} needs samples with classes, and these have none; set data.num_classes if the samples have "
                f"classes, else take a scenario that asks for none"
            )
        return self._train.labels[self.parts[client_id]].numpy()

    def column(self, name: str) -> Array:
        """Return the value of each sample of the training split in a column, (n,).

        Args:
            name: Name of the column.

        Raises:
            ValueError: The samples have no such column.
        """
        return np.asarray(self._train.column(name))

    def look_at_one(self) -> Tensor | None:
        """Return the input of the first sample, (1, ...). None: there is no sample."""
        if not len(self._train):
            return None
        first: Tensor = self._train.look_at(torch.arange(1))[0]
        return first


class Scenario(ABC):
    """Says which of its samples a client has in a round, and how it sees them. It is the base of all scenarios.

    A scenario is a pure function of the data's seed, the client and the round. It keeps nothing between rounds, so that
    nothing of it is saved, undone or resumed. It only chooses among the samples that the partition has dealt.

    A client's rounds are divided into stages, in which its data are the same. Stages are numbered from 0, and never
    fall.

    Attributes:
        tasks: What is tested apart. Empty: nothing is.
        knows_task: Whether the task is known in a test, so that only the classes of the task are answers.
        stores_positions: Whether the arguments number the training samples as their source gives them.
        has_begun: Whether some samples were given to it. Further samples are given to a copy.
    """

    tasks: Sequence[Task] = ()
    knows_task: bool = False
    stores_positions: ClassVar[bool] = False
    has_begun: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def begin(self, data: ScenarioInput) -> None:  # noqa: B027 - not every scenario reads the samples
        """Take the samples that were dealt, and refuse those that do not fit. It is called once, before any round.

        Args:
            data: The samples.

        Raises:
            ValueError: The samples do not fit.
        """

    @abstractmethod
    def stage(self, client_id: int, round_idx: int) -> int:
        """Return the stage of a client in a round, which never falls.

        Args:
            client_id: Id of the client, from 0.
            round_idx: Communication round, from 0.
        """

    def keeps(self, client_id: int, stage: int) -> Array | None:
        """Return which of the samples that it was dealt a client has in a stage, (n,) bool. None: all.

        Args:
            client_id: Id of the client, from 0.
            stage: Stage of the client, from 0.
        """
        return None

    def seen(self, client_id: int, stage: int) -> Transform | None:
        """Return the transform through which a client sees its samples in a stage. None: as they are.

        It is the same object for equal ways of seeing, and draws from the generator that it is given only.

        Args:
            client_id: Id of the client, from 0.
            stage: Stage of the client, from 0.
        """
        return None

    def task(self, client_id: int, stage: int) -> int | None:
        """Return the number of the task that a client trains on in a stage. None: of no single task.

        Args:
            client_id: Id of the client, from 0.
            stage: Stage of the client, from 0.
        """
        return None

    def content(self) -> str:
        """Return a digest of what the arguments do not tell, such as the content of a file. Empty: they tell all."""
        return ""
