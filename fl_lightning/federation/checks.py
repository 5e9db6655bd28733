"""Checks at the start of a run: settings of the Trainer, needs of a method, and combinations of settings."""

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import MetricCollection

from fl_lightning.aggregation import Aggregator, ServerModule, UpdateTransform
from fl_lightning.client import ClientModule
from fl_lightning.client.hooks import STEP_HOOKS, overridden
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.optimizers import needs_closure, parse_optimizers
from fl_lightning.client.progress import AccumulatedLR
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.clients import ClientSamples
from fl_lightning.data.holdout import SETTINGS
from fl_lightning.data.owners import SplitElsewhere
from fl_lightning.data.schema import has_unknown_classes
from fl_lightning.data.stragglers import Stragglers
from fl_lightning.distributed import ClientParallelStrategy
from fl_lightning.engines.deployed import own_step
from fl_lightning.engines.training import check_normalized
from fl_lightning.functional.classes import class_labels
from fl_lightning.types import CONDITIONS, FineTuning
from fl_lightning.utils.packages import is_of_lightning, is_of_twin, lightning_kinds
from fl_lightning.utils.settings import as_list

REFUSED = {
    "StochasticWeightAveraging": (
        "averages the weights along one optimizer's steps and adds an epoch for BatchNorm, which would be a round; "
        "leave it out, or take EMAWeightAveraging, which averages over rounds, or FedEXP, which averages the last two"
    ),
    "LearningRateFinder": (
        "(Tuner.lr_find) tries learning rates of the optimizer that the Trainer steps, which is the server's; leave "
        "it out, and compare short runs with several model.client.optimizer.lr"
    ),
    "BatchSizeFinder": (
        "(Tuner.scale_batch_size) tries sizes of the Trainer's batch, which is a round; leave it out, and set "
        "data.batch_size"
    ),
    "BaseFinetuning": (
        "adds what it unfreezes to the optimizer that the Trainer steps, which is the server's; freeze and unfreeze "
        "loop.client by requires_grad_ in on_train_epoch_start of a callback: what is trained is asked every round"
    ),
    "ModelPruning": (
        "replaces parameters, which are then not those that the clients share; prune the trained client.ckpt"
    ),
    "GradientAccumulationScheduler": (
        "counts the Trainer's batches, of which a round has one; leave it out, and set model.accumulate_grad_batches"
    ),
    "SpikeDetection": (
        "compares the losses of single steps, and a step of the Trainer is a round; leave it out, and set "
        "model.faults.max_update_norm"
    ),
}
"""Callbacks of Lightning that have no meaning in a federation, with the reason and what to do instead."""

SMALL_STEP = 0.1
"""The share of the way to the aggregate below which the step of a server optimizer is reported."""

MAX_ROUNDS = 10_000
"""Steps of the server's scheduler that are tried at the start. A longer schedule is judged by its first steps."""

HALF_PRECISIONS = ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")
"""Precisions of the Trainer that keep the weights in half precision."""

Needs = list[tuple[str, frozenset[str]]]
"""The needs of client, server module, aggregator and codec, each with its name."""

CLIENT_HOOKS = ("on_client_start", "on_client_epoch_end", "on_client_end")
"""Hooks of callbacks that get the module of a client during or after its training."""

SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
"""Strategies that spread one model over devices."""

# --- the Trainer ---


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that spread other things than clients over devices.

    Raises:
        ValueError: The strategy spreads a model or batches over devices.
    """
    strategy = trainer.strategy
    sharded = [kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in SHARDED]
    if sharded:
        raise ValueError(
            f"a client is trained whole on one device, where its entries are read to be sent, so that {sharded[0]}, "
            f"which spreads them over devices, is refused; freeze a part (it takes neither gradients nor traffic), or "
            f"train in bf16-mixed"
        )
    processes = trainer.num_devices * trainer.num_nodes
    if processes > 1 and not isinstance(strategy, ClientParallelStrategy):
        raise ValueError(
            f"clients, not batches, are spread over processes: trainer.strategy must be client_parallel, got "
            f"{type(strategy).__name__} with {processes} devices; set that strategy or trainer.devices=1"
        )


def check_trainer(trainer: Trainer) -> None:
    """Refuse settings of the Trainer that would change the meaning of a round.

    Raises:
        ValueError: A setting or a callback does not fit rounds.
    """
    check_strategy(trainer)
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"the clients' gradients are clipped by model.clip_norm, not by trainer.gradient_clip_val="
            f"{trainer.gradient_clip_val}; set model.clip_norm"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"the clients' gradients are accumulated by model.accumulate_grad_batches, not by "
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}; set the model's"
        )
    if trainer.limit_train_batches not in (1, 1.0) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ValueError(
            f"a round is one batch and cannot be cut: trainer.limit_train_batches must stay unset, got "
            f"{trainer.limit_train_batches}; use data.participation or model.max_local_steps for less work a round"
        )
    # The Trainer keeps a time as another attribute, and then has no interval.
    interval = getattr(trainer, "val_check_interval", None)
    if interval is None or (isinstance(interval, float) and interval < 1):
        raise ValueError(
            f"the global model exists once a round: trainer.val_check_interval must be 1.0, got "
            f"{'a time' if interval is None else interval}; use trainer.check_val_every_n_epoch to evaluate less often"
        )
    overfit = getattr(trainer, "overfit_batches", 0)
    if overfit:
        raise ValueError(
            f"trainer.overfit_batches={overfit} has no meaning in a federation; use a source with "
            f"fewer samples, or model.max_local_steps"
        )
    if trainer.precision in HALF_PRECISIONS:
        raise ValueError(
            f"weights in half precision cannot take a small update: trainer.precision={trainer.precision} is refused; "
            f"use bf16-mixed"
        )
    reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if reloads:
        raise ValueError(
            f"the clients' data are prepared once a run: trainer.reload_dataloaders_every_n_epochs must stay 0, got "
            f"{reloads}; leave it unset, and draw anew by transforms of the samples or by data.schedule"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        check_callback(callback)


def check_callback(callback: Callback) -> None:
    """Refuse callbacks of Lightning that do not count rounds, or that need a client's optimizer, batches or entries.

    Raises:
        ValueError: The callback has no meaning in a federation.
    """
    kinds = lightning_kinds(callback)
    for kind in kinds & REFUSED.keys():
        raise ValueError(f"{type(callback).__name__} {REFUSED[kind]}")
    if is_averaging(callback) and is_of_twin(callback):
        raise ValueError(
            f"{type(callback).__name__} averages modules of lightning.pytorch, and a FederatedLoop is a module of "
            f"pytorch_lightning; import the callback from pytorch_lightning.callbacks"
        )
    if "ModelCheckpoint" not in kinds:
        return
    if "'train_time_interval': None" not in callback.state_key:
        raise ValueError(
            "ModelCheckpoint(train_time_interval=…) never writes in a federation; use every_n_epochs (rounds)"
        )
    if "'every_n_train_steps': 0" not in callback.state_key:
        raise ValueError(
            "ModelCheckpoint(every_n_train_steps=…) counts batches, of which a round has one; use every_n_epochs "
            "(rounds)"
        )


def averaging_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks that average the weights of a fit, such as Lightning's `EMAWeightAveraging`.

    Outside of a fit there are none, because the averages of a callback may belong to another checkpoint.
    """
    if trainer.state.fn != "fit":
        return []
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if is_averaging(callback)]


def is_averaging(callback: Callback) -> bool:
    """Return True for a callback that averages weights. It may be of `lightning.pytorch`."""
    return any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__)


def check_averages(callbacks: Sequence[Callback], rule: Aggregator, server_module: ServerModule) -> None:
    """Refuse several parts that each evaluate averages of their own, and averages of what no client deploys.

    Args:
        callbacks: The callbacks that average weights.
        rule: The rule of the federation.
        server_module: The server module.

    Raises:
        ValueError: A callback averages weights, and another callback, the rule or the server module does too, or the
            server module gives clients what they deploy.
    """
    if not callbacks:
        return
    first, *others = callbacks
    if overridden(server_module, "deployment", ServerModule):
        raise ValueError(
            f"{type(first).__name__} averages the global model, and clients deploy what {type(server_module).__name__} "
            f"gives them besides, got both; remove {type(first).__name__} from trainer.callbacks"
        )
    averaging: list[object] = list(others)
    averaging += [part for part in (rule, server_module) if part.averages]
    if averaging:
        raise ValueError(
            f"one part of a federation may average the weights that are evaluated, got {type(first).__name__} and "
            f"{type(averaging[0]).__name__}; remove {type(first).__name__} from trainer.callbacks"
        )


def check_evaluates(client: ClientModule, metrics: MetricCollection | None, **every: int | None) -> None:
    """Refuse an evaluation in which nothing is measured.

    Args:
        client: The client.
        metrics: The metrics of predictions and targets. None is no metric.
        every: Number of rounds from one evaluation to the next by the name of the setting. None is no evaluation.

    Raises:
        ValueError: The user's module has no step of an evaluation, and there are no metrics.
    """
    if measures(client, metrics):
        return
    module = client.module
    for name, rounds in every.items():
        if rounds is not None:
            raise ValueError(
                f"model.{name} needs a validation_step or test_step of {type(module).__name__}, or model.metrics, got "
                f"none; define one, or leave model.{name} unset"
            )


def measures(client: ClientModule, metrics: MetricCollection | None) -> bool:
    """Return True if an evaluation of a client has values: those of a net, of metrics or of the module's own step.

    Args:
        client: The client.
        metrics: The metrics of predictions and targets. None is no metric.
    """
    module = client.module
    return module is None or metrics is not None or own_step(module, "validation") is not None


def check_test_samples(data: FederatedDataModule) -> None:
    """Refuse an evaluation of clients none of which has test samples.

    Args:
        data: The data of the run.

    Raises:
        ValueError: No client has test samples.
    """
    for clients in (data.training_clients, data.unseen_clients):
        if clients and not any(data.has_test_samples(client_id) for client_id in clients):
            which = "clients" if clients is data.training_clients else "clients of data.unseen"
            raise ValueError(
                f"model.evaluate_clients_every needs test samples of the {which}, and none of them has any; give the "
                f"data a test split (test_dataloader), or leave model.evaluate_clients_every unset"
            )


def check_fine_tuning(tuning: FineTuning, client: ClientModule, data: FederatedDataModule) -> None:
    """Refuse a fine-tuning that no client could do.

    Args:
        tuning: The settings.
        client: The client, whose net is built.
        data: The data of the run.

    Raises:
        ValueError: The samples are streams, a pattern of `trains` matches no parameter that is trained, or BatchNorm
            would see batches of one sample.
    """
    if data.has_streams:
        raise ValueError(
            "model.fine_tuning needs training samples that a client can go through again, and these are streams; leave "
            "it unset"
        )
    names = [name for name, parameter in client.named_parameters() if parameter.requires_grad]
    for pattern in tuning.phase.trains or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"model.fine_tuning.trains must match parameters that are trained, got {pattern!r}, which matches none "
                f"of {names[:8]}; name such"
            )
    if any(isinstance(part, BATCH_NORMS) for part in client.modules()) and tuning.batch_size is not None:
        check_normalized(tuning.batch_size, "model.fine_tuning.batch_size")


def check_training_samples(has_global: bool, data: FederatedDataModule) -> None:
    """Refuse an evaluation on the training samples of all clients where there is no model or there are no samples.

    Args:
        has_global: Whether there is a global model.
        data: The data of the run.

    Raises:
        ValueError: The clients share no weights, or their samples are a stream or elsewhere.
    """
    if not has_global:
        raise ValueError(
            "model.evaluate_training_every needs a global model, but the clients share no weights; leave it unset"
        )
    if data.has_streams or isinstance(data.split("train"), SplitElsewhere):
        raise ValueError(
            "model.evaluate_training_every needs the clients' training samples in this process, but they are a stream "
            "or at the clients; leave it unset"
        )


def check_transforms(transforms: Sequence[UpdateTransform], world: int) -> None:
    """Refuse transforms with a state in a run of several processes, each of which would have its own state.

    Args:
        transforms: The transforms of updates.
        world: The number of processes.

    Raises:
        ValueError: A transform has a state, and there are several processes.
    """
    if world == 1:
        return
    for transform in transforms:
        if type(transform).state_dict is not UpdateTransform.state_dict:
            raise ValueError(
                f"a transform with a state_dict sees only the clients of its own process, got "
                f"{type(transform).__name__} with {world} processes; set trainer.devices=1, or keep the state in a "
                f"ServerModule"
            )


# --- data ---


def check_data(trainer: Trainer, local_epochs: int | list[int]) -> FederatedDataModule:
    """Return the data module of the Trainer.

    Args:
        trainer: The Trainer.
        local_epochs: The local epochs of all clients, or a list with those of each client.

    Raises:
        TypeError: The data module is no `FederatedDataModule`.
        ValueError: `local_epochs` is a list for another number of clients.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, FederatedDataModule):
        raise TypeError(
            f"a FederatedLoop needs datamodule=FederatedDataModule(...), got {type(data).__name__}; wrap your data "
            f"in one"
        )
    if isinstance(local_epochs, list) and len(local_epochs) != data.num_clients:
        raise ValueError(
            f"local_epochs as a list needs one number per client ({data.num_clients}), got {len(local_epochs)}"
        )
    return data


def check_attackers(client: ClientModule, data: FederatedDataModule) -> None:
    """Refuse an attacker that never trains, and so would never attack.

    Args:
        client: The client.
        data: The data module.

    Raises:
        ValueError: A malicious client is one of `data.unseen`.
    """
    attackers: Iterable[int] = getattr(client, "attackers", ())
    never = sorted(set(attackers).intersection(data.unseen_clients))
    if never:
        raise ValueError(
            f"attackers must be clients that train, got {sorted(attackers)} with client {never[0]} of data.unseen; "
            f"name others"
        )


def check_cohorts(data: FederatedDataModule, min_clients: int, *, most: int) -> None:
    """Refuse cohorts that have too few clients in every round.

    Args:
        data: The data module.
        min_clients: The number of clients that a round needs.
        most: The largest number of clients of a server step.

    Raises:
        ValueError: No client can take part, fewer than a round needs, or none has samples.
    """
    samples = data.client_samples()
    if isinstance(samples, ClientSamples) and not len(samples.dealt.indices):
        raise ValueError(
            "data.partition must give training samples to at least one client, got none for all of them; give samples, "
            "or another data.partition"
        )
    if most == 0:
        raise ValueError(
            f"data.availability must let a client take part, got {data.availability}, with which no round has clients; "
            f"raise a share above 0"
        )
    if most < min_clients:
        raise ValueError(
            f"model.faults.min_clients must be at most the clients of a round ({most}), got {min_clients}, with which "
            f"every round leaves the model as it was; lower it, or raise data.participation"
        )


def check_streams(data: FederatedDataModule, max_batches: int | None, chunk: int | str, fits: bool) -> None:
    """Limit the passes over the streams of the clients, if the clients have streams.

    Args:
        data: The data module.
        max_batches: The maximal number of batches of a client in a round. None means no limit.
        chunk: The number of clients that are trained at once, or `auto`.
        fits: Whether the run is a fit.

    Raises:
        ValueError: A fit with streams has no limit, or it trains several clients at once.
    """
    if max_batches is not None:
        data.limit_streams(max_batches)
    if not (fits and data.has_streams):
        return
    if max_batches is None:
        raise ValueError(
            "the clients' samples are streams, of which a pass may have no end: model.max_local_steps must be set, got "
            "None; 10 lets a client take ten steps a round"
        )
    if chunk != 1:
        raise ValueError(
            f"clients are trained at once where the number of their batches is known, which streams do not have: "
            f"model.chunk must be 1, got {chunk}"
        )


def check_server_optimizer(optimizer: Optimizer, scheduler: object) -> None:
    """Refuse a server optimizer that needs several gradients a step, and a scheduler that needs a metric.

    Args:
        optimizer: The server optimizer.
        scheduler: The scheduler of its learning rate, or None.

    Raises:
        ValueError: The optimizer needs a closure, or the scheduler needs a metric.
    """
    if needs_closure(optimizer):
        raise ValueError(
            f"a server_optimizer is given one gradient a round, and {type(optimizer).__name__} asks for more; take "
            f"one whose step needs no closure, such as SGD or Adam"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "a server_lr_scheduler is stepped once a round, without a metric, got ReduceLROnPlateau; take one that "
            "counts rounds, such as StepLR"
        )


def check_server_steps(
    factory: Callable[[Iterable[Any]], Optimizer],
    scheduler_factory: Callable[[Optimizer], LRScheduler] | None,
    *,
    dimensions: Iterable[int],
    rounds: int | None,
) -> None:
    """Refuse a server optimizer and a scheduler that fail in a later round, or never move the model.

    Copies of both are stepped once for each round, with small parameters.

    Args:
        factory: Makes the server optimizer of parameters.
        scheduler_factory: Makes the scheduler of the server optimizer. None means a constant learning rate.
        dimensions: Number of dimensions of each parameter.
        rounds: Number of planned rounds. None means that it is not known.

    Raises:
        ValueError: The optimizer takes no dense gradient, the schedule ends before the rounds, or the learning rate is
            0 in every round, or not finite.
    """
    params = [Parameter(torch.zeros((1,) * size, dtype=torch.float64)) for size in dimensions]
    try:
        optimizer = factory(params)
        scheduler = None if scheduler_factory is None else scheduler_factory(optimizer)
    except Exception:
        # The functions have worked with the model's own parameters, and may depend on their shapes.
        return
    name = type(optimizer).__name__
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"model.server_optimizer must step on dense gradients, got {name}, which raised: {error}; take another "
            f"one, such as SGD or Adam"
        ) from error
    rates = [current_rates(optimizer)]
    if scheduler is not None:
        rates = server_rates(scheduler, optimizer, rounds or 1)
    for rate in chain.from_iterable(rates):
        if not math.isfinite(rate):
            raise ValueError(
                f"model.server_optimizer must have a learning rate that is finite in every round, got {rate} from "
                f"{name}; set its lr to a number such as 1.0"
            )
    if not any(any(row) for row in rates):
        raise ValueError(
            f"model.server_optimizer must move the model, got a learning rate of 0 in every round from {name}; raise "
            f"its lr"
        )


def server_rates(scheduler: LRScheduler, optimizer: Optimizer, rounds: int) -> list[list[float]]:
    """Return the learning rates of the server by parameter group, for the rounds in order.

    Args:
        scheduler: The scheduler, which is stepped.
        optimizer: Its optimizer.
        rounds: Number of rounds, ≥ 1.

    Raises:
        ValueError: The scheduler fails before the last round ends.
    """
    rates = [current_rates(optimizer)]
    for step in range(1, min(rounds, MAX_ROUNDS) + 1):
        try:
            scheduler.step()
        except Exception as error:
            raise ValueError(
                f"model.server_lr_scheduler must have a learning rate for each of the {rounds} rounds, got "
                f"{type(scheduler).__name__}, which raised in step {step}: {type(error).__name__}: {error}; give it at "
                f"least {rounds + 1} rates, or {rounds} steps"
            ) from error
        rates.append(current_rates(optimizer))
    return rates[:rounds]


def current_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer, by parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def tell_server_rate(optimizer: Optimizer) -> None:
    """Report a server optimizer SGD that moves the model only a small share of the way to the aggregate."""
    if type(optimizer) is not SGD:
        return
    group = optimizer.param_groups[0]
    lr = float(group["lr"])
    if lr < SMALL_STEP * (1 - group["momentum"]):
        rank_zero_info(
            f"server_optimizer SGD has lr={lr:g}: a round moves the global model by that share of the "
            f"way to the clients' aggregate; lr=1 takes the aggregate as it is (torch's own default is 0.001)"
        )


def check_stragglers(local_work: object, local_epochs: int | list[int]) -> None:
    """Refuse stragglers that make fewer local epochs where a client has one, and so makes all of them.

    Args:
        local_work: The share of the local work, or the settings of stragglers.
        local_epochs: The local epochs of all clients, or a list with those of each client.

    Raises:
        ValueError: No client has two epochs.
    """
    if not isinstance(local_work, Stragglers) or not local_work.cuts:
        return
    most = max(as_list(local_epochs), default=0)
    if most < 2:
        raise ValueError(
            f"data.local_work with late=cut lets stragglers make fewer local epochs, so model.local_epochs must be at "
            f"least 2, got {most}; raise it, or give data.local_work a share of the batches, such as [0.1, 1.0]"
        )


def tell_epochs(local_epochs: int | list[int]) -> None:
    """Report that nothing is trained if no client has local epochs."""
    if not any(as_list(local_epochs)):
        rank_zero_info(
            f"model.local_epochs={local_epochs}: no client trains, except in epochs that its method counts by itself; "
            f"1 is one pass over a client's data"
        )


def tell_fine_tuning(client: ClientModule, tuning: FineTuning | None) -> None:
    """Report that the values of a method mean nothing, because nobody fine-tunes its clients.

    Args:
        client: The client.
        tuning: How clients are fine-tuned before they are tested. None means that they are not.
    """
    if client.needs_fine_tuning and tuning is None:
        rank_zero_info(
            f"a model of {type(client).__name__} means nothing before a client has fine-tuned it, and so do global/KEY "
            f"and local/KEY; set model.evaluate_clients_every and model.fine_tuning.epochs, and read local/tuned/KEY"
        )


# --- the client and the parts of the server ---


def check_shared(
    *,
    client: ClientModule,
    aggregator: Aggregator,
    server_optimizer: object,
    codec: object,
    bounds: Sequence[str],
    trainable: Sized,
) -> None:
    """Refuse parts that need trainable shared entries, if the clients share none.

    Clients that do not start from the entries that they are sent exclude some of these parts too.

    Args:
        client: The client module.
        aggregator: The aggregator. The mean needs no shared entries.
        server_optimizer: The factory of the server optimizer, or None.
        codec: The codec, or None.
        bounds: The names of settings that bound how far an update moves the shared entries.
        trainable: The names of the shared trainable entries.

    Raises:
        ValueError: A part needs shared entries, or clients that start from them.
    """
    if trainable:
        if client.own_start:
            check_own_start(
                client=client,
                aggregator=aggregator,
                server_optimizer=server_optimizer,
                codec=codec,
                bounds=bounds,
            )
        return
    if type(aggregator) is not Aggregator:
        raise ValueError(
            f"{type(aggregator).__name__} makes one set of weights of the clients', but those of "
            f"{type(client).__name__} share none that is trained; leave model.aggregator unset, or make "
            f"fewer entries personal"
        )
    unset = f"leave it unset ({type(client).__name__} shares none here)"
    if server_optimizer is not None:
        raise ValueError(f"a server_optimizer needs trainable entries that the clients share, got none; {unset}")
    if codec is not None:
        raise ValueError(f"{type(codec).__name__} needs trainable entries that the clients share, got none; {unset}")
    if bounds:
        raise ValueError(f"{bounds[0]} needs trainable entries that the clients share, got none; {unset}")


def check_own_start(
    *, client: ClientModule, aggregator: Aggregator, server_optimizer: object, codec: object, bounds: Sequence[str]
) -> None:
    """Refuse parts that need clients that start from the weights of the server.

    Args:
        client: The client module, whose clients start from models of their own.
        aggregator: The aggregator. The mean serves the evaluation.
        server_optimizer: The factory of the server optimizer, or None.
        codec: The codec, or None.
        bounds: The names of settings that bound how far an update moves the shared entries.

    Raises:
        ValueError: There is such a part.
    """
    start = f"clients of {type(client).__name__} start from models of their own"
    if codec is not None:
        raise ValueError(
            f"{type(codec).__name__} codes what moved since weights were sent, and {start}; leave model.codec unset"
        )
    if bounds:
        raise ValueError(f"{bounds[0]} bounds what moved since weights were sent, and {start}; leave it out")
    if type(aggregator) is not Aggregator:
        raise ValueError(
            f"{type(aggregator).__name__} makes the weights from which clients start, and {start}; leave "
            f"model.aggregator unset"
        )
    if server_optimizer is not None:
        raise ValueError(
            f"a server_optimizer steps the weights from which clients start, and {start}; leave "
            f"model.server_optimizer unset"
        )


def check_needs(client: ClientModule, needs_by_name: Needs, data: FederatedDataModule, trainer: Trainer) -> None:
    """Refuse data and settings that lack what client, server module, aggregator or codec needs.

    Args:
        client: The client module.
        needs_by_name: The needs of these parts, each with its name.
        data: The data module.
        trainer: The Trainer.

    Raises:
        ValueError: A part needs a split, a classifier or a setting that is missing.
    """
    for name, needs in needs_by_name:
        check_splits(name, needs, data)
        if "logits" in needs and client.module is not None:
            raise ValueError(
                f"{name} needs the logits of a net, got module={type(client.module).__name__}; give the client net= "
                f"(a factory of a classifier) instead"
            )
        if "start" in needs and client.own_start:
            raise ValueError(
                f"{name} stretches the way from the weights that the server sent to those that a client sends, but "
                f"clients of {type(client).__name__} start from models of their own; leave model.aggregator unset"
            )
        if "accumulated_lr" in needs and getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{name} counts local steps, which a gradient scaler may skip: trainer.precision={trainer.precision} "
                f"is refused; use bf16-mixed"
            )
        if "clients" in needs and data.pooled:
            raise ValueError(
                f"{name} needs several clients, and data.pooled=true (Centralized) leaves one, with the samples of "
                f"all; leave {name} out, or data.pooled"
            )


def check_targets(client: ClientModule, data: FederatedDataModule) -> None:
    """Refuse targets of which the cross-entropy of a net, or its accuracy, cannot be computed.

    A module of the user's own, and a method whose loss is the user's own, may read any targets.

    Args:
        client: The client.
        data: The data module, which is set up.

    Raises:
        ValueError: The targets are no numbers of classes, (n,).
    """
    losses = (client.training_step, client.local_loss)
    if client.module is not None or any(not module_name(loss).startswith("fl_lightning.") for loss in losses):
        return
    if data.is_unread:
        return
    batch = data.split("train").probe()
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return
    num_classes = client.num_classes if data.source.num_classes is None else data.source.num_classes
    found = unfit_targets(batch[1], num_classes)
    if found:
        raise ValueError(
            f"targets must be the number of a class for each sample with net=, got {found}; number the classes from 0, "
            f"or give module= with a loss of your own"
        )


def module_name(function: object) -> str:
    """Return the name of the Python module that defines a function, or an empty text for another callable."""
    return str(getattr(function, "__module__", ""))


def unfit_targets(targets: object, num_classes: int | None) -> str:
    """Return what targets are if they are no numbers of classes, and an empty text if they are.

    Args:
        targets: Targets of a few samples, as a batch holds them.
        num_classes: The number of classes C. None: it is not known.

    >>> import torch
    >>> unfit_targets(torch.tensor([0, 1]), 2), unfit_targets(torch.tensor([0.0, 1.0]), 2)
    ('', 'float32')
    >>> unfit_targets(torch.tensor([[0, 1]]), 2), unfit_targets(["cat"], 2)
    ('one-hot rows', 'str')
    """
    if not isinstance(targets, Tensor):
        is_list = isinstance(targets, list | tuple) and len(targets) > 0
        return type(targets[0]).__name__ if is_list else type(targets).__name__  # type: ignore[index]
    if targets.is_floating_point() or targets.is_complex():
        return str(targets.dtype).removeprefix("torch.")
    if targets.ndim == 2 and targets.shape[1] == 1:
        return f"a column of shape {tuple(targets.shape)}"
    is_one_hot = targets.ndim == 2 and bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())
    if is_one_hot and targets.shape[1] == num_classes:
        return "one-hot rows"
    labels = class_labels(targets)
    if num_classes is not None and labels.ndim == 1 and len(labels):
        for label in (int(labels.min()), int(labels.max())):
            if not 0 <= label < num_classes:
                return f"{label} of {num_classes} classes"
    return ""


def check_splits(name: str, needs: frozenset[str], data: FederatedDataModule) -> None:
    """Refuse data without a split that a part needs.

    Args:
        name: Name of the part.
        needs: The needs of the part.
        data: The data module.

    Raises:
        ValueError: The data have no such split, the split has no samples, or the part reads labels, and the split has
            none that are known.
    """
    if data.is_unread:
        # A prediction of new samples reads no split.
        return
    for split in sorted(needs - CONDITIONS):
        try:
            samples = data.split(split)
        except ValueError as error:
            raise ValueError(f"{name} needs the split {split!r}: {error}") from None
        if not len(samples):
            setting = SETTINGS.get(split, f"data.extra_splits.{split} (a source)")
            raise ValueError(f"{name} needs a {split} set with samples, got an empty one; set {setting}")
        if "labels" in needs and has_unknown_classes(samples):
            raise ValueError(
                f"{name} reads the labels of the split {split!r}, whose samples must be of classes of the training "
                f"data, got others; give data.extra_splits.{split} samples of these classes"
            )


def check_accumulated_lr(client: ClientModule, needs_by_name: Needs) -> None:
    """Refuse a local optimizer without an accumulated learning rate E_i, if a part needs the E_i.

    The net must be built.

    Args:
        client: The client module.
        needs_by_name: The needs of client, server module, aggregator and codec, each with its name.

    Raises:
        ValueError: A part needs the E_i, and the client does not send it or the optimizer does not define it.
    """
    names = [name for name, needs in needs_by_name if "accumulated_lr" in needs]
    if not names:
        return
    if not client.sends_counts:
        raise ValueError(
            f"{names[0]} needs to know the steps of each client, which {type(client).__name__} does not send, since "
            f"they tell how many samples it has; take another rule, or leave model.aggregator unset"
        )
    owner: LightningModule = client if client.module is None else client.module
    optimizers, _ = parse_optimizers(client.configure_optimizers(), type(owner).__name__)
    if not AccumulatedLR(optimizers, None).defined:
        given, _ = parse_optimizers(ClientModule.configure_optimizers(client), type(owner).__name__)
        if AccumulatedLR(given, None).defined:
            raise ValueError(
                f"{names[0]} needs to know how far the local optimizer travels, which is not defined for the steps of "
                f"{type(client).__name__}; take another rule, or leave model.aggregator unset"
            )
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"{names[0]} needs to know how far the local optimizer travels, which is defined for one "
            f"torch.optim.SGD with one learning rate, got {kinds}; set that optimizer"
        )


def check_carried(transforms: Sequence[UpdateTransform], batch_hooks: Sequence[str], trainer: Trainer) -> None:
    """Refuse what no message carries to clients on other machines.

    Args:
        transforms: The transforms of updates.
        batch_hooks: Names of the batch hooks of callbacks that the modules of the client make.
        trainer: The Trainer of the server.

    Raises:
        ValueError: The federation has a part that works only where the clients are.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        is_bar = is_of_lightning(callback, "ProgressBar")
        if not is_bar and any(hasattr(callback, hook) for hook in CLIENT_HOOKS):
            raise not_carried(type(callback).__name__, "looks at clients while they are trained")
    in_training = [name for name in batch_hooks if name in STEP_HOOKS]
    if in_training:
        raise not_carried(in_training[0], "of a callback that the client makes is called at the server only")
    for transform in transforms:
        is_at_client = overridden(transform, "on_client", UpdateTransform)
        if is_at_client and overridden(transform, "state_dict", UpdateTransform):
            raise not_carried(type(transform).__name__, "keeps a state over all clients")
    if trainer.world_size > 1:
        raise not_carried("client_parallel", "spreads clients over processes of the server")


def not_carried(name: str, rule: str) -> ValueError:
    """Return the error about a part that no message carries to the clients.

    Args:
        name: Name of the part.
        rule: What the part does.
    """
    return ValueError(f"{name} {rule}, but the clients are at nodes of their own; leave it out")
