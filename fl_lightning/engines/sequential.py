"""The sequential engine: trains clients one after the other in one module, without a Trainer or a FederatedLoop."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.plugins.precision import Precision
from torchmetrics import MetricCollection

from fl_lightning.client.context import ClientContext
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import (
    BatchTransfer,
    ClientServices,
    MetricAccumulator,
    attach_services,
    world_size,
)
from fl_lightning.engines.deployed import score
from fl_lightning.engines.local_metrics import local_metrics
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.traces import Traces
from fl_lightning.engines.training import LocalTrainer
from fl_lightning.members.faults import client_error
from fl_lightning.members.non_persistent import KEPT
from fl_lightning.members.structure import HeldEntries, Structure
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import ClientJob, ClientResult, ClientScore, ClientUpdate
from fl_lightning.utils.life import LIFE

ClientHooks = Mapping[str, Sequence[Callable[..., None]]]
"""Callables by hook name: `on_client_start(client_id)` and `on_client_epoch_end(client_id, epoch)`."""


class SequentialEngine:
    """Trains one client after the other (the `Engine` protocol).

    Args:
        client: the module that every client is trained in.
        settings: of local training.
        weights: the global model's entries in the module; None: all that do not stay by `client.is_personal`.
        services: attached to the client while it is trained; None: new ones.
        device: that the module lies on.
        precision: the Trainer's precision plugin; None: 32-true.
        datamodule: the user's own, with its transfer hooks; or None.
        hooks: called at the start of a client and the end of its epochs; or None.
        batch_hooks: of callbacks of the module's own, called before the module's of the same name; or None.
        tolerant: whether the run goes on without a client that fails, so that nothing of it may stay.
    """

    def __init__(
        self,
        client: ClientModule,
        settings: LocalSettings | None = None,
        weights: GlobalWeights | None = None,
        services: ClientServices | None = None,
        device: torch.device | None = None,
        precision: Precision | None = None,
        datamodule: LightningDataModule | None = None,
        hooks: ClientHooks | None = None,
        *,
        batch_hooks: ClientHooks | None = None,
        tolerant: bool = False,
    ) -> None:
        self.client, self.hooks = client, {} if hooks is None else hooks
        self.weights = weights or GlobalWeights(client)
        self.modules = list(client.lightning_modules())
        device, precision = device or torch.device("cpu"), precision or Precision()
        for module in self.modules[1:]:  # Lightning tells the device and type to modules of its own package only
            precision.convert_module(module).to(device)
        transfer = BatchTransfer(self.modules, device, precision, datamodule)
        client.connect(forward_context(precision), transfer)
        self.services, self.transient = services or ClientServices(), self.weights.transient
        self.transient.place()
        parts = client, settings or LocalSettings(), self.services, transfer, device, precision
        self.local, self.tolerant = LocalTrainer(*parts, batch_hooks or {}), tolerant
        self._receives, self._replies = (overridden(client, name, ClientModule) for name in ("receive", "reply"))
        self._structure = Structure(client, self.weights.entries, self.weights.tied)
        self._noted = False
        self._without_others = local_metrics if world_size() > 1 else nullcontext
        self._last_start: object = None
        self._weights_token = object()
        """One object for all clients that start from the same weights."""

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Train every job and yield its result before the next is drawn; the module keeps the last client's weights.

        Raises:
            ClientError: of the job drawn last; the jobs that are left can be run.
        """
        self._structure.begin()
        extra = self.weights.extra
        if extra is not None:
            extra.begin()
        try:
            with attach_services(self.modules, self.services.methods), self._without_others(self.client):
                yield from self._results(exchange, jobs)
        except GeneratorExit:  # the caller takes no more results
            self.services.logged.clear()
            raise
        except BaseException:
            self.services.logged.clear()  # of the client under way
            self.services.untoggle_optimizer(None)
            self._structure.restore()
            self.weights.load(self.weights.frozen.idle)  # which no client is given anew
            self.local.builder.forget()
            raise
        finally:
            self._last_start = None
            if self.transient.places:
                self.transient.load({})
            if extra is not None:
                extra.reset()
            self.local.restore_modes()
            self.client.zero_grad()

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs one after the other; `announces`: `on_client_start` is called."""
        for job in jobs:
            traces = Traces(self.client, self.local.device.type) if self.tolerant else None
            try:
                neutral = self.client.is_neutral
                context, logged = self._receive(exchange, job, neutral, announces)
                self.local.train(job.data, exchange, neutral, self._epoch_hooks(job.client_id))
                result = self._reply(exchange, job, context, logged)
                yield result
            except BaseException as error:  # also where the caller takes no more results, since it refused this one
                if traces is not None:
                    traces.undo()
                if not isinstance(error, Exception):
                    raise
                raise client_error(job.client_id, job.broadcast.round_idx, error) from error

    def _epoch_hooks(self, client_id: int) -> Sequence[Callable[[int], None]]:
        """Callables for the end of each of a client's epochs, which take its number."""
        found = self.hooks.get("on_client_epoch_end", ())
        return [partial(hook, client_id) for hook in found] if found else ()

    def _receive(
        self, exchange: str, job: ClientJob, neutral: bool, announces: bool = True
    ) -> tuple[ClientContext, MetricAccumulator]:
        """Make the module the client of a job, up to where its training begins."""
        client, local = self.client, self.local
        context = self.load_client(job)
        logged = self.services.begin_client()
        for hook in self.hooks.get("on_client_start", ()) if announces else ():
            hook(job.client_id)
        if self._receives and not neutral:
            local.restore_modes()  # a client of one sample leaves BatchNorm in eval mode
            local.seed(f"receive/{exchange}", job.data)
            client.receive(job.broadcast, job.data)
        return context, logged

    def _reply(
        self, exchange: str, job: ClientJob, context: ClientContext, logged: MetricAccumulator, checks: bool = True
    ) -> ClientResult:
        """Make the result of the client in the module, which is trained; `checks`: its structure may have changed."""
        client, weights = self.client, self.weights
        extras = client.reply(exchange, job.data) if self._replies else {}
        if not isinstance(extras, Mapping):
            raise TypeError(
                f"{type(client).__name__}.reply must return a dict of what goes up, got {type(extras).__name__}; "
                f"return {{}} for nothing"
            )
        if checks:
            self._structure.check()
        if weights.freezes:
            weights.frozen.check()
        if not self._noted:
            self._noted = True
            self.transient.find_new()
        update = ClientUpdate(
            job.client_id,
            job.data.num_samples,
            context.progress.num_steps,
            context.progress.exposure,
            weights.live(weights.travelling) if job.broadcast.uploads and weights.shared else None,
            extras,
        )
        if self.transient.kept:
            context.memory[KEPT] = self.transient.snapshot()
        personal = weights.snapshot(weights.personal_of(job.client_id)) if weights.personal else None
        return ClientResult(update, context.memory, personal, logged)

    @torch.no_grad()
    def evaluate(
        self,
        jobs: Iterable[ClientJob],
        batch_size: int,
        metrics: MetricCollection | None = None,
        channels_last: bool = False,
    ) -> Generator[ClientScore, None, None]:
        """Test what every client would deploy; at the end the module is as it was before."""
        before, local = HeldEntries(self.weights), self.local
        if self.weights.extra is not None:
            self.weights.extra.begin()
        try:
            for job in jobs:
                before.put_back()
                self.load_client(job)
                self.weights.load(self.weights.frozen.idle)
                self.client.eval()
                batches = map(local.transfer, job.data.batches("test", batch_size=batch_size))
                yield score(job.client_id, self.client.deployed(), batches, local.device, metrics, channels_last)
        finally:
            before.restore()
            local.restore_modes()

    def load_client(self, job: ClientJob) -> ClientContext:
        """Put a client into the module: the shared weights it starts from, its own entries and its memory."""
        LIFE.begin_client(job.client_id, job.broadcast.round_idx)
        context = self._context(job)
        start, idle = context.start, self.weights.frozen.idle
        self.weights.load({n: v for n, v in start.items() if n not in idle} if idle else start)
        if job.personal is not None:
            self.weights.load(job.personal)
        if self.transient.places:
            self.transient.load(job.memory.get(KEPT, {}))
        if self.weights.extra is not None:
            self.weights.extra.reset()
        self.client.begin(context)
        return context

    def _context(self, job: ClientJob) -> ClientContext:
        """Make the state of a job's client."""
        start = job.broadcast.weights if job.start is None else job.start
        if start is None or start is not self._last_start or job.personal is not None:
            self._weights_token = object()
        self._last_start = start
        return ClientContext(job.client_id, start or {}, self.weights.trainable, job.memory, self._weights_token)


def forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """Choose the context of a client's forward pass; `nullcontext` for 32-true."""
    return nullcontext if str(precision.precision) == "32-true" else precision.forward_context
