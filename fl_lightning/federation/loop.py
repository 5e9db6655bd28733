"""The federation as a LightningModule: one training step of it is one communication round."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import torch
from pytorch_lightning import Callback, LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.aggregation import Aggregator, NonFiniteGuard, ServerModule, UpdateTransform
from fl_lightning.client.checkpoint_io import check_files_of
from fl_lightning.client.checks import check_module, uncompiled
from fl_lightning.client.decay import decay_of
from fl_lightning.client.forwarding import Forwarding
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices
from fl_lightning.client.store import ClientStore
from fl_lightning.client.training import LocalSettings
from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import current_communicator
from fl_lightning.federation import checkpoint as C
from fl_lightning.federation import checks, own_entries
from fl_lightning.federation.cohort_engine import CohortEngine
from fl_lightning.federation.engine import SequentialEngine
from fl_lightning.federation.evaluation import Evaluation
from fl_lightning.federation.execution import Execution, MemoryFormat
from fl_lightning.federation.faults import Fault, FaultSettings, NonFiniteUpdateError
from fl_lightning.federation.hyperparameters import hyperparameters, log_final, summary_key
from fl_lightning.federation.identity import RunIdentity
from fl_lightning.federation.plateau import Plateau
from fl_lightning.federation.recorder import Recorder, bytes_of_sets
from fl_lightning.federation.reported import Metrics, as_collection
from fl_lightning.federation.round import Round
from fl_lightning.federation.server import GlobalWeights, Server, ServerOptimizer
from fl_lightning.federation.tolerance import TolerantRound
from fl_lightning.federation.transaction import RoundStart, Transactions
from fl_lightning.types import State, TrainableModule
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.settings import as_list, check_at_least

__all__ = ["FederatedLoop", "NonFiniteUpdateError"]

CLIENT_HOOKS = ("on_client_start", "on_client_epoch_end", "on_client_end", "on_exchange_end")
"""Hooks of callbacks besides Lightning's, called as `(trainer, loop, ...)`; in them `loop.log` works."""

Part = TypeVar("Part")


class FederatedLoop(Forwarding):
    """Federates a client module: each epoch of the Trainer is one round of the federation.

    Args:
        client: the module that every client trains: a ClientModule, or any LightningModule (then by FedAvg).
        aggregator: the rule that makes one set of weights of the clients'; None: their mean.
        weighting: a client's weight in the mean: its `samples` n_i, or `uniform`.
        server_optimizer: steps on global − aggregate (FedOpt); None: the aggregate is taken as it is.
        server_lr_scheduler: of the server optimizer, stepped once a round.
        local_epochs: passes over a client's data in a round; a list gives each client its own.
        max_local_steps: at most so many optimizer steps per client and exchange.
        lr_decay: the local learning rate of round t is lr · lr_decay^t; `{cosine: FINAL_LR}`: half a cosine from lr to
            FINAL_LR over the Trainer's `max_epochs`.
        accumulate_grad_batches: batches per local optimizer step.
        clip_norm: largest norm of a local gradient; None: not clipped.
        personal: `fnmatch` patterns of entries that stay with each client; with `!` in front, of exceptions.
        keep: `fnmatch` patterns of buffers with `persistent=False` that a client keeps in its memory; the others are
            set back to their start for every client.
        nonfinite: on a client update with NaN or inf, or above `max_update_norm`: `error`, or `skip` that client; on
            such values of the rule or the server optimizer, or a weight below 0: `error`, or `skip` the round.
        on_error: on a client that raises, takes longer than `client_timeout`, or sends something else than the shared
            entries: `error`, or `skip` that client.
        max_update_norm: greatest norm of a client's update over the trainable entries; None: any. It refuses;
            `NormClip` in `transforms` clips.
        min_clients: a round with fewer clients leaves the model as it was.
        client_timeout: seconds that a client may train in an exchange, asked between batches; None: any. A round in
            which it counted is not repeated exactly.
        patience: the run ends with an error after so many rounds in a row with every client skipped.
        transforms: of the updates between client and sum, in order, after the check for NaN and inf.
        alma_every: every so many rounds evaluate what each of the N clients would deploy on its own test split; None:
            never, or every round where the clients share no weights (there is no global model to evaluate).
        initial_weights: a checkpoint or state-dict file to start from.
        threads: of this process for torch operations; None: left alone.
        seed: keys batches, dropout and initial weights; None: that of `seed_everything`, else 0.
        store: where clients keep their memory and personal entries between rounds; None: up to 4 GB in host memory,
            beyond in files of the run's folder.
        server_module: the method's server side; None: the client's `server_class`.
        metrics: torchmetrics objects by name, or a collection, of predictions and targets: evaluated on the global
            model (`global/NAME`), and with `alma_every` on each client's (`local/NAME`, the mean over clients).
        plateau: `ReduceLROnPlateau` of the client's `configure_optimizers` is stepped once a round with the value of
            its monitor, for all clients (`server`), left out (`drop`) or refused (`error`).
        chunk: clients trained at once, as rows of one stack: 1, K, or `auto` (where that is known to be right and
            faster); a line in the log says where and why they are trained one after the other. The order of
            floating-point sums differs, so that results differ in the last bits.
        memory_format: of the weights of two-dimensional convolutions: `channels_last`, `contiguous`, or `auto`, the
            faster one where that is known (see `Execution.lay_out`). Results differ in the last bits.
        compile: whether `torch.compile` compiles the step of clients trained at once (`chunk`), anew for each of its
            shapes; it seldom pays (see docs/performance.md).

    Attributes:
        recorder: of the logged values.
        final_key: log key of the value that sums up an evaluation; empty before the first one.
    """

    _server: Server | None = None
    _server_step: ServerOptimizer | None = None
    _engine: SequentialEngine | None = None
    _transactions: Transactions | None = None
    _evaluation: Evaluation | None = None
    _initial_buffers: State | None = None
    _deferred_state: Mapping[str, Any] = MappingProxyType({})
    """Saved entries of the parts that are not allocated yet."""
    _loaded_transforms: Sequence[dict[str, Any]] = ()
    """States of the transforms until training starts."""
    _handed_over = False
    final_key = ""

    def __init__(
        self,
        client: LightningModule | TrainableModule,
        aggregator: Aggregator | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        server_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        server_lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        local_epochs: int | list[int] = 1,
        max_local_steps: int | None = None,
        lr_decay: float | dict[str, float] = 1.0,
        accumulate_grad_batches: int = 1,
        clip_norm: float | None = None,
        personal: str | list[str] | None = None,
        nonfinite: Literal["error", "skip"] = "error",
        on_error: Literal["error", "skip"] = "error",
        max_update_norm: float | None = None,
        min_clients: int = 1,
        client_timeout: float | None = None,
        patience: int = 10,
        transforms: list[UpdateTransform] | UpdateTransform | None = None,
        alma_every: int | None = None,
        initial_weights: str | Path | None = None,
        threads: int | None = None,
        seed: int | None = None,
        store: ClientStore | None = None,
        server_module: ServerModule | None = None,
        keep: str | list[str] | None = None,
        metrics: Metrics | None = None,
        plateau: Literal["server", "drop", "error"] = "server",
        chunk: Literal["auto"] | int = 1,
        memory_format: MemoryFormat = "auto",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization, self._seed, self.client, self.recorder = False, seed, as_client(client), Recorder()
        self.aggregator = Aggregator() if aggregator is None else aggregator
        self.server_module = self.client.server_class() if server_module is None else server_module
        checks.check_parts(self.client, self.aggregator, self.server_module, server_optimizer, server_lr_scheduler)
        self.aggregator.weigh_by(weighting)
        check_at_least(1, alma_every=alma_every)
        settings = (local_epochs, max_local_steps, lr_decay, accumulate_grad_batches, clip_norm, client_timeout)
        self.settings, self._evaluation_services = LocalSettings(*settings), ClientServices(False)
        self.faults = FaultSettings(nonfinite, on_error, max_update_norm, min_clients, patience)
        self.server_optimizer, self.server_lr_scheduler = server_optimizer, server_lr_scheduler
        self.guard, self.transforms = NonFiniteGuard(nonfinite == "skip", max_update_norm), as_list(transforms)
        self.store, self.personal, self.keep = store or ClientStore(), tuple(as_list(personal)), tuple(as_list(keep))
        self.identity, self.plateau, self.metrics = RunIdentity(), Plateau(plateau), as_collection(metrics)
        self.execution, self._services = Execution(threads, chunk, memory_format, compile), ClientServices()
        self.alma_every, self.initial_weights, self.initial_personal = alma_every, initial_weights, State()
        self._client_hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in CLIENT_HOOKS}

    # --- parts that exist once a Trainer has set the loop up ----------------------------------------------------

    @property
    def seed(self) -> int:
        """Seed of the run, which keys every draw."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    @property
    def data(self) -> FederatedDataModule:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined,no-any-return]

    @property
    def round_metrics(self) -> dict[str, float]:
        """The values of the last round, by log key."""
        return self.recorder.round_metrics

    @property
    def skipped(self) -> list[Fault]:
        """Clients that the last round left out, and why."""
        return [] if self._transactions is None else self._transactions.skipped

    @property
    def _begun(self) -> RoundStart | None:
        """The federation when the round under way began; None outside of rounds."""
        return None if self._transactions is None else self._transactions.begun

    @property
    def weights(self) -> GlobalWeights:
        """The global model's entries in the client module."""
        return self.server.global_weights

    @property
    def server(self) -> Server:
        """The server as its parts see it."""
        return built(self._server)

    @property
    def engine(self) -> SequentialEngine:
        """Engine that trains the clients; made anew for every run of a Trainer."""
        if self._engine is None:
            decay = decay_of(self.settings.lr_decay, self.trainer.max_epochs)
            settings = replace(self.settings, seed=self.seed, lr_decay=decay)
            self._engine = self._new_engine(settings, self._services, self._client_hooks)
        return self._engine

    def _new_engine(
        self, settings: LocalSettings, services: ClientServices, hooks: dict[str, list[Callable[..., None]]]
    ) -> SequentialEngine:
        precision, datamodule = self.trainer.precision_plugin, getattr(self.data.source, "datamodule", None)
        parts = (self.client, settings, self.weights, services, self.device, precision, datamodule, hooks)
        if self.execution.chunk == 1:
            return SequentialEngine(*parts)
        chunk, compiles = self.execution.chunk, self.execution.compile
        return CohortEngine(*parts, chunk=chunk, tolerant=self.faults.on_error == "skip", compiles=compiles)

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the global model; made anew for every run of a Trainer."""
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self.engine,
                self.evaluated_weights,
                self.data,
                self._evaluation_services,
                self.recorder,
                current_communicator(self.device),
                self.metrics,
            )
        return self._evaluation

    def evaluated_weights(self, weights: State) -> State:
        """Choose the shared entries that are evaluated in place of the global ones, as rule and server module say."""
        return self.server_module.evaluation_weights(self.aggregator.evaluation_weights(weights))

    def client_modules(self) -> list[LightningModule]:
        return list(self.client.lightning_modules())

    def services_of(self, hook: str) -> ClientServices:
        """Choose the services of a hook: those of the evaluation in its hooks, else those of training."""
        evaluates = hook.startswith(("on_validation", "on_test", "on_predict"))
        return self._evaluation_services if evaluates else self._services

    # --- setup -------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        checks.check_trainer(self.trainer)  # the earliest hook: before Lightning refuses some settings in its own words
        found = self.forward_hook("configure_callbacks")
        return [callback for result in found for callback in as_list(result)]

    def setup(self, stage: str) -> None:
        check_files_of(self.trainer.strategy)
        data = checks.check_data(self.trainer, self.settings.local_epochs)
        if self._evaluation is not None:
            self._evaluation.restore()  # a pass of an earlier run that was broken off
        self._handed_over, self._engine, self._evaluation, self._transactions = False, None, None, None
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        for name, found in self._client_hooks.items():
            found[:] = [partial(getattr(c, name), self.trainer, self) for c in callbacks if hasattr(c, name)]
        checks.check_needs(self.client, self.server_module, self.aggregator, data, self.trainer)
        data.key_batches(self.seed)
        checks.check_streams(data, self.settings.max_batches, self.execution.chunk, stage == "fit")
        self._services.begin_client()  # what was logged in an earlier run is not of this one
        if self._server is not None:
            self._build_net(data)  # refuses data of another kind than the last fit's
            self._server.attach(data)
        self.forward_hook("setup", stage)

    def configure_model(self) -> None:
        """Build the net for the data, then everything that a checkpoint is restored into."""
        try:
            data = self.data
        except RuntimeError:  # no Trainer yet: load_from_checkpoint, which knows from the checkpoint what to build
            return
        if self._server is not None:
            return
        torch.default_generator.manual_seed(keyed_seed(self.seed, "weights"))
        self.client.configure_model()
        self._build_net(data)
        self.execution.lay_out(self.client, self.trainer.strategy.root_device, str(self.trainer.precision))
        weights = GlobalWeights(self.client, self.personal, self.keep)
        checks.check_shared(self.client, self.aggregator, self.server_optimizer, weights.trainable)
        checks.check_exposure(self.client, self.server_module, self.aggregator)
        if self.initial_weights is not None:
            self.client.load_state_dict(C.client_state(Path(self.initial_weights), self.client))
        weights.transient.restore(self._initial_buffers or {})
        first = {**weights.live(weights.entries), **weights.transient.tensors()}
        current_communicator().broadcast_(list(first.values()))
        weights.transient.load({})
        self.initial_personal = self.initial_personal or weights.snapshot(weights.personal)
        server = Server(weights, data, self.store)
        for part in (self.server_module, self.aggregator):
            part.attach(server)
            part.setup()
        for transform in (self.guard, *self.transforms):
            transform.setup(server)
        if self._deferred_state:
            super().load_state_dict(self._deferred_state, strict=False)
            self._deferred_state = {}
        self._server = server

    def _build_net(self, data: FederatedDataModule) -> None:
        if self.client.module is None:  # of a module's data the classes need not be counted
            self.client.build(data.num_classes, data.input_shape)

    def configure_optimizers(self) -> Any:
        server = self.server
        trainable = {name: value for name, value in server.weights.items() if name in server.trainable}
        self._server_step = ServerOptimizer(self.server_optimizer, trainable, self.guard.skips)
        optimizer = self._server_step.optimizer
        scheduler = None if self.server_lr_scheduler is None else self.server_lr_scheduler(optimizer)
        checks.check_server_optimizer(optimizer, scheduler)
        if self.server_optimizer is not None:
            self.server_module.check_server_optimizer(optimizer)
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def _describe(self) -> None:
        """Tell what the run is: settings that a checkpoint holds, to be compared where it is continued."""
        parts = {
            name: getattr(self, name)
            for name in ("aggregator", "server_module", "transforms", "personal", "keep", "seed")
        }
        parts |= {"server_optimizer": self.server_optimizer, "server_lr_scheduler": self.server_lr_scheduler}
        parts |= asdict(self.settings) | asdict(self.faults) | {"seed": self.seed}
        parts |= {"plateau": self.plateau.mode, "memory_format": self.execution.memory_format}
        self.identity.describe(self.client, parts, self.data, self.trainer)

    def on_fit_start(self) -> None:
        self._describe()
        for logger in self.loggers:
            logger.log_hyperparams(self._hyperparameters())
        if self.plateau.start(self.client) and not self.trainer.num_sanity_val_steps:
            self.trainer.num_sanity_val_steps = 1  # a batch of the evaluation tells what it logs
        if self.trainer.ckpt_path is not None:
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            self.recorder.restore(C.rows_kept(self.recorder, self.loggers, callbacks))
        else:
            self.weights.frozen.load_state_dict({})
        self.execution.limit_threads()
        if self.data.schedule is not None and self.trainer.max_epochs not in (None, -1):
            self.data.cohort(max(self.trainer.max_epochs, 1) - 1)  # a schedule that is too short is refused here
        processes, error = current_communicator(self.device), None
        checks.check_transforms(self.transforms, processes.world)
        try:
            self.store.start(self.trainer, self.device)
        except Exception as problem:
            error = problem
        processes.all_gather_or_raise(None, error)
        round_ = (TolerantRound if self.faults.on_error == "skip" else Round)(
            client=self.client,
            engine=self.engine,
            server=self.server,
            weights=self.weights,
            server_module=self.server_module,
            aggregator=self.aggregator,
            guard=self.guard,
            min_clients=self.faults.min_clients,
            counts_skipped=self.faults.skips,
            transforms=self.transforms,
            communicator=processes,
            store=self.store,
            recorder=self.recorder,
            traffic=self.recorder.count_traffic(self.weights.live(self.weights.shared)),
            initial_personal=self._initial_personal_of if self.weights.personal else None,
            view=self.data.views(),
            hooks=self._client_hooks,
        )
        stateful = partial(checks.keeps_state, self.server_module, self.aggregator, self.server_optimizer)
        self._transactions = Transactions(round_, built(self._server_step), self.faults, stateful)
        self.forward_hook("on_fit_start")

    def _initial_personal_of(self, client_id: int) -> State | None:
        names = self.weights.personal_of(client_id)
        return {name: self.initial_personal[name] for name in names} if names else None

    def on_train_start(self) -> None:
        self.data.to(self.device)
        if self.trainer.ckpt_path is None:
            self.plateau.check_monitors(self._keys_of_a_client)
        self.engine.local.scale_lr(self.plateau.factors)
        for transform, state in zip(self.transforms, self._loaded_transforms, strict=False):
            transform.load_state_dict(state)
        self._loaded_transforms = ()
        self.recorder.go_back(self.current_epoch)  # a run that goes back to an earlier checkpoint
        if self.recorder.pending_round is not None and self.recorder.pending_round < self.current_epoch:
            self.on_train_epoch_end()  # resumed from a checkpoint taken within the end of that round
        self.forward_hook("on_train_start")
        self.recorder.logged.absorb(self._services.logged)  # what the client has logged before its first round

    def _keys_of_a_client(self) -> set[str]:
        """Train one client for one step, undo it, and list the keys that it logged."""
        client_id = max(range(self.server.num_clients), key=self.server.size)
        settings = replace(self.engine.local.settings, max_local_steps=1)
        engine = self._new_engine(settings, ClientServices(), {})
        rounds = built(self._transactions)
        with rounds.transaction() as begun, torch.enable_grad():
            keys = rounds.round.probe(engine, client_id)
            begun.restore()
        return keys

    def _hyperparameters(self) -> dict[str, Any]:
        return hyperparameters(self.identity.objects, self.client_modules())

    def on_train_end(self) -> None:
        key, values = self.final_key, self.recorder.round_metrics
        if key in values:
            log_final(self.loggers, self._hyperparameters(), values[key], self.current_epoch)
        super().on_train_end()

    # --- the round ---------------------------------------------------------------------------------------------

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Run one round: every exchange with every client of the cohort, the aggregation, and one server step."""
        round_idx, optimizer = self.current_epoch, cast(Optimizer, self.optimizers())
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # only a client's forward is in the Trainer's region
        with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
            metrics = built(self._transactions).run(round_idx, self.data.cohort(round_idx), optimizer.step, scaler)
        if self.server_lr_scheduler is not None:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        if round_idx == 0:
            needs = self.client.needs | self.server_module.needs | self.aggregator.needs
            metrics |= bytes_of_sets(self.data, needs)
        self.recorder.end_training(round_idx, metrics)
        self._publish()

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        """Evaluate ALMA and keep the row; not in the step, where an interruption would undo the complete round."""
        round_idx = self.current_epoch
        every = self.alma_every or int(self.weights.own_models)
        if every and (round_idx + 1) % every == 0:
            self.recorder.add(self.evaluation.alma(round_idx, self.server, self._initial_personal_of))
            self._publish()
        self.recorder.keep_round(round_idx)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the round (in the client hooks of callbacks); outside a round Lightning's `log`."""
        if self._begun is None:
            super().log(name, value, *args, **kwargs)
        else:
            self.recorder.log(name, value, kwargs.get("batch_size") or 1, kwargs.get("reduce_fx", "mean"))

    def _publish(self) -> None:
        """Show the round's values to callbacks that monitor them (`self.log` would cost 0.75 ms a key and round)."""
        values = self.recorder.round_metrics
        tensors = torch.tensor(list(values.values())).unbind()  # one tensor for all: each would cost as much
        self.trainer.callback_metrics.update(zip(values, tensors, strict=True))

    def on_train_epoch_end(self) -> None:
        """Hand the round's values to the loggers, at x = round."""
        round_idx = self.recorder.take_pending()
        if round_idx is None:
            return
        for logger in self.loggers:
            logger.log_metrics(self.round_metrics, step=round_idx)
        self.plateau.step(round_idx, self.round_metrics)
        self.engine.local.scale_lr(self.plateau.factors)

    # --- evaluation --------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self.evaluation.start()
        self.forward_hook("on_validation_start")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step("validation", batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._evaluated("on_validation_epoch_end", "val" if self.data.evaluated == "val" else "global")

    def on_test_start(self) -> None:
        self.evaluation.start()
        self.forward_hook("on_test_start")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step("test", batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self._evaluated("on_test_epoch_end", "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.predict(batch, batch_idx, dataloader_idx)

    def _evaluated(self, hook: str, prefix: str) -> None:
        self._evaluation_services.begin_loader("")
        self.forward_hook(hook)
        values = self.evaluation.end(prefix)
        if self.trainer.sanity_checking:
            self.plateau.saw(values)
            return
        if self.trainer.state.fn != "fit":
            if self.weights.own_models:
                values |= self.evaluation.alma(self.current_epoch, self.server, self._initial_personal_of)
            self.log_dict(values)
            return
        self.final_key = summary_key(values) or ""
        forgetting = self.recorder.forgetting(self.current_epoch)
        self.recorder.add(values if forgetting is None else {**values, f"{prefix}/forgetting": forgetting})
        self.recorder.keep_round(self.current_epoch)
        self._publish()

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the state of the last whole round: inside a round or an evaluation, the weights before it."""
        state = super().state_dict(*args, **kwargs)
        if self._begun is not None:
            state |= self._begun.state_dict()
        elif self._evaluation is not None and self._evaluation.before is not None:
            state |= self.weights.saved(self._evaluation.before)
        if self._handed_over and (shape := C.data_shape(self.client)) is not None:
            state[C.DATA_SHAPE] = torch.tensor(shape)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state; outside of a fit build the net first, and keep entries that are allocated later for then."""
        strict = strict and all(module.strict_loading for module in self.client_modules())
        state = dict(state_dict)
        shape = state.pop(C.DATA_SHAPE, None)
        if self._server is None:
            self.initial_weights = None  # they are overwritten here, and must not come back
            C.build(self.client, None if shape is None else shape.tolist())
            self._deferred_state = C.unallocated(self.state_dict(), state)
            state = {name: value for name, value in state.items() if name not in self._deferred_state}
        return super().load_state_dict(state, strict, assign)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        for found in self._client_hooks.values():
            found.clear()  # they hold the Trainer
        self.client.disconnect()
        self._handed_over = parent_process() is not None  # only the state dict of a started process comes back

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        C.begin_round_anew(checkpoint)
        start = self._begun
        transforms = self._loaded_transforms or [transform.state_dict() for transform in self.transforms]
        checkpoint["federated"] = {
            "store": C.whole_store(self.store, current_communicator(self.device), start is not None),
            "initial_personal": self.initial_personal,
            "recorder": self.recorder.state_dict(),
            "transforms": transforms if start is None else start.transform_states,
            "client": own_entries.save(self.client_modules(), self.forward_hook),
            "settings": self.identity.state_dict(),
            C.DATA_SHAPE: C.data_shape(self.client),
        }
        if plateau := self.plateau.state_dict():
            checkpoint["federated"]["plateau"] = plateau
        if self._server is not None:
            if buffers := self.weights.transient.tensors():
                checkpoint["federated"]["buffers"] = buffers
            if frozen := self.weights.frozen.state_dict(start is not None):
                checkpoint["federated"]["frozen"] = frozen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fits = self._trainer is not None and self.trainer.state.fn == "fit"
        saved = C.federated(checkpoint, "the checkpoint", fits)
        entries, early = checkpoint["state_dict"], self._server is None
        if not early:
            self._describe()
            self.identity.compare(saved["settings"], evaluates=not fits)
            if self.identity.has_changed("model.server_optimizer", "model.server_lr_scheduler"):
                checkpoint |= {"optimizer_states": [], "lr_schedulers": []}  # of another one
        if early:  # by load_from_checkpoint, before any data are known
            C.build(self.client, saved.get(C.DATA_SHAPE))
        own = self.state_dict()
        C.check_entries(own | C.unallocated(own, entries) if early else own, entries)
        if len(saved["transforms"]) != len(self.transforms):
            raise ValueError(
                f"the checkpoint must be of the same model.transforms, but has {len(saved['transforms'])} and there "
                f"are {len(self.transforms)} here; give the configuration it was made with"
            )
        processes = current_communicator()
        self.store.load_state_dict(saved["store"], processes.rank, processes.world)
        self.initial_personal = {name: value.to(self.device) for name, value in saved["initial_personal"].items()}
        self.plateau.load_state_dict(saved.get("plateau", {}))
        self._initial_buffers = saved.get("buffers", {})
        if not early:
            self.weights.transient.restore(self._initial_buffers or {})
            self.weights.frozen.load_state_dict(saved.get("frozen", {}))
        self.recorder.load_state_dict(saved["recorder"])
        self._loaded_transforms = saved["transforms"]
        own_entries.load(self.client_modules(), self.forward_hook, saved["client"])


def as_client(module: LightningModule | TrainableModule) -> ClientModule:
    """Check the module that every client trains, and put one that is no ClientModule into one."""
    module = uncompiled(module)
    check_module(module)
    return module if isinstance(module, ClientModule) else ClientModule(module=module)


def built(part: Part | None) -> Part:
    """Return a part of the loop that a Trainer has set up.

    Raises:
        RuntimeError: before that.
    """
    if part is None:
        raise RuntimeError("a FederatedLoop has no federation before a Trainer has set it up; call trainer.fit first")
    return part
