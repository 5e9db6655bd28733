"""Checks of local training when a fit begins: settings with which no client can train."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil, isfinite
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.seed import isolate_rng
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from fl_lightning.client.checks import check_optimized
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import parse_optimizers, takes_closure
from fl_lightning.client.progress import ClientProgress
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.building import check_automatic, short_sentence
from fl_lightning.engines.clock import Work
from fl_lightning.engines.lockstep import Passes
from fl_lightning.engines.training import LocalTrainer, check_normalized
from fl_lightning.federation.checks import current_rates
from fl_lightning.types import ClockKind
from fl_lightning.utils.settings import SettingError

MAX_CHANGES = 10_000
"""Steps of a scheduler within a round that are tried at the start. A longer schedule is judged by its first steps."""


def check_local_training(
    local: LocalTrainer, data: FederatedDataModule, rounds: int | None = None
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Refuse settings with which no client can train, and make the optimizers of a client once for these checks.

    Args:
        local: The local training of this process.
        data: The data module.
        rounds: The planned rounds. None means no limit.

    Returns:
        The optimizers and the schedulers of a client. Nobody steps the optimizers.

    Raises:
        SettingError: The optimizer does not work with the settings or the net, BatchNorm gets batches of one sample,
            or no client has a batch.
        ValueError: The client's optimizers do not train the client.
    """
    client = local.client
    check_by_hand(local)
    check_batch_norm(local, data, rounds=rounds)
    check_batches(local, data, rounds=rounds)
    owner: Any = client.lightning_modules()[-1]
    name = type(owner).__name__
    begin_clock(local, data)
    with local.attached_clock():
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
    check_rates(optimizers, name, is_scheduled=bool(schedulers))
    if not overridden(owner, "configure_optimizers", ClientModule):
        check_dense_steps(local)
    check_schedulers(local, data, optimizers, schedulers=schedulers, rounds=rounds)
    return optimizers, schedulers


def begin_clock(local: LocalTrainer, data: FederatedDataModule) -> None:
    """Let the clock of the clients begin the first round of the client with the most local steps.

    Args:
        local: The local training.
        data: The data module.
    """
    works = works_of_clients(local, data, rounds=1) if local.tells_clock else []
    if works:
        largest = max(works, key=lambda work: work.num_steps)
        local.clock.begin(largest, kind=None, progress=ClientProgress())


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


def check_rates(optimizers: Sequence[Optimizer], name: str, *, is_scheduled: bool) -> None:
    """Refuse a learning rate that is NaN or infinite, and report rates of 0, with which no client moves.

    Args:
        optimizers: The optimizers of a client.
        name: Name of the class that makes the optimizers.
        is_scheduled: Whether schedulers set the rates.

    Raises:
        SettingError: A learning rate is not finite.
    """
    rates: list[float] = []
    for optimizer in optimizers:
        rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for rate in rates:
        if not isfinite(rate):
            raise SettingError(
                f"the learning rate of {name} must be a finite number, got {rate}; set model.client.optimizer.lr, or "
                f"the rate in its configure_optimizers, to a number such as 0.01"
            )
    if rates and not any(rates) and not is_scheduled:
        rank_zero_info(
            f"the learning rate of {name} is 0, so that no client moves its weights; set model.client.optimizer.lr, or "
            f"the rate in its configure_optimizers, to a number such as 0.01"
        )


def check_dense_steps(local: LocalTrainer) -> None:
    """Refuse an optimizer of a net that cannot step on dense gradients, or on this device.

    The optimizer is made of small parameters and stepped once. A net with sparse gradients is not checked.

    Args:
        local: The local training of this process.

    Raises:
        SettingError: The step fails.
    """
    client = local.client
    if any(getattr(part, "sparse", False) is True for part in client.modules()):
        return
    dimensions = {parameter.ndim for parameter in client.parameters() if parameter.requires_grad}
    params = [Parameter(torch.zeros((1,) * size, device=local.device)) for size in sorted(dimensions)]
    try:
        optimizer = client.optimizer_factory(params)
    except Exception:
        # The function has worked with the client's own parameters, and may depend on their shapes.
        return

    def closure() -> Tensor:
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros((), device=local.device)

    closure()
    step: Any = optimizer.step
    try:
        # An optimizer of the user's own may draw.
        with isolate_rng():
            if takes_closure(optimizer):
                step(closure)
            else:
                step()
    except Exception as error:
        raise SettingError(
            f"model.client.optimizer must step on dense gradients on this device, got {type(optimizer).__name__}, "
            f"which raised {type(error).__name__}: {error}; take another one, such as SGD or Adam"
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


MOST_STAGED = 1000
"""Number of rounds whose sizes of clients are looked at where the rounds of a run are not planned."""


def sizes_of_clients(data: FederatedDataModule, rounds: int | None) -> dict[int, list[int]]:
    """Return the numbers of samples that each client that trains has in the rounds of a run, by client.

    Args:
        data: The data module.
        rounds: The planned rounds. None means no limit.
    """
    num_rounds = MOST_STAGED if rounds is None else rounds
    sizes: dict[int, list[int]] = {}
    for client_id in data.training_clients:
        begins = data.first_rounds(client_id, num_rounds)
        sizes[client_id] = sorted({data.size(client_id, round_idx) for round_idx in begins})
    return sizes


def check_batch_norm(local: LocalTrainer, data: FederatedDataModule, rounds: int | None) -> None:
    """Refuse batches of one sample for clients whose net has BatchNorm.

    A method with phases or data of its own may take other batches. Its clients are checked when they train.

    Args:
        local: The local training of this process.
        data: The data module.
        rounds: The planned rounds. None means no limit.

    Raises:
        SettingError: `data.batch_size` is 1.
    """
    client = local.client
    own_batches = any(overridden(client, hook, ClientModule) for hook in ("phases", "training_data"))
    if data.batch_size != 1 or own_batches or not local.batch_norms:
        return
    for client_id, sizes in sizes_of_clients(data, rounds).items():
        if any(local.normalizes(client_id, size) for size in sizes):
            check_normalized(data.batch_size, "data.batch_size")


def check_batches(local: LocalTrainer, data: FederatedDataModule, rounds: int | None) -> None:
    """Refuse batches that leave every client without one, because the last batch is left out.

    A method with phases or data of its own may take other batches, and a stream has no known number of them.

    Args:
        local: The local training of this process.
        data: The data module.
        rounds: The planned rounds. None means no limit.

    Raises:
        SettingError: `data.batch_size` is above the number of samples of every client.
    """
    own_batches = any(overridden(local.client, hook, ClientModule) for hook in ("phases", "training_data"))
    if not data.drop_last or own_batches or data.has_streams:
        return
    found = sizes_of_clients(data, rounds)
    largest = max((max(sizes) for sizes in found.values()), default=0)
    has_batches = any(
        passes_of(local, data, client_id, size=max(sizes)).steps for client_id, sizes in found.items() if max(sizes)
    )
    if largest and not has_batches:
        raise SettingError(
            f"data.batch_size must be at most the samples of the largest client ({largest}) where drop_last=True "
            f"leaves out smaller batches, got {data.batch_size}; lower it, or leave drop_last out"
        )


def passes_of(local: LocalTrainer, data: FederatedDataModule, client_id: int, *, size: int) -> Passes:
    """Return how the samples of a client are divided into batches, without phases of a method.

    Args:
        local: The local training of this process.
        data: The data module.
        client_id: The id of a client.
        size: Number of samples of the client, ≥ 1.
    """
    return Passes.over(
        size=size,
        batch_size=size if data.batch_size == "full" else data.batch_size,
        epochs=local.settings.epochs_of(client_id),
        drops_single=local.normalizes(client_id, size),
        drops_tail=data.drop_last,
    )


def check_schedulers(
    local: LocalTrainer,
    data: FederatedDataModule,
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Sequence[LRSchedulerConfig],
    rounds: int | None,
) -> None:
    """Refuse schedules that end too early, and report in one line if the schedulers begin anew in every round.

    Args:
        local: The local training of this process.
        data: The data module.
        optimizers: Optimizers of a client that nobody steps. Their learning rates stay as they are.
        schedulers: The schedulers of these optimizers.
        rounds: The planned rounds. None means no limit.

    Raises:
        SettingError: A schedule ends before the training.
    """
    client = local.client
    stepped = [entry for entry in schedulers if not entry.reduce_on_plateau]
    if not stepped:
        return
    name = type(client.lightning_modules()[-1]).__name__
    if not client.automatic_optimization:
        tell_by_hand(name, local.settings.clock)
        return
    # A scheduler of the server may watch a value with the same optimizers, whose rates must not be touched.
    is_known = len(stepped) == len(schedulers)
    own_stepping = overridden(client.lightning_modules()[-1], "lr_scheduler_step")
    works: list[Work] = []
    if is_known and not own_stepping and not overridden(client, "phases", ClientModule):
        works = works_of_clients(local, data, rounds=rounds)
    if local.settings.clock == "run":
        for entry in stepped:
            check_length(entry, optimizers[0], works=works, rounds=rounds)
    else:
        tell_rounds(name, optimizers, schedulers=stepped, works=works)


def tell_by_hand(name: str, clock: ClockKind) -> None:
    """Report that schedulers which a module steps by hand begin anew in every round.

    Args:
        name: Name of the module.
        clock: What schedules cover by `model.clock`.
    """
    sentence = f"the schedulers of {name} begin anew for every client and round, because {name} steps them itself"
    if clock == "run":
        sentence += (
            "; model.clock: run holds for trainer.current_epoch, global_step and the like, so compute rates of them"
        )
    rank_zero_info(sentence)


def tell_rounds(
    name: str,
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Sequence[LRSchedulerConfig],
    works: Sequence[Work],
) -> None:
    """Report that schedulers begin anew in every round, and which of them have no use.

    Args:
        name: Name of the module.
        optimizers: Optimizers of a client.
        schedulers: The schedulers that are stepped while a client trains.
        works: What the clients train in a round. Empty if that is not known.

    Raises:
        SettingError: A schedule is too short for every client.
    """
    beginning = f"the schedulers of {name} begin anew for every client and round (model.clock: round)"
    for entry in schedulers:
        if not works:
            break
        events = [events_of_round(work, entry.interval) for work in works]
        rates = rates_of_round(entry, optimizers[0], least=min(events), most=max(events))
        fault = useless(rates, entry.interval, max(events))
        if fault:
            kind = type(entry.scheduler).__name__
            rank_zero_info(
                f"{beginning}, within which {kind} {fault}; give them the number of a client's local steps "
                f"(trainer.estimated_stepping_batches), or set model.clock: run"
            )
            return
    rank_zero_info(beginning)


def check_length(entry: LRSchedulerConfig, optimizer: Optimizer, *, works: Sequence[Work], rounds: int | None) -> None:
    """Refuse a schedule that ends before all rounds of the largest client.

    Args:
        entry: The scheduler, which is stepped.
        optimizer: Its optimizer, whose learning rates are put back.
        works: What the clients train in a round. Empty if that is not known.
        rounds: The planned rounds. None means no limit, and one round is tried.

    Raises:
        SettingError: The schedule is too short.
    """
    scheduler: Any = entry.scheduler
    due = [work.num_due(entry.interval, entry.frequency, rounds or 1) for work in works]
    num_steps = max(due, default=0)
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < num_steps:
        fault = f"total_steps={scheduler.total_steps} for {num_steps}"
        raise SettingError(short_sentence(entry, "run", fault))
    with rates_put_back(optimizer):
        for _ in range(min(num_steps, MAX_CHANGES)):
            try:
                scheduler.step()
            except Exception as error:
                raise SettingError(short_sentence(entry, "run", f"{type(error).__name__}: {error}")) from error


def works_of_clients(local: LocalTrainer, data: FederatedDataModule, rounds: int | None) -> list[Work]:
    """Return what the clients with batches train in a round, each amount once, without phases of a method.

    Args:
        local: The local training.
        data: The data module.
        rounds: The planned rounds. None means no limit.
    """
    clients: dict[tuple[int, int, bool], int] = {}
    for client_id, sizes in sizes_of_clients(data, rounds).items():
        for size in sizes:
            key = (size, local.settings.epochs_of(client_id), local.normalizes(client_id, size))
            clients.setdefault(key, client_id)
    works = [work_of(local, data, client_id, size=size) for (size, _, _), client_id in clients.items() if size]
    return [work for work in works if work.num_steps]


def work_of(local: LocalTrainer, data: FederatedDataModule, client_id: int, *, size: int) -> Work:
    """Return what a client trains in a round with so many samples, without phases of a method.

    Args:
        local: The local training.
        data: The data module.
        client_id: Id of a client.
        size: Number of samples of the client, ≥ 1.
    """
    settings = local.settings
    passes = passes_of(local, data, client_id, size=size)
    batch_limit: int | None = None
    if data.pooled:
        # The one client makes the steps of a cohort.
        batch_limit = ceil(data.work_of(client_id, 0) * passes.epochs * passes.steps - 1e-9)
    return Work.of(
        passes,
        round_idx=0,
        num_samples=size,
        accumulated=settings.accumulate_grad_batches,
        batch_limit=batch_limit,
        step_limit=settings.max_local_steps,
    )


def events_of_round(work: Work, interval: str) -> int:
    """Return the number of local epochs, or of optimizer steps, of a round.

    Args:
        work: What a client trains.
        interval: `epoch` or `step`.
    """
    return work.num_epochs if interval == "epoch" else work.num_steps


def useless(rates: Sequence[Sequence[float]], interval: str, events: int) -> str:
    """Return why a scheduler has no use within a round, or an empty text.

    Args:
        rates: Learning rates by parameter group, for the local epochs or steps of a round in order.
        interval: `epoch` or `step`.
        events: Number of local epochs or steps of a client in a round.
    """
    unit = f"local {interval}"
    for index, row in enumerate(rates):
        if not any(row):
            return f"sets the learning rate to 0 in {unit} {index + 1} of {events}"
    if all(row == rates[0] for row in rates):
        number = f"1 {unit}" if events == 1 else f"{events} {unit}s"
        return f"cannot change the learning rate, because a client has {number}"
    return ""


def rates_of_round(entry: LRSchedulerConfig, optimizer: Optimizer, *, least: int, most: int) -> list[list[float]]:
    """Return the learning rates by parameter group, for the local epochs or steps of a round in order.

    Args:
        entry: The scheduler, which is stepped.
        optimizer: Its optimizer, whose learning rates are put back.
        least: Smallest number of local epochs or steps of a client, ≥ 1.
        most: Largest number of them.

    Raises:
        SettingError: The schedule is too short for every client.
    """
    scheduler: Any = entry.scheduler
    last = min(most, MAX_CHANGES)
    with rates_put_back(optimizer):
        rates = [current_rates(optimizer)]
        for event in range(1, last + 1):
            if event % entry.frequency == 0:
                try:
                    scheduler.step()
                except Exception as error:
                    if event <= least:
                        fault = f"{type(error).__name__}: {error}"
                        raise SettingError(short_sentence(entry, "round", fault)) from error
                    # The schedule ends the training of the clients with so many steps.
                    break
            if event < last:
                rates.append(current_rates(optimizer))
    return rates


@contextmanager
def rates_put_back(optimizer: Optimizer) -> Iterator[None]:
    """Context in which schedulers may change learning rates without a step of the optimizer."""
    rates = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
