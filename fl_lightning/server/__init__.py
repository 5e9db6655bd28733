"""The server's side of a round: the global weights, the server optimizer, traffic, and what is refused at start."""

from fl_lightning.server.checks import check_entries, check_trainer
from fl_lightning.server.optimizer import ServerOptimizer
from fl_lightning.server.traffic import traffic
from fl_lightning.server.weights import GlobalWeights, Server

__all__ = ["GlobalWeights", "Server", "ServerOptimizer", "check_entries", "check_trainer", "traffic"]
