"""The federation as a LightningModule: one training step of it is one communication round."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pytorch_lightning import Callback, LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fl_lightning.aggregation import Aggregator, NonFiniteGuard, ServerModule, UpdateTransform
from fl_lightning.client.checks import check_module
from fl_lightning.client.forwarding import Forwarding
from fl_lightning.client.hooks import hooks
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import needs_closure
from fl_lightning.client.services import ClientServices
from fl_lightning.client.store import ClientStore
from fl_lightning.client.training import LocalSettings
from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import current_communicator
from fl_lightning.federation import checkpoint as C
from fl_lightning.federation.checks import (
    check_combination,
    check_data,
    check_exposure,
    check_needs,
    check_rule,
    check_server_optimizer,
    check_trainer,
    check_transforms,
)
from fl_lightning.federation.engine import SequentialEngine
from fl_lightning.federation.evaluation import Evaluation
from fl_lightning.federation.recorder import Recorder, TrafficCounter, bytes_of_sets
from fl_lightning.federation.round import NonFiniteUpdateError, Round
from fl_lightning.federation.server import GlobalWeights, Server, ServerOptimizer
from fl_lightning.functional.state import clone
from fl_lightning.types import State
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
        lr_decay: the local learning rate of round t is lr · lr_decay^t.
        accumulate_grad_batches: batches per local optimizer step.
        clip_norm: largest norm of a local gradient; None: not clipped.
        personal: `fnmatch` patterns of entries that stay with each client.
        nonfinite: on a client update with NaN or inf: `error`, or `skip` that client.
        transforms: of the updates between client and sum, in order, after the check for NaN and inf.
        alma_every: every so many rounds evaluate what each of the N clients would deploy on its own test split; None:
            never, or every round where the clients share no weights (there is no global model to evaluate).
        initial_weights: a checkpoint or state-dict file to start from.
        threads: of this process for torch operations; None: left alone.
        seed: keys batches, dropout and initial weights; None: that of `seed_everything`, else 0.
        store: where clients keep their memory and personal entries between rounds; None: up to 4 GB in host memory,
            beyond in files of the run's folder.
        server_module: the method's server side; None: the client's `server_class`.

    Attributes:
        recorder: of the logged values.
    """

    def __init__(
        self,
        client: LightningModule,
        aggregator: Aggregator | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        server_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        server_lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        local_epochs: int | list[int] = 1,
        max_local_steps: int | None = None,
        lr_decay: float = 1.0,
        accumulate_grad_batches: int = 1,
        clip_norm: float | None = None,
        personal: str | list[str] | None = None,
        nonfinite: Literal["error", "skip"] = "error",
        transforms: list[UpdateTransform] | UpdateTransform | None = None,
        alma_every: int | None = None,
        initial_weights: str | Path | None = None,
        threads: int | None = None,
        seed: int | None = None,
        store: ClientStore | None = None,
        server_module: ServerModule | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_module(client)
        self.client = client if isinstance(client, ClientModule) else ClientModule(module=client)
        self.aggregator = Aggregator() if aggregator is None else aggregator
        self.server_module = self.client.server_class() if server_module is None else server_module
        check_combination(self.client, self.aggregator, self.server_module)
        self.aggregator.weigh_by(weighting)
        check_server_optimizer(server_optimizer, server_lr_scheduler)
        check_at_least(1, alma_every=alma_every, threads=threads)
        settings = (local_epochs, max_local_steps, lr_decay, accumulate_grad_batches, clip_norm)
        self.settings, self._seed = LocalSettings(*settings), seed
        self.server_optimizer, self.server_lr_scheduler = server_optimizer, server_lr_scheduler
        self.personal = tuple(as_list(personal))
        self.guard, self.transforms = NonFiniteGuard.for_setting(nonfinite), as_list(transforms)
        self.alma_every, self.initial_weights, self.threads = alma_every, initial_weights, threads
        self.store, self.recorder = ClientStore() if store is None else store, Recorder()
        self.initial_personal: State = {}
        self._checkpoint_override: C.CheckpointOverride | None = None
        self._deferred_state, self._deferred_transforms = dict[str, Any](), list[dict[str, Any]]()
        self._services, self._evaluation_services, self._handed_over = ClientServices(), ClientServices(False), False
        self._client_hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in CLIENT_HOOKS}
        self._weights: GlobalWeights | None = None
        self._server: Server | None = None
        self._server_step: ServerOptimizer | None = None
        self._engine: SequentialEngine | None = None
        self._round: Round | None = None
        self._evaluation: Evaluation | None = None

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
    def weights(self) -> GlobalWeights:
        """The global model's entries in the client module."""
        return built(self._weights)

    @property
    def server(self) -> Server:
        """The server as its parts see it."""
        return built(self._server)

    @property
    def engine(self) -> SequentialEngine:
        """Engine that trains the clients; made anew for every run of a Trainer."""
        if self._engine is None:
            self._engine = SequentialEngine(
                self.client,
                replace(self.settings, seed=self.seed),
                self.weights,
                self._services,
                self.device,
                self.trainer.precision_plugin,
                getattr(self.data.source, "datamodule", None),
                self._client_hooks,
            )
        return self._engine

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the global model; made anew for every run of a Trainer."""
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self.weights,
                self.evaluated_weights,
                self.data,
                self.engine.local.transfer,
                self._evaluation_services,
                self.recorder,
                current_communicator(self.device),
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
        check_trainer(self.trainer)  # the earliest hook: before Lightning refuses some settings in its own words
        found: list[Callback] = []
        for hook in hooks(self.client_modules(), "configure_callbacks"):
            result = hook()
            found += [result] if isinstance(result, Callback) else list(result)
        return found

    def setup(self, stage: str) -> None:
        data = check_data(self.trainer)
        if self._evaluation is not None:
            self._evaluation.restore()  # a pass of an earlier run that was broken off
        self._handed_over, self._engine, self._evaluation, self._round = False, None, None, None
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        for name, found in self._client_hooks.items():
            found[:] = [partial(getattr(c, name), self.trainer, self) for c in callbacks if hasattr(c, name)]
        check_needs(self.client, (self.server_module, self.aggregator), data, self.trainer)
        data.key_batches(self.seed)
        self._services.begin_client()  # what was logged in an earlier run is not of this one
        if self._weights is not None:
            self.client.build(data.num_classes, data.input_shape)  # refuses data of another kind than the last fit's
            self.server.attach(data, self.seed)
        epochs = self.settings.local_epochs
        if isinstance(epochs, list) and len(epochs) != data.num_clients:
            raise ValueError(
                f"local_epochs as a list needs one number per client ({data.num_clients}), got {len(epochs)}"
            )
        self.forward_hook("setup", stage)

    def configure_model(self) -> None:
        """Build the net for the data, then everything that a checkpoint is restored into."""
        try:
            data = self.data
        except RuntimeError:  # no Trainer yet: load_from_checkpoint, which knows from the checkpoint what to build
            return
        if self._weights is not None:
            return
        torch.default_generator.manual_seed(keyed_seed(self.seed, "weights"))
        self.client.configure_model()
        self.client.build(data.num_classes, data.input_shape)
        weights = self._weights = GlobalWeights(self.client, self.personal)
        check_rule(self.client, self.aggregator, weights)
        check_exposure(self.client, (self.server_module, self.aggregator))
        if self.initial_weights is not None:
            self.client.load_state_dict(C.client_state(Path(self.initial_weights), self.client))
        current_communicator().broadcast_(list(weights.live(list(weights.entries)).values()))
        self.initial_personal = self.initial_personal or clone(weights.live(weights.personal))
        self._server = Server(weights, data, self.store, self.seed)
        for part in (self.server_module, self.aggregator):
            part.attach(self._server)
            part.setup()
        for transform in (self.guard, *self.transforms):
            transform.setup(self._server)
        if self._deferred_transforms:
            self._load_transforms(self._deferred_transforms)
            self._deferred_transforms = []
        if self._deferred_state:
            super().load_state_dict(self._deferred_state, strict=False)
            self._deferred_state = {}

    def configure_optimizers(self) -> Any:
        server = self.server
        trainable = {name: value for name, value in server.weights.items() if name in server.trainable}
        if self.server_optimizer is not None and not trainable:
            raise ValueError(
                "a server_optimizer needs trainable entries that the clients share, got none; leave it unset, or "
                "make fewer entries personal"
            )
        self._server_step = ServerOptimizer(self.server_optimizer, trainable)
        optimizer = self._server_step.optimizer
        if needs_closure(optimizer):
            raise ValueError(
                f"a server_optimizer is given one gradient a round, and {type(optimizer).__name__} asks for more; take "
                f"one whose step needs no closure, such as SGD or Adam"
            )
        if self.server_optimizer is not None:
            self.server_module.check_server_optimizer(optimizer)
        if self.server_lr_scheduler is None:
            return optimizer
        scheduler = self.server_lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "a server_lr_scheduler is stepped once a round, without a metric, got ReduceLROnPlateau; take one that "
                "counts rounds, such as StepLR"
            )
        return [optimizer], [scheduler]

    def on_fit_start(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.data.schedule is not None and self.trainer.max_epochs not in (None, -1):
            self.data.cohort(max(self.trainer.max_epochs, 1) - 1)  # a schedule that is too short is refused here
        processes, error = current_communicator(self.device), None
        check_transforms(self.transforms, processes.world)
        try:
            self.store.start(self.trainer, self.device)
        except Exception as problem:
            error = problem
        processes.all_gather_or_raise(None, error)
        self._round = Round(
            client=self.client,
            engine=self.engine,
            server=self.server,
            weights=self.weights,
            server_module=self.server_module,
            aggregator=self.aggregator,
            guard=self.guard,
            transforms=self.transforms,
            communicator=processes,
            store=self.store,
            recorder=self.recorder,
            traffic=TrafficCounter(self.weights.live(self.weights.shared)),
            initial_personal=self._initial_personal_of if self.weights.personal else None,
            view=self.data.views(),
            hooks=self._client_hooks,
        )
        self.forward_hook("on_fit_start")

    def _initial_personal_of(self, client_id: int) -> State | None:
        names = self.weights.personal_of(client_id)
        return {name: self.initial_personal[name] for name in names} if names else None

    def on_train_start(self) -> None:
        self.data.to(self.device)
        self.recorder.go_back(self.current_epoch)  # a run that goes back to an earlier checkpoint
        if self.recorder.pending_round is not None and self.recorder.pending_round < self.current_epoch:
            self._write_row()  # resumed from a checkpoint taken within the end of that round
        self.forward_hook("on_train_start")
        self.recorder.logged.absorb(self._services.logged)  # what the client has logged before its first round

    # --- the round ---------------------------------------------------------------------------------------------

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Run one round: every exchange with every client of the cohort, the aggregation, and one server step."""
        round_, round_idx = built(self._round), self.current_epoch
        weights = round_.weights
        region = torch.autocast(self.device.type, enabled=False)  # only a client's forward is in the Trainer's
        with region, torch.enable_grad(), self._transaction(round_) as before:
            start = {name: before[name] for name in weights.shared} if weights.personal else before
            try:
                result = round_.run(round_idx, self.data.cohort(round_idx), start)
            except StopIteration as stop:  # Lightning would take it for the end of the epoch
                raise RuntimeError(f"a StopIteration ended round {round_idx}; end a generator by return") from stop
            weights.load(self._step(start, result.weights))
            if weights.personal:
                weights.load(result.personal or {name: before[name] for name in weights.personal})
            if result.records:
                self.store.put(result.records, round_idx)
        if round_idx == 0:
            result.metrics |= bytes_of_sets(self.data, self._needed_sets)
        self.recorder.end_training(round_idx, result.metrics)
        self._publish(result.metrics)

    @contextmanager
    def _transaction(self, round_: Round) -> Iterator[State]:
        """Undo a round that fails: module, rule, server module and transforms are as they were before it.

        Yields:
            The module's entries at the round's start.
        """
        weights, parts = round_.weights, {"aggregator": self.aggregator, "server_module": self.server_module}
        before, states, kept = weights.snapshot(weights.entries), {}, []
        for name, part in parts.items():
            states[name] = {key: copy.deepcopy(value) for key, value in part.state_dict().items()}
        for transform in self.transforms:
            kept.append(copy.deepcopy(transform.state_dict()))
        self._checkpoint_override = C.CheckpointOverride(before, states, kept)
        try:
            yield before
        except BaseException:
            weights.load(before)
            for name, part in parts.items():
                part.load_state_dict(states[name])
            self._load_transforms(kept)
            round_.abandon()
            raise
        finally:
            self._checkpoint_override = None
            round_.server.end_round()

    @property
    def _needed_sets(self) -> frozenset[str]:
        return self.client.needs | self.server_module.needs | self.aggregator.needs

    def _step(self, start: State, new: State | None) -> State:
        """Take the server's step, through Lightning's optimizer."""
        step: Any = self.optimizers()
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        stepped = built(self._server_step).step(start, new, step.step, scaler)
        if self.server_lr_scheduler is not None:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return stepped

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        """Evaluate ALMA and keep the row; not in the step, where an interruption would undo the complete round."""
        round_idx = self.current_epoch
        every = self.alma_every or (1 if self.weights.own_models else None)
        if every is not None and (round_idx + 1) % every == 0:
            self.recorder.add({"local/alma": self._alma(round_idx)})
            self._publish(self.round_metrics)
        self.recorder.keep_round(round_idx)

    def _alma(self, round_idx: int) -> float:
        processes, owners = self.evaluation.communicator, self.store.owners
        clients = range(self.data.num_clients)
        mine = [c for c in clients if owners.get(c, c % processes.world) == processes.rank]
        return self.evaluation.alma(round_idx, self.engine, self._record_of, mine)

    def _record_of(self, client_id: int) -> tuple[dict[str, Any], State | None]:
        memory, personal = self.store.record(client_id)
        return memory, self._initial_personal_of(client_id) if personal is None else personal

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the round (in the client hooks of callbacks); outside a round Lightning's `log`."""
        if self._server is None or not self._server.in_round:
            super().log(name, value, *args, **kwargs)
        else:
            self.recorder.log(name, value, kwargs.get("batch_size") or 1, kwargs.get("reduce_fx", "mean"))

    def _publish(self, values: dict[str, float]) -> None:
        """Show values to callbacks that monitor them (`self.log` would cost 0.75 ms a key and round)."""
        tensors = torch.tensor(list(values.values())).unbind()  # one tensor for all: each would cost as much
        self.trainer.callback_metrics.update(zip(values, tensors, strict=True))

    def on_train_epoch_end(self) -> None:
        self._write_row()

    def _write_row(self) -> None:
        """Hand the round's values to the loggers, at x = round."""
        round_idx = self.recorder.take_pending()
        for logger in self.loggers if round_idx is not None else ():
            logger.log_metrics(self.round_metrics, step=round_idx)

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
        self.forward_hook(hook)
        values = self.evaluation.end(prefix)
        if self.trainer.sanity_checking:
            return
        fits = self.trainer.state.fn == "fit"
        if self.weights.own_models and not fits:
            values["local/alma"] = self._alma(self.current_epoch)
        if not fits:
            self.log_dict(values)
            return
        forgetting = self.recorder.forgetting()
        self.recorder.add(values if forgetting is None else {**values, f"{prefix}/forgetting": forgetting})
        self.recorder.keep_round(self.current_epoch)
        self._publish(self.round_metrics)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the state of the last whole round: inside a round or an evaluation, the weights before it."""
        shape = C.data_shape(self.client) if self._handed_over else None
        told = {} if shape is None else {C.DATA_SHAPE: torch.tensor(shape)}
        state = super().state_dict(*args, **kwargs)
        if self._checkpoint_override is not None:
            state |= self._checkpoint_override.state_dict(self.weights)
        elif self._evaluation is not None and self._evaluation.before is not None:
            state |= self.weights.saved(self._evaluation.before)
        return state | told

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state; outside of a fit build the net first, and keep entries that are allocated later for then."""
        strict = strict and all(module.strict_loading for module in self.client_modules())
        state = dict(state_dict)
        shape = state.pop(C.DATA_SHAPE, None)
        if self._weights is None:
            self.initial_weights = None  # they are overwritten here, and must not come back
            C.build(self.client, None if shape is None else shape.tolist())
            self._deferred_state = {name: state.pop(name) for name in state.keys() - self._present(state).keys()}
        return super().load_state_dict(state, strict, assign)

    def _present(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Drop the entries of rule and server module that are not allocated yet."""
        own, parts = self.state_dict(), ("aggregator.", "server_module.")
        return {name: value for name, value in state.items() if name in own or not name.startswith(parts)}

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        for found in self._client_hooks.values():
            found.clear()  # they hold the Trainer
        self.client.disconnect()
        self._handed_over = parent_process() is not None  # only the state dict of a started process comes back

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        inner: dict[str, Any] = {}
        self.forward_hook("on_save_checkpoint", inner)
        C.begin_round_anew(checkpoint)
        inside_round = self._server is not None and self._server.in_round
        checkpoint["federated"] = {
            "store": C.whole_store(self.store, current_communicator(self.device), inside_round),
            "initial_personal": self.initial_personal,
            "recorder": self.recorder.state_dict(),
            "transforms": self._transform_states(),
            "client": inner,
            C.DATA_SHAPE: C.data_shape(self.client),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = C.federated(checkpoint, "the checkpoint")
        entries = checkpoint["state_dict"]
        if self._weights is None:  # by load_from_checkpoint, before any data are known
            C.build(self.client, saved.get(C.DATA_SHAPE))
            entries = self._present(entries)
        C.check_entries(self.state_dict(), entries)
        if len(saved["transforms"]) != len(self.transforms):
            raise ValueError(
                f"the checkpoint must be of the same model.transforms, but has {len(saved['transforms'])} and there "
                f"are {len(self.transforms)} here; give the configuration it was made with"
            )
        processes = current_communicator()
        self.store.load_state_dict(saved["store"], processes.rank, processes.world)
        self.initial_personal = {name: value.to(self.device) for name, value in saved["initial_personal"].items()}
        self.recorder.load_state_dict(saved["recorder"])
        if self._weights is None:
            self._deferred_transforms = saved["transforms"]  # their setup comes first
        else:
            self._load_transforms(saved["transforms"])
        self.forward_hook("on_load_checkpoint", saved["client"])

    def _transform_states(self) -> list[dict[str, Any]]:
        override = self._checkpoint_override
        return [transform.state_dict() for transform in self.transforms] if override is None else override.transforms

    def _load_transforms(self, states: Sequence[Mapping[str, Any]]) -> None:
        for transform, state in zip(self.transforms, states, strict=True):
            transform.load_state_dict(state)


def built(part: Part | None) -> Part:
    """Return a part of the loop that a Trainer has set up.

    Raises:
        RuntimeError: before that.
    """
    if part is None:
        raise RuntimeError("a FederatedLoop has no federation before a Trainer has set it up; call trainer.fit first")
    return part
