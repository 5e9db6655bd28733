"""The objects of one run of a Trainer: communicator, members and engines."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from pytorch_lightning import Trainer

from fl_lightning.client.checks import are_foreign
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.clock import ClientClock
from fl_lightning.engines.cohort import IGNORES, CohortEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.federation import checks
from fl_lightning.federation.checkpoint import modules_by_prefix
from fl_lightning.federation.costs import sample_costs
from fl_lightning.federation.members import ClientRecords, members_of
from fl_lightning.federation.pace import Pace, pace_of
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.server import Server
from fl_lightning.members.messages import Messages
from fl_lightning.members.tasks import Tasks
from fl_lightning.members.user_entries import Forward, UserEntries
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import Engine
from fl_lightning.utils.packages import is_of_lightning

CHANGING = ("LambdaCallback", "BaseFinetuning", "ModelPruning")
"""Names of callbacks of Lightning that call functions of the user, or that change modules."""


class FederatedRun:
    """Holds the objects of one run of a Trainer.

    Args:
        parts: The parts of the federation.
        server: The server.
        trainer: The Trainer of the run. It is not kept, so that a loop can be copied.
        forward: A function that calls a hook of one of the client's modules.
        engine_factory: A function that gets the engine of this process, and makes the engine that trains and tests
            the clients. None means the engine of this process.

    Attributes:
        data: The data module.
        communicator: The communicator of the processes of the run.
        records: The member that holds the memory and personal entries of the clients.
        members: All members of a round, in order.
    """

    def __init__(
        self,
        *,
        parts: FederationParts,
        server: Server,
        trainer: Trainer,
        forward: Forward,
        engine_factory: Callable[[SequentialEngine], Engine] | None,
    ) -> None:
        self.parts = parts
        self.server = server
        self.data = trainer.datamodule  # type: ignore[attr-defined]
        self.communicator = current_communicator(trainer.strategy.root_device)
        self.records = ClientRecords(
            store=parts.store,
            communicator=self.communicator,
            global_weights=server.global_weights,
            initial=parts.initial_personal,
            cost=self._cost_of_record,
        )
        self.members = members_of(
            parts=parts,
            server=server,
            communicator=self.communicator,
            records=self.records,
            entries=UserEntries(modules_by_prefix(parts.client), forward),
            scenario=self.data.scenario,
        )
        self._engine_factory = engine_factory
        # The engine may be made within an evaluation, when Lightning has put all modules in eval mode.
        self._modes = [(module, module.training) for module in parts.client.modules()]

    @cached_property
    def engine(self) -> SequentialEngine:
        """The engine of this process."""
        parts = self.parts
        trainer = self.data.trainer
        settings = parts.local_settings()
        make: Callable[..., SequentialEngine] = SequentialEngine
        if parts.execution.chunk != 1:
            make = partial(CohortEngine, chunk=parts.execution.chunk, watches=self._is_watched())
        engine = make(
            client=parts.client,
            settings=settings,
            global_weights=self.server.global_weights,
            services=parts.services,
            device=parts.client.device,
            precision=trainer.precision_plugin,
            datamodule=getattr(self.data.source, "datamodule", None),
            hooks=parts.hooks,
            batch_hooks=parts.batch_hooks,
            members=self.members,
            tolerant=parts.faults.on_error == "skip",
            clock=ClientClock(settings, rounds=parts.horizon.rounds),
            inquiry=parts.server_module.inquiry,
        )
        engine.local.know_modes(self._modes)
        return engine

    @cached_property
    def clients_engine(self) -> Engine:
        """The engine that trains and tests the clients, in this process or elsewhere."""
        if self._engine_factory is None:
            return self.engine
        return self._engine_factory(self.engine)

    @cached_property
    def pace(self) -> Pace | None:
        """The pace of the fit. None: the data have no devices, so that all clients of a round come back in it.

        Raises:
            ValueError: The clients are at nodes of their own, or the devices do not fit.
        """
        if self.data.devices is None:
            return None
        if getattr(self.clients_engine, "is_remote", False):
            raise ValueError(
                "data.devices belong to simulations, and this federation's clients are at nodes, which take their own "
                "time; leave them out"
            )
        pace = pace_of(
            pacing=self.parts.pacing,
            data=self.data,
            local=self.engine.local,
            global_weights=self.server.global_weights,
            codec=self.parts.codec,
        )
        if pace is not None and self.messages is not None:
            self.messages.has_arrived = pace.timeline.arrived_before
        return pace

    @cached_property
    def tasks(self) -> Tasks | None:
        """The member that keeps the tables of tasks. None: the data have no tasks."""
        kept = [member for member in self.members.all if isinstance(member, Tasks)]
        return kept[0] if kept else None

    @cached_property
    def messages(self) -> Messages | None:
        """The member that keeps messages to clients at work. None: every client comes back in its round."""
        kept = [member for member in self.members.all if isinstance(member, Messages)]
        return kept[0] if kept else None

    @cached_property
    def client_cost(self) -> Callable[[int], int]:
        """The function that returns the cost of a client, by which clients are spread over processes.

        The cost is the number of samples. If the nets differ, it is multiplied by the operations of one sample. Clients
        whose samples are not read cost the same.
        """
        if self.data.is_unread:
            return equal_cost
        net = self.parts.client.net
        size = self.server.size
        if self.communicator.world == 1 or not isinstance(net, HeterogeneousNets):
            return size
        costs = sample_costs(net.nets, net.input_shape)
        return partial(cost_with_net, size=size, costs=costs)

    def _cost_of_record(self, client_id: int) -> int:
        """Return the cost of a client of a checkpoint, 0 if the data do not have the client."""
        return self.client_cost(client_id) if client_id < self.data.num_clients else 0

    def _is_watched(self) -> bool:
        """Return True if the user's own code may change the client module between two rounds."""
        parts = self.parts
        trainer = self.data.trainer
        callbacks = [callback for callback in trainer.callbacks if IGNORES not in vars(type(callback))]
        if any(is_of_lightning(callback, CHANGING) for callback in callbacks):
            return True
        owners = [trainer.lightning_module, *callbacks, parts.aggregator, parts.server_module, *parts.transforms]
        return are_foreign(owners)

    def begin_fit(self) -> None:
        """Open the store and limit the threads.

        Raises:
            ValueError: A transform does not work with several processes.
            Exception: The store could not be opened, in this or another process.
        """
        if not torch.cuda.is_available():
            # Every step of Adam asks whether there is CUDA, and the check that Lightning has chosen is slow.
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        parts = self.parts
        parts.execution.limit_threads()
        checks.check_transforms(parts.transforms, self.communicator.world)
        error: Exception | None = None
        try:
            parts.store.begin_fit(self.data.trainer, parts.client.device)
        except Exception as problem:
            error = problem
        self.communicator.all_gather_or_raise(None, error)
        exchanges = () if self.data.pooled else parts.exchanges
        parts.recorder.traffic.begin_fit(exchanges)


def equal_cost(_client_id: int) -> int:
    """Return the cost of a client whose samples are not read."""
    return 1


def cost_with_net(client_id: int, size: Callable[[int], int], costs: Sequence[int]) -> int:
    """Return the cost of a client with one of several nets.

    Args:
        client_id: Id of the client, from 0.
        size: Returns the number of samples of a client.
        costs: The operations of one sample, by net. Client i has net i modulo the number of nets.
    """
    return size(client_id) * costs[client_id % len(costs)]
