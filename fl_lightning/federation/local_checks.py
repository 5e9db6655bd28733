"""Checks of local training when a fit begins: settings with which no client can train."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fl_lightning.client.checks import check_optimized
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import parse_optimizers
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.building import check_automatic
from fl_lightning.engines.training import LocalTrainer, check_normalized
from fl_lightning.utils.settings import SettingError

MAX_CHANGES = 10_000
"""Steps of a scheduler within a round that are tried at the start. A longer schedule is judged by its first steps."""


def check_local_training(
    local: LocalTrainer, data: FederatedDataModule
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Refuse settings with which no client can train, and make the optimizers of a client once for these checks.

    Args:
        local: The local training of this process.
        data: The data module.

    Returns:
        The optimizers and the schedulers of a client. Nobody steps the optimizers.

    Raises:
        SettingError: The optimizer does not work with the settings, or BatchNorm gets batches of one sample.
        ValueError: The client's optimizers do not train the client.
    """
    client = local.client
    check_by_hand(local)
    check_batch_norm(local, data)
    owner: Any = client.lightning_modules()[-1]
    name = type(owner).__name__
    optimizers, schedulers = parse_optimizers(made_optimizers(client), name)
    if overridden(owner, "configure_optimizers", ClientModule):
        check_optimized(owner, optimizers, client.parameters())
    if client.automatic_optimization:
        check_automatic(
            optimizers,
            owner=name,
            accumulated=local.settings.accumulate_grad_batches,
            scaled=getattr(local.precision, "scaler", None) is not None,
        )
    tell_schedulers(local, data, optimizers, schedulers=schedulers)
    return optimizers, schedulers


def made_optimizers(client: ClientModule) -> Any:
    """Return what the client's `configure_optimizers` returns.

    Raises:
        SettingError: The factory of the optimizer of a net refuses its own arguments.
    """
    owner: Any = client.lightning_modules()[-1]
    if overridden(owner, "configure_optimizers", ClientModule):
        return client.configure_optimizers()
    try:
        return client.configure_optimizers()
    except Exception as error:
        raise SettingError(
            f"model.client.optimizer must make an optimizer of the client's parameters, and raised "
            f"{type(error).__name__}: {error}; give it other arguments, such as lr=0.01"
        ) from error


def check_by_hand(local: LocalTrainer) -> None:
    """Refuse settings of automatic optimization for a module that steps its optimizers itself, as Lightning does.

    Raises:
        SettingError: Gradients are to be clipped or accumulated, which only the module could do.
    """
    if local.client.automatic_optimization:
        return
    settings = local.settings
    name = type(local.modules[-1]).__name__
    by_hand = f"{name} steps its optimizers itself (automatic_optimization=False)"
    if settings.accumulate_grad_batches != 1:
        raise SettingError(
            f"model.accumulate_grad_batches must be 1 where {by_hand}, got {settings.accumulate_grad_batches}; leave "
            f"it unset, and step after several batches in training_step"
        )
    if settings.clip_norm is not None:
        raise SettingError(
            f"model.clip_norm must be unset where {by_hand}, got {settings.clip_norm}; call self.clip_gradients in "
            f"training_step instead"
        )


def check_batch_norm(local: LocalTrainer, data: FederatedDataModule) -> None:
    """Refuse batches of one sample for clients whose net has BatchNorm.

    A method with phases or data of its own may take other batches. Its clients are checked when they train.

    Raises:
        SettingError: `data.batch_size` is 1.
    """
    client = local.client
    own_batches = any(overridden(client, hook, ClientModule) for hook in ("phases", "training_data"))
    if data.batch_size != 1 or own_batches or not local.batch_norms:
        return
    if any(local.normalizes(client_id, data.size(client_id)) for client_id in range(data.num_clients)):
        check_normalized(data.batch_size, "data.batch_size")


def tell_schedulers(
    local: LocalTrainer,
    data: FederatedDataModule,
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Sequence[LRSchedulerConfig],
) -> None:
    """Report in one line that the schedulers of a client start anew in every round, and which of them have no use.

    Args:
        local: The local training of this process.
        data: The data module.
        optimizers: Optimizers of a client that nobody steps. Their learning rates stay as they are.
        schedulers: The schedulers of these optimizers.
    """
    within_round = [entry for entry in schedulers if not entry.reduce_on_plateau]
    if not within_round:
        return
    client = local.client
    name = type(client.lightning_modules()[-1]).__name__
    remedy = (
        "give them the number of a client's local steps, because the Trainer's numbers (max_epochs, "
        "estimated_stepping_batches) count rounds (docs/your-module.md, 'Optimizers and schedulers')"
    )
    beginning = f"the schedulers of {name} start anew for every client and round"
    # A scheduler of the server may watch a value with the same optimizers, whose rates must not be touched.
    is_known = client.automatic_optimization and len(within_round) == len(schedulers)
    own_stepping = overridden(client.lightning_modules()[-1], "lr_scheduler_step", ClientModule)
    if is_known and not own_stepping and not overridden(client, "phases", ClientModule):
        for entry in within_round:
            fault = useless(entry, optimizers[0], events_of_round(local, data, entry.interval))
            if fault:
                kind = type(entry.scheduler).__name__
                rank_zero_info(f"{beginning}, within which {kind} {fault}; {remedy}")
                return
    rank_zero_info(f"{beginning}; {remedy}")


def events_of_round(local: LocalTrainer, data: FederatedDataModule, interval: str) -> int:
    """Return the largest number of local epochs, or of optimizer steps, that a client has in a round.

    Args:
        local: The local training.
        data: The data module.
        interval: `epoch` or `step`.
    """
    settings = local.settings
    events = 0
    for client_id in range(data.num_clients):
        size = data.size(client_id)
        if size == 0:
            continue
        epochs = settings.epochs_of(client_id)
        batch_size = size if data.batch_size == "full" else data.batch_size
        steps_of_epoch = ceil(ceil(size / batch_size) / settings.accumulate_grad_batches)
        steps = epochs * steps_of_epoch
        if settings.max_local_steps is not None:
            steps = min(steps, settings.max_local_steps)
        if interval == "epoch":
            steps = ceil(steps / steps_of_epoch)
        events = max(events, steps)
    return events


def useless(entry: LRSchedulerConfig, optimizer: Optimizer, events: int) -> str:
    """Return why a scheduler has no use within a round, or an empty text.

    Args:
        entry: The scheduler.
        optimizer: Its optimizer, whose learning rates are put back.
        events: Number of local epochs or steps of a client in a round, by the interval of the scheduler.
    """
    if events == 0:
        return ""
    unit = f"local {entry.interval}"
    rates = rates_of_round(entry, optimizer, events)
    for index, row in enumerate(rates):
        if not any(row):
            return f"sets the learning rate to 0 in {unit} {index + 1} of {events}"
    if all(row == rates[0] for row in rates):
        number = f"1 {unit}" if events == 1 else f"{events} {unit}s"
        return f"cannot change the learning rate, because a client has {number}"
    return ""


def rates_of_round(entry: LRSchedulerConfig, optimizer: Optimizer, events: int) -> list[list[float]]:
    """Return the learning rates by parameter group, for the local epochs or steps of a round in order.

    Args:
        entry: The scheduler, which is stepped.
        optimizer: Its optimizer, whose learning rates are put back.
        events: Number of local epochs or steps, ≥ 1.
    """
    scheduler: Any = entry.scheduler
    with rates_put_back(optimizer):
        rates = [current_rates(optimizer)]
        for event in range(1, min(events, MAX_CHANGES)):
            if event % entry.frequency == 0:
                try:
                    scheduler.step()
                except Exception:
                    # A schedule that is too short ends the training of a client with so many steps.
                    break
            rates.append(current_rates(optimizer))
    return rates


def current_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer, by parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


@contextmanager
def rates_put_back(optimizer: Optimizer) -> Iterator[None]:
    """Context in which schedulers may change learning rates without a step of the optimizer."""
    rates = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
