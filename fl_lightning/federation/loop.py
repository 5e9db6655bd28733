"""The federation as a LightningModule. One training step is one communication round."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.aggregation import Aggregator, Codec, Pacing, ServerModule, UpdateTransform
from fl_lightning.aggregation.timeline import Timeline
from fl_lightning.client.checks import check_evaluation_step, check_outputs
from fl_lightning.client.forwarding import Forwarding, logging_as
from fl_lightning.client.hooks import overridden
from fl_lightning.client.metric_states import NOBODY
from fl_lightning.client.services import ClientServices
from fl_lightning.client.store import ClientStore
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.deployed import Kind, own_step
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.federation.averages import EpochAverages
from fl_lightning.federation.checkpoint import SavedFederation
from fl_lightning.federation.checks import (
    averaging_callbacks,
    check_averages,
    check_evaluates,
    check_fine_tuning,
    check_test_samples,
    check_trainer,
    check_training_samples,
    measures,
)
from fl_lightning.federation.clients_table import ClientsTable
from fl_lightning.federation.evaluation import PASS_HOOKS, Evaluation
from fl_lightning.federation.final import log_final, summary_key
from fl_lightning.federation.fresh_values import FreshValues
from fl_lightning.federation.horizon import Horizon
from fl_lightning.federation.local_checks import check_local_training
from fl_lightning.federation.metric_files import MetricFiles
from fl_lightning.federation.pace import Pace, check_seconds, is_evaluated
from fl_lightning.federation.parts import FederationParts, as_client
from fl_lightning.federation.recorder import bytes_of_sets
from fl_lightning.federation.resume import catch_up
from fl_lightning.federation.rounds import Rounds
from fl_lightning.federation.run import FederatedRun
from fl_lightning.federation.scenario_checks import check_changing_data, check_samples, tell_of_early_stopping
from fl_lightning.federation.server import Server, ServerOptimizer
from fl_lightning.members.faults import Fault, FaultPolicy
from fl_lightning.members.tasks import Tasks
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.history import PROMISED, by_all_names
from fl_lightning.metrics.keys import check_writer
from fl_lightning.metrics.user_metrics import Metrics, as_collection
from fl_lightning.types import ClientJob, ClockKind, Engine, FineTuning, Scoring, TrainableModule, Undo
from fl_lightning.utils.settings import as_list, check_above, check_count
from fl_lightning.utils.signatures import checks_arguments
from fl_lightning.utils.trainer_view import view_of, whole_world

Part = TypeVar("Part")

HOOKS_OF_ALL_PROCESSES = (
    "on_validation",
    "on_test",
    "on_predict",
    "on_train_end",
    "on_fit_end",
    "on_save_checkpoint",
    "teardown",
)
"""How the hooks begin in which the processes of a run act together, and no client is trained."""

MOST_ROUNDS = 10**9
"""More rounds than any run has."""

HOOKS_OF_MODEL = ("on_validation", "on_test")
"""How the hooks of an evaluation of the global model begin."""


class FederatedLoop(Forwarding):
    """Federates a client module: each epoch of the Trainer is one round of the federation.

    All arguments except `client` and `aggregator` must be named.

    Args:
        client: The module that every client trains: a ClientModule, or any LightningModule, which is trained by FedAvg.
        aggregator: The rule that makes one set of weights of the clients'. None means their mean, weighed by samples.
        server_module: The method's server side. None means the client's `server_class`.
        server_optimizer: A function of parameters that makes the optimizer of the server, which steps on
            global − aggregate (FedOpt). None copies the aggregate.
        server_lr_scheduler: A function of the server optimizer that makes its scheduler, stepped once a round.
        local_epochs: Passes over a client's data in a round. A list gives each client its own number.
        max_local_steps: Largest number of optimizer steps of a client in an exchange. None means no limit.
        lr_decay: Decay of the local learning rate lr. A factor d gives lr · d^t in round t.
            `{cosine: FINAL_LR, rounds: T}` gives half a cosine down to FINAL_LR over T rounds, and FINAL_LR after
            round T. Without `rounds`, T is the number of planned rounds, which a continued run then cannot change.
        clock: What the schedules of your module, and what it asks its Trainer for (`max_epochs`, `current_epoch`,
            `global_step` and others), cover while a client is trained. With `run`, R rounds of E local epochs look like
            one fit of R·E epochs. With `round`, each round looks like a fit of E epochs.
        accumulate_grad_batches: Batches per local optimizer step.
        clip_norm: Largest norm of a local gradient. None means that gradients are not clipped.
        personal: `fnmatch` patterns of entries that stay with each client. A pattern with `!` in front names
            exceptions.
        keep: `fnmatch` patterns of buffers with `persistent=False` that a client keeps in its memory. The other ones
            are set back to their start for every client.
        faults: What happens on faults: a FaultPolicy, or a word for values that are not finite and errors of clients
            alike. `error` ends the run, and `skip` leaves the client out.
        transforms: Transforms of the updates between client and sum, in order, after the check for NaN and inf.
        codec: The codec of what clients send, and with its `down` also of what they are sent. None sends entries as
            they are.
        metrics: torchmetrics objects of predictions and targets, by name or as a collection. They are evaluated on the
            global model (`global/NAME`), and with `evaluate_clients_every` on each client's model (`local/NAME`, the
            clients' mean).
        evaluate_clients_every: Number of rounds after which each of the N clients is evaluated: what it would deploy,
            on its own test split, a net by its accuracy (`local/alma`) and a module by its own steps (`local/KEY`).
            None means never, or every round if the clients share no weights, because then there
            is no global model.
        fine_tuning: How what a client would deploy is trained on the client's own training samples before a second test
            (`local/tuned/KEY`). Nothing of it is kept. None means that there is no second test.
        pacing: When the server steps: Rounds with a deadline or over-selection, FedBuff or FedAsync. It needs
            `data.devices`. None means after all clients of a round.
        max_seconds: Simulated seconds of the run: no round begins that would end later. The Trainer's `max_epochs` may
            then be -1, and a continued run may have more. None means no limit.
        evaluate_every_seconds: Simulated seconds after which the global model is evaluated, at the end of the first
            round after each multiple and at the end of the run, in place of the Trainer's `check_val_every_n_epoch`.
            None means that this one counts.
        evaluate_training_every: Number of rounds after which the global model is evaluated on the training samples of
            all clients (`global/train/KEY`), as on other samples and without augmentation. None means never.
        initial_weights: A checkpoint or state-dict file to start from.
        seed: Key of batches, dropout and initial weights. None means the seed of `seed_everything`, or 0 without it.
        planned_rounds: Number of rounds that the run is planned for, if it is begun with fewer. A cosine learning rate
            and the noise of a privacy budget depend on it. None means `max_epochs` or `max_steps` of the Trainer.
        threads: Number of threads of this process for torch operations. None leaves it alone.
        store: Where clients keep their memory and personal entries between rounds. None means up to 4 GB in host
            memory, and beyond that files in the run's folder.
        chunk: Number of clients that are trained at once, as rows of one stack: 1, K or `auto`. `auto` chooses the
            number, and more than 1 only where that is known to be right and faster. A line in the log says if and why
            clients are trained one after the other. The order of floating-point sums differs between the two ways, so
            the results differ in the last bits.

    Attributes:
        run_folder: Folder of the run's files, which the command line sets. None means the folder of the first logger.
        engine_factory: Makes what trains and tests the clients (in another process, on another machine), given the
            engine of this process. Set it before a fit. None means the engine of this process.
        recorder: The recorder of the logged values.
        fresh_values: Lets callbacks look at a monitored value once.
        final_key: Log key of the value that sums up an evaluation. Empty before the first evaluation.
    """

    _server: Server | None = None
    _server_step: ServerOptimizer | None = None
    run_folder: Path | None = None
    engine_factory: Callable[[SequentialEngine], Engine] | None = None
    _run: FederatedRun | None = None
    _rounds: Rounds | None = None
    _evaluation: Evaluation | None = None
    _planned_interval = 1
    """What the loop has set the Trainer's `check_val_every_n_epoch` to, for `evaluate_every_seconds`."""
    _handed_over = False
    """Whether a child process has ended its run. Only the state dict returns from there to the parent process."""
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
        clock: ClockKind = "run",
        accumulate_grad_batches: int = 1,
        clip_norm: float | None = None,
        personal: str | list[str] | None = None,
        keep: str | list[str] | None = None,
        faults: FaultPolicy | Literal["error", "skip"] = "error",
        transforms: list[UpdateTransform] | UpdateTransform | None = None,
        codec: Codec | None = None,
        metrics: Metrics | None = None,
        evaluate_clients_every: int | None = None,
        fine_tuning: FineTuning | None = None,
        pacing: Pacing | None = None,
        max_seconds: float | None = None,
        evaluate_every_seconds: float | None = None,
        evaluate_training_every: int | None = None,
        initial_weights: str | Path | None = None,
        seed: int | None = None,
        planned_rounds: int | None = None,
        threads: int | None = None,
        store: ClientStore | None = None,
        chunk: Literal["auto"] | int = 1,
    ) -> None:
        super().__init__()
        check_count(1, evaluate_clients_every=evaluate_clients_every, evaluate_training_every=evaluate_training_every)
        check_above(0, "in simulated seconds", max_seconds=max_seconds, evaluate_every_seconds=evaluate_every_seconds)
        self.automatic_optimization = False
        self.client = as_client(client)
        self.aggregator = Aggregator() if aggregator is None else aggregator
        self.server_module = self.client.server_class() if server_module is None else server_module
        self.metrics = as_collection(metrics)
        self.evaluate_clients_every = evaluate_clients_every
        self.evaluate_training_every = evaluate_training_every
        self.max_seconds = max_seconds
        self.evaluate_every_seconds = evaluate_every_seconds
        self.parts = FederationParts(
            client=self.client,
            aggregator=self.aggregator,
            server_module=self.server_module,
            server_optimizer=server_optimizer,
            server_lr_scheduler=server_lr_scheduler,
            settings=LocalSettings(
                local_epochs=local_epochs,
                max_local_steps=max_local_steps,
                lr_decay=lr_decay,
                clock=clock,
                accumulate_grad_batches=accumulate_grad_batches,
                clip_norm=clip_norm,
            ),
            faults=FaultPolicy.of(faults),
            transforms=as_list(transforms),
            codec=codec,
            execution=Execution(threads=threads, chunk=chunk),
            store=store or ClientStore(),
            personal=tuple(as_list(personal)),
            keep=tuple(as_list(keep)),
            metrics=self.metrics,
            pacing=pacing,
            fine_tuning=fine_tuning,
            given_seed=seed,
            horizon=Horizon(planned_rounds),
            batch_hooks=self.batch_hooks,
        )
        self._saved = SavedFederation(self.parts, initial_weights)
        self.initial_personal = self.parts.initial_personal
        self.store = self.parts.store
        self.recorder = self.parts.recorder
        self.identity = self.parts.identity
        self.identity.weights = None if initial_weights is None else str(initial_weights)
        self.fresh_values = FreshValues()
        self._averages = EpochAverages()
        self._clients_table = ClientsTable()
        self._metric_files = MetricFiles()

    # --- parts that exist once a Trainer has set the loop up ---

    @property
    def data(self) -> FederatedDataModule:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[no-any-return]

    @property
    def round_metrics(self) -> dict[str, float]:
        """The values of the last round, by log key."""
        return self.recorder.round_metrics

    @property
    def trainer(self) -> Any:
        """The Trainer that the loop is attached to."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.__set__(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None:
            self.parts.horizon.forget()
        self.client.trainer = self.view_of(trainer)

    def view_of(self, trainer: Any) -> Any:
        """Return what the user's modules and data see of a Trainer. None gives None."""
        horizon = self.parts.horizon
        return view_of(trainer, answers=horizon.answers(), readers=horizon.readers())

    @property
    def skipped(self) -> list[Fault]:
        """The clients that the last round left out, and the reasons."""
        return self.parts.skipped.skipped

    @property
    def _under_way(self) -> Undo | None:
        """The undo of the current round, or None between rounds."""
        if self._rounds is None:
            return None
        return self._rounds.under_way

    @property
    def global_weights(self) -> GlobalWeights:
        """The global model's entries in the client module."""
        return self.server.global_weights

    @property
    def server(self) -> Server:
        """The server as its parts see it."""
        return built(self._server)

    @property
    def engine(self) -> SequentialEngine:
        """The engine of this process. Every run of a Trainer has a new one."""
        return built(self._run).engine

    @property
    def clients_engine(self) -> Engine:
        """The engine that trains and tests the clients, here or elsewhere. Every run of a Trainer has a new one."""
        return built(self._run).clients_engine

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of the global model. Every run of a Trainer has a new one."""
        if self._evaluation is None:
            self._evaluation = Evaluation(built(self._run))
        return self._evaluation

    def __deepcopy__(self, memo: dict[int, Any]) -> "FederatedLoop":
        """Copy the loop, as a callback that averages weights does. The copy shares Trainer and data."""
        try:
            trainer = self.trainer
        except RuntimeError:
            trainer = None
        if trainer is not None:
            data = trainer.datamodule
            memo[id(trainer)] = trainer
            memo[id(data)] = data
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__getstate__(), memo))
        return copied

    def client_model(self, client_id: int | str | None = None, *, tuned: bool = False) -> LightningModule:
        """Return a copy of your module with what a client would deploy, or with the global model.

        With `net=` it is a copy of the client. The copy has no Trainer, empty metric objects and the modes in which you
        left the module. It may be called once a Trainer has set the loop up, in a fit or after it, by every process.

        Args:
            client_id: Id of the client, from 0, or its name. None is the global model, as it is evaluated.
            tuned: Whether the client's model is fine-tuned first, as `fine_tuning` says.

        Raises:
            ValueError: There is no such client, its model is at its node, the clients share no weights, or `tuned`
                is asked for without `fine_tuning`.
        """
        engine = self.engine
        if client_id is None:
            self._tuning(client_id, tuned)
            if not self.evaluation.has_global:
                raise ValueError("client_model needs a client_id here, because there is no global model; give one")
            with self.evaluation.evaluated_entries(), self._callbacks_of_the_module():
                return engine.copied_module()
        with self._callbacks_of_the_module():
            return engine.model_of(self._deployed_job(client_id), self._tuning(client_id, tuned))

    @contextmanager
    def _callbacks_of_the_module(self) -> Iterator[None]:
        """Context in which no callback leads to the loop: a copy of a module has those that it keeps, too."""
        module = self.client.module or self.client
        with ExitStack() as stack:
            for callback in self.trainer.callbacks:
                stack.enter_context(logging_as(module, callback=callback))
            yield

    @contextmanager
    def lent_to(self, client_id: int) -> Iterator[bool]:
        """Context in which `client` has the entries that a client would deploy. Every process must enter it.

        It yields whether the client predicts by these entries alone.

        Args:
            client_id: Id of the client, from 0.

        Raises:
            ValueError: There is no such client, or its model is at its node.
        """
        with self.engine.lent(self._deployed_job(client_id)) as predict:
            yield predict is self.client

    def _deployed_job(self, client_id: int | str) -> ClientJob:
        """Return the job that makes the module what a client would deploy."""
        if getattr(self.clients_engine, "is_remote", False):
            raise ValueError("client_model gives models that are in this run, and those of the clients are at nodes")
        client_id = self.data.client_id(client_id)
        round_idx = max(self.server.round_idx, self.last_round)
        return self.evaluation.of_clients.job_of(client_id, round_idx)

    def _tuning(self, client_id: int | str | None, tuned: bool) -> FineTuning | None:
        """Return how a client is fine-tuned, or None if that is not asked for.

        Raises:
            ValueError: It is asked for without a client, or without settings.
        """
        if not tuned:
            return None
        if client_id is None:
            raise ValueError("tuned needs the client that is fine-tuned, got none; give its id, such as client 0")
        if self.parts.fine_tuning is None:
            raise ValueError("tuned needs model.fine_tuning, got None; set it, such as model.fine_tuning.epochs to 1")
        return self.parts.fine_tuning

    def deploy(self, client_id: int | str | None, *, tuned: bool = False) -> None:
        """Let the next evaluations of a Trainer take the model and the test samples of a client, or of all clients.

        With the id of a client `validate`, `test` and `predict` evaluate what that client would deploy, by the keys
        that they have for the global model. With `all`, `validate` and `test` evaluate the global model and then what
        each client would deploy: the means over the clients are logged as `local/KEY`, and `recorder.client_values` has
        the values of each. A fit is not changed.

        Args:
            client_id: Id of the client, from 0, its name, or `all`. None is the global model and all samples again.
            tuned: Whether the client's model is fine-tuned first, as `fine_tuning` says.

        Raises:
            ValueError: `tuned` is asked for without a client or without `fine_tuning`.
        """
        takes_all = isinstance(client_id, str) and client_id == "all"
        chosen: Any = None if takes_all else client_id
        if takes_all and tuned:
            raise ValueError(
                "tuned needs one client, got all of them, whose values after fine-tuning are local/tuned/KEY; leave it "
                "out"
            )
        self.parts.deploys_tuned = self._tuning(chosen, tuned) is not None
        self.parts.deployed_client = chosen
        self.parts.evaluates_all_clients = takes_all

    def client_modules(self) -> list[LightningModule]:
        return list(self.client.lightning_modules())

    def forward_hook(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a hook of the client's modules.

        The first hook of an evaluation begins it, and the last one ends it. Without a global model no hook of an
        evaluation is called.
        """
        if not name.startswith(HOOKS_OF_ALL_PROCESSES):
            return super().forward_hook(name, *args, **kwargs)
        around = self.evaluation.around(name) if name in PASS_HOOKS else nullcontext()
        with around, whole_world(self.client_modules()):
            if name.startswith(HOOKS_OF_MODEL) and not self.evaluation.has_global:
                # The module would log values of metric objects that nobody has updated.
                return []
            return super().forward_hook(name, *args, **kwargs)

    def services_of(self, hook: str) -> ClientServices:
        """Return the services of the evaluation for its hooks, and the services of training for all others."""
        if hook.startswith(("on_validation", "on_test", "on_predict")):
            return self.parts.evaluation_services
        return self.parts.services

    # --- setup ---

    def configure_callbacks(self) -> list[Callback]:
        # This hook is the earliest one. It comes before Lightning refuses some settings in its own words.
        check_trainer(self.trainer)
        return self.module_callbacks()

    def setup(self, stage: str) -> None:
        if self._evaluation is not None:
            # An evaluation of an earlier run may have been interrupted.
            self._evaluation.restore()
        self._run = None
        self._rounds = None
        self._evaluation = None
        self._handed_over = False
        self.parts.begin_run(trainer=self.trainer, loop=self, server=self._server, fits=stage == "fit")
        self.data.tested_client = self._evaluated_client(stage)
        if self.parts.evaluates_all_clients and stage != "fit":
            self._check_all_clients(stage)
        if self.metrics is not None and stage != "predict":
            check_outputs(self.client, "model.metrics", remedy="leave it unset and log metrics in its own steps")
        self.store.look_beside(None)
        self.forward_hook("setup", stage)

    def _evaluated_client(self, stage: str) -> int | None:
        """Return the client whose samples a stage takes, or None.

        Raises:
            ValueError: There is no such client, or it has no test samples.
        """
        asked = self.parts.deployed_client
        if stage == "fit" or asked is None:
            return None
        client_id = self.data.client_id(asked, setting="client")
        step = "test_step" if stage == "test" else "validation_step"
        module = self.client.module
        lacks_step = module is not None and self.metrics is None and not overridden(module, step)
        if lacks_step and stage != "predict":
            raise ValueError(
                f"client {client_id} can be evaluated only by a {step} of {type(module).__name__} or by model.metrics, "
                f"got none; define one"
            )
        takes_others = stage == "predict" and self.data.predicts_others
        if not takes_others and not self.data.has_test_samples(client_id):
            raise ValueError(f"client {client_id} has no test samples, so that nothing can be evaluated; give another")
        return client_id

    def _check_all_clients(self, stage: str) -> None:
        """Refuse an evaluation of all clients that has no values of a client.

        Raises:
            ValueError: The stage has no such values, there are no clients, or nothing is measured at one.
        """
        if stage == "predict":
            raise ValueError("predict takes one client at a time, got all; call loop.deploy(0) and so on before each")
        if self.data.pooled:
            raise ValueError(
                f"client all needs several clients, and all samples of {type(self.client).__name__} are in one place; "
                f"leave it out"
            )
        if not measures(self.client, self.metrics):
            raise ValueError(
                f"client all needs a validation_step or test_step of {type(self.client.module).__name__}, or "
                f"model.metrics, got none; define one"
            )
        if not any(self.data.has_test_samples(client_id) for client_id in range(self.data.num_clients)):
            raise ValueError("client all needs test samples of a client, and none has any; give the data a test split")

    def configure_model(self) -> None:
        """Build the net for the data, then everything that a checkpoint is restored into."""
        try:
            data = self.data
        except RuntimeError:
            # Without a Trainer this is load_from_checkpoint, which builds what the checkpoint describes.
            return
        if self._server is None:
            self._server = self.parts.make_server(
                data=data, trainer=self.trainer, load_initial=self._saved.load_initial_weights
            )
            deferred = self._saved.take_deferred()
            if deferred:
                super().load_state_dict(deferred, strict=False)
        check_averages(averaging_callbacks(self.trainer), self.aggregator, self.server_module)
        if self.parts.fine_tuning is not None:
            check_fine_tuning(self.parts.fine_tuning, self.client, self.data)
        self._run = FederatedRun(
            parts=self.parts,
            server=self._server,
            trainer=self.trainer,
            forward=self.forward_to,
            engine_factory=self.engine_factory,
        )
        self._saved.give(self._run.members, self.global_weights)

    def configure_optimizers(self) -> Any:
        self._server_step, scheduler = self.parts.make_server_step(self.server)
        optimizer = self._server_step.optimizer
        if scheduler is None:
            return optimizer
        return [optimizer], [scheduler]

    def on_fit_start(self) -> None:
        check_evaluates(
            self.client,
            self.metrics,
            evaluate_clients_every=self.evaluate_clients_every,
            evaluate_training_every=self.evaluate_training_every,
        )
        if self.evaluate_clients_every is not None and not self.data.pooled:
            check_test_samples(self.data)
        tests_clients = self._rounds_between_clients() is not None
        kind = own_step(self.client.module, "validation")
        if tests_clients and self.client.module is not None and kind is not None:
            check_evaluation_step(self.client.module, f"{kind}_step", self.data.num_loaders("test"))
        is_tested = self.data.pooled or tests_clients
        if self.parts.fine_tuning is not None and not is_tested:
            raise ValueError(
                "model.fine_tuning needs model.evaluate_clients_every, the rounds after which clients are tested, got "
                "None; set it, such as to 10"
            )
        if self.evaluate_training_every is not None:
            check_training_samples(self.evaluation.has_global, self.data)
        check_seconds(self.data, max_seconds=self.max_seconds, evaluate_every_seconds=self.evaluate_every_seconds)
        interval = self.trainer.check_val_every_n_epoch
        if self.evaluate_every_seconds is not None and interval not in (1, self._planned_interval):
            raise ValueError(
                f"model.evaluate_every_seconds and trainer.check_val_every_n_epoch both say when the global model is "
                f"evaluated, got {self.evaluate_every_seconds} and {interval}; leave one of them out"
            )
        self.parts.describe(self.trainer)
        for logger in self.loggers:
            logger.log_hyperparams(self.parts.hyperparameters())
        optimizers, schedulers = check_local_training(
            self.engine.local,
            self.data,
            rounds=self.parts.horizon.planned,
        )
        check_changing_data(self.data, self.parts, self.parts.horizon.planned)
        tell_of_early_stopping(self.data, self.trainer)
        tells_empty = check_samples(self.data, built(self._run).pace, self.parts.horizon.planned)
        self.parts.plateau.begin_fit(self.client, optimizers, schedulers)
        self._saved.begin_fit(self.trainer, self.global_weights)
        self._rounds = Rounds(built(self._run), built(self._server_step), tells_empty=tells_empty)
        if self.max_seconds is not None and self._is_last(-1):
            first = self._rounds.pace.ends(0) if self._rounds.pace else 0.0
            raise ValueError(
                f"model.max_seconds must leave time for a round, got {self.max_seconds}, and the first one ends after "
                f"{first:.4g} seconds; raise it"
            )
        self.forward_hook("on_fit_start")

    def on_train_start(self) -> None:
        self.data.to(self.device, early=not self.engine.local.transfer.moves)
        self.engine.local.scale_lr(self.parts.plateau.factors)
        periods = (self.evaluate_clients_every, self.evaluate_training_every, self._longest_period())
        self.fresh_values.begin_fit(self.trainer, periods)
        if self.recorder.pending_round is not None:
            self._plan_evaluation(self.recorder.pending_round)
        evaluates = self._rounds_between_clients() is not None
        self._clients_table.begin_fit(self.trainer, self.recorder.pending_round, evaluates=evaluates)
        if self.metrics is not None:
            self._metric_files.begin_fit(self.trainer)
        self._averages.begin_fit(self.trainer)
        # The run may go back to an earlier checkpoint, or to one that was saved before the end of its round.
        self.recorder.go_back(self.current_epoch)
        if self.current_epoch == 0 and self.recorder.pending_round is None:
            self.evaluation.initial_tasks()
        catch_up(self, self.data, self.recorder)
        self.forward_hook("on_train_start")
        # The client may have logged values before its first round.
        before_clients = self.parts.services.logged
        before_clients.end_client(NOBODY, self.client)
        self.recorder.logged.absorb(before_clients)
        self._stop_if_spent()

    def on_train_end(self) -> None:
        value = self.round_metrics.get(self.final_key)
        if value is not None:
            log_final(
                loggers=self.loggers,
                params=self.parts.hyperparameters(),
                value=value,
                round_idx=self.current_epoch,
            )
        if self.parts.is_private:
            spent = self.aggregator.summary() or self._spent_by_clients()
            rank_zero_info(f"{spent}; {self.data.seed_notice}")
        super().on_train_end()

    def _spent_by_clients(self) -> str:
        """Return a sentence about what the guarantees of clients have cost."""
        history = self.recorder.history
        spent = []
        for key in history.names:
            if key.startswith(PROMISED):
                largest = max(history.curve(key).values())
                spent.append(f"{key.removeprefix(PROMISED)} {largest:.4g}")
        return "privacy: " + ", ".join(spent)

    def _stop_if_spent(self) -> None:
        """End the run if the rule allows no further round, or if the next round would end too late."""
        if self.aggregator.is_spent or self._is_last(self.recorder.trained_rounds - 1):
            self.trainer.should_stop = True

    @property
    def last_round(self) -> int:
        """The last round that was trained, 0 before any."""
        return max(0, self.recorder.trained_rounds - 1)

    @property
    def _pace(self) -> Pace | None:
        """The pace of the fit. None without devices of the clients."""
        return None if self._rounds is None else self._rounds.pace

    @property
    def timeline(self) -> Timeline | None:
        """Who starts and comes back when in the fit. None without devices of the clients."""
        return None if self._pace is None else self._pace.timeline

    @property
    def tasks(self) -> Tasks | None:
        """The tables of tasks of the fit. None if the clients' data have no tasks."""
        return None if self._run is None else self._run.tasks

    def _is_last(self, round_idx: int) -> bool:
        """Return True if the round after a round would end after `max_seconds`."""
        if self.max_seconds is None or self._pace is None:
            return False
        return self._pace.ends(round_idx + 1) > self.max_seconds

    def _plan_evaluation(self, round_idx: int) -> None:
        """Let the Trainer evaluate the global model after a round if `evaluate_every_seconds` says so, else not."""
        if self.evaluate_every_seconds is None or self._pace is None:
            return
        timed = self._pace.timeline.round(round_idx)
        is_due = is_evaluated(timed, self.evaluate_every_seconds) or self._is_last(round_idx)
        is_due = is_due or round_idx + 1 == self.trainer.max_epochs
        # The Trainer evaluates after each round whose number is a multiple.
        self._planned_interval = 1 if is_due else round_idx + 2
        self.trainer.check_val_every_n_epoch = self._planned_interval

    # --- the round ---

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Run one round: every exchange with every client of the cohort, the aggregation, and one server step."""
        round_idx = self.current_epoch
        values = self._run_round(round_idx)
        if self._pace is not None:
            values |= self._pace.row(round_idx)
            self._pace.tell_bytes(round_idx, values)
            self._plan_evaluation(round_idx)
        if self.parts.is_private:
            values = self.parts.marked(values)
        if self.parts.server_lr_scheduler is not None:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        if round_idx == 0:
            values |= bytes_of_sets(self.data, self.parts.needs)
        self.recorder.end_training(round_idx, values)
        self._publish(values)
        self._averages.end_training(self.trainer, self)

    def cohort_of(self, round_idx: int) -> list[int]:
        """Return the ids of the clients whose updates a round takes, in order.

        Args:
            round_idx: Index of the round.
        """
        return self.data.cohort(round_idx) if self._pace is None else self._pace.cohort(round_idx)

    def _run_round(self, round_idx: int) -> dict[str, float]:
        """Run a round, and return its values by log key."""
        rounds = cast(Rounds, self._rounds)
        optimizer = cast(Optimizer, self.optimizers())
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        with self._without_autocast(), torch.enable_grad():
            return rounds.run(
                round_idx=round_idx,
                cohort=self.cohort_of(round_idx),
                step=optimizer.step,
                scaler=scaler,
            )

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which the Trainer's autocast is off.

        Only a client's forward runs under autocast. If the round did, an autocast of the client's own module would
        keep weights that were cast before an optimizer step.
        """
        device_type = self.device.type
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            return torch.autocast(device_type, enabled=False)
        return nullcontext()

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        """Make the evaluations that are due besides validation, and keep the row.

        This is not part of `training_step`, because an interruption there would undo the complete round.
        """
        round_idx = cast(int, self.recorder.pending_round)
        if self._is_due("clients", round_idx, every=self._rounds_between_clients()):
            self._evaluate_clients(round_idx)
            self.recorder.evaluations.add("clients")
        if self._is_due("training samples", round_idx, every=self.evaluate_training_every):
            self._evaluate_training_samples(round_idx)
            self.recorder.evaluations.add("training samples")
        self.recorder.keep_round(round_idx)
        self._stop_if_spent()

    def _is_due(self, evaluation: str, round_idx: int, *, every: int | None) -> bool:
        """Return True if an evaluation must be made after a round, and a checkpoint does not have it already.

        Args:
            evaluation: Name of the evaluation.
            round_idx: Index of the round.
            every: Number of rounds from one to the next. None is never.
        """
        return evaluation not in self.recorder.evaluations and comes_after(round_idx, every)

    def scoring_after(self, round_idx: int) -> Scoring | None:
        """Return how the clients are evaluated after a round, or None if they are not.

        Args:
            round_idx: Index of the round, which may be under way.
        """
        if not comes_after(round_idx, self._rounds_between_clients()):
            return None
        return self.evaluation.of_clients.how("validation")

    def _rounds_between_clients(self) -> int | None:
        """Return the number of rounds after which the clients are evaluated, or None if they never are."""
        if self.data.pooled or not measures(self.client, self.metrics):
            return None
        if self.evaluate_clients_every is None and self.global_weights.own_models:
            return 1
        return self.evaluate_clients_every

    def _longest_period(self) -> int | None:
        """Return a number of rounds that no evaluation by seconds is apart from the next, or None without such ones."""
        return None if self.evaluate_every_seconds is None else MOST_ROUNDS

    def _evaluate_clients(self, round_idx: int) -> None:
        """Add the means over the clients to the row of a round."""
        values, of_clients = self.evaluation.of_clients.evaluate(round_idx, "validation")
        self.recorder.take_client_values(
            {client_id: self.parts.marked(found) for client_id, found in of_clients.items()}
        )
        if self.global_weights.own_models:
            self.final_key = summary_key(values) or ""
        values |= self.evaluation.of_clients.task_values(round_idx, "validation")
        self.add_to_row(self.parts.marked(values))

    def _evaluate_training_samples(self, round_idx: int) -> None:
        """Add the values of the global model on all clients' training samples to the row of a round."""
        self.add_to_row(self.parts.marked(self.evaluation.of_training.evaluate(round_idx)))

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the round in the client hooks of callbacks, and as Lightning does outside of rounds.

        Raises:
            ValueError: The loop writes a value of that name itself.
        """
        check_writer(name, "monitors")
        if self._under_way is None:
            super().log(name, value, *args, **kwargs)
            return
        self.recorder.log(
            key=name,
            value=value,
            weight=kwargs.get("batch_size") or 1,
            reduce=kwargs.get("reduce_fx", "mean"),
        )

    def add_to_row(self, values: Mapping[str, float]) -> None:
        """Add values to the row of the round, once its training is over."""
        self.round_metrics.update(values)
        self._publish(values)

    def _publish(self, values: Mapping[str, float]) -> None:
        """Show values of the round to callbacks that monitor them.

        `self.log` would cost 0.75 ms a key and round.
        """
        # The tensors of all keys are made at once, because making each by itself would cost as much.
        if self.parts.is_private:
            values = by_all_names(values)
        self.fresh_values.publish(values, round_idx=self.recorder.trained_rounds - 1)
        tensors = torch.tensor(list(values.values())).unbind()
        self.trainer.callback_metrics.update(zip(values, tensors, strict=True))

    def on_train_epoch_end(self) -> None:
        """Hand the round's values to the loggers, at x = round."""
        round_idx = self.recorder.take_pending()
        if round_idx is None:
            return
        for logger in self.loggers:
            logger.log_metrics(self.round_metrics, step=round_idx)
            log_directions = getattr(logger, "log_directions", None)
            if log_directions is not None and self.recorder.directions:
                log_directions(self.recorder.directions)
        self._clients_table.write(
            round_idx, self.recorder.client_values, self.data.client_names, unseen=self.data.unseen_clients
        )
        is_evaluated = self.recorder.evaluated_rounds > round_idx
        self.parts.plateau.step(
            round_idx=round_idx,
            values=self.round_metrics,
            is_evaluated=is_evaluated or not self.trainer.enable_validation,
        )
        self.engine.local.scale_lr(self.parts.plateau.factors)

    # --- evaluation ---

    def transferred(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch of samples as the hooks and steps of an evaluation see it, for the data module.

        Args:
            batch: The batch of the loader.
            dataloader_idx: Index of the loader.
        """
        return self.evaluation.transferred(batch, dataloader_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step(kind="validation", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._end_evaluation("on_validation_epoch_end", prefix=self.data.evaluated_prefix)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.step(kind="test", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self._end_evaluation("on_test_epoch_end", "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluation.predict(batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

    def _end_evaluation(self, hook: str, prefix: str) -> None:
        """End an evaluation, and report its values.

        Args:
            hook: Name of the module's hook `on_*_epoch_end`.
            prefix: Beginning of the log keys.
        """
        self.parts.evaluation_services.begin_loader("")
        if self.forwarded_hooks(hook):
            self._show_logged(self.evaluation.logged_so_far())
        self.forward_hook(hook)
        last_hooks = self.forwarded_hooks(hook.replace("_epoch_end", "_end"))
        values = self.evaluation.end(prefix, hook_follows=bool(last_hooks))
        if self.trainer.sanity_checking:
            if last_hooks:
                self._show_logged(values)
            return
        if self.trainer.state.fn == "fit":
            self._add_evaluation(values, prefix)
        else:
            self._log_evaluation(values)

    def _show_logged(self, values: Mapping[str, float]) -> None:
        """Show the last hooks of an evaluation the values that the module has logged in it, as Lightning does."""
        found = {key: torch.tensor(value) for key, value in values.items()}
        self.trainer.callback_metrics.update(found)
        self.trainer.logged_metrics.update(found)

    def _add_evaluation(self, values: dict[str, float], prefix: str) -> None:
        """Add the values of an evaluation to the row of its round."""
        round_idx = cast(int, self.recorder.pending_round)
        if not self.global_weights.own_models:
            self.final_key = summary_key(values) or ""
        self.recorder.end_evaluation(round_idx)
        forgetting = self.recorder.forgetting()
        if forgetting is not None:
            values = {**values, f"{prefix}/forgetting": forgetting}
        values |= self.evaluation.task_values(prefix, round_idx)
        self.add_to_row(values)
        self.recorder.keep_round(round_idx)
        self._metric_files.write(round_idx, self.evaluation.arrays)

    def _log_evaluation(self, values: dict[str, float]) -> None:
        """Log the values of an evaluation outside of a fit, and those of the clients if they tell more."""
        if self.evaluates_clients_too:
            kind: Kind = "test" if self.trainer.state.fn == "test" else "validation"
            means, of_clients = self.evaluation.of_clients.evaluate(self.last_round, kind)
            self.recorder.take_client_values(of_clients)
            values |= self.parts.marked(means)
        for name, value in values.items():
            # The keys of one of several loaders have its index already.
            super().log(name, value, add_dataloader_idx=False)

    @property
    def evaluates_clients_too(self) -> bool:
        """Whether an evaluation outside of a fit has values of the clients besides those of the global model."""
        if self.data.pooled or self.data.tested_client is not None:
            return False
        if self.global_weights.own_models or self.parts.evaluates_all_clients:
            return True
        has_more = self.parts.fine_tuning is not None or bool(self.data.unseen_clients)
        return has_more and measures(self.client, self.metrics)

    # --- checkpoints ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the last whole round.

        Inside a round or an evaluation it has the weights from before.
        """
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

        Outside of a fit this builds the net first. Entries that are allocated later are kept until then.
        """
        strict = strict and all(module.strict_loading for module in self.client_modules())
        find_entries = self.state_dict if self._server is None else None
        state = self._saved.loadable(state_dict, find_entries)
        return super().load_state_dict(state, strict=strict, assign=assign)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        if stage == "fit" and self.evaluate_every_seconds is not None:
            self._planned_interval = 1
            self.trainer.check_val_every_n_epoch = 1
        self.data.tested_client = None
        self.parts.end_run()
        self.fresh_values.end_fit()
        self._averages.end_fit()
        self._handed_over = parent_process() is not None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved.save(
            checkpoint=checkpoint,
            members=built(self._run).members,
            undo=self._under_way,
            schema=self.data.source.schema,
            owners=self.data.owner_names,
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Without a server this is load_from_checkpoint, before any data are known.
        trainer = None if self._server is None else self.trainer
        self._saved.load(checkpoint=checkpoint, find=self.state_dict, trainer=trainer)
        if trainer is not None:
            if trainer.state.fn != "fit" and "current_model_state" in checkpoint:
                # A callback that averages weights would load the weights that a fit goes on with.
                checkpoint["current_model_state"] = checkpoint["state_dict"]
            if trainer.state.fn != "fit":  # A fit copies the files into its own folder.
                self.store.look_beside(trainer.ckpt_path)
            self._saved.give(built(self._run).members, self.global_weights)


def built(part: Part | None) -> Part:
    """Return a part that exists once a Trainer has set the loop up.

    Raises:
        RuntimeError: The part does not exist yet.
    """
    if part is None:
        raise RuntimeError("a FederatedLoop has no federation before a Trainer has set it up; call trainer.fit first")
    return part


def comes_after(round_idx: int, every: int | None) -> bool:
    """Return True if something that is made every so many rounds is made after a round.

    >>> comes_after(3, every=2), comes_after(4, every=2), comes_after(0, every=None)
    (True, False, False)
    """
    return every is not None and (round_idx + 1) % every == 0
