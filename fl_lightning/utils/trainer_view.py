"""A view of the Trainer that hides the other processes from a user's module, and answers some attributes itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

ALONE: Mapping[str, Any] = {"world_size": 1, "global_rank": 0, "num_nodes": 1, "num_devices": 1}
"""What a client sees of the processes of a run: nothing, because one process trains it."""

Readers = Mapping[str, Callable[[str], object]]
"""Functions that are told when a module reads an attribute, by the attribute's name. Each gets the name."""

NO_ANSWERS: Mapping[str, Any] = MappingProxyType({})

NO_READERS: Readers = MappingProxyType({})

Makers = Mapping[str, Callable[[str], Any]]
"""Functions that answer attributes when a module reads them, by the attribute's name. Each gets the name."""

NO_MAKERS: Makers = MappingProxyType({})

WITHOUT_TRAINER: Mapping[str, Any] = MappingProxyType(
    {
        **ALONE,
        "local_rank": 0,
        "is_global_zero": True,
        "logger": None,
        "loggers": (),
        "log_dir": None,
        "callbacks": (),
        "callback_metrics": MappingProxyType({}),
        "logged_metrics": MappingProxyType({}),
        "progress_bar_metrics": MappingProxyType({}),
        "checkpoint_callback": None,
        "checkpoint_callbacks": (),
        "early_stopping_callback": None,
        "early_stopping_callbacks": (),
        "progress_bar_callback": None,
        "state": TrainerState(status=TrainerStatus.RUNNING, fn=TrainerFn.FITTING, stage=RunningStage.TRAINING),
        "training": True,
        "validating": False,
        "testing": False,
        "predicting": False,
        "evaluating": False,
        "sanity_checking": False,
        "fast_dev_run": False,
        "should_stop": False,
    }
)
"""What a module sees where its client is trained without a Trainer, such as at a node of a real federation."""


class TrainerView:
    """Stands in for a Trainer, and answers some of its attributes itself.

    It passes `isinstance(view, Trainer)`. Whatever is set on it is set on the Trainer.

    Args:
        trainer: The Trainer, or another view. None means that the client is trained without a Trainer.
        answers: The values of the attributes that the view answers, by name. None of them can be set.
        readers: The functions that are told when an attribute is read, by the attribute's name.
        makers: The functions that answer attributes whose values change, by name. None of them can be set.
    """

    _trainer: Trainer | None
    _answers: Mapping[str, Any]
    _readers: Readers
    _makers: Makers

    def __init__(
        self,
        trainer: Trainer | None,
        answers: Mapping[str, Any] = ALONE,
        readers: Readers = NO_READERS,
        makers: Makers = NO_MAKERS,
    ) -> None:
        vars(self).update(_trainer=trainer, _answers=dict(answers), _readers=dict(readers), _makers=dict(makers))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the Trainer, so that `isinstance(view, Trainer)` is True."""
        if "_trainer" not in vars(self):
            # The view is being copied.
            return type(self)
        trainer = vars(self)["_trainer"]
        return Trainer if trainer is None else trainer.__class__

    def __getattr__(self, name: str) -> Any:
        if name in ("_trainer", "_answers", "_readers", "_makers"):
            # The view is being copied, and has no Trainer yet.
            raise AttributeError(name)
        if name in self._makers:
            return self._makers[name](name)
        if name in self._readers:
            self._readers[name](name)
        if name in self._answers:
            return self._answers[name]
        if self._trainer is None:
            raise AttributeError(
                f"trainer.{name} must not be read where a client is trained without a Trainer, got a module that reads "
                f"it; read such as trainer.max_epochs, trainer.current_epoch or trainer.is_global_zero"
            )
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._answers or name in self._makers or self._trainer is None:
            raise AttributeError(f"trainer.{name} cannot be set by a module")
        setattr(self._trainer, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainerView":
        # The copy of a module asks in the same run, so that the same functions are told.
        return TrainerView(deepcopy(self._trainer, memo), self._answers, self._readers, makers=self._makers)

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainerView, (self._trainer, self._answers, self._readers, self._makers)


def view_of(trainer: Trainer | None, answers: Mapping[str, Any] = NO_ANSWERS, readers: Readers = NO_READERS) -> Any:
    """Return what the modules of clients and the user's data see of a Trainer: a world of one process.

    Args:
        trainer: The Trainer. With one process, without answers and without readers it is returned itself. None gives
            None.
        answers: The values of further attributes that the view answers, by name.
        readers: The functions that are told when an attribute is read, by the attribute's name.
    """
    if trainer is None:
        return None
    alone = trainer.num_devices * trainer.num_nodes == 1
    if alone and not answers and not readers:
        return trainer
    return TrainerView(trainer, {**(NO_ANSWERS if alone else ALONE), **answers}, readers)


@contextmanager
def whole_world(modules: Sequence[LightningModule]) -> Iterator[None]:
    """Context in which modules see all processes of the run, because all of them are at the same place.

    Args:
        modules: The modules. They are attached to a Trainer or to a view of it.
    """
    views: list[tuple[LightningModule, TrainerView]] = []
    for module in modules:
        seen: Any = module.trainer
        if isinstance(seen, TrainerView) and ALONE.keys() <= vars(seen)["_answers"].keys():
            views.append((module, seen))
    for module, view in views:
        parts = vars(view)
        answers = {name: value for name, value in parts["_answers"].items() if name not in ALONE}
        whole = TrainerView(parts["_trainer"], answers, parts["_readers"], makers=parts["_makers"])
        module.trainer = whole  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, view in views:
            module.trainer = view  # type: ignore[assignment]
