"""A view of the Trainer that hides the other processes from a user's module."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from pytorch_lightning import LightningModule, Trainer

ALONE: Mapping[str, Any] = {"world_size": 1, "global_rank": 0, "num_nodes": 1, "num_devices": 1}
"""What a client sees of the processes of a run: nothing, because one process trains it."""


NO_ANSWERS: Mapping[str, Any] = MappingProxyType({})


class TrainerView:
    """Stands in for a Trainer, and answers some of its attributes itself.

    It passes `isinstance(view, Trainer)`. Whatever is set on it is set on the Trainer.

    Args:
        trainer: The Trainer.
        answers: The values of the attributes that the view answers, by name. None of them can be set.
    """

    _trainer: Trainer
    _answers: Mapping[str, Any]

    def __init__(self, trainer: Trainer, answers: Mapping[str, Any] = ALONE) -> None:
        vars(self).update(_trainer=trainer, _answers=dict(answers))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the Trainer, so that `isinstance` accepts the view."""
        trainer = vars(self).get("_trainer")
        return type(self) if trainer is None else trainer.__class__

    def __getattr__(self, name: str) -> Any:
        if name in ("_trainer", "_answers"):
            # The view is being copied, and has no Trainer yet.
            raise AttributeError(name)
        if name in self._answers:
            return self._answers[name]
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._answers:
            raise AttributeError(f"trainer.{name} cannot be set by a module")
        setattr(self._trainer, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainerView":
        return TrainerView(deepcopy(self._trainer, memo), self._answers)

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainerView, (self._trainer, self._answers)


class WatchedView(TrainerView):
    """Tells that some attributes of a Trainer were read.

    Args:
        trainer: The Trainer, or a view of it.
        names: The names of the attributes.
        on_read: Is called with the name of one of them that is read.
    """

    _names: Collection[str]
    _on_read: Callable[[str], object]

    def __init__(self, trainer: Any, names: Collection[str], on_read: Callable[[str], object]) -> None:
        super().__init__(trainer, {})
        vars(self).update(_names=names, _on_read=on_read)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_names", ()):
            self._on_read(name)
        return super().__getattr__(name)


def view_of(trainer: Trainer | None, answers: Mapping[str, Any] = NO_ANSWERS) -> Any:
    """Return what the modules of clients and the user's data see of a Trainer: a world of one process.

    Args:
        trainer: The Trainer. With one process and without answers it is returned itself. None gives None.
        answers: The values of further attributes that the view answers, by name.
    """
    if trainer is None:
        return None
    alone = trainer.num_devices * trainer.num_nodes == 1
    if alone and not answers:
        return trainer
    return TrainerView(trainer, {**(NO_ANSWERS if alone else ALONE), **answers})


@contextmanager
def watched(modules: Sequence[Any], names: Collection[str], on_read: Callable[[str], object]) -> Iterator[None]:
    """Context in which a function is called if a module reads one of some attributes of its Trainer.

    Args:
        modules: The modules. They are attached to a Trainer or to a view of it.
        names: The names of the attributes.
        on_read: The function. It gets the name.
    """
    seen = [(module, module.trainer) for module in modules]
    for module, trainer in seen:
        module.trainer = WatchedView(trainer, names, on_read)
    try:
        yield
    finally:
        for module, trainer in seen:
            module.trainer = trainer


@contextmanager
def whole_trainer(modules: Sequence[LightningModule]) -> Iterator[None]:
    """Context in which modules see the Trainer itself, because all processes are at the same place.

    Args:
        modules: The modules. They are attached to a Trainer or to a view of it.
    """
    views: list[tuple[LightningModule, TrainerView]] = []
    for module in modules:
        seen: Any = module.trainer
        if isinstance(seen, TrainerView):
            views.append((module, seen))
    for module, view in views:
        module.trainer = vars(view)["_trainer"]
    try:
        yield
    finally:
        for module, view in views:
            module.trainer = view  # type: ignore[assignment]
