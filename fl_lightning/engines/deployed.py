"""The score of what a client would deploy, on the client's own samples."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.checks import evaluation_arguments
from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.metric_states import fresh_metrics, parts_that_count
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientTestServices, attach_services, loader_suffix, world_size
from fl_lightning.engines.clock import trainer_of
from fl_lightning.engines.pass_callbacks import PassCallbacks, callbacks_of_pass, makers_of
from fl_lightning.functional.accuracy import answer_counts, answers_among
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics.user_metrics import arrays_of, count, update
from fl_lightning.types import Batch, ClientScore, Scoring, State
from fl_lightning.utils.batches import batch_length
from fl_lightning.utils.trainer_view import TrainerView

IMAGE_DIMS = 4
"""Number of dimensions of a batch of images (B, C, H, W)."""

EVALUATION = "evaluation"
"""Purpose of what is drawn in an evaluation. It is the same in each round and in a test of the trained model."""

Kind = Literal["validation", "test"]
"""The step of a module that evaluates it."""

STAGES = {
    "training": RunningStage.TRAINING,
    "validation": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
}
"""What a Trainer calls the stage in which a step of a module is called."""


def laid_out(x: Any, channels_last: bool) -> Any:
    """Return the inputs of a batch in the memory layout that the net expects.

    Args:
        x: The inputs of a batch. Only images (B, C, H, W) have another layout.
        channels_last: Whether images are laid out channels last.
    """
    if channels_last and isinstance(x, Tensor) and x.ndim == IMAGE_DIMS:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def own_step(module: LightningModule | None, kind: Kind) -> Kind | None:
    """Return which of its own steps evaluates a module at a client, or None if the module has none.

    Args:
        module: The user's module. None has no step.
        kind: The step that is asked for. A module that lacks it is evaluated by the other one.
    """
    kinds: tuple[Kind, Kind] = ("validation", "test") if kind == "validation" else ("test", "validation")
    for name in kinds:
        if module is not None and overridden(module, f"{name}_step"):
            return name
    return None


def score(
    client_id: int,
    predict: Callable[[Any], Tensor],
    batches: Iterable[Batch],
    *,
    device: torch.device,
    metrics: MetricCollection | None = None,
    channels_last: bool = False,
    classes: Sequence[int] | None = None,
) -> ClientScore:
    """Return the score of a classifier on the samples of one client.

    Args:
        client_id: The id of the client.
        predict: The predictor `x -> logits`.
        batches: Pairs (x, y).
        device: The device of the batches.
        metrics: Further metrics to evaluate, which are reset at the end. None evaluates only
            the accuracy.
        channels_last: Whether batches of images are laid out channels last.
        classes: The classes that may be answered. None means all.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    is_finite = torch.ones((), dtype=torch.bool, device=device)
    for x, y in batches:
        logits = predict(laid_out(x, channels_last))
        counts += answer_counts(logits if classes is None else answers_among(logits, classes), y)
        if metrics is not None:
            count(metrics, to_float32(logits), y)
            # A logit of −inf leaves a class out. The largest one is NaN or infinite if the predictions are no numbers.
            is_finite &= logits.amax(1).isfinite().all()
    correct, num_samples = counts.unbind()
    return ClientScore(
        client_id=client_id,
        num_samples=num_samples,
        correct=correct,
        metrics=taken(metrics),
        is_finite=is_finite,
    )


def taken(metrics: MetricCollection | None) -> State:
    """Return the values of metrics on the CPU by name, and reset the metrics.

    Matrices and curves are left out: they are kept of the global model only.
    """
    if metrics is None:
        return {}
    values = metrics.compute()
    metrics.reset()
    arrays = arrays_of(values)
    return {name: torch.as_tensor(value).cpu() for name, value in values.items() if name not in arrays}


class PassLoader:
    """Gives the batches of one loader in an evaluation at a client, and tells their sizes.

    Args:
        read: Reads the batches.
        sizes: Number of samples of each client whose batches these are, one client after the other.
        batch_size: Number of samples in a full batch.

    Attributes:
        dataset: Has the number of samples as its length.
        batch_size: Number of samples in a full batch.
    """

    def __init__(self, read: Callable[[], Iterable[Batch]], *, sizes: Iterable[int], batch_size: int) -> None:
        sizes = list(sizes)
        self.dataset = range(sum(sizes))
        self.batch_size = batch_size
        self._read = read
        self._length = sum(math.ceil(size / batch_size) for size in sizes)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._read())


SPLITS: Mapping[Kind, str] = {"validation": "val", "test": "test"}
"""What a Trainer calls the split of an evaluation in the names of its attributes, by the step."""

LOGGED_SO_FAR = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
"""Attributes of a Trainer in which a module finds the values that it has logged."""


def told_of_loaders(kind: Kind, loaders: Sequence[PassLoader]) -> dict[str, Any]:
    """Return what a Trainer tells of the loaders of an evaluation, by the names of its attributes.

    Args:
        kind: The step that evaluates the module.
        loaders: The loaders.
    """
    split = SPLITS[kind]
    return {
        f"num_{split}_batches": [len(loader) for loader in loaders],
        f"{split}_dataloaders": loaders[0] if len(loaders) == 1 else list(loaders),
    }


@contextmanager
def stage_of(
    client: ClientModule,
    kind: Kind | Literal["training"] | None,
    *,
    loaders: Sequence[PassLoader] = (),
    logged_so_far: Callable[[], Mapping[str, float]] = dict,
) -> Iterator[None]:
    """Context in which the modules of a client see a Trainer that evaluates, as in `validate` or `test`, or trains.

    Args:
        client: The client. Its setter passes the Trainer on to the module that it is built around.
        kind: The step that evaluates the module, or `training`, as in a fit. None changes nothing.
        loaders: The loaders of an evaluation.
        logged_so_far: Returns what the module has logged in an evaluation so far, by key.
    """
    trainer = trainer_of(client)
    if kind is None or trainer is None:
        yield
        return
    fn = TrainerFn.FITTING if kind == "training" else trainer.state.fn
    answers = {
        "training": kind == "training",
        "validating": kind == "validation",
        "testing": kind == "test",
        "evaluating": kind != "training",
        "state": TrainerState(status=TrainerStatus.RUNNING, fn=fn, stage=STAGES[kind]),
    }
    makers: dict[str, Callable[[str], Any]] = {}
    if kind != "training":
        answers |= told_of_loaders(kind, loaders)

        def with_logged(name: str) -> dict[str, Any]:
            own = {key: torch.tensor(value) for key, value in logged_so_far().items()}
            return {**getattr(trainer, name), **own}

        makers = dict.fromkeys(LOGGED_SO_FAR, with_logged)
    client.trainer = TrainerView(trainer, answers, makers=makers)
    try:
        yield
    finally:
        client.trainer = trainer


class OwnSteps:
    """Evaluates the user's module in a client by its own step and hooks, as a Trainer does.

    The module makes its callbacks anew for each client, as for a Trainer that evaluates the client's checkpoint.

    Args:
        client: The client, which is built around the module.
    """

    def __init__(self, client: ClientModule) -> None:
        self._client = client
        self._modules = list(client.lightning_modules())
        self._makers = makers_of(self._modules)
        self._callbacks = PassCallbacks()
        self._services = ClientTestServices()

    def score(self, client_id: int, loaders: Sequence[PassLoader], how: Scoring) -> ClientScore:
        """Return the score of the module that lies in the client.

        Args:
            client_id: The id of the client.
            loaders: The loaders of the client's own batches.
            how: How the client is tested.
        """
        client = self._client
        kind = own_step(client.module, how.kind)
        num_samples = 0
        is_finite = True
        with (
            attach_services(self._modules, self._services.methods),
            fresh_metrics(parts_that_count(client)),
            stage_of(client, kind, loaders=loaders, logged_so_far=self._logged_so_far),
            callbacks_of_pass(self._makers, kind) as self._callbacks,
        ):
            self._begin(kind)
            for dataloader_idx, batches in enumerate(loaders):
                of_several = dataloader_idx if len(loaders) > 1 else None
                for batch_idx, batch in enumerate(batches):
                    num_samples += batch_length(batch)
                    if how.metrics is not None:
                        is_finite &= bool(update(how.metrics, batch, client).isfinite().all())
                    self._step(kind, batch, batch_idx=batch_idx, dataloader_idx=of_several)
            logged = self._end(kind)
        return ClientScore(
            client_id=client_id,
            num_samples=float(num_samples),
            correct=None,
            metrics=taken(how.metrics),
            is_finite=is_finite,
            logged=logged,
            directions=dict(self._services.logged.directions),
        )

    def _begin(self, kind: Kind | None) -> None:
        """Begin a pass over a client's samples."""
        self._services.logged.clear()
        self._services.begin_loader("")
        if kind is not None:
            for name in (f"on_{kind}_model_eval", f"on_{kind}_start", f"on_{kind}_epoch_start"):
                self._call(name)
            self._compute_alone()

    def _compute_alone(self) -> None:
        """Let metric objects that a hook has made compute over this process. The others are at other clients."""
        if world_size() == 1:
            return
        logged = self._services.logged.metrics.values()
        for part in [*parts_that_count(self._client), *self._callbacks.parts_that_count(), *logged]:
            for metric in part.modules():
                if isinstance(metric, Metric):
                    metric.distributed_available_fn = bool

    def _step(self, kind: Kind | None, batch: Batch, *, batch_idx: int, dataloader_idx: int | None) -> None:
        """Evaluate a batch by the module's step.

        Args:
            kind: The step. None evaluates nothing.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. None if there is only one.
        """
        if kind is None:
            return
        self._services.begin(batch=batch)
        places = [batch_idx]
        if dataloader_idx is not None:
            places.append(dataloader_idx)
            self._services.begin_loader(loader_suffix(dataloader_idx))
        self._call(f"on_{kind}_batch_start", batch, *places)  # style: ok, hooks take them by place
        step = getattr(self._client.module, f"{kind}_step")
        placed, named = evaluation_arguments(step, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
        with self._client.forward_context():
            outputs = step(batch, *placed, **named)  # style: ok, a step takes them by place, as in Lightning
        self._call(f"on_{kind}_batch_end", outputs, batch, *places)  # style: ok, hooks take them by place

    def _end(self, kind: Kind | None) -> dict[str, float]:
        """End a pass, and return what the module has logged in it, by key."""
        if kind is None:
            return {}
        self._services.begin()
        self._services.begin_loader("")
        self._compute_alone()
        self._call(f"on_{kind}_epoch_end")
        self._call(f"on_{kind}_end")
        self._compute_alone()
        logged = self._services.logged
        _, rows = logged.drain()
        return logged.reduce(rows=[rows], paths=[logged.metric_paths(self._client)], root=self._client)

    def _logged_so_far(self) -> dict[str, float]:
        """Return what the module has logged in the present pass so far, by key."""
        self._compute_alone()
        logged = self._services.logged
        return logged.reduce_so_far(
            rows=[logged.rows_so_far()], paths=[logged.metric_paths(self._client)], root=self._client
        )

    def _call(self, name: str, *args: Any) -> None:
        """Call a hook of the callbacks, and then of the module."""
        self._callbacks.call(name, *args)
        for hook in hooks(self._modules, name):
            hook(*args)
