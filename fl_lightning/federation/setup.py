"""One run of a Trainer: how members, engines, evaluation and rounds are made of the parts of a federation."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

from pytorch_lightning import Trainer

from fl_lightning.client.services import ClientServices
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.cohort import CohortEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import decay_of
from fl_lightning.federation import checks
from fl_lightning.federation.members import ClientRecords, members_of
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.server import Server
from fl_lightning.members.user_entries import Forward, UserEntries
from fl_lightning.types import Engine


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
        self.members = members_of(parts, server, self.communicator, self.records, entries)

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
        decay = decay_of(parts.settings.lr_decay, trainer.max_epochs)
        settings = replace(parts.settings, seed=parts.seed, lr_decay=decay, client_timeout=faults.client_timeout)
        if probes:
            settings, services, hooks = replace(settings, max_local_steps=1), ClientServices(), {}
        make: Callable[..., SequentialEngine] = SequentialEngine if chunk == 1 else partial(CohortEngine, chunk=chunk)
        where = client.device, trainer.precision_plugin, getattr(self.data.source, "datamodule", None)
        more = {"batch_hooks": parts.batch_hooks, "members": self.members, "tolerant": faults.on_error == "skip"}
        return make(client, settings, self.server.global_weights, services, *where, hooks, **more)

    def begin_fit(self) -> None:
        """Open the store and limit the threads.

        Raises:
            ValueError: a transform that does not go with several processes.
            Exception: as the store's start, on whichever process.
        """
        parts, error = self.parts, None
        parts.execution.limit_threads()
        checks.check_transforms(parts.transforms, self.communicator.world)
        try:
            parts.store.start(parts.client.trainer, parts.client.device)
        except Exception as problem:
            error = problem
        self.communicator.all_gather_or_raise(None, error)
        parts.recorder.traffic.start(parts.client.exchanges)
