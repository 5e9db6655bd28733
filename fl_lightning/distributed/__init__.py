"""Several processes: the strategy that spreads clients over them, and their communicator."""

from fl_lightning.distributed.communicator import Communicator, current_communicator, to_device
from fl_lightning.distributed.strategy import ClientParallelStrategy
from fl_lightning.distributed.watch import RemoteError

__all__ = ["ClientParallelStrategy", "Communicator", "RemoteError", "current_communicator", "to_device"]
