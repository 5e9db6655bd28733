"""Several processes: the strategy that spreads clients over them, and what they tell each other."""

from fl_lightning.distributed.communicator import Communicator, RemoteError, to_device
from fl_lightning.distributed.strategy import ClientParallelStrategy

__all__ = ["ClientParallelStrategy", "Communicator", "RemoteError", "to_device"]
