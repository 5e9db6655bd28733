"""The choices that a user made for a federation, and how the server is made of them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

from fl_lightning.aggregation import Aggregator, Codec, NonFiniteGuard, Pacing, ServerModule, UpdateTransform
from fl_lightning.aggregation.pacing import Stale
from fl_lightning.client.checkpoint_io import check_files_of
from fl_lightning.client.checks import check_evaluation_step, check_method_around_module, check_module, uncompiled
from fl_lightning.client.deriving import check_parts
from fl_lightning.client.hooks import refuse_unforwarded
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, EvaluationServices, MetricAccumulator
from fl_lightning.client.store import ClientStore
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.clients import CohortBounds
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.federation import checks, private
from fl_lightning.federation.agreement import check_same_everywhere
from fl_lightning.federation.checks import check_targets
from fl_lightning.federation.code import digests_of_code, kinds_kept_by, kinds_within, loaded_kind
from fl_lightning.federation.described import described_federation
from fl_lightning.federation.effects import is_digest
from fl_lightning.federation.horizon import Horizon, round_limit
from fl_lightning.federation.identity import RunIdentity
from fl_lightning.federation.pace import check_pace, check_takes_stale
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.server import Server, ServerOptimizer
from fl_lightning.members.codec import check_codec
from fl_lightning.members.faults import FaultPolicy, SkipRecord, bounds_of_norm, check_measured, encodes
from fl_lightning.members.plateau import Plateau
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.history import GUARANTEES, UNPROTECTED
from fl_lightning.types import DataModule, FineTuning, State, TrainableModule
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.plain import plain_value
from fl_lightning.utils.settings import check_factory, check_kind, check_whole, described

FEDERATED_HOOKS = ("on_client_start", "on_client_epoch_end", "on_client_end", "on_exchange_end", "on_round_repeat")
"""Hooks of callbacks besides Lightning's, called as `(trainer, loop, ...)`. In them `loop.log` works."""

LOOP_ATTRIBUTES = ("client", "aggregator", "server_module", "metrics", "store", "recorder", "identity")
"""Parts that the loop has under the same names."""

STEP_OF = {"fit": "validation_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The step of an evaluation that each function of the Trainer calls, by name."""

Hooks = dict[str, list[Callable[..., None]]]
"""The callbacks' hooks by name. Trainer and loop are bound already."""


Value = TypeVar("Value")


@dataclass(kw_only=True)
class FederationParts:
    """Holds what a user chose for a federation, and makes the server of it once data and Trainer are known.

    Args:
        client: The module that every client trains.
        aggregator: The rule.
        server_module: The method's server side.
        server_optimizer: A function of parameters that makes the server's optimizer. None copies the aggregate.
        server_lr_scheduler: A function of that optimizer that makes its scheduler, or None.
        settings: Settings of local training. The seed and the timeout of a client are added for each run.
        faults: What happens on faults.
        transforms: Transforms of updates, in order.
        codec: The codec of what clients send, or None.
        execution: How a process computes.
        store: Where clients keep their memory and personal entries between rounds.
        personal: Patterns of entries that are never transmitted.
        keep: Patterns of buffers with `persistent=False` that a client keeps.
        metrics: The user's own metrics, or None.
        given_seed: Key of every draw. None means the seed of `seed_everything`, or 0 without it.
        pacing: When the server steps. None means after all clients of a round.
        fine_tuning: How clients are fine-tuned before they are tested. None means that they are not.
        deployed_client: Id or name of the client whose model and test samples an evaluation takes. None is the global
            model.
        deploys_tuned: Whether such a client is fine-tuned first.
        evaluates_all_clients: Whether an evaluation outside of a fit has the values of each client, too.
        horizon: The planned rounds.
        services: The services of the client's modules in training.
        evaluation_services: The services of the client's modules in an evaluation.
        hooks: The hooks of the run's callbacks, by name.
        batch_hooks: The hooks of the callbacks that the client's modules make, by name.
        initial_personal: Personal entries before any training, by name. `make_server` fills it.

    Attributes:
        identity: What the run is, for checkpoints.
        guard: Finds values that must not become the model.
        plateau: Schedules the clients' learning rates by logged values.
        recorder: Holds the logged values.
        skipped: Names the clients that rounds leave out.
        is_private: Whether the rule or the client makes a guarantee about what is released.
        min_clients: Number of clients that a round needs. It is 0 under a private rule, which hides whether there are
            any.

    Raises:
        ValueError: Two parts do not work together. The message names both.
        TypeError: A part has a wrong type.
    """

    client: ClientModule
    aggregator: Aggregator
    server_module: ServerModule
    server_optimizer: Callable[[Iterable[Any]], Optimizer] | None
    server_lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    settings: LocalSettings
    faults: FaultPolicy
    transforms: Sequence[UpdateTransform]
    codec: Codec | None
    execution: Execution
    store: ClientStore
    personal: tuple[str, ...]
    keep: tuple[str, ...]
    metrics: MetricCollection | None
    given_seed: int | None
    pacing: Pacing | None = None
    fine_tuning: FineTuning | None = None
    deployed_client: int | str | None = None
    deploys_tuned: bool = False
    evaluates_all_clients: bool = False
    horizon: Horizon = field(default_factory=Horizon)
    services: ClientServices = field(default_factory=ClientServices)
    evaluation_services: EvaluationServices = field(default_factory=EvaluationServices)
    hooks: Hooks = field(default_factory=lambda: {name: [] for name in FEDERATED_HOOKS})
    batch_hooks: Hooks = field(default_factory=Hooks)
    initial_personal: State = field(default_factory=State)
    identity: RunIdentity = field(init=False)
    plateau: Plateau = field(default_factory=Plateau, init=False)
    guard: NonFiniteGuard = field(init=False)
    recorder: Recorder = field(init=False)
    skipped: SkipRecord = field(init=False)
    _seed_of_run: int | None = field(default=None, init=False)
    is_private: bool = field(init=False)
    min_clients: int = field(init=False)

    def __post_init__(self) -> None:
        self.identity = RunIdentity(self.horizon)
        self.guard = NonFiniteGuard(skips=self.faults.nonfinite == "skip", max_norm=self.faults.max_update_norm)
        self.recorder = Recorder(separates=self.faults.skips, root=self.client)
        self.skipped = SkipRecord(self.faults)
        self.evaluation_services.evaluates = self.client.module is not None
        self._check_modules()
        self._check_server_step()
        self._check_transforms()
        self._check_entries()
        check_whole(seed=self.given_seed)
        check_kind(FineTuning, "a FineTuning", "give FineTuning(epochs=1)", fine_tuning=self.fine_tuning)
        self.is_private = self.aggregator.is_private or self.client.is_private
        self.min_clients = 0 if self.aggregator.is_private else self.faults.min_clients
        if self.faults.min_clients < 1 and not self.aggregator.is_private:
            raise ValueError(
                f"model.faults.min_clients must be at least 1, got {self.faults.min_clients}: "
                f"{type(self.aggregator).__name__} makes nothing of no clients; a private rule (DPFedAvg) does"
            )

    def _check_modules(self) -> None:
        """Check the rule, the client's modules and the server module."""
        remedy = "a method's server side is server_module"
        if isinstance(self.aggregator, DataModule):
            remedy = "data are given to the Trainer: fit(loop, datamodule=...)"
        rule = "a rule, an instance of a subclass of Aggregator such as MedianAggregator()"
        check_kind(Aggregator, rule, remedy, aggregator=self.aggregator)
        check_method_around_module(self.client)
        for module in self.client.lightning_modules():
            refuse_unforwarded(module)
        server_class = self.client.server_class
        if not isinstance(self.server_module, server_class):
            raise ValueError(
                f"{type(self.client).__name__} needs a {server_class.__name__}, got {described(self.server_module)}; "
                f"leave server_module unset to take the right one"
            )
        check_inquiry(self.client, self.server_module)

    def _check_server_step(self) -> None:
        """Check the functions that make the server optimizer and its scheduler."""
        example = "functools.partial(torch.optim.SGD, lr=1.0)"
        check_factory("parameters", "an optimizer", example, server_optimizer=self.server_optimizer)
        example = "functools.partial(StepLR, step_size=10)"
        check_factory("optimizer", "its scheduler", example, server_lr_scheduler=self.server_lr_scheduler)
        if self.server_lr_scheduler is not None and self.server_optimizer is None:
            raise ValueError("server_lr_scheduler needs a server_optimizer, got none; set model.server_optimizer")

    def _check_transforms(self) -> None:
        """Check the transforms, the codec of updates and the pacing, whose transform is the last one."""
        check_kind(Pacing, "a Rounds, FedBuff or FedAsync", "give such as FedBuff(buffer=3)", pacing=self.pacing)
        for transform in self.transforms:
            remedy = "give [NormClip(max_norm=10)]"
            check_kind(UpdateTransform, "instances of UpdateTransform", remedy, transforms=transform)
        check_kind(Codec, "an instance of a subclass of Codec", "give such as QSGD(bits=4)", codec=self.codec)
        if self.codec is not None:
            check_codec(self.codec, self.aggregator, self.transforms)
        if any(encodes(transform) for transform in self.transforms):
            check_measured(self.transforms, self.guard.max_norm)
        stale = None if self.pacing is None else self.pacing.stale()
        if stale is not None:
            self.transforms = [*self.transforms, stale]

    def _check_entries(self) -> None:
        """Check the store, and the patterns of entries that stay with a client."""
        check_kind(ClientStore, "a ClientStore of fl_lightning.client.store", "leave it unset", store=self.store)
        rule = "names or patterns of entries"
        remedy = "give such as 'net.head.*'"
        for pattern in self.personal:
            check_kind(str, rule, remedy, personal=pattern)
        for pattern in self.keep:
            check_kind(str, rule, remedy, keep=pattern)

    @property
    def seed(self) -> int:
        """The seed of the run, which keys every draw. It is read once when a run begins."""
        if self._seed_of_run is not None:
            return self._seed_of_run
        return self._present_seed()

    def _present_seed(self) -> int:
        """Return the seed that a run has if it begins now."""
        if self.given_seed is not None:
            return self.given_seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def marked(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return values of clients by log key, with marked keys if no guarantee of the run covers these values."""
        if not self.is_private:
            return dict(values)
        return {key if key in GUARANTEES else f"{UNPROTECTED}{key}": value for key, value in values.items()}

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The names of all exchanges that a round may have, in order."""
        inquiry = self.server_module.inquiry
        own = self.client.exchanges
        return own if inquiry is None else (*own, inquiry.exchange)

    @property
    def needs(self) -> frozenset[str]:
        """The needs of client, server module, rule and codec."""
        needs = frozenset[str]()
        for _, needs_of_part in self.needs_by_name():
            needs |= needs_of_part
        return needs

    def needs_by_name(self) -> checks.Needs:
        """List the needs of client, server module, rule and codec, each with the name of its class.

        The needs of a method's own server module have the name of the client. It needs nothing if the coefficients make
        the method FedAvg.
        """
        needs = [(type(self.client).__name__, self.client.present_needs)]
        has_own_server = type(self.server_module) is self.client.server_class
        if not has_own_server:
            needs.append((type(self.server_module).__name__, self.server_module.needs))
        elif not self.client.is_fedavg_equivalent:
            needs.append((type(self.client).__name__, self.server_module.needs))
        needs.append((type(self.aggregator).__name__, self.aggregator.needs))
        if self.codec is not None:
            needs.append((type(self.codec).__name__, self.codec.needs))
        return needs

    def keeps_state(self) -> str:
        """Return the name of the part that keeps a state of the trained entries at the server, or "" without one."""
        if type(self.server_module) is not ServerModule:
            return type(self.server_module).__name__
        if next(self.aggregator.buffers(), None) is not None:
            return type(self.aggregator).__name__
        if self.server_optimizer is not None:
            return "the server_optimizer"
        return ""

    # --- a run ---

    def begin_run(self, trainer: Trainer, loop: LightningModule, server: Server | None, *, fits: bool) -> None:
        """Check the data and parts of a run, and collect the hooks of its callbacks.

        Args:
            trainer: The Trainer of the run.
            loop: The loop. The callbacks' hooks receive it.
            server: The server of an earlier run, or None.
            fits: Whether the run is a fit.

        Raises:
            TypeError: The Trainer has data of another type.
            ValueError: The data do not work with parts, settings or the net of an earlier run, or a part was replaced
                in the loop.
        """
        self._check_not_replaced(loop)
        self.identity.begin_run()
        self._seed_of_run = self._present_seed()
        limit = round_limit(trainer.max_epochs, trainer.max_steps)
        self.horizon.begin_run(trainer.max_epochs, trainer.max_steps)
        check_parts(self.client)
        check_files_of(trainer.strategy)
        data = checks.check_data(trainer, self.settings.local_epochs)
        self._check_evaluation(trainer, data)
        self._collect_hooks(trainer, loop)
        checks.check_needs(
            client=self.client,
            needs_by_name=self.needs_by_name(),
            data=data,
            trainer=trainer,
        )
        data.key_batches(self.seed)
        if data.secret_seed:
            # All processes must draw with the secret of the first one.
            secrets = current_communicator().gather(data.secret)
            data.take_secret(secrets[0])
        if fits:
            self.horizon.check(limit)
            check_same_everywhere(data, current_communicator(), fits=True)
            self._check_fit(trainer, data)
        checks.check_streams(
            data=data,
            max_batches=self.settings.max_batches,
            chunk=self.execution.chunk,
            fits=fits,
        )
        if fits and data.schedule is not None and limit is not None:
            # The cohort of the last round exists unless the schedule is too short, which this refuses.
            last_round = max(limit, 1) - 1
            data.cohort(last_round)
        # Values that were logged in an earlier run do not belong to this run.
        self.services.begin(logged=MetricAccumulator())
        if server is not None:
            self.build_net(data)
            server.attach(data)

    def _check_evaluation(self, trainer: Trainer, data: FederatedDataModule) -> None:
        """Refuse a module of the user's whose step of this run's evaluation cannot be called."""
        module = self.client.module
        name = next(step for function, step in STEP_OF.items() if trainer.state.fn == function)
        is_validation = name == "validation_step"
        is_called = not is_validation or (data.evaluated is not None and trainer.limit_val_batches != 0)
        # A prediction is checked once its loaders are there.
        if module is None or not is_called or name == "predict_step":
            return
        num_loaders = data.num_validation_loaders if is_validation else data.num_loaders("test")
        check_evaluation_step(module, name, num_loaders)

    def _check_not_replaced(self, loop: LightningModule) -> None:
        """Refuse a loop whose attributes are no longer these parts."""
        for name in LOOP_ATTRIBUTES:
            if getattr(loop, name) is not getattr(self, name):
                raise ValueError(
                    f"the parts of a FederatedLoop are given to it when it is made, and its {name} was replaced since; "
                    f"make a new FederatedLoop"
                )

    def _collect_hooks(self, trainer: Trainer, loop: LightningModule) -> None:
        """Replace the client hooks of the run before by the hooks of this run's callbacks."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for name, functions in self.hooks.items():
            functions.clear()
            for callback in callbacks:
                if hasattr(callback, name):
                    functions.append(partial(getattr(callback, name), trainer, loop))

    def _check_fit(self, trainer: Trainer, data: FederatedDataModule) -> None:
        """Check what only a fit needs, most of it about guarantees."""
        checks.tell_epochs(self.settings.local_epochs)
        checks.check_stragglers(data.local_work, self.settings.local_epochs)
        if not data.pooled:
            checks.tell_fine_tuning(self.client, self.fine_tuning)
        if data.devices is not None or self.pacing is not None:
            check_pace(
                pacing=self.pacing,
                data=data,
                client=self.client,
                server_module=self.server_module,
                exchanges=self.exchanges,
                codec=self.codec,
                is_private=self.is_private,
            )
        checks.check_cohorts(data, self.min_clients, most=self.cohort_bounds(data).most)
        checks.check_attackers(self.client, data)
        if self.is_private and trainer.ckpt_path is None:
            private.check_first_fit(self.recorder.history)
        if self.client.is_private:
            private.check_private_client(self.client, self.faults)
            private.check_not_asked(self.client, self.server_module)
        if self.aggregator.is_private:
            private.check_private_rule(
                client=self.client,
                rule=self.aggregator,
                server_module=self.server_module,
                transforms=self.transforms,
                data=data,
            )
            private.check_private_faults(self.faults, type(self.aggregator).__name__)

    def cohort_bounds(self, data: FederatedDataModule) -> CohortBounds:
        """Return the least and the largest number of clients of a server step."""
        bounds = data.cohort.bounds
        if self.pacing is not None:
            bounds = self.pacing.bounds(bounds)
        loses = data.devices is not None and data.devices.loses_clients
        is_asynchronous = self.pacing is not None and self.pacing.is_asynchronous
        return bounds._replace(least=0) if loses and not is_asynchronous else bounds

    def end_run(self) -> None:
        """Drop the references to the Trainer."""
        for functions in self.hooks.values():
            functions.clear()
        self.client.disconnect()

    def describe(self, trainer: Trainer) -> None:
        """Describe the run by the settings that a checkpoint holds, with which a continued run is compared."""
        settings = self.described(str(trainer.precision), self.horizon.planned)
        fits = trainer.state.fn == "fit"
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.identity.describe(settings, data, fits)
        if fits:
            self.identity.code = digests_of_code(self._kinds(data))

    def _kinds(self, data: FederatedDataModule) -> list[Any]:
        """List the classes and functions of which the run is made."""
        named = self.identity.objects | self.identity.config
        kinds = [loaded_kind(value) for value in named.values() if isinstance(value, str)]
        kinds += [type(module) for module in self.client.modules()]
        kinds += [type(part) for part in (data, data.source, data.partition)]
        kinds += kinds_within(data.loaded_splits.values())
        kinds += kinds_within([self.client.optimizer_factory, self.server_optimizer, self.server_lr_scheduler])
        kinds += kinds_kept_by(self.client)
        return list(dict.fromkeys(kinds))

    def described(self, precision: str, planned: int | None) -> dict[str, Any]:
        """Return client, parts and settings as plain values by dotted name.

        Args:
            precision: The Trainer's precision.
            planned: The planned rounds of the run. None means no limit.
        """
        parts = {
            "aggregator": self.aggregator,
            "server_module": self.server_module,
            "server_optimizer": self.server_optimizer,
            "server_lr_scheduler": self.server_lr_scheduler,
            "transforms": [transform for transform in self.transforms if not isinstance(transform, Stale)],
            "pacing": self.pacing,
            "codec": self.codec,
            "personal": self.personal,
            "keep": self.keep,
        }
        settings = parts | asdict(self.settings)
        # `local_settings` fills in both, so that they have their values in `faults` and in `seed`.
        del settings["client_timeout"]
        # The plain form of `lr_decay`, which is among the settings.
        del settings["decay"]
        settings["seed"] = self.seed
        for name, value in asdict(self.faults).items():
            settings[f"faults.{name}"] = value
        described = described_federation(
            client=self.client,
            parts=settings,
            precision=precision,
            planned=planned,
        )
        # Checkpoints hold the settings, and parties of a real federation compare the texts of them.
        return dict(plain_value(described))

    def local_settings(self) -> LocalSettings:
        """Return the settings of local training in the run."""
        settings = self.settings.over(self.horizon.planned)
        return replace(settings, seed=self.seed, client_timeout=self.faults.client_timeout)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings by their dotted names, and what the modules saved by `save_hyperparameters`."""
        values = {key: value for key, value in self.identity.objects.items() if not is_digest(key)}
        for module in self.client.lightning_modules():
            saved = dict(module.hparams_initial)
            saved.pop("_class_path", None)
            values |= saved
        return values

    # --- making ---

    def build_net(self, data: FederatedDataModule) -> None:
        """Build the client's net for the data, or refuse other data than the net was built for."""
        if self.client.module is None:
            # A module of the user's own needs no number of classes, so its data are not counted.
            data.know_shape()
            check_targets(self.client, data)
            self.client.build(data.num_classes, data.input_shape)

    def make_server(
        self, data: FederatedDataModule, trainer: Trainer, load_initial: Callable[[GlobalWeights], None]
    ) -> Server:
        """Make the server with the weights of round 0, the same in all processes, and set up its parts.

        Args:
            data: The data module.
            trainer: The Trainer, which knows device and precision.
            load_initial: Receives the weights as they were drawn, and may load other ones.
        """
        self._build_client(data, trainer)
        global_weights = GlobalWeights(
            client=self.client,
            personal=self.personal,
            keep=self.keep,
            keeps_state=self.keeps_state,
        )
        checks.check_shared(
            client=self.client,
            aggregator=self.aggregator,
            server_optimizer=self.server_optimizer,
            codec=self.codec,
            bounds=bounds_of_norm(self.transforms, self.faults.max_update_norm),
            trainable=global_weights.trainable,
        )
        checks.check_accumulated_lr(self.client, self.needs_by_name())
        load_initial(global_weights)
        entries = global_weights.live(global_weights.entries)
        buffers = global_weights.non_persistent.state_dict()
        current_communicator().broadcast_(list({**entries, **buffers}.values()))
        global_weights.non_persistent.set_back({})
        if not self.initial_personal:
            self.initial_personal.update(global_weights.snapshot(global_weights.personal))
        server = Server(
            global_weights=global_weights,
            data=data,
            store=self.store,
            horizon=self.horizon,
            bounds=self.cohort_bounds,
        )
        self._set_up(server)
        return server

    def _build_client(self, data: FederatedDataModule, trainer: Trainer) -> None:
        """Build the client's module, draw its weights, and put it on the device."""
        device = trainer.strategy.root_device
        # Lightning would make the tensors on the GPU, whose generator draws other values.
        with torch.device("cpu"):
            torch.default_generator.manual_seed(keyed_seed(self.seed, "weights"))
            self.client.configure_model()
            self.build_net(data)
        self.client.to(device)
        self.execution.lay_out(client=self.client, device=device, precision=str(trainer.precision))

    def _set_up(self, server: Server) -> None:
        """Show the server to its parts, which allocate their state."""
        for part in (self.server_module, self.aggregator):
            part.attach(server)
            part.setup()
        self.server_module.check_aggregator(self.aggregator)
        self.guard.attach(server)
        for transform in self.transforms:
            transform.setup(server)

    def make_server_step(self, server: Server) -> tuple[ServerOptimizer, LRScheduler | None]:
        """Make the server's step and the scheduler of its learning rate, None without one.

        Raises:
            ValueError: The optimizer or the scheduler does not work with rounds, or with the server module, or the
                server module not with the pacing.
        """
        if self.pacing is not None:
            check_takes_stale(self.pacing, self.server_module)
        trainable = {name: value for name, value in server.weights.items() if name in server.trainable}
        step = ServerOptimizer(self.server_optimizer, trainable, undoes=self.guard.skips)
        if self.server_optimizer is None:
            return step, None
        checks.tell_server_rate(step.optimizer)
        scheduler: LRScheduler | None = None
        if self.server_lr_scheduler is not None:
            scheduler = self.server_lr_scheduler(step.optimizer)
        checks.check_server_optimizer(step.optimizer, scheduler)
        checks.check_server_steps(
            self.server_optimizer,
            self.server_lr_scheduler,
            dimensions=[value.ndim for value in trainable.values()],
            rounds=self.horizon.planned,
        )
        self.server_module.check_server_optimizer(step.optimizer)
        return step, scheduler


def check_inquiry(client: ClientModule, server_module: ServerModule) -> None:
    """Refuse an inquiry of a server module that has the name of one of the client's own exchanges.

    Args:
        client: The client module.
        server_module: The server module.

    Raises:
        ValueError: Both have an exchange of one name.
    """
    inquiry = server_module.inquiry
    if inquiry is not None and inquiry.exchange in client.exchanges:
        raise ValueError(
            f"{type(inquiry).__name__} needs an exchange of its own, got {inquiry.exchange!r}, which is one of "
            f"{type(client).__name__}; give it another name"
        )


def as_client(module: LightningModule | TrainableModule) -> ClientModule:
    """Return the module as a ClientModule. Any other LightningModule is put into one.

    Raises:
        TypeError: The module is a federation, or no LightningModule.
    """
    module = uncompiled(module)
    inner = getattr(module, "client", None)
    if isinstance(inner, ClientModule):
        raise TypeError(f"a client must not be a federation, got {type(module).__name__}; give its {described(inner)}")
    check_module(module)
    if isinstance(module, ClientModule):
        return module
    return ClientModule(module=module)
