"""Reader of what `configure_optimizers` returns, in every form that Lightning allows; and lr schedulers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


def parse_optimizers(configured: Any, owner: str) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read the optimizers and lr schedulers from what `configure_optimizers` returned.

    Raises:
        TypeError: if it is none of them.
    """
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        scheduler = configured.get("lr_scheduler")
        monitor = configured.get("monitor")  # read where the scheduler stands there by itself, as in Lightning
        return [configured["optimizer"]], [] if scheduler is None else [_scheduler(scheduler, monitor)]
    if isinstance(configured, Sequence) and not isinstance(configured, str):
        items = list(configured)
        if all(isinstance(item, Optimizer | Mapping) for item in items):
            pairs = [parse_optimizers(item, owner) for item in items]
            return [o for optimizers, _ in pairs for o in optimizers], [s for _, found in pairs for s in found]
        if len(items) == 2 and isinstance(items[0], Sequence):
            schedulers = items[1] if isinstance(items[1], Sequence) else [items[1]]
            return list(items[0]), [_scheduler(scheduler) for scheduler in schedulers]
    raise TypeError(
        f"{owner}.configure_optimizers must return an optimizer, a dict, a list of them or (optimizers, schedulers), "
        f"got {type(configured).__name__}"
    )


def _scheduler(value: Any, monitor: str | None = None) -> LRSchedulerConfig:
    known: dict[str, Any] = {"scheduler": value, "monitor": monitor}
    if isinstance(value, Mapping):
        known = {key: value[key] for key in ("scheduler", "interval", "frequency", "monitor", "strict") if key in value}
    return LRSchedulerConfig(reduce_on_plateau=isinstance(known["scheduler"], ReduceLROnPlateau), **known)


def step_scheduler(entry: LRSchedulerConfig, step: Callable[[Any, Any], None]) -> None:
    """Step a scheduler that needs no value.

    Args:
        entry: the scheduler.
        step: the module's `lr_scheduler_step`.

    Raises:
        ValueError: if the scheduler is stepped beyond its end.
    """
    try:
        step(entry.scheduler, None)
    except ValueError as error:
        raise ValueError(
            f"{type(entry.scheduler).__name__} lives for one client and one round, whose local steps it must cover: "
            f"{error}; give it their number, since trainer.estimated_stepping_batches counts rounds"
        ) from error
