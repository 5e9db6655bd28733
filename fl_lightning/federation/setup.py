"""One run of a Trainer: how members, engines, evaluation and rounds are made of the parts of a federation."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BaseFinetuning, LambdaCallback, ModelPruning

from fl_lightning.client.checks import are_foreign
from fl_lightning.client.services import ClientServices
from fl_lightning.data import FederatedDataModule
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.cohort import IGNORES, CohortEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.federation import checks
from fl_lightning.federation.members import ClientRecords, members_of
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.server import Server
from fl_lightning.members.pace import Pace
from fl_lightning.members.user_entries import Forward, UserEntries
from fl_lightning.types import Engine
from fl_lightning.utils.settings import as_list

CHANGING = (LambdaCallback, BaseFinetuning, ModelPruning)
"""Callbacks of Lightning's that call functions of others, or change modules."""


class FederatedRun:
    """Makes what one run of a Trainer needs of the parts of a federation, each when it is first asked for.

    Args:
        parts: of the federation.
        server: of the federation.
        trainer: of the run, which is not kept: a loop can be copied.
        forward: calls a hook of the client's modules.
        engine_factory: makes, of the engine that trains in this process, what trains and tests the clients in its
            place; None: that engine itself.

    Attributes:
        data: of the federation.
        communicator: joins the processes of the run.
        records: the member that has the clients' memory and personal entries.
        pace: the member that measures clients, where they are spread over processes by their seconds; else None.
        members: all that takes part in a round, in order.
    """

    def __init__(
        self,
        parts: FederationParts,
        server: Server,
        trainer: Trainer,
        forward: Forward,
        engine_factory: Callable[[SequentialEngine], Engine] | None,
    ) -> None:
        self.parts, self.server, self._engine_factory = parts, server, engine_factory
        self.data = trainer.datamodule  # type: ignore[attr-defined]
        self.communicator = current_communicator(trainer.strategy.root_device)
        self.records = ClientRecords(parts.store, self.communicator, server.global_weights, parts.initial_personal)
        entries = UserEntries(parts.client.lightning_modules(), forward)
        by_seconds = checks.spreads_by_seconds(trainer.strategy, parts.execution.chunk)
        self.pace = Pace(server.size) if by_seconds and self.communicator.world > 1 else None
        self.members = members_of(parts, server, self.communicator, self.records, entries, self.pace)

    @cached_property
    def engine(self) -> SequentialEngine:
        """Engine that trains the clients in this process."""
        return self.make_engine()

    @cached_property
    def clients_engine(self) -> Engine:
        """Engine that trains and tests the clients, here or elsewhere."""
        return self.engine if self._engine_factory is None else self._engine_factory(self.engine)

    def make_engine(self, probes: bool = False) -> SequentialEngine:
        """Make an engine.

        `probes`: one whose clients take one step, of which nobody is told.
        """
        parts, client, faults, trainer = self.parts, self.parts.client, self.parts.faults, self.parts.client.trainer
        services, hooks, chunk = parts.services, parts.hooks, parts.execution.chunk
        settings = parts.local_settings(trainer.max_epochs)
        if probes:
            settings, services, hooks = replace(settings, max_local_steps=1), ClientServices(), {}
        make: Callable[..., SequentialEngine] = SequentialEngine
        if chunk != 1:
            make = partial(CohortEngine, chunk=chunk, watches=self._is_watched())
        where = client.device, trainer.precision_plugin, getattr(self.data.source, "datamodule", None)
        more = {"batch_hooks": parts.batch_hooks, "members": self.members, "tolerant": faults.on_error == "skip"}
        return make(client, settings, self.server.global_weights, services, *where, hooks, **more)

    def _is_watched(self) -> bool:
        """Return True where somebody's own code is handed the client module between two rounds."""
        trainer, parts = self.parts.client.trainer, self.parts
        callbacks = [callback for callback in trainer.callbacks if IGNORES not in vars(type(callback))]
        owners = (trainer.lightning_module, *callbacks, parts.aggregator, parts.server_module, *parts.transforms)
        return are_foreign(owners) or any(isinstance(callback, CHANGING) for callback in callbacks)

    def begin_fit(self) -> None:
        """Open the store and limit the threads.

        Raises:
            ValueError: a transform that does not go with several processes.
            Exception: as the store's start, on whichever process.
        """
        if not torch.cuda.is_available():  # each step of Adam asks: 80 µs in the way that Lightning chose, else 2
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        parts, error = self.parts, None
        parts.execution.limit_threads()
        checks.check_transforms(parts.transforms, self.communicator.world)
        try:
            parts.store.start(parts.client.trainer, parts.client.device)
        except Exception as problem:
            error = problem
        self.communicator.all_gather_or_raise(None, error)
        parts.recorder.traffic.start(() if self.data.pooled else parts.client.exchanges)


def catch_up(loop: LightningModule, data: FederatedDataModule, recorder: Recorder) -> None:
    """Complete the row of the round that no logger has yet, where a run is continued in the middle of its end.

    Lightning takes a round behind whose training a run was cut for evaluated.

    Its hooks `on_train_batch_end` and `on_train_epoch_end` and those of the validation are called, as far as they are
    due and Lightning does not call them; those of callbacks are not.

    Args:
        loop: of the federation.
        data: of the federation.
        recorder: of the loop; its row is then in the Trainer's `callback_metrics`, which no checkpoint holds.
    """
    round_idx, trainer = recorder.pending_round, loop.trainer
    if round_idx is None or round_idx > trainer.current_epoch or not trainer.global_step:
        return  # there is none, or it is of an earlier run of this loop
    loop.on_train_batch_end(None, None, 0)
    every = trainer.check_val_every_n_epoch or int(trainer.val_check_interval)
    if recorder.evaluated_rounds <= round_idx and trainer.enable_validation and (round_idx + 1) % every == 0:
        validate(loop, data)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in recorder.round_metrics.items()})
    if round_idx < trainer.current_epoch:
        loop.on_train_epoch_end()


def validate(loop: LightningModule, data: FederatedDataModule) -> None:
    """Call the hooks of a validation as the Trainer does, but for the callbacks'."""
    strategy, limit = loop.trainer.strategy, loop.trainer.limit_val_batches
    modes = [(module, module.training) for module in loop.modules()]
    with torch.no_grad():
        loop.on_validation_model_eval()
        loop.on_validation_start()
        loop.on_validation_epoch_start()
        for loader_idx, loader in enumerate(as_list(data.val_dataloader())):
            most = limit if isinstance(limit, int) else int(limit * len(loader))
            for batch_idx, batch in enumerate(islice(loader, most)):
                place = (batch_idx, loader_idx)
                there = strategy.batch_to_device(strategy.precision_plugin.convert_input(batch), None, loader_idx)
                loop.on_validation_batch_start(there, *place)
                outputs = strategy.validation_step(there, *place)
                loop.on_validation_batch_end(outputs, there, *place)
        loop.on_validation_epoch_end()
        loop.on_validation_end()
    for module, mode in modes:
        module.training = mode
