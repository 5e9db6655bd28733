"""Finds what of a user's module counts rounds in a federation, and tells it in a line when a fit starts."""

import dis
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client.hooks import SHIPPED
from fl_lightning.client.module import ClientModule

COUNTS = ("estimated_stepping_batches", "num_training_batches", "max_epochs", "max_steps", "train_dataloader")
"""Attributes of a Trainer that schedules are made by; under a FederatedLoop they are of rounds."""

CLOCK = ("current_epoch", "global_step")
"""Attributes of a module and of its Trainer that count rounds under a FederatedLoop."""

FUNCTION_OF: dict[type, str] = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}
FUNCTION_OF |= {cached_property: "func"}
"""Attributes by which kinds of methods give their function."""

PAGE = "docs/your-module.md, 'The meaning of trainer, current_epoch and global_step'"


class WatchedTrainer:
    """The Trainer, as which it passes, with a note of the numbers of rounds that it is asked for.

    Args:
        trainer: that has all attributes.

    Attributes:
        asked: names of those in `COUNTS` that were read, in order.
    """

    _trainer: Trainer
    asked: list[str]

    def __init__(self, trainer: Trainer) -> None:
        vars(self).update(_trainer=trainer, asked=[])

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance asks it
        return type(self._trainer)

    def __getattr__(self, name: str) -> Any:
        if name in COUNTS and name not in self.asked:
            self.asked.append(name)
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


def tell_clock(module: LightningModule, asked: Sequence[str]) -> None:
    """Tell, in one line, which numbers that a module reads are of rounds.

    Args:
        module: with a `configure_optimizers` of its own; of a method, which knows of rounds, only what that asks for.
        asked: what its `configure_optimizers` has asked the Trainer for.
    """
    name, sentences = type(module).__name__, list[str]()
    read = [] if isinstance(module, ClientModule) else clock_read_by(type(module))
    if read:
        sentences.append(
            f"{name} reads {' and '.join(read)}: in a federation {'it counts' if len(read) == 1 else 'they count'} "
            f"rounds, each of which has all local steps of its clients; batch_idx counts a client's own batches"
        )
    if asked:
        sentences.append(
            f"{name}.configure_optimizers asks the Trainer for {', '.join(asked)}: here these are of rounds, each one "
            f"epoch of one batch, while its schedules are made anew for every client of every round; give a schedule "
            f"the number of a client's local steps"
        )
    if sentences:
        rank_zero_info(f"{'; '.join(sentences)} ({PAGE})")


def clock_read_by(kind: type) -> list[str]:
    """List which of `CLOCK` the methods of a class read, but for those of Lightning's and of this package's bases.

    What a class defines itself is no clock.

    >>> clock_read_by(LightningModule)
    []
    """
    written = [base for base in kind.__mro__ if not f"{base.__module__}.".startswith(SHIPPED)]
    codes = [code for base in written for value in vars(base).values() for code in codes_of(value)]
    names = [name for name in CLOCK if not any(name in vars(base) for base in written)]
    return [name for name in names if any(reads(code, name) for code in codes)]


def codes_of(value: object) -> Iterator[CodeType]:
    """Give the code of a method or property, below its decorators, with that of the functions within."""
    function = getattr(value, FUNCTION_OF[type(value)]) if type(value) in FUNCTION_OF else value
    with suppress(ValueError):  # decorators that wrap one another
        function = inspect.unwrap(function) if isinstance(function, FunctionType) else None
    left = [function.__code__] if isinstance(function, FunctionType) else []
    while left:
        code = left.pop()
        yield code
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def reads(code: CodeType, name: str) -> bool:
    """Tell whether a code reads an attribute of this name: a global or a keyword of it is none."""
    return name in code.co_names and any(
        instruction.argval == name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        for instruction in dis.get_instructions(code)
    )
