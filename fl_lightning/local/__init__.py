"""What stands in for the Trainer while the loop trains one client."""

from fl_lightning.local.lending import Desk, LogBook
from fl_lightning.local.training import LocalTrainer

__all__ = ["Desk", "LocalTrainer", "LogBook"]
