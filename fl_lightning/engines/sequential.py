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
from fl_lightning.client.services import BatchTransfer, ClientServices, attach_services, world_size
from fl_lightning.engines.deployed import score
from fl_lightning.engines.local_metrics import local_metrics
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.training import EpochHook, LocalTrainer
from fl_lightning.members.faults import client_error
from fl_lightning.members.structure import HeldEntries, Structure
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import ClientJob, ClientResult, ClientScore, ClientUpdate, Members, State
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
        members: those of a round that go with the engine, in order; None: those of `weights` and the structure.
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
        members: Members | None = None,
        tolerant: bool = False,
    ) -> None:
        self.client, self.hooks = client, {} if hooks is None else hooks
        self.weights = weights or GlobalWeights(client)
        self.members = members or Members([Structure(client, self.weights), *self.weights.features])
        self.modules = list(client.lightning_modules())
        device, precision = device or torch.device("cpu"), precision or Precision()
        for module in self.modules[1:]:  # Lightning tells the device and type to modules of its own package only
            precision.convert_module(module).to(device)
        transfer = BatchTransfer(self.modules, device, precision, datamodule)
        client.connect(forward_context(precision), transfer)
        self.services = services or ClientServices()
        self.weights.non_persistent.place()
        parts = client, settings or LocalSettings(), self.services, transfer, device, precision
        self.local, self.tolerant = LocalTrainer(*parts, batch_hooks or {}), tolerant
        self._receives, self._replies = (overridden(client, name, ClientModule) for name in ("receive", "reply"))
        self._without_others = local_metrics if world_size() > 1 else nullcontext
        undoing: Callable[[], AbstractContextManager[Any]] = partial(self.members.undoing, at_client=True)
        # what fails is undone: where single clients are left out one client, else the exchange
        self._undo_client = undoing if tolerant else nullcontext
        self._undo_exchange = nullcontext if tolerant else undoing
        self._last_start: object = None
        self._weights_token = object()
        """One object for all clients that start from the same weights."""

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Train every job and yield its result before the next is drawn.

        The module keeps the last client's weights.

        Raises:
            ClientError: of the job drawn last; the jobs that are left can be run.
        """
        if not self.members.used:  # there is no round, which prepares them
            self.members.prepare()
        try:
            services = attach_services(self.modules, self.services.methods)
            with services, self._without_others(self.client), self._undo_exchange():
                yield from self._results(exchange, jobs)
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self.release_client()

    def _abandon(self, error: BaseException) -> None:
        """Drop what the client under way has logged, and after an error what it may have left in the middle."""
        self.services.logged.clear()
        if not isinstance(error, GeneratorExit):  # else the caller takes no more results
            self.services.untoggle_optimizer(None)
            self.local.builder.forget()

    def release_client(self) -> None:
        """Let go of the last client."""
        self._last_start = None
        for member in self.members.of("leave"):
            member.leave()
        self.local.restore_modes()
        self.client.zero_grad()

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs one after the other.

        `announces`: `on_client_start` is called.
        """
        for job in jobs:
            try:
                with self._undo_client():
                    fedavg_equivalent = self.client.is_fedavg_equivalent
                    self._receive(exchange, job, fedavg_equivalent, announces)
                    data = self.client.training_data(job.data)
                    self.local.train(data, exchange, fedavg_equivalent, self._epoch_hooks())
                    yield self._reply(exchange, job)
            except Exception as error:
                raise client_error(job.client_id, job.broadcast.round_idx, error) from error

    def _epoch_hooks(self) -> Sequence[EpochHook]:
        """Callables for the end of each of a client's epochs."""
        return self.hooks.get("on_client_epoch_end", ())

    def _receive(self, exchange: str, job: ClientJob, fedavg_equivalent: bool, announces: bool = True) -> None:
        """Make the module the client of a job, up to where its training begins."""
        self.load_client(job)
        self.services.begin_client()
        for hook in self.hooks.get("on_client_start", ()) if announces else ():
            hook(job.client_id)
        if self._receives and not fedavg_equivalent:
            self.local.restore_modes()  # a client of one sample leaves BatchNorm in eval mode
            self.local.seed(f"receive/{exchange}", job.data)
            self.client.receive(job.broadcast, job.data)

    def _reply(self, exchange: str, job: ClientJob, checks: bool = True, trained: State | None = None) -> ClientResult:
        """Make the result of the client that the module stands for, as it leaves the client.

        Args:
            exchange: under way.
            job: of the client.
            checks: whether the module's structure may have changed.
            trained: what it has trained, where that is not in the module.
        """
        weights, progress = self.weights, self.client.context.progress
        extras = self._extras(exchange, job) if self._replies else {}
        for member in self.members.of("trained") if checks else ():
            member.trained(job)
        sends = job.broadcast.uploads and weights.shared
        state = (trained or weights.live(weights.transmitted_entries)) if sends else None
        personal = weights.snapshot(weights.personal_of(job.client_id)) if weights.personal else None
        counts = job.data.num_samples, progress.num_steps, progress.accumulated_lr
        steps = progress.idle_steps, progress.lr, progress.uncounted_steps
        update = ClientUpdate(job.client_id, *counts, state, extras, True, *steps)
        result = ClientResult(job, update, personal, self.services.logged)
        for member in self.members.of("on_client"):
            result = member.on_client(result)
        return result

    def _extras(self, exchange: str, job: ClientJob) -> Mapping[str, Any]:
        """Ask the client for what goes up besides the weights.

        Raises:
            TypeError: naming what it is, if it is no dict.
        """
        extras: object = self.client.reply(exchange, job.data)
        if not isinstance(extras, Mapping):
            raise TypeError(
                f"{type(self.client).__name__}.reply must return a dict of what goes up, got {type(extras).__name__}; "
                f"return {{}} for nothing"
            )
        return extras

    @torch.no_grad()
    def evaluate(
        self,
        jobs: Iterable[ClientJob],
        batch_size: int,
        metrics: MetricCollection | None = None,
        channels_last: bool = False,
    ) -> Generator[ClientScore, None, None]:
        """Test what every client would deploy.

        At the end the module is as it was before.
        """
        before, local = HeldEntries(self.weights), self.local
        if not self.members.used:
            self.members.prepare()
        try:
            for job in jobs:
                before.put_back()
                self.load_client(job)
                self.weights.load(self.weights.frozen.already_sent)
                self.client.eval()
                batches = map(local.transfer, job.data.batches("test", batch_size=batch_size))
                yield score(job.client_id, self.client.deployed(), batches, local.device, metrics, channels_last)
        finally:
            self.release_client()
            before.restore()

    def load_client(self, job: ClientJob) -> None:
        """Put a client into the module: the shared weights it starts from, its own entries and its memory."""
        LIFE.begin_client(job.client_id, job.broadcast.round_idx)
        context, sent = self._context(job), self.weights.frozen.already_sent
        self.weights.load({n: v for n, v in context.start.items() if n not in sent} if sent else context.start)
        if job.personal:
            self.weights.load(job.personal)
        for member in self.members.of("enter"):
            member.enter(job)
        self.client.begin(context)

    def _context(self, job: ClientJob) -> ClientContext:
        """Make the state of a job's client."""
        start = job.broadcast.weights if job.start is None else job.start
        if start is None or start is not self._last_start or job.personal is not None:
            self._weights_token = object()
        self._last_start = start
        return ClientContext(job.client_id, start or {}, self.weights.trainable, job.memory, self._weights_token)


def forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """Choose the context of a client's forward pass.

    `nullcontext` for 32-true.
    """
    return nullcontext if str(precision.precision) == "32-true" else precision.forward_context
