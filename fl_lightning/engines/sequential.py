"""The sequential engine trains clients one after the other in one module.

It needs neither a Trainer nor a FederatedLoop.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.seed import isolate_rng
from torchmetrics import Metric

from fl_lightning.aggregation import Inquiry
from fl_lightning.client.context import ClientContext
from fl_lightning.client.hooks import overridden
from fl_lightning.client.metric_states import fresh_metrics, parts_that_count
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import (
    BatchTransfer,
    ClientServices,
    MetricAccumulator,
    attach_services,
)
from fl_lightning.engines.clock import ClientClock, without_logs
from fl_lightning.engines.deployed import EVALUATION, OwnSteps, PassLoader, score, stage_of
from fl_lightning.engines.fine_tuning import FineTuner
from fl_lightning.engines.held_entries import HeldEntries
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.training import EpochHook, LocalTrainer
from fl_lightning.members.faults import client_error
from fl_lightning.members.structure import Structure
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import (
    ClientData,
    ClientJob,
    ClientResult,
    ClientScore,
    ClientUpdate,
    FineTuning,
    Members,
    Scoring,
    State,
)
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.life import LIFE
from fl_lightning.utils.own_generators import kept_states
from fl_lightning.utils.settings import SettingError

ClientHooks = Mapping[str, Sequence[Callable[..., None]]]
"""Callables by the name of their hook: `on_client_start(client_id)`, `on_client_epoch_end(client_id, epoch)`."""


DEPLOYMENT = "deployment"
"""Purpose of what a client draws to prepare the model that it deploys."""


class SequentialEngine:
    """Trains one client after the other (the `Engine` protocol).

    Args:
        client: The module in which every client is trained.
        settings: Settings of local training. None takes the defaults.
        global_weights: The entries of the global model in `client`. None takes every entry that
            `client.is_personal` does not keep at the client.
        services: The Trainer's services, attached to the client while it trains. None makes new ones.
        device: The device of the module. None is the CPU.
        precision: The Trainer's precision plugin. None is `32-true`.
        datamodule: The user's data module, whose transfer hooks are called.
        hooks: Callables for the start of a client and for the end of each of its epochs.
        batch_hooks: Hooks of the module's own callbacks. Each is called before the module's hook
            of the same name.
        members: The members of a round that act at the client, in order. None takes the members
            of `global_weights` and a check of the module's structure.
        tolerant: Whether the run continues without a client that fails. The engine then undoes
            each failed client.
        clock: The clock that the client's modules see. None takes one of `settings`, of a run
            without a limit of rounds.
        inquiry: What answers the further exchange of a server module. None: there is no such exchange.

    Attributes:
        own_steps: Evaluates the module that lies in the client by its own steps.
    """

    def __init__(
        self,
        client: ClientModule,
        settings: LocalSettings | None = None,
        global_weights: GlobalWeights | None = None,
        services: ClientServices | None = None,
        *,
        device: torch.device | None = None,
        precision: Precision | None = None,
        datamodule: LightningDataModule | None = None,
        hooks: ClientHooks | None = None,
        batch_hooks: ClientHooks | None = None,
        members: Members | None = None,
        tolerant: bool = False,
        clock: ClientClock | None = None,
        inquiry: Inquiry | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        precision = precision or Precision()
        self.client = client
        self.modules = list(client.lightning_modules())
        self.hooks: ClientHooks = {} if hooks is None else hooks
        self.tolerant = tolerant
        self.global_weights = global_weights or GlobalWeights(client)
        self.members = members or Members([Structure(client, self.global_weights), *self.global_weights.features])
        for module in self.modules[1:]:
            # Lightning moves and converts only the modules of its own package.
            precision.convert_module(module).to(device)
        transfer = BatchTransfer(
            modules=self.modules,
            device=device,
            precision=precision,
            datamodule=datamodule,
        )
        client.connect(forward_context(precision), transfer)
        self.services = services or ClientServices()
        self.global_weights.non_persistent.place()
        self.local = LocalTrainer(
            client=client,
            settings=settings or LocalSettings(),
            services=self.services,
            transfer=transfer,
            device=device,
            precision=precision,
            batch_hooks=batch_hooks or {},
            clock=clock,
        )
        self.own_steps = OwnSteps(client)
        self.inquiry = inquiry
        self._receives = overridden(client, "receive", ClientModule)
        self._replies = overridden(client, "reply", ClientModule)
        self._counting_parts = parts_that_count(client)
        # A failure is undone. A tolerant run undoes one client, any other run the whole exchange.
        undoing: Callable[[], AbstractContextManager[Any]] = partial(self.members.undoing, at_client=True)
        self._undo_client = undoing if tolerant else nullcontext
        self._undo_exchange = nullcontext if tolerant else undoing
        self._last_start: object = None
        """The weights from which the last client started."""
        self._weights_token = object()
        """One object for all clients that start from the same weights."""

    # --- training ---

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Train the client of every job, and yield its result before the next job is drawn.

        The module keeps the weights of the last client.

        Raises:
            ClientError: The job drawn last failed. The remaining jobs can still be run.
        """
        if not self.members.used:
            # A round prepares its members, and this engine is used without one.
            self.members.prepare()
        try:
            with attach_services(self.modules, self.services.methods), self._undo_exchange():
                if self.inquiry is not None and exchange == self.inquiry.exchange:
                    yield from self._answers(self.inquiry, jobs)
                else:
                    yield from self._results(exchange, jobs)
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self.release_client()

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs one after the other.

        Args:
            exchange: Name of the exchange.
            jobs: The jobs, drawn one by one.
            announces: Whether `on_client_start` is called.
        """
        for job in jobs:
            try:
                with self._undo_client(), self._fresh_metrics():
                    fedavg_equivalent = self.client.is_fedavg_equivalent
                    self._receive(exchange, job, fedavg_equivalent=fedavg_equivalent, announces=announces)
                    self.local.train(
                        data=self.client.training_data(job.data),
                        exchange=exchange,
                        fedavg_equivalent=fedavg_equivalent,
                        on_epoch_end=self._epoch_hooks(),
                    )
                    yield self._reply(exchange, job)
            except SettingError:
                raise
            except Exception as error:
                raise client_error(job.client_id, job.named_round, error) from error

    def _answers(self, inquiry: Inquiry, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Yield what the client of every job answers to a server module. Nothing is trained.

        Args:
            inquiry: What answers.
            jobs: The jobs, drawn one by one.
        """
        exchange = inquiry.exchange
        for job in jobs:
            try:
                with self._undo_client(), self._fresh_metrics():
                    # The method of the client takes no part, as if it had no effect.
                    self._receive(exchange, job, fedavg_equivalent=True)
                    self.local.restore_modes()
                    self.local.seed(f"inquiry/{exchange}", job.data)
                    extras = self.client.answer(inquiry, job.broadcast, job.data)
                    check_extras(extras, f"{type(inquiry).__name__}.answer")
                    yield self._reply(exchange, job, extras=extras)
            except SettingError:
                raise
            except Exception as error:
                raise client_error(job.client_id, job.named_round, error) from error

    def _fresh_metrics(self) -> AbstractContextManager[None]:
        """Return a context in which the metric objects of the client begin anew."""
        return fresh_metrics(self._counting_parts) if self._counting_parts else nullcontext()

    def _receive(self, exchange: str, job: ClientJob, fedavg_equivalent: bool, announces: bool = True) -> None:
        """Turn the module into the client of a job, ready to train.

        Args:
            exchange: Name of the exchange.
            job: The job of the client.
            fedavg_equivalent: Whether the method has no effect with its settings.
            announces: Whether `on_client_start` is called.
        """
        self.load_client(job)
        self.services.begin(logged=MetricAccumulator())
        if announces:
            for hook in self.hooks.get("on_client_start", ()):
                hook(job.client_id)
        if self._receives and not fedavg_equivalent:
            # The client before may have had one sample, for which BatchNorm was put in eval mode.
            self.local.restore_modes()
            self.local.seed(f"receive/{exchange}", job.data)
            self.client.receive(job.broadcast, job.data)

    def load_client(self, job: ClientJob) -> None:
        """Load a client into the module: its shared weights, its personal entries and its memory."""
        LIFE.begin_client(job.client_id, job.broadcast.round_idx if job.arrives is None else job.arrives)
        self.local.clock.round_idx = job.broadcast.round_idx
        context = self._context(job)
        already_sent = self.global_weights.frozen.already_sent
        start = context.start
        if already_sent:
            start = {name: value for name, value in start.items() if name not in already_sent}
        self.global_weights.load(start)
        if job.personal:
            self.global_weights.load(job.personal)
        for member in self.members.of("enter"):
            member.enter(job)
        self.client.begin(context)

    def _context(self, job: ClientJob) -> ClientContext:
        """Make the state of a job's client."""
        start = job.broadcast.weights if job.start is None else job.start
        if start is None or start is not self._last_start or job.personal is not None:
            self._weights_token = object()
        self._last_start = start
        return ClientContext(
            client_id=job.client_id,
            start=start or {},
            trainable=self.global_weights.trainable,
            memory=job.memory,
            weights_token=self._weights_token,
        )

    def _epoch_hooks(self) -> Sequence[EpochHook]:
        """Return the callables for the end of each epoch of a client."""
        return self.hooks.get("on_client_epoch_end", ())

    def _reply(
        self,
        exchange: str,
        job: ClientJob,
        checks: bool = True,
        trained: State | None = None,
        *,
        extras: Mapping[str, Any] | None = None,
    ) -> ClientResult:
        """Make the result of the client in the module, as it leaves the client.

        Args:
            exchange: Name of the exchange.
            job: The job of the client.
            checks: Whether the structure of the module may have changed.
            trained: The trained entries, if they are not in the module.
            extras: What the client sends besides its weights. None asks its method.
        """
        progress = self.client.context.progress
        if extras is None:
            extras = self._extras(exchange, job) if self._replies else {}
        if checks:
            for member in self.members.of("trained"):
                member.trained(job)
        global_weights = self.global_weights
        sent: State | None = None
        if job.broadcast.uploads and global_weights.shared:
            sent = trained or global_weights.live(global_weights.transmitted_entries)
        personal: State | None = None
        if global_weights.personal:
            personal = global_weights.snapshot(global_weights.personal_of(job.client_id))
        update = ClientUpdate(
            client_id=job.client_id,
            num_samples=job.data.num_samples,
            num_steps=progress.num_steps,
            accumulated_lr=progress.accumulated_lr,
            weights=sent,
            extras=extras,
            idle_steps=progress.idle_steps,
            lr=progress.lr,
            uncounted_steps=progress.uncounted_steps,
        )
        self.services.logged.end_client(job.client_id, self.client)
        result = ClientResult(job=job, update=update, personal=personal, logged=self.services.logged)
        for member in self.members.of("on_client"):
            result = member.on_client(result)
        return result

    def _extras(self, exchange: str, job: ClientJob) -> Mapping[str, Any]:
        """Return what the method of the client sends besides its weights."""
        extras = self.client.reply(exchange, job.data)
        check_extras(extras, f"{type(self.client).__name__}.reply")
        return extras

    def _abandon(self, error: BaseException) -> None:
        """Drop what the current client has logged and, after an error, its unfinished optimizer state."""
        self.services.begin(logged=MetricAccumulator())
        if isinstance(error, GeneratorExit):
            # The caller takes no more results, and nothing has failed.
            return
        self.services.untoggle_optimizer(None)
        self.local.builder.forget()

    def release_client(self) -> None:
        """Release the last client."""
        self._last_start = None
        for member in self.members.of("leave"):
            member.leave()
        self.local.restore_modes()
        self.client.zero_grad()

    # --- evaluation ---

    @torch.no_grad()
    def evaluate(self, jobs: Iterable[ClientJob], how: Scoring) -> Generator[ClientScore, None, None]:
        """Yield the score of what the client of every job would deploy.

        The module is the same before and after.

        Args:
            jobs: The jobs of an exchange `deployed`, drawn one by one.
            how: How the clients are tested.
        """
        held = HeldEntries(self.global_weights)
        if not self.members.used:
            self.members.prepare()
        try:
            for job in jobs:
                held.put_back()
                yield self._evaluated(job, how)
        finally:
            self.release_client()
            held.restore()

    def _evaluated(self, job: ClientJob, how: Scoring) -> ClientScore:
        """Return the score of what the client of a job would deploy, and the score after fine-tuning if asked for."""
        if how.tuning is None:
            predict = self.deploy(job)
            self.client.eval()
            return self._score(job, predict, how)
        # The client's buffers may be made anew. Within Lightning's inference mode they could not be trained.
        with torch.inference_mode(mode=False), torch.no_grad():
            predict = self.deploy(job)
            self.client.eval()
            as_deployed = self._score(job, predict, how)
            with self.fine_tuner.fine_tuned(job.data, how.tuning):
                return as_deployed._replace(tuned=self._score(job, predict, how))

    @cached_property
    def fine_tuner(self) -> FineTuner:
        """The fine-tuner of the client in the module."""
        return FineTuner(self.local)

    @contextmanager
    def deployed(self, job: ClientJob, tuning: FineTuning | None = None) -> Iterator[Callable[[Any], Any]]:
        """Context in which the module is what a client would deploy. It yields the client's predictor.

        The caller puts the entries of the module back.

        Args:
            job: The job of an exchange `deployed`.
            tuning: How the client is fine-tuned. None means that it is not.
        """
        try:
            with ExitStack() as tuned:
                if tuning is None:
                    predict = self.deploy(job)
                else:
                    with torch.inference_mode(mode=False), torch.no_grad():
                        predict = self.deploy(job)
                        tuned.enter_context(self.fine_tuner.fine_tuned(job.data, tuning))
                yield predict
        finally:
            self.release_client()

    def deploy(self, job: ClientJob) -> Callable[[Any], Any]:
        """Load a client as it would deploy its model, and return its predictor. The caller releases the client.

        Args:
            job: The job of an exchange `deployed`.
        """
        if not self.members.used:
            self.members.prepare()
        self.load_client(job)
        self.global_weights.load(already_sent(job, self.global_weights.frozen.already_sent))
        if job.broadcast.extras:
            self._receive_deployment(job)
        return self.client.deployed()

    def _receive_deployment(self, job: ClientJob) -> None:
        """Let the client in the module prepare the model that it deploys by what the server gives it.

        Its draws depend neither on the clients before nor on the round, and it leaves the generators as they were.
        """
        on_gpu = self.local.device.type == "cuda"
        with (
            isolate_rng(include_cuda=on_gpu),
            kept_states(self.local.own_generators),
            stage_of(self.client, "training"),
            without_logs(self.client),
        ):
            # The modes stay as they are: a pass of the Trainer has put the module in eval mode.
            self.local.seed_by(keyed_seed(self.local.settings.seed, DEPLOYMENT, client_id=job.client_id))
            self.client.receive_deployment(job.broadcast.extras, job.data)

    def _score(self, job: ClientJob, predict: Callable[[Any], Any], how: Scoring) -> ClientScore:
        """Return the score of the client in the module."""
        if how.classifies:
            return score(
                client_id=job.client_id,
                predict=predict,
                batches=self.local.transfer.each(job.data.batches("test", batch_size=how.batch_size)),
                device=self.local.device,
                metrics=how.metrics,
                channels_last=how.channels_last,
                classes=how.classes,
            )
        # A step of the user's may draw numbers, which must depend neither on the clients before nor on the round.
        self.local.seed_by(keyed_seed(self.local.settings.seed, EVALUATION, client_id=job.client_id))
        views = job.data.by_loader("test")
        loaders = [self._loader(view, how.batch_size, index) for index, view in enumerate(views)]
        score_of_module = self.own_steps.score(client_id=job.client_id, loaders=loaders, how=how)
        # The batches may count otherwise than in samples, such as in nodes of a graph.
        return score_of_module._replace(num_samples=float(job.data.size("test")))

    def _loader(self, data: ClientData, batch_size: int, dataloader_idx: int) -> PassLoader:
        """Return the loader of the test samples in a view of a client's data."""

        def read() -> Iterator[Any]:
            return self.local.transfer.each(data.batches("test", batch_size=batch_size), dataloader_idx)

        return PassLoader(read, sizes=[data.size("test")], batch_size=batch_size)

    @torch.no_grad()
    def model_of(self, job: ClientJob, tuning: FineTuning | None = None) -> LightningModule:
        """Return a copy of the user's module, or of a client with a net, as the client of a job would deploy it.

        The copy has no Trainer, empty metric objects and the modes that the module has between two clients. The module
        itself is the same before and after.

        Args:
            job: The job of an exchange `deployed`.
            tuning: How the client is fine-tuned. None means that it is not.
        """
        with self.lent(job, tuning) as predict:
            return self.copied_module(predicts_otherwise=predict is not self.client)

    @contextmanager
    def lent(self, job: ClientJob, tuning: FineTuning | None = None) -> Iterator[Callable[[Any], Any]]:
        """Context in which the module is what a client would deploy. The module itself is the same before and after.

        Args:
            job: The job of an exchange `deployed`.
            tuning: How the client is fine-tuned. None means that it is not.
        """
        held = HeldEntries(self.global_weights)
        try:
            with self.deployed(job, tuning) as predict:
                yield predict
        finally:
            held.restore()

    def copied_module(self, *, predicts_otherwise: bool = False) -> LightningModule:
        """Return a copy of the user's module, or of a client with a net, as it is now.

        Args:
            predicts_otherwise: Whether the client predicts with something else than its module. The copy then keeps the
                memory of the client, which this may read.
        """
        module = self.client if self.client.module is None else self.client.module
        syncs = [part.distributed_available_fn for part in parts_that_count(module) if isinstance(part, Metric)]
        present = [(part, part.training) for part in self.client.modules()]
        self.local.restore_modes()
        with self._fresh_metrics():
            copied = copy_of(module)
        for part, is_training in present:
            part.training = is_training
        parts = [part for part in parts_that_count(copied) if isinstance(part, Metric)]
        for part, sync in zip(parts, syncs, strict=True):
            # Within the run an object computes over this process alone.
            part.distributed_available_fn = sync
        if not isinstance(copied, ClientModule):
            return copied
        if predicts_otherwise:
            vars(copied)["forward"] = copied.deployed()
        else:
            copied.context = ClientContext()
        return copied


def check_extras(extras: object, hook: str) -> None:
    """Refuse what a hook has returned in place of a dict of what goes up.

    Args:
        extras: What the hook has returned.
        hook: Name of the hook with its class.

    Raises:
        TypeError: It is something other than a dict.
    """
    if not isinstance(extras, Mapping):
        raise TypeError(
            f"{hook} must return a dict of what goes up, got {type(extras).__name__}; return {{}} for nothing"
        )


def copy_of(module: LightningModule) -> LightningModule:
    """Return a deep copy of a module.

    Raises:
        ValueError: Python cannot copy something that the module keeps.
    """
    try:
        return deepcopy(module)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"client_model needs a module that copy.deepcopy copies, got {type(module).__name__} ({error}); read the "
            f"file of ClientCheckpoint in its place"
        ) from error


def already_sent(job: ClientJob, names: Iterable[str]) -> State:
    """Return the entries that a client deploys among the frozen ones, which `load_client` does not load.

    Args:
        job: The job of the client.
        names: Names of the frozen entries that were sent before.
    """
    start = job.broadcast.weights if job.start is None else job.start
    return {name: start[name] for name in names if start and name in start}


def forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of a client's forward pass, which does nothing for `32-true`."""
    if str(precision.precision) == "32-true":
        return nullcontext
    return precision.forward_context
