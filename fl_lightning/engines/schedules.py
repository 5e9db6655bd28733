"""The schedulers of a client in round t, which are where they would be if the t rounds before had been one fit."""

import warnings
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.hooks import overridden
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import ClientProgress
from fl_lightning.engines.building import OptimizerBuilder
from fl_lightning.engines.clock import ClientClock

MOST_COURSES = 256
"""Number of courses that are remembered. Clients with equal schedulers share a course."""

MOST_PLACES = 1_024
"""Number of places of a course. With more, every second place is forgotten."""

SPACING = 256
"""Number of steps after which a place is remembered on the way to another one."""

LEAST_SPACING = 16
"""Number of steps from one place to the next that is worth a place."""

MAX_DEPTH = 12
"""Maximal depth of a value within a scheduler. Deeper values are compared as objects."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))

OF_EVERY_OPTIMIZER = ("params", "param_names")
"""Entries of a parameter group that no scheduler sets."""


class Place(NamedTuple):
    """Holds where the schedulers of a client are.

    Args:
        groups: The settings of the parameter groups, by optimizer.
        schedulers: The states of the schedulers.
    """

    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]


class Course:
    """Remembers places of schedulers by the number of steps, or of rounds, after which they are reached."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._places: dict[int, Place] = {}

    def before(self, number: int) -> tuple[int, Place | None]:
        """Return the last known place that is not behind `number`, and its own number. 0 and None: there is none."""
        index = bisect_right(self._numbers, number)
        if index == 0:
            return 0, None
        known = self._numbers[index - 1]
        return known, self._places[known]

    def keep(self, number: int, place: Place | None) -> None:
        """Remember a place.

        Args:
            number: The number of steps or rounds.
            place: The place. None, of schedulers without a copy, is not remembered.
        """
        if place is None or number in self._places:
            return
        insort(self._numbers, number)
        self._places[number] = place
        if len(self._numbers) > MOST_PLACES:
            self._numbers = self._numbers[1::2]
            self._places = {number: self._places[number] for number in self._numbers}


class Schedules:
    """Steps the schedulers of clients, in a round and for the rounds before.

    A scheduler is built anew for every client and round. With the clock `run` it is stepped as often as it would have
    been in the rounds before. Places on its course are remembered, for all clients with equal schedulers, so that a
    further round steps on from the last one. Nothing of it is in a checkpoint: a run that continues steps from the
    first round again.

    Args:
        clock: The clock of the clients.
        builder: Steps the schedulers of the optimizers that it has made.
    """

    def __init__(self, clock: ClientClock, builder: OptimizerBuilder) -> None:
        self._clock = clock
        self._builder = builder
        self._courses: OrderedDict[Any, Course] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Schedules":
        # A copy finds the places itself. The keys hold objects of the user's.
        return Schedules(deepcopy(self._clock, memo), deepcopy(self._builder, memo))

    def end_step(self, optimizers: LocalOptimizers, index: int) -> None:
        """Step the schedulers that are due after a step of the optimizer.

        Args:
            optimizers: The optimizers of the phase.
            index: Index of the batch in its epoch.
        """
        self._step(optimizers.schedulers, "step", count=index + 1)

    def end_epoch(self, optimizers: LocalOptimizers) -> None:
        """Step the schedulers that are due after the present epoch of the clock.

        Args:
            optimizers: The optimizers of the phase.
        """
        self._step(optimizers.schedulers, "epoch", count=self._clock.current_epoch + 1)

    def _step(self, schedulers: Sequence[LRSchedulerConfig], interval: str, count: int) -> None:
        """Step the schedulers that are due, as the kind of the clock says."""
        self._builder.schedule(schedulers, interval, count=count, kind=self._clock.kind)

    def catch_up(self, optimizers: LocalOptimizers) -> None:
        """Bring new schedulers to where they are at the begin of the present round of the clock.

        Args:
            optimizers: Optimizers that have begun, with schedulers.
        """
        rounds = self._clock.rounds_before
        stepped = [entry for entry in optimizers.schedulers if not entry.reduce_on_plateau]
        if rounds == 0 or not stepped:
            return
        key = identity_of(optimizers)
        is_alone = len(stepped) == 1 and not overridden(self._builder.owner, "lr_scheduler_step")
        with warnings.catch_warnings():
            # Torch warns of a scheduler that is stepped before its optimizer.
            warnings.simplefilter("ignore")
            if is_alone and not asks_others(key):
                self._step_on(optimizers, stepped[0], course=self._course(key), rounds=rounds)
            else:
                # What a scheduler does may depend on the counts that its module sees.
                work = self._clock.work
                course = self._course((key, work.batches, work.accumulated))
                self._replay(optimizers, course=course, rounds=rounds)

    def _course(self, key: Any) -> Course:
        """Return the course of a key, a new one for a new key."""
        course = self._courses.setdefault(key, Course())
        self._courses.move_to_end(key)
        if len(self._courses) > MOST_COURSES:
            self._courses.popitem(last=False)
        return course

    def _step_on(self, optimizers: LocalOptimizers, entry: LRSchedulerConfig, *, course: Course, rounds: int) -> None:
        """Bring the only scheduler to the begin of a round. Its state depends on the number of its steps alone.

        Args:
            optimizers: The optimizers.
            entry: The scheduler.
            course: The course of the scheduler, by its steps.
            rounds: Number of rounds before.
        """
        target = self._clock.work.num_due(entry.interval, entry.frequency, rounds)
        first, place = course.before(target)
        if place is not None:
            go_to(place, optimizers)
        unsaved = unsaved_of(optimizers)
        for number in range(first + 1, target + 1):
            self._builder.step(entry, kind=self._clock.kind)
            if number - first == SPACING or (number == target and number - first >= LEAST_SPACING):
                course.keep(number, place_of(optimizers, unsaved))
                first = number

    def _replay(self, optimizers: LocalOptimizers, *, course: Course, rounds: int) -> None:
        """Step schedulers as in the rounds before, with the counts that a module was told in them.

        Args:
            optimizers: The optimizers.
            course: The course of the schedulers, by rounds.
            rounds: Number of rounds before.
        """
        clock = self._clock
        own_progress = clock.progress
        work = clock.work
        first, place = course.before(rounds)
        if place is not None:
            go_to(place, optimizers)
        unsaved = unsaved_of(optimizers)
        for round_idx in range(first, rounds):
            progress = ClientProgress()
            clock.move_to(round_idx, progress)
            for epoch in range(work.num_epochs):
                clock.begin_epoch(epoch, work.batches[epoch])
                for index in work.step_indices(epoch):
                    clock.index = index
                    progress.num_steps += 1
                    self.end_step(optimizers, index)
                self.end_epoch(optimizers)
        clock.move_to(rounds, own_progress)
        course.keep(rounds, place_of(optimizers, unsaved))


def place_of(optimizers: LocalOptimizers, unsaved: Any) -> Place | None:
    """Return where schedulers are.

    Args:
        optimizers: The optimizers with the schedulers.
        unsaved: The key `unsaved_of` of the new schedulers.

    Returns:
        The place. None if a state has something else than plain values, which can be copied, or does not tell all that
        a step has changed.
    """
    if unsaved_of(optimizers) != unsaved:
        return None
    states: list[dict[str, Any]] = []
    for entry in optimizers.schedulers:
        scheduler: Any = entry.scheduler
        if not hasattr(scheduler, "load_state_dict"):
            return None
        state = scheduler.state_dict()
        if not is_copied(state):
            return None
        states.append(deepcopy(state))
    groups = [[deepcopy(settings_of(group)) for group in optimizer.param_groups] for optimizer in optimizers.raw]
    return Place(groups=groups, schedulers=states)


def unsaved_of(optimizers: LocalOptimizers) -> Any:
    """Return a key of what the states of schedulers leave out, such as the variables of a function."""
    return key_of([unsaved_by(entry.scheduler) for entry in optimizers.schedulers])


def unsaved_by(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler that its state leaves out.

    Args:
        scheduler: The scheduler, which may be of another package than torch.
    """
    saved = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    unsaved: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        if name not in saved:
            unsaved[name] = value
        elif not is_copied(value):
            unsaved[name] = unsaved_in(value)
    return unsaved


def unsaved_in(value: Any) -> Any:
    """Return what a state leaves out of a value that is no plain one, such as a list of schedulers or of functions."""
    if isinstance(value, LRScheduler):
        return unsaved_by(value)
    if isinstance(value, list | tuple):
        return [unsaved_in(item) for item in value]
    return value


def go_to(place: Place, optimizers: LocalOptimizers) -> None:
    """Put schedulers and the settings of their optimizers to a place."""
    for optimizer, settings_of_groups in zip(optimizers.raw, place.groups, strict=True):
        for group, settings in zip(optimizer.param_groups, settings_of_groups, strict=True):
            for name, value in settings.items():
                put_value(group, name, value)
    for entry, state in zip(optimizers.schedulers, place.schedulers, strict=True):
        scheduler: Any = entry.scheduler
        scheduler.load_state_dict(deepcopy(state))


def put_value(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a parameter group. A tensor is written into, because a scheduler may hold it."""
    present = group.get(name)
    if isinstance(present, Tensor) and isinstance(value, Tensor):
        present.copy_(value)
    else:
        group[name] = deepcopy(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group that a scheduler may set."""
    return {name: value for name, value in group.items() if name not in OF_EVERY_OPTIMIZER}


def is_copied(value: Any, depth: int = 0) -> bool:
    """Return True for plain values, tensors and functions of their arguments alone, and for collections of them."""
    if isinstance(value, (*PLAIN, Tensor)):
        return True
    if isinstance(value, FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(is_copied(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | Set):
        return all(is_copied(item, depth + 1) for item in value)
    return False


# --- which schedulers have the same course ---


class Same:
    """Equals only the value of the same object, which it keeps.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def identity_of(optimizers: LocalOptimizers) -> Any:
    """Return a key that new optimizers with the same settings and the same schedulers have, too.

    The rate that a scheduler has set is left out. It follows from the initial rate, or from the present epoch.
    """
    groups: list[Any] = []
    for optimizer in optimizers.raw:
        for group in optimizer.param_groups:
            settings = settings_of(group)
            settings["lr"] = group.get("initial_lr", group.get("lr"))
            groups.append(settings)
    entries: list[Any] = []
    for entry in optimizers.schedulers:
        kind = type(entry.scheduler)
        entries.append([kind.__module__, kind.__qualname__, entry.interval, entry.frequency])
        # A scheduler of another package than torch has a class of its own.
        attributes = {name: value for name, value in vars(entry.scheduler).items() if name != "_last_lr"}
        entries.append(attributes)
    return key_of((groups, entries))


def asks_others(key: Any) -> bool:
    """Return True if a key has an object, such as the module, whose answers may change."""
    if isinstance(key, Same):
        return not isinstance(key.value, CodeType)
    return isinstance(key, tuple) and any(asks_others(part) for part in key)


def key_of(value: Any, depth: int = 0) -> Any:
    """Return a key of a value within a scheduler. Two values with one key make the same course.

    Numbers keep all their digits. A function is its code, with the variables around it.

    Args:
        value: The value.
        depth: Depth of the value, from 0.

    >>> def linear(total):
    ...     return lambda step: 1 - step / total
    >>> key_of(linear(10)) == key_of(linear(10)), key_of(linear(10)) == key_of(linear(10.000000001))
    (True, False)
    """
    if isinstance(value, Same):
        return value
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), str(value.device), repr(value.tolist())
    if isinstance(value, Optimizer):
        # Its parameters are the client's, and its settings are in the key already.
        return type(value).__name__
    if depth > MAX_DEPTH or isinstance(value, nn.Module):
        return Same(value)
    parts = parts_of(value)
    if parts is None:
        return Same(value)
    return type(value).__name__, tuple(key_of(part, depth + 1) for part in parts)


def parts_of(value: Any) -> list[Any] | None:
    """Return the values that make up a value, or None if only the object itself tells what it is."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        return parts_of_function(value)
    if isinstance(value, LRScheduler):
        return [type(value).__qualname__, vars(value)]
    return None


def parts_of_function(function: FunctionType) -> list[Any] | None:
    """Return what a function computes with, or None if a variable around it has no value yet."""
    code: CodeType = function.__code__
    try:
        variables = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None
    return [Same(code), variables, function.__defaults__, function.__kwdefaults__]
