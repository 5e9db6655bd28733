"""The federation as a LightningModule: one training step of it is one communication round."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.aggregation import Aggregator, Codec, ServerModule, UpdateTransform
from fl_lightning.client.forwarding import Forwarding
from fl_lightning.client.services import ClientServices
from fl_lightning.client.store import ClientStore
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.federation.checkpoint import SavedFederation
from fl_lightning.federation.checks import check_trainer
from fl_lightning.federation.evaluation import PASS_HOOKS, Evaluation
from fl_lightning.federation.identity import log_final, summary_key
from fl_lightning.federation.parts import FederationParts, as_client
from fl_lightning.federation.recorder import bytes_of_sets
from fl_lightning.federation.resume import catch_up
from fl_lightning.federation.rounds import Rounds
from fl_lightning.federation.run import FederatedRun
from fl_lightning.federation.server import Server, ServerOptimizer
from fl_lightning.members.faults import Fault, FaultPolicy
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.history import PROMISED
from fl_lightning.metrics.user_metrics import Metrics, as_collection
from fl_lightning.types import Engine, TrainableModule, Undo
from fl_lightning.utils.settings import as_list, check_count
from fl_lightning.utils.signatures import checks_arguments

Part = TypeVar("Part")


class FederatedLoop(Forwarding):
    """Federates a client module: each epoch of the Trainer is one round of the federation.

    All arguments except `client` and `aggregator` must be named.

    Args:
        client: the module that every client trains: a ClientModule, or any LightningModule (then by FedAvg).
        aggregator: the rule that makes one set of weights of the clients'; None: their mean, weighed by samples.
        server_module: the method's server side; None: the client's `server_class`.
        server_optimizer: steps on global − aggregate (FedOpt); None: the aggregate is taken as it is.
        server_lr_scheduler: of the server optimizer, stepped once a round.
        local_epochs: passes over a client's data in a round; a list gives each client its own.
        max_local_steps: at most so many optimizer steps per client and exchange.
        lr_decay: the local learning rate of round t is lr · lr_decay^t; `{cosine: FINAL_LR, rounds: T}`: half a cosine
            to FINAL_LR over T rounds, which then stays; without `rounds` T is the Trainer's `max_epochs`, then fixed.
        accumulate_grad_batches: batches per local optimizer step.
        clip_norm: largest norm of a local gradient; None: not clipped.
        personal: `fnmatch` patterns of entries that stay with each client; with `!` in front, of exceptions.
        keep: `fnmatch` patterns of buffers with `persistent=False` that a client keeps in its memory; the others are
            set back to their start for every client.
        faults: what happens on faults; `error` or `skip`: on values that are not finite and on errors of clients alike.
        transforms: of the updates between client and sum, in order, after the check for NaN and inf.
        codec: of what clients send, and with its `down` of what they are sent; None: entries travel as they are.
        metrics: torchmetrics objects by name, or a collection, of predictions and targets: evaluated on the global
            model (`global/NAME`), and with `evaluate_clients_every` on each client's (`local/NAME`, the clients' mean).
        evaluate_clients_every: every so many rounds evaluate what each of the N clients would deploy on its own test
            split; None: never, or every round where the clients share no weights (there is no global model).
        initial_weights: a checkpoint or state-dict file to start from.
        seed: keys batches, dropout and initial weights; None: that of `seed_everything`, else 0.
        threads: of this process for torch operations; None: left alone.
        store: where clients keep their memory and personal entries between rounds; None: up to 4 GB in host memory,
            beyond in files of the run's folder.
        chunk: clients trained at once, as rows of one stack: 1, K, or `auto` (where that is known to be right and
            faster); a line in the log says where and why they are trained one after the other. The order of
            floating-point sums differs, so that results differ in the last bits.

    Attributes:
        engine_factory: to be set before a fit: makes, of the engine that trains in this process, what trains and tests
            the clients in its place (in another process, on another machine); None: that engine itself.
        recorder: of the logged values.
        final_key: log key of the value that sums up an evaluation; empty before the first one.
    """

    _server: Server | None = None
    _server_step: ServerOptimizer | None = None
    engine_factory: Callable[[SequentialEngine], Engine] | None = None
    _run: FederatedRun | None = None
    _rounds: Rounds | None = None
    _evaluation: Evaluation | None = None
    _handed_over = False
    """Whether a process that was started for a run has ended it, of which only the state dict comes back."""
    final_key = ""

    @checks_arguments
    def __init__(
        self,
        client: LightningModule | TrainableModule,
        aggregator: Aggregator | None = None,
        *,
        server_module: ServerModule | None = None,
        server_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        server_lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        local_epochs: int | list[int] = 1,
        max_local_steps: int | None = None,
        lr_decay: float | dict[str, float] = 1.0,
        accumulate_grad_batches: int = 1,
        clip_norm: float | None = None,
        personal: str | list[str] | None = None,
        keep: str | list[str] | None = None,
        faults: FaultPolicy | Literal["error", "skip"] = "error",
        transforms: list[UpdateTransform] | UpdateTransform | None = None,
        codec: Codec | None = None,
        metrics: Metrics | None = None,
        evaluate_clients_every: int | None = None,
        initial_weights: str | Path | None = None,
        seed: int | None = None,
        threads: int | None = None,
        store: ClientStore | None = None,
        chunk: Literal["auto"] | int = 1,
    ) -> None:
        super().__init__()
        check_count(1, evaluate_clients_every=evaluate_clients_every)
        self.automatic_optimization = False
        self.client = as_client(client)
        self.aggregator = Aggregator() if aggregator is None else aggregator
        self.server_module = self.client.server_class() if server_module is None else server_module
        self.metrics = as_collection(metrics)
        self.evaluate_clients_every = evaluate_clients_every
        local = LocalSettings(local_epochs, max_local_steps, lr_decay, accumulate_grad_batches, clip_norm)
        self.parts = FederationParts(
            client=self.client,
            aggregator=self.aggregator,
            server_module=self.server_module,
            server_optimizer=server_optimizer,
            server_lr_scheduler=server_lr_scheduler,
            settings=local,
            faults=FaultPolicy.of(faults),
            transforms=as_list(transforms),
            codec=codec,
            execution=Execution(threads, chunk),
            store=store or ClientStore(),
            personal=tuple(as_list(personal)),
            keep=tuple(as_list(keep)),
            metrics=self.metrics,
            given_seed=seed,
            batch_hooks=self.batch_hooks,
        )
        self._saved = SavedFederation(self.parts, initial_weights)
        self.initial_personal = self.parts.initial_personal
        self.store = self.parts.store
        self.recorder = self.parts.recorder
        self.identity = self.parts.identity

    # --- parts that exist once a Trainer has set the loop up ----------------------------------------------------

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
        return self.parts.skipped.skipped

    @property
    def _under_way(self) -> Undo | None:
        """Give what undoes the round under way.

        None outside of rounds.
        """
        return None if self._rounds is None else self._rounds.under_way

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
        """Engine that trains the clients.

        Made anew for every run of a Trainer.
        """
        return built(self._run).engine

    @property
    def clients_engine(self) -> Engine:
        """Give the engine that trains and tests the clients.

        Made anew for every run of a Trainer.
        """
        return built(self._run).clients_engine

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the global model.

        Made anew for every run of a Trainer.
        """
        if self._evaluation is None:
            self._evaluation = Evaluation(built(self._run))
        return self._evaluation

    def client_modules(self) -> list[LightningModule]:
        return list(self.client.lightning_modules())

    def forward_hook(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a hook of the client's modules.

        With its first and last hooks an evaluation begins and ends.
        """
        with self.evaluation.around(name) if name in PASS_HOOKS else nullcontext():
            return super().forward_hook(name, *args, **kwargs)

    def services_of(self, hook: str) -> ClientServices:
        """Choose the services of a hook: those of the evaluation in its hooks, else those of training."""
        evaluates = hook.startswith(("on_validation", "on_test", "on_predict"))
        return self.parts.evaluation_services if evaluates else self.parts.services

    # --- setup -------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        check_trainer(self.trainer)  # the earliest hook: before Lightning refuses some settings in its own words
        return self.module_callbacks()

    def setup(self, stage: str) -> None:
        if self._evaluation is not None:
            self._evaluation.restore()  # a pass of an earlier run that was broken off
        self._run = None
        self._rounds = None
        self._evaluation = None
        self._handed_over = False
        self.parts.begin_run(self.trainer, self, self._server, stage == "fit")
        self.forward_hook("setup", stage)

    def configure_model(self) -> None:
        """Build the net for the data, then everything that a checkpoint is restored into."""
        try:
            data = self.data
        except RuntimeError:  # no Trainer yet: load_from_checkpoint, which knows from the checkpoint what to build
            return
        if self._server is None:
            self._server = self.parts.make_server(data, self.trainer, self._saved.start)
            if deferred := self._saved.take_deferred():
                super().load_state_dict(deferred, strict=False)
        self._run = FederatedRun(
            parts=self.parts,
            server=self._server,
            trainer=self.trainer,
            forward=self.forward_hook,
            engine_factory=self.engine_factory,
        )
        self._saved.give(self._run.members)

    def configure_optimizers(self) -> Any:
        self._server_step, scheduler = self.parts.make_server_step(self.server)
        optimizer = self._server_step.optimizer
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def on_fit_start(self) -> None:
        self.parts.describe(self.trainer)
        for logger in self.loggers:
            logger.log_hyperparams(self.parts.hyperparameters())
        self.parts.plateau.start(self.client, self.trainer)
        self._saved.begin_fit(self.trainer, self.weights)
        self._rounds = Rounds(built(self._run), built(self._server_step))
        self.forward_hook("on_fit_start")

    def on_train_start(self) -> None:
        self.data.to(self.device, early=not self.engine.local.transfer.moves)
        self.engine.local.scale_lr(self.parts.plateau.factors)
        self.recorder.go_back(self.current_epoch)  # a run that goes back to an earlier checkpoint
        catch_up(self, self.data, self.recorder)  # with a checkpoint that was taken within the end of a round
        self.forward_hook("on_train_start")
        self.recorder.logged.absorb(self.parts.services.logged)  # what the client has logged before its first round
        self._stop_if_spent()

    def on_train_end(self) -> None:
        if (value := self.round_metrics.get(self.final_key)) is not None:
            log_final(self.loggers, self.parts.hyperparameters(), value, self.current_epoch)
        if self.parts.is_private:
            rank_zero_info(f"{self.aggregator.summary() or self._spent_by_clients()}; {self.data.seed_notice}")
        super().on_train_end()

    def _spent_by_clients(self) -> str:
        """Sum up what the guarantees of clients have cost in a sentence."""
        history = self.recorder.history
        spent = {key: max(history.curve(key).values()) for key in history.names if key.startswith(PROMISED)}
        return "privacy: " + ", ".join(f"{key.removeprefix(PROMISED)} {value:.4g}" for key, value in spent.items())

    def _stop_if_spent(self) -> None:
        """End the run where the rule allows no further round."""
        if self.aggregator.is_spent:
            self.trainer.should_stop = True

    # --- the round ---------------------------------------------------------------------------------------------

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Run one round: every exchange with every client of the cohort, the aggregation, and one server step."""
        round_idx = self.current_epoch
        optimizer = cast(Optimizer, self.optimizers())
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # only a client's forward is in the Trainer's region; in one of ours a module's own would keep cast weights
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if casts else nullcontext(), torch.enable_grad():
            cohort = self.data.cohort(round_idx)
            values = cast(Rounds, self._rounds).run(round_idx, cohort, optimizer.step, scaler)
        metrics = self.parts.marked(values) if self.parts.is_private else values
        if self.parts.server_lr_scheduler is not None:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        if round_idx == 0:
            metrics |= bytes_of_sets(self.data, self.parts.needs)
        self.recorder.end_training(round_idx, metrics)
        self._publish(metrics)

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        """Evaluate ALMA and keep the row.

        Not in the step, where an interruption would undo the complete round.
        """
        round_idx = cast(int, self.recorder.pending_round)
        every = 0 if self.data.pooled else self.evaluate_clients_every or int(self.weights.own_models)
        (alma,) = self.parts.marked({"local/alma": 0.0})
        if every and (round_idx + 1) % every == 0 and alma not in self.round_metrics:
            self.add_to_row(self.parts.marked(self.evaluation.alma(round_idx)))
        self.recorder.keep_round(round_idx)
        self._stop_if_spent()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the round (in the client hooks of callbacks).

        Outside a round Lightning's `log`.
        """
        if self._under_way is None:
            super().log(name, value, *args, **kwargs)
        else:
            self.recorder.log(name, value, kwargs.get("batch_size") or 1, kwargs.get("reduce_fx", "mean"))

    def add_to_row(self, values: Mapping[str, float]) -> None:
        """Add values to the row of the round, once its training is over."""
        self.round_metrics.update(values)
        self._publish(values)

    def _publish(self, values: Mapping[str, float]) -> None:
        """Show values of the round to callbacks that monitor them (`self.log` would cost 0.75 ms a key and round)."""
        tensors = torch.tensor(list(values.values())).unbind()  # one tensor for all: each would cost as much
        self.trainer.callback_metrics.update(zip(values, tensors, strict=True))

    def on_train_epoch_end(self) -> None:
        """Hand the round's values to the loggers, at x = round."""
        round_idx = self.recorder.take_pending()
        if round_idx is None:
            return
        for logger in self.loggers:
            logger.log_metrics(self.round_metrics, step=round_idx)
        is_complete = self.recorder.evaluated_rounds > round_idx or not self.trainer.enable_validation
        self.parts.plateau.step(round_idx, self.round_metrics, is_complete)
        self.engine.local.scale_lr(self.parts.plateau.factors)

    # --- evaluation --------------------------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step("validation", batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._evaluated("on_validation_epoch_end", "val" if self.data.evaluated == "val" else "global")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step("test", batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self._evaluated("on_test_epoch_end", "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.predict(batch, batch_idx, dataloader_idx)

    def _evaluated(self, hook: str, prefix: str) -> None:
        self.parts.evaluation_services.begin_loader("")
        self.forward_hook(hook)
        values = self.evaluation.end(prefix, hook.replace("_epoch_end", "_end"))
        if self.trainer.sanity_checking:
            return
        if self.trainer.state.fn != "fit":
            if self.weights.own_models and not self.data.pooled:
                values |= self.parts.marked(self.evaluation.alma(self.current_epoch))
            self.log_dict(values)
            return
        self.final_key, round_idx = summary_key(values) or "", cast(int, self.recorder.pending_round)
        self.recorder.end_evaluation(round_idx)
        forgetting = self.recorder.forgetting()
        self.add_to_row(values if forgetting is None else {**values, f"{prefix}/forgetting": forgetting})
        self.recorder.keep_round(round_idx)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the state of the last whole round: inside a round or an evaluation, the weights before it."""
        state = super().state_dict(*args, **kwargs)
        if self._under_way is not None:
            state |= self._under_way.entries()
        elif self._evaluation is not None and self._evaluation.before is not None:
            state |= self._evaluation.before.state_dict()
        if self._handed_over:
            state |= self._saved.shape_entry()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state.

        Outside of a fit build the net first, and keep entries that are allocated later for then.
        """
        strict = strict and all(module.strict_loading for module in self.client_modules())
        state = self._saved.loadable(state_dict, self.state_dict if self._server is None else None)
        return super().load_state_dict(state, strict, assign)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self.parts.end_run()
        self._handed_over = parent_process() is not None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved.save(checkpoint, built(self._run).members, self._under_way)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ready = self._server is not None  # else by load_from_checkpoint, before any data are known
        self._saved.load(checkpoint, self.state_dict, self.trainer if ready else None)
        if ready:
            self._saved.give(built(self._run).members)


def built(part: Part | None) -> Part:
    """Return a part that is there once a Trainer has set the loop up.

    Raises:
        RuntimeError: before that.
    """
    if part is None:
        raise RuntimeError("a FederatedLoop has no federation before a Trainer has set it up; call trainer.fit first")
    return part
