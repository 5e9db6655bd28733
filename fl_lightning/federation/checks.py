"""Checks at start: of the Trainer's settings, of a method's needs, and of combinations."""

from collections.abc import Sequence, Sized

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.utilities import rank_zero_info
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from fl_lightning.aggregation import Aggregator, UpdateTransform
from fl_lightning.client import ClientModule
from fl_lightning.client.hooks import overridden
from fl_lightning.client.optimizers import needs_closure, parse_optimizers
from fl_lightning.client.progress import AccumulatedLR
from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import ClientParallelStrategy
from fl_lightning.types import CONDITIONS
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
"""Lightning's callbacks that have no meaning in a federation, and what to do instead."""

CALLBACKS = ("pytorch_lightning.callbacks.", "lightning.pytorch.callbacks.")
"""Where Lightning's packages have their callbacks."""

FAR = 0.1
"""Share of the way to the aggregate below which a server's step is told of."""

Needs = list[tuple[str, frozenset[str]]]
"""Needs of client, server module, rule and codec, with their names."""

LOOKING = ("on_client_start", "on_client_epoch_end", "on_client_end")
"""Hooks of callbacks that look at the client's module while it is trained, or when it was."""

SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
"""Strategies that spread one model over devices."""


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that spread something else than clients over devices.

    Raises:
        ValueError: naming the strategy and what to set instead.
    """
    processes = trainer.num_devices * trainer.num_nodes
    strategy = trainer.strategy
    sharded = [kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in SHARDED]
    if sharded:
        raise ValueError(
            f"a client is trained whole on one device, where its entries are read to be sent, so that {sharded[0]}, "
            f"which spreads them over devices, is refused; freeze a part (it takes neither gradients nor traffic), or "
            f"train in bf16-mixed"
        )
    if processes > 1 and not isinstance(strategy, ClientParallelStrategy):
        raise ValueError(
            f"clients, not batches, are spread over processes: trainer.strategy must be client_parallel, got "
            f"{type(strategy).__name__} with {processes} devices; set that strategy or trainer.devices=1"
        )


def check_trainer(trainer: Trainer) -> None:
    """Refuse settings of the Trainer that would change the meaning of a round.

    Raises:
        ValueError: naming the setting, its value and what to set instead.
    """
    overfit = getattr(trainer, "overfit_batches", 0)
    interval = getattr(trainer, "val_check_interval", None)  # a time is kept elsewhere
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
    if interval is None or (isinstance(interval, float) and interval < 1):
        raise ValueError(
            f"the global model exists once a round: trainer.val_check_interval must be 1.0, got "
            f"{'a time' if interval is None else interval}; use trainer.check_val_every_n_epoch to evaluate less often"
        )
    if overfit:
        raise ValueError(
            f"trainer.overfit_batches={overfit} has no meaning in a federation; use a source with "
            f"fewer samples, or model.max_local_steps"
        )
    if trainer.precision in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"):
        raise ValueError(
            f"weights in half precision cannot take a small update: trainer.precision={trainer.precision} is refused; "
            f"use bf16-mixed"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        check_callback(callback)


def check_callback(callback: Callback) -> None:
    """Refuse callbacks that count something else than rounds, or need the clients' optimizer, batches or entries.

    Raises:
        ValueError: naming what to set instead.
    """
    kinds = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith(CALLBACKS)}
    for kind in kinds & REFUSED.keys():
        raise ValueError(f"{type(callback).__name__} {REFUSED[kind]}")
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


def check_transforms(transforms: Sequence[UpdateTransform], world: int) -> None:
    """Refuse transforms that keep something, where each process would keep its own.

    Raises:
        ValueError: naming the transform.
    """
    for transform in transforms if world > 1 else ():
        if type(transform).state_dict is not UpdateTransform.state_dict:
            raise ValueError(
                f"a transform that keeps something between rounds sees the clients of its own process only, and "
                f"{type(transform).__name__} has a state_dict; set trainer.devices=1, or keep it in a ServerModule"
            )


def check_data(trainer: Trainer, local_epochs: int | list[int]) -> FederatedDataModule:
    """Get the Trainer's data module.

    Raises:
        TypeError: if it is none of ours.
        ValueError: if `local_epochs` is a list for another number of clients.
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


def check_streams(data: FederatedDataModule, max_batches: int | None, chunk: int | str, fits: bool) -> None:
    """Let the passes over clients' streams, where they have any, end after so many batches.

    Raises:
        ValueError: a fit without that number, or one that trains several clients at once.
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
    """Refuse a server optimizer that asks for more than one gradient, and a scheduler that asks for a metric.

    Raises:
        ValueError: naming the class.
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


def tell_server_rate(optimizer: Optimizer) -> None:
    """Report how far a server's SGD moves the model where that is little: a share of the way to the rule's weights."""
    group = optimizer.param_groups[0]
    if type(optimizer) is SGD and float(group["lr"]) < FAR * (1 - group["momentum"]):
        rank_zero_info(
            f"server_optimizer SGD has lr={float(group['lr']):g}: a round moves the global model by that share of the "
            f"way to the clients' aggregate; lr=1 takes the aggregate as it is (torch's own default is 0.001)"
        )


def tell_epochs(local_epochs: int | list[int]) -> None:
    """Report that nothing is trained where all clients have no local epochs."""
    if not any(as_list(local_epochs)):
        rank_zero_info(
            f"model.local_epochs={local_epochs}: no client trains, but in epochs that its method counts by itself; "
            f"1 is one pass over a client's data"
        )


def check_shared(
    client: ClientModule, aggregator: Aggregator, server_optimizer: object, codec: object, trainable: Sized
) -> None:
    """Refuse a rule other than the mean, a server optimizer and a codec where clients share no trainable entries.

    And a codec where they do not start from what they were sent.

    Raises:
        ValueError: naming the setting.
    """
    if trainable:
        if codec is not None and client.own_start:
            raise ValueError(
                f"{type(codec).__name__} codes what moved since weights were sent, and clients of "
                f"{type(client).__name__} start from models of their own; leave model.codec unset"
            )
        return
    if type(aggregator) is not Aggregator:
        raise ValueError(
            f"{type(aggregator).__name__} makes one set of weights of the clients', but those of "
            f"{type(client).__name__} share none that is trained; leave model.aggregator unset, or make "
            f"fewer entries personal"
        )
    for name, part in (("server_optimizer", server_optimizer), ("codec", codec)):
        if part is not None:
            kind = type(part).__name__ if name == "codec" else f"a {name}"
            raise ValueError(
                f"{kind} needs trainable entries that the clients share, got none; leave it unset "
                f"({type(client).__name__} shares none here)"
            )


def check_needs(client: ClientModule, needs_by_name: Needs, data: FederatedDataModule, trainer: Trainer) -> None:
    """Refuse, before any client trains, data and settings that lack what client, server module, rule or codec needs.

    Raises:
        ValueError: naming who needs what.
    """
    for name, needs in needs_by_name:
        for split in sorted(needs - CONDITIONS):
            try:
                data.split(split)
            except ValueError as error:
                raise ValueError(f"{name} needs the split {split!r}: {error}") from None
        if "logits" in needs and client.module is not None:
            raise ValueError(
                f"{name} needs the logits of a net, got module={type(client.module).__name__}; give the client net= "
                f"(a factory of a classifier) instead"
            )
        if "start" in needs and client.own_start:
            raise ValueError(
                f"{name} stretches the way from the weights that the server sent to those that a client sends, but a "
                f"{type(client).__name__} starts from a model of its own; leave model.aggregator unset"
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


def check_accumulated_lr(client: ClientModule, needs_by_name: Needs) -> None:
    """Refuse a local optimizer whose accumulated lr E_i is not defined, where it is needed.

    The net must exist.

    Raises:
        ValueError: naming who needs it, and the optimizer.
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
        raise ValueError(
            f"{names[0]} needs to know how far the local optimizer travels, which is defined for one "
            f"torch.optim.SGD with one learning rate, got {', '.join(type(o).__name__ for o in optimizers)}; set that "
            f"optimizer"
        )


def check_carried(
    client: ClientModule, transforms: Sequence[UpdateTransform], batch_hooks: Sequence[str], trainer: Trainer
) -> None:
    """Refuse what no message carries to clients that are elsewhere.

    Args:
        client: the module.
        transforms: of updates.
        batch_hooks: names of hooks of callbacks that the client's modules make.
        trainer: of the server.

    Raises:
        ValueError: naming it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    watching = [callback for callback in others if any(hasattr(callback, hook) for hook in LOOKING)]
    metrics = [name for name, part in client.named_modules() if isinstance(part, Metric)]
    sides = [t for t in transforms if overridden(t, "on_client", UpdateTransform)]
    keeping = [t for t in sides if overridden(t, "state_dict", UpdateTransform)]
    rules = (
        ([type(callback).__name__ for callback in watching], "looks at clients while they are trained"),
        (batch_hooks, "of a callback that the client makes is called at the server only"),
        (metrics, "is a metric object that counts a client's samples (model.metrics may)"),
        ([type(transform).__name__ for transform in keeping], "keeps a state over all clients"),
        (["client_parallel"] if trainer.world_size > 1 else [], "spreads clients over processes of the server"),
    )
    for names, rule in rules:
        if names:
            raise ValueError(f"{names[0]} {rule}, but the clients are at nodes of their own; leave it out")


# --- privacy
