"""The parts of a federation: those that a user chooses, and how the server is made of them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

from fl_lightning.aggregation import Aggregator, Codec, NonFiniteGuard, ServerModule, UpdateTransform
from fl_lightning.client.checkpoint_io import check_files_of
from fl_lightning.client.checks import check_module, uncompiled
from fl_lightning.client.hooks import refuse_unforwarded
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, EvaluationServices, MetricAccumulator
from fl_lightning.client.store import ClientStore
from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.settings import LocalSettings, decay_of
from fl_lightning.federation import checks, private
from fl_lightning.federation.identity import DIGESTS, RunIdentity, described_federation
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.server import Server, ServerOptimizer
from fl_lightning.members.codec import check_codec
from fl_lightning.members.faults import FaultPolicy, SkippedClients, check_measured, encodes
from fl_lightning.members.plateau import Plateau
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.history import GUARANTEES, UNPROTECTED
from fl_lightning.types import DataModule, State, TrainableModule
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.settings import check_factory, check_kind, check_whole, described

CLIENT_HOOKS = ("on_client_start", "on_client_epoch_end", "on_client_end", "on_exchange_end", "on_round_repeat")
"""Hooks of callbacks besides Lightning's, called as `(trainer, loop, ...)`; in them `loop.log` works."""

SHOWN = ("client", "aggregator", "server_module", "metrics", "store", "recorder", "identity")
"""Parts that the loop has under the same names."""

Hooks = dict[str, list[Callable[..., None]]]
"""The callbacks' hooks, without trainer and loop, by name."""


@dataclass(kw_only=True)
class FederationParts:
    """Chosen parts of a federation, of which it makes server, engine and rounds once data and Trainer are known.

    Args:
        client: the module that every client trains.
        aggregator: the rule.
        server_module: the method's server side.
        server_optimizer: factory; None: the aggregate is taken as it is.
        server_lr_scheduler: factory; or None.
        settings: of local training.
        faults: what happens on faults.
        transforms: of updates, in order.
        codec: of what clients send; or None.
        execution: how a process computes.
        store: of the clients' memory and personal entries.
        personal: patterns of entries that are never transmitted.
        keep: patterns of buffers with `persistent=False` that a client keeps.
        metrics: the user's own; or None.
        given_seed: keys every draw; None: that of `seed_everything`, else 0.
        identity: of the run.
        services: attached to the client in training.
        evaluation_services: attached to it in evaluation.
        hooks: of the run's callbacks, by name.
        batch_hooks: of the callbacks that the client's modules make, by name.
        initial_personal: personal entries before any training, by name; the server's making fills it.

    Attributes:
        guard: finds values that must not become the model.
        plateau: of the clients' learning rates.
        recorder: of logged values.
        skipped: of the clients that rounds leave out.
        is_private: whether something is promised of what is released, by the rule or by the clients.
        min_clients: clients that a round needs: none under a private rule, which hides whether there are any.

    Raises:
        ValueError: parts that do not go together, naming both.
        TypeError: a part of another kind.
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
    identity: RunIdentity = field(default_factory=RunIdentity)
    services: ClientServices = field(default_factory=ClientServices)
    evaluation_services: EvaluationServices = field(default_factory=EvaluationServices)
    hooks: Hooks = field(default_factory=lambda: {name: [] for name in CLIENT_HOOKS})
    batch_hooks: Hooks = field(default_factory=Hooks)
    initial_personal: State = field(default_factory=State)
    plateau: Plateau = field(default_factory=Plateau, init=False)
    guard: NonFiniteGuard = field(init=False)
    recorder: Recorder = field(init=False)
    skipped: SkippedClients = field(init=False)
    is_private: bool = field(init=False)
    min_clients: int = field(init=False)

    def __post_init__(self) -> None:
        self.guard = NonFiniteGuard(self.faults.nonfinite == "skip", self.faults.max_update_norm)
        self.recorder, self.skipped = Recorder(self.faults.skips, self.client), SkippedClients(self.faults)
        client = self.client
        remedy = "a method's server side is server_module"
        if isinstance(self.aggregator, DataModule):
            remedy = "data are given to the Trainer: fit(loop, datamodule=...)"
        rule = "a rule, an instance of a subclass of Aggregator such as MedianAggregator()"
        check_kind(Aggregator, rule, remedy, aggregator=self.aggregator)
        for module in client.lightning_modules():
            refuse_unforwarded(module)
        if not isinstance(self.server_module, client.server_class):
            raise ValueError(
                f"{type(client).__name__} needs a {client.server_class.__name__}, got {described(self.server_module)}; "
                f"leave server_module unset to take the right one"
            )
        examples = "functools.partial(torch.optim.SGD, lr=1.0)", "functools.partial(StepLR, step_size=10)"
        check_factory("parameters", "an optimizer", examples[0], server_optimizer=self.server_optimizer)
        check_factory("optimizer", "its scheduler", examples[1], server_lr_scheduler=self.server_lr_scheduler)
        for transform in self.transforms:
            remedy = "give [NormClip(max_norm=10)]"
            check_kind(UpdateTransform, "instances of UpdateTransform", remedy, transforms=transform)
        check_kind(Codec, "an instance of a subclass of Codec", "give such as QSGD(bits=4)", codec=self.codec)
        if self.codec is not None:
            check_codec(self.codec, self.aggregator, self.transforms)
        if self.server_lr_scheduler is not None and self.server_optimizer is None:
            raise ValueError("server_lr_scheduler needs a server_optimizer, got none; set model.server_optimizer")
        if any(map(encodes, self.transforms)):
            check_measured(self.transforms, self.guard.max_norm)
        check_kind(ClientStore, "a ClientStore of fl_lightning.client.store", "leave it unset", store=self.store)
        for personal, keep in zip_longest(self.personal, self.keep):
            check_kind(str, "names or patterns of entries", "give such as 'net.head.*'", personal=personal, keep=keep)
        check_whole(seed=self.given_seed)
        self.is_private = self.aggregator.is_private or client.is_private
        self.min_clients = 0 if self.aggregator.is_private else self.faults.min_clients
        if self.faults.min_clients < 1 and not self.aggregator.is_private:
            raise ValueError(
                f"model.faults.min_clients must be at least 1, got {self.faults.min_clients}: "
                f"{type(self.aggregator).__name__} makes nothing of no clients; a private rule (DPFedAvg) does"
            )

    @property
    def seed(self) -> int:
        """Seed of the run, which keys every draw."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.given_seed is None else self.given_seed

    def marked(self, values: Mapping[str, float]) -> dict[str, float]:
        """Mark values of clients, by their log keys, where something is promised of what is released: they break it."""
        if not self.is_private:
            return dict(values)
        return {k if k in GUARANTEES else f"{UNPROTECTED}{k}": value for k, value in values.items()}

    @property
    def needs(self) -> frozenset[str]:
        """Needs of client, server module, rule and codec."""
        return frozenset[str]().union(*(needs for _, needs in self.needs_by_name()))

    def needs_by_name(self) -> checks.Needs:
        """List the needs of client, server module, rule and codec.

        Those of a method's own server side under the client's name.
        """
        client = self.client
        rule = self.aggregator
        server = self.server_module
        codecs = [] if self.codec is None else [(type(self.codec).__name__, self.codec.needs)]
        name = type(client if type(server) is client.server_class else server).__name__
        return [(type(client).__name__, client.needs), (name, server.needs), (type(rule).__name__, rule.needs), *codecs]

    def evaluated_weights(self, weights: State) -> State:
        """Choose the shared entries that are evaluated in place of the global ones, as rule and server module say."""
        return self.server_module.evaluation_weights(self.aggregator.evaluation_weights(weights))

    def keeps_state(self) -> str:
        """Name what keeps a state of the trained entries at the server.

        Empty: nothing.
        """
        if type(self.server_module) is not ServerModule:
            return type(self.server_module).__name__
        if next(self.aggregator.buffers(), None) is not None:
            return type(self.aggregator).__name__
        return "" if self.server_optimizer is None else "the server_optimizer"

    # --- a run -------------------------------------------------------------------------------------------------

    def begin_run(self, trainer: Trainer, loop: LightningModule, server: Server | None, fits: bool) -> None:
        """Check the data of a run, and take the hooks of its callbacks.

        Args:
            trainer: of the run.
            loop: that the callbacks are told of.
            server: of an earlier run; or None.
            fits: whether the run is a fit.

        Raises:
            TypeError: the Trainer has other data.
            ValueError: data that do not go with parts or settings, or with the net of an earlier run; a part that was
                replaced in the loop.
        """
        for name in SHOWN:
            if getattr(loop, name) is not getattr(self, name):
                raise ValueError(
                    f"the parts of a FederatedLoop are given to it when it is made, and its {name} was replaced since; "
                    f"make a new FederatedLoop"
                )
        check_files_of(trainer.strategy)
        data = checks.check_data(trainer, self.settings.local_epochs)
        for name, functions in self.hooks.items():
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            functions[:] = [partial(getattr(c, name), trainer, loop) for c in callbacks if hasattr(c, name)]
        checks.check_needs(self.client, self.needs_by_name(), data, trainer)
        data.key_batches(self.seed)
        if data.secret_seed:
            data.take_secret(current_communicator().gather(data.secret)[0])
        if fits:
            checks.tell_epochs(self.settings.local_epochs)
            if self.is_private and trainer.ckpt_path is None:
                private.check_first_fit(self.recorder.history)
            if self.client.is_private:
                private.check_private_client(self.client, self.faults)
            if self.aggregator.is_private:
                private.check_private_rule(
                    client=self.client,
                    rule=self.aggregator,
                    server_module=self.server_module,
                    transforms=self.transforms,
                    data=data,
                )
                private.check_private_faults(self.faults, type(self.aggregator).__name__)
        checks.check_streams(data, self.settings.max_batches, self.execution.chunk, fits)
        if fits and data.schedule is not None and trainer.max_epochs not in (None, -1):
            data.cohort(max(trainer.max_epochs, 1) - 1)  # a schedule that is too short is refused here
        self.services.begin(logged=MetricAccumulator())  # what was logged in an earlier run is not of this one
        if server is not None:
            self.build_net(data)
            server.attach(data)

    def end_run(self) -> None:
        """Let go of the Trainer."""
        for functions in self.hooks.values():
            functions.clear()
        self.client.disconnect()

    def describe(self, trainer: Trainer) -> None:
        """Tell what the run is: settings that a checkpoint holds, to be compared where it is continued."""
        settings = self.described(str(trainer.precision), trainer.max_epochs)
        self.identity.describe(settings, trainer.datamodule, trainer.state.fn == "fit")  # type: ignore[attr-defined]

    def described(self, precision: str, max_epochs: int | None) -> dict[str, Any]:
        """Describe client, parts and settings as plain values by dotted name.

        Args:
            precision: of the Trainer.
            max_epochs: rounds of the run; None or -1: not limited.
        """
        parts = ("aggregator", "server_module", "server_optimizer", "server_lr_scheduler")
        settings = {name: getattr(self, name) for name in (*parts, "transforms", "codec", "personal", "keep")}
        faults = {f"faults.{name}": value for name, value in asdict(self.faults).items()}
        settings |= asdict(self.settings) | faults | {"seed": self.seed}
        del settings["client_timeout"]
        return described_federation(self.client, settings, precision, max_epochs)

    def local_settings(self, rounds: int | None) -> LocalSettings:
        """Make the settings of local training in a run of so many rounds.

        None or -1: not limited.
        """
        decay = decay_of(self.settings.lr_decay, rounds)
        return replace(self.settings, seed=self.seed, lr_decay=decay, client_timeout=self.faults.client_timeout)

    def hyperparameters(self) -> dict[str, Any]:
        """Join the settings by their dotted names and what the modules saved (`save_hyperparameters`) by its own."""
        values = {key: value for key, value in self.identity.objects.items() if key not in DIGESTS}
        for module in self.client.lightning_modules():
            values |= {key: value for key, value in module.hparams_initial.items() if key != "_class_path"}
        return values

    # --- making ------------------------------------------------------------------------------------------------

    def build_net(self, data: FederatedDataModule) -> None:
        """Build the client's net for the data, or refuse other data than it was built for."""
        if self.client.module is None:  # of a module's data the classes need not be counted
            self.client.build(data.num_classes, data.input_shape)

    def make_server(
        self, data: FederatedDataModule, trainer: Trainer, start: Callable[[GlobalWeights], None]
    ) -> Server:
        """Make the server with the weights of round 0, the same on all processes, and attach its parts.

        Args:
            data: of the federation.
            trainer: knows device and precision.
            start: given the weights as they were drawn, puts other ones in their place.
        """
        client = self.client
        with torch.device("cpu"):  # Lightning makes tensors on a GPU, whose generator draws other ones
            torch.default_generator.manual_seed(keyed_seed(self.seed, "weights"))
            client.configure_model()
            self.build_net(data)
        client.to(trainer.strategy.root_device)
        self.execution.lay_out(client, trainer.strategy.root_device, str(trainer.precision))
        weights = GlobalWeights(client, self.personal, self.keep, self.keeps_state)
        checks.check_shared(
            client=client,
            aggregator=self.aggregator,
            server_optimizer=self.server_optimizer,
            codec=self.codec,
            trainable=weights.trainable,
        )
        checks.check_accumulated_lr(client, self.needs_by_name())
        start(weights)
        first = {**weights.live(weights.entries), **weights.non_persistent.state_dict()}
        current_communicator().broadcast_(list(first.values()))
        weights.non_persistent.set_back({})
        if not self.initial_personal:
            self.initial_personal.update(weights.snapshot(weights.personal))
        server = Server(weights, data, self.store)
        for part in (self.server_module, self.aggregator):
            part.attach(server)
            part.setup()
        self.guard.setup(server)
        for transform in self.transforms:
            transform.setup(server)
        return server

    def make_server_step(self, server: Server) -> tuple[ServerOptimizer, LRScheduler | None]:
        """Make the server's step, and the scheduler of its learning rate.

        Raises:
            ValueError: an optimizer or a scheduler that does not go with rounds, or with the server module.
        """
        trainable = {name: value for name, value in server.weights.items() if name in server.trainable}
        step = ServerOptimizer(self.server_optimizer, trainable, self.guard.skips)
        if self.server_optimizer is None:
            return step, None
        checks.tell_server_rate(step.optimizer)
        scheduler = self.server_lr_scheduler and self.server_lr_scheduler(step.optimizer)
        checks.check_server_optimizer(step.optimizer, scheduler)
        self.server_module.check_server_optimizer(step.optimizer)
        return step, scheduler


def as_client(module: LightningModule | TrainableModule) -> ClientModule:
    """Check the module that every client trains, and put one that is no ClientModule into one."""
    module = uncompiled(module)
    if isinstance(inner := getattr(module, "client", None), ClientModule):
        raise TypeError(f"a client must not be a federation, got {type(module).__name__}; give its {described(inner)}")
    check_module(module)
    return module if isinstance(module, ClientModule) else ClientModule(module=module)
