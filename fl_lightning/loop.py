"""The federation as a LightningModule: one training step of it is one communication round."""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fl_lightning.aggregation import Aggregator
from fl_lightning.checkpoints import Checkpoints, read_checkpoint
from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.evaluation import Evaluation
from fl_lightning.functional.state import clone
from fl_lightning.local import Desk, LogBook
from fl_lightning.local.hooks import Placement, hooks, refuse_unforwarded
from fl_lightning.local.training import needs_closure
from fl_lightning.modules import check_module
from fl_lightning.rounds import NonFiniteUpdateError, RoundRunner
from fl_lightning.server import GlobalWeights, Server, ServerOptimizer, check_entries, check_trainer
from fl_lightning.store import ClientStore
from fl_lightning.strategy import Ranks
from fl_lightning.types import State
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

__all__ = ["FederatedLoop", "NonFiniteUpdateError"]


class FederatedLoop(Checkpoints):
    """Federates a client module: each epoch of the Trainer is one round of the federation.

    Args:
        client: what every client trains: a ClientModule, or any LightningModule (then by FedAvg).
        aggregator: turns updates into the next model; None: the client's `aggregator_class`.
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
        alma_every: every so many rounds evaluate what each of the N clients would deploy on its own test split; None:
            never, or every round where the clients share no weights (there is no global model to evaluate).
        initial_weights: a checkpoint or state-dict file to start from.
        threads: of this process for torch operations; None: left alone.
        seed: keys batches, dropout and initial weights; None: that of `seed_everything`, else 0.
        store: where clients keep their memory and personal entries between rounds; None: up to 4 GB in host memory,
            beyond in files of the run's folder.
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
        alma_every: int | None = None,
        initial_weights: str | Path | None = None,
        threads: int | None = None,
        seed: int | None = None,
        store: ClientStore | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_module(client)
        self.client = client if isinstance(client, ClientModule) else ClientModule(module=client)
        self.aggregator = self.client.aggregator_class() if aggregator is None else aggregator
        self.aggregator.weighting = weighting
        if not isinstance(self.aggregator, self.client.aggregator_class):
            raise ValueError(
                f"{type(self.client).__name__} needs a {self.client.aggregator_class.__name__}, got "
                f"{type(self.aggregator).__name__}; leave aggregator unset to take the right one"
            )
        check_at_least(0, local_epochs=min(local_epochs, default=0) if isinstance(local_epochs, list) else local_epochs)
        check_at_least(1, max_local_steps=max_local_steps, accumulate_grad_batches=accumulate_grad_batches)
        check_at_least(1, alma_every=alma_every, threads=threads)
        check_above(0, lr_decay=lr_decay, clip_norm=clip_norm)
        check_choice(("samples", "uniform"), weighting=weighting)
        check_choice(("error", "skip"), nonfinite=nonfinite)
        if server_lr_scheduler is not None and server_optimizer is None:
            raise ValueError("server_lr_scheduler needs a server_optimizer, got none; set model.server_optimizer")
        for module in self.client_modules():
            refuse_unforwarded(module)
        self.server_optimizer, self.server_lr_scheduler = server_optimizer, server_lr_scheduler
        self.local_epochs, self.max_local_steps, self.lr_decay = local_epochs, max_local_steps, lr_decay
        self.accumulate_grad_batches, self.clip_norm = accumulate_grad_batches, clip_norm
        self.personal = (personal,) if isinstance(personal, str) else tuple(personal or ())
        self.nonfinite, self.alma_every = nonfinite, alma_every
        self.initial_weights, self.threads = initial_weights, threads
        self._seed = seed
        self.store = store or ClientStore()
        self.book = LogBook()
        self.desk = Desk(self.book)
        self.evaluation = Evaluation(self)
        self.row: dict[str, float] = {}
        self.row_round: int | None = None
        self.weights: GlobalWeights | None = None
        self.initial_personal: State = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch's, but without its search for plain values: Lightning notes the running hook 80 times a round."""
        if isinstance(value, str | None) and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # --- setup -------------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Keys every draw of the run."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    @property
    def data(self) -> FederatedDataModule:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined,no-any-return]

    def client_modules(self) -> list[LightningModule]:
        return list(self.client.lightning_modules())

    def configure_callbacks(self) -> list[Callback]:
        check_trainer(self.trainer)  # the earliest hook: before Lightning refuses some settings in its own words
        found: list[Callback] = []
        for hook in hooks(self.client_modules(), "configure_callbacks"):
            result = hook()
            found += [result] if isinstance(result, Callback) else list(result)
        return found

    def setup(self, stage: str) -> None:
        self.handed_over = False
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, FederatedDataModule):
            raise TypeError(
                f"a FederatedLoop needs datamodule=FederatedDataModule(...), got {type(data).__name__}; wrap your data "
                f"in one"
            )
        for name in sorted(self.client.needs - {"logits"}):
            try:
                data.split(name)
            except ValueError as error:
                raise ValueError(f"{type(self.client).__name__} needs the split {name!r}: {error}") from None
        data.key_batches(self.seed)
        self.client.forward_context = self._forward_context()
        if self.weights is not None:
            self.client.build(data.num_classes, data.input_shape)  # refuses data of another kind than the last fit's
            self.server.attach(data)
        if isinstance(self.local_epochs, list) and len(self.local_epochs) != data.num_clients:
            raise ValueError(
                f"local_epochs as a list needs one number per client ({data.num_clients}), got {len(self.local_epochs)}"
            )
        self.forward_hook("setup", stage)

    def configure_model(self) -> None:
        """Build the net from what the data know, then everything that a checkpoint is restored into."""
        try:
            data = self.data
        except RuntimeError:  # no Trainer yet: load_from_checkpoint, which knows from the checkpoint what to build
            return
        if self.weights is not None:
            return
        torch.default_generator.manual_seed(keyed_seed(self.seed, "weights"))
        client = self.client
        client.configure_model()
        if client.module is None:
            client.build(data.num_classes, data.input_shape)
        self.weights = GlobalWeights(client, self.personal)
        if self.initial_weights is not None:
            self._load_initial(Path(self.initial_weights))
        Ranks().broadcast_(list(self.weights.live(list(self.weights.entries)).values()))
        self.initial_personal = self.initial_personal or clone(self.weights.live(self.weights.personal))
        self.aggregator.server = self.server = Server(self.weights, data, self.store, lambda: self.seed)
        self.aggregator.setup()
        if self.aggregator_later:
            later = {name.removeprefix("aggregator."): value for name, value in self.aggregator_later.items()}
            self.aggregator.load_state_dict(later, strict=False)
            self.aggregator_later = {}

    def _load_initial(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"initial_weights must be a file, got {path}; give a checkpoint or a state dict")
        found = read_checkpoint(path)
        state = {
            name.removeprefix("client."): value
            for name, value in found.get("state_dict", found).items()
            if not name.startswith("aggregator.")
        }
        own = self.client.state_dict()
        if self.client.module is not None and not own.keys() & state.keys():  # of the module by itself
            state = {f"module.{name}": value for name, value in state.items()}
        check_entries(own, state)
        self.client.load_state_dict(state)

    def configure_optimizers(self) -> Any:
        assert self.weights is not None
        trainable = {name: value for name, value in self.server.weights.items() if name in self.server.trainable}
        if self.server_optimizer is not None and not trainable:
            raise ValueError(
                "a server_optimizer needs trainable entries that the clients share, got none; leave it unset, or "
                "make fewer entries personal"
            )
        self.server_step = ServerOptimizer(self.server_optimizer, trainable)
        optimizer = self.server_step.optimizer
        if needs_closure(optimizer):
            raise ValueError(
                f"a server_optimizer is given one gradient a round, and {type(optimizer).__name__} asks for more; take "
                f"one whose step needs no closure, such as SGD or Adam"
            )
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
        assert self.weights is not None
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.evaluation.restore()
        if self.data.schedule is not None and self.trainer.max_epochs not in (None, -1):
            self.data.cohort(max(self.trainer.max_epochs, 1) - 1)  # one that is too short is refused here
        error: Exception | None = None
        try:
            self.store.start(self.trainer, self.device)
        except Exception as problem:
            error = problem
        Ranks(self.device).agree(None, error)
        self.runner = RoundRunner(self)
        self.forward_hook("on_fit_start")

    def _forward_context(self) -> Callable[[], Any]:
        plugin = self.trainer.precision_plugin
        return nullcontext if str(plugin.precision) == "32-true" else plugin.forward_context

    def on_train_start(self) -> None:
        self.data.to(self.device)
        if self.row_round is not None and self.row_round < self.current_epoch:
            self._write_row()  # resumed from a checkpoint taken within the end of that round
        self.forward_hook("on_train_start")

    # --- the round ---------------------------------------------------------------------------------------------

    def training_step(self, batch: int, batch_idx: int) -> None:
        """One round: every exchange with every client of the cohort, the aggregation, and one server step."""
        assert self.weights is not None
        round_idx = self.current_epoch
        with self.runner.inside() as before:
            start = {name: before[name] for name in self.weights.shared}
            result = self.runner.run(round_idx, self.data.cohort(round_idx), start)
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            step: Any = self.optimizers()
            self.weights.load(self.server_step.step(start, result.new, step.step, scaler))
            if self.server_lr_scheduler is not None:
                self.lr_schedulers().step()  # type: ignore[union-attr]
            self.weights.load(result.personal or {name: before[name] for name in self.weights.personal})
            self.store.put(result.records, round_idx)
        self.row, self.row_round = result.values, round_idx
        self._publish(self.row)

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        """Here, not in the step: an interruption among the N clients must not undo a round that is complete."""
        round_idx = self.current_epoch
        assert self.weights is not None
        every = self.alma_every or (1 if self.weights.own_models else None)
        if every is not None and (round_idx + 1) % every == 0:
            self.row["local/alma"] = self.evaluation.alma(round_idx)
            self._publish(self.row)

    def _publish(self, values: dict[str, float]) -> None:
        """Show values to callbacks that monitor them (`self.log` would cost 0.75 ms a key and round)."""
        tensors = torch.tensor(list(values.values())).unbind()  # one tensor for all: each would cost as much
        self.trainer.callback_metrics.update(zip(values, tensors, strict=True))

    def on_train_epoch_end(self) -> None:
        self._write_row()

    def _write_row(self) -> None:
        """Hand the round's values to the loggers, at x = round."""
        if self.row_round is not None:
            for logger in self.loggers:
                logger.log_metrics(self.row, step=self.row_round)
        self.row_round = None

    def placement(self) -> Placement:
        """What puts a batch on the device, through the user's own transfer hooks."""
        datamodule = getattr(self.data.source, "datamodule", None)
        return Placement(self.client_modules(), self.trainer.precision_plugin, self.device, datamodule)

    # --- evaluation --------------------------------------------------------------------------------------------

    def desk_of(self, hook: str) -> Desk:
        evaluates = hook.startswith(("on_validation", "on_test", "on_predict"))
        return self.evaluation.desk if evaluates else self.desk

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
        if self.weights is not None and self.weights.own_models and self.trainer.state.fn != "fit":
            self.runner = RoundRunner(self)
            values["local/alma"] = self.evaluation.alma(self.current_epoch)
        if self.trainer.state.fn == "fit":
            if self.evaluation.class_accuracy is not None:
                values[f"{prefix}/forgetting"] = self.evaluation.forgetting()
            self.row |= values
            self._publish(values)
        else:
            self.log_dict(values)
